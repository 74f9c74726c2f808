"""The committed reference results are what the stored records say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis.report import write_report
from jagg_core import Plan
from jagg_core.records import Record

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RUNS = sorted(path.parent.name for path in REFERENCE.glob("*/record.json"))


def test_there_is_a_reference_for_the_default_backbone() -> None:
    assert "photos-flux" in RUNS


@pytest.mark.parametrize("name", RUNS)
def test_tables_and_calibrations_follow_from_the_record(name: str, tmp_path: Path) -> None:
    stored = REFERENCE / name
    run = tmp_path / name
    run.mkdir()
    for path in stored.glob("*.json"):
        if not path.name.startswith("calibration"):
            shutil.copy(path, run)
    write_report(run)
    expected = [*stored.glob("tables/*.csv"), *stored.glob("calibration-*.json")]
    assert len(expected) >= 8
    for path in expected:
        assert (run / path.relative_to(stored)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", RUNS)
def test_every_cell_ran_and_seeds_of_calibration_and_evaluation_are_apart(name: str) -> None:
    record = Record.read(REFERENCE / name / "record.json")
    assert [c.name for c in record.cells if c.status != "ok"] == []
    by_purpose = {key: set(seeds) for key, seeds in record.seeds.items()}
    for eta in record.settings["etas"]:
        assert not by_purpose[f"calibration eta={eta:g}"] & by_purpose[f"evaluation eta={eta:g}"]


def test_a_calibrated_plan_loads() -> None:
    plan = Plan.from_calibration(REFERENCE / "photos-flux" / "calibration-eta0.7.json", passes=8)
    assert plan.passes == 8
    assert plan.knots[0] == 0
    assert not plan.anticipating
