"""How files and flags of a configuration are read: numbers mean what they look like, and a key stands once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

MODE = "yaml-as-written"
"""The name of `load_yaml` within jsonargparse."""

_TAG = "tag:yaml.org,2002:"
_ODD = re.compile(r"(?:[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?|\+0[0-7_]+|[-+]?0[0-7]*_[0-7_]*)$")
"""Numbers to the base 60 or 8: 10:00 is 600 in YAML 1.1."""
_RESOLVERS = {
    "int": (re.compile(r"[-+]?(?:0|[1-9]\d*)$"), "-+0123456789"),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
    "odd": (_ODD, "-+0123456789"),
}


def load_yaml(text: str) -> Any:
    """Reads YAML or JSON.

    A number with a leading zero stays text, which its setting then reads as a decimal number: YAML 1.1 takes 010 for 8.

    Raises:
        yaml.YAMLError: not YAML, a key twice in one mapping, or a number to the base 60; in one line, names the line.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads numbers as they look, and each key once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = key.value, key.start_mark.line + 1
                if not isinstance(name, str):  # a list as a key, which the base class refuses
                    continue
                if name in lines:
                    raise yaml.YAMLError(f"key {name!r} stands in line {lines[name]} and again in line {line}")
                lines[name] = line
            return super().construct_mapping(node, deep)

        def refuse(self, node: Any) -> None:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {_odd_text(node.value)}")

    kept = [_TAG + kind for kind in ("bool", "null", "merge")]
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag in kept]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for kind, (pattern, first) in _RESOLVERS.items():
        Loader.add_implicit_resolver(_TAG + kind, pattern, list(first))
    Loader.add_constructor(_TAG + "odd", Loader.refuse)
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise yaml.YAMLError(f"{where}{error.problem}") from error


def _odd_text(text: str) -> str:
    return f"a number must be decimal, got {text}, which YAML takes for one to another base"


def check_flags(argv: Sequence[str]) -> None:
    """Checks that no flag has a number to the base 60 or 8.

    Raises:
        ValueError: one has; names the flag.
    """
    flag = ""
    for text in argv:
        flag, value = text.split("=", 1) if text.startswith("--") and "=" in text else (flag, text)
        if _ODD.match(value):
            raise ValueError(f"{flag.lstrip('-')}: {_odd_text(value)}")
        flag = text


def require_values(settings: type[Any], values: Mapping[str, Any], section: str = "") -> None:
    """Checks that every setting whose type does not allow None has a value.

    Args:
        settings: a dataclass; its fields may be dataclasses again.
        values: what was read, by field.
        section: what precedes a field's name in errors.

    Raises:
        ValueError: a setting is empty or null; names it.
    """
    types = get_type_hints(settings)
    for field in fields(settings):
        name, wanted, value = f"{section}{field.name}", types[field.name], values.get(field.name)
        if value is None and field.name in values and type(None) not in get_args(wanted):
            raise ValueError(f"{name} must have a value, got nothing (null); without the key it has its default")
        if hasattr(wanted, "__dataclass_fields__") and value is not None:
            require_values(wanted, vars(value), f"{name}.")
