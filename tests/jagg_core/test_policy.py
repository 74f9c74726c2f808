"""The policy protocol and classifier-free guidance."""

from __future__ import annotations

import pytest
import torch

from jagg_core.engine import accumulate_gradients
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import exact_plan
from jagg_core.policy import ClassifierFreeGuidance, VelocityPolicy, guided
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import ReplayMismatch
from jagg_core.transitions import DanceSDE
from tests.jagg_core.fields import ADVANTAGES, SHAPE, ConstantField, MlpField, noise_like


def test_a_field_is_a_policy_and_a_module_is_not() -> None:
    assert isinstance(MlpField(), VelocityPolicy)
    assert isinstance(ClassifierFreeGuidance(MlpField(), MlpField(), 4.0), VelocityPolicy)
    assert not isinstance(torch.nn.Linear(1, 1), VelocityPolicy)


@pytest.mark.parametrize(("scale", "expected"), [(0.0, [5.0, 1.0]), (1.0, [2.0, 3.0]), (4.0, [-7.0, 9.0])])
def test_guidance_extrapolates_from_the_unconditional(scale: float, expected: list[float]) -> None:
    assert guided(torch.tensor([2.0, 3.0]), torch.tensor([5.0, 1.0]), scale).tolist() == expected


def test_gradients_flow_through_both_branches() -> None:
    conditional, unconditional = ConstantField(noise_like(2, 3)), ConstantField(noise_like(2, 3, seed=1))
    policy = ClassifierFreeGuidance(conditional, unconditional, 4.0)
    velocity = policy.velocity(torch.zeros(2, 3), torch.ones(2), torch.arange(2))
    torch.testing.assert_close(velocity, 4 * conditional.values - 3 * unconditional.values)
    velocity.sum().backward()
    assert conditional.offset.grad is not None
    assert unconditional.offset.grad is not None
    assert conditional.offset.grad.item() == pytest.approx(4 * 6)
    assert unconditional.offset.grad.item() == pytest.approx(-3 * 6)


def test_a_replay_with_another_guidance_scale_is_refused() -> None:
    branches = MlpField(seed=1), MlpField(seed=2)
    latents = noise_like(4, *SHAPE)
    trajectory = rollout(ClassifierFreeGuidance(*branches, 4.0), dance_schedule(4), DanceSDE(0.7), latents, seed=0)
    with pytest.raises(ReplayMismatch, match=r"guidance: the rollout used '4.0', the policy now has '4.5'"):
        accumulate_gradients(
            ClassifierFreeGuidance(*branches, 4.5),
            trajectory,
            ADVANTAGES,
            exact_plan(trajectory.sigmas),
            ClippedSurrogate(),
        )
    assert branches[0].inner.grad is None


def test_whole_numbers_are_the_same_guidance() -> None:
    """A replay under guidance 4 of a rollout under 4.0 is no other."""
    branches = MlpField(seed=1), MlpField(seed=2)
    whole, fraction = (ClassifierFreeGuidance(*branches, scale).signature() for scale in (4, 4.0))
    assert whole == fraction == {"guidance": "4.0"}
