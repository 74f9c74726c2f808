"""Settings of the main job: each bad one names itself, before a model is loaded or anything is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import QUICK, main, parser, settings_from
from analysis.measure import job, reproduce
from analysis.measure.reproduce import run
from analysis.measure.study import Recipe, Reproduce

NAN, INF = float("nan"), float("inf")

BAD: list[tuple[str, Any]] = [
    ("backbone", "digit-flux"),
    ("etas", ()),
    ("etas", (0.7, 0.7)),
    ("etas", (0.7, 0.0)),
    ("etas", (-0.3,)),
    ("etas", (NAN,)),
    ("etas", (INF,)),
    ("windows", ()),
    ("windows", (4, 4)),
    ("windows", (1,)),
    ("windows", (4, 21)),
    ("jagg_frac", 1.5),
    ("jagg_frac", -0.1),
    ("jagg_frac", NAN),
    ("threshold", 0.0),
    ("threshold", 1.0),
    ("threshold", NAN),
    ("calibration_batches", ()),
    ("calibration_batches", (3, 0)),
    ("evaluation_batches", ()),
    ("evaluation_batches", (1,)),
    ("leak_batches", 2),
    ("workers", -1),
    ("predicted_passes", (5, 0)),
    ("space", "random"),
    ("dimension", 0),
    ("speed_rounds", 1),
    ("speed_batch", 0),
    ("speed_window", 1),
    ("speed_window", 21),
    ("dtype", "nonsense"),
    ("dtype", "int64"),
    ("dtype", "nn"),
    ("dtype", "float8_e4m3fn"),
]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model or starting a process is an error of the test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("started before the refusal")

    monkeypatch.setattr(job, "load_backbone", start)
    monkeypatch.setattr(reproduce.subprocess, "run", start)


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_a_bad_setting_names_itself(name: str, value: Any) -> None:
    found = list(value) if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=rf"^{name} must ") as caught:
        Reproduce(**{name: value})
    assert "got" in str(caught.value)
    assert str(found) in str(caught.value) or str(max(value)) in str(caught.value)


def test_every_timed_backbone_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"backbone must be one of .*got 'nothing'"):
        Reproduce(speed_backbones=("digits-flux", "nothing"))


def test_windows_must_fit_the_schedule() -> None:
    recipe = Recipe(steps=4)
    with pytest.raises(ValueError, match="speed_window must be at most the 3 trained steps, got 5"):
        Reproduce(windows=(3,), recipe=recipe)
    with pytest.raises(ValueError, match="windows must lie between 2 and 3, got 4"):
        Reproduce(windows=(4,), speed_window=3, recipe=recipe)
    assert Reproduce(windows=(3,), speed_window=3, recipe=recipe).recipe is recipe


def test_numbers_of_batches_go_eta_by_eta() -> None:
    settings = Reproduce(etas=(0.7, 0.3, 0.1), calibration_batches=(4, 2), evaluation_batches=(5,))
    assert [settings.batches("calibration", eta) for eta in settings.etas] == [4, 2, 2]
    assert [settings.batches("evaluation", eta) for eta in settings.etas] == [5, 5, 5]


# The command line


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "photo-flux"], "did you mean 'photos-flux'"),
        (["--windows", "21"], "windows must lie between 2 and 20, got 21"),
        (["--windows"], "windows must be different, at least one, got []"),
        (["--etas"], "etas must be positive and different, at least one, got []"),
        (["--evaluation-batches", "1"], "evaluation_batches must be numbers of at least 2, got [1]"),
        (["--quick", "--speed-rounds", "1"], "speed_rounds must be at least 2, got 1"),
        (["--steps", "2"], "steps must be at least 3, got 2"),
        (["--shift", "0"], "shift must be positive, got 0.0"),
        (["--samples", "1"], "samples must be at least 2, got 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_says_which_setting(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", *arguments, "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "inkk"}, "unknown reward 'inkk', nearest is 'ink'"),
        ({"reward": "classifier"}, "reward classifier needs dataset"),
        ({"recipe": Recipe(steps=6, prompts=6)}, "prompts must be at most 5 for stub, got 6"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used here"),
    ],
    ids=["reward", "reward without classes", "prompts", "device"],
)
def test_what_only_the_backbone_can_tell_is_refused_before_anything_is_timed(
    change: dict[str, Any], message: str, stub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("timed before the refusal")

    monkeypatch.setattr(reproduce.subprocess, "run", start)
    settings = Reproduce(backbone=stub, reward="ink", speed_backbones=(), recipe=Recipe(steps=6))
    with pytest.raises(ValueError, match=message):
        run(replace(settings, **change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def settings(*arguments: str) -> Reproduce:
    return settings_from(parser().parse_args(["reproduce", *arguments]))


def test_flags_are_settings() -> None:
    assert settings() == Reproduce()
    found = settings("--etas", "0.5", "0.1", "--windows", "3", "--steps", "9", "--guidance", "2", "--reward", "ink")
    assert found == Reproduce(etas=(0.5, 0.1), windows=(3,), reward="ink", recipe=Recipe(steps=9, guidance=2.0))
    assert settings("--speed-backbones").speed_backbones == ()
    assert settings("--calibration-batches", "4", "1").calibration_batches == (4, 1)


def test_quick_gives_way_to_flags() -> None:
    quick = settings("--quick")
    assert quick == replace(Reproduce(), **QUICK[Reproduce], quick=True)
    assert quick != Reproduce()
    found = settings("--quick", "--leak-batches", "7", "--samples", "3")
    assert found == replace(quick, leak_batches=7, recipe=Recipe(samples=3))
