"""Passes: Jacobian-vector products of a policy that leave ``.grad`` alone, several upstream gradients from one forward.

Nothing here touches ``.grad``, the global random state or train/eval mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.measure.spaces import Space
from jagg_core import OffPolicyError, Plan, Trajectory, VelocityPolicy
from jagg_core.devices import fork_rng
from jagg_core.distributed import on_any_rank
from jagg_core.objective import ClippedSurrogate, upstream_closed_form
from jagg_core.policy import has_reentrant_checkpointing
from jagg_core.sharding import Sharding
from jagg_core.trajectory import policy_signature, weights_version

AT_ONCE_BYTES = 2**28
"""Gradients that one batched backward may return, in bytes; larger ones come one by one."""


Gradients = list[Tensor | None]
"""For each parameter its local gradients ``[n, size]`` for n upstream gradients; None for zero."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One product ``J^T u``: where the Jacobian is taken (see `Trajectory.site`), and ``upstream`` u ``[B, *D]``."""

    trajectory: Trajectory
    step: int
    upstream: Tensor
    sigma: float | None = None

    @property
    def site(self) -> tuple[int, int, float | None]:
        """Identifies the forward: equal for passes that can share one."""
        return id(self.trajectory), self.step, self.sigma


def trained_parameters(policy: VelocityPolicy) -> list[Tensor]:
    """Returns the policy's parameters that require gradients.

    Raises:
        ValueError: the policy does not show them, or none requires gradients.
    """
    trained = [p for p in getattr(policy, "parameters", list)() if p.requires_grad]
    if not trained:
        raise ValueError("policy must have parameters() of which one requires gradients, got none")
    return trained


def on_policy_upstream(
    policy: VelocityPolicy, trajectory: Trajectory, advantages: Tensor, objective: ClippedSurrogate
) -> list[Tensor]:
    """Computes the closed-form upstream gradients ``s_j`` [B, *D] of every step.

    Raises:
        OffPolicyError: the policy's weights are not the rollout's, here or on another rank.
    """
    if on_any_rank(weights_version(policy) != trajectory.weights_version, trajectory.latents.device):
        raise OffPolicyError("the weights changed since the rollout: gradients of it would not be on policy")
    trajectory.require(signature=policy_signature(policy))
    advantages = advantages.to(device=trajectory.latents.device, dtype=trajectory.latents.dtype)
    return [upstream_closed_form(objective, trajectory, j, advantages).gradient for j in range(trajectory.steps)]


def plan_passes(
    plans: Sequence[Plan], trajectory: Trajectory, upstream: Sequence[Tensor]
) -> tuple[list[Pass], np.ndarray]:
    """Lists the distinct passes of several plans, and how they add up to the plans' gradients, ``[plans, passes]``.

    Passes whose weights differ by a factor are one pass. A plan with per-sample weights has as many passes as its
    busiest sample has knots: each sample brings a knot to a pass.

    Raises:
        ValueError: a plan for other steps or samples.
        ReplayMismatch: a plan for another schedule.
    """
    passes: list[Pass] = []
    known: dict[tuple[Any, ...], int] = {}
    entries: list[tuple[int, int, float]] = []
    for number, plan in enumerate(plans):
        check_steps(plan, trajectory.steps)
        trajectory.require(sigmas=plan.sigmas)
        if plan.weights.ndim == 3:
            for one in _per_sample_passes(plan, trajectory, upstream):
                entries.append((number, len(passes), 1.0))
                passes.append(one)
            continue
        for i, knot in enumerate(plan.knots):
            moved = plan.knot_sigma(i)
            sigma = None if moved is None else float(moved)
            factor = float(plan.weights[i].abs().max())
            if factor == 0:
                continue
            weights = plan.weights[i] / factor
            key = (knot, sigma, *weights.tolist())
            if key not in known:
                total = torch.zeros_like(upstream[0])
                for step in weights.nonzero().flatten().tolist():
                    total += float(weights[step]) * upstream[step]
                known[key] = len(passes)
                passes.append(Pass(trajectory, knot, total, sigma))
            entries.append((number, known[key], factor))
    combine = np.zeros((len(plans), len(passes)))
    for number, position, factor in entries:
        combine[number, position] = factor
    return passes, combine


def _per_sample_passes(plan: Plan, trajectory: Trajectory, upstream: Sequence[Tensor]) -> list[Pass]:
    if len(plan.weights) != trajectory.batch or plan.knot_sigmas is not None:
        raise ValueError(
            f"plan {plan.name!r} must have weights for {trajectory.batch} samples and no predicted knots, "
            f"got {list(plan.weights.shape)}"
        )
    fed = (plan.weights != 0).any(-1)
    count = int(fed.sum(-1).max())
    # a sample's knots come first, in order; idle ones fill up with weights of zero
    order = torch.sort((~fed).to(torch.int8), dim=-1, stable=True).indices[:, :count].sort(dim=-1).values
    steps = torch.tensor(plan.knots)[order]
    weights = plan.weights.gather(1, order[..., None].expand(-1, -1, plan.steps)).to(upstream[0])
    stacked = torch.stack(list(upstream), dim=1)
    selected = trajectory.select(steps)
    return [Pass(selected, slot, torch.einsum("bt,bt...->b...", weights[:, slot], stacked)) for slot in range(count)]


def check_steps(plan: Plan, steps: int) -> None:
    """Raises ValueError unless the plan is for ``steps`` steps."""
    if plan.steps != steps:
        raise ValueError(f"plan {plan.name!r} must have weights [K, {steps}], got {list(plan.weights.shape)}")


def check_shared(plan: Plan, steps: int) -> None:
    """Raises ValueError unless the plan is for ``steps`` steps, with weights that all samples share."""
    shared = plan.weights.ndim == 2 and (plan.knot_sigmas is None or plan.knot_sigmas.ndim == 1)
    if plan.steps != steps or not shared:
        raise ValueError(f"plan {plan.name!r} must have weights [K, {steps}], got {list(plan.weights.shape)}")


def differentiate(
    policy: VelocityPolicy,
    sharding: Sharding,
    passes: Sequence[Pass],
    space: Space,
    rows: Tensor,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Encodes every pass's gradient into its row of ``rows``: a forward per site, a backward per pass.

    ``workers`` sites are differentiated at a time, each with its share of the cores: at small sizes threads serve
    passes better than matrices. Sharded parameters go one by one, for their collectives must keep in step.
    ``progress(n)`` is called with the number of backwards since the last call.

    Raises:
        ValueError: reentrant activation checkpointing, or gathered parameters.
    """
    parameters = trained_parameters(policy)
    sites: dict[Any, list[int]] = {}
    for n, one in enumerate(passes):
        sites.setdefault(one.site, []).append(n)

    def work(members: list[int], check: bool = False) -> None:
        first = passes[members[0]]
        moved = None if first.sigma is None else torch.tensor(first.sigma, dtype=torch.float64)
        rows_of = first.trajectory.rows.to(first.trajectory.latents.device)
        with torch.enable_grad():
            velocity = policy.velocity(*first.trajectory.site(first.step, moved), rows_of)
        if check:
            _refuse_reentrant(velocity)
        upstream = [passes[n].upstream.to(velocity.dtype) for n in members]

        def keep(some: slice, gradients: Gradients) -> None:
            """Writes rows in place where they lie together; elsewhere copies them."""
            where = members[some]
            if where == list(range(where[0], where[-1] + 1)):
                space.encode(gradients, rows[where[0] : where[-1] + 1])
            else:
                together = torch.empty_like(rows[where])
                space.encode(gradients, together)
                rows[where] = together

        pull_back(velocity, parameters, upstream, sharding, keep)
        if progress is not None:
            progress(len(members))

    first, *others = sites.values()
    device = rows.device
    with fork_rng(device), _grads_aside(parameters, sharding):
        work(first, check=True)
        _refuse_gathered(parameters, trained_parameters(policy))
        if workers == 1 or sharding.mesh is not None:
            for members in others:
                work(members)
            return
        with _shared_cores(workers), ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, others))


def pull_back(
    velocity: Tensor,
    parameters: Sequence[Tensor],
    upstream: Sequence[Tensor],
    sharding: Sharding,
    use: Callable[[slice, Gradients], None],
) -> None:
    """Calls ``use(some, gradients)`` for stretches of the upstream gradients that together are all of them.

    Small gradients (`AT_ONCE_BYTES`) are taken several at a time, which a CPU does in half the time; of larger ones
    there is never more than one.
    """
    if sharding.mesh is not None:
        _pull_back_shards(velocity, parameters, upstream, sharding, use)
        return
    bytes_of_one = sum(p.numel() * p.element_size() for p in parameters)
    at_once = max(1, min(len(upstream), AT_ONCE_BYTES // max(1, bytes_of_one)))
    done = 0
    while done < len(upstream):
        some = upstream[done : done + at_once]
        last = done + len(some) == len(upstream)
        try:
            gradients = torch.autograd.grad(
                velocity,
                parameters,
                torch.stack(list(some)) if len(some) > 1 else some[0],
                retain_graph=not last or len(some) > 1,
                allow_unused=True,
                is_grads_batched=len(some) > 1,
            )
        except RuntimeError as error:
            if len(some) == 1 or "vmap" not in str(error).lower():
                raise
            at_once = 1  # an operation of this model's backward cannot be batched
            continue
        use(slice(done, done + len(some)), [None if g is None else g.reshape(len(some), -1) for g in gradients])
        del gradients
        done += len(some)


def _pull_back_shards(
    velocity: Tensor,
    parameters: Sequence[Tensor],
    upstream: Sequence[Tensor],
    sharding: Sharding,
    use: Callable[[slice, Gradients], None],
) -> None:
    """Pulls back one by one: the graph of FSDP2 ends in gathered parameters, and its hooks give means over ranks."""
    for n, one in enumerate(upstream):
        torch.autograd.backward(velocity, one, retain_graph=n < len(upstream) - 1)
        local: Gradients = []
        for parameter in parameters:
            gradient: Any = parameter.grad
            local.append(None if gradient is None else gradient.to_local().flatten()[None] * sharding.ranks)
            parameter.grad = None
        use(slice(n, n + 1), local)
        del local


@contextmanager
def _grads_aside(parameters: Sequence[Tensor], sharding: Sharding) -> Iterator[None]:
    if sharding.mesh is None:
        yield
        return
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        yield
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


@contextmanager
def _shared_cores(workers: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _refuse_gathered(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Raises ValueError if a backward has put other parameters in place.

    FSDP2 leaves the root gathered after a forward. A module then shows plain parameters, and gradients with respect to
    them would silently be those of this rank's samples.
    """
    if any(a is not b for a, b in zip(before, after, strict=True)):
        raise ValueError(
            "policy: parameters() must give the sharded parameters also where FSDP2 leaves them gathered after a "
            "forward: keep the list from before, or reshard() the module after the rollout"
        )


def _refuse_reentrant(velocity: Tensor) -> None:
    """Raises ValueError if reentrant checkpointing is in the graph.

    ``autograd.grad`` often raises there itself, but where no trained parameter comes before the first checkpoint (LoRA
    inside the blocks) it finds no path to those inside, and they would silently get no gradient.
    """
    if has_reentrant_checkpointing(velocity):
        raise ValueError(
            "activation checkpointing must be non-reentrant (use_reentrant=False) for gradients outside .grad"
        )
