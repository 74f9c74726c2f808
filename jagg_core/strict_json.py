"""Strict JSON, written whole or not at all: an undefined value is a status or null, never NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jagg_core.files import write_atomically


class RecordError(ValueError):
    """A record that is damaged, of another schema, or not strict JSON."""


def plain(value: Any) -> Any:
    """Converts to JSON types: tensors and numpy scalars to numbers, dtypes and paths to strings.

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
    """Writes strict JSON atomically: a reader sees the old file or the whole new one.

    Raises:
        RecordError: NaN, infinity or an unknown type.
    """
    data = plain(data)
    try:
        text = json.dumps(data, indent=1, allow_nan=False)
    except ValueError as error:
        raise RecordError(f"{path.name}: {_first_not_finite(data)} is not finite; store a status instead") from error
    write_atomically(path, text.encode())


def read_json(path: Path) -> Any:
    """Reads strict JSON.

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
    """Returns place and value of the first number that is not finite; empty if there is none."""
    if isinstance(data, float) and not math.isfinite(data):
        return f"{where} = {data}"
    pairs: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(data, dict):
        pairs = iter(data.items())
    elif isinstance(data, list):
        pairs = iter(enumerate(data))
    for key, value in pairs:
        place = _first_not_finite(value, f"{where}.{key}")
        if place:
            return place
    return ""
