"""The committed reference results are what the stored records say."""

from __future__ import annotations

import json
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from analysis.report.manifest import NAME, manifest
from analysis.report.write import write_report
from jagg_core import (
    DanceSDE,
    Plan,
    ReplayMismatch,
    Trajectory,
    dance_schedule,
    initial_latents,
    load_backbone,
    rollout,
)
from jagg_core.backbones import Backbone
from jagg_core.backbones.registry import TRAINED
from jagg_core.records import Record
from jagg_core.strict_json import read_json

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RUNS = sorted(path.parent.name for path in REFERENCE.glob("*/record.json"))
STUDIES = [name for name in RUNS if Record.read(REFERENCE / name / "record.json").kind in ("reproduce", "calibrate")]
TOLERANCE = 1e-4
"""Relative difference up to which a figure is the stored one: another processor's kernels round in another order."""

CURVES = [name for name in RUNS if Record.read(REFERENCE / name / "record.json").kind == "curves"]


def test_there_is_a_reference_for_every_shipped_backbone() -> None:
    assert {"photos-flux", "photos-qwen"} <= set(RUNS)
    assert {f"{name}-calibration" for name in TRAINED} <= set(RUNS)


def test_no_file_is_large() -> None:
    assert {p.name: p.stat().st_size for p in REFERENCE.rglob("*") if p.stat().st_size > 5 * 2**20} == {}


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
    assert expected
    for path in expected:
        assert_same_figures(run / path.relative_to(stored), path)


def assert_same_figures(made: Path, stored: Path) -> None:
    """Compares words exactly, and numbers with `TOLERANCE`."""
    if stored.suffix == ".json":
        assert read_json(made) == approximately(read_json(stored)), stored.name
    else:
        assert_frame_equal(_table(made), _table(stored), rtol=TOLERANCE, atol=1e-9, obj=stored.name)


def _table(path: Path) -> pd.DataFrame:
    return pd.read_csv(path) if path.read_text().strip() else pd.DataFrame()


def approximately(value: Any) -> Any:
    """What equals nested data of which floats may differ by `TOLERANCE`."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=TOLERANCE, abs=1e-9) if isinstance(value, float) else value


@pytest.mark.parametrize(("other", "same"), [("0.50001", True), ("0.5001", False), ("0.6", False)])
def test_figures_are_compared_as_numbers(other: str, same: bool, tmp_path: Path) -> None:
    for form in ("name,value\na,{}\n", None):
        made, stored = (tmp_path / f"{n}.{'csv' if form else 'json'}" for n in ("made", "stored"))
        for path, number in ((made, other), (stored, "0.5")):
            path.write_text(form.format(number) if form else json.dumps({"a": [float(number)], "b": "text"}))
        if same:
            assert_same_figures(made, stored)
        else:
            with pytest.raises(AssertionError):
                assert_same_figures(made, stored)


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_ran_and_seeds_of_calibration_and_evaluation_are_apart(name: str) -> None:
    record = Record.read(REFERENCE / name / "record.json")
    assert [c.name for c in record.cells if c.status != "ok"] == []
    assert len(record.seeds) >= 2 * len(record.settings["etas"])
    for one, other in combinations(record.seeds.values(), 2):
        assert not set(one) & set(other)


@pytest.mark.parametrize(
    ("name", "other"), [("digits-flux", "photos-flux"), ("photos-flux", "photos-qwen"), ("photos-qwen", "photos-flux")]
)
def test_shipped_plans_fit_their_backbone_and_no_other(name: str, other: str) -> None:
    def rolled_out(backbone: Backbone) -> Trajectory:
        latents = initial_latents(backbone.latent_shape, 0, range(1))
        return rollout(backbone.policy(backbone.prompts[:1]), dance_schedule(21), DanceSDE(0.7), latents, 0)

    path = REFERENCE / f"{name}-calibration" / "calibration-eta0.7.json"
    plan = Plan.from_calibration(path, passes=5, predict=True, trajectory=rolled_out(load_backbone(name)))
    assert (plan.passes, plan.knots[0], plan.anticipating) == (5, 0, False)
    with pytest.raises(ReplayMismatch, match=f"backbone: calibrated with {name}, the rollout used {other}"):
        Plan.from_calibration(path, passes=5, trajectory=rolled_out(load_backbone(other)))


@pytest.mark.parametrize(("passes", "cosine"), [(5, 0.97), (6, 0.98), (8, 0.9895)])
def test_what_the_causal_plan_keeps_on_photos(passes: int, cosine: float) -> None:
    data = read_json(REFERENCE / "photos-flux-calibration" / "calibration-eta0.7.json")
    plan = data["plans"]["causal"][str(passes)]
    assert plan["held_out_cosine"]["value"] >= cosine
    assert plan["predicted"]["held_out_cosine"]["value"] > plan["held_out_cosine"]["value"]


@pytest.mark.parametrize("name", [f"{name}-calibration" for name in sorted(TRAINED)])
def test_the_leak_is_the_paper_s_and_not_causal_s(name: str) -> None:
    table = pd.read_csv(REFERENCE / name / "tables" / "centring.csv")
    leaks = table[table["centring"] == "ones"].set_index("estimator")
    assert (leaks.loc[["exact", "causal-5", "causal-8"], "p_value"] > 0.05).all()
    assert (leaks.loc[["jagg-w4-f1", "jagg-w5-f1"], "p_value"] < 0.05).all()
    assert (leaks.loc[["jagg-w4-f1", "jagg-w5-f1"], "share_low"] > 0).all()


def test_a_calibrated_plan_loads() -> None:
    plan = Plan.from_calibration(REFERENCE / "photos-flux" / "calibration-eta0.7.json", passes=8)
    assert plan.passes == 8
    assert plan.knots[0] == 0
    assert not plan.anticipating


def test_the_manifest_lists_every_record_and_its_inputs_are_those_of_today() -> None:
    stored = read_json(REFERENCE / NAME)
    assert stored == manifest(REFERENCE, REFERENCE.parents[1])
    assert {f"{name}/record.json" for name in RUNS} <= {entry["file"] for entry in stored}
    assert all(entry["commit"] and not entry["dirty"] and entry["inputs"] for entry in stored)


@pytest.mark.parametrize("name", CURVES)
def test_curves_have_four_seeds_of_every_arm(name: str) -> None:
    record = Record.read(REFERENCE / name / "record.json")
    assert [c.name for c in record.cells if c.status != "ok"] == []
    seeds: dict[str, set[int]] = {}
    for cell in record.cells:
        seeds.setdefault(cell.settings["arm"], set()).add(cell.settings["seed"])
    assert "exact" in seeds
    assert {len(found) for found in seeds.values()} == {4}
