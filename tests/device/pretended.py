"""What the pretended device has to do as a real one does, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from jagg_core.devices import accelerator_names, clock_mhz, device_name, fork_rng, peak_memory, start_peak, total_memory
from tests.device import pretend


def raises(kind: type[Exception], do: Callable[[], object]) -> bool:
    try:
        do()
    except kind:
        return True
    return False


def work(rank: int, folder: Path) -> dict[str, Any]:
    pretend.register()
    here, there = torch.ones(3, device=pretend.NAME), torch.ones(3)
    device = here.device
    mixed = [
        lambda: here + there,
        lambda: torch.stack([here, there]),
        lambda: here.add_(there),
        lambda: torch.where(there > 0, here, here),
        lambda: there[torch.tensor([0], device=device)],
        lambda: torch.nn.Linear(3, 1)(here),
    ]
    kept: list[Any] = []
    thread = Thread(target=lambda: kept.extend((2 * torch.arange(3, device=device)).tolist()))
    thread.start()
    thread.join()
    with fork_rng(device):
        torch.manual_seed(7)
        drawn = torch.randn(3, device=device).tolist()
        torch.manual_seed(7)
        again, other = torch.randn(3, device=device).tolist(), torch.randn(3)
    held = start_peak(device)
    wide = torch.zeros(1000, device=device)
    del wide
    peak = peak_memory(device)
    assert held is not None and peak is not None
    return {
        "mixed": [raises(RuntimeError, do) for do in mixed],
        "numpy": raises(TypeError, here.numpy) and raises(TypeError, lambda: np.asarray(here)),
        "generator": raises(RuntimeError, lambda: torch.randn(3, device=device, generator=torch.Generator())),
        "no such number": raises(RuntimeError, lambda: torch.zeros(1, device="accel:1")),
        "seeded": [drawn == again, torch.equal(other, torch.randn(3))],
        "in a thread": kept,
        "peak": peak - held,
        "told": [*accelerator_names(), device_name(device), total_memory(device), clock_mhz(device)],
    }
