"""Collectives where they happen: how many, of how many bytes, and how long each takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark.utils.timer import timer

KINDS = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce"}
"""How torch's operators name collectives, and what they are called here."""

AGREEMENT = "agreement"
"""An all-reduce of one element: ranks that decide something together, see `jagg_core.distributed.on_any_rank`."""


def kind_of(func: Any, args: tuple[Any, ...]) -> tuple[str, int] | None:
    """Returns a collective's kind, and bytes a rank receives (gather) or contributes; None for other operators."""
    if func.namespace != "c10d":
        return None
    kind = next((ours for theirs, ours in KINDS.items() if theirs in func._schema.name), None)
    if kind is None:
        return None
    largest = max(_tensors(args), key=lambda tensor: tensor.nbytes)
    return AGREEMENT if kind == "all_reduce" and largest.numel() == 1 else kind, largest.nbytes


class Counter(TorchDispatchMode):
    """Counts collectives.

    Attributes:
        counts: by kind. backward_counts: those of them that were made inside a backward (recomputation included).
        backwards: of the calls of ``backward`` that made collectives.
        bytes: by kind, see `kind_of`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys((*KINDS.values(), AGREEMENT), 0)
        self.backward_counts = dict(self.counts)
        self.backwards: set[int] = set()
        self.bytes = dict(self.counts)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        collective = kind_of(func, args)
        if collective is not None:
            kind, size = collective
            self.counts[kind] += 1
            self.bytes[kind] += size
            backward = torch._C._current_graph_task_id()  # as FSDP2 tells it; -1 outside
            if backward != -1:
                self.backward_counts[kind] += 1
                self.backwards.add(backward)
        return func(*args, **(kwargs or {}))


class Stopwatch(TorchDispatchMode):
    """Seconds of collectives by kind, without overlap: all ranks meet before each one, and wait for its end.

    So a collective is neither hidden under computation, nor charged with waiting for a slower rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(KINDS.values(), 0.0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        collective = kind_of(func, args)
        if collective is None or collective[0] == AGREEMENT:
            return func(*args, **(kwargs or {}))
        dist.barrier()
        start = timer()
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(part, torch.ScriptObject):
                dist.Work.unbox(part).wait()
        self.seconds[collective[0]] += timer() - start
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
