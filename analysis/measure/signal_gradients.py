"""Gradients of many estimators on many rollout batches, for statistics across batches.

A bank holds one row per estimator and batch, all under one random projection, so that gradients of different batches
have inner products and a bank has the same size for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from analysis.measure import estimators
from analysis.measure.cross_table import WHOLE, choose_space, empty_rows
from analysis.measure.estimators import NamedPlan
from analysis.measure.gradients import differentiate, on_policy_upstream, plan_passes, trained_parameters
from analysis.measure.knot_search import Knots, searched
from analysis.measure.rollouts import Batch
from analysis.statistics.names import PER_PROMPT, grouped_name
from jagg_core import ClippedSurrogate, group_advantages
from jagg_core.plans import groups_of
from jagg_core.sharding import Sharding

ADVANTAGES: dict[str, Callable[[Batch], Tensor]] = {
    PER_PROMPT: lambda batch: batch.advantages,
    "global": lambda batch: group_advantages(batch.rewards, torch.zeros_like(batch.rewards, dtype=torch.long)),
    "none": lambda batch: batch.rewards,
    "ones": lambda batch: torch.ones_like(batch.rewards),
}
"""By `CENTRINGS`: DanceGRPO's, over the whole batch, the raw rewards, and 1 whatever the reward (the leak)."""


SIDE_PASSES = (8, 5)
"""Of spline plans, predicted knots and subsampling per sample: what needs further passes, at two prices."""


def main_plans(
    sigmas: Tensor, windows: Sequence[int], jagg_frac: float, knots: Knots, passes: Sequence[int]
) -> list[NamedPlan]:
    """Makes the plans that the decision is about: exact, those that may be recommended, the paper's rule."""
    plans = [estimators.exact(sigmas)]
    for window in windows[:2]:
        plans += [estimators.grouped(sigmas, "jagg", window, frac) for frac in dict.fromkeys((jagg_frac, 1.0))]
    plans += estimators.measured(sigmas, knots, passes, recommended=True)
    return estimators.distinct([*plans, plans[0]])  # what equals exact is called exact


def side_plans(sigmas: Tensor, windows: Sequence[int], knots: Knots) -> list[NamedPlan]:
    """Makes further plans for comparison, the same for every batch: the paper's rule at every window and share."""
    plans = []
    for window in windows:
        count = len(groups_of(sigmas.shape[-1], window))
        plans += [estimators.grouped(sigmas, "jagg", window, routed / count) for routed in range(1, count + 1)]
    plans += estimators.measured(sigmas, knots, SIDE_PASSES, recommended=False)
    return plans + estimators.predicted(sigmas, knots, SIDE_PASSES)


def watched_plans(
    chosen: Sequence[NamedPlan], sigmas: Tensor, windows: Sequence[int], jagg_frac: float
) -> list[NamedPlan]:
    """Picks those whose bias is measured under every centring: one of each kind at two prices, the paper's recipe."""
    steps = sigmas.shape[-1]
    names = ["exact", *(grouped_name(steps, "jagg", window, 1.0) for window in windows[:2])]
    names.append(grouped_name(steps, "jagg", windows[0], jagg_frac))
    names += [f"{family}-{k}" for family in searched() for k in SIDE_PASSES]
    return [e for e in chosen if e.name in names]


def bank_rows(
    batch: Batch,
    objective: ClippedSurrogate,
    chosen: Mapping[str, Sequence[NamedPlan]],
    dimension: int,
    seed: int,
    workers: int,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Computes projected gradients ``[estimators, dimension]`` of one batch, in the order of ``chosen``.

    Batches of one bank share ``dimension`` and ``seed``.
    """
    asked = []
    for centring, some in chosen.items():
        upstream = on_policy_upstream(batch.policy, batch.trajectory, ADVANTAGES[centring](batch), objective)
        asked.append((upstream, some))
    return upstream_rows(batch, asked, dimension, seed, workers, progress)


def upstream_rows(
    batch: Batch,
    asked: Sequence[tuple[Sequence[Tensor], Sequence[NamedPlan]]],
    dimension: int,
    seed: int,
    workers: int,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Computes projected gradients of one batch: estimators on any upstream gradients, a list of ``[B, *D]`` by step.

    Returns:
        ``[estimators, dimension]``, in the order of ``asked``. Passes at one site share a forward.
    """
    parameters = trained_parameters(batch.policy)
    sharding = Sharding(parameters)
    passes, combines = [], []
    for upstream, some in asked:
        added, combine = plan_passes([e.plans[0] for e in some], batch.trajectory, upstream)
        passes += added
        combines.append(combine)
    space = choose_space(parameters, sharding, [WHOLE] * len(parameters), len(passes), "projected", dimension, seed)
    rows = empty_rows(parameters, space, len(passes))
    differentiate(batch.policy, sharding, passes, space, rows, workers, progress)
    combine = torch.block_diag(*(torch.from_numpy(c) for c in combines))
    return combine.to(rows) @ space.finish(rows).flatten(1)
