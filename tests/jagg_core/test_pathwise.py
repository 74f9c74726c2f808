"""Pathwise upstream gradients against autograd through the rollout, and against the score function by quadrature."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jagg_core import (
    CPS,
    ClippedSurrogate,
    DanceSDE,
    FlowSDE,
    OffPolicyError,
    ReplayMismatch,
    group_advantages,
    rollout,
)
from jagg_core.advantages import advantage_slopes
from jagg_core.objective import upstream_closed_form
from jagg_core.pathwise import Adjoint, adjoint_sweep, pathwise_upstream
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import Transition, expand
from tests.jagg_core.fields import MlpField, QuadraticInTimeField, make_rollout, noise_like, nudge

KERNELS = [DanceSDE(0.7), FlowSDE(0.6), CPS(0.5)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)


def bend(final: Tensor) -> Tensor:
    """A smooth reward ``[B]`` of final samples."""
    return torch.tanh(final).flatten(1).sum(1) + 0.1 * final.flatten(1).square().mean(1)


def replayed(field: nn.Module, trajectory: Trajectory, start: Tensor, from_step: int, length: Tensor) -> Tensor:
    """The final samples as a function of the state before ``from_step``, with the stored noise."""
    state, rows = start, trajectory.rows
    for step in range(from_step, trajectory.steps):
        a, b, scale = trajectory.transition.coefficients(trajectory.sigma(step), trajectory.next_sigma(step))
        velocity = field.velocity(state, trajectory.network_sigma(step), rows)
        state = a * state + b * velocity + scale * trajectory.noise[step]
    sigma = trajectory.next_sigma(trajectory.steps - 1)
    return state + length * field.velocity(state, sigma.expand(len(state)), rows)


@each_kernel
def test_the_full_sweep_is_autograd_through_the_rollout(kernel: Transition) -> None:
    field = MlpField()
    trajectory = make_rollout(field, steps=5, transition=kernel)
    adjoint = adjoint_sweep(field, trajectory, bend)
    torch.testing.assert_close(adjoint.rewards, bend(trajectory.final))
    assert (adjoint.forwards, adjoint.pullbacks) == (5, 5)
    for step in range(5):
        state = trajectory.next_latents[step].clone().requires_grad_(True)
        final = replayed(field, trajectory, state, step + 1, -trajectory.next_sigma(4))
        (expected,) = torch.autograd.grad(bend(final).sum(), state)
        torch.testing.assert_close(adjoint.gradients[step], expected, rtol=1e-10, atol=1e-12)
    assert all(parameter.grad is None for parameter in field.parameters())
    norms = adjoint.gradients.flatten(2).square().sum(-1).mean(-1).sqrt()
    torch.testing.assert_close(adjoint.norms, norms)


def test_a_window_is_swept_through_the_deterministic_steps_after_it() -> None:
    field, schedule = MlpField(), dance_schedule(9)
    latents = noise_like(4, 3, 2, seed=1)
    trajectory = rollout(field, schedule, DanceSDE(0.7), latents, 3, window=range(1, 4))
    adjoint = adjoint_sweep(field, trajectory, bend, schedule=schedule)
    state = trajectory.next_latents[-1].clone().requires_grad_(True)
    moved = state
    for step in range(4, 9):
        velocity = field.velocity(moved, schedule[step].expand(4), trajectory.rows)
        moved = moved + (schedule[step + 1] - schedule[step]) * velocity
    (expected,) = torch.autograd.grad(bend(moved).sum(), state)
    torch.testing.assert_close(adjoint.gradients[-1], expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ReplayMismatch, match="deterministic steps arrive"):
        adjoint_sweep(field, trajectory, bend)
    with pytest.raises(ReplayMismatch, match="schedule must hold"):
        adjoint_sweep(field, trajectory, bend, schedule=dance_schedule(7))


@each_kernel
def test_knots_at_every_step_are_the_full_sweep(kernel: Transition) -> None:
    field = MlpField()
    trajectory = make_rollout(field, steps=5, transition=kernel)
    full = adjoint_sweep(field, trajectory, bend).gradients
    every = adjoint_sweep(field, trajectory, bend, sweep="knots", knots=range(5))
    torch.testing.assert_close(every.gradients, full, rtol=1e-10, atol=1e-12)


def test_a_sweep_at_knots_is_close_and_cheaper() -> None:
    field = MlpField()
    trajectory = make_rollout(field, steps=12)
    full = adjoint_sweep(field, trajectory, bend)
    some = adjoint_sweep(field, trajectory, bend, sweep="knots", knots=[0, 4, 8])
    frozen = adjoint_sweep(field, trajectory, bend, sweep="frozen")
    assert (full.pullbacks, some.pullbacks, frozen.forwards) == (12, 3, 0)
    at_first = [(each.gradients[0] - full.gradients[0]).norm().item() for each in (some, frozen)]
    assert 0 < at_first[0] < 0.5 * at_first[1]


@each_kernel
def test_a_field_that_ignores_the_latents_needs_no_network(kernel: Transition) -> None:
    field = QuadraticInTimeField(6)
    latents = noise_like(3, 6, seed=2)
    trajectory = rollout(field, dance_schedule(6), kernel, latents, 1)
    full, frozen = (adjoint_sweep(field, trajectory, bend, sweep=sweep).gradients for sweep in ("full", "frozen"))
    torch.testing.assert_close(frozen, full, rtol=1e-12, atol=1e-14)


# The identity E[J_k^T s_j] = E[J_k^T p_j], by Gauss-Hermite quadrature over all the noise of a group


def grid(dimensions: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Points ``[P, dimensions]`` and weights ``[P]`` for expectations over independent standard normals."""
    points, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(nodes))
    places = torch.tensor(list(product(range(nodes), repeat=dimensions)))
    return points[places], (weights / weights.sum())[places].prod(-1)


def with_noise(field: nn.Module, kernel: Transition, sigmas: Tensor, start: Tensor, noise: Tensor) -> Trajectory:
    """A rollout of samples ``start`` [B, 1] with given noise ``[T, B, 1]``."""
    rows, state, states, log_probs = torch.zeros(len(start), dtype=torch.long), start, [], []
    with torch.no_grad():
        for step, drawn in enumerate(noise):
            a, b, scale = kernel.coefficients(sigmas[step], sigmas[step + 1])
            mean = a * state + b * field.velocity(state, sigmas[step].expand(len(state)), rows)
            states.append(state)
            state = mean + scale * drawn
            log_probs.append(kernel.log_prob(state, mean, scale))
        final = state - sigmas[len(noise)] * field.velocity(state, sigmas[len(noise)].expand(len(state)), rows)
    return Trajectory(
        latents=torch.stack(states),
        next_latents=torch.stack([*states[1:], state]),
        noise=noise,
        log_probs=torch.stack(log_probs),
        sigmas=sigmas[: len(noise)],
        next_sigmas=sigmas[1 : len(noise) + 1],
        transition=kernel,
        timestep_mode="float",
        final=final,
        rows=rows,
    )


def expected_products(
    kernel: Transition,
    group: int,
    steps: int,
    nodes: int,
    advantages_of: Callable[..., Tensor],
    slopes: Callable[..., Tensor],
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """By knot and step: ``E[J_k^T s_j]`` and ``E[J_k^T p_j]`` over all the noise of a group of samples."""
    field = MlpField(elements=1, samples=1, hidden=4)
    points, weights = grid(group * steps, nodes)
    noise = points.reshape(-1, group, steps).permute(2, 0, 1).reshape(steps, -1, 1).contiguous()
    start = torch.linspace(-0.5, 0.7, group, dtype=torch.float64).repeat(len(points))[:, None]
    trajectory = with_noise(field, kernel, dance_schedule(steps + 1), start, noise)
    ids = torch.arange(len(points)).repeat_interleave(group)
    adjoint = adjoint_sweep(field, trajectory, bend)
    pathwise = pathwise_upstream(trajectory, adjoint, slopes(adjoint.rewards, ids))
    advantages = advantages_of(adjoint.rewards, ids).double()
    objective = ClippedSurrogate(adv_clip=100.0)
    weight = weights.repeat_interleave(group)[:, None]
    found = {}
    for knot, step in product(range(steps), repeat=2):
        score = upstream_closed_form(objective, trajectory, step, advantages).gradient
        pair = []
        for upstream in (score, pathwise[step]):
            velocity = field.velocity(trajectory.latents[knot], trajectory.network_sigma(knot), trajectory.rows)
            gradients = torch.autograd.grad(velocity, list(field.parameters()), weight * upstream)
            pair.append(torch.cat([g.flatten() for g in gradients]))
        found[knot, step] = (pair[0], pair[1])
    return found


@each_kernel
@pytest.mark.parametrize("group", [1, 2])
def test_pathwise_and_score_function_agree_in_expectation_unless_the_knot_looks_ahead(
    kernel: Transition, group: int
) -> None:
    centre = "none" if group == 1 else "prompt"
    options = {"centre": centre, "scale": "none"}
    products = expected_products(
        kernel,
        group,
        steps=2,
        nodes=24 if group == 1 else 14,
        advantages_of=lambda rewards, ids: group_advantages(rewards, ids, **options),
        slopes=lambda rewards, ids: advantage_slopes(rewards, ids, **options),
    )
    for (knot, step), (score, pathwise) in products.items():
        distance = ((score - pathwise).norm() / pathwise.norm()).item()
        if knot <= step:
            assert distance < 2e-6, (knot, step)
        else:
            assert distance > 0.05, "a knot that looks ahead has a term that the pathwise gradient does not see"


def test_advantages_divided_by_their_std_agree_in_expectation() -> None:
    products = expected_products(
        DanceSDE(0.7),
        4,
        steps=1,
        nodes=16,
        advantages_of=lambda rewards, ids: group_advantages(rewards, ids),
        slopes=lambda rewards, ids: advantage_slopes(rewards, ids),
    )
    score, pathwise = products[0, 0]
    assert ((score - pathwise).norm() / pathwise.norm()).item() < 2e-2
    constant = expected_products(
        DanceSDE(0.7),
        4,
        steps=1,
        nodes=16,
        advantages_of=lambda rewards, ids: group_advantages(rewards, ids),
        slopes=lambda rewards, ids: torch.full_like(rewards, 3 / 4),
    )[0, 0][1]
    assert ((score - constant).norm() / constant.norm()).item() > 0.1, "the std's share of the slope matters"


@pytest.mark.parametrize("centre", ["prompt", "batch", "none"])
@pytest.mark.parametrize("scale", ["prompt", "batch", "none"])
@pytest.mark.parametrize("std", ["sample", "population"])
def test_slopes_are_the_derivative_of_advantages(centre: str, scale: str, std: str) -> None:
    rewards, ids = noise_like(7, seed=4), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    options = {"centre": centre, "scale": scale, "std": std, "eps": 1e-3}
    slopes = advantage_slopes(rewards, ids, **options)  # type: ignore[arg-type]
    for sample in range(7):
        values = []
        for sign in (1, -1):
            moved = rewards.clone()
            moved[sample] += sign * 1e-3
            values.append(group_advantages(moved, ids, **options)[sample].double())  # type: ignore[arg-type]
        assert slopes[sample].item() == pytest.approx((values[0] - values[1]).item() / 2e-3, abs=2e-3)


def test_equal_rewards_have_slope_zero_and_pairs_are_refused() -> None:
    equal = advantage_slopes(torch.full((3,), 0.95), torch.zeros(3, dtype=torch.long))
    assert torch.equal(equal, torch.zeros(3))
    with pytest.raises(ValueError, match="at least 3 samples"):
        advantage_slopes(torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.long))


# Refusals


class Blind(MlpField):
    """A field that detaches its input."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return super().velocity(latents, sigma, rows)


class Reentrant(MlpField):
    """A field under reentrant checkpointing."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        if not latents.requires_grad:
            return super().velocity(latents, sigma, rows)
        return checkpoint(super().velocity, latents, sigma, rows, use_reentrant=True)


@pytest.mark.parametrize(
    ("field", "reward", "message"),
    [
        (MlpField(), lambda z: bend(z.detach()), "reward: it has no gradient in the final samples"),
        (MlpField(), lambda z: bend(z).round().detach() + 0 * bend(z)[:1].sum(), None),
        (MlpField(), lambda z: bend(z)[:2], r"reward must return shape \[4\], got \[2\]"),
        (Blind(), bend, "no gradient in the latents"),
        (Reentrant(), bend, "use_reentrant=False"),
    ],
)
def test_what_has_no_gradient_is_refused(
    field: nn.Module, reward: Callable[[Tensor], Tensor], message: str | None
) -> None:
    trajectory = make_rollout(field)
    if message is None:
        assert not adjoint_sweep(field, trajectory, reward).gradients.any()
        return
    with pytest.raises(ValueError, match=message):
        adjoint_sweep(field, trajectory, reward)


def test_a_gradient_that_is_not_finite_names_its_place() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    with pytest.raises(FloatingPointError, match="at the final samples"):
        adjoint_sweep(field, trajectory, lambda z: (z.flatten(1).sum(1) * 0).sqrt())


def test_other_weights_or_steps_are_refused() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    with pytest.raises(ValueError, match="consecutive steps"):
        adjoint_sweep(field, trajectory.select([0, 2, 3]), bend)
    with pytest.raises(ValueError, match=r"sigmas must have shape \[T\]"):
        rows = dataclasses.replace(trajectory, sigmas=trajectory.sigmas.expand(4, -1))
        adjoint_sweep(field, rows, bend)
    for knots, message in (([1, 3], "must begin with step 0"), ([], "knots must be given"), ([0, 9], "knots must lie")):
        with pytest.raises(ValueError, match=message):
            adjoint_sweep(field, trajectory, bend, sweep="knots", knots=knots)
    with pytest.raises(ValueError, match="sweep"):
        adjoint_sweep(field, trajectory, bend, sweep="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slopes must have shape \[4\]"):
        pathwise_upstream(trajectory, Adjoint(trajectory.latents, torch.zeros(4), 0, 0), torch.ones(3))
    nudge(field, 0.01)
    with pytest.raises(OffPolicyError, match="weights changed"):
        adjoint_sweep(field, trajectory, bend)


def test_upstream_scales_with_the_slopes() -> None:
    field = MlpField()
    trajectory = make_rollout(field, transition=CPS(0.5))
    adjoint = adjoint_sweep(field, trajectory, bend)
    slopes = torch.tensor([1.0, 0.5, 0.0, -1.0])
    upstream = pathwise_upstream(trajectory, adjoint, slopes)
    _, b, c = trajectory.transition.coefficients(trajectory.sigma(2), trajectory.next_sigma(2))
    by_hand = -expand(slopes, trajectory.final) * 2 * b * c**2 / trajectory.elements * adjoint.gradients[2]
    torch.testing.assert_close(upstream[2], by_hand)
