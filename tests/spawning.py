"""Ranks of a test, in processes of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["jagg_core.grpo.trainer", "torch.distributed.fsdp", "diffusers.models.transformers.transformer_flux"]
"""What most ranks import, which takes longer than their work: one server imports it, and ranks are forked from it."""


def run_ranks(work: Callable[[int, Path], object], count: int, folder: Path, seconds: float = 250) -> list[Any]:
    """Runs ``work(rank, folder)`` on every rank; all are killed when the time is over, or one fails.

    Returns:
        What each rank returned, by way of JSON.
    """
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    context = mp.start_processes(_run, args=(work, folder), nprocs=count, join=False, start_method="forkserver")
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the ranks hang: do they make different numbers of collectives?"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]


def _run(rank: int, work: Callable[[int, Path], object], folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / f"rank{rank}.json").write_text(json.dumps(work(rank, folder)))


@contextmanager
def grouped(rendezvous: Path, rank: int, ranks: int = 2) -> Iterator[None]:
    """Joins a gloo process group that meets at a file; a collective that waits longer than 120 s is an error."""
    dist.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
