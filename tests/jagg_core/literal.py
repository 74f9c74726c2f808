"""The formulas of conventions.md, written out once more and as literally as possible: what the core is held against.

Nothing here imports the code under test, apart from the names of the kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition

KERNELS = [DanceSDE(0.7), FlowSDE(0.7), CPS(0.8)]
KERNEL_IDS = ["dance", "flow", "cps"]


def as_column(value: Tensor | float, like: Tensor) -> Tensor:
    """A number, or one per sample, so that it multiplies ``like`` [B, ...]."""
    column = torch.as_tensor(value, dtype=like.dtype)
    return column.reshape(-1, *[1] * (like.ndim - 1)) if column.ndim else column


def kernel_step(kernel: Transition, z: Tensor, v: Tensor, sigma: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and noise scale of one step; ``z`` and ``v`` [B, ...], ``sigma`` and ``after`` a number or [B]."""
    sigma, after = as_column(sigma, z), as_column(after, z)
    dt = after - sigma
    eta = kernel.eta
    x0 = z - sigma * v
    x1 = z + (1 - sigma) * v
    if isinstance(kernel, DanceSDE):
        score = -(z - (1 - sigma) * x0) / sigma**2
        return z + dt * v - eta**2 / 2 * score * dt, eta * torch.sqrt(-dt)
    if isinstance(kernel, FlowSDE):
        std = eta * torch.sqrt(sigma / (1 - torch.where(sigma == 1, after, sigma)))
        drift = v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return z * (1 + std**2 / (2 * sigma) * dt) + drift, std * torch.sqrt(-dt)
    assert isinstance(kernel, CPS)
    std = after * math.sin(eta * math.pi / 2)
    return (1 - after) * x0 + torch.sqrt(after**2 - std**2) * x1, std


def kernel_log_prob(kernel: Transition, sample: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Mean log-probability per sample, ``[B]``."""
    if isinstance(kernel, CPS):
        return (-((sample - mean) ** 2)).flatten(1).mean(1)
    return torch.distributions.Normal(mean, scale.expand_as(mean)).log_prob(sample).flatten(1).mean(1)


def ppo_loss(
    trajectory: Trajectory,
    step: int,
    velocity: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    adv_clip: float = 5.0,
    kl_beta: float = 0.0,
    kl_form: str = "noise",
    reference: Tensor | None = None,
) -> Tensor:
    """flow_grpo's loss of one step, per sample ``[B]``; ``velocity`` and ``reference`` are ``[B, ...]``."""
    sigma, after = trajectory.sigmas[..., step], trajectory.next_sigmas[..., step]
    kernel, z = trajectory.transition, trajectory.latents[step]
    mean, scale = kernel_step(kernel, z, velocity, sigma, after)
    log_prob = kernel_log_prob(kernel, trajectory.next_latents[step], mean, scale)
    ratio = torch.exp(log_prob - trajectory.log_probs[step])
    clipped_advantages = torch.clamp(advantages, -adv_clip, adv_clip)
    unclipped = -clipped_advantages * ratio
    clipped = -clipped_advantages * torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(unclipped, clipped)
    if kl_beta:
        assert reference is not None
        reference_mean, _ = kernel_step(kernel, z, reference, sigma, after)
        distance = ((mean - reference_mean) ** 2).flatten(1).mean(1)
        if kl_form == "velocity":
            kl = ((velocity - reference) ** 2).flatten(1).mean(1)
        elif kl_form == "mean":
            kl = distance
        else:
            root = 1 if kl_form == "noise" or isinstance(kernel, CPS) else torch.sqrt(sigma - after)
            kl = distance / (2 * (scale.flatten() / root) ** 2)
        loss = loss + kl_beta * kl
    return loss


def upstream(
    trajectory: Trajectory, step: int, velocity: Tensor, advantages: Tensor, **settings: float | Tensor | None
) -> Tensor:
    """``dL/dv`` of one step by autograd through `ppo_loss`, ``[B, ...]``."""
    proxy = velocity.detach().clone().requires_grad_(True)
    ppo_loss(trajectory, step, proxy, advantages, **settings).sum().backward()  # type: ignore[arg-type]
    assert proxy.grad is not None
    return proxy.grad


def loop_gradient(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    weights: Tensor | None = None,
    *,
    reference: VelocityPolicy | None = None,
    **settings: float,
) -> None:
    """Add the gradient to ``.grad`` the slow way, one backward per step.

    Without ``weights``: a plain loop of forward, loss, backward. With ``weights`` ``[T, T]`` or ``[B, T, T]``: step i
    is differentiated with ``sum_j w[i, j] s_j``.
    """

    def velocities(of: VelocityPolicy, step: int) -> Tensor:
        sigma = trajectory.sigmas[..., step].expand(trajectory.batch).to(trajectory.latents.dtype)
        return of.velocity(trajectory.latents[step], sigma, trajectory.rows)

    def at(step: int) -> dict[str, float | Tensor | None]:
        if reference is None:
            return dict(settings)
        return {**settings, "reference": velocities(reference, step).detach()}

    by_step = advantages if advantages.ndim == 2 else advantages[:, None].expand(-1, trajectory.steps)
    if weights is None:
        for step in range(trajectory.steps):
            ppo_loss(trajectory, step, velocities(policy, step), by_step[:, step], **at(step)).sum().backward()  # type: ignore[arg-type]
        return
    ups = [upstream(trajectory, j, velocities(policy, j), by_step[:, j], **at(j)) for j in range(trajectory.steps)]
    for i in range(trajectory.steps):
        total = sum(as_column(weights[..., i, j], ups[j]) * ups[j] for j in range(trajectory.steps))
        velocities(policy, i).backward(total)
