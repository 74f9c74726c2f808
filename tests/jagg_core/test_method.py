"""Claims of docs/method.md that can be computed by hand: remainders, the leak of a scalar field, what centring hides.

Means over draws are exact, not sampled: a batch holds every node of a Gauss-Hermite rule, and the rule's weights are
factors of its advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jagg_core.objective import ClippedSurrogate, upstream_closed_form
from jagg_core.plans import Plan, causal_plan, endpoint_plan, exact_plan, jagg_plan, spline_plan, subsample_plan
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition
from tests.jagg_core.fields import (
    ADVANTAGES,
    AffineField,
    QuadraticInTimeField,
    gradient,
    noise_like,
    nudge,
    relative_error,
    trajectory_at,
)
from tests.jagg_core.literal import kernel_step
from tests.jagg_core.test_theory import straight_path

OBJECTIVE = ClippedSurrogate(clip_range=0.5)


def upstream(trajectory: Trajectory, advantages: Tensor) -> list[Tensor]:
    """``s_j`` of every step, ``[B, ...]`` each."""
    return [upstream_closed_form(OBJECTIVE, trajectory, j, advantages).gradient for j in range(trajectory.steps)]


# Linear weights on a straight path


def test_any_weights_that_keep_one_and_sigma_are_exact() -> None:
    """A plan is exact on a straight path if its weights reproduce 1 and sigma at every step, however it does so."""
    policy = AffineField(5)
    nudge(policy, 0.3)
    trajectory = straight_path(policy, DanceSDE(0.7))
    sigmas, knots = trajectory.sigmas, (1, 6, 10)
    first = noise_like(trajectory.steps, seed=4)
    a, b, c = sigmas[list(knots)]
    last = (sigmas - b - first * (a - b)) / (c - b)
    plan = Plan(knots, torch.stack([first, 1 - first - last, last]))
    found, expected = (gradient(policy, trajectory, ADVANTAGES, p, OBJECTIVE)[0] for p in (plan, exact_plan(sigmas)))
    assert relative_error(found, expected) < 1e-12
    off = Plan(knots, plan.weights * 1.01)
    assert relative_error(gradient(policy, trajectory, ADVANTAGES, off, OBJECTIVE)[0], expected) > 1e-3


@pytest.mark.parametrize("rule", ["jagg", "causal"])
def test_interpolated_velocities_are_exact_on_a_straight_path(rule: str) -> None:
    """Off policy too: velocities of an affine field have moved by an affine function of (z, t)."""
    policy = AffineField(5)
    nudge(policy, 0.3)
    trajectory = straight_path(policy, DanceSDE(0.7))
    nudge(policy, 0.02, seed=12)
    plan = jagg_plan(trajectory.sigmas, 4, 1.0) if rule == "jagg" else causal_plan(trajectory.sigmas, [0, 4, 8])
    expected, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")
    found, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated")
    assert report.log_ratio_max > 1e-3, "the policy is meant to have moved"
    error = relative_error(found, expected)
    assert error < 1e-12 if rule == "jagg" else error > 1e-5


# Remainders


def still(elements: int, sigmas: Tensor, noise: Tensor) -> tuple[QuadraticInTimeField, Trajectory]:
    """Steps of ``J = (1, t, t^2)`` at latents of zero; noise ``[T, 1, elements]``, sigmas [T + 1]."""
    policy = QuadraticInTimeField(elements)
    states = [torch.zeros(1, elements, dtype=torch.float64)] * len(noise)
    return policy, trajectory_at(policy, states, sigmas, DanceSDE(0.7), noise)


def white(sigmas: Tensor, elements: int, seed: int = 0) -> Tensor:
    """Noise whose upstream gradients have the same power at every step."""
    noise = noise_like(len(sigmas) - 1, 1, elements, seed=seed)
    one = torch.ones(1, 1, dtype=torch.float64)
    factors = [DanceSDE(0.7).dlogp_dvelocity(one, s, after).item() for s, after in pairwise(sigmas)]
    return torch.stack([eps / factor for eps, factor in zip(noise, factors, strict=True)])


def by_power(policy: nn.Module, trajectory: Trajectory, plan: Plan) -> Tensor:
    """Gradient in the coefficients of 1, t and t^2, ``[3, elements]``; the advantage is 1."""
    found, _ = gradient(policy, trajectory, torch.ones(1), plan, OBJECTIVE, "closed_form")
    return found.reshape(3, -1)


def test_the_remainder_of_linear_and_of_causal_weights() -> None:
    """The interpolated value less the true one at t: ``(t_a - t)(t - t_b) f''/2`` of linear weights between knots a and
    b, here with f'' = 2; ``(t_k - t) f'`` of causal ones.
    """
    sigmas, knots = dance_schedule(13)[:13], [0, 3, 7, 11]
    policy, trajectory = still(2, sigmas, noise_like(12, 1, 2))
    given = upstream(trajectory, torch.ones(1))
    expected = by_power(policy, trajectory, exact_plan(trajectory.sigmas))
    linear = by_power(policy, trajectory, spline_plan(trajectory.sigmas, knots)) - expected
    causal = by_power(policy, trajectory, causal_plan(trajectory.sigmas, knots)) - expected
    second, first = torch.zeros(2, 1, 2, dtype=torch.float64)
    for j, sigma in enumerate(trajectory.sigmas):
        before = max(k for k in knots if k <= j)
        after = min(k for k in knots if k >= j)
        second += (sigmas[before] - sigma) * (sigma - sigmas[after]) * given[j]
        first += (sigmas[before] - sigma) * given[j]
    torch.testing.assert_close(linear[2:], second, rtol=1e-10, atol=1e-13)
    assert linear[:2].abs().max() < 1e-13
    torch.testing.assert_close(causal[1:2], first, rtol=1e-10, atol=1e-13)
    assert causal[:1].abs().max() < 1e-13


def test_the_mean_sigma_is_the_best_site_for_independent_noise() -> None:
    """First-order error ``sum_j (x - t_j) s_j`` at a site x: on an even grid of n steps the first knot's has
    ``2 (2n - 1) / (n + 1)`` times the power of the mean's, which is the least. Equal ``s_j`` leave none at the mean.
    """
    steps = 16
    sigmas = torch.linspace(1, 0.2, steps + 1, dtype=torch.float64)
    power = {}
    policy, trajectory = still(4000, sigmas, white(sigmas, 4000))
    expected = by_power(policy, trajectory, exact_plan(trajectory.sigmas))[1]
    for predict in (False, True):
        found = by_power(policy, trajectory, causal_plan(trajectory.sigmas, [0], predict))[1]
        power[predict] = (found - expected).square().sum().item()
    assert power[False] / power[True] == pytest.approx(2 * (2 * steps - 1) / (steps + 1), rel=0.1)
    equal = white(sigmas, 1) / noise_like(steps, 1, 1)
    policy, trajectory = still(1, sigmas, equal)
    expected = by_power(policy, trajectory, exact_plan(trajectory.sigmas))[1]
    predicted = by_power(policy, trajectory, causal_plan(trajectory.sigmas, [0], predict=True))[1]
    assert relative_error(predicted, expected) < 1e-12


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("even", [True, False], ids=["equal-power", "as-it-is"])
def test_cosine_of_a_subsample(count: int, even: bool) -> None:
    """``s_j`` of different steps are orthogonal: the squared cosine is the share of the power that is kept."""
    steps, elements = 16, 4000
    sigmas = dance_schedule(steps + 1)[: steps + 1]
    noise = white(sigmas, elements) if even else noise_like(steps, 1, elements)
    policy, trajectory = still(elements, sigmas, noise)
    powers = torch.stack([s.square().sum() for s in upstream(trajectory, torch.ones(1))])
    expected = by_power(policy, trajectory, exact_plan(trajectory.sigmas))[0]
    for seed in range(3):
        plan = subsample_plan(trajectory.sigmas, count, torch.Generator().manual_seed(seed))
        found = by_power(policy, trajectory, plan)[0]
        cosine = torch.nn.functional.cosine_similarity(found, expected, dim=0).item()
        share = (powers[list(plan.knots)].sum() / powers.sum()).item()
        assert cosine == pytest.approx(share**0.5, abs=0.05)
        if even:
            assert cosine == pytest.approx((count / steps) ** 0.5, abs=0.05)


# Anticipation, by hand


class PowerField(nn.Module):
    """``v = theta z^power`` in every element: one parameter, whose Jacobian is ``z^power``."""

    def __init__(self, theta: float, power: int = 1) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float64))
        self.power = power

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        return self.theta * latents**self.power


def walk(policy: PowerField, sigmas: Tensor, kernel: Transition, start: Tensor, noise: Tensor) -> Trajectory:
    """Steps that follow from one another by the given draws ``[T, B, D]``."""
    states, rows = [start.expand(noise.shape[1:])], torch.arange(noise.shape[1])
    for step, eps in enumerate(noise[:-1]):
        velocity = policy.velocity(states[-1], sigmas[step].expand(len(eps)), rows).detach()
        mean, scale = kernel_step(kernel, states[-1], velocity, sigmas[step], sigmas[step + 1])
        states.append(mean + scale * eps)
    return trajectory_at(policy, states, sigmas, kernel, noise)


def every_draw(steps: int, elements: int = 1, nodes: int = 3) -> tuple[Tensor, Tensor]:
    """Nodes of a Gauss-Hermite rule for all draws, ``[T, B, D]``, and their weights [B].

    With 3 nodes means of polynomials up to degree 5 in each draw are exact.
    """
    at, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    index = torch.tensor(list(product(range(nodes), repeat=steps * elements)))
    noise = torch.from_numpy(at)[index].reshape(-1, steps, elements).transpose(0, 1)
    return noise, torch.from_numpy(weights)[index].prod(1)


GRID = torch.tensor([0.8, 0.6, 0.4, 0.2], dtype=torch.float64)
BY_HAND: dict[str, tuple[Callable[[Tensor], Plan], float]] = {
    "exact": (exact_plan, 0),
    "jagg": (lambda s: jagg_plan(s, 3, 1.0), 2 / 15),
    "spline": (lambda s: spline_plan(s, [0, 2]), 2 / 15),
    "endpoint": (lambda s: endpoint_plan(s, 3), 0),
    "causal": (lambda s: causal_plan(s, [0]), 0),
    "causal, predicted": (lambda s: causal_plan(s, [0], predict=True), 0),
    "causal with lead-in": (lambda s: causal_plan(s, [1]), 0.225),
}
"""Mean gradient of one sample of ``v = theta z`` with advantage 1, on `GRID` with Dance-SDE and eta 1."""


def mean_gradient(rule: str, theta: float, start: float, advantage: Callable[[Tensor], Tensor]) -> float:
    """Exact mean gradient; ``advantage`` takes all draws ``[T, B, 1]``."""
    policy = PowerField(theta)
    noise, weights = every_draw(3)
    trajectory = walk(policy, GRID, DanceSDE(1.0), torch.tensor(start, dtype=torch.float64), noise)
    plan = BY_HAND[rule][0](trajectory.sigmas)
    return gradient(policy, trajectory, weights * advantage(noise), plan, OBJECTIVE, "closed_form")[0].item()


def ones(noise: Tensor) -> Tensor:
    return torch.ones(noise.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("rule", BY_HAND)
@pytest.mark.parametrize(("theta", "start"), [(0.0, 0.0), (-0.7, 1.5), (2.0, -0.4)])
def test_the_leak_of_a_scalar_field(rule: str, theta: float, start: float) -> None:
    """Neither the value of the field nor where the sample starts is in it."""
    assert mean_gradient(rule, theta, start, ones) == pytest.approx(BY_HAND[rule][1], abs=1e-13)


@pytest.mark.parametrize("rule", BY_HAND)
def test_centring_hides_the_leak_by_its_mean(rule: str) -> None:
    """A constant added to all advantages adds that constant times the leak. Exact and causal do not notice it."""

    def shifted(by: float) -> float:
        return mean_gradient(rule, 0.3, 1.2, lambda noise: noise[:2, :, 0].sum(0) + by)

    assert shifted(1.5) - shifted(0.0) == pytest.approx(1.5 * BY_HAND[rule][1], abs=1e-12)
    assert abs(shifted(0.0)) > 0.1, "this advantage is meant to teach something"


@pytest.mark.parametrize(("rule", "expected"), [("exact", 0), ("causal", 0), ("jagg", 4 / 15)])
def test_centring_leaves_what_varies_with_the_advantage(rule: str, expected: float) -> None:
    """An advantage of mean zero that goes with a sample's own leak: ``eps_1^2 - 1``. No parameter changes its mean."""
    found = mean_gradient(rule, 0.3, 1.2, lambda noise: noise[1, :, 0] ** 2 - 1)
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kernel", [DanceSDE(0.7), FlowSDE(0.7), CPS(0.8)], ids=["dance", "flow", "cps"])
def test_the_leak_is_the_gradient_of_a_divergence(kernel: Transition) -> None:
    """Stein's lemma for the next step: ``E[J(z_1)^T s_0] = -(1/D) (b c dlogp/dmean / eps) E[grad_theta div v(z_1)]``.

    The field is ``v = theta z^3`` in two elements: ``grad_theta div v = 3 |z|^2``. For a Gaussian kernel the bracket is
    b; CPS, whose log-density lacks 1/(2 std^2), has ``2 std^2`` of it.
    """
    policy, start = PowerField(0.3, power=3), torch.tensor([0.9, -0.4], dtype=torch.float64)
    noise, weights = every_draw(2, elements=2)
    trajectory = walk(policy, GRID[:3], kernel, start, noise)
    plan = Plan((1,), torch.tensor([[1.0, 0.0]]))
    found = gradient(policy, trajectory, weights, plan, OBJECTIVE, "closed_form")[0].item()
    mean, scale = kernel_step(kernel, start[None], 0.3 * start[None] ** 3, GRID[0], GRID[1])
    b = kernel.coefficients(GRID[0], GRID[1]).velocity
    bracket = b * 2 * scale**2 if isinstance(kernel, CPS) else b
    divergence = 3 * (mean.square() + scale**2).sum()
    assert found == pytest.approx((-bracket / 2 * divergence).item(), rel=1e-10)
    assert abs(found) > 1e-2


def test_finer_steps_do_not_remove_the_leak() -> None:
    """Between fixed ends the paper's rule tends to a Stratonovich-like correction, ``int alpha (1 + sigma) / (2 sigma)
    sqrt(0.4 / sigma) d sigma``, of ``v = theta z`` at theta 0 under Dance-SDE with eta 1. A causal plan has none.

    The gradient is a quadratic form in the draws, whose mean is the sum over unit draws.
    """
    sigma = torch.linspace(0.4, 0.8, 100_001, dtype=torch.float64)
    density = (0.8 - sigma) / 0.4 * (1 + sigma) / (2 * sigma) * (0.4 / sigma).sqrt()
    limit = torch.trapezoid(density, sigma).item()
    errors = []
    for steps in (17, 33, 65):
        sigmas = torch.linspace(0.8, 0.4, steps, dtype=torch.float64)
        sigmas = torch.cat([sigmas, 2 * sigmas[-1:] - sigmas[-2:-1]])
        policy, draws = PowerField(0.0), torch.eye(steps, dtype=torch.float64)[..., None]
        trajectory = walk(policy, sigmas, DanceSDE(1.0), torch.zeros(1, dtype=torch.float64), draws)
        found, causal = (
            gradient(policy, trajectory, torch.ones(steps), plan, OBJECTIVE, "closed_form")[0].item()
            for plan in (jagg_plan(trajectory.sigmas, steps, 1.0), causal_plan(trajectory.sigmas, [0, steps // 2]))
        )
        assert causal == 0
        errors.append(abs(found / limit - 1))
    assert limit > 0.2
    assert errors[-1] < 0.05
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)
