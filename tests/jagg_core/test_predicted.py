"""Shifted knots: the Jacobian at the mean sigma of the steps served, at a state carried there by the rollout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from jagg_core.engine import OffPolicyError, accumulate_gradients
from jagg_core.objective import ClippedSurrogate, upstream_closed_form
from jagg_core.plans import Plan, causal_plan, exact_plan
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import initial_latents
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition
from tests.jagg_core.fields import ADVANTAGES, SHAPE, MlpField

KNOTS = (0, 3, 7)
LATENTS = initial_latents(SHAPE, 3, range(4)).double()


def gradient(field: MlpField, plan: Plan, eta: float = 0.7, **options: object) -> torch.Tensor:
    trajectory = rollout(field, dance_schedule(11), DanceSDE(eta), LATENTS, seed=5)
    field.zero_grad(set_to_none=True)
    accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate(), **options)  # type: ignore[arg-type]
    return torch.cat([p.grad.flatten() for p in field.parameters() if p.grad is not None])


@pytest.mark.parametrize("transition", [DanceSDE(0.7), FlowSDE(0.7), CPS(0.7)], ids=repr)
def test_the_rollouts_velocity_comes_back_without_a_forward(transition: Transition) -> None:
    field = MlpField()
    trajectory = rollout(field, dance_schedule(11), transition, LATENTS, seed=5)
    for step in range(trajectory.steps):
        expected = field.velocity(trajectory.latents[step], trajectory.network_sigma(step), trajectory.rows)
        torch.testing.assert_close(trajectory.velocity(step), expected.detach(), rtol=1e-10, atol=1e-10)


def test_sites_are_the_mean_sigma_of_the_steps_served() -> None:
    sigmas = dance_schedule(11)[:-2]
    plan = causal_plan(sigmas, KNOTS, predict=True)
    expected = torch.stack([sigmas[0:3].mean(), sigmas[3:7].mean(), sigmas[7:10].mean()])
    assert plan.knot_sigmas is not None
    torch.testing.assert_close(plan.knot_sigmas, expected, rtol=1e-14, atol=0)
    assert torch.equal(plan.weights, causal_plan(sigmas, KNOTS).weights)
    assert not plan.anticipating
    assert causal_plan(sigmas, KNOTS).knot_sigmas is None


def test_rows_with_their_own_sigmas_have_their_own_sites() -> None:
    sigmas = torch.stack([dance_schedule(11)[:-2], dance_schedule(11, shift=1.5)[:-2]])
    plan = causal_plan(sigmas, KNOTS, predict=True)
    for row in range(2):
        alone = causal_plan(sigmas[row], KNOTS, predict=True)
        assert plan.knot_sigmas is not None
        torch.testing.assert_close(plan.knot_sigmas[row], alone.knot_sigmas, rtol=1e-14, atol=0)


@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
@pytest.mark.parametrize("backward", ["joint", "batched", "sequential", "auto"])
def test_every_mode_equals_a_plain_loop(upstream: str, backward: str) -> None:
    field = MlpField()
    trajectory = rollout(field, dance_schedule(11), DanceSDE(0.7), LATENTS, seed=5)
    plan = causal_plan(trajectory.sigmas, KNOTS, predict=True)
    expected = torch.zeros(sum(p.numel() for p in field.parameters()), dtype=torch.float64)
    bounds = (*KNOTS, trajectory.steps)
    for start, stop in pairwise(bounds):
        sigma = trajectory.sigmas[start:stop].mean()
        moved = trajectory.latents[start] + (sigma - trajectory.sigmas[start]) * trajectory.velocity(start)
        total = sum(
            upstream_closed_form(ClippedSurrogate(), trajectory, j, ADVANTAGES).gradient for j in range(start, stop)
        )
        velocity = field.velocity(moved, sigma.expand(4), trajectory.rows)
        found = torch.autograd.grad(velocity, list(field.parameters()), total)
        expected += torch.cat([g.flatten() for g in found])
    actual = gradient(field, plan, upstream=upstream, backward=backward)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_a_knot_at_every_step_is_exact() -> None:
    field = MlpField()
    sigmas = dance_schedule(11)[:-2]
    predicted = causal_plan(sigmas, range(10), predict=True)
    torch.testing.assert_close(gradient(field, predicted), gradient(field, exact_plan(sigmas)), rtol=1e-9, atol=1e-12)


def test_forwards_on_policy_are_the_knots_alone() -> None:
    field = MlpField()
    trajectory = rollout(field, dance_schedule(11), DanceSDE(0.7), LATENTS, seed=5)
    plan = causal_plan(trajectory.sigmas, KNOTS, predict=True)
    report = accumulate_gradients(field, trajectory, ADVANTAGES, plan, ClippedSurrogate())
    assert (report.upstream, report.forwards, report.passes) == ("closed_form", 3, 3)
    assert report.log_ratio_max == 0


def test_closed_form_needs_weights_that_can_be_compared() -> None:
    class Hidden:
        def __init__(self, field: MlpField) -> None:
            self.field = field

        def velocity(self, latents: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.field.velocity(latents, sigma, rows)

    policy = Hidden(MlpField())
    trajectory = rollout(policy, dance_schedule(11), DanceSDE(0.7), LATENTS, seed=5)
    plan = causal_plan(trajectory.sigmas, KNOTS, predict=True)
    with pytest.raises(OffPolicyError, match=r"parameters\(\)"):
        accumulate_gradients(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(), upstream="closed_form")


def test_samples_that_are_partly_clipped_get_their_exact_gradient() -> None:
    field = MlpField()
    trajectory = rollout(field, dance_schedule(11), DanceSDE(0.7), LATENTS, seed=5)
    # a wrong stored log-probability puts step 4 of every sample outside the clip range, on the side that clips it
    moved = trajectory.log_probs.clone()
    moved[4] -= 0.1 * ADVANTAGES.sign()
    trajectory = replace(trajectory, log_probs=moved, weights_version=None)
    gradients = []
    for plan in (causal_plan(trajectory.sigmas, KNOTS, predict=True), exact_plan(trajectory.sigmas)):
        field.zero_grad(set_to_none=True)
        inside = [i for i, knot in enumerate(plan.knots) if 3 <= knot < 7]
        knots = tuple(plan.knots[i] - 3 for i in inside)
        sites = None if plan.knot_sigmas is None else plan.knot_sigmas[inside]
        window = Plan(knots, plan.weights[inside, 3:7], trajectory.sigmas[3:7], plan.name, sites)
        part = trajectory.select(range(3, 7)), ADVANTAGES, window, ClippedSurrogate()
        report = accumulate_gradients(field, *part, upstream="autograd", partly_clipped="exact")
        gradients.append(torch.cat([p.grad.flatten() for p in field.parameters() if p.grad is not None]))
        if plan.knot_sigmas is not None:
            assert report.partly_clipped == 4
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sites", [[0.5, 0.4], [0.9, 0.5, 1.5], [0.9, float("nan"), 0.1]])
def test_bad_sites_are_refused(sites: list[float]) -> None:
    with pytest.raises(ValueError, match="knot_sigmas"):
        Plan((0, 1, 2), torch.eye(3), knot_sigmas=torch.tensor(sites))
