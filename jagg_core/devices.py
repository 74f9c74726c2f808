"""Devices by one API: what an accelerator of any kind can tell, and None for what it cannot.

Figures come from the module of a device's kind, such as ``torch.cuda`` (CUDA and ROCm), ``torch.xpu`` or ``torch.mps``.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Tells whether calls return before the device is done: true of all but the CPU and the meta device."""
    return device.type not in ("cpu", "meta")


def accelerator_names() -> list[str]:
    """Lists this machine's accelerators, each with its number, such as ``cuda:0``; empty without one."""
    current = torch.accelerator.current_accelerator()
    return [] if current is None else [f"{current.type}:{i}" for i in range(torch.accelerator.device_count())]


def accelerators_like(device: torch.device) -> int:
    """Counts the accelerators of a device's kind on this machine."""
    count = _asked(device, "device_count")
    return 0 if count is None else int(count)


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator is done with what it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def make_current(device: torch.device) -> None:
    """Makes an accelerator with a number the one that torch's timer waits for."""
    if is_accelerator(device) and device.index is not None:
        module = torch.get_device_module(device)
        if hasattr(module, "set_device"):
            module.set_device(device)


def timing_event(device: torch.device) -> Any:
    """Records an event with a time on the current stream of an accelerator."""
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restores the state of random numbers after the body, of the CPU and of an accelerator."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.random.fork_rng(devices=[index], device_type=device.type)


def device_name(device: torch.device) -> str | None:
    """Returns an accelerator's name as its maker gives it."""
    name = _asked(device, "get_device_name", device)
    return None if name is None else str(name)


def total_memory(device: torch.device) -> int | None:
    """Returns the bytes that a device has."""
    if not is_accelerator(device):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    properties = _asked(device, "get_device_properties", device)
    if hasattr(properties, "total_memory"):
        return int(properties.total_memory)
    both = _asked(device, "mem_get_info", device)
    total = both[1] if both is not None else _asked(device, "recommended_max_memory")
    return None if total is None else int(total)


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a device."""
    if is_accelerator(device):
        both = _asked(device, "mem_get_info", device)
        return None if both is None else int(both[0])
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def counts_memory(device: torch.device) -> bool:
    """Returns whether a device's allocator reports the peak of its memory."""
    wanted = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
    return is_accelerator(device) and all(hasattr(torch.get_device_module(device), name) for name in wanted)


def start_peak(device: torch.device) -> int | None:
    """Begins to watch for the most bytes allocated. Returns those of now; None where `counts_memory` is false."""
    if not counts_memory(device):
        return None
    synchronize(device)
    module = torch.get_device_module(device)
    _asked(device, "empty_cache")  # blocks from before may be larger than asked for
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def peak_memory(device: torch.device) -> int | None:
    """Returns the most bytes allocated since `start_peak`; None where `counts_memory` is false."""
    if not counts_memory(device):
        return None
    synchronize(device)
    return int(torch.get_device_module(device).max_memory_allocated(device))


def clock_mhz(device: torch.device) -> float | None:
    """Returns the clock of the multiprocessors, which CUDA alone reports, from the driver's library."""
    try:
        return float(torch.cuda.clock_rate(device)) if device.type == "cuda" else None
    except Exception:  # the library's exceptions cannot be named without it
        return None


def backend_for(device: torch.device) -> str:
    """Returns the library of collectives for a device: NCCL on CUDA, gloo on the CPU.

    Raises:
        ValueError: torch knows none for this kind of device.
    """
    from torch.distributed import Backend

    known = Backend.default_device_backend_map
    if device.type not in known:
        raise ValueError(f"device must be one of {sorted(known)} on several ranks, got {device.type!r}")
    return str(known[device.type])


def _asked(device: torch.device, name: str, *arguments: Any) -> Any:
    """Calls a function of the device's module; returns None without the module, or the function, or an answer."""
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, name):
        return None
    try:
        return getattr(module, name)(*arguments)
    except (RuntimeError, AssertionError, NotImplementedError):
        return None
