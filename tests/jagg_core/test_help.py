"""Every command's help ends with an example that the command can read."""

from __future__ import annotations

import shlex

import pytest

from jagg_core.__main__ import main, parser

COMMANDS = [(), ("backbones",), ("backbones", "check"), ("backbones", "train"), ("rewards",), ("rewards", "train")]
COMMANDS += [("sample",), ("train",)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    _, found, example = " ".join(capsys.readouterr().out.split()).partition("example: python -m jagg_core ")
    words = shlex.split(example)
    assert found
    assert tuple(words[: len(command)]) == command
    if command != ("train",):  # which reads its flags itself
        parser().parse_args(words)
