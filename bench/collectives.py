"""All-gathers and reduce-scatters of a group under FSDP2, counted where they happen, on real ranks or pretended ones.

Every transformer block is a sharded unit, and what is left of the transformer another. A unit is gathered before its
forward and again before its backward, and its gradients are scattered after it; how often a scheme makes that happen
depends on the order of its forwards and backwards. Here it is counted.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from bench.children import run_children
from bench.collective_ranks import work
from bench.group import TOLERANCE
from jagg_core.backbones import read_options
from jagg_core.checks import require_at_least
from jagg_core.records import Cell, Record, command_line


@dataclass(frozen=True)
class CollectiveBench:
    """Settings.

    ``ranks`` processes on this machine, with gloo on the CPU and NCCL on GPUs; or, with ``pretend``, one process that
    is told it is one of so many (torch's fake process group): counts are the same, values and times mean nothing.
    A child that is not done after ``timeout`` seconds ends the run.

    Raises:
        ValueError: a setting out of range.
    """

    backbone: str = "digits-flux"
    backbone_options: tuple[str, ...] = ()
    window: int = 5
    batch: int = 2
    ranks: int = 2
    pretend: bool = False
    checkpointing: bool = False
    reshard: Literal["after_forward", "never"] = "after_forward"
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    timeout: int = 300

    def __post_init__(self) -> None:
        read_options(self.backbone, self.backbone_options)
        require_at_least(self, window=2, batch=1, ranks=1, timeout=1)
        if self.reshard not in ("after_forward", "never"):
            raise ValueError(f"reshard must be after_forward or never, found {self.reshard!r}")
        if getattr(torch, self.dtype, None) not in TOLERANCE:
            names = [str(dtype).removeprefix("torch.") for dtype in TOLERANCE]
            raise ValueError(f"dtype must be one of {names}, found {self.dtype!r}")


def run_collective_bench(settings: CollectiveBench) -> Record:
    """Count every arm's collectives on every rank.

    A rank that fails or hangs ends the run; its error is in the record.
    """
    record = Record(
        "collectives", command_line(), settings.backbone, asdict(settings), seeds={"group": [settings.seed]}
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = 1 if settings.pretend else settings.ranks
        try:
            run_children(work, (settings, folder), processes, settings.timeout)
            found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
        except Exception as error:  # whatever a child raises
            record.cells.append(Cell("ranks", "failed", f"{type(error).__name__}: {str(error).strip()[-2000:]}"))
            return record
    first = found[0]
    record.cells.append(Cell("sharding", values={"units": first["units"], "parameters": first["parameters"]}))
    for name, values in first["arms"].items():
        others = [rank["arms"][name] for rank in found]
        same = all(other["counts"] == values["counts"] for other in others)
        reason = None if same else f"ranks made different numbers of collectives: {[o['counts'] for o in others]}"
        kept = {key: values[key] for key in ("counts", "bytes", "relative_error", "retained_gradient_bytes")}
        record.cells.append(
            Cell(
                name,
                "ok" if same else "failed",
                reason,
                samples={f"rank{rank}_s": other["seconds"] for rank, other in enumerate(others)},
                values=kept,
            )
        )
    return record
