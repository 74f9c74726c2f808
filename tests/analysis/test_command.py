"""The command line explains itself: every command's help ends with an example, and the example is one."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from analysis.__main__ import COMMANDS, parser, settings_from
from analysis.measure.job import Job
from jagg_core.backbones import load_backbone
from jagg_core.backbones.trained import FILE


def commands() -> dict[str, argparse.ArgumentParser]:
    [found] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def example_of(command: argparse.ArgumentParser) -> list[str]:
    """Words of the example that ends a help text, without ``python -m analysis``."""
    text = command.epilog or ""
    assert text.startswith("example: python -m analysis ")
    assert command.format_help().endswith(f"\n{command.epilog}\n"), "in one line, to be pasted"
    return shlex.split(text.removeprefix("example: "))[3:]


@pytest.mark.parametrize("name", [*COMMANDS, "curves", "manifest", "report"])
def test_the_example_of_a_command_is_one(name: str) -> None:
    words = example_of(commands()[name])
    assert words[0] == name
    assert parser().parse_args(words).command == name


def test_no_command_is_without_an_example() -> None:
    assert all(example_of(command) for command in commands().values())
    assert parser().parse_args(example_of(parser())).command == "calibrate"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_weights_of_a_run_are_studied(name: str, tmp_path: Path) -> None:
    state = load_backbone("digits-flux").transformer.state_dict()
    save_file({key: 2 * tensor for key, tensor in state.items()}, tmp_path / FILE)
    words = [name, "--backbone", "digits-flux", "--reward", "ink", "--weights", str(tmp_path)]
    studied = settings_from(parser().parse_args(words))
    assert studied.backbone_options == (f"weights={tmp_path}",)
    found = Job(studied, tmp_path / "out", name).backbone.transformer.state_dict()
    assert all(torch.equal(found[key], 2 * tensor) for key, tensor in state.items())
    with pytest.raises(ValueError, match="weights must be a safetensors file, or the folder of a run"):
        settings_from(parser().parse_args([*words[:-1], "nowhere"]))
