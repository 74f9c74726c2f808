"""Seconds of communication: while a collective of this rank was under way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.benchmark.utils.timer import timer

from jagg_core.devices import is_accelerator, synchronize, timing_event
from jagg_core.distributed import AROUND

# torch 2.13 gave them these names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveClock:
    """Times the collectives that FSDP2 makes for transformers, and those of `jagg_core.distributed`.

    A collective lasts from when this rank enters it until its result is there: transfer, and waiting for slower ranks,
    which the slowest rank itself does not do. On a GPU these are the device's seconds between events on the stream of
    the collective, also while computation hides it. Time that collectives share counts once. Left out is the sum of one
    number within the norm of a gradient, for which ranks have just met.

    Attributes:
        spans: start and end of each, in seconds, or events of a GPU.
        complete: whether torch lets FSDP2's collectives be timed; older versions do not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.complete = True
        self.spans: list[tuple[Any, Any]] = []
        self._running = False
        self._mark: Any = None

    def watch(self, transformer: nn.Module) -> None:
        """Time the collectives of a transformer that is sharded by FSDP2; of another there are none."""
        from torch.distributed.fsdp import FSDPModule

        mesh: Any = getattr(next(transformer.parameters()), "device_mesh", None)
        units: list[Any] = [module for module in transformer.modules() if isinstance(module, FSDPModule)]
        self.complete &= all(hasattr(unit, "set_custom_all_gather") for unit in units)
        for unit in units if self.complete else ():
            unit.set_custom_all_gather(_Timed(self, _all_gather))
            unit.set_custom_reduce_scatter(_Timed(self, _reduce_scatter))
            if mesh.ndim > 1:
                unit.set_all_reduce_hook(self._all_reduced)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what comes; begins at zero."""
        self.spans, self._running = [], True
        token = AROUND.set(self.collective)
        try:
            yield
        finally:
            AROUND.reset(token)
            self._running = False

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective."""
        start = self._now()
        yield
        self._note(start, self._now())

    def mark(self) -> None:
        """Remember when the last collective ended, or, if copies are not sharded, the buffer of none was there."""
        self._mark = self._now()

    def seconds(self) -> float:
        """Seconds of collectives in the last `running`; waits for the device."""
        if not (is_accelerator(self.device) and self.spans):
            return covered(self.spans)
        synchronize(self.device)
        first = self.spans[0][0]
        return covered([(first.elapsed_time(a) / 1e3, first.elapsed_time(b) / 1e3) for a, b in self.spans])

    def _now(self) -> Any:
        return timing_event(self.device) if is_accelerator(self.device) else timer()

    def _note(self, start: Any, end: Any) -> None:
        if self._running:
            self.spans.append((start, end))

    def _all_reduced(self, reduced: Tensor) -> None:
        """FSDP2 calls it after the all-reduce among copies, which comes right after the reduce-scatter."""
        self._note(self._mark, self._now())


class _Timed:
    """A collective that FSDP2 makes, with buffers as its own way has them."""

    def __init__(self, clock: CollectiveClock, function: Any) -> None:
        self.clock, self.function = clock, function

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.clock.mark()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **others: Any) -> Any:
        with self.clock.collective():
            work = self.function(output_tensor, input_tensor, group=group, **others)
        self.clock.mark()
        return work


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what spans (start, end) cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
