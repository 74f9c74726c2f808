"""Training on several ranks is training on one with the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from jagg_core.grpo import GRPOTrainer, checkpoint, train
from jagg_core.grpo.log import read_rows
from jagg_core.grpo.run import read, write
from tests.grpo.parallel_ranks import BEFORE, CONFIG, DYING, UPDATES, work
from tests.grpo.runs import differing, tensors
from tests.spawning import run_ranks


class Alone:
    """The run on one rank: its curve, its held-out reward after it, and a checkpoint on the way."""

    def __init__(self, folder: Path) -> None:
        trainer = GRPOTrainer(CONFIG)
        self.curve = [trainer.step() for _ in range(BEFORE)]
        write(trainer, folder / "start")
        self.curve += [trainer.step() for _ in range(UPDATES - BEFORE)]
        self.held_out = trainer.evaluate()
        self.next_reward = trainer.step().reward_mean

    def rewards(self) -> list[Any]:
        return [metrics.reward_mean for metrics in self.curve]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Alone]:
    """The run on one rank, and what two ranks did; the second of them dies in the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    alone = Alone(folder)
    torch.set_num_threads(threads)
    with pytest.raises(ProcessExitedException, match="process 1 terminated with exit code 7"):
        run_ranks(work, 2, folder)
    return folder, alone


def assert_same_curve(folder: Path, alone: Alone, done: int = 0) -> None:
    for rank in range(2):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        for ours, expected in zip(found["curve"], alone.curve[done:], strict=True):
            assert ours["reward_mean"] == pytest.approx(expected.reward_mean, rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3)
        assert found["held_out"]["ink"] == pytest.approx(alone.held_out["ink"], rel=1e-5)


def test_two_ranks_follow_the_curve_of_one_and_resume_on_one(runs: tuple[Path, Alone]) -> None:
    folder, alone = runs
    assert_same_curve(folder / "sharded", alone)
    # so that the tolerance means something
    assert max(alone.rewards()) - min(alone.rewards()) > 1e-3
    resumed = GRPOTrainer(CONFIG)
    [path] = checkpoint.checkpoints(folder / "sharded/checkpoints")
    read(resumed, path)
    assert differing(tensors(resumed), torch.load(folder / "sharded/whole.pt", weights_only=True)) == []
    assert resumed.update == UPDATES
    assert resumed.step().reward_mean == pytest.approx(alone.next_reward, rel=1e-5)


def test_copies_of_the_weights_follow_it_from_a_checkpoint_of_one(runs: tuple[Path, Alone]) -> None:
    folder, alone = runs
    assert_same_curve(folder / "copies", alone, BEFORE)


def test_a_run_that_lost_a_rank_resumes(runs: tuple[Path, Alone]) -> None:
    folder, alone = runs
    assert [p.name for p in checkpoint.checkpoints(folder / "dying/checkpoints")][-1] == "update-00000002"
    train(DYING, folder / "dying", resume=True)
    found = [float(row["reward_mean"]) for row in read_rows(folder / "dying/metrics.csv")]
    assert found == pytest.approx(alone.rewards(), rel=1e-5)
