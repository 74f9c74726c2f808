"""Runs of presets: every cell in a separate process, and its status."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.children import run_children
from bench.collectives import run_collective_bench
from bench.cost import fit
from bench.group import run_group_bench
from bench.lines import failure_lines
from bench.memory import run_memory_bench
from bench.presets import PRESETS, Planned, Settings
from bench.progress import Part, Say
from bench.settings import CollectiveBench, GroupBench, UpdateBench
from bench.update import run_update_bench
from bench.work import is_published
from jagg_core.backbones import list_backbones
from jagg_core.backbones.registry import TRAINED
from jagg_core.checks import require_device
from jagg_core.devices import total_memory
from jagg_core.environment import command_line
from jagg_core.files import write_atomically
from jagg_core.records import Cell, Record

NOT_REACHED = "the run ended before this cell"
"""Why a cell of a run that was killed has no result."""

COPIES = {"group": 4, "update": 8, "memory": 2, "collectives": 12}
"""Tensors of the model's size that a kind holds at a time: weights, gradients, and those they are checked against; of
an update also what the optimizer works on, of collectives a whole gradient of every arm."""


def run_suite(preset: str, out: Path, timeout: float = 900, progress: Say | None = None) -> Record:
    """Measures every cell of a preset, and writes its record next to ``out/record.json``, which lists them all.

    A cell that is skipped says what it needs; one that fails has its error; both leave the others alone. A run that is
    killed has the records of the cells that were done, and names the others. ``timeout``: seconds that each cell may
    take. ``progress`` takes lines: which cell runs, how far it is, and what became of it.

    Raises:
        ValueError: unknown preset, or a timeout that is not positive.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {list(PRESETS)}, got {preset!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    planned = PRESETS[preset]()
    cells = [Cell(one.name, "skipped", NOT_REACHED) for one in planned]
    record = Record("bench", command_line(), preset, {"preset": preset}, seeds={}, cells=cells)
    say = progress or (lambda line: None)
    for number, one in enumerate(planned):
        say(f"{preset}, {number + 1} of {len(planned)}: {one.name}")
        part = Part(progress)
        cell = record.cells[number] = _measure(one, out, timeout, part.at)
        record.write(out / "record.json")
        say(f"  {cell.status} after {part.seconds:.0f} s")
    return record


def _measure(planned: Planned, out: Path, timeout: float, progress: Say) -> Cell:
    settings = asdict(planned.settings) | {"kind": planned.kind, "file": planned.file}
    reason = why_not(planned)
    if reason is not None:
        return Cell(planned.name, "skipped", reason, settings)
    path = out / planned.file
    path.unlink(missing_ok=True)
    try:
        # what is timed gets a separate process here; the other kinds spawn theirs
        if isinstance(planned.settings, CollectiveBench):
            run_collective_bench(replace(planned.settings, timeout=max(1, round(timeout))), progress).write(path)
        elif planned.kind == "memory":
            run_memory_bench(planned.settings, timeout=timeout, progress=progress).write(path)
        else:
            _in_a_child(planned.settings, path, timeout, progress)
        record = Record.read(path)
        failed = failure_lines(record.cells)
    except Exception as error:  # of a child that died, hung or ran out of memory
        return Cell(planned.name, "failed", f"{type(error).__name__}: {str(error).strip()[-2000:]}", settings)
    if failed:
        return Cell(planned.name, "failed", "; ".join(failed), settings)
    # the cost model, which the page shows with a group's times
    return Cell(planned.name, settings=settings, values={"fit": fit(record)} if planned.kind == "group" else {})


def _in_a_child(settings: GroupBench, path: Path, timeout: float, progress: Say) -> None:
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "progress"
        note.write_text("loads the model")

        def waiting() -> None:
            progress(note.read_text())

        run_children(_child, (settings, str(path), str(note)), 1, timeout, waiting=waiting)


def _child(number: int, settings: GroupBench, path: str, note: str) -> None:
    """Times, writes the record to the file ``path``, and meanwhile how far it is to the file ``note``."""

    def progress(where: str) -> None:
        write_atomically(Path(note), where.encode())

    if isinstance(settings, UpdateBench):
        record = run_update_bench(settings, progress)
    else:
        record = run_group_bench(settings, progress)
    record.write(Path(path))


def why_not(planned: Planned) -> str | None:
    """Returns why a cell cannot be measured here: no such device or library, or too little memory; None if it can."""
    settings = planned.settings
    try:
        require_device(settings.device)
    except ValueError as error:
        return f"needs a device {settings.device}{_needed(planned)}: {error}"
    missing = _missing_libraries(settings)
    if missing:
        return f"needs {' and '.join(missing)}, not installed here: pip install 'jagg-core[pretrained]'"
    needed, present = needed_bytes(planned), total_memory(torch.device(settings.device))
    if present is not None and needed > present:
        return f"needs {needed / 2**30:.1f} GiB, {settings.device} has {present / 2**30:.1f}"
    return None


def _missing_libraries(settings: Settings) -> list[str]:
    """Lists the libraries that a registered backbone needs and that are not installed."""
    wanted = ["diffusers"] if settings.backbone in TRAINED or is_published(settings.backbone) else []
    if is_published(settings.backbone):
        wanted.append("transformers")
    if wanted and _is_lora(settings):
        wanted.append("peft")
    return [name for name in wanted if find_spec(name) is None]


def _is_lora(settings: Settings) -> bool:
    return any(option.startswith("lora_rank=") for option in settings.backbone_options)


def needed_bytes(planned: Planned) -> float:
    """Computes the least memory of a cell: copies of the parameters, without activations or a LoRA's gradients."""
    settings = planned.settings
    parameters = next((e.parameters for e in list_backbones() if e.name == settings.backbone), 0)
    copies = 1 if _is_lora(settings) else COPIES[planned.kind]
    ranks = settings.ranks if isinstance(settings, CollectiveBench) and settings.device == "cpu" else 1
    return float(parameters * getattr(torch, settings.dtype).itemsize * copies * ranks)


def _needed(planned: Planned) -> str:
    return f" with {needed_bytes(planned) / 2**30:.1f} GiB" if needed_bytes(planned) > 2**30 else ""
