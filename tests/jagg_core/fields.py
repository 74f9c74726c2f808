"""Small velocity fields, and helpers around them. fp64 unless a test asks for something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jagg_core.engine import Report, accumulate_gradients
from jagg_core.plans import (
    Plan,
    causal_plan,
    endpoint_plan,
    exact_plan,
    jagg_plan,
    spline_plan,
    subsample_plan,
)
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import initial_latents
from jagg_core.trajectory import Trajectory, weights_version
from jagg_core.transitions import DanceSDE, Transition
from tests.jagg_core.literal import kernel_log_prob, kernel_step

SHAPE = (3, 2)
"""Latent shape of one sample."""

ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, -1.0], dtype=torch.float64)
"""Of four samples, with both signs."""


class Call(NamedTuple):
    """One call of a field: its rows, the sigma of each, and whether a graph was recorded."""

    rows: list[int]
    sigmas: list[float]
    grad: bool


class MlpField(nn.Module):
    """A tanh network of latent, sigma and the row's own prompt. Logs its calls, and how often its block ran."""

    def __init__(
        self,
        elements: int = 6,
        samples: int = 8,
        hidden: int = 8,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        dropout: float = 0.0,
        checkpointing: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype)

        self.inner = nn.Parameter(draw(hidden, elements + 4))
        self.bias = nn.Parameter(draw(hidden))
        self.outer = nn.Parameter(draw(elements, hidden))
        self.register_buffer("prompts", draw(samples, 3))
        self.dropout = nn.Dropout(dropout)
        self.checkpointing = checkpointing
        self.reentrant = reentrant
        self.calls: list[Call] = []
        self.block_calls = 0

    def block(self, x: Tensor) -> Tensor:
        """The layer that is recomputed under checkpointing."""
        self.block_calls += 1
        return self.dropout(torch.tanh(x @ self.inner.T + self.bias))

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        self.calls.append(Call(rows.tolist(), sigma.tolist(), torch.is_grad_enabled()))
        dtype = self.inner.dtype
        x = torch.cat([latents.flatten(1).to(dtype), sigma[:, None].to(dtype), self.prompts[rows]], dim=1)
        if self.reentrant:
            x.requires_grad_()  # reentrant checkpointing needs an input that does
        hidden = checkpoint(self.block, x, use_reentrant=self.reentrant) if self.checkpointing else self.block(x)
        return (hidden @ self.outer.T).reshape(latents.shape)


class AffineField(nn.Module):
    """``v = A z + t b + c``: linear in its parameters, with a Jacobian that is affine in (z, t). ``A`` starts at 0."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(elements, elements, dtype=torch.float64))
        self.slope = nn.Parameter(torch.zeros(elements, dtype=torch.float64))
        self.constant = nn.Parameter(torch.linspace(-1, 1, elements, dtype=torch.float64))

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        return latents @ self.matrix.T + sigma[:, None] * self.slope + self.constant


class QuadraticInTimeField(nn.Module):
    """``v = a + t b + t^2 c``, the same for every latent."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.powers = nn.Parameter(torch.full((3, elements), 0.1, dtype=torch.float64))

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        return torch.stack([torch.ones_like(sigma), sigma, sigma**2], dim=1) @ self.powers + 0 * latents


class PerSampleLinearField(nn.Module):
    """``v = M z`` with a copy of M for each sample, so that one backward gives the gradient of every sample apart."""

    def __init__(self, matrix: Tensor, samples: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(matrix.expand(samples, -1, -1).clone())

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        return torch.einsum("nij,nj->ni", self.matrices[rows], latents)


class ConstantField:
    """A field without ``parameters()``: a fixed velocity per row, plus ``offset``, which can be differentiated."""

    def __init__(self, velocity: Tensor) -> None:
        self.values = velocity
        self.offset = torch.zeros((), dtype=velocity.dtype, requires_grad=True)
        self.calls: list[Call] = []

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        self.calls.append(Call(rows.tolist(), sigma.tolist(), torch.is_grad_enabled()))
        return self.values[rows] + self.offset


def noise_like(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_rollout(
    policy: nn.Module,
    steps: int = 6,
    transition: Transition | None = None,
    batch: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
) -> Trajectory:
    """``steps`` trained steps of ``batch`` samples of `SHAPE` on DanceGRPO's schedule. Forgets the calls it made."""
    latents = initial_latents(SHAPE, seed, range(batch)).to(dtype)
    trajectory = rollout(policy, dance_schedule(steps + 1), transition or DanceSDE(0.7), latents, seed)
    if isinstance(policy, MlpField):
        policy.calls.clear()
        policy.block_calls = 0
    return trajectory


def trajectory_at(
    policy: nn.Module, states: Sequence[Tensor], sigmas: Tensor, transition: Transition, noise: Tensor
) -> Trajectory:
    """Steps from given states ``[B, ...]``, which need not follow from one another; ``sigmas`` [T + 1]."""
    means, scales = [], []
    rows = torch.arange(len(states[0]))
    for step, z in enumerate(states):
        with torch.no_grad():
            velocity = policy.velocity(z, sigmas[step].expand(len(z)), rows)
        mean, scale = kernel_step(transition, z, velocity, sigmas[step], sigmas[step + 1])
        means.append(mean)
        scales.append(scale)
    after = [mean + scale * eps for mean, scale, eps in zip(means, scales, noise, strict=True)]
    log_probs = [
        kernel_log_prob(transition, z, mean, scale) for z, mean, scale in zip(after, means, scales, strict=True)
    ]
    return Trajectory(
        latents=torch.stack(list(states)),
        next_latents=torch.stack(after),
        noise=noise,
        log_probs=torch.stack(log_probs),
        sigmas=sigmas[:-1],
        next_sigmas=sigmas[1:],
        transition=transition,
        timestep_mode="float",
        final=after[-1],
        rows=rows,
        weights_version=weights_version(policy),
    )


def with_log_ratios(trajectory: Trajectory, log_ratios: Tensor) -> Trajectory:
    """The trajectory edited so that a replay with the same weights finds ``log_ratios`` [T, B]."""
    return dataclasses.replace(trajectory, log_probs=trajectory.log_probs - log_ratios)


def nudge(policy: nn.Module, size: float, seed: int = 11) -> None:
    """Move every parameter a little, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (size * step).to(parameter.dtype)


def flat_gradient(policy: nn.Module) -> Tensor:
    """All ``.grad`` in one fp64 vector; missing ones are zero."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return torch.cat([g.detach().flatten().double() for g in grads])


def gradient(
    policy: nn.Module, trajectory: Trajectory, advantages: Tensor, plan: Plan, *args: object, **settings: object
) -> tuple[Tensor, Report]:
    """Gradient of one update from zero, and the report."""
    policy.zero_grad()
    report = accumulate_gradients(policy, trajectory, advantages, plan, *args, **settings)  # type: ignore[arg-type]
    return flat_gradient(policy), report


def relative_error(found: Tensor, expected: Tensor) -> float:
    """``|found - expected| / |expected|``; the expected vector must not vanish."""
    size = expected.norm().item()
    assert size > 0, "nothing to compare with: the expected vector is zero"
    return (found - expected).norm().item() / size


def full_weights(plan: Plan) -> Tensor:
    """The plan's weights with a row for every step: ``[T, T]`` or ``[B, T, T]``."""
    matrix = plan.weights.new_zeros(*plan.weights.shape[:-2], plan.steps, plan.steps)
    matrix[..., list(plan.knots), :] = plan.weights
    return matrix


PLANS: dict[str, Callable[[Tensor], Plan]] = {
    "exact": exact_plan,
    "jagg": lambda s: jagg_plan(s, 3, 1.0),
    "jagg-routed": lambda s: jagg_plan(s, 3, 0.5),
    "jagg-index": lambda s: jagg_plan(s, 4, 1.0, "index"),
    "endpoint": lambda s: endpoint_plan(s, 3, 1.0),
    "subsample": lambda s: subsample_plan(s, 2, torch.Generator().manual_seed(0)),
    "spline": lambda s: spline_plan(s, [1, 3, 4]),
    "spline-linear": lambda s: spline_plan(s, [1, 4], "linear"),
    "causal": lambda s: causal_plan(s, [0, 2, 3]),
    "causal-lead-in": lambda s: causal_plan(s, [2, 4]),
}
"""A plan of each kind for the sigmas of six steps."""
