"""The clipped surrogate against plain PPO, and the closed-form upstream gradient against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.objective import (
    ClippedSurrogate,
    step_log_prob,
    upstream_autograd,
    upstream_closed_form,
)
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition
from tests.jagg_core import literal
from tests.jagg_core.fields import ADVANTAGES, MlpField, make_rollout, nudge
from tests.jagg_core.literal import KERNEL_IDS, KERNELS

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
each_kl = pytest.mark.parametrize("kl_beta", [0.0, 0.04])


# The surrogate


LOG_RATIOS = [-0.5, -0.11, -0.09, -1e-6, 0.0, 1e-6, 0.09, 0.11, 0.5]


def ppo(log_ratio: float, advantage: float, clip: float) -> tuple[float, float]:
    """Loss and its derivative in the log ratio, case by case."""
    ratio = math.exp(log_ratio)
    if advantage > 0 and ratio > 1 + clip:
        return -advantage * (1 + clip), 0.0
    if advantage < 0 and ratio < 1 - clip:
        return -advantage * (1 - clip), 0.0
    return -advantage * ratio, -advantage * ratio


@pytest.mark.parametrize("advantage", [-2.0, -0.3, 0.0, 0.7, 4.0])
@pytest.mark.parametrize("log_ratio", LOG_RATIOS)
def test_surrogate_is_ppo(log_ratio: float, advantage: float) -> None:
    objective = ClippedSurrogate(clip_range=0.1)
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss = objective.surrogate(x, advantages)
    loss.sum().backward()
    expected, slope = ppo(log_ratio, advantage, 0.1)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(slope, abs=1e-12)
    assert objective.is_clipped(x.detach(), advantages).item() is (slope == 0 and advantage != 0)


def test_advantages_are_clipped() -> None:
    objective = ClippedSurrogate(adv_clip=2.0)
    assert objective.clip_advantages(torch.tensor([-7.0, -1.0, 0.5, 2.5])).tolist() == [-2.0, -1.0, 0.5, 2.0]
    trajectory = make_rollout(MlpField())
    big, clipped = torch.full((4,), 7.0, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
    ours, expected = (upstream_closed_form(objective, trajectory, 1, a) for a in (big, clipped))
    assert torch.equal(ours.gradient, expected.gradient)
    velocity = MlpField().velocity(trajectory.latents[1], trajectory.network_sigma(1), trajectory.rows)
    autograd = upstream_autograd(objective, trajectory, 1, velocity, big)
    torch.testing.assert_close(autograd.gradient, expected.gradient, atol=1e-12, rtol=1e-9)


def test_a_pair_clips_each_side_by_its_own_offset() -> None:
    """Flow-Factory: offsets (low, high)."""
    objective = ClippedSurrogate(clip_range=(-0.1, 0.3), adv_clip=(-1.0, 2.0))
    log_ratio = torch.tensor([0.8, 0.95, 1.25, 1.35, 0.8, 0.95, 1.25, 1.35], dtype=torch.float64).log()
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
    assert objective.is_clipped(log_ratio, advantages).tolist() == [False] * 3 + [True, True] + [False] * 3
    assert objective.surrogate(log_ratio, advantages).tolist() == pytest.approx(
        [-0.8, -0.95, -1.25, -1.3, 0.9, 0.95, 1.25, 1.35]
    )
    assert objective.clip_advantages(torch.tensor([-3.0, 0.5, 3.0])).tolist() == [-1.0, 0.5, 2.0]
    same = ClippedSurrogate(clip_range=(-0.1, 0.1))
    assert torch.equal(
        same.surrogate(log_ratio, advantages), ClippedSurrogate(clip_range=0.1).surrogate(log_ratio, advantages)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_range": (0.1, 0.2)}, r"clip_range must be a number, or offsets \(low, high\) .* got \(0.1, 0.2\)"),
        ({"adv_clip": (-1.0,)}, "adv_clip must be a number, or offsets"),
        ({"kl_form": "step"}, "kl_form must be one of .* got 'step'"),
        ({"clip_range": 0.0}, "clip_range must be positive, got 0.0"),
        ({"clip_range": math.nan}, "clip_range must be positive, got nan"),
        ({"adv_clip": -1.0}, "adv_clip must be positive, got -1.0"),
        ({"kl_beta": -0.1}, "kl_beta must be at least 0, got -0.1"),
        ({"kl_beta": math.nan}, "kl_beta must be at least 0, got nan"),
        ({"kl_beta": math.inf}, "kl_beta must be at least 0, got inf"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedSurrogate(**settings)


# Upstream gradients


def velocity_at(policy: MlpField, trajectory: Trajectory, step: int) -> Tensor:
    """Detached velocity of ``policy`` at a step of the rollout."""
    return policy.velocity(trajectory.latents[step], trajectory.network_sigma(step), trajectory.rows).detach()


@each_kernel
@each_kl
@pytest.mark.parametrize("per_row", [False, True])
def test_closed_form_on_policy_is_autograd(kernel: Transition, kl_beta: float, per_row: bool) -> None:
    policy, reference_policy = MlpField(), MlpField(seed=1)
    trajectory = make_rollout(policy, transition=kernel)
    if per_row:
        trajectory = trajectory.select(torch.tensor([[0, 1, 2], [1, 3, 5], [3, 4, 5], [0, 2, 4]]))
    objective = ClippedSurrogate(clip_range=1e-3, kl_beta=kl_beta)
    for step in range(trajectory.steps):
        velocity, reference = (velocity_at(p, trajectory, step) for p in (policy, reference_policy))
        closed = upstream_closed_form(objective, trajectory, step, ADVANTAGES, reference if kl_beta else None)
        auto = upstream_autograd(objective, trajectory, step, velocity, ADVANTAGES, reference if kl_beta else None)
        torch.testing.assert_close(closed.gradient, auto.gradient, atol=1e-11, rtol=1e-9)
        torch.testing.assert_close(closed.loss, auto.loss, atol=1e-11, rtol=1e-9)
        assert closed.log_ratio.tolist() == [0.0] * 4
        assert auto.log_ratio.abs().max() < 1e-12
        assert not closed.clipped.any()
        assert not auto.clipped.any()
        expected = literal.upstream(
            trajectory, step, velocity, ADVANTAGES, clip_range=1e-3, kl_beta=kl_beta, reference=reference
        )
        torch.testing.assert_close(auto.gradient, expected, atol=1e-11, rtol=1e-9)
        assert expected.norm() > 1e-3


@each_kernel
@each_kl
def test_closed_form_off_policy_is_autograd(kernel: Transition, kl_beta: float) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy, transition=kernel, steps=12)
    nudge(policy, 0.05)
    reference_policy = MlpField(seed=1)
    log_ratios = torch.stack(
        [step_log_prob(trajectory, j, velocity_at(policy, trajectory, j)) - trajectory.log_probs[j] for j in range(12)]
    )
    clip_range = log_ratios.abs().median().item()
    objective = ClippedSurrogate(clip_range=clip_range, kl_beta=kl_beta)
    above = below = inside = 0
    for step in range(12):
        velocity, reference = (velocity_at(p, trajectory, step) for p in (policy, reference_policy))
        closed = upstream_closed_form(objective, trajectory, step, ADVANTAGES, reference, velocity)
        auto = upstream_autograd(objective, trajectory, step, velocity, ADVANTAGES, reference)
        torch.testing.assert_close(closed.gradient, auto.gradient, atol=1e-11, rtol=1e-9)
        torch.testing.assert_close(closed.loss, auto.loss, atol=1e-11, rtol=1e-9)
        torch.testing.assert_close(closed.log_ratio, log_ratios[step], atol=1e-13, rtol=1e-9)
        torch.testing.assert_close(auto.log_ratio, log_ratios[step], atol=1e-13, rtol=1e-9)
        assert torch.equal(closed.clipped, auto.clipped)
        if kl_beta == 0:
            assert (auto.gradient[auto.clipped] == 0).all(), "a clipped step has no upstream gradient"
        assert (auto.gradient[~auto.clipped].flatten(1).norm(dim=1) > 0).all()
        above += int((auto.clipped & (log_ratios[step] > 0)).sum())
        below += int((auto.clipped & (log_ratios[step] < 0)).sum())
        inside += int((~auto.clipped).sum())
    assert min(above, below, inside) > 0, "the case is meant to have clipped steps on both sides"


@each_kernel
def test_ratio_one_gives_the_reinforce_gradient(kernel: Transition) -> None:
    """Case 2.7: a ratio of 1 everywhere is expected on the first update, and the gradient is ``-A grad log p``."""
    policy = MlpField()
    trajectory = make_rollout(policy, transition=kernel)
    for step in range(trajectory.steps):
        velocity = velocity_at(policy, trajectory, step).requires_grad_(True)
        (-ADVANTAGES * step_log_prob(trajectory, step, velocity)).sum().backward()
        assert velocity.grad is not None
        assert velocity.grad.norm() > 1e-3
        for found in (
            upstream_closed_form(ClippedSurrogate(), trajectory, step, ADVANTAGES),
            upstream_autograd(ClippedSurrogate(), trajectory, step, velocity, ADVANTAGES),
        ):
            torch.testing.assert_close(found.gradient, velocity.grad, atol=1e-12, rtol=1e-9)


def test_kl_pulls_towards_the_reference() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    velocity, reference = (velocity_at(p, trajectory, 2) for p in (policy, MlpField(seed=1)))
    without = upstream_autograd(ClippedSurrogate(), trajectory, 2, velocity, ADVANTAGES)
    pulled = upstream_autograd(ClippedSurrogate(kl_beta=0.04), trajectory, 2, velocity, ADVANTAGES, reference)
    extra = pulled.gradient - without.gradient
    assert ((extra * (velocity - reference)).flatten(1).sum(1) > 0).all()
    assert (pulled.loss > without.loss).all()
    there = upstream_autograd(ClippedSurrogate(kl_beta=0.04), trajectory, 2, velocity, ADVANTAGES, velocity)
    torch.testing.assert_close(there.gradient, without.gradient, atol=1e-14, rtol=0)


def test_kl_needs_a_reference() -> None:
    trajectory = make_rollout(MlpField())
    objective = ClippedSurrogate(kl_beta=0.04)
    with pytest.raises(ValueError, match="kl_beta is positive: a reference policy is needed"):
        upstream_closed_form(objective, trajectory, 0, ADVANTAGES)
    with pytest.raises(ValueError, match="a reference policy is needed"):
        upstream_autograd(objective, trajectory, 0, trajectory.latents[0], ADVANTAGES)


KL_FORMS = ["noise", "std", "mean", "velocity"]


@each_kernel
@pytest.mark.parametrize("form", KL_FORMS)
@pytest.mark.parametrize("per_row", [False, True])
def test_every_kl_is_the_hosts_formula(kernel: Transition, form: Any, per_row: bool) -> None:
    """In closed form, by autograd, and by the literal loss of the trainers; on and off policy."""
    if form == "std" and isinstance(kernel, DanceSDE):
        pytest.skip("no public trainer has it")
    policy, other = MlpField(), MlpField(seed=1)
    trajectory = make_rollout(policy, transition=kernel)
    if per_row:
        trajectory = trajectory.select(torch.tensor([[0, 1], [1, 3], [3, 4], [0, 5]]))
    objective = ClippedSurrogate(clip_range=1e-3, kl_beta=0.04, kl_form=form)
    for moved in (0.0, 0.05):
        nudge(policy, moved)
        for step in (0, 1):
            velocity, reference = (velocity_at(p, trajectory, step) for p in (policy, other))
            expected = literal.upstream(
                trajectory, step, velocity, ADVANTAGES, clip_range=1e-3, kl_beta=0.04, kl_form=form, reference=reference
            )
            auto = upstream_autograd(objective, trajectory, step, velocity, ADVANTAGES, reference)
            given = velocity if moved else None
            closed = upstream_closed_form(objective, trajectory, step, ADVANTAGES, reference, given)
            for found in (auto, closed):
                torch.testing.assert_close(found.gradient, expected, atol=1e-11, rtol=1e-9)
                torch.testing.assert_close(found.kl, auto.kl, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize(
    ("kernel", "form", "expected"),
    [
        # sigma 0.8 to 0.5: dt = -0.3, and the means differ by b times 1 where the velocities differ by 1
        (FlowSDE(0.7), "noise", 0.5 * 0.3 * (1 + 0.49 / 2) ** 2 * (0.2 / 0.8) / 0.49),
        (FlowSDE(0.7), "std", 0.5 * 0.3**2 * (1 + 0.49 / 2) ** 2 * (0.2 / 0.8) / 0.49),
        (FlowSDE(0.7), "mean", 0.3**2 * (1 + 0.49 / 2) ** 2),
        (FlowSDE(0.7), "velocity", 1.0),
        (DanceSDE(0.7), "noise", 0.5 * 0.3 * (1 + 0.49 / 2 * 0.2 / 0.8) ** 2 / 0.49),
        (CPS(0.5), "std", 0.5 * (0.2 * math.sqrt(0.125) - 0.4) ** 2 / 0.125),
        (CPS(0.5), "noise", 0.5 * (0.2 * math.sqrt(0.125) - 0.4) ** 2 / 0.125),
    ],
)
def test_the_kl_of_velocities_one_apart(kernel: Transition, form: Any, expected: float) -> None:
    """By hand."""
    sigma, after = (torch.tensor(x, dtype=torch.float64) for x in (0.8, 0.5))
    b = kernel.coefficients(sigma, after).velocity
    factor = ClippedSurrogate(kl_beta=1.0, kl_form=form).kl_factor(kernel, sigma, after)
    assert (factor * b**2).item() == pytest.approx(expected, rel=1e-12)


def test_a_kl_that_no_trainer_has_is_refused() -> None:
    trajectory = make_rollout(MlpField(), transition=DanceSDE(0.7))
    with pytest.raises(ValueError, match=r"kl_form 'std' does not fit the trajectory: DanceSDE .* use 'noise'"):
        ClippedSurrogate(kl_beta=0.04, kl_form="std").require_fitting(trajectory, True)
    ClippedSurrogate(kl_form="std").require_fitting(trajectory, False)


@each_kernel
def test_the_kl_of_log_ratios_needs_no_reference(kernel: Transition) -> None:
    """MixGRPO: ``kl_coeff (log r)^2 / 2``, whose gradient vanishes on policy."""
    policy = MlpField()
    trajectory = make_rollout(policy, transition=kernel)
    objective = ClippedSurrogate(clip_range=1e-3, kl_beta=5.0, kl_form="log_ratio")
    plain = ClippedSurrogate(clip_range=1e-3)
    on_policy = [upstream_closed_form(o, trajectory, 1, ADVANTAGES).gradient for o in (objective, plain)]
    torch.testing.assert_close(*on_policy)
    nudge(policy, 0.05)
    velocity = velocity_at(policy, trajectory, 1).requires_grad_(True)
    log_ratio = step_log_prob(trajectory, 1, velocity) - trajectory.log_probs[1]
    (plain.surrogate(log_ratio, ADVANTAGES) + 5.0 * log_ratio**2 / 2).sum().backward()
    auto = upstream_autograd(objective, trajectory, 1, velocity, ADVANTAGES)
    closed = upstream_closed_form(objective, trajectory, 1, ADVANTAGES, velocity=velocity.detach())
    for found in (auto, closed):
        torch.testing.assert_close(found.gradient, velocity.grad, atol=1e-12, rtol=1e-9)
    without = upstream_autograd(plain, trajectory, 1, velocity, ADVANTAGES)
    assert not torch.allclose(auto.gradient, without.gradient)


def test_upstream_gradients_carry_no_graph() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    velocity = policy.velocity(trajectory.latents[0], trajectory.network_sigma(0), trajectory.rows)
    found = upstream_autograd(ClippedSurrogate(), trajectory, 0, velocity, ADVANTAGES)
    assert velocity.requires_grad
    for tensor in (found.gradient, found.loss, found.log_ratio):
        assert not tensor.requires_grad
    with torch.no_grad():  # a trainer may call it from inside no_grad
        again = upstream_autograd(ClippedSurrogate(), trajectory, 0, velocity, ADVANTAGES)
    assert torch.equal(again.gradient, found.gradient)
