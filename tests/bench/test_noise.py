"""The warning of a machine that was too noisy: from exact timed twice, in the record and in what commands say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.report.fidelity.tables import speed
from bench import group, update
from bench.__main__ import main
from bench.compare import compare
from bench.group import ArmRun, run_group_bench
from bench.lines import speed_lines, step_lines
from bench.noise import NOISY, Ratio, exact_against_itself, noise_findings, noise_floor, ratio_of_medians
from bench.settings import GroupBench, UpdateBench
from bench.update import run_update_bench
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
    assert "differences below 50.0% are within the noise" in said


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

    def slowed(run: ArmRun) -> dict[str, float]:
        return measured(run) | {"total_s": 2.0 if run.arm.name == "exact-again" else 1.0}

    monkeypatch.setattr(group, "time_arm", slowed)
    record = run_group_bench(GroupBench(stub, **SMALL))
    assert exact_against_itself(record) == Ratio(2.0, 2.0, 2.0, 3)
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
    monkeypatch.setattr("bench.suite.run_suite", lambda *_: Record("bench", [], "smoke", {}, {}, cells=cells))
    main(["run", "--preset", "smoke", "--out", str(tmp_path)])
    assert noise_findings(noisy)[0] in capsys.readouterr().out


def test_a_ratio_of_medians() -> None:
    found = ratio_of_medians([3.0, 4.0, 100.0], [1.0, 2.0, 2.0])
    assert (found.value, found.n) == (2.0, 3)


def test_what_all_arms_share_in_a_round_cancels() -> None:
    """A machine that slows down hundredfold changes both arms of a round alike."""
    slow = (1.05 ** np.arange(95)).tolist()
    found = ratio_of_medians([2 * s for s in slow], slow)
    assert found.value == pytest.approx(2, rel=1e-12)
    assert found.low == pytest.approx(2, rel=1e-12)
    assert found.high == pytest.approx(2, rel=1e-12)


def test_the_interval_of_a_ratio_covers() -> None:
    rng = np.random.default_rng(0)
    top, bottom = 3 * rng.lognormal(0, 0.1, 40), rng.lognormal(0, 0.1, 40)
    found = ratio_of_medians(top.tolist(), bottom.tolist())
    assert found.low < 3 < found.high  # type: ignore[operator]
    assert found.high - found.low < 0.5  # type: ignore[operator]


@pytest.mark.parametrize(("top", "bottom"), [(3, 2), (0, 0), (1, 1)])
def test_samples_must_be_paired_and_several(top: int, bottom: int) -> None:
    with pytest.raises(ValueError, match=f"paired and at least 2, got {top} and {bottom}"):
        ratio_of_medians([1.0] * top, [1.0] * bottom)


def test_runs_apart_are_not_paired() -> None:
    """A drift that two arms share cancels within a run, never between runs; these may have other numbers of rounds."""
    slow = (1.05 ** np.arange(95)).tolist()
    apart = ratio_of_medians([2 * s for s in slow], slow[:80], paired=False)
    assert apart.low < 2 < apart.high  # type: ignore[operator]
    assert apart.high - apart.low > 1  # type: ignore[operator]


RECORDS = sorted(
    path
    for path in (Path(__file__).parents[2] / "results" / "reference").rglob("*.json")
    if path.name.startswith(("speed-", "update-"))
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_stored_record_has_the_warning_of_its_samples(path: Path) -> None:
    record = Record.read(path)
    assert record.cell("exact-again").values.get("findings", []) == noise_findings(record)


def test_commands_records_and_pages_have_one_floor() -> None:
    record = record_of([1.0, 1.1, 0.9, 1.2, 1.0], [1.3, 1.2, 1.4, 1.0, 1.3])
    record.settings |= {"window": 5, "batch": 1}
    for cell in record.cells:
        cell.values["passes"] = 5
    again = speed([record]).set_index("arm").loc["exact-again"]
    floor, _ = compare(record, record)
    assert floor == noise_floor(record) == max(1 / again["speed_up_low"], again["speed_up_high"]) - 1
