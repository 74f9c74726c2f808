"""The first look at a device: cells in order, each stored when it ends; a cut-off is a result, a failure is advice."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.__main__ import parser
from bench import doctor
from bench.__main__ import main
from bench.doctor import Large, advice, doctor_lines, planned, run_doctor
from bench.settings import Doctor
from jagg_core.choices import SHIPPED
from jagg_core.records import Record

SETTINGS = Doctor(model="tests.device.work:load")


def test_cells_are_in_order_of_value(tmp_path: Path) -> None:
    names = list(planned(SETTINGS, tmp_path))
    assert [name.split("/")[0] for name in names] == (
        ["machine"] + ["engine"] * 2 * len(SHIPPED) + ["log ratios"] + ["update"] * 5 + ["calibration"]
    )


def test_a_cell_is_stored_when_it_ends_and_what_breaks_is_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[list[str]] = []

    def look(left: float) -> dict[str, float]:
        path = tmp_path / "record.json"
        stored.append([cell.name for cell in Record.read(path).cells] if path.exists() else [])
        return {"left_s": left}

    def fail(left: float) -> dict[str, float]:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB\nmore")

    def last(left: float) -> dict[str, float]:
        raise AssertionError("begun after its time")

    cells = {"first": look, "broken": fail, "third": look, "late": last}
    monkeypatch.setattr(doctor, "planned", lambda settings, out: cells)
    turns = iter([0.0, 1.0, 2.0, 3.0, 420.0])
    monkeypatch.setattr(doctor.time, "monotonic", lambda: next(turns))
    record = run_doctor(SETTINGS, tmp_path)
    assert stored == [[], ["first", "broken"]]
    assert [cell.status for cell in record.cells] == ["ok", "failed", "ok", "skipped"]
    assert record.cells == Record.read(tmp_path / "record.json").cells
    first, broken, _, late = doctor_lines(record)
    assert first == "ok       first: left_s 419"
    assert "give a smaller --batch" in broken and "2 GiB" in broken and "more" not in broken.split("2 GiB")[1]
    assert late == "skipped  late: the 420 s were over: give more --seconds"


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (ImportError("No module named 'diffusers'"), "pip install"),
        (ArithmeticError("rollout_to_cpu differs by 0.1"), "do not train on this device"),
        (subprocess.TimeoutExpired("calibrate", 30), "not done after 30 s: give more --seconds"),
        (RuntimeError("no kernel"), "backbones check digits-flux --device accel:1"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_error_names_the_next_step(error: Exception, step: str) -> None:
    assert step in advice(error, "accel:1")


def test_every_way_of_an_update_is_timed_and_predicted_from_exact() -> None:
    large = Large(SETTINGS)
    rows = {way: doctor._update(large, way, 60.0) for way in doctor.WAYS}
    assert [row["passes"] for row in rows.values()] == [10, 10, 4, 8, 5]
    assert [row["forwards"] for row in rows.values()] == [10, 10, 10, 8, 5]
    assert all(row["total_s"] > 0 and row["predicted_s"] > 0 for row in rows.values())
    assert rows["causal, 5 passes"]["predicted_s"] < rows["exact"]["predicted_s"]


def test_a_wrong_gradient_fails_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = doctor._engine(SETTINGS, SETTINGS.model, "float32", 60.0)
    assert max(errors[name] for name in ("to_plain_loop", "rollout_to_cpu", "gradient_to_cpu")) <= errors["limit"]
    monkeypatch.setattr(doctor, "relative_error", lambda one, other: 0.5)
    with pytest.raises(ArithmeticError, match=r"rollout_to_cpu differs by 0\.5"):
        doctor._engine(SETTINGS, SETTINGS.model, "float32", 60.0)


@pytest.mark.parametrize("error", ["", "warning\nerror: no room"])
def test_the_calibration_is_a_command_of_analysis(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["timeout"] == 60.0
        commands.append(command)
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"^calibrate: error: no room$") if error else nullcontext():
        assert doctor.calibration(SETTINGS, tmp_path, 60.0).keys() == {"total_s"}
    arguments = parser().parse_args(commands[0][3:])
    assert (arguments.command, arguments.backbone, arguments.out) == ("calibrate", "digits-flux", tmp_path)


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--device", "cuda:7", "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "device 'cuda:7' cannot be used here" in lines[-1] and "Traceback" not in "".join(lines)
    assert not (tmp_path / "run").exists()
