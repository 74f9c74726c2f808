"""Options ``option=value`` of backbones and rewards, read by the types that the loader declares."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args, get_type_hints


def read_values(kind: str, name: str, load: Callable[..., object], texts: Sequence[str]) -> dict[str, object]:
    """Reads options ``option=value`` of the ``kind`` (backbone, reward) ``name``.

    ``load`` is the function that takes them as keyword-only arguments; their types decide how a value is read.

    Raises:
        ValueError: unknown option, one given twice, or a value that is not of the option's type.
    """
    pairs = [text.partition("=") for text in texts]
    bad = [text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals]
    if bad:
        raise ValueError(f"{kind} options must be written option=value, got {bad[0]!r}")
    values = {option: value for option, _, value in pairs}
    if len(values) < len(pairs):
        raise ValueError(f"{kind} options must be different, got {list(texts)}")
    require_options(kind, name, load, values)
    types = get_type_hints(load.func if isinstance(load, partial) else load)
    return {option: _converted(option, value, types.get(option, str)) for option, value in values.items()}


def require_options(kind: str, name: str, load: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raises ValueError, with the nearest and all allowed names, unless ``load`` takes every option."""
    try:
        parameters = inspect.signature(load).parameters.values()
    except ValueError:  # some functions written in C do not show theirs
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            near = difflib.get_close_matches(option, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{kind} {name!r} must have options among {allowed}, got {option!r}{hint}")


def _converted(option: str, text: str, wanted: object) -> object:
    """Converts ``text`` to a number or a truth value where the type ``wanted`` has one; else returns it unchanged."""
    kinds = [kind for kind in get_args(wanted) or (wanted,) if kind in _READERS]
    for kind in kinds:
        try:
            return _READERS[kind](text)
        except (KeyError, ValueError):
            allowed = "true or false" if kind is bool else f"of type {kind.__name__}"
            raise ValueError(f"{option} must be {allowed}, got {text!r}") from None
    return text


_READERS: dict[object, Callable[[str], object]] = {
    int: int,
    float: float,
    bool: {"true": True, "false": False}.__getitem__,
}
"""Readers of an option by its type."""
