"""Upstream gradients that the caller gives: every plan and mode, as the policy gradient runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core import ClippedSurrogate, accumulate_gradients, causal_plan, exact_plan
from jagg_core.objective import upstream_autograd, upstream_closed_form
from tests.jagg_core.fields import (
    ADVANTAGES,
    PLANS,
    MlpField,
    flat_gradient,
    gradient,
    make_rollout,
    nudge,
    relative_error,
)

OBJECTIVE = ClippedSurrogate()


@pytest.mark.parametrize("backward", ["joint", "batched", "sequential"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_policy_gradient_is_one_case_of_it(name: str, backward: str, checkpointing: bool) -> None:
    field = MlpField(checkpointing=checkpointing)
    trajectory = make_rollout(field)
    plan = PLANS[name](trajectory.sigmas)
    expected, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form", backward, scale=0.3)
    steps = [upstream_closed_form(OBJECTIVE, trajectory, j, ADVANTAGES).gradient for j in range(6)]
    field.zero_grad()
    report = accumulate_gradients(
        field,
        trajectory,
        None,
        plan,
        None,
        torch.stack(steps),
        backward,
        scale=0.3,  # type: ignore[arg-type]
    )
    assert relative_error(flat_gradient(field), expected) < 1e-12
    assert (report.upstream, report.passes, report.forwards) == ("given", plan.passes, plan.passes)
    assert (report.loss, report.log_ratio_max, report.clipped_share) == (0, 0, 0)


@pytest.mark.parametrize("backward", ["joint", "batched", "sequential"])
@pytest.mark.parametrize("name", PLANS)
def test_a_function_sees_the_velocity_of_every_step_that_the_plan_uses(name: str, backward: str) -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    nudge(field, 1e-3)
    plan = PLANS[name](trajectory.sigmas)
    settings = {"partly_clipped": "keep"}
    expected, with_autograd = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", backward, **settings)
    asked: list[int] = []

    def upstream(step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        asked.append(step)
        assert torch.equal(latents, trajectory.latents[step])
        return upstream_autograd(OBJECTIVE, trajectory, step, velocity, ADVANTAGES).gradient

    found, report = gradient(field, trajectory, None, plan, None, upstream, backward)  # type: ignore[arg-type]
    assert relative_error(found, expected) < 1e-12
    assert sorted(asked) == plan.used.any(0).nonzero().flatten().tolist()
    assert report.forwards == with_autograd.forwards


def test_shifted_knots_take_given_gradients() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    plan = causal_plan(trajectory.sigmas, [0, 3], predict=True)
    expected, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form")
    steps = torch.stack([upstream_closed_form(OBJECTIVE, trajectory, j, ADVANTAGES).gradient for j in range(6)])
    for given in (steps, lambda step, latents, velocity: steps[step]):
        found, _ = gradient(field, trajectory, None, plan, None, given)  # type: ignore[arg-type]
        assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"upstream": torch.zeros(5, 4, 3, 2)}, r"upstream must have shape \[6, 4, 3, 2\], got \[5, 4, 3, 2\]"),
        ({"upstream": lambda *_: torch.zeros(4, 3)}, r"upstream must give \[4, 3, 2\] at step \d, got \[4, 3\]"),
        ({"upstream": 3}, "upstream must be a mode, a tensor or a function, got int"),
        ({"upstream": torch.zeros(6, 4, 3, 2), "advantages": ADVANTAGES}, "must be None where upstream"),
        ({"upstream": torch.zeros(6, 4, 3, 2), "objective": OBJECTIVE}, "must be None where upstream"),
        ({"upstream": "given"}, "upstream must be one of"),
        ({"upstream": "closed_form"}, "advantages and objective must be given with upstream='closed_form'"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    given = {"advantages": None, "objective": None} | settings
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(field, trajectory, plan=exact_plan(trajectory.sigmas), **given)
    assert not flat_gradient(field).any()


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    field = MlpField()
    trajectory = make_rollout(field)
    with pytest.raises(FloatingPointError, match="upstream gradient is not finite"):
        given = torch.full_like(trajectory.latents, torch.nan)
        accumulate_gradients(field, trajectory, None, exact_plan(trajectory.sigmas), None, given)
