"""Imports by name: objects named as text, ``module:object``, and names of a package that load when they are used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from jagg_core.hub import fingerprint

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def import_object(text: str, setting: str, allowed: str) -> object:
    """What ``module:object`` names. Under ``python -m`` modules of the current directory can be imported.

    ``setting`` and ``allowed`` (what the setting may be) are for the errors. An error inside the module is not caught:
    it is for its author to see.

    Raises:
        ValueError: text of another form, no such module, or no such object in it.
    """
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"{setting} {text!r} cannot be read; allowed: {allowed}")
    module_name, _, attribute = text.partition(":")
    try:
        found: object = import_module(module_name)
    except ModuleNotFoundError as error:
        # a missing module inside the user's own is theirs to see
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{setting} {text!r}: there is no module {error.name!r}; allowed: {allowed}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{setting} {text!r}: {module_name} has no {attribute!r}; allowed: {allowed}")
        found = getattr(found, part)
    return found


def source_fingerprint(*modules: str) -> str:
    """Computes what tells the files of imported modules from others; modules without a file are left out."""
    files = {getattr(sys.modules.get(module), "__file__", None) for module in modules}
    return fingerprint(sorted(Path(file) for file in files if file))


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package (PEP 562) whose names and submodules load when they are used.

    So a command can show its help without waiting for torch.

    Args:
        package: its name.
        names: what the package exports, by the submodule that has it.
    """
    homes = {name: module for module, inside in names.items() for name in inside}

    def load(name: str) -> object:
        if name in homes:
            value: object = getattr(import_module(f"{package}.{homes[name]}"), name)
        else:
            try:
                value = import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})
