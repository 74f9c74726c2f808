"""The folder of a ``python -m bench run``: what became of every cell, and the records that can be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from analysis.report.bench.tables import table_of
from analysis.report.cost import beside_the_paper, costs
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

BROKEN = ("failed", "missing", "damaged")
"""Cells that should have been measured and were not; ``skipped`` ones could not be, or were not reached."""


@dataclass(frozen=True)
class Measured:
    """A cell of the run, and its record if there is one.

    Attributes:
        name: readable and stable; a cost record's is its path in the folder.
        kind: group, memory, collectives, update, or cost (a prediction that lies in the folder).
        status: ok, failed or skipped as the run says; missing or damaged if its file is.
        reason: of every status but ok.
        record: of the cell; None if there is none to read.
        table: made of it; empty if nothing can be. Of a cost record, what it predicts of the paper's figures.
    """

    name: str
    kind: str
    status: str
    reason: str = ""
    record: Record | None = None
    table: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def not_ok(self) -> list[Cell]:
        """Arms and parts of it that have no result."""
        return [cell for cell in self.record.cells if cell.status != "ok"] if self.record is not None else []

    @property
    def findings(self) -> list[str]:
        """What the record says in words."""
        cells = self.record.cells if self.record is not None else []
        return [str(finding) for cell in cells for finding in cell.values.get("findings", [])]


def read_run(run: Path, record: Record) -> list[Measured]:
    """Every cell of a run in its order, then the cost records of the folder (``cost*.json``, ``cost*/record.json``)."""
    found = [_read_cell(run, cell) for cell in record.cells]
    paths = sorted([*run.glob("cost*.json"), *run.glob("cost*/record.json")])
    return found + [_read_cost(path, path.relative_to(run).as_posix()) for path in paths]


def _read_cell(run: Path, cell: Cell) -> Measured:
    kind = str(cell.settings.get("kind", cell.name.split("/")[0]))
    if cell.status not in ("ok", "failed"):
        # a file of an earlier run may still lie there
        return Measured(cell.name, kind, cell.status, cell.reason or "")
    file = str(cell.settings.get("file", f"{cell.name.replace('/', '-')}.json"))
    try:
        record = Record.read(run / file)
        table = table_of(kind, record, cell.values)
    except (OSError, RecordError) as error:
        if cell.status == "failed":  # it says itself why there is nothing
            return Measured(cell.name, kind, "failed", cell.reason or "")
        if isinstance(error, FileNotFoundError):
            return Measured(cell.name, kind, "missing", f"{file} is not in the folder")
        return Measured(cell.name, kind, "damaged", f"{file}: {_said(error, run / file)}")
    return Measured(cell.name, kind, cell.status, cell.reason or "", record, table)


def _read_cost(path: Path, name: str) -> Measured:
    try:
        record = Record.read(path)
        if record.kind != "cost":
            raise RecordError(f"a record of kind 'cost' is needed, got {record.kind!r}")
        update = record.settings["update"]
        about = f"{record.backbone}, W = {update['window']}, jagg_frac {update['jagg_frac']:g}"
        table = beside_the_paper(record, costs(record)).assign(predicted_for=about)
        return Measured(name, "cost", "ok", "", record, table)
    except (OSError, RecordError, LookupError, TypeError) as error:
        return Measured(name, "cost", "damaged", _said(error, path))


def _said(error: Exception, path: Path) -> str:
    """An error without the path of its file, which differs between machines."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error).removeprefix(f"{path}: ")
