"""Gradients of many plans from few passes: the cross-gradient table, and plans that share their forwards.

Nothing here touches ``.grad``, the global random state or train/eval mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagg_core import OffPolicyError, Plan, Trajectory, VelocityPolicy
from jagg_core.objective import ClippedSurrogate, upstream_closed_form
from jagg_core.trajectory import policy_signature, weights_version

CHUNK = 2**16
"""Gradient elements per matrix product of the Gram matrix."""


@dataclass(frozen=True)
class CrossTable:
    """Inner products of the cross gradients ``C[i, j] = J_i^T s_j`` of one rollout batch.

    Attributes:
        steps: trained steps T.
        pairs: the (i, j) that were collected, in order.
        gram: inner products of the pairs and then of the ``predicted`` plans, ``[n, n]``, fp64.
        predicted: knots of the plans with predicted knots whose whole gradients were collected as well.
    """

    steps: int
    pairs: tuple[tuple[int, int], ...]
    gram: np.ndarray
    predicted: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def index(self) -> dict[tuple[int, int], int]:
        """Position of each pair in `pairs`."""
        return {pair: n for n, pair in enumerate(self.pairs)}

    def vector(self, plan: Plan, steps: Sequence[int] | None = None) -> np.ndarray:
        """The plan's gradient as coefficients over the rows of ``gram``; of contributions of ``steps`` only, if given.

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
            vector[len(self.pairs) + self.predicted.index(plan.knots)] = 1
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
    """Pairs (knot i, step j) with the knot at most ``past`` steps before and ``future`` steps after the step."""
    before, after = (steps if limit is None else limit for limit in (past, future))
    return tuple((i, j) for i in range(steps) for j in range(steps) if -after <= j - i <= before)


def trained_parameters(policy: VelocityPolicy) -> list[Tensor]:
    """The policy's parameters that require gradients.

    Raises:
        ValueError: the policy does not show them, or none requires gradients.
    """
    found = [p for p in getattr(policy, "parameters", list)() if p.requires_grad]
    if not found:
        raise ValueError("policy: needs parameters() with at least one that requires gradients, found none")
    return found


def on_policy_upstream(
    policy: VelocityPolicy, trajectory: Trajectory, advantages: Tensor, objective: ClippedSurrogate
) -> list[Tensor]:
    """Closed-form upstream gradients ``s_j`` [B, *D] of every step.

    Raises:
        OffPolicyError: the policy's weights are not the rollout's.
    """
    if weights_version(policy) != trajectory.weights_version:
        raise OffPolicyError("the weights changed since the rollout: gradients of it would not be on policy")
    trajectory.require(signature=policy_signature(policy))
    advantages = advantages.to(device=trajectory.latents.device, dtype=trajectory.latents.dtype)
    return [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]


class _Differentiator:
    """``J_i^T u`` for several u at each knot, from one forward per knot."""

    def __init__(self, policy: VelocityPolicy, trajectory: Trajectory) -> None:
        self.policy = policy
        self.trajectory = trajectory
        self.parameters = trained_parameters(policy)
        self.size = sum(p.numel() for p in self.parameters)
        self.rows = trajectory.rows.to(trajectory.latents.device)
        self.checked = False

    def velocity(self, knot: int, sigma: Tensor | None = None) -> Tensor:
        with torch.enable_grad():
            velocity = self.policy.velocity(*self.trajectory.site(knot, sigma), self.rows)
        if not self.checked:
            _refuse_reentrant(velocity)
            self.checked = True
        return velocity

    def pull_back(self, velocity: Tensor, upstream: Tensor, out: Tensor, last: bool) -> None:
        """Write the flat gradient, at least fp32, to ``out``."""
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            velocity, self.parameters, upstream.to(velocity.dtype), retain_graph=not last, allow_unused=True
        )
        start = 0
        for parameter, gradient in zip(self.parameters, found, strict=True):
            part = out[start : start + parameter.numel()]
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.flatten())
            start += parameter.numel()

    def plan_sums(
        self, plans: dict[str, Plan], upstream: list[Tensor], progress: Callable[[int], None] | None = None
    ) -> dict[str, Tensor]:
        """Whole gradients ``[P]`` of plans, from one forward per site and one backward per distinct pass."""
        sites: dict[tuple[int, float | None], dict[tuple[float, ...], list[str]]] = {}
        for name, plan in plans.items():
            check_shared(plan, self.trajectory.steps)
            self.trajectory.require(sigmas=plan.sigmas)
            for i, knot in enumerate(plan.knots):
                sigma = plan.knot_sigma(i)
                users = sites.setdefault((knot, None if sigma is None else float(sigma)), {})
                users.setdefault(tuple(plan.weights[i].tolist()), []).append(name)
        dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        totals = {name: torch.zeros(self.size, dtype=dtype, device=self.rows.device) for name in plans}
        buffer = torch.empty(self.size, dtype=dtype, device=self.rows.device)
        for (knot, moved), users in sites.items():
            velocity = self.velocity(knot, None if moved is None else torch.tensor(moved, dtype=torch.float64))
            for n, (weights, names) in enumerate(users.items()):
                aggregated = torch.zeros_like(upstream[0])
                for step in np.flatnonzero(np.array(weights)):
                    aggregated += weights[step] * upstream[step]
                self.pull_back(velocity, aggregated, buffer, last=n == len(users) - 1)
                for name in names:
                    totals[name] += buffer
            if progress is not None:
                progress(len(users))
        return totals


def _refuse_reentrant(velocity: Tensor) -> None:
    """Raise ValueError if reentrant checkpointing is in the graph.

    ``autograd.grad`` often raises there itself, but where no trained parameter comes before the first checkpoint (LoRA
    inside the blocks) it finds no path to those inside, and they would silently get no gradient.
    """
    seen: set[Any] = set()
    queue: list[Any] = [velocity.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "activation checkpointing must be non-reentrant (use_reentrant=False) for gradients beside .grad"
            )
        seen.add(node)
        queue += [following for following, _ in node.next_functions]


def collect_table(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    objective: ClippedSurrogate,
    *,
    past: int | None = None,
    future: int | None = None,
    predicted: Sequence[Plan] = (),
    at_once: int = 1,
    progress: Callable[[int], None] | None = None,
) -> CrossTable:
    """The cross-gradient table of one on-policy rollout batch: T forwards, one backward per pair.

    Plans with predicted knots take their Jacobians elsewhere: each of ``predicted`` adds a row, for one forward and one
    backward per knot. ``at_once`` says how many tables are made side by side: all of them must fit in memory.
    ``progress(n)`` is called with the number of backwards since the last call.

    Raises:
        OffPolicyError: the policy's weights are not the rollout's.
        MemoryError: the gradients would not fit; says how many GiB they take.
        ValueError: reentrant activation checkpointing, or no parameters.
    """
    pairs = reachable_pairs(trajectory.steps, past, future)
    upstream = on_policy_upstream(policy, trajectory, advantages, objective)
    differentiator = _Differentiator(policy, trajectory)
    device = trajectory.latents.device
    dtype = torch.promote_types(differentiator.parameters[0].dtype, torch.float32)
    count = len(pairs) + len(predicted)
    _check_memory(at_once * count * differentiator.size * dtype.itemsize, device)
    rows = torch.empty(count, differentiator.size, dtype=dtype, device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for knot in range(trajectory.steps):
            velocity = differentiator.velocity(knot)
            own = [n for n, pair in enumerate(pairs) if pair[0] == knot]
            for n in own:
                differentiator.pull_back(velocity, upstream[pairs[n][1]], rows[n], last=n == own[-1])
            if progress is not None:
                progress(len(own))
        if predicted:
            sums = differentiator.plan_sums({str(n): plan for n, plan in enumerate(predicted)}, upstream, progress)
            for row, total in zip(rows[len(pairs) :], sums.values(), strict=True):
                row.copy_(total)
    return CrossTable(trajectory.steps, pairs, gram_matrix(rows), tuple(plan.knots for plan in predicted))


def gram_matrix(rows: Tensor) -> np.ndarray:
    """Inner products of ``rows`` [n, P], accumulated over chunks in fp64: ``[n, n]``.

    Raises:
        FloatingPointError: a row is not finite.
    """
    peak = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1).to(torch.promote_types(rows.dtype, torch.float32))
    if not torch.isfinite(peak).all():
        raise FloatingPointError(f"gradient {int((~torch.isfinite(peak)).nonzero()[0])} of {len(rows)} is not finite")
    # rows of at most 1: squares of fp32 gradients would overflow above 1e19 and vanish below 1e-23
    peak = torch.where(peak > 0, peak, 1.0)[:, None]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    block = 64
    for start in range(0, rows.shape[1], CHUNK):
        part = rows[:, start : start + CHUNK] / peak
        for top in range(0, len(rows), block):
            # the lower triangle follows by symmetry
            total[top : top + block, top:] += (part[top : top + block] @ part[top:].T).double()
    gram = (total * peak.double() * peak.double().T).cpu().numpy()
    upper = np.triu(gram)
    return upper + np.triu(gram, 1).T


def check_shared(plan: Plan, steps: int) -> None:
    """Raise ValueError unless the plan is for ``steps`` steps, with weights that all samples share."""
    shared = plan.weights.ndim == 2 and (plan.knot_sigmas is None or plan.knot_sigmas.ndim == 1)
    if plan.steps != steps or not shared:
        raise ValueError(f"plan {plan.name!r} must have weights [K, {steps}], found {list(plan.weights.shape)}")


def plan_gradients(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    objective: ClippedSurrogate,
    plans: dict[str, Plan],
) -> dict[str, Tensor]:
    """Flat gradients ``[P]`` of several plans on one on-policy rollout batch; knots and equal passes are shared.

    Raises:
        OffPolicyError: the policy's weights are not the rollout's.
        ReplayMismatch: a plan for another schedule.
        ValueError: a plan for other steps, or with per-sample weights.
    """
    upstream = on_policy_upstream(policy, trajectory, advantages, objective)
    device = trajectory.latents.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _Differentiator(policy, trajectory).plan_sums(plans, upstream)


def _check_memory(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        try:
            with open("/proc/meminfo") as file:
                free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            pass
    if needed > 0.9 * free:
        raise MemoryError(
            f"the cross gradients take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: "
            "lower the number of workers, the reach (past, future) or the number of steps"
        )
