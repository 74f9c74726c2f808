"""Advantages, the clipped surrogate against plain PPO, and the closed-form upstream gradient against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.objective import (
    ClippedSurrogate,
    NoGroupSignal,
    group_advantages,
    groups_without_signal,
    step_log_prob,
    upstream_autograd,
    upstream_closed_form,
)
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import Transition
from tests.jagg_core import literal
from tests.jagg_core.fields import ADVANTAGES, MlpField, make_rollout, nudge
from tests.jagg_core.literal import KERNEL_IDS, KERNELS

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
each_kl = pytest.mark.parametrize("kl_beta", [0.0, 0.04])


def advantages_of(rewards: list[float], prompts: list[int] | None = None, **options: Any) -> list[float]:
    """Advantages as a list; a single prompt by default."""
    ids = torch.tensor(prompts or [0] * len(rewards))
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), ids, **options).tolist()


# Advantages (cases 7.4, 7.5, 7.6)


def test_statistics_are_per_prompt() -> None:
    found = advantages_of([1.0, 5.0, 2.0, 3.0, 9.0, 4.0], [0, 1, 0, 0, 1, 1])
    assert found[0:4:2] == pytest.approx([-1.0, 0.0])
    assert found[3] == pytest.approx(1.0)
    deviation = math.sqrt((1 + 9 + 4) / 2)
    assert [found[i] for i in (1, 4, 5)] == pytest.approx([-1 / deviation, 3 / deviation, -2 / deviation])


@pytest.mark.parametrize(("std", "expected"), [("sample", 0.5**0.5), ("population", 1.0)])
def test_sample_and_population_std(std: str, expected: float) -> None:
    assert advantages_of([0.0, 1.0], std=std) == pytest.approx([-expected, expected], abs=1e-6)


def test_two_rewards_are_not_diluted_by_steps() -> None:
    """Case 7.5: +-0.7071, where statistics over ten repeats would give +-0.975."""
    once = group_advantages(torch.tensor([0.0, 1.0]), torch.zeros(2))
    repeated = once[:, None].expand(2, 10)  # what a trainer does with the result
    assert repeated.unique().tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)


def test_a_reward_that_is_not_finite_is_left_out() -> None:
    rewards = [1.0, math.nan, 3.0]
    assert advantages_of(rewards, nan="exclude", std="population") == pytest.approx([-1.0, 0.0, 1.0])
    assert advantages_of([math.inf, 2.0, 4.0], nan="exclude", std="population") == pytest.approx([0.0, -1.0, 1.0])
    assert advantages_of([math.nan, math.nan], nan="exclude") == [0.0, 0.0]
    with pytest.raises(ValueError, match="rewards must be finite, found nan at sample 1"):
        advantages_of(rewards)


def test_a_single_sample_has_no_signal() -> None:
    with pytest.warns(NoGroupSignal, match="no group signal"):
        assert advantages_of([1.0]) == [0.0]
    with pytest.warns(NoGroupSignal):
        found = advantages_of([1.0, 3.0, 7.0], [0, 0, 1])
    assert found == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])


def test_statistics_over_the_batch_need_no_group() -> None:
    found = advantages_of([1.0, 2.0, 3.0], [0, 1, 2], centre="batch", scale="batch")
    assert found == pytest.approx([-1.0, 0.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["prompt", "batch", "none"])
@pytest.mark.parametrize(("reward", "count"), [(0.95, 8), (0.1, 3), (1 / 3, 7), (0.0, 4), (-2e6, 5)])
def test_equal_rewards_have_no_advantage(reward: float, count: int, scale: Any, dtype: torch.dtype) -> None:
    """Case 7.4: a mean that is off by an ulp must not be divided by 1e-8. The second prompt has a spread of its own."""
    rewards = torch.tensor([reward] * count + [1.0, 2.0], dtype=dtype)
    prompts = torch.tensor([0] * count + [1, 1])
    found = group_advantages(rewards, prompts, scale=scale)
    assert found[:count].tolist() == [0.0] * count
    assert found[-1] > 0
    assert groups_without_signal(found, prompts) == 1


def test_rewards_off_by_an_ulp_have_no_advantage() -> None:
    rewards = torch.full((8,), 0.95)
    rewards[3] = torch.nextafter(rewards[3], torch.tensor(1.0))
    assert group_advantages(rewards, torch.zeros(8)).tolist() == [0.0] * 8


def test_small_but_real_differences_count() -> None:
    assert advantages_of([0.95, 0.9501]) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)


OPTIONS = [
    ("prompt", "prompt", [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5]),
    ("prompt", "batch", [-1 / 5**0.5, 1 / 5**0.5, -2 / 5**0.5, 2 / 5**0.5]),
    ("prompt", "none", [-1, 1, -2, 2]),
    ("batch", "batch", [-2 / 5**0.5, 0.0, -1 / 5**0.5, 3 / 5**0.5]),
    ("batch", "prompt", [-2 / 2**0.5, 0.0, -1 / 8**0.5, 3 / 8**0.5]),
    ("batch", "none", [-2, 0, -1, 3]),
    ("none", "prompt", [1 / 2**0.5, 3 / 2**0.5, 2 / 8**0.5, 6 / 8**0.5]),
    ("none", "none", [1, 3, 2, 6]),
]


@pytest.mark.parametrize(("centre", "scale", "expected"), OPTIONS, ids=[f"{c}-{s}" for c, s, _ in OPTIONS])
def test_centre_and_scale(centre: str, scale: str, expected: list[float]) -> None:
    """Rewards 1, 3 and 2, 6: prompt means 2 and 4, batch mean 3; stds sqrt 2, sqrt 8, and sqrt(14/3) over the batch."""
    if scale == "batch":
        expected = [x * 5**0.5 / (14 / 3) ** 0.5 for x in expected]
    found = advantages_of([1.0, 3.0, 2.0, 6.0], [0, 0, 1, 1], centre=centre, scale=scale)
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_result_is_fp32_and_detached() -> None:
    rewards = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    found = group_advantages(rewards, torch.zeros(2))
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_large_rewards_keep_their_spread() -> None:
    """In fp32 statistics 1e6 + [0, 1, 2] would lose digits."""
    assert advantages_of([1e5, 1e5 + 1, 1e5 + 2]) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "prompts", "options", "message"),
    [
        (torch.zeros(2), torch.zeros(3), {}, r"found \[2\] and \[3\]"),
        (torch.zeros(2, 2), torch.zeros(2, 2), {}, r"must both have shape \[B\]"),
        (torch.zeros(0), torch.zeros(0), {}, "B >= 1"),
        (torch.zeros(2), torch.zeros(2), {"centre": "group"}, "centre must be one of .* found 'group'"),
        (torch.zeros(2), torch.zeros(2), {"scale": "group"}, "scale must be one of"),
        (torch.zeros(2), torch.zeros(2), {"std": "biased"}, "std must be one of"),
        (torch.zeros(2), torch.zeros(2), {"nan": "zero"}, "nan must be one of"),
    ],
)
def test_bad_rewards_and_options_are_named(
    rewards: Tensor, prompts: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, prompts, **options)


def test_groups_without_signal_are_counted() -> None:
    prompts = torch.tensor([7, 7, 3, 3, 5])
    assert groups_without_signal(torch.tensor([0.0, 0.0, -1.0, 1.0, 0.0]), prompts) == 2
    assert groups_without_signal(torch.tensor([0.0, 0.1, -1.0, 1.0, -0.1]), prompts) == 0


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
    velocity = MlpField().velocity(trajectory.latents[1], trajectory.told_sigma(1), trajectory.rows)
    autograd = upstream_autograd(objective, trajectory, 1, velocity, big)
    torch.testing.assert_close(autograd.gradient, expected.gradient, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_range": 0.0}, "clip_range must be positive, found 0.0"),
        ({"clip_range": math.nan}, "clip_range must be positive, found nan"),
        ({"adv_clip": -1.0}, "adv_clip must be positive, found -1.0"),
        ({"kl_beta": -0.1}, "kl_beta must be at least 0, found -0.1"),
        ({"kl_beta": math.nan}, "kl_beta must be at least 0, found nan"),
        ({"kl_beta": math.inf}, "kl_beta must be at least 0, found inf"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedSurrogate(**settings)


# Upstream gradients


def velocity_at(policy: MlpField, trajectory: Trajectory, step: int) -> Tensor:
    """Detached velocity of ``policy`` at a step of the rollout."""
    return policy.velocity(trajectory.latents[step], trajectory.told_sigma(step), trajectory.rows).detach()


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


def test_upstream_gradients_carry_no_graph() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    velocity = policy.velocity(trajectory.latents[0], trajectory.told_sigma(0), trajectory.rows)
    found = upstream_autograd(ClippedSurrogate(), trajectory, 0, velocity, ADVANTAGES)
    assert velocity.requires_grad
    for tensor in (found.gradient, found.loss, found.log_ratio):
        assert not tensor.requires_grad
    with torch.no_grad():  # a trainer may call it from inside no_grad
        again = upstream_autograd(ClippedSurrogate(), trajectory, 0, velocity, ADVANTAGES)
    assert torch.equal(again.gradient, found.gradient)
