"""A stranger's estimator is searched, judged, tabled and drawn as ours are, and trains: without an edit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.measure import shipped
from analysis.measure.reproduce import run
from analysis.report import figures
from analysis.report.write import write_report
from jagg_core import Plan
from jagg_core.grpo import GRPOTrainer
from jagg_core.plans import ESTIMATORS
from tests.analysis.test_reproduce import SMOKE
from tests.grpo.runs import changed

NAME = "tests.jagg_core.test_registry:nearest_plan"


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


def test_it_is_searched_judged_tabled_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "nothing is shipped")
    run(replace(SMOKE, estimators=(NAME,)), tmp_path)
    ESTIMATORS.pop("nearest")  # another process makes the page
    write_report(tmp_path)
    whole = pd.read_csv(tmp_path / "tables" / "whole_update.csv")
    rows = whole[whole["family"] == "nearest"]
    assert len(rows) >= 2
    assert rows["cosine"].between(0.5, 1).all()
    assert set(rows["label"]) == {f"nearest, {passes} searched knots" for passes in rows["passes"]}
    front = pd.read_csv(tmp_path / "tables" / "pareto.csv")
    assert "nearest" in set(front["family"])
    [axes] = figures.pareto_front(front, "jagg-w3-f1").axes[:1]
    assert "nearest" in axes.get_legend_handles_labels()[1]
    knots = {int(k): tuple(v["knots"]) for k, v in _calibration(tmp_path)["nearest"].items()}
    assert Plan.from_calibration(tmp_path / "calibration-eta0.7.json", 3, family="nearest").knots == knots[3]


def _calibration(run: Path) -> dict[str, dict[str, dict[str, list[int]]]]:
    from jagg_core.strict_json import read_json

    plans: dict[str, dict[str, dict[str, list[int]]]] = read_json(run / "calibration-eta0.7.json")["plans"]
    return plans


def test_it_trains() -> None:
    trainer = GRPOTrainer(changed(plan={"estimator": NAME, "knots": (0, 2)}))
    assert trainer.step().passes == 2
    assert trainer.plan.estimator == NAME


def test_a_name_that_is_no_estimator_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "--estimators", "tests.grpo.runs:nothing", "--out", str(tmp_path / "run")])
    [line] = capsys.readouterr().err.splitlines()
    assert "estimator 'tests.grpo.runs:nothing'" in line
