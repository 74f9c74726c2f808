"""The estimators that the main job compares, as plans with names and labels."""

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
class NamedPlan:
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
        """Returns the plans on a rollout batch. A random plan is drawn for each, so that an interval holds the draw."""
        return self.plans if self.redraw is None else self.redraw(batch)

    @property
    def passes(self) -> int:
        """Counts backward passes of one update; of the busiest sample, where samples have different knots."""
        plan = self.plans[0]
        return plan.passes if plan.weights.ndim == 2 else int((plan.weights != 0).any(-1).sum(-1).max())

    @property
    def anticipating(self) -> bool:
        """Tells whether it looks ahead; see `jagg_core.Plan.anticipating`."""
        return self.plans[0].anticipating

    @property
    def identity(self) -> tuple[Any, ...]:
        """Returns what its gradient depends on: knots, weights, sites of every draw. Equal for two names of one plan.

        Weights count to twelve digits, since two formulas of one plan may round differently.
        """
        return tuple((plan.knots, _digits(plan.weights), _digits(plan.knot_sigmas)) for plan in self.plans)

    @property
    def key(self) -> list[Any]:
        """Returns the key of stored gradients of its first plan."""
        plan = self.plans[0]
        sites = None if plan.knot_sigmas is None else plan.knot_sigmas.tolist()
        return [self.name, plan.knots, plan.weights.tolist(), sites]

    def describe(self) -> dict[str, Any]:
        """Returns what a record holds of it."""
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


def distinct(plans: Sequence[NamedPlan]) -> list[NamedPlan]:
    """Keeps one estimator of every plan: the last one's name, at the first one's place."""
    return list({estimator.identity: estimator for estimator in plans}.values())


def _one(name: str, label: str, family: str, plan: Plan, **settings: Any) -> NamedPlan:
    return NamedPlan(name, label, family, (plan,), settings)


def exact(sigmas: Tensor) -> NamedPlan:
    """Makes the reference."""
    return _one("exact", "exact", "exact", exact_plan(sigmas))


def grouped(sigmas: Tensor, family: str, window: int, frac: float) -> NamedPlan:
    """Makes JAGG (``jagg``), with index weights (``jagg-index``), or endpoint-only (``endpoint``)."""
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


def subsampled(sigmas: Tensor, count: int, seed: int) -> NamedPlan:
    """Makes random ``count`` of T steps, several draws for every rollout batch."""

    def redraw(batch: int) -> tuple[Plan, ...]:
        generators = [generator_for(seed, "subsample", count, batch, draw) for draw in range(SUBSAMPLE_DRAWS)]
        return tuple(subsample_plan(sigmas, count, generator) for generator in generators)

    label = f"subsample, {count} random steps"
    return NamedPlan(f"subsample-{count}", label, "subsample", redraw(0), {"draws": SUBSAMPLE_DRAWS}, redraw)


def with_knots(sigmas: Tensor, family: str, knots: tuple[int, ...]) -> NamedPlan:
    """Makes a spline (linear weights) or causal plan on searched knots."""
    kind = "linear weights (spline)" if family == "spline" else family
    label = f"{kind}, {len(knots)} searched knots"
    return _one(f"{family}-{len(knots)}", label, family, find_estimator(family).build(sigmas, knots), knots=list(knots))


def measured(sigmas: Tensor, knots: Knots, counts: Sequence[int], *, recommended: bool) -> list[NamedPlan]:
    """Makes plans on searched knots with these numbers of passes, of the families that may be recommended or not."""
    families = [e.name for e in estimators(recommended=recommended) if e.name in knots]
    return [with_knots(sigmas, f, knots[f][count]) for f in families for count in counts if count in knots[f]]


def predicted(sigmas: Tensor, knots: Knots, counts: Sequence[int]) -> list[NamedPlan]:
    """Makes causal plans on predicted knots, with these numbers of passes; whole updates only."""
    plans = []
    for passes in counts:
        if passes in knots["causal"]:
            plan = causal_plan(sigmas, knots["causal"][passes], predict=True)
            label, about = f"causal, {passes} predicted knots", {"knots": list(plan.knots), "whole_update_only": True}
            plans.append(_one(f"causal-predicted-{passes}", label, "causal-predicted", plan, **about))
    return plans


def headline(sigmas: Tensor, windows: tuple[int, ...], jagg_frac: float, knots: Knots, seed: int) -> list[NamedPlan]:
    """Makes the estimators of the main tables: the paper's rule, its variants, and ours at as many passes."""
    chosen: list[NamedPlan] = []
    for window in windows:
        for frac in dict.fromkeys((jagg_frac, 1.0)):
            chosen += [grouped(sigmas, e.name, window, frac) for e in estimators(kind="groups")]
    steps = sigmas.shape[-1]
    budgets = sorted({e.passes for e in chosen} | {min(count, steps) for count in COMPARED_PASSES}, reverse=True)
    for passes in budgets:
        chosen.append(subsampled(sigmas, passes, seed))
        chosen += [with_knots(sigmas, f, knots[f][passes]) for f in knots if passes in knots[f]]
    return list({e.name: e for e in chosen}.values())


def pareto(sigmas: Tensor, windows: range, knots: Knots, passes: range) -> list[NamedPlan]:
    """Makes plans of every number of passes: the paper's rule at every window and fraction, those on searched knots."""
    plans: list[NamedPlan] = []
    for window in windows:
        if window > sigmas.shape[-1]:
            break
        groups = len(groups_of(sigmas.shape[-1], window))
        plans += [grouped(sigmas, "jagg", window, routed / groups) for routed in range(1, groups + 1)]
    for family in knots:
        plans += [with_knots(sigmas, family, chosen) for count, chosen in knots[family].items() if count in passes]
    return [e for e in plans if e.passes in passes]


def leak_plans(sigmas: Tensor, windows: tuple[int, ...], jagg_frac: float, knots: Knots, seed: int) -> list[NamedPlan]:
    """Makes one estimator of every kind for the leak test: each window, routed as in the paper and throughout."""
    full = [grouped(sigmas, "jagg", window, frac) for window in windows for frac in dict.fromkeys((jagg_frac, 1.0))]
    window = windows[0]
    budget = min(e.passes for e in full)
    rest = [grouped(sigmas, family, window, 1.0) for family in ("jagg-index", "endpoint")]
    draw = subsampled(sigmas, budget, seed)
    rest.append(replace(draw, settings={"draws": 1}))
    rest += [with_knots(sigmas, f, knots[f][budget]) for f in knots if budget in knots[f]]
    return list({e.name: e for e in (exact(sigmas), *full, *rest)}.values())


def mean_of_draws(values: list[float | None]) -> float | None:
    """Computes the mean over the draws of a random plan; undefined only if every draw is."""
    defined = [v for v in values if v is not None]
    return float(np.mean(defined)) if defined else None
