"""Training on several ranks is training on one with the same samples."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from jagg_core.grpo import GRPOTrainer, checkpoint, train
from jagg_core.grpo.log import read_rows
from jagg_core.grpo.run import read, write
from tests.grpo.parallel_ranks import CONFIG, UPDATES, work, work_until_one_dies
from tests.grpo.runs import changed, differing, tensors
from tests.spawning import run_ranks


def run(folder: Path, ranks: int, shards: int = 0, start: Path | None = None, updates: int = UPDATES) -> dict[str, Any]:
    folder.mkdir()
    arguments = {"ranks": ranks, "shards": shards, "start": str(start or ""), "updates": updates}
    run_ranks(partial(work, **arguments), ranks, folder, seconds=200)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {"ranks": found, "tensors": torch.load(folder / "whole.pt", weights_only=True)}


@pytest.fixture(scope="module")
def alone() -> tuple[GRPOTrainer, list[Any], dict[str, float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = GRPOTrainer(CONFIG)
    curve = [trainer.step() for _ in range(UPDATES)]
    held_out = trainer.evaluate()
    torch.set_num_threads(threads)
    return trainer, curve, held_out


def assert_same_curve(found: dict[str, Any], alone: tuple[GRPOTrainer, list[Any], dict[str, float]]) -> None:
    _, curve, held_out = alone
    for rank in found["ranks"]:
        for ours, expected in zip(rank["curve"], curve, strict=True):
            assert ours["reward_mean"] == pytest.approx(expected.reward_mean, rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3)
        assert rank["held_out"]["ink"] == pytest.approx(held_out["ink"], rel=1e-5)
    first, second = curve[0].reward_mean, curve[-1].reward_mean
    assert abs(first - second) > 1e-3  # so that the tolerance means something


def test_two_ranks_follow_the_curve_of_one_and_resume_on_one(
    alone: tuple[GRPOTrainer, list[Any], dict[str, float]], tmp_path: Path
) -> None:
    found = run(tmp_path / "two", 2)
    assert_same_curve(found, alone)
    resumed = GRPOTrainer(CONFIG)
    [path] = (tmp_path / "two" / "checkpoints").iterdir()
    read(resumed, path)
    assert differing(tensors(resumed), found["tensors"]) == []
    assert resumed.update == UPDATES
    expected = alone[0].step()
    assert resumed.step().reward_mean == pytest.approx(expected.reward_mean, rel=1e-5)


def test_copies_of_the_weights_follow_it_too_and_a_run_of_one_resumes_on_two(
    alone: tuple[GRPOTrainer, list[Any], dict[str, float]], tmp_path: Path
) -> None:
    started = GRPOTrainer(CONFIG)
    curve = [started.step() for _ in range(3)]
    path = write(started, tmp_path / "one")
    found = run(tmp_path / "hybrid", 2, shards=1, start=path, updates=UPDATES - 3)
    trainer, _, held_out = alone
    assert_same_curve(
        {"ranks": [rank | {"curve": [vars(m) for m in curve] + rank["curve"]} for rank in found["ranks"]]},
        (trainer, alone[1], held_out),
    )


def test_a_rank_that_is_lost_ends_the_run_and_it_resumes(
    alone: tuple[GRPOTrainer, list[Any], dict[str, float]], tmp_path: Path
) -> None:
    with pytest.raises(ProcessExitedException, match="process 1 terminated with exit code 7"):
        run_ranks(work_until_one_dies, 2, tmp_path, seconds=150)
    config = changed(CONFIG, run={"updates": UPDATES, "checkpoint_every": 1})
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "run/checkpoints")][-1] == "update-00000002"
    train(config, tmp_path / "run", resume=True)
    rewards = [float(row["reward_mean"]) for row in read_rows(tmp_path / "run/metrics.csv")]
    assert rewards == pytest.approx([metrics.reward_mean for metrics in alone[1]], rel=1e-5)
