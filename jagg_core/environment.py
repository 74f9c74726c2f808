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

    packages: dict[str, str | None] = {}
    for package in ("torch", "diffusers", "numpy", "jagg-core"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    devices = range(torch.cuda.device_count())
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
        "cuda_devices": [torch.cuda.get_device_name(i) for i in devices],
        "cuda_bytes": [torch.cuda.get_device_properties(i).total_memory for i in devices],
        "cuda_mhz": [_cuda_mhz(i) for i in devices],
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


def _cuda_mhz(index: int) -> float | None:
    """Reads the clock of the multiprocessors in MHz; None without the driver's library."""
    import torch

    try:
        return float(torch.cuda.clock_rate(index))
    except Exception:  # the library's exceptions cannot be named without it
        return None


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
