"""The record that every run writes: what was asked, where it ran, and the raw samples of every cell.

What ``bench`` measures and ``analysis`` shows. Strict JSON: an undefined value is a status, never NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jagg_core.environment import environment
from jagg_core.strict_json import RecordError, plain, read_json, write_json

SCHEMA_VERSION = 1

Status = Literal["ok", "failed", "skipped", "undefined"]


@dataclass
class Cell:
    """One measured cell.

    Attributes:
        name: unique within the record, readable, stable.
        status: ``ok`` has samples or values; the others have a reason.
        settings: what distinguishes the cell.
        samples: raw samples by name (units in it), in the order they were taken; None where undefined.
        values: figures derived when the cell ran.
    """

    name: str
    status: Status = "ok"
    reason: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float | None]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise RecordError(
                f"status of cell {self.name!r} must be one of {list(get_args(Status))}, got {self.status!r}"
            )
        if (self.status == "ok") == (self.reason is not None):
            raise RecordError(f"cell {self.name!r}: a reason goes with every status but ok, got {self.reason!r}")


@dataclass
class Record:
    """A run: settings, environment and cells."""

    kind: str
    command: list[str]
    backbone: str
    settings: dict[str, Any]
    seeds: dict[str, list[int]]
    schedule: list[float] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=environment)
    cells: list[Cell] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    def cell(self, name: str) -> Cell:
        """Returns the cell of that name.

        Raises:
            KeyError: no such cell.
        """
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise KeyError(f"the record has no cell {name!r}; it has {[c.name for c in self.cells]}")

    def write(self, path: Path) -> None:
        """Writes the record atomically.

        Raises:
            RecordError: cells of equal names, or a value that strict JSON does not know.
        """
        names = [cell.name for cell in self.cells]
        if len(set(names)) != len(names):
            raise RecordError(f"cell names must be unique, got {sorted({n for n in names if names.count(n) > 1})}")
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Reads a record.

        Raises:
            RecordError: truncated or other JSON, or another schema version.
        """
        data = read_json(path)
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            version = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise RecordError(f"{path}: schema_version must be {SCHEMA_VERSION}, got {version}")
        try:
            cells = [Cell(**cell) for cell in data.pop("cells")]
            record = cls(cells=cells, **data)
            for cell in cells:
                _check_types(cell)
        except (TypeError, KeyError) as error:
            raise RecordError(f"{path}: not a record of schema {SCHEMA_VERSION}: {error}") from error
        names = [cell.name for cell in cells]
        if len(set(names)) != len(names) or not isinstance(record.environment, dict):
            raise RecordError(f"{path}: cell names must be unique and the environment an object")
        return record


def _check_types(cell: Cell) -> None:
    """Raises TypeError unless samples are lists of numbers and nulls, and settings and values objects."""
    if not isinstance(cell.name, str):
        raise TypeError(f"name of a cell must be text, got {cell.name!r}")
    for name in ("settings", "samples", "values"):
        if not isinstance(getattr(cell, name), dict):
            raise TypeError(f"{name} of cell {cell.name!r} must be an object, got {getattr(cell, name)!r}")
    for name, taken in cell.samples.items():
        if not isinstance(taken, list) or not all(t is None or type(t) in (int, float) for t in taken):
            raise TypeError(f"samples.{name} of cell {cell.name!r} must be a list of numbers and nulls")


@contextmanager
def recorded(cells: list[Cell], name: str, **settings: Any) -> Iterator[Cell]:
    """Appends a cell to ``cells``; one whose body raises is failed, with the error. Ctrl-C still stops the run."""
    cell = Cell(name, settings=plain(settings))
    try:
        yield cell
    except Exception as error:
        cell.status, cell.reason = "failed", f"{type(error).__name__}: {error}"
        cell.samples, cell.values = {}, {}
    cells.append(cell)
