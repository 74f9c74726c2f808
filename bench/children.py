"""Processes of a measurement: spawned, waited for, and killed when one fails or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

POLL_S = 1.0
"""Seconds between two looks at the processes."""


def run_children(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    timeout: float,
    started: float | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Runs ``work(number, *arguments)`` in ``count`` fresh processes.

    ``started``: reading of `time.monotonic` since when the seconds of ``timeout`` run; now by default. ``waiting``:
    called about every second until they are done.

    Raises:
        TimeoutError: they were not done after ``timeout`` seconds.
        torch.multiprocessing.ProcessException: one failed; holds its traceback.
    """
    deadline = (time.monotonic() if started is None else started) + timeout
    context = mp.start_processes(work, args=arguments, nprocs=count, join=False, start_method="spawn")
    try:
        while not context.join(timeout=min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not done after {timeout:g} s (setting timeout)")
            waiting()
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
        for process in context.processes:
            process.join()  # one that is dying may still write where its caller cleans up
