"""Ranks of a test, in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing as mp


def run_ranks(work: Callable[[int, str], None], count: int, folder: Path, seconds: float) -> None:
    """Run ``work(rank, folder)`` on every rank; all are killed when the time is over, or one fails."""
    context = mp.start_processes(work, args=(str(folder),), nprocs=count, join=False, start_method="spawn")
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the ranks hang: do they make different numbers of collectives?"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
