"""Records as reports need them: what is damaged is named by file, cell and field, never met as a traceback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.statistics.names import families_of
from jagg_core.records import Record
from jagg_core.strict_json import RecordError


class Fields(dict[str, Any]):
    """A part of a record that knows its place in it.

    Raises:
        RecordError: a field that is asked for and missing.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__({key: _placed(value, f"{where}.{key}") for key, value in values.items()})
        self.where = where

    def __missing__(self, key: str) -> Any:
        known = ", ".join(map(repr, [*self][:8])) + (", ..." if len(self) > 8 else "")
        raise RecordError(f"{self.where} lacks the field {key!r}; it has {known or 'none'}")


def _placed(value: Any, where: str) -> Any:
    return Fields(value, where) if isinstance(value, dict) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


NUMBER, COUNT, TEXT, TRUTH = (
    ("a number", _is_number),
    ("an integer", _is(int)),
    ("text", _is(str)),
    ("a bool", _is(bool)),
)
NUMBERS, COUNTS = ("a list of numbers", _list_of(_is_number)), ("a list of integers", _list_of(_is(int)))
TEXTS, MAPPING = ("a list of texts", _list_of(_is(str))), ("an object", _is(dict))

Expected = dict[str, tuple[str, Callable[[Any], bool]]]

PARTS: Expected = {
    "command": TEXTS,
    "backbone": TEXT,
    "settings": MAPPING,
    "seeds": MAPPING,
    "schedule": NUMBERS,
    "environment": MAPPING,
}
"""Of a record."""

SETTINGS: Expected = {
    **dict.fromkeys(("eta", "threshold", "min_cosine", "max_signal_loss", "longer"), NUMBER),
    **dict.fromkeys(("window", "seed", "update_samples", "updates", "prompts", "samples", "batch"), COUNT),
    **dict.fromkeys(("estimator", "label", "centring", "arm", "reward"), TEXT),
    **dict.fromkeys(("anticipating", "headline"), TRUTH),
    **dict.fromkeys(("windows", "knots"), COUNTS),
    "etas": NUMBERS,
    "watched": TEXTS,
    "recipe": MAPPING,
    "families": (
        "an object of objects",
        lambda value: isinstance(value, dict) and all(map(MAPPING[1], value.values())),
    ),
}
"""Settings of a record or of one of its cells, wherever there is one of that name."""

COUNT_OR_COUNTS = ("an integer or a list of them", lambda value: COUNT[1](value) or COUNTS[1](value))

CELL_SETTINGS: Expected = {**SETTINGS, "passes": COUNT_OR_COUNTS}
"""Of a cell: ``passes`` is of its plan, or, in a suite of benchmarks, of all plans of the cell."""


def read_record(path: Path) -> Record:
    """Reads a record whose parts are `Fields`. No module that it names is imported.

    Raises:
        RecordError: damaged; names the file, the field, and what is wrong with it.
    """
    record = Record.read(path)
    _check(PARTS, vars(record), f"{path}: ")
    _check(SETTINGS, record.settings, f"{path}: settings.")
    known = _families(record, path)
    family = (f"one of {known}", lambda value: isinstance(value, str) and value in known)
    for name in ("settings", "environment", "seeds"):
        setattr(record, name, Fields(getattr(record, name), f"{path}: {name}"))
    for cell in record.cells:
        where = f"{path}: cell {cell.name!r}, "
        _check({**CELL_SETTINGS, "family": family}, cell.settings, f"{where}settings.")
        for name in ("settings", "samples", "values"):
            setattr(cell, name, Fields(getattr(cell, name), f"{where}{name}"))
    return record


def _families(record: Record, path: Path) -> list[str]:
    try:
        return list(families_of(record))
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def _check(expected: Expected, values: Mapping[str, Any], where: str) -> None:
    """Raise RecordError for the first of the values that is not what it is expected to be; others may be missing."""
    for name, (what, test) in expected.items():
        if name in values and not test(values[name]):
            found = repr(values[name])
            raise RecordError(f"{where}{name} must be {what}, got {found if len(found) <= 60 else found[:57] + '...'}")


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What a report of the record at ``path`` still runs into is a damaged record.

    Raises:
        RecordError: in place of the error of whatever could not use the record.
    """
    try:
        yield
    except RecordError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise RecordError(f"{path}: damaged, no report can be made of it: {type(error).__name__}: {error}") from error
