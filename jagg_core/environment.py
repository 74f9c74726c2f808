"""The environment and the command of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Reads versions, threads, devices, processor, clocks, load and commit at this moment."""
    import torch

    from jagg_core.devices import accelerator_names, clock_mhz, device_name, total_memory

    packages: dict[str, str | None] = {}
    for package in ("torch", "diffusers", "numpy", "jagg-core"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    devices = [torch.device(name) for name in accelerator_names()]
    mhz = [float(value) for value in _cpuinfo("cpu MHz")]
    return {
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_mhz": sum(mhz) / len(mhz) if mhz else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "devices": [device_name(device) for device in devices],
        "device_bytes": [total_memory(device) for device in devices],
        "device_mhz": [clock_mhz(device) for device in devices],
        **git_state(Path(__file__).resolve().parent.parent),
    }


def _processor() -> str:
    return next(iter(_cpuinfo("model name")), platform.processor() or platform.machine())


def _cpuinfo(name: str) -> list[str]:
    """Reads a field of every core, where the system has ``/proc/cpuinfo``."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(name)]


def git_state(checkout: Path) -> dict[str, Any]:
    """Reads ``commit`` of the checkout, and whether files differ from it (``dirty``); both None outside a checkout.

    Files in ``results/`` do not count: runs leave them, and a repeated run replaces them.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # an installed package may lie inside another repository
        if Path(git("rev-parse", "--show-toplevel")).resolve() != checkout.resolve():
            return {"commit": None, "dirty": None}
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def command_line() -> list[str]:
    """Returns the running command without paths of this machine."""
    name = Path(sys.argv[0])
    module = name.parent.name if name.name == "__main__.py" else name.name
    return ["python", "-m", module, *sys.argv[1:]]
