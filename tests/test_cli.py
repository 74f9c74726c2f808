"""The commands, run in this process: what they write, and how they refuse."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import analysis.__main__
import bench.__main__
import jagg_core.__main__
from jagg_core.__main__ import main
from jagg_core.backbones import list_backbones
from jagg_core.backbones.pixel import weights_path
from jagg_core.backbones.registry import TRAINED
from jagg_core.backbones.training import RECIPES, FlowTraining
from jagg_core.choices import CLASSIFIED, DTYPES, SHIPPED
from jagg_core.reference import TOLERANCE
from jagg_core.rewards import list_rewards
from jagg_core.rewards.classifier import CLASSIFIERS

ROOT = Path(__file__).resolve().parents[1]
Capture = pytest.CaptureFixture[str]
PARSERS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[list[str]], None]]] = {
    "jagg_core": (jagg_core.__main__.parser, jagg_core.__main__.main),
    "analysis": (analysis.__main__.parser, analysis.__main__.main),
    "bench": (bench.__main__.parser, bench.__main__.main),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def refused(arguments: list[str], run: Callable[[list[str]], None] = main) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    return caught.value.code


# Help


def commands(top: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and its subcommands."""
    yield path
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*path, name))


EVERY_COMMAND = [(package, path) for package, (parser, _) in PARSERS.items() for path in commands(parser())]


@pytest.mark.parametrize(("package", "path"), EVERY_COMMAND, ids=[" ".join((p, *c)) for p, c in EVERY_COMMAND])
def test_every_command_has_help(package: str, path: tuple[str, ...], capsys: Capture) -> None:
    assert refused([*path, "--help"], PARSERS[package][1]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith(" ".join(("usage: python -m", package, *path)))


HEAVY = ("diffusers", "matplotlib", "pandas", "scipy", "seaborn", "sklearn", "torch", "transformers")


@pytest.mark.parametrize("package", PARSERS)
def test_help_waits_for_no_heavy_library(package: str) -> None:
    paths = [path for known, path in EVERY_COMMAND if known == package]
    code = f"""
import contextlib, io, sys
from {package}.__main__ import main
late = {{}}
for path in {paths}:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([*path, "--help"])
    assert shown.getvalue().startswith("usage: "), path
    late |= {{" ".join(path): name for name in {HEAVY} if name in sys.modules and name not in late.values()}}
print(late)
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout == "{}\n"


def test_choices_of_the_help_are_those_that_exist() -> None:
    assert [str(dtype).removeprefix("torch.") for dtype in TOLERANCE] == list(DTYPES)
    assert sorted(TRAINED) == list(SHIPPED)
    assert tuple(CLASSIFIERS) == CLASSIFIED


def flags(top: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every argument of every command with its help."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from flags(below, (*path, name))
        else:
            yield " ".join((*path, *(action.option_strings or [action.dest]))), action.help or ""


@pytest.mark.parametrize("package", PARSERS)
def test_every_flag_says_what_it_is(package: str) -> None:
    found = dict(flags(PARSERS[package][0]()))
    assert len(found) >= 20
    assert not [flag for flag, text in found.items() if not text or text.startswith("default")]


def test_all_commands_are_known() -> None:
    assert len(EVERY_COMMAND) == len(set(EVERY_COMMAND)) >= 10
    assert {
        ("jagg_core", ("sample",)),
        ("jagg_core", ("train",)),
        ("jagg_core", ("backbones", "train")),
        ("jagg_core", ("rewards", "train")),
        ("analysis", ("reproduce",)),
        ("analysis", ("calibrate",)),
        ("analysis", ("collect",)),
        ("analysis", ("curves",)),
        ("analysis", ("report",)),
        ("bench", ("group",)),
    } <= set(EVERY_COMMAND)


@pytest.mark.parametrize("package", PARSERS)
def test_without_a_command_it_says_which_there_are(package: str, capsys: Capture) -> None:
    assert refused([], PARSERS[package][1]) == 2
    assert "command" in capsys.readouterr().err


# Lists


def test_backbones_are_listed(capsys: Capture) -> None:
    main(["backbones"])
    header, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split()[:4] == ["name", "parameters", "GiB", "bf16"]
    assert [line.split()[0] for line in lines] == [entry.name for entry in list_backbones()]
    for entry, line in zip(list_backbones(), lines, strict=True):
        assert all(text in line for text in (entry.description, entry.licence, entry.hub_id or "in this package"))
    [dev] = [line.split() for line in lines if line.startswith("flux-dev")]
    assert dev[1:5] == ["11.90", "B", "22.17", "44.34"]


def test_rewards_are_listed(capsys: Capture) -> None:
    main(["rewards"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_rewards())


# Samples


def sample(out: Path, *arguments: str) -> bytes:
    shared = ["--backbone", "digits-flux", "--prompts", "3", "7", "0", "--count", "2", "--steps", "4"]
    main(["sample", *shared, "--out", str(out), *arguments])
    return out.read_bytes()


def test_a_sheet_has_a_row_per_prompt(tmp_path: Path, capsys: Capture) -> None:
    state = torch.get_rng_state()
    ode = sample(tmp_path / "deep" / "a.png")
    assert torch.equal(torch.get_rng_state(), state)
    assert f"wrote {tmp_path / 'deep' / 'a.png'}: 6 samples, a row per prompt" in capsys.readouterr().out
    with Image.open(io.BytesIO(ode)) as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (2 * 97 + 1, 3 * 97 + 1))
        pixels = np.asarray(sheet)
    tiles = [pixels[1 + 97 * y : 97 + 97 * y, 1 + 97 * x : 97 + 97 * x] for y in range(3) for x in range(2)]
    assert len({tile.tobytes() for tile in tiles}) == 6
    assert all(tile.std() > 20 for tile in tiles)
    assert sample(tmp_path / "b.png") == ode
    other = {sample(tmp_path / "c.png", *change) for change in (["--eta", "0.7"], ["--seed", "1"], ["--guidance", "3"])}
    assert len(other | {ode}) == 4


def test_a_row_does_not_depend_on_those_below_it(tmp_path: Path) -> None:
    """Prompts are drawn one after the other: as many as one likes need the memory of one."""
    whole = sample(tmp_path / "a.png", "--eta", "0.7")
    alone = sample(tmp_path / "b.png", "--eta", "0.7", "--prompts", "3")
    rows = [np.asarray(Image.open(io.BytesIO(png)))[:97] for png in (whole, alone)]
    assert np.array_equal(*rows)


def test_the_sde_has_a_seed(tmp_path: Path) -> None:
    first, second, other = (sample(tmp_path / "x.png", "--eta", "0.7", "--seed", s) for s in ("4", "4", "5"))
    assert first == second != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eta", "-0.1"], "eta must be at least 0, got -0.1"),
        (["--eta", "nan"], "eta must be at least 0, got nan"),
        (["--eta", "inf"], "eta of DanceSDE must be positive, got inf"),
        (["--count", "0"], "count must be at least 1, got 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--shift", "0"], "shift must be positive, got 0.0"),
        (["--backbone", "digit-flux"], "did you mean 'digits-flux'"),
        (["--prompts", "3", "cat"], "for digits-flux, got ['cat']"),
        (["--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["--eta", "0.5", "--steps", "1"], "steps must be at least 2 with noise, got 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_setting_names_itself(arguments: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    out = ["--out", str(tmp_path / "x.png")]
    assert refused(["sample", "--backbone", "digits-flux", *out, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m jagg_core: error: ")
    assert message in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flag", "value"), [("--count", "two"), ("--eta", "much"), ("--colour", "red")])
def test_a_flag_that_cannot_be_read(flag: str, value: str, capsys: Capture) -> None:
    assert refused(["sample", flag, value]) == 2
    assert flag in capsys.readouterr().err


# Where results go, and on what they are made

DIGITS = ["--backbone", "digits-flux"]
WRITING = {
    "jagg_core": [
        ["sample", *DIGITS],
        ["backbones", "train", "digits-flux"],
        ["rewards", "train", "digits"],
        ["train", "--reward.name", "ink"],
    ],
    "bench": [
        ["group", *DIGITS],
        ["update", *DIGITS],
        ["memory", *DIGITS],
        ["collectives", *DIGITS],
        ["cost"],
        ["run", "--preset", "smoke"],
        ["doctor"],
    ],
    "analysis": [
        *([name, *DIGITS] for name in ("reproduce", "calibrate", "collect", "curves", "league")),
        ["report", "results/a", "results/b"],
    ],
}
"""Every command with ``--out``, by package."""
EVERY_WRITING = [(package, command) for package, all_of_it in WRITING.items() for command in all_of_it]
NAMES = [" ".join((package, *command)) for package, command in EVERY_WRITING]


def test_every_command_that_writes_is_listed() -> None:
    writing = {
        (package, flag.removesuffix(" --out"))
        for package, (parser, _) in PARSERS.items()
        for flag, _ in flags(parser())
        if flag.endswith(" --out")
    }
    listed = {(p, " ".join(c[:2] if c[0] in ("backbones", "rewards") else c[:1])) for p, c in EVERY_WRITING}
    assert listed == writing | {("jagg_core", "train")}


@pytest.mark.parametrize(("package", "command"), EVERY_WRITING, ids=NAMES)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    package: str, command: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("x")
    assert refused([*command, "--out", str(tmp_path / "file/x")], PARSERS[package][1]) == 2
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"error: out must be (below )?a folder, got the file .*/file$", said[-1])
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("jagg_core", ["sample", *DIGITS]),
        ("jagg_core", ["backbones", "check", "digits-flux"]),
        ("jagg_core", ["train", "--reward.name", "ink"]),
        *[("bench", [name, *DIGITS]) for name in ("group", "update", "memory", "collectives")],
        *[("analysis", command) for command in WRITING["analysis"][:3]],
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_device_that_is_not_here_is_one_line(
    package: str, command: list[str], tmp_path: Path, capsys: Capture
) -> None:
    out = [] if "check" in command else ["--out", str(tmp_path / "x")]
    flag = "--model.device" if "train" in command else "--device"
    for device in ("gpu", "cuda:4096"):
        assert refused([*command, *out, flag, device], PARSERS[package][1]) == 2
        said = capsys.readouterr().err
        assert f"error: device '{device}' cannot be used here: " in said
        assert said.splitlines()[-1].endswith("; allowed: cpu") or torch.cuda.is_available()
        assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


# Training


def test_training_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(RECIPES, "digits-flux", FlowTraining(steps=3, batch=2))
    shipped = weights_path("digits-flux").read_bytes()
    for name, flags, steps in (("a", [], 3), ("b", ["--steps", "1", "--seed", "3"], 1)):
        out = tmp_path / name
        main(["backbones", "train", "digits-flux", *flags, "--out", str(out)])
        shown = capsys.readouterr()
        assert f"wrote {out}: mean loss of the last steps" in shown.out
        assert f"{steps}/{steps}" in shown.err, "the progress bar"
        assert load_file(out).keys() == load_file(weights_path("digits-flux")).keys()
    assert weights_path("digits-flux").read_bytes() == shipped


@pytest.mark.parametrize("kind", ["backbones", "rewards"])
def test_training_refuses_no_steps(kind: str, tmp_path: Path, capsys: Capture) -> None:
    name = {"backbones": "digits-flux", "rewards": "digits"}[kind]
    assert refused([kind, "train", name, "--steps", "0", "--out", str(tmp_path / "w")]) == 2
    assert "steps must be at least 1, got 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_training_refuses_unknown_names(capsys: Capture) -> None:
    assert refused(["backbones", "train", "digit-flux"]) == 2
    assert "digit-flux" in capsys.readouterr().err


# Reports


def test_a_report_of_an_empty_folder(tmp_path: Path, capsys: Capture) -> None:
    assert refused(["report", str(tmp_path)], analysis.__main__.main) == 2
    assert "holds no record.json: is it the folder of a finished run?" in capsys.readouterr().err
    assert refused(["report", str(tmp_path / "missing")], analysis.__main__.main) == 2
    assert list(tmp_path.iterdir()) == []
