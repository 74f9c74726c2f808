"""Flags of a settings class: their types, and their help from its docstring."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from bench.cells.grid import Grid
from jagg_core.flags import add_flags, described, given
from jagg_core.grpo import GRPOConfig


@dataclass(frozen=True)
class Plain:
    """Settings.

    Attributes:
        rate: share that is
            kept, at most 100 %.
        names: of things
    """

    rate: float = 0.5
    names: tuple[str, ...] = ("a", "b")


@dataclass(frozen=True)
class More(Plain):
    """More of them.

    Attributes:
        names: of other things.
        quick: few rounds.
    """

    quick: bool = False
    limit: int | None = None


def parsed(*words: str) -> dict[str, object]:
    command = argparse.ArgumentParser()
    add_flags(command, More)
    return given(command.parse_args(words), More)


def test_help_is_the_docstrings() -> None:
    command = argparse.ArgumentParser()
    add_flags(command, More)
    shown = " ".join(command.format_help().split())
    assert "--rate RATE share that is kept, at most 100 % (default 0.5)" in shown
    assert "of other things (default a b)" in shown and "of things" not in shown
    assert "--quick few rounds" in shown
    assert "--limit LIMIT default none" in shown


def test_only_what_was_given() -> None:
    assert parsed() == {}
    assert parsed("--names", "x", "--names", "y", "z", "--quick") == {"names": ("x", "y", "z"), "quick": True}
    assert parsed("--limit", "3", "--rate", "1") == {"limit": 3, "rate": 1.0}


def test_flags_without_the_parser_of_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docstring_parser", None)
    assert described(More) == {}
    assert parsed("--rate", "0.25") == {"rate": 0.25}


@pytest.mark.parametrize("settings", [Grid, *filter(is_dataclass, get_type_hints(GRPOConfig).values())])
def test_settings_of_training_and_of_cells_are_described(settings: Any) -> None:
    """Their command lines are not ours, but read the same docstrings."""
    about = described(settings)
    assert [field.name for field in fields(settings) if not about.get(field.name)] == []
