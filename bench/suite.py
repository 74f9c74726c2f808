"""Presets: sets of cells to measure, each in a process of its own, and what became of every one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.children import run_children
from bench.collectives import CollectiveBench, run_collective_bench
from bench.group import GroupBench, run_group_bench
from bench.memory import run_memory_bench
from jagg_core.backbones import list_backbones
from jagg_core.records import Cell, Record, command_line

Settings = GroupBench | CollectiveBench
Kind = Literal["group", "memory", "collectives"]

NOT_REACHED = "the run ended before this cell"
"""Why a cell of a run that was killed has no result."""

COPIES = {"group": 4, "memory": 2, "collectives": 3}
"""Tensors of the model's size that a kind holds at a time: weights, gradients, and those they are checked against."""


@dataclass(frozen=True)
class Planned:
    """One cell of a preset."""

    kind: Kind
    settings: Settings

    @property
    def name(self) -> str:
        """Readable and stable: ``group/digits-flux/W5/batch16/float32/checkpointing``."""
        s = self.settings
        ranks = [f"ranks{s.ranks}"] if isinstance(s, CollectiveBench) else []
        kept = ["checkpointing"] if s.checkpointing else []
        parts = [self.kind, s.backbone, f"W{s.window}", f"batch{s.batch}", s.dtype, s.device, *ranks, *kept]
        return "/".join(parts).replace(":", "-")

    @property
    def file(self) -> str:
        """Name of its record in the run folder."""
        return self.name.replace("/", "-") + ".json"


def _cells(backbone: str, batch: int, windows: Sequence[int], rounds: int, **more: Any) -> list[Planned]:
    """Time and memory of a backbone's groups, with gradient checkpointing and without."""
    found = []
    for window in windows:
        for checkpointing in (False, True):
            settings = GroupBench(
                backbone=backbone, batch=batch, window=window, rounds=rounds, checkpointing=checkpointing, **more
            )
            found += [Planned("group", settings), Planned("memory", settings)]
    return found


def _full_size(backbone: str, options: Sequence[str]) -> list[Planned]:
    """A published model with random weights at 720x720 on a GPU, W = 5, checkpointed."""
    settings = GroupBench(
        backbone=backbone,
        backbone_options=("random_weights=true", "height=720", "width=720", *options),
        batch=1,
        window=5,
        rounds=5,
        guidance=None if backbone.startswith("flux") else 1.0,
        checkpointing=True,
        device="cuda",
        dtype="bfloat16",
    )
    return [Planned("group", settings), Planned("memory", settings)]


def _counts(backbone: str, window: int) -> list[Planned]:
    return [
        Planned("collectives", CollectiveBench(backbone=backbone, window=window, checkpointing=checkpointing))
        for checkpointing in (False, True)
    ]


PRESETS: dict[str, Callable[[], list[Planned]]] = {
    "smoke": lambda: [
        Planned("group", GroupBench(window=2, batch=2, rounds=2, steps=4)),
        Planned("memory", GroupBench(window=2, batch=2, rounds=2, steps=4)),
        Planned("collectives", CollectiveBench(window=2)),
    ],
    "digits": lambda: [
        *(c for c in _cells("digits-flux", 16, (5,), 7) if c.kind == "group" or not c.settings.checkpointing),
        _counts("digits-flux", 5)[1],
    ],
    "laptop": lambda: [
        *_cells("digits-flux", 16, (4, 5), 15),
        *_cells("photos-flux", 6, (4, 5), 15),
        *_cells("photos-qwen", 6, (4, 5), 15),
        *_counts("digits-flux", 5),
        *_counts("photos-qwen", 5),
    ],
    "flux-dev": lambda: _full_size("flux-dev", ["lora_rank=32"]),
    "qwen-image": lambda: _full_size("qwen-image", ["text_tokens=256", "lora_rank=32"]),
    "h200": lambda: [*PRESETS["flux-dev"](), *PRESETS["qwen-image"]()],
}
"""Cells by the name of a preset. Full-size models train a LoRA, as one device holds no second copy of them."""


def run_suite(preset: str, out: Path, timeout: float = 900, progress: Callable[[str], None] | None = None) -> Record:
    """Measure every cell of a preset, and write its record beside ``out/record.json``, which lists them all.

    A cell that is skipped says what it needs; one that fails has its error; both leave the others alone. A run that is
    killed has the records of the cells that were done, and names the others. ``timeout``: seconds that each process of
    a cell may take.

    Raises:
        ValueError: unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {list(PRESETS)}, found {preset!r}")
    planned = PRESETS[preset]()
    cells = [Cell(one.name, "skipped", NOT_REACHED) for one in planned]
    record = Record("bench", command_line(), preset, {"preset": preset}, seeds={}, cells=cells)
    for number, one in enumerate(planned):
        record.cells[number] = _measure(one, out, timeout)
        record.write(out / "record.json")
        if progress is not None:
            progress(one.name)
    return record


def _measure(planned: Planned, out: Path, timeout: float) -> Cell:
    settings = asdict(planned.settings) | {"kind": planned.kind, "file": planned.file}
    reason = why_not(planned)
    if reason is not None:
        return Cell(planned.name, "skipped", reason, settings)
    path = out / planned.file
    path.unlink(missing_ok=True)
    try:
        # a group is timed in a process of its own; the other kinds spawn theirs
        if isinstance(planned.settings, CollectiveBench):
            run_collective_bench(replace(planned.settings, timeout=max(1, round(timeout)))).write(path)
        elif planned.kind == "memory":
            run_memory_bench(planned.settings, timeout=timeout).write(path)
        else:
            run_children(_child, (planned.settings, str(path)), 1, timeout)
        failed = [f"{cell.name}: {cell.reason}" for cell in Record.read(path).cells if cell.status == "failed"]
    except Exception as error:  # of a child that died, hung or ran out of memory
        return Cell(planned.name, "failed", f"{type(error).__name__}: {str(error).strip()[-2000:]}", settings)
    if failed:
        return Cell(planned.name, "failed", "; ".join(failed), settings)
    return Cell(planned.name, settings=settings)


def _child(number: int, settings: GroupBench, path: str) -> None:
    run_group_bench(settings).write(Path(path))


def why_not(planned: Planned) -> str | None:
    """Why a cell cannot be measured here: no such device, or too little memory; None if it can."""
    settings = planned.settings
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        return f"needs a CUDA device{_needed(planned)}; this machine has none"
    needed, present = needed_bytes(planned), _memory(settings.device)
    if needed > present:
        return f"needs {needed / 2**30:.1f} GiB, {settings.device} has {present / 2**30:.1f}"
    return None


def needed_bytes(planned: Planned) -> float:
    """Least memory of a cell: copies of the parameters, without activations. A LoRA's gradients count as none."""
    settings = planned.settings
    parameters = next((e.parameters for e in list_backbones() if e.name == settings.backbone), 0)
    copies = 1 if any(option.startswith("lora_rank=") for option in settings.backbone_options) else COPIES[planned.kind]
    ranks = settings.ranks if isinstance(settings, CollectiveBench) and settings.device == "cpu" else 1
    return float(parameters * getattr(torch, settings.dtype).itemsize * copies * ranks)


def _needed(planned: Planned) -> str:
    return f" with {needed_bytes(planned) / 2**30:.1f} GiB" if needed_bytes(planned) > 2**30 else ""


def _memory(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
