"""What is proved, held to numbers: exactness on a line, the size of the error off it, and the bias of anticipation."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jagg_core.objective import ClippedSurrogate
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
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition
from tests.jagg_core.fields import (
    ADVANTAGES,
    AffineField,
    PerSampleLinearField,
    QuadraticInTimeField,
    gradient,
    noise_like,
    nudge,
    relative_error,
    trajectory_at,
)
from tests.jagg_core.literal import kernel_step

OBJECTIVE = ClippedSurrogate()

# Theorem 1: v linear in (z, t), and z on a straight line in t


def straight_path(policy: AffineField, transition: Transition, steps: int = 12, batch: int = 4) -> Trajectory:
    """States on one line in sigma per sample, each with its own draw."""
    sigmas = dance_schedule(steps + 1)[: steps + 1]
    elements = len(policy.constant)
    start, direction = noise_like(batch, elements, seed=1), noise_like(batch, elements, seed=2)
    states = [start + sigma * direction for sigma in sigmas[:-1]]
    return trajectory_at(policy, states, sigmas, transition, noise_like(steps, batch, elements, seed=3))


LINEAR_RULES: dict[str, tuple[Callable[[Tensor], Plan], bool]] = {
    "jagg W=3": (lambda s: jagg_plan(s, 3, 1.0), True),
    "jagg W=4": (lambda s: jagg_plan(s, 4, 1.0), True),
    "jagg W=5, left over": (lambda s: jagg_plan(s, 5, 1.0), True),
    "jagg W=T": (lambda s: jagg_plan(s, 12, 1.0), True),
    "spline": (lambda s: spline_plan(s, [0, 4, 5, 11]), True),
    "spline of the ends": (lambda s: spline_plan(s, [0, 11]), True),
    "spline prolonged": (lambda s: spline_plan(s, [3, 8], "linear"), True),
    "jagg by index": (lambda s: jagg_plan(s, 4, 1.0, "index"), False),
    "spline held constant": (lambda s: spline_plan(s, [3, 8]), False),
    "endpoint": (lambda s: endpoint_plan(s, 4, 1.0), False),
    "causal": (lambda s: causal_plan(s, [0, 4, 8]), False),
}


@pytest.mark.parametrize("kernel", [DanceSDE(0.7), FlowSDE(0.7), CPS(0.8)], ids=["dance", "flow", "cps"])
@pytest.mark.parametrize("rule", LINEAR_RULES)
@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_linear_interpolation_is_exact_on_a_straight_path(rule: str, kernel: Transition, upstream: str) -> None:
    policy = AffineField(5)
    nudge(policy, 0.3)
    trajectory = straight_path(policy, kernel)
    make, exact = LINEAR_RULES[rule]
    found, expected = (
        gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream)[0]
        for plan in (make(trajectory.sigmas), exact_plan(trajectory.sigmas))
    )
    error = relative_error(found, expected)
    assert error < 1e-12 if exact else error > 1e-3


def test_exact_for_samples_on_their_own_steps() -> None:
    policy = AffineField(5)
    nudge(policy, 0.3)
    trajectory = straight_path(policy, DanceSDE(0.7))
    trajectory = trajectory.select(torch.tensor([[0, 1, 2, 5], [1, 3, 7, 11], [2, 4, 9, 10], [0, 8, 9, 11]]))
    found, expected = (
        gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[0]
        for plan in (jagg_plan(trajectory.sigmas, 4, 1.0), exact_plan(trajectory.sigmas))
    )
    assert relative_error(found, expected) < 1e-12


def test_noise_leaves_the_line_in_proportion_to_eta() -> None:
    """Theorem 1's second condition. The velocity is constant here, so that without noise the path is straight, but the
    Jacobian in the matrix is z itself: what is left is the noise's distance from the chord, of order eta.
    """
    errors = []
    for eta in (0.4, 0.2, 0.1, 0.05):
        policy = AffineField(5)
        latents = initial_latents((5,), 3, range(4)).double()
        trajectory = rollout(policy, dance_schedule(21), DanceSDE(eta), latents, seed=3)
        found, expected = (
            gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[0]
            for plan in (jagg_plan(trajectory.sigmas, 5, 1.0), exact_plan(trajectory.sigmas))
        )
        errors.append(relative_error(found, expected))
    assert errors[0] > 1e-2
    for larger, smaller in itertools.pairwise(errors):
        assert 1.7 < larger / smaller < 2.4, errors


def test_error_of_a_curved_field_falls_as_the_square_of_the_segment() -> None:
    """``J = (1, t, t^2)``: a step's error is ``(t_a - t)(t - t_b)`` between knots a and b.

    On an even grid that is ``n (n^2 - 1) / 6`` in sum over a segment of n steps, and there are 1/n as many of them. The
    draws are chosen to make every upstream gradient the same, so that nothing cancels.
    """
    steps = 64
    policy = QuadraticInTimeField(2)
    sigmas = torch.linspace(1, 0.2, steps + 2, dtype=torch.float64)
    transition = DanceSDE(0.7)
    ones = torch.ones(1, 2, dtype=torch.float64)
    factor = [transition.dlogp_dvelocity(ones, sigmas[j], sigmas[j + 1]) for j in range(steps + 1)]
    noise = torch.stack([ones / f for f in factor])
    states = [torch.zeros(1, 2, dtype=torch.float64)] * (steps + 1)
    trajectory = trajectory_at(policy, states, sigmas, transition, noise)
    advantages = torch.ones(1, dtype=torch.float64)
    expected = gradient(policy, trajectory, advantages, exact_plan(trajectory.sigmas), OBJECTIVE)[0]
    errors = {}
    for length in (32, 16, 8):
        plan = spline_plan(trajectory.sigmas, range(0, steps + 1, length))
        found = gradient(policy, trajectory, advantages, plan, OBJECTIVE)[0]
        errors[length] = relative_error(found, expected)
        assert torch.allclose(found[:4], expected[:4], rtol=1e-12), "constant and linear part are exact"
    assert errors[8] > 1e-6
    for length in (32, 16):
        ratio = (length**2 - 1) / ((length // 2) ** 2 - 1)
        assert errors[length] / errors[length // 2] == pytest.approx(ratio, rel=1e-6)
        assert ratio == pytest.approx(4, rel=0.02)


# Anticipation

DIMENSION, STEPS, SAMPLES = 2, 8, 20_000
MATRIX = torch.tensor([[0.5, -0.6], [0.3, 0.4]], dtype=torch.float64)
SIGMAS = dance_schedule(STEPS + 1, shift=1.0)
SDE = DanceSDE(1.0)


def step_matrices() -> tuple[list[Tensor], list[float]]:
    """``P_j = a_j + b_j M`` with ``z_{j+1} = P_j z_j + c_j eps_j``, and ``b_j``."""
    one = torch.ones(1, 1, dtype=torch.float64)
    a = [kernel_step(SDE, one, 0 * one, SIGMAS[j], SIGMAS[j + 1])[0].item() for j in range(STEPS)]
    b = [kernel_step(SDE, 0 * one, one, SIGMAS[j], SIGMAS[j + 1])[0].item() for j in range(STEPS)]
    eye = torch.eye(DIMENSION, dtype=torch.float64)
    return [a[j] * eye + b[j] * MATRIX for j in range(STEPS)], b


def expected_gradient(plan: Plan) -> Tensor:
    """Mean gradient of one sample with advantage 1, for ``v = M z`` and a Gaussian kernel.

    The upstream gradient is ``s_j = -(1/D) b_j eps_j / c_j`` and ``J(z_i)^T s_j = s_j z_i^T``. A state at or before
    step j does not contain eps_j, which has mean zero, so ``E[s_j z_i^T] = 0`` for i <= j. A later one contains it as
    ``z_i = Q c_j eps_j + ...`` with ``Q = P_{i-1} ... P_{j+1}``, so

        E[s_j z_i^T] = -(b_j / (D c_j)) E[eps_j eps_j^T] c_j Q^T = -(b_j / D) Q^T        for i > j:

    the noise level cancels. The plan's mean gradient is the sum of ``w[i, j]`` times these over its anticipating pairs.
    """
    matrices, b = step_matrices()
    total = torch.zeros(DIMENSION, DIMENSION, dtype=torch.float64)
    for position, knot in enumerate(plan.knots):
        for j in range(knot):
            q = torch.eye(DIMENSION, dtype=torch.float64)
            for between in range(j + 1, knot):
                q = matrices[between] @ q
            total += plan.weights[position, j] * -(b[j] / DIMENSION) * q.T
    return total


@pytest.fixture(scope="module")
def noise_rollout() -> tuple[PerSampleLinearField, Trajectory]:
    """Many samples of the linear field; every sample has its own copy of M."""
    policy = PerSampleLinearField(MATRIX, SAMPLES)
    noise = noise_like(STEPS, SAMPLES, DIMENSION, seed=5)
    matrices, _ = step_matrices()
    states = [noise_like(SAMPLES, DIMENSION, seed=6)]
    for j in range(STEPS - 1):
        scale = SDE.eta * (SIGMAS[j] - SIGMAS[j + 1]) ** 0.5
        states.append(states[-1] @ matrices[j].T + scale * noise[j])
    return policy, trajectory_at(policy, states, SIGMAS[: STEPS + 1], SDE, noise)


def test_the_samples_follow_one_another(noise_rollout: tuple[PerSampleLinearField, Trajectory]) -> None:
    trajectory = noise_rollout[1]
    torch.testing.assert_close(trajectory.latents[1:], trajectory.next_latents[:-1], atol=1e-12, rtol=1e-12)


LEAKING: dict[str, Callable[[Tensor], Plan]] = {
    "jagg W=3": lambda s: jagg_plan(s, 3, 1.0),
    "jagg W=4": lambda s: jagg_plan(s, 4, 1.0),
    "jagg W=5": lambda s: jagg_plan(s, 5, 1.0),
    "jagg W=8": lambda s: jagg_plan(s, 8, 1.0),
    "jagg by index": lambda s: jagg_plan(s, 4, 1.0, "index"),
    "spline": lambda s: spline_plan(s, [0, 3, 7]),
    "causal with lead-in": lambda s: causal_plan(s, [3, 5]),
}
TIGHT: dict[str, Callable[[Tensor], Plan]] = {
    "exact": exact_plan,
    "jagg W=2": lambda s: jagg_plan(s, 2, 1.0),
    "causal, 3 knots": lambda s: causal_plan(s, [0, 3, 6]),
    "causal, 1 knot": lambda s: causal_plan(s, [0]),
    "causal, predicted": lambda s: causal_plan(s, [0, 3, 6], predict=True),
    "endpoint": lambda s: endpoint_plan(s, 4, 1.0),
    "subsample": lambda s: subsample_plan(s, 3, torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("rule", [*LEAKING, *TIGHT])
def test_leak(rule: str, noise_rollout: tuple[PerSampleLinearField, Trajectory]) -> None:
    """With every advantage 1 the exact gradient has mean zero; one that anticipates has the mean computed by hand."""
    policy, trajectory = noise_rollout
    plan = (LEAKING | TIGHT)[rule](trajectory.sigmas)
    gradient(policy, trajectory, torch.ones(SAMPLES), plan, OBJECTIVE, "closed_form")
    per_sample = policy.matrices.grad
    assert per_sample is not None
    mean, error = per_sample.mean(0), per_sample.std(0) / SAMPLES**0.5
    expected = expected_gradient(plan)
    assert ((mean - expected) / error).abs().max() < 4.5
    leaks = rule in LEAKING
    assert plan.anticipating is leaks
    if leaks:
        assert (expected / error).abs().max() > 12, "the leak is meant to be many sigmas"
    else:
        assert (expected == 0).all()
