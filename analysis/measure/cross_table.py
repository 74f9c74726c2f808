"""The cross-gradient table of a rollout batch: inner products from which every plan can be judged offline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from analysis.measure.gradients import (
    Pass,
    check_shared,
    differentiate,
    on_policy_upstream,
    plan_passes,
    trained_parameters,
)
from analysis.measure.spaces import ExactSpace, ProjectedSpace, Space
from analysis.measure.study import DIMENSION, SpaceName
from jagg_core import Plan, Trajectory, VelocityPolicy
from jagg_core.devices import free_memory
from jagg_core.objective import ClippedSurrogate
from jagg_core.sharding import Sharding

WHOLE = "all"
"""Block of every parameter when all are taken together."""


@dataclass(frozen=True)
class CrossTable:
    """Inner products of the cross gradients ``C[i, j] = J_i^T s_j`` of one rollout batch.

    Attributes:
        steps: trained steps T.
        pairs: the (i, j) that were collected, in order.
        grams: inner products ``[n, n]``, fp64, of the pairs and then of the passes of ``predicted`` plans, for each
            block of parameters; they add up to those of whole gradients.
        predicted: knots of the plans with predicted knots that were collected as well.
        combine: how the rows behind the pairs add up to their gradients, ``[predicted, rows]``.
        dimension: of the random projection; None if inner products are exact.
    """

    steps: int
    pairs: tuple[tuple[int, int], ...]
    grams: Mapping[str, np.ndarray]
    predicted: tuple[tuple[int, ...], ...] = ()
    combine: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    dimension: int | None = None

    @cached_property
    def gram(self) -> np.ndarray:
        """Adds up the blocks: inner products of whole gradients, ``[n, n]``."""
        return np.sum(list(self.grams.values()), axis=0)

    @cached_property
    def index(self) -> dict[tuple[int, int], int]:
        """Returns the position of each pair in `pairs`."""
        return {pair: n for n, pair in enumerate(self.pairs)}

    def vector(self, plan: Plan, steps: Sequence[int] | None = None) -> np.ndarray:
        """Returns the plan's gradient as coefficients over the rows of ``gram``; of ``steps`` alone, if given.

        Raises:
            ValueError: the plan is for other steps, has per-sample weights, or needs a pair that was not collected.
        """
        check_shared(plan, self.steps)
        index = self.index
        weights = plan.weights.numpy()
        vector = np.zeros(len(self.gram))
        if plan.knot_sigmas is not None:
            if plan.knots not in self.predicted or steps is not None:
                what = "step by step" if plan.knots in self.predicted else f"at knots {plan.knots}"
                raise ValueError(f"plan {plan.name!r}: its predicted knots were not collected {what}")
            vector[len(self.pairs) :] = self.combine[self.predicted.index(plan.knots)]
            return vector
        for position, step in zip(*weights.nonzero(), strict=True):
            if steps is not None and step not in steps:
                continue
            pair = (plan.knots[position], int(step))
            if pair not in index:
                raise ValueError(f"plan {plan.name!r} puts step {pair[1]} on knot {pair[0]}, which was not collected")
            vector[index[pair]] += weights[position, step]
        return vector


def reachable_pairs(steps: int, past: int | None = None, future: int | None = None) -> tuple[tuple[int, int], ...]:
    """Lists pairs (knot i, step j) with the knot at most ``past`` steps before and ``future`` steps after the step."""
    before, after = (steps if limit is None else limit for limit in (past, future))
    return tuple((i, j) for i in range(steps) for j in range(steps) if -after <= j - i <= before)


def collect_table(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    objective: ClippedSurrogate,
    *,
    past: int | None = None,
    future: int | None = None,
    predicted: Sequence[Plan] = (),
    blocks: Mapping[Tensor, str] | None = None,
    space: SpaceName = "auto",
    dimension: int = DIMENSION,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> CrossTable:
    """Computes the cross-gradient table of one on-policy rollout batch: T forwards, one backward per pair.

    Plans with predicted knots take their Jacobians elsewhere: each of ``predicted`` adds a row per knot, for one
    forward and one backward each. Under FSDP2 every rank brings its part of the samples, and all get the table of
    the whole batch; plain parameters are differentiated by each process alone.

    Args:
        policy: with ``parameters()``.
        trajectory: T steps of B samples.
        advantages: ``[B]``.
        objective: the loss.
        past: how many steps a knot may be before a step it serves; any number by default.
        future: how many it may be after it; any number by default.
        predicted: plans with predicted knots.
        blocks: label of each parameter, to have inner products per block as well; see
            `analysis.statistics.parameter_kinds`.
        space: ``"exact"`` holds all gradients; ``"projected"`` a random projection of each to ``dimension`` numbers
            per block, and never more than one further gradient; ``"auto"``: exact where it fits.
        dimension: see `analysis.measure.spaces.ProjectedSpace`.
        workers: see `analysis.measure.gradients.differentiate`.
        progress: called with the number of backwards since the last call.

    Raises:
        OffPolicyError: the policy's weights are not the rollout's.
        MemoryError: the gradients would not fit; says how many GiB they take.
        ValueError: reentrant activation checkpointing, no parameters, or a setting out of range.
    """
    pairs = reachable_pairs(trajectory.steps, past, future)
    upstream = on_policy_upstream(policy, trajectory, advantages, objective)
    more, combine = plan_passes(predicted, trajectory, upstream)
    passes = [Pass(trajectory, i, upstream[j]) for i, j in pairs] + more
    grams, chosen = _collected(policy, passes, blocks, space, dimension, workers, progress)
    knots = tuple(plan.knots for plan in predicted)
    return CrossTable(trajectory.steps, pairs, grams, knots, combine, chosen.dimension)


def _collected(
    policy: VelocityPolicy,
    passes: Sequence[Pass],
    blocks: Mapping[Tensor, str] | None,
    space: SpaceName,
    dimension: int,
    workers: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, np.ndarray], Space]:
    parameters = trained_parameters(policy)
    sharding = Sharding(parameters)
    labels = [WHOLE if blocks is None else blocks.get(p, WHOLE) for p in parameters]
    chosen = choose_space(parameters, sharding, labels, len(passes), space, dimension)
    rows = empty_rows(parameters, chosen, len(passes))
    differentiate(policy, sharding, passes, chosen, rows, workers, progress)
    return chosen.grams(chosen.finish(rows)), chosen


def choose_space(
    parameters: Sequence[Tensor],
    sharding: Sharding,
    labels: Sequence[str],
    count: int,
    name: SpaceName,
    dimension: int,
    seed: int = 0,
) -> Space:
    """Chooses the space for ``count`` gradients: exact where they fit in memory on every rank, unless ``name`` decides.

    Raises:
        MemoryError: neither fits, or not the one asked for.
        ValueError: an unknown name.
    """
    if name not in get_args(SpaceName):
        raise ValueError(f"space must be one of {list(get_args(SpaceName))}, got {name!r}")
    device = parameters[0].device
    free = free_memory(device)
    spaces: list[Space] = []
    if name != "projected":
        spaces.append(ExactSpace(sharding, labels))
    if name != "exact":
        spaces.append(ProjectedSpace(sharding, labels, dimension, seed))
    for space in spaces:
        needed = count * int(np.prod(space.row_shape)) * row_dtype(parameters).itemsize
        if not sharding.any(free is not None and needed > 0.9 * free, device):
            return space
    left = "an unknown amount is" if free is None else f"{free / 2**30:.1f} GiB are"
    raise MemoryError(
        f"the cross gradients take {needed / 2**30:.1f} GiB, {left} free here (the least on any "
        "rank counts): lower the reach (past, future) or the number of steps, or project to a smaller dimension"
    )


def row_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """Returns the dtype that gradients are kept in: at least fp32."""
    return torch.promote_types(parameters[0].dtype, torch.float32)


def empty_rows(parameters: Sequence[Tensor], space: Space, count: int) -> Tensor:
    """Makes room for ``count`` gradients in a space."""
    return torch.empty(count, *space.row_shape, dtype=row_dtype(parameters), device=parameters[0].device)


def plan_gradients(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    objective: ClippedSurrogate,
    plans: Mapping[str, Plan],
    *,
    dimension: int | None = None,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Computes gradients of several plans on one on-policy rollout batch; knots and equal passes are shared.

    Flat and whole, ``[P]`` (under FSDP2 what this rank holds), or projected to ``dimension`` numbers (see
    `analysis.measure.spaces.ProjectedSpace`).

    Raises:
        OffPolicyError: the policy's weights are not the rollout's.
        ReplayMismatch: a plan for another schedule.
        ValueError: a plan for other steps or samples.
    """
    upstream = on_policy_upstream(policy, trajectory, advantages, objective)
    passes, combine = plan_passes(list(plans.values()), trajectory, upstream)
    parameters = trained_parameters(policy)
    sharding, labels = Sharding(parameters), [WHOLE] * len(parameters)
    name: SpaceName = "exact" if dimension is None else "projected"
    space = choose_space(parameters, sharding, labels, len(passes), name, dimension or DIMENSION)
    rows = empty_rows(parameters, space, len(passes))
    differentiate(policy, sharding, passes, space, rows, workers, progress)
    rows = space.finish(rows).flatten(1)
    totals = torch.from_numpy(combine).to(rows) @ rows
    return dict(zip(plans, totals, strict=True))
