"""The record that every run writes: what was asked, where it ran, and the raw samples of every cell.

What ``bench`` measures and ``analysis`` shows. Strict JSON: an undefined value is a status, never NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jagg_core.environment import environment
from jagg_core.files import remove_partial, temporary_beside, write_atomically

SCHEMA_VERSION = 1

Status = Literal["ok", "failed", "skipped", "undefined"]


class RecordError(ValueError):
    """A record that is damaged, of another schema, or not strict JSON."""


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
                f"status of cell {self.name!r} must be one of {list(get_args(Status))}, found {self.status!r}"
            )
        if (self.status == "ok") == (self.reason is not None):
            raise RecordError(f"cell {self.name!r}: a reason goes with every status but ok, found {self.reason!r}")


@dataclass
class Record:
    """A run: settings, environment and cells. See `write` and `read`."""

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
        """The cell of that name.

        Raises:
            KeyError: no such cell.
        """
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise KeyError(f"the record has no cell {name!r}; it has {[c.name for c in self.cells]}")

    def write(self, path: Path) -> None:
        """Write atomically.

        Raises:
            RecordError: cells of equal names, or a value that strict JSON does not know.
        """
        names = [cell.name for cell in self.cells]
        if len(set(names)) != len(names):
            raise RecordError(f"cell names must be unique, found {sorted({n for n in names if names.count(n) > 1})}")
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record back.

        Raises:
            RecordError: truncated or other JSON, or another schema version.
        """
        data = read_json(path)
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise RecordError(f"{path}: schema_version must be {SCHEMA_VERSION}, found {found}")
        try:
            cells = [Cell(**cell) for cell in data.pop("cells")]
            found = cls(cells=cells, **data)
            for cell in cells:
                _check_types(cell)
        except (TypeError, KeyError) as error:
            raise RecordError(f"{path}: not a record of schema {SCHEMA_VERSION}: {error}") from error
        names = [cell.name for cell in cells]
        if len(set(names)) != len(names) or not isinstance(found.environment, dict):
            raise RecordError(f"{path}: cell names must be unique and the environment an object")
        return found


def _check_types(cell: Cell) -> None:
    """Raise TypeError unless samples are lists of numbers and nulls, and settings and values objects."""
    if not isinstance(cell.name, str):
        raise TypeError(f"name of a cell must be text, found {cell.name!r}")
    for name in ("settings", "samples", "values"):
        if not isinstance(getattr(cell, name), dict):
            raise TypeError(f"{name} of cell {cell.name!r} must be an object, found {getattr(cell, name)!r}")
    for name, taken in cell.samples.items():
        if not isinstance(taken, list) or not all(t is None or type(t) in (int, float) for t in taken):
            raise TypeError(f"samples.{name} of cell {cell.name!r} must be a list of numbers and nulls")


def plain(value: Any) -> Any:
    """JSON types for what benchmarks hold: tensors and numpy scalars to numbers, dtypes and paths to strings.

    Raises:
        RecordError: a type that has none.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Path) or type(value).__module__.split(".")[0] == "torch":
        return str(value).removeprefix("torch.")
    raise RecordError(f"cannot store a {type(value).__name__} in a record: {value!r}")


def write_json(path: Path, data: Any) -> None:
    """Write strict JSON atomically: a reader sees the old file or the whole new one.

    Raises:
        RecordError: NaN, infinity or an unknown type.
    """
    data = plain(data)
    try:
        text = json.dumps(data, indent=1, allow_nan=False)
    except ValueError as error:
        raise RecordError(f"{path.name}: {_first_not_finite(data)} is not finite; store a status instead") from error
    write_atomically(path, text.encode())


def require_writable(path: Path) -> None:
    """Make the folder of a file that will be written, and try a write there, before the work that leads to it.

    Raises:
        ValueError: the path is a folder, lies below a file, or nothing can be written there.
    """
    _require_folder(path.parent)
    if os.path.isdir(path):  # unlike Path.is_dir, which raises for a name that is too long
        raise ValueError(f"out must be a file, got the folder {path}")
    try:
        temporary_beside(path).unlink()
    except OSError as error:
        raise ValueError(f"out: {path} cannot be written: {error.strerror}") from error


def _require_folder(folder: Path) -> None:
    """Make the folder if need be. Raises ValueError, naming the file in the way if there is one, where it cannot."""
    for above in (folder, *folder.parents):
        if os.path.lexists(above) and not os.path.isdir(above):
            kind = "file" if os.path.exists(above) else "broken link"
            raise ValueError(f"out must be {'' if above == folder else 'below '}a folder, got the {kind} {above}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: the folder {folder} cannot be made: {error.strerror}") from error


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Holds a folder for one run, so that no second one writes into it meanwhile. The folder is made if need be.

    What a killed run left half written in it is removed first.

    The system lets go of the lock when the process ends, however it ends; the empty file ``.lock`` stays. Systems and
    file systems without such locks are not guarded.

    Raises:
        ValueError: another run holds it, the path is a file or lies below one, or nothing can be written there.
    """
    path = folder / ".lock"
    require_writable(path)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out: another run is at work in {folder}: wait for its end or stop it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        else:
            remove_partial(folder)
        os.set_inheritable(file.fileno(), True)  # a child with close_fds=False holds it too, also after its parent
        yield


def read_json(path: Path) -> Any:
    """Read strict JSON.

    Raises:
        RecordError: not JSON, or NaN or infinity in it.
        FileNotFoundError: no such file.
    """

    def refuse(name: str) -> None:
        raise RecordError(f"{path}: {name} is not strict JSON")

    try:
        return json.loads(path.read_text(), parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: not JSON, perhaps truncated: {error}") from error


def _first_not_finite(data: Any, where: str = "record") -> str:
    if isinstance(data, float) and not math.isfinite(data):
        return f"{where} = {data}"
    pairs: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(data, dict):
        pairs = iter(data.items())
    elif isinstance(data, list):
        pairs = iter(enumerate(data))
    for key, value in pairs:
        found = _first_not_finite(value, f"{where}.{key}")
        if found:
            return found
    return ""


@contextmanager
def recorded(cells: list[Cell], name: str, **settings: Any) -> Iterator[Cell]:
    """Run a cell: append it to ``cells``, as failed with its error if the body raises. Ctrl-C still stops the run."""
    cell = Cell(name, settings=plain(settings))
    try:
        yield cell
    except Exception as error:
        cell.status, cell.reason = "failed", f"{type(error).__name__}: {error}"
        cell.samples, cell.values = {}, {}
    cells.append(cell)
