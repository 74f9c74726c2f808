"""Rollouts from noise: by an SDE, kept as a trajectory, or by the ODE."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from jagg_core.policy import VelocityPolicy
from jagg_core.schedule import TimestepMode, check_sigmas, network_sigma
from jagg_core.seeding import generator_for
from jagg_core.trajectory import Trajectory, at_least_fp32, policy_signature, weights_version
from jagg_core.transitions import Transition, expand


def _checked_velocity(policy: VelocityPolicy, state: Tensor, timestep: Tensor, rows: Tensor, step: int) -> Tensor:
    velocity = policy.velocity(state, timestep, rows).to(state.dtype)
    if velocity.shape != state.shape:
        raise ValueError(f"velocity must have shape {list(state.shape)}, got {list(velocity.shape)}")
    if not torch.isfinite(velocity).all():
        raise FloatingPointError(f"the velocity is not finite at step {step} (sigma {timestep[0].item():g})")
    return velocity


def _require_noise(latents: Tensor) -> None:
    if latents.ndim < 2 or len(latents) == 0 or not latents.is_floating_point():
        raise ValueError(f"latents must be floating point [B, ...], B >= 1, got {latents.dtype} {list(latents.shape)}")


@torch.no_grad()
def rollout(
    policy: VelocityPolicy,
    sigmas: Tensor,
    transition: Transition,
    latents: Tensor,
    seed: int,
    *,
    sample_ids: Sequence[int] | None = None,
    timestep_mode: TimestepMode = "float",
    window: range | None = None,
    graph_at: Sequence[int] = (),
) -> Trajectory:
    """Samples ``B`` latents from noise. All steps but the last are SDE steps and are kept; the last is deterministic.

    Args:
        policy: the velocity field; called once per step on the whole batch.
        sigmas: ``[N + 1]``, decreasing, N >= 2 steps; the trajectory has T = N - 1 of them.
        transition: the kernel.
        latents: pure noise ``[B, *D]``; half precision is raised to fp32, where all but the network runs.
        seed: seed of the SDE noise. Every sample has a stream, so that a batch may be split in any way.
        sample_ids: names of the samples for their streams, ``0..B-1`` by default.
        timestep_mode: way from sigma to the network's timestep, by `network_sigma`.
        window: the only SDE steps, and the only ones kept, as in Flow-GRPO-Fast and MixGRPO; the others are
            deterministic. A sample's noise at a step is the same with and without a window.
        graph_at: kept steps (0 is the first of the window) that keep the graph of their forward, so that an update
            needs no forward for them.

    Raises:
        ValueError: an invalid schedule, fewer than 2 steps, no samples, ids that do not match, a window
            that is empty or reaches the last step, or a graph of a step that is not kept.
        FloatingPointError: the velocity is not finite at some step.

    Example:
        >>> import torch
        >>> from jagg_core import DanceSDE, dance_schedule, initial_latents, rollout
        >>> class Decay:
        ...     def velocity(self, latents, sigma, rows):
        ...         return latents
        >>> noise = initial_latents((1, 4, 4), seed=0, sample_ids=range(2))
        >>> trajectory = rollout(Decay(), dance_schedule(5), DanceSDE(0.3), noise, seed=0)
        >>> trajectory.latents.shape, trajectory.final.shape
        (torch.Size([4, 2, 1, 4, 4]), torch.Size([2, 1, 4, 4]))
    """
    sigmas = check_sigmas(sigmas)
    if sigmas.ndim != 1 or len(sigmas) < 3:
        raise ValueError(f"sigmas must have shape [N + 1] with N >= 2 steps, got {list(sigmas.shape)}")
    _require_noise(latents)
    batch = len(latents)
    ids = list(range(batch)) if sample_ids is None else list(sample_ids)
    if len(ids) != batch:
        raise ValueError(f"sample_ids must name {batch} samples, got {len(ids)}")
    last = len(sigmas) - 2
    kept = range(last) if window is None else window
    if len(kept) == 0 or kept.step != 1 or kept[0] < 0 or kept[-1] >= last:
        raise ValueError(f"window must be a range of steps within 0..{last - 1}, got {kept}")
    if not set(graph_at) <= set(range(len(kept))):
        raise ValueError(f"graph_at must lie within the kept steps 0..{len(kept) - 1}, got {list(graph_at)}")
    state = at_least_fp32(latents.detach()).clone()
    rows = torch.arange(batch, device=state.device)
    streams = [generator_for(seed, "sde", i) for i in ids]
    states = state.new_empty((len(kept) + 1, *state.shape))
    noise = state.new_empty((len(kept), *state.shape))
    log_probs = state.new_empty((len(kept), batch))
    graphs: dict[int, Tensor] = {}
    for step in range(last + 1):
        sigma, next_sigma = sigmas[step], sigmas[step + 1]
        timestep = network_sigma(sigma, timestep_mode).to(device=state.device, dtype=state.dtype).expand(batch)
        place = step - kept[0]
        with torch.set_grad_enabled(step in kept and place in graph_at):
            velocity = _checked_velocity(policy, state, timestep, rows, step)
        if velocity.requires_grad:
            graphs[place] = velocity
            velocity = velocity.detach()
        if step <= kept[-1]:
            drawn = torch.stack([torch.randn(state.shape[1:], generator=s, dtype=state.dtype) for s in streams])
        if step not in kept:
            state = state + expand(next_sigma - sigma, state) * velocity
        else:
            coefficients = transition.coefficients(sigma, next_sigma)
            states[place], noise[place] = state, drawn.to(state.device)
            mean = expand(coefficients.latent, state) * state + expand(coefficients.velocity, state) * velocity
            state = mean + expand(coefficients.scale, state) * noise[place]
            states[place + 1] = state
            log_probs[place] = transition.log_prob(state, mean, coefficients.scale)
    return Trajectory(
        latents=states[:-1],
        next_latents=states[1:],
        noise=noise,
        log_probs=log_probs,
        sigmas=sigmas[list(kept)],
        next_sigmas=sigmas[kept[0] + 1 : kept[-1] + 2],
        transition=transition,
        timestep_mode=timestep_mode,
        final=state,
        rows=torch.arange(batch),
        weights_version=weights_version(policy),
        signature=policy_signature(policy),
        graphs=graphs,
    )


@torch.no_grad()
def sample_ode(
    policy: VelocityPolicy, sigmas: Tensor, latents: Tensor, *, timestep_mode: TimestepMode = "float"
) -> Tensor:
    """Samples by deterministic Euler steps from noise ``[B, *D]`` along ``sigmas`` [N + 1]; samples of at least fp32.

    Raises:
        ValueError: an invalid schedule or one without a step, no samples, or a velocity of another shape.
        FloatingPointError: the velocity is not finite at some step.
    """
    sigmas = check_sigmas(sigmas)
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas must have shape [N + 1] with N >= 1 steps, got {list(sigmas.shape)}")
    _require_noise(latents)
    state = at_least_fp32(latents)
    rows = torch.arange(len(latents), device=latents.device)
    for step, (sigma, next_sigma) in enumerate(pairwise(sigmas)):
        timestep = network_sigma(sigma, timestep_mode).to(device=state.device, dtype=state.dtype).expand(len(state))
        state = state + expand(next_sigma - sigma, state) * _checked_velocity(policy, state, timestep, rows, step)
    return state
