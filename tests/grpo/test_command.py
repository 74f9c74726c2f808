"""``python -m jagg_core train``, run in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jagg_core.__main__ import main
from jagg_core.grpo.log import read_rows

SAMPLES = ["--rollout.prompts", "2", "--rollout.samples", "2", "--rollout.steps", "4"]
FLAGS = ["train", "--reward.name", "ink", "--plan.estimator", "causal", "--run.updates", "2", *SAMPLES]
KNOTS = ["--plan.knots", "[0, 2]"]


def refused(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_a_run_is_trained_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FLAGS, *KNOTS, "--out", str(tmp_path / "run")]
    main(arguments)
    told = capsys.readouterr()
    assert f"2 updates, 0 skipped; wrote {tmp_path / 'run'}" in told.out
    assert all(stage in told.err for stage in ("reward 0.", "norm", "rollout", "forward", "backward"))
    assert refused(arguments) == 2
    assert "holds a run already; resume it with --resume" in capsys.readouterr().err
    main([*arguments, "--resume", "--run.updates", "3"])
    assert [row["update"] for row in read_rows(tmp_path / "run/metrics.csv")] == ["1", "2", "3"]


def test_settings_that_do_not_fit_are_an_error_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused([*FLAGS, "--plan.knots", "[0, 9]", "--out", str(tmp_path / "run")]) == 2
    assert "knots must be below the 3 trained steps, got [0, 9]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_error_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  flavour: 1\n")
    for flags in (["--config", str(tmp_path / "run.yaml")], ["--config", "nowhere.yaml"], ["--rollout.stepz", "3"], []):
        assert refused(["train", *flags, *(["--out", str(tmp_path / "run")] if flags else [])]) == 2
        shown = capsys.readouterr()
        [line] = shown.err.splitlines()
        assert line.startswith("python -m jagg_core train: error: ")
        assert shown.out == ""


def test_a_damaged_log_is_an_error_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*FLAGS, *KNOTS, "--out", str(tmp_path), "--run.updates", "1"]
    main(arguments)
    log = tmp_path / "evaluation.csv"
    log.write_text("update,ink\n1\n1,2\n")
    monkeypatch.setattr("jagg_core.grpo.learner.load_backbone", lambda *_: pytest.fail("loaded"))
    assert refused([*arguments, "--resume"]) == 2
    assert f"error: {log}, line 2: must have 2 fields, got 1" in capsys.readouterr().err


def test_a_reward_that_fails_is_one_line_before_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused([*FLAGS, *KNOTS, "--reward.name", "tests.grpo.runs:failing", "--out", str(tmp_path)]) == 1
    line, rest = capsys.readouterr().err.split("python -m jagg_core train: error: ")[1].split("\n", 1)
    assert re.fullmatch(
        "reward tests.grpo.runs:failing failed on update 1, prompts '.'(, '.')?: ConnectionError: no answer", line
    )
    assert rest.startswith("Traceback")
    assert rest.count("Traceback") == 1 and rest.endswith("ConnectionError: no answer\n")


def test_a_run_without_signal_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*FLAGS, *KNOTS, "--reward.name", "tests.grpo.runs:constant", "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert shown.err.count("note: update 1 had no signal: the samples of each prompt have equal rewards") == 1
    assert shown.err.count("no signal") == 1
    assert "2 updates, 0 skipped" in shown.out


def test_a_run_that_skipped_every_update_fails(tmp_path: Path) -> None:
    broken = ["--reward.name", "tests.grpo.runs:not_a_number", "--run.max_skipped", "3"]
    code = str(refused([*FLAGS, *KNOTS, *broken, "--out", str(tmp_path)]))
    assert code.startswith("python -m jagg_core train: every update was skipped, the last one because: reward ")


def test_a_run_that_stops_says_why(tmp_path: Path) -> None:
    broken = ["--reward.name", "tests.grpo.runs:not_a_number", "--run.max_skipped", "1"]
    code = refused([*FLAGS, *KNOTS, *broken, "--out", str(tmp_path)])
    assert "stopped: 1 updates in a row were skipped" in str(code)
    assert "nan for sample 0" in str(code)
