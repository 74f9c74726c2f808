"""What a user with a new device runs first: is it right, and what can it do? Cells in order of value."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark.utils.timer import timer

from bench.group import Group, load, workload
from bench.progress import Say
from bench.settings import Doctor, GroupBench
from bench.timing import clear, gradient, verify
from jagg_core import ClippedSurrogate, Plan, Trajectory, accumulate_gradients, causal_plan, exact_plan, jagg_plan
from jagg_core.choices import SHIPPED
from jagg_core.devices import is_accelerator, make_current, peak_memory, start_peak
from jagg_core.environment import command_line
from jagg_core.objective import upstream_closed_form
from jagg_core.records import Cell, Record
from jagg_core.reference import TOLERANCE, plain_gradient, relative_error

Work = Callable[[float], dict[str, Any]]
"""Measures a cell in at most so many seconds, as far as it can."""

WAYS = ("exact", "exact, one pass", "paper", "causal, 8 passes", "causal, 5 passes")
"""Ways to make the update of the large model. Those after exact are predicted from exact's phases."""

BATCHES = (1, 2, 4)
"""Samples at a time, of a rollout of as many as the last, at which log ratios are taken."""


def run_doctor(settings: Doctor, out: Path, progress: Say | None = None) -> Record:
    """Measures every cell, and writes ``out/record.json`` after each: a run that is cut off is a result.

    A cell that fails says in a sentence what to do. One whose turn comes after ``settings.seconds`` is skipped.
    """
    make_current(torch.device(settings.device))
    record = Record("doctor", command_line(), settings.model_name, asdict(settings), seeds={"rollout": [settings.seed]})
    started = time.monotonic()
    for name, work in planned(settings, out).items():
        left = settings.seconds - (time.monotonic() - started)
        if progress is not None:
            progress(f"{name}, {left:.0f} s left")
        if left <= 0:
            record.cells.append(Cell(name, "skipped", f"the {settings.seconds:g} s were over: give more --seconds"))
        else:
            try:
                record.cells.append(Cell(name, values=work(left)))
            except Exception as error:  # whatever a driver or a library raises
                record.cells.append(Cell(name, "failed", advice(error, settings.device)))
        record.write(out / "record.json")
    return record


def planned(settings: Doctor, out: Path) -> dict[str, Work]:
    """Lists the cells, most valuable first."""
    large = Large(settings)
    cells: dict[str, Work] = {"machine": lambda left: bandwidths(torch.device(settings.device))}
    for dtype in ("float32", "bfloat16"):
        for name in SHIPPED:
            cells[f"engine/{name}/{dtype}"] = partial(_engine, settings, name, dtype)
    cells["log ratios/photos-flux/bfloat16"] = lambda left: log_ratios(settings)
    for way in WAYS:
        cells[f"update/{way}"] = partial(_update, large, way)
    cells["calibration/digits-flux"] = partial(calibration, settings, out / "calibration")
    return cells


def advice(error: Exception, device: str) -> str:
    """Turns an error into a sentence that names the next step."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device has too little memory: give a smaller --batch, fewer --steps or another --model ({text})"
    if isinstance(error, ImportError):
        return f"{text}: pip install 'jagg-core[pretrained,analysis,bench]'"
    if isinstance(error, ArithmeticError):
        return f"{text}: do not train on this device before another version of torch or of its driver gives less"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout:.0f} s: give more --seconds"
    return (
        f"{type(error).__name__}: {text}; python -m jagg_core backbones check digits-flux --device {device} tells "
        "which step breaks"
    )


def bandwidths(device: torch.device) -> dict[str, float]:
    """Measures GB/s of copies on the device (read and written) and to it, TFLOP/s in both dtypes: best of five."""
    large = is_accelerator(device)
    count, side = (2**28, 8192) if large else (2**24, 512)
    host, here = torch.ones(count // 4), torch.ones(count // 4, device=device)
    there = torch.empty_like(here)
    rates = {
        "device_gb_per_s": 2 * count / 1e9 / _best(lambda: there.copy_(here)),
        "to_device_gb_per_s": count / 1e9 / _best(lambda: there.copy_(host)),
    }
    for dtype in ("float32", "bfloat16"):
        matrix = torch.ones(side, side, device=device, dtype=getattr(torch, dtype))
        rates[f"{dtype}_tflop_per_s"] = 2 * side**3 / 1e12 / _best(partial(torch.matmul, matrix, matrix))
    return rates


def _best(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(5):
        start = timer()
        work()
        seconds.append(timer() - start)
    return min(seconds)


def _small(settings: Doctor, name: str, device: str, dtype: str, batch: int = 2) -> tuple[Group, Plan]:
    """Makes a short rollout of a shipped backbone, and a causal plan for it."""
    small = GroupBench(backbone=name, batch=batch, steps=6, window=5, device=device, dtype=dtype, seed=settings.seed)
    group = _loaded(small)
    return group, causal_plan(group.trajectory.sigmas, [0, 3])


def _loaded(settings: GroupBench) -> Group:
    """Loads all trained steps of a rollout, as a group."""
    backbone = load(settings)
    policy, trajectory, advantages = workload(settings, backbone)
    parameters = [p for p in backbone.transformer.parameters() if p.requires_grad]
    steps = range(trajectory.steps)
    upstream = [upstream_closed_form(ClippedSurrogate(), trajectory, j, advantages).gradient for j in steps]
    return Group(policy, trajectory, advantages, parameters, upstream)


def _run(group: Group, plan: Plan, upstream: Any, backward: Any, trajectory: Trajectory | None = None) -> Any:
    clear(group.parameters)
    part = trajectory or group.trajectory
    advantages = group.advantages[: part.batch]
    return accumulate_gradients(
        group.policy, part, advantages, plan, ClippedSurrogate(), upstream, backward, partly_clipped="keep", clock=timer
    )


def _engine(settings: Doctor, name: str, dtype: str, left: float) -> dict[str, Any]:
    """Computes relative errors: gradient to a plain loop on the device; in fp32 rollout and gradient to the CPU's.

    Raises:
        ArithmeticError: one is beyond the `TOLERANCE` of the dtype.
    """
    group, plan = _small(settings, name, settings.device, dtype)
    _run(group, plan, "closed_form", "sequential")
    here = [g.cpu() for g in gradient(group.parameters)]
    loop = plain_gradient(group.policy, group.parameters, group.trajectory, group.upstream, plan)
    limit = TOLERANCE[getattr(torch, dtype)]
    errors: dict[str, Any] = {"limit": limit, "to_plain_loop": verify(gradient(group.parameters), loop, dtype)}
    if dtype == "float32":
        twin, plan = _small(settings, name, "cpu", dtype)
        _run(twin, plan, "closed_form", "sequential")
        errors["rollout_to_cpu"] = relative_error([group.trajectory.latents.cpu()], [twin.trajectory.latents])
        errors["gradient_to_cpu"] = relative_error(here, gradient(twin.parameters))
        for what in ("rollout_to_cpu", "gradient_to_cpu"):
            if not errors[what] <= limit:
                raise ArithmeticError(f"{what} differs by {errors[what]:.2g} (limit {limit:g})")
    return errors


def log_ratios(settings: Doctor) -> dict[str, Any]:
    """Finds the largest log ratio where all should be 0, by samples at a time: kernels depend on a batch's shape."""
    group, _ = _small(settings, "photos-flux", settings.device, "bfloat16", BATCHES[-1])
    largest = {}
    for size in BATCHES:
        part = group.trajectory.cut(range(size))
        largest[f"batch_{size}"] = _run(group, exact_plan(part.sigmas), "autograd", "sequential", part).log_ratio_max
    clear(group.parameters)
    return largest


class Large:
    """The large model with its rollout, loaded when the first way asks for it.

    Attributes:
        phases: seconds of exact's forward and backward of one step; None until exact was measured.
    """

    def __init__(self, settings: Doctor) -> None:
        self.settings = settings
        self.phases: tuple[float, float] | None = None

    @cached_property
    def group(self) -> Group:
        """All trained steps."""
        return _loaded(self.settings.large)

    def way(self, name: str) -> tuple[Plan, str, str]:
        """Returns a way's plan and modes."""
        sigmas = self.group.trajectory.sigmas
        steps = len(sigmas)
        if name.startswith("exact"):
            return exact_plan(sigmas), "autograd", "batched" if "one pass" in name else "sequential"
        if name == "paper":
            return jagg_plan(sigmas, 5, 1.0), "autograd", "joint"
        passes = int(name.split()[1])
        return causal_plan(sigmas, [i * steps // passes for i in range(passes)]), "closed_form", "sequential"


def _update(large: Large, way: str, left: float) -> dict[str, Any]:
    """Measures a second call: seconds, peak memory beyond the model, and seconds predicted from the count of calls."""
    group, (plan, upstream, backward) = large.group, large.way(way)
    device = group.trajectory.latents.device
    _run(group, plan, upstream, backward)
    clear(group.parameters)
    held, start = start_peak(device), timer()
    report = _run(group, plan, upstream, backward)
    seconds, peak = timer() - start, peak_memory(device)
    clear(group.parameters)
    if way == "exact":
        large.phases = (report.seconds["forward"] / report.forwards, report.seconds["backward"] / report.passes)
    predicted = None
    if large.phases is not None:
        predicted = report.forwards * large.phases[0] + report.passes * large.phases[1]
    return {
        "total_s": seconds,
        "predicted_s": predicted,
        "peak_bytes": None if held is None or peak is None else peak - held,
        "forwards": report.forwards,
        "passes": report.passes,
    }


def calibration(settings: Doctor, out: Path, left: float) -> dict[str, Any]:
    """Runs a quick calibration by its command, whose folder stays."""
    flags = f"--quick --backbone digits-flux --steps 9 --windows 4 --device {settings.device}"
    command = [sys.executable, "-m", "analysis", "calibrate", *flags.split(), "--out", str(out)]
    start = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    if run.returncode:
        raise RuntimeError(f"calibrate: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else 'no word'}")
    return {"total_s": time.monotonic() - start}


def doctor_lines(record: Record) -> list[str]:
    """Formats a line per cell: its status, name, and values or reason."""
    lines = []
    for cell in record.cells:
        text = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in cell.values.items())
        lines.append(f"{cell.status:<8} {cell.name}: {cell.reason or text}")
    return lines
