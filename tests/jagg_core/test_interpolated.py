"""Off policy with forwards at the knots alone: velocities of the other steps have moved as the knots' have."""

from __future__ import annotations

import copy

import pytest
import torch

from jagg_core.engine import accumulate_gradients
from jagg_core.objective import ClippedSurrogate, upstream_autograd
from jagg_core.plans import Plan, causal_plan, exact_plan, jagg_plan, subsample_plan
from jagg_core.trajectory import Trajectory
from tests.jagg_core.fields import (
    ADVANTAGES,
    PLANS,
    MlpField,
    full_weights,
    gradient,
    make_rollout,
    nudge,
    relative_error,
)

OBJECTIVE = ClippedSurrogate(clip_range=0.5)
INTERPOLATING = [name for name in PLANS if name not in ("endpoint", "subsample", "spline-linear")]


def moved(size: float = 0.05) -> tuple[MlpField, Trajectory]:
    """A policy that has learnt since its rollout."""
    policy = MlpField()
    trajectory = make_rollout(policy)
    nudge(policy, size)
    return policy, trajectory


@pytest.mark.parametrize("backward", ["joint", "batched", "sequential"])
@pytest.mark.parametrize("name", INTERPOLATING)
def test_it_is_its_formula(name: str, backward: str) -> None:
    policy, trajectory = moved()
    plan = PLANS[name](trajectory.sigmas)
    full = full_weights(plan)
    before = make_before(trajectory)
    rows = trajectory.rows
    now = [policy.velocity(trajectory.latents[j], trajectory.network_sigma(j), rows) for j in range(6)]
    upstream = []
    for j in range(6):
        velocity = before[j] + sum(full[k, j] * (now[k].detach() - before[k]) for k in plan.knots)
        upstream.append(upstream_autograd(OBJECTIVE, trajectory, j, velocity, ADVANTAGES).gradient)
    totals = [sum(full[k, j] * upstream[j] for j in range(6)) for k in plan.knots]
    policy.zero_grad()
    torch.autograd.backward([now[k] for k in plan.knots], totals)
    expected = torch.cat([p.grad.flatten().clone() for p in policy.parameters() if p.grad is not None])
    found, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated", backward)
    assert relative_error(found, expected) < 1e-9
    assert report.upstream == "interpolated"


def make_before(trajectory: Trajectory) -> list[torch.Tensor]:
    """The rollout's own velocities, from the policy that made it."""
    policy = MlpField()
    with torch.no_grad():
        return [policy.velocity(trajectory.latents[j], trajectory.network_sigma(j), trajectory.rows) for j in range(6)]


def test_causal_plans_need_no_forward_but_at_their_knots() -> None:
    policy, trajectory = moved()
    plan = causal_plan(trajectory.sigmas, [0, 2, 3])
    for backward in ("joint", "batched", "sequential"):
        _, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated", backward)
        assert (report.forwards, report.passes) == (3, 3)


def test_a_group_that_is_run_knot_by_knot_looks_at_its_other_end_once() -> None:
    policy, trajectory = moved()
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    _, joint = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated", "joint")
    _, apart = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated", "sequential")
    assert (joint.forwards, apart.forwards) == (4, 6)


def test_exact_plans_interpolate_nothing() -> None:
    policy, trajectory = moved()
    plan = exact_plan(trajectory.sigmas)
    found, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated")
    expected, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")
    assert relative_error(found, expected) < 1e-9


def test_on_policy_it_is_the_closed_form() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = causal_plan(trajectory.sigmas, [0, 2, 3])
    found, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated")
    expected, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form")
    assert relative_error(found, expected) < 1e-9
    assert report.log_ratio_max < 1e-10


def test_it_is_closer_to_autograd_than_taking_the_policy_for_the_rollouts() -> None:
    policy, trajectory = moved(0.02)
    plan = causal_plan(trajectory.sigmas, [0, 2, 3])
    expected, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")
    found, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "interpolated")
    stale = copy.deepcopy(trajectory)
    as_if, _ = gradient(policy, retold(policy, stale), ADVANTAGES, plan, OBJECTIVE, "closed_form")
    assert relative_error(found, expected) < 0.3 * relative_error(as_if, expected)


def retold(policy: MlpField, trajectory: Trajectory) -> Trajectory:
    """The trajectory as if the policy of today had made it: its weights and log-probabilities, the old noise."""
    from dataclasses import replace

    from jagg_core.objective import step_log_prob
    from jagg_core.trajectory import weights_version

    with torch.no_grad():
        found = [
            step_log_prob(
                trajectory, j, policy.velocity(trajectory.latents[j], trajectory.network_sigma(j), trajectory.rows)
            )
            for j in range(trajectory.steps)
        ]
    return replace(trajectory, log_probs=torch.stack(found), weights_version=weights_version(policy))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda s: subsample_plan(s, 2, torch.Generator()), "weights sum to 1 for every step, got 0 to 3"),
        (lambda s: causal_plan(s, [0, 3], predict=True), "not shifted knots"),
    ],
    ids=["sum", "predicted"],
)
def test_plans_that_do_not_interpolate_are_refused(plan: object, message: str) -> None:
    policy, trajectory = moved()
    made: Plan = plan(trajectory.sigmas)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(policy, trajectory, ADVANTAGES, made, OBJECTIVE, "interpolated")
    assert policy.calls == []
