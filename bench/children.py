"""Processes of a measurement: spawned, waited for, and killed when one fails or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_children(
    work: Callable[..., None], arguments: tuple[Any, ...], count: int, timeout: float, started: float | None = None
) -> None:
    """Run ``work(number, *arguments)`` in ``count`` fresh processes.

    ``started``: reading of `time.monotonic` since when the seconds of ``timeout`` run; now by default.

    Raises:
        TimeoutError: they were not done after ``timeout`` seconds.
        torch.multiprocessing.ProcessException: one failed; holds its traceback.
    """
    deadline = (time.monotonic() if started is None else started) + timeout
    context = mp.start_processes(work, args=arguments, nprocs=count, join=False, start_method="spawn")
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {timeout:g} s (setting timeout)")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
