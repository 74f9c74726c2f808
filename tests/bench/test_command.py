"""The command line: what its help says, and what it says of a library that is missing."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import pytest

from bench.__main__ import main, parser

[COMMANDS] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]


@pytest.mark.parametrize("name", list(COMMANDS.choices))
def test_help_has_an_example_that_parses(name: str) -> None:
    said = " ".join(COMMANDS.choices[name].format_help().replace("-\n", "-").split())
    [examples] = said.split("example")[1:]
    found = [one.partition("-m bench ")[2] for one in examples.partition(": ")[2].split("; ")]
    assert found
    for example in found:
        assert parser().parse_args(shlex.split(example)).command == name


def test_checkpointing_of_the_cost_model_can_be_switched_off() -> None:
    assert parser().parse_args(["cost", "--out", "r", "--no-checkpointing"]).checkpointing is False
    assert not hasattr(parser().parse_args(["cost", "--out", "r"]), "checkpointing")


def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(SystemExit) as caught:
        main(["group", "--backbone", "digits-flux", "--out", str(tmp_path / "speed.json")])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "diffusers" in said and "pip install 'jagg-core[bench]'" in said
