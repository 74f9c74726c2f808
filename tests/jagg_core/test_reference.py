"""The plain loop and the engine: two ways to the same gradient, for every plan."""

from __future__ import annotations

import math

import pytest
import torch

from jagg_core.objective import upstream_closed_form
from jagg_core.plans import Plan, causal_plan
from jagg_core.reference import plain_gradient, relative_error
from tests.jagg_core.fields import ADVANTAGES, PLANS, MlpField, gradient, make_rollout, noise_like
from tests.jagg_core.test_engine import OBJECTIVE

MORE = {
    "causal-predicted": lambda sigmas: causal_plan(sigmas, [0, 2, 4], predict=True),
    "weights by sample": lambda sigmas: Plan((1, 4), noise_like(4, 2, 6), sigmas),
}


@pytest.mark.parametrize("name", [*PLANS, *MORE])
def test_the_plain_loop_is_the_engine(name: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = (PLANS | MORE)[name](trajectory.sigmas)
    parameters = list(policy.parameters())
    upstream = [upstream_closed_form(OBJECTIVE, trajectory, j, ADVANTAGES).gradient for j in range(trajectory.steps)]
    policy.zero_grad()
    plain = plain_gradient(policy, parameters, trajectory, upstream, plan)
    assert all(p.grad is None for p in parameters)
    found, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)
    expected = torch.cat([g.flatten() for g in plain])
    assert relative_error([found], [expected]) < 1e-11


def test_relative_error() -> None:
    a, b = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], [torch.zeros(2), torch.zeros(1, 1)]
    assert relative_error(a, a) == relative_error(b, b) == relative_error(b, [None, None]) == 0
    assert relative_error(b, a) == relative_error([None, None], a) == relative_error(a, b) == 1
    assert relative_error([2 * x for x in a], a) == 1
    assert relative_error([a[0], torch.tensor([[4.5]])], a) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"shape \[2\], got \[1\]"):
        relative_error([torch.zeros(1)], [torch.zeros(2)])


@pytest.mark.parametrize("actual, expected", [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)])
def test_nan_is_never_equal(actual: float, expected: float) -> None:
    assert math.isnan(relative_error([torch.tensor([actual])], [torch.tensor([expected])]))
