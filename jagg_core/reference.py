"""The method as one plain loop, with which tests, timings and the check of a backbone compare the engine.

``G = sum_i J_{k_i}^T sum_j w[i, j] s_j``; see ``docs/method.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagg_core.plans import Plan
from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import expand

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative error between two ways to the same velocities or gradients, by dtype of the network."""


def plain_gradient(
    policy: VelocityPolicy, parameters: Sequence[Tensor], trajectory: Trajectory, upstream: Sequence[Tensor], plan: Plan
) -> list[Tensor]:
    """Computes the plan's gradient knot by knot: aggregate, one forward, one backward. Leaves ``.grad`` alone.

    Args:
        policy: policy to differentiate at the plan's knots.
        parameters: parameters to differentiate in; all require gradients.
        trajectory: T steps of B samples.
        upstream: the upstream gradient ``s_j`` [B, *D] of every step j.
        plan: plan for T steps, weights ``[K, T]`` or ``[B, K, T]``.

    Returns:
        A gradient per parameter, zero where the velocity does not depend on it.
    """
    total = [torch.zeros_like(p) for p in parameters]
    rows = trajectory.rows.to(trajectory.latents.device)
    for i, knot in enumerate(plan.knots):
        aggregated = torch.zeros_like(upstream[0])
        for j in range(plan.steps):
            aggregated += expand(plan.weights[..., i, j], upstream[j]) * upstream[j]
        velocity = policy.velocity(*trajectory.site(knot, plan.knot_sigma(i)), rows)
        gradients = torch.autograd.grad(velocity, parameters, aggregated.to(velocity.dtype), allow_unused=True)
        for sums, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                sums += gradient
    return total


def relative_error(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Computes ``|actual - expected| / |expected|`` over all tensors, summed in fp64; None counts as zero.

    NaN if a value is NaN. If ``expected`` is zero: 0 for zero, else 1.

    Raises:
        ValueError: tensors of other shapes.
    """
    difference = size = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a is not None and b is not None and a.shape != b.shape:
            raise ValueError(f"tensors must have shape {list(b.shape)}, got {list(a.shape)}")
        if b is not None:
            size += b.detach().double().square().sum().item()
        if a is not None or b is not None:
            gap = (0 if a is None else a.detach().double()) - (0 if b is None else b.detach().double())
            difference += torch.as_tensor(gap).square().sum().item()
    return (difference / size) ** 0.5 if size != 0 else float(difference != 0)
