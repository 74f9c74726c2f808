"""What each gloo rank does in test_parallel.py. A module of its own, since spawned processes import it."""

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
UPDATES = 5


def work_until_one_dies(rank: int, folder: str) -> None:
    """A run of two ranks, of which the second is gone after two updates."""
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=60))

    def die(metrics: Metrics) -> None:
        if metrics.update == 2 and rank == 1:
            os._exit(7)

    train(changed(CONFIG, run={"updates": UPDATES, "checkpoint_every": 1}), Path(folder) / "run", progress=die)


def work(rank: int, folder: str, ranks: int, shards: int, start: str, updates: int) -> None:
    """Train for some updates, from a checkpoint if ``start`` names one; write curve, weights and checkpoint."""
    torch.set_num_threads(1)
    place = Path(folder)
    rendezvous = (place / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=90))
    try:
        trainer = GRPOTrainer(changed(CONFIG, parallel={"shards": shards}))
        if start:
            read(trainer, Path(start))
        curve = [asdict(trainer.step()) for _ in range(updates)]
        held_out = trainer.evaluate()
        whole = tensors(trainer)
        path = write(trainer, place / "checkpoints")
        assert checkpoint.why_damaged(path) is None
        if rank == 0:
            torch.save(whole, place / "whole.pt")
        (place / f"rank{rank}.json").write_text(json.dumps({"curve": curve, "held_out": held_out}))
    finally:
        dist.destroy_process_group()
