"""The warning of a machine that was too noisy: from exact timed twice, in the record and in what commands say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import group, update
from bench.__main__ import main
from bench.arms import Arm, Group
from bench.group import GroupBench, run_group_bench
from bench.lines import speed_lines, step_lines
from bench.noise import NOISY, exact_against_itself, noise_findings
from bench.update import UpdateBench, run_update_bench
from jagg_core.records import Cell, Record

SMALL: dict[str, Any] = {"batch": 2, "rounds": 3, "window": 2, "steps": 5}


def record_of(exact: list[float], again: list[float] | None) -> Record:
    cells = [Cell("exact", samples={"total_s": list(exact)})]
    if again is not None:
        cells.append(Cell("exact-again", samples={"total_s": list(again)}))
    return Record("group-speed", [], "stub", {}, {}, cells=cells)


def test_the_warning_has_ratio_and_interval() -> None:
    [said] = noise_findings(record_of([1.0] * 5, [1.5] * 5))
    assert "exact timed again takes 1.500 [1.500, 1.500] times as long as exact" in said
    assert "differences below 50% cannot be told" in said


@pytest.mark.parametrize(
    ("again", "warned"),
    [
        ([1.0] * 5, False),
        ([1 + 0.9 * NOISY] * 5, False),
        ([1 + 1.1 * NOISY] * 5, True),
        ([1 / (1 + 1.1 * NOISY)] * 5, True),  # faster is as wrong as slower
        ([1.0, 1.0, 1.0, 3.0, 3.0], True),  # the medians agree, by chance
    ],
)
def test_a_noisy_machine_is_told_from_a_quiet_one(again: list[float], warned: bool) -> None:
    assert bool(noise_findings(record_of([1.0] * 5, again))) == warned


def test_without_a_second_exact_nothing_is_said() -> None:
    assert noise_findings(record_of([1.0] * 5, None)) == []
    failed = record_of([1.0] * 5, None)
    failed.cells.append(Cell("exact-again", "failed", "out of memory"))
    assert noise_findings(failed) == []


def test_a_group_keeps_and_says_it(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = group.time_arm

    def slowed(arm: Arm, work: Group) -> dict[str, float]:
        return measured(arm, work) | {"total_s": 2.0 if arm.name == "exact-again" else 1.0}

    monkeypatch.setattr(group, "time_arm", slowed)
    record = run_group_bench(GroupBench(stub, **SMALL))
    assert exact_against_itself(record) == (2.0, 2.0, 2.0)
    assert record.cell("exact-again").values["findings"] == noise_findings(record) == speed_lines(record)[-1:]
    assert all("findings" not in cell.values for cell in record.cells if cell.name != "exact-again")


def test_an_update_keeps_and_says_it(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.Generator().manual_seed(0)
    clock = [0.0]

    def jumping() -> float:
        clock[0] += math.exp(2 * float(torch.randn((), generator=drawn)))
        return clock[0]

    monkeypatch.setattr(update, "timer", jumping)
    record = run_update_bench(UpdateBench(stub, **SMALL))
    assert record.cell("exact-again").values["findings"] == noise_findings(record) == step_lines(record)[-1:]


def test_the_summary_of_a_suite_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = record_of([1.0] * 5, [1.5] * 5)
    noisy.write(tmp_path / "group.json")
    cells = [Cell("group/stub", settings={"kind": "group", "file": "group.json"})]
    monkeypatch.setattr("bench.__main__.run_suite", lambda *_: Record("bench", [], "smoke", {}, {}, cells=cells))
    main(["run", "--preset", "smoke", "--out", str(tmp_path)])
    assert noise_findings(noisy)[0] in capsys.readouterr().out
