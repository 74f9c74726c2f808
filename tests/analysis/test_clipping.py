"""What clipping costs a plan: the command's figures where they are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.measure.clipping import half_width, measure
from analysis.measure.rollouts import make_batch
from analysis.measure.study import Recipe
from jagg_core import load_backbone
from jagg_core.rewards import load_reward


def test_on_policy_the_rules_are_one_and_off_policy_only_one_adds_passes() -> None:
    backbone = load_backbone("digits-flux")
    batch = make_batch(backbone, load_reward("ink"), Recipe(steps=5, prompts=1, samples=2), 0.7, "clipping", 0)
    before = [p.clone() for p in backbone.transformer.parameters()]
    on_policy, first, second = measure(backbone, batch, [0, 2], 1e-4, 1e-4)
    assert on_policy["clipped"] == 0
    assert on_policy["keep"] == on_policy["exact"] == on_policy["unclipped"]
    for off_policy in (first, second):
        assert off_policy["keep passes"] == 2 <= off_policy["exact passes"] <= 4
        assert off_policy["clipped"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, backbone.transformer.parameters(), strict=True))


def test_half_of_the_interval_by_hand() -> None:
    assert half_width(np.array([1.0, 3.0])) == pytest.approx(12.706, rel=1e-4)
