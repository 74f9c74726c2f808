"""Collectives of a group by layout and arm: counted where they happen, and timed; on real ranks or pretended ones.

Under FSDP2 every transformer block is a sharded unit, and what is left of the transformer another. A unit is gathered
before its forward and again before its backward, and its gradients are scattered after it; how often a scheme makes
that happen depends on the order of its forwards and backwards. Here it is counted.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.children import run_children
from bench.collective_ranks import work, work_launched
from bench.lines import count_sentences
from bench.progress import Say
from bench.settings import CollectiveBench
from jagg_core.environment import command_line
from jagg_core.records import Cell, Record


def launched() -> bool:
    """Returns whether torchrun started this process, as one rank of several."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_first() -> bool:
    """Returns whether this process prints for all: it is rank 0, or torchrun did not start it."""
    return not launched() or os.environ["RANK"] == "0"


def settings_of(flags: dict[str, Any]) -> CollectiveBench:
    """Makes settings from the given ones; ``ranks`` are torchrun's where it started this process.

    Raises:
        ValueError: other ranks than torchrun's were asked for, or pretended ones.
    """
    if not launched():
        return CollectiveBench(**flags)
    ranks = int(os.environ["WORLD_SIZE"])
    if flags.get("ranks", ranks) != ranks:
        raise ValueError(f"ranks must be the {ranks} that torchrun started or be left out, got {flags['ranks']}")
    if flags.get("pretend"):
        raise ValueError("pretend is for one process: run it without torchrun")
    return CollectiveBench(**flags | {"ranks": ranks})


def run_collective_bench(settings: CollectiveBench, progress: Say | None = None) -> Record:
    """Verifies, counts and times every arm on every rank. Calls ``progress`` every second while ranks are at work.

    A rank that fails or hangs ends the run; its error is in the record.
    """
    try:
        return record_of(settings, work_launched(settings) if launched() else _spawn(settings, progress))
    except Exception as error:  # whatever a rank raises
        record = _empty(settings)
        record.cells.append(Cell("ranks", "failed", f"{type(error).__name__}: {str(error).strip()[-2000:]}"))
        return record


def record_of(settings: CollectiveBench, results: list[dict[str, Any]]) -> Record:
    """Builds the record from the results of every rank (see `bench.collective_ranks.measure`).

    A cell has, per rank and round, seconds of the whole arm (``rank0_total_s``) and, from separate rounds, of each
    kind of collective without overlap (``rank0_all_gather_s``). Its values are rank 0's: counts and bytes by kind;
    ``retained_gradient_bytes``, of the gradients alive when all steps but the last are done and wait for it (deferred),
    or at the end (others).
    """
    record = _empty(settings)
    sharding = Cell("sharding", values={key: results[0][key] for key in ("units", "parameters")})
    record.cells = [sharding, *(_joined(ranks) for ranks in zip(*(rank["cells"] for rank in results), strict=True))]
    sharding.values["findings"] = count_sentences(record)
    return record


def _empty(settings: CollectiveBench) -> Record:
    return Record("collectives", command_line(), settings.backbone, asdict(settings), seeds={"group": [settings.seed]})


def _spawn(settings: CollectiveBench, progress: Say | None) -> list[dict[str, Any]]:
    """Measures every rank in a separate process; returns their results by rank."""
    processes = 1 if settings.pretend else settings.ranks

    def waiting() -> None:
        if progress is not None:
            progress(f"{settings.ranks} ranks verify, count and time the arms")

    with tempfile.TemporaryDirectory() as folder:
        run_children(work, (settings, folder), processes, settings.timeout, waiting=waiting)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def _joined(ranks: tuple[dict[str, Any], ...]) -> Cell:
    """Joins an arm's cells of all ranks into one."""
    cells = [Cell(**rank) for rank in ranks]
    failed = next((cell for cell in cells if cell.status != "ok"), None)
    if failed is not None:
        return failed
    counts = [cell.values["counts"] for cell in cells]
    same = all(other == counts[0] for other in counts)
    return Cell(
        cells[0].name,
        "ok" if same else "failed",
        None if same else f"ranks made different numbers of collectives: {counts}",
        cells[0].settings,
        samples={f"rank{i}_{name}": taken for i, cell in enumerate(cells) for name, taken in cell.samples.items()},
        values=cells[0].values,
    )
