"""Command-line flags of settings that are dataclasses: a flag for every field, of its type."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from inspect import getdoc
from typing import Any, Literal, get_args, get_origin, get_type_hints


def add_flags(command: argparse.ArgumentParser, settings: type[Any], skip: Sequence[str] = ()) -> None:
    """Adds a flag for every field of the dataclass ``settings`` except those in ``skip``.

    A tuple takes any number of values, over several flags too; a bool is a switch; a Literal has its choices. Flags
    that are not given are absent from the parsed arguments. The help is what the docstrings of the class and its bases
    say about the attribute.
    """
    types, about = get_type_hints(settings), described(settings)
    for field in fields(settings):
        if field.name in skip:
            continue
        flag, default = "--" + field.name.replace("_", "-"), field.default
        text = about.get(field.name, "")
        if isinstance(default, bool):
            command.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        wanted = types[field.name]
        many: dict[str, Any] = {"nargs": "*", "action": "extend"} if isinstance(default, tuple) else {}
        kind = next(part for part in (get_args(wanted) or (wanted,)) if part is not type(None))
        if get_origin(wanted) is Literal:
            many, kind = {"choices": get_args(wanted)}, str
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        default_text = "default none" if shown in (None, "") else f"default {shown}"
        text = f"{text} ({default_text})" if text else default_text
        command.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text, **many)


def described(settings: type[Any]) -> dict[str, str]:
    """Reads the texts on attributes in the docstrings of a dataclass and its bases; none without docstring_parser."""
    try:
        from docstring_parser import parse
    except ImportError:  # only the help becomes shorter
        return {}
    texts: dict[str, str] = {}
    for kind in reversed(settings.__mro__[:-1]):
        for attribute in parse(getdoc(kind) or "").params:
            text = " ".join((attribute.description or "").split()).rstrip(".")
            texts[attribute.arg_name] = text.replace("%", "%%").replace("`", "")
    return texts


def given(arguments: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """Selects the fields of ``settings`` whose flags were given."""
    values = {f.name: getattr(arguments, f.name) for f in fields(settings) if hasattr(arguments, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
