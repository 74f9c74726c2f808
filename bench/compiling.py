"""torch.compile: compiles a backbone's blocks, runs the plain loop without it, counts graphs and their seconds."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from jagg_core.backbones import Backbone


def compile_blocks(backbone: Backbone, backend: str | None) -> None:
    """Lets torch compile every block of a backbone in place at its first call; does nothing for the backend None.

    A transformer without a list of ``blocks`` is compiled as a whole. Blocks of a kind share their graphs. Every shape
    and grad mode gets its graph: with dynamic shapes, an arm would run what the arms before it left behind. A
    block that is not one graph, or has too many (torch's ``recompile_limit``), raises when it is called.
    """
    if backend is not None:
        torch.compiler.reset()  # graphs of an earlier run count towards the limit
        for block in getattr(backbone, "blocks", [backbone.transformer]):
            # not block.compile(), which skips torch's modules, such as nn.Sequential
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)


def uncompiled(backend: str | None) -> AbstractContextManager[Any]:
    """Runs compiled blocks as they are written while inside: the twin that they are verified against."""
    return nullcontext() if backend is None else torch.compiler.set_stance("force_eager")


def require_graphs(backend: str | None, before: int) -> None:
    """Raises RuntimeError if a backend has made no graph since `compiled_graphs` was ``before``."""
    if backend is not None and compiled_graphs() == before:
        raise RuntimeError(f"compile: {backend} made no graph; the policy must call the backbone's blocks as modules")


def compiled_graphs() -> int:
    """Counts the graphs that torch.compile made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent until something is compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def compile_seconds() -> float:
    """Returns the seconds that torch.compile took so far, for forwards and for backwards."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent()["total_wall_time"])
