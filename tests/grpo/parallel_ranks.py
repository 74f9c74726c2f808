"""What two gloo ranks do in test_parallel.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from jagg_core.grpo import GRPOTrainer, Metrics, checkpoint, train
from jagg_core.grpo.run import read, write
from tests.grpo.runs import changed, tensors

CONFIG = changed(run={"eval_prompts": 2, "eval_samples": 2}, optimizer={"learning_rate": 1e-3})
UPDATES, BEFORE = 5, 3
"""Of a whole run, and of the one whose checkpoint ``start`` holds."""

DYING = changed(CONFIG, run={"updates": UPDATES, "checkpoint_every": 1})


def work(rank: int, folder: str) -> None:
    """Train sharded; then as copies, from the checkpoint in ``start``; then in a run of which one rank is lost."""
    torch.set_num_threads(1)
    place = Path(folder)
    _join(place / "first", rank)
    _train(place / "sharded", rank, shards=0, start=None, updates=UPDATES)
    dist.destroy_process_group()
    _join(place / "second", rank)
    [start] = checkpoint.checkpoints(place / "start")
    _train(place / "copies", rank, shards=1, start=start, updates=UPDATES - BEFORE)
    dist.destroy_process_group()
    _join(place / "third", rank)

    def die(metrics: Metrics) -> None:
        if metrics.update == 2 and rank == 1:
            os._exit(7)

    train(DYING, place / "dying", progress=die)


def _join(rendezvous: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )


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
