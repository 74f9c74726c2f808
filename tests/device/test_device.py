"""Every command on a pretended accelerator: nothing mixes devices, and numbers are the CPU's within round-off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import pretended, work
from tests.spawning import run_ranks


def test_the_pretended_device_is_as_strict_as_a_real_one(tmp_path: Path) -> None:
    [found] = run_ranks(pretended.work, 1, tmp_path)
    assert found["mixed"] == [True] * len(found["mixed"])
    assert found["numpy"] and found["generator"] and found["no such number"]
    assert found["seeded"] == [True, False], "the device's random numbers follow the seed, and are not the CPU's"
    assert found["in a thread"] == [0, 2, 4]
    assert found["peak"] == 4 * 1000
    assert found["told"] == ["accel:0", "pretended accelerator", 2**30, None]


def test_engine(tmp_path: Path) -> None:
    [found] = run_ranks(work.engine, 1, tmp_path)
    assert found["rollout"] < 1e-6
    assert max(found.values()) < 2e-5, found


def test_training(tmp_path: Path) -> None:
    [found] = run_ranks(work.training, 1, tmp_path)
    assert found.pop("resumed") == 0
    assert max(found.values()) < 1e-4, found


def test_commands(tmp_path: Path) -> None:
    [found] = run_ranks(work.commands, 1, tmp_path)
    assert found["pixels"] <= 1
    assert found["memory"] > 0 and found["joint over exact"] > 1
    assert found["waited"] > 0


def test_rewards(tmp_path: Path) -> None:
    [found] = run_ranks(work.rewards, 1, tmp_path)
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
def test_studies(tmp_path: Path) -> None:
    [found] = run_ranks(work.studies, 1, tmp_path)
    assert max(found.values()) < 1e-3, found
