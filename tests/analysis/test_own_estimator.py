"""A stranger's estimator is searched, judged, tabled, drawn, stored and trained as ours are: without an edit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.__main__ import main
from analysis.measure import shipped, signal_gradients
from analysis.measure.reproduce import run
from analysis.report import figures
from analysis.report.checked import read_record
from analysis.report.fidelity import tables
from analysis.report.fidelity.recommendation import calibration, lines_to_paste, recommended
from analysis.report.write import write_report
from analysis.statistics.names import families_of, registered_families, showing
from jagg_core import Plan, causal_plan, dance_schedule
from jagg_core.grpo import GRPOTrainer
from jagg_core.grpo.plans import make_plan
from jagg_core.grpo.settings import PlanSettings
from jagg_core.plans import ESTIMATORS, Estimator, find_estimator, register_estimator
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError, read_json, write_json
from tests.analysis.test_reference import REFERENCE, STUDIES
from tests.analysis.test_reproduce import SMOKE
from tests.grpo.runs import changed
from tests.test_docs import CONTRIBUTING, python_blocks, sections

NAME = "my_module:nearest_plan"


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``my_module`` as CONTRIBUTING.md shows it, up to its use."""
    [code] = python_blocks(sections(CONTRIBUTING.read_text("utf-8"))["Add an estimator"])
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_module.py").write_text(code.partition("\n\nbackbone = ")[0])
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("my_module", None)


@pytest.mark.usefixtures("my_module")
def test_it_is_searched_judged_tabled_drawn_stored_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "nothing is shipped")
    out = tmp_path / "run"
    run(replace(SMOKE, estimators=(NAME,)), out)
    # another process, on a machine without the module, makes the page
    ESTIMATORS.pop("nearest")
    del sys.modules["my_module"]
    write_report(out)
    assert "my_module" not in sys.modules
    assert "nearest" not in ESTIMATORS
    whole = pd.read_csv(out / "tables" / "whole_update.csv")
    rows = whole[whole["family"] == "nearest"]
    assert len(rows) >= 2
    assert rows["cosine"].between(0.5, 1).all()
    assert set(rows["label"]) == {f"nearest, {passes} searched knots" for passes in rows["passes"]}
    front = pd.read_csv(out / "tables" / "pareto.csv")
    assert "nearest" in set(front["family"])
    with showing(families_of(read_record(out / "record.json"))):
        [axes] = figures.pareto_front(front, "jagg-w3-f1").axes[:1]
    assert "nearest" in axes.get_legend_handles_labels()[1]
    file = out / "calibration-eta0.7.json"
    knots = tuple(read_json(file)["plans"]["nearest"]["3"]["knots"])
    with pytest.raises(ValueError, match="family must be registered or given as module:object, got 'nearest'"):
        Plan.from_calibration(file, 3, family="nearest")
    assert Plan.from_calibration(file, 3, family=NAME).knots == knots
    settings = PlanSettings(estimator=NAME, passes=3, calibration=str(file))
    assert make_plan(settings, torch.tensor(read_json(file)["schedule"]), 0).knots == knots


@pytest.mark.usefixtures("my_module")
def test_it_trains_on_knots() -> None:
    trainer = GRPOTrainer(changed(plan={"estimator": NAME, "knots": (0, 2)}))
    assert trainer.step().passes == 2
    assert trainer.plan.estimator == NAME


def test_a_name_that_is_no_estimator_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "--estimators", "tests.grpo.runs:nothing", "--out", str(tmp_path / "run")])
    [line] = capsys.readouterr().err.splitlines()
    assert "estimator 'tests.grpo.runs:nothing'" in line


@pytest.mark.parametrize("name", STUDIES)
def test_stored_records_are_read_after_another_estimator_is_registered(name: str) -> None:
    register_estimator(
        Estimator("later", "later", "knots", causal_plan, looks_ahead=False, in_front=True, recommended=True)
    )
    record = read_record(REFERENCE / name / "record.json")
    made = tables.all_tables(record, [])
    assert "later" not in set(made["knots"]["family"])
    for eta in record.settings["etas"]:
        assert calibration(record, eta, made)["plans"].keys() == {"causal", "spline"}


def test_one_that_does_not_look_ahead_is_measured_and_recommended() -> None:
    assert find_estimator(f"{__name__}:CAREFUL").recommended
    sigmas = dance_schedule(11)[:9]
    knots = {"careful": {3: (0, 3, 6)}, "causal": {3: (0, 4, 6)}, "spline": {3: (0, 4, 8)}}
    main = signal_gradients.main_plans(sigmas, (3,), 1.0, knots, (3,))
    assert {"careful-3", "causal-3"} <= {e.name for e in main}
    assert "spline-3" not in {e.name for e in main}


CAREFUL = Estimator("careful", "careful", "knots", causal_plan, looks_ahead=False, in_front=True, recommended=True)


def test_the_line_to_paste_names_it() -> None:
    find_estimator(f"{__name__}:CAREFUL")
    source = f"{__name__}:CAREFUL"
    stored = {name: family.describe() for name, family in registered_families([source]).items()}
    recipe = {"guidance": None, "steps": 11, "shift": 1.0}
    settings = {"families": stored, "reward": "ink", "recipe": recipe, "etas": [0.7], "min_cosine": 0.9}
    about = {"eta": 0.7, "family": "careful", "estimator": "careful-3", "label": "careful, 3 searched knots"}
    cell = Cell(
        "eta=0.7/careful-3",
        settings=about | {"passes": 3, "knots": [0, 3, 6], "anticipating": False, "headline": True},
        samples={"cosine": [0.991 + 0.001 * n for n in range(8)]},
    )
    record = Record("reproduce", [], "digits-flux", settings, {}, schedule=[0.9] * 9, cells=[cell])
    ESTIMATORS.pop("careful")
    found = recommended(record, 0.7, {})["cosine >= 0.9"]
    assert (found["family"], found["passes"], found["predict"]) == ("careful", 3, False)
    assert "run the careful plan with 3 of 9 passes, knots [0, 3, 6]" in found["text"]
    _, command, call = lines_to_paste(record, 0.7, {"x": found}, Path("c.json"))
    assert f"--plan.estimator {source} --plan.passes 3 --plan.calibration c.json" in command
    assert call == f"Plan.from_calibration('c.json', passes=3, family='{source}', trajectory=trajectory)"


def test_a_damaged_family_is_named(tmp_path: Path) -> None:
    data = read_json(REFERENCE / "photos-flux" / "record.json")
    for damage in ({"name": "x"}, {"name": "x", "label": "x", "style": ["red"]}, {"style": ["a", "b", "c"], "no": 1}):
        data["settings"]["families"] = {"x": damage}
        write_json(tmp_path / "record.json", data)
        with pytest.raises(RecordError, match=r"record\.json: settings\.families\.x must describe a family, got"):
            read_record(tmp_path / "record.json")
