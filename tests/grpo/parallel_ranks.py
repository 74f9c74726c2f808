"""What two gloo ranks do in test_parallel.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

from jagg_core.grpo import GRPOTrainer, Metrics, checkpoint, train
from jagg_core.grpo.run import read, write
from tests.grpo.runs import changed, tensors
from tests.spawning import grouped

CONFIG = changed(run={"eval_prompts": 2, "eval_samples": 2}, optimizer={"learning_rate": 1e-3})
UPDATES, BEFORE = 5, 3
"""Of a whole run, and of the one whose checkpoint ``start`` holds."""

DYING = changed(CONFIG, run={"updates": UPDATES, "checkpoint_every": 1})


def work(rank: int, folder: Path) -> None:
    """Train sharded; then as copies, from the checkpoint in ``start``; then in a run of which one rank is lost."""
    with grouped(folder / "first", rank):
        _train(folder / "sharded", rank, shards=0, start=None, updates=UPDATES)
    with grouped(folder / "second", rank):
        [start] = checkpoint.checkpoints(folder / "start")
        _train(folder / "copies", rank, shards=1, start=start, updates=UPDATES - BEFORE)

    def die(metrics: Metrics) -> None:
        if metrics.update == 2 and rank == 1:
            os._exit(7)

    with grouped(folder / "third", rank):
        train(DYING, folder / "dying", progress=die)


def _train(place: Path, rank: int, shards: int, start: Path | None, updates: int) -> None:
    trainer = GRPOTrainer(changed(CONFIG, parallel={"shards": shards}))
    if start is not None:
        read(trainer, start)
    curve = [asdict(trainer.step()) for _ in range(updates)]
    held_out = trainer.evaluate()
    whole = tensors(trainer)
    path = write(trainer, place / "checkpoints")
    assert checkpoint.why_damaged(path) is None
    if rank == 0:
        torch.save(whole, place / "whole.pt")
    (place / f"rank{rank}.json").write_text(json.dumps({"curve": curve, "held_out": held_out}))
