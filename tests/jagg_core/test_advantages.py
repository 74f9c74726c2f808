"""Advantages from rewards (cases 7.4, 7.5, 7.6)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.advantages import NoGroupSignal, group_advantages, groups_without_signal


def advantages_of(rewards: list[float], prompts: list[int] | None = None, **options: Any) -> list[float]:
    """Advantages as a list; a single prompt by default."""
    ids = torch.tensor(prompts or [0] * len(rewards))
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), ids, **options).tolist()


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


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="rewards must be finite, got nan at sample 1"):
        advantages_of([1.0, math.nan, 3.0])


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
        (torch.zeros(2), torch.zeros(3), {}, r"got \[2\] and \[3\]"),
        (torch.zeros(2, 2), torch.zeros(2, 2), {}, r"must both have shape \[B\]"),
        (torch.zeros(0), torch.zeros(0), {}, "B >= 1"),
        (torch.zeros(2), torch.zeros(2), {"centre": "group"}, "centre must be one of .* got 'group'"),
        (torch.zeros(2), torch.zeros(2), {"scale": "group"}, "scale must be one of"),
        (torch.zeros(2), torch.zeros(2), {"std": "biased"}, "std must be one of"),
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
