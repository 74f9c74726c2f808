"""The page of a cost run: tables follow from the record, and the paper's figures stand beside the predictions."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.report.cost import PUBLISHED, beside_the_paper, costs, fits, sentences
from bench.cost import CostStudy, Machine, Update, run_cost_study
from bench.work import PassWork
from jagg_core.records import Record
from jagg_core.strict_json import RecordError, read_json

SPEED = Path(__file__).parents[2] / "results" / "reference" / "photos-flux" / "speed-photos-flux.json"


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX.1 dev at 720x720, without counting."""
    monkeypatch.setattr("bench.work.count_work", lambda *_: PassWork(37.28e12, 74.55e12, 11_901_408_320))


def study(**settings: object) -> Record:
    return run_cost_study(CostStudy(**({"ranks": (1, 64)} | settings)))  # type: ignore[arg-type]


def test_speed_ups_are_over_exact_on_as_many_devices() -> None:
    table = costs(study())
    exact = table[table["arm"] == "exact"]
    for part in ("group", "update", "step", "backward"):
        assert (exact[f"{part}_speed_up"] == 1).all()
    paper = table[(table["arm"] == "paper-joint") & (table["ranks"] == 1)].iloc[0]
    assert paper["backward_speed_up"] == pytest.approx(20 / 14)
    assert paper["update_speed_up"] == pytest.approx(80 / 62, abs=1e-4)
    assert paper["step_speed_up"] == pytest.approx(101 / 83, abs=1e-4)


def test_the_paper_beside_the_prediction() -> None:
    record = study()
    found = beside_the_paper(record, costs(record)).set_index("what")
    assert found.loc["training step", "published"] == 0.182
    assert found.loc["training step", "predicted"] == pytest.approx(1 - 83 / 101, abs=1e-4)
    assert found.loc["update stage", "predicted"] == pytest.approx(0.225, abs=1e-4)
    assert found.loc["update stage", "predicted_without_inner_forwards"] == pytest.approx(0.3, abs=1e-4)
    step, stage = sentences(record, costs(record), found.reset_index())[-2:]
    assert "18.2% less time published, 17.8% predicted from W = 4, jagg_frac 0.6, 21 steps, with checkpointing." in step
    assert "differ by 7.4 points. Without the forwards of inner steps 30.0% are predicted: in doubt is" in stage


def test_a_figure_of_another_backbone_is_left_out() -> None:
    record = study(backbone="sd3.5-medium")
    assert beside_the_paper(record, costs(record))["what"].tolist() == ["update stage"]


def test_the_first_sentences_name_every_part() -> None:
    record = study()
    first, second, *_ = sentences(record, costs(record), pd.DataFrame())
    assert first.startswith("1 devices: the paper's scheme is 1.43x in backward passes, 1.29x in the update, 1.22x in")
    assert second.startswith("64 devices: ")


def test_another_recipe_changes_the_prediction() -> None:
    record = study(update=Update(window=5), machine=Machine(checkpointing=False))
    found = beside_the_paper(record, costs(record)).set_index("what")
    # 2 of 4 groups: 2 x (5 + 2 x 2) and 10 x 3, of 20 x 3
    assert found.loc["update stage", "predicted"] == pytest.approx(1 - 48 / 60, abs=1e-4)


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(measured=(str(SPEED),)).write(tmp_path / "record.json")
    main(["report", str(tmp_path)])
    assert (tmp_path / "figures" / "cost.png").stat().st_size > 10_000
    table = pd.read_csv(tmp_path / "tables" / "costs.csv")
    assert len(table) == 2 * (8 + 4)
    page = (tmp_path / "report.html").read_text()
    assert "11.90 billion" in page and "400.0 TFLOP/s" in page and "Predicted and measured groups" in page
    assert "training step, DanceGRPO: 18.2% less time published" in capsys.readouterr().out
    errors = pd.read_csv(tmp_path / "tables" / "fits.csv")["error"]
    assert (errors.abs() < 1).all() and len(errors) == 7


def test_without_measurements_there_is_no_fit() -> None:
    assert fits(study()).empty


def test_a_record_without_predictions(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="the record of flux-dev has no predictions"):
        costs(Record("cost", [], "flux-dev", {}, {}))


def test_published_figures_have_a_source() -> None:
    data = read_json(PUBLISHED)
    assert "2607.17572" in data["source"] and data["inferred"]
    for figure in data["figures"]:
        if figure.get("baseline") is not None:
            assert 1 - figure["jagg"] / figure["baseline"] == pytest.approx(figure["reduction"], abs=2e-3)
