"""The estimators that the main job compares, as plans with names for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from analysis.measure.knot_search import Knots
from analysis.statistics.names import grouped_name
from jagg_core import Plan, causal_plan, endpoint_plan, exact_plan, jagg_plan, subsample_plan
from jagg_core.plans import estimators, find_estimator, groups_of, routed_groups
from jagg_core.seeding import generator_for

COMPARED_PASSES = (8, 5)
"""Numbers of passes at which everything is compared, whatever the windows."""

SUBSAMPLE_DRAWS = 16
"""Random subsets per rollout batch over which subsampling is averaged."""


@dataclass(frozen=True)
class Estimator:
    """A named plan, or several draws of a random one; ``settings`` go into the record.

    ``redraw`` gives a random plan's draws for a rollout batch by its number; ``plans`` are those of batch 0.
    """

    name: str
    label: str
    family: str
    plans: tuple[Plan, ...]
    settings: dict[str, Any]
    redraw: Callable[[int], tuple[Plan, ...]] | None = None

    def plans_of(self, batch: int) -> tuple[Plan, ...]:
        """The plans on a rollout batch: a random plan is drawn for each, so that an interval holds the draw."""
        return self.plans if self.redraw is None else self.redraw(batch)

    @property
    def passes(self) -> int:
        """Backward passes of one update; of the busiest sample, where each has its own knots."""
        plan = self.plans[0]
        return plan.passes if plan.weights.ndim == 2 else int((plan.weights != 0).any(-1).sum(-1).max())

    @property
    def anticipating(self) -> bool:
        """See `jagg_core.Plan.anticipating`."""
        return self.plans[0].anticipating

    @property
    def identity(self) -> tuple[Any, ...]:
        """What its gradient depends on: knots, weights and sites of every draw. Equal for two names of one plan.

        Weights count to twelve digits, since two formulas of one plan may round differently.
        """
        return tuple((plan.knots, _digits(plan.weights), _digits(plan.knot_sigmas)) for plan in self.plans)

    @property
    def key(self) -> list[Any]:
        """By what stored gradients of its first plan are found."""
        plan = self.plans[0]
        sites = None if plan.knot_sigmas is None else plan.knot_sigmas.tolist()
        return [self.name, plan.knots, plan.weights.tolist(), sites]

    def describe(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "estimator": self.name,
            "label": self.label,
            "family": self.family,
            "passes": self.passes,
            "anticipating": self.anticipating,
            **self.settings,
        }


def _digits(values: Tensor | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(f"{value:.12g}") for value in values.flatten().tolist())


def distinct(found: Sequence[Estimator]) -> list[Estimator]:
    """Keeps one estimator of every plan: the last one's name, at the first one's place."""
    return list({estimator.identity: estimator for estimator in found}.values())


def _one(name: str, label: str, family: str, plan: Plan, **settings: Any) -> Estimator:
    return Estimator(name, label, family, (plan,), settings)


def exact(sigmas: Tensor) -> Estimator:
    """The reference."""
    return _one("exact", "exact", "exact", exact_plan(sigmas))


def grouped(sigmas: Tensor, family: str, window: int, frac: float) -> Estimator:
    """JAGG (``jagg``), with index weights (``jagg-index``), or endpoint-only (``endpoint``)."""
    if family == "endpoint":
        plan, text = endpoint_plan(sigmas, window, frac), "endpoint-only"
    else:
        weighting = "index" if family == "jagg-index" else "sigma"
        plan = jagg_plan(sigmas, window, frac, weighting)  # type: ignore[arg-type]
        text = "JAGG, index weights" if family == "jagg-index" else "JAGG (paper)"
    groups = len(groups_of(sigmas.shape[-1], window))
    routed = routed_groups(groups, frac)
    label = f"{text}, W={window}, {routed} of {groups} groups"
    name = grouped_name(sigmas.shape[-1], family, window, frac)
    return _one(name, label, family, plan, window=window, jagg_frac=routed / groups)


def subsampled(sigmas: Tensor, count: int, seed: int) -> Estimator:
    """Random ``count`` of T steps, several draws for every rollout batch."""

    def redraw(batch: int) -> tuple[Plan, ...]:
        generators = [generator_for(seed, "subsample", count, batch, draw) for draw in range(SUBSAMPLE_DRAWS)]
        return tuple(subsample_plan(sigmas, count, generator) for generator in generators)

    label = f"subsample, {count} random steps"
    return Estimator(f"subsample-{count}", label, "subsample", redraw(0), {"draws": SUBSAMPLE_DRAWS}, redraw)


def with_knots(sigmas: Tensor, family: str, knots: tuple[int, ...]) -> Estimator:
    """Spline (linear weights) or causal plan on searched knots."""
    kind = "linear weights (spline)" if family == "spline" else family
    label = f"{kind}, {len(knots)} searched knots"
    return _one(f"{family}-{len(knots)}", label, family, find_estimator(family).build(sigmas, knots), knots=list(knots))


def measured(sigmas: Tensor, knots: Knots, counts: Sequence[int], *, recommended: bool) -> list[Estimator]:
    """Makes plans on searched knots with these numbers of passes, of the families that may be recommended or not."""
    families = [e.name for e in estimators(recommended=recommended) if e.name in knots]
    return [with_knots(sigmas, f, knots[f][count]) for f in families for count in counts if count in knots[f]]


def predicted(sigmas: Tensor, knots: Knots, counts: Sequence[int]) -> list[Estimator]:
    """Causal plans on predicted knots, with these numbers of passes; whole updates only."""
    found = []
    for passes in counts:
        if passes in knots["causal"]:
            plan = causal_plan(sigmas, knots["causal"][passes], predict=True)
            label, about = f"causal, {passes} predicted knots", {"knots": list(plan.knots), "whole_update_only": True}
            found.append(_one(f"causal-predicted-{passes}", label, "causal-predicted", plan, **about))
    return found


def headline(sigmas: Tensor, windows: tuple[int, ...], jagg_frac: float, knots: Knots, seed: int) -> list[Estimator]:
    """The estimators of the main tables: the paper's rule and its variants, and ours at the same numbers of passes."""
    chosen: list[Estimator] = []
    for window in windows:
        for frac in dict.fromkeys((jagg_frac, 1.0)):
            chosen += [grouped(sigmas, e.name, window, frac) for e in estimators(kind="groups")]
    steps = sigmas.shape[-1]
    budgets = sorted({e.passes for e in chosen} | {min(count, steps) for count in COMPARED_PASSES}, reverse=True)
    for passes in budgets:
        chosen.append(subsampled(sigmas, passes, seed))
        chosen += [with_knots(sigmas, f, knots[f][passes]) for f in knots if passes in knots[f]]
    return list({e.name: e for e in chosen}.values())


def pareto(sigmas: Tensor, windows: range, knots: Knots, passes: range) -> list[Estimator]:
    """Every number of passes: the paper's rule with each window and fraction, spline and causal on searched knots."""
    found: list[Estimator] = []
    for window in windows:
        if window > sigmas.shape[-1]:
            break
        groups = len(groups_of(sigmas.shape[-1], window))
        found += [grouped(sigmas, "jagg", window, routed / groups) for routed in range(1, groups + 1)]
    for family in knots:
        found += [with_knots(sigmas, family, chosen) for count, chosen in knots[family].items() if count in passes]
    return [e for e in found if e.passes in passes]


def leak_suspects(
    sigmas: Tensor, windows: tuple[int, ...], jagg_frac: float, knots: Knots, seed: int
) -> list[Estimator]:
    """One estimator of every kind for the leak test: each window, routed as in the paper and throughout."""
    full = [grouped(sigmas, "jagg", window, frac) for window in windows for frac in dict.fromkeys((jagg_frac, 1.0))]
    window = windows[0]
    budget = min(e.passes for e in full)
    rest = [grouped(sigmas, family, window, 1.0) for family in ("jagg-index", "endpoint")]
    draw = subsampled(sigmas, budget, seed)
    rest.append(replace(draw, settings={"draws": 1}))
    rest += [with_knots(sigmas, f, knots[f][budget]) for f in knots if budget in knots[f]]
    return list({e.name: e for e in (exact(sigmas), *full, *rest)}.values())


def mean_of_draws(values: list[float | None]) -> float | None:
    """Mean over the draws of a random plan; undefined only if every draw is."""
    defined = [v for v in values if v is not None]
    return float(np.mean(defined)) if defined else None
