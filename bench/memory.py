"""Peak memory of one group by arm, in a fresh process."""

from __future__ import annotations

import gc
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.arms import ARMS, arms_of
from bench.children import run_children
from bench.group import load_group, run_of
from bench.progress import Say
from bench.settings import GroupBench
from jagg_core.devices import counts_memory, peak_memory, start_peak
from jagg_core.environment import command_line
from jagg_core.records import Cell, Record
from jagg_core.strict_json import read_json, write_json

REPEATS = 3
"""Measured runs of an arm. Where tensors alive are counted, as on a CPU, every run gives the same: there it is one."""

LOADED = "loaded"
"""File by which a process says that its group is there: what fails before fails for every arm."""


def run_memory_bench(
    settings: GroupBench, arms: Sequence[str] | None = None, timeout: float = 600, progress: Say | None = None
) -> Record:
    """Measures ``arms`` of ``python -m bench group`` (None: all) within ``timeout`` seconds.

    ``progress`` is called every second with the number of arms done.

    An arm that fails or hangs is recorded as failed; those after it are measured in another process. A cell's
    ``peak_bytes`` is what was needed beyond the loaded model, its rollout and its gradients: activations of the graphs
    held at a time, mostly. On a GPU it is what torch's allocator gave, on the CPU the tensors alive.

    Raises:
        ValueError: compiled blocks, in which tensors are not seen.
    """
    if settings.compile is not None:
        raise ValueError(f"compile must be None where memory is measured, got {settings.compile!r}")
    left = arm_names() if arms is None else list(arms)
    cells: list[Cell] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def waiting() -> None:
            if progress is not None:
                measured = sum((Path(folder) / f"{name}.json").exists() for name in left)
                progress(f"measured {len(cells) + measured} of {len(cells) + len(left)} arms")

        while left:
            failure: Exception | None = None
            try:
                run_children(measure, (settings, left, folder), 1, timeout, started, waiting)
            except Exception as error:  # of a child that died, hung or ran out of memory
                failure = error
            while left and (file := Path(folder) / f"{left[0]}.json").exists():
                cells.append(Cell(left.pop(0), samples={"peak_bytes": read_json(file)}))
            ended = isinstance(failure, TimeoutError) or not (Path(folder) / LOADED).exists()
            for name in left[: None if ended else 1]:
                cells.append(Cell(name, "failed", f"{type(failure).__name__}: {str(failure).strip()}"))
                left.remove(name)
    return Record(
        "memory", command_line(), settings.backbone, asdict(settings), {"rollout": [settings.seed]}, cells=cells
    )


def arm_names() -> list[str]:
    """Lists the arms whose memory is measured."""
    return [arm.name for arm in arms_of("memory")]


def measure(number: int, settings: GroupBench, names: Sequence[str], folder: str) -> None:
    """Measures some arms in this process, and writes each result to ``folder/NAME.json``."""
    group = load_group(settings)
    (Path(folder) / LOADED).touch()
    device = group.trajectory.latents.device
    for name in names:
        run = run_of(ARMS[name], group, settings.seed)
        run()  # gradients are allocated, and libraries set up
        peaks = [_peak_of(run, device) for _ in range(REPEATS if counts_memory(device) else 1)]
        write_json(Path(folder) / f"{name}.json", peaks)


def _peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Measures the most bytes alive at once during a run, beyond those alive before it."""
    gc.collect()
    held = start_peak(device)
    if held is None:
        with LiveBytes() as live:
            run()
        return live.peak
    run()
    peak = peak_memory(device)
    assert peak is not None
    return peak - held


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that operators made and that are still alive, and the most there were.

    What resident memory is on a CPU depends on the allocator's habits; this does not. Scratch space inside an operator
    is not seen. Tensors may be let go in any thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive = 0
        self._known: set[int] = set()
        # what other threads let go of is noted, and taken off in this one: two that count at once lose a number
        self._gone: deque[tuple[int, int]] = deque()

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        while self._gone:
            key, size = self._gone.popleft()
            self._known.discard(key)
            self._alive -= size
        return self._alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), inputs)
        return output

    def _note(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        """Counts a storage that is new: not of an input (a view, or in place), nor seen before."""
        before, key, size = self.now, storage._cdata, storage.nbytes()
        if key in inputs or key in self._known:
            return
        self._known.add(key)
        self._alive = before + size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._gone.append, (key, size))
