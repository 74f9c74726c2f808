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
    """Imports the object that ``module:object`` names; under ``python -m`` also from the current directory.

    Errors name ``setting`` and its choices ``allowed``. An error inside the module is not caught: its author needs it.

    Raises:
        ValueError: text of another form, no such module, or no such object in it.
    """
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"{setting} {text!r} cannot be read; allowed: {allowed}")
    module_name, _, attribute = text.partition(":")
    try:
        value: object = import_module(module_name)
    except ModuleNotFoundError as error:
        # an import that fails inside the user's module is not caught
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{setting} {text!r}: there is no module {error.name!r}; allowed: {allowed}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{setting} {text!r}: {module_name} has no {attribute!r}; allowed: {allowed}")
        value = getattr(value, part)
    return value


def source_fingerprint(*modules: str) -> str:
    """Computes a digest of the files of imported modules; modules without a file are left out."""
    files = {getattr(sys.modules.get(module), "__file__", None) for module in modules}
    return fingerprint(sorted(Path(file) for file in files if file))


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package (PEP 562) whose names and submodules load when they are used.

    So a command can show its help without waiting for torch.

    Args:
        package: name of the package.
        names: exported names by the submodule that has them.
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
