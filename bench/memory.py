"""Peak memory of one group by arm, each in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.children import run_children
from bench.group import GroupBench, arms_for, load_group
from jagg_core import ClippedSurrogate, accumulate_gradients, exact_plan
from jagg_core.records import Cell, Record, command_line, recorded

REPEATS = 3
"""Runs of an arm in its process; the first one also allocates the gradients."""

LEFT_OUT = ("exact-again", "exact-bare")
"""Arms that are there to time the others against."""


def run_memory_bench(settings: GroupBench, arms: Sequence[str] | None = None, timeout: float = 600) -> Record:
    """Measure ``arms`` of ``python -m bench group`` (None: all). An arm that fails or hangs is recorded as failed.

    A cell's ``peak_bytes`` is what was needed beyond the loaded model, its rollout and its gradients: activations of
    the graphs held at a time, mostly. On the CPU it is resident memory, on a GPU what torch has allocated.
    """
    cells: list[Cell] = []
    for name in arm_names(settings.window) if arms is None else arms:
        with recorded(cells, name) as cell, tempfile.TemporaryDirectory() as folder:
            run_children(measure, (settings, name, folder), 1, timeout)
            found = json.loads((Path(folder) / "peaks.json").read_text())
            cell.samples = {"peak_bytes": found["peaks"]}
            cell.values = {"held_bytes": found["held"]}
    return Record(
        "memory", command_line(), settings.backbone, asdict(settings), {"rollout": [settings.seed]}, cells=cells
    )


def arm_names(window: int) -> list[str]:
    """Arms whose memory is measured."""
    sigmas = torch.linspace(1, 0.1, window, dtype=torch.float64)
    return [arm.name for arm in arms_for(sigmas, window) if arm.name not in LEFT_OUT]


def measure(number: int, settings: GroupBench, name: str, folder: str) -> None:
    """Measure one arm in this process, and write what was found to ``folder/peaks.json``."""
    policy, trajectory, advantages = load_group(settings)
    [arm] = [arm for arm in arms_for(trajectory.sigmas, settings.window) if arm.name == name]
    device = trajectory.latents.device

    modes: dict[str, Any] = {"upstream": arm.upstream, "backward": arm.backward, "partly_clipped": "keep"}
    plan = arm.plan or exact_plan(trajectory.sigmas)

    def run() -> None:
        accumulate_gradients(policy, trajectory, advantages, plan, ClippedSurrogate(), **modes)

    run()  # gradients are allocated, and libraries set up
    peaks = []
    for _ in range(REPEATS):
        held = _settle(device)
        run()
        peaks.append(_peak(device) - held)
    (Path(folder) / "peaks.json").write_text(json.dumps({"peaks": peaks, "held": held}))


def _settle(device: torch.device) -> int:
    """Give back what is free, forget the peak so far, and return the bytes held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def _status(name: str) -> int:
    """A figure of this process's memory in bytes, as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: resident memory can be measured on Linux only")
