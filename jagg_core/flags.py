"""Command-line flags of settings that are dataclasses: a flag for every field, of its type."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


def add_flags(command: argparse.ArgumentParser, settings: type[Any], skip: Sequence[str] = ()) -> None:
    """Add a flag for every field of the dataclass ``settings`` but those in ``skip``.

    A tuple takes any number of values, over several flags too; a bool is a switch; a Literal has its choices. Flags
    that are not given are absent from the parsed arguments.
    """
    types = get_type_hints(settings)
    for field in fields(settings):
        if field.name in skip:
            continue
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            command.add_argument(flag, action="store_true", default=argparse.SUPPRESS)
            continue
        wanted = types[field.name]
        many: dict[str, Any] = {"nargs": "*", "action": "extend"} if isinstance(default, tuple) else {}
        kind = next(part for part in (get_args(wanted) or (wanted,)) if part is not type(None))
        if get_origin(wanted) is Literal:
            many, kind = {"choices": get_args(wanted)}, str
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = "default none" if shown in (None, "") else f"default {shown}"
        command.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text, **many)


def given(arguments: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """The fields of ``settings`` whose flags were given."""
    found = {f.name: getattr(arguments, f.name) for f in fields(settings) if hasattr(arguments, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
