"""The main job from end to end: on the shipped digits as small as it goes, and on a stub where something fails."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from analysis.__main__ import main
from analysis.measure import estimators, gradients, job, reproduce, shipped
from analysis.measure.job import NotReproducible
from analysis.measure.reproduce import run
from analysis.measure.study import Recipe, Reproduce
from analysis.report.fidelity import tables
from analysis.report.fidelity.printable import printable
from analysis.report.write import write_report
from analysis.statistics.intervals import mean_interval
from analysis.statistics.names import SCALES
from jagg_core import Plan, dance_schedule
from jagg_core.backbones import load_backbone
from jagg_core.records import Record
from jagg_core.strict_json import plain, read_json, write_json
from tests.backbones.stub import StubBackbone
from tests.jagg_core.fields import MlpField

ROOT = Path(__file__).resolve().parents[2]
TABLES = {"whole_update", "per_group", "pareto", "routing", "blocks", "cross", "knots", "floor"}
TABLES |= {"leak", "side_by_side", "speed", "failures", "conclusions"}
BLOCKS = {"modulation", "attention", "MLP", "embedders"}
SMOKE = Reproduce(
    backbone="digits-flux",
    etas=(0.7,),
    windows=(3,),
    calibration_batches=(1,),
    evaluation_batches=(2,),
    leak_batches=3,
    speed_rounds=2,
    speed_batch=2,
    speed_window=3,
    recipe=Recipe(steps=6, prompts=1, samples=2),
)


# The shipped digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits")
    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "FOLDER", out / "nothing is shipped")
        record = run(SMOKE, out)
    assert plain(record.cells[0].values) == Record.read(out / "record.json").cells[0].values
    write_report(out)
    return out


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    return Record.read(folder / "record.json")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_cell_is_ok(folder: Path, record: Record) -> None:
    speed = Record.read(folder / "speed-digits-flux.json")
    assert [(c.name, c.reason) for c in [*record.cells, *speed.cells] if c.status != "ok"] == []
    names = {c.name for c in record.cells}
    assert {f"eta=0.7/{part}" for part in ("floor", "knots", "evaluation", "cross", "leak")} | {"samples"} <= names
    assert {f"eta=0.7/{e}" for e in ("jagg-w3-f1", "endpoint-w3-f1", "causal-4", "spline-4")} <= names
    assert {f"eta=0.7/leak/{e}" for e in ("exact", "jagg-w3-f1", "causal-4", "subsample-4")} <= names
    assert {c.name for c in speed.cells} >= {"exact", "exact-bare", "paper-joint", "closed-form-batched"}


def test_the_record_says_what_was_asked(record: Record) -> None:
    assert record.kind == "reproduce"
    assert record.settings["recipe"]["steps"] == 6
    assert len(record.schedule) == 5
    assert record.schedule[0] == 1
    assert record.environment["threads"] == 1


def test_calibration_and_evaluation_are_different_rollouts(record: Record) -> None:
    assert {purpose: len(seeds) for purpose, seeds in record.seeds.items()} == {
        "calibration eta=0.7": 1,
        "evaluation eta=0.7": 2,
        "leak eta=0.7": 3,
    }
    seeds = [seed for own in record.seeds.values() for seed in own]
    assert len(set(seeds)) == 6


def test_samples_are_raw_and_in_range(record: Record) -> None:
    judged = [c for c in record.cells if "headline" in c.settings]
    assert len(judged) >= 10
    for cell in judged:
        assert {len(values) for values in cell.samples.values()} == {2}
        for cosine in cell.samples["cosine"]:
            assert cosine is not None
            assert -1 <= cosine <= 1
        # predicted knots are rows of their own: equal but for rounding
        limit = 1e-3 if cell.settings["family"] == "causal-predicted" else 0
        errors = [error for error in cell.samples["rel_error"] if error is not None]
        assert (max(errors) <= limit) == (cell.settings["passes"] == 5), cell.name
    jagg = record.cell("eta=0.7/jagg-w3-f1").samples
    blocks = {f"block.{block}.cosine" for block in BLOCKS}
    assert {k for k in jagg if k.endswith("cosine")} == {"cosine", "w3.group0.cosine"} | blocks
    assert record.cell("eta=0.7/endpoint-w3-f1").samples["cosine"] != jagg["cosine"]
    predicted = record.cell("eta=0.7/causal-predicted-5").samples
    assert {k for k in predicted if k.endswith("cosine")} == {"cosine"} | blocks


def test_the_reference_is_known_well(record: Record) -> None:
    floor = record.cell("eta=0.7/floor").values
    assert floor["again"]["rel_error"] < 1e-6
    assert 0 < floor["halves"]["rel_error"] < 1e-5


def test_past_and_future_of_every_step(record: Record) -> None:
    cosines = record.cell("eta=0.7/cross").values["cosine"]
    assert record.cell("eta=0.7/cross").values["batches"] == 2
    assert [len(row) for row in cosines] == [5] * 5
    assert [cosines[i][i] for i in range(5)] == pytest.approx([1] * 5, abs=1e-6)
    assert all(-1 <= cosine <= 1 for row in cosines for cosine in row)
    assert cosines[0][4] < cosines[3][4] < 1


def test_files(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {
        "calibration-eta0.7.json",
        "figures",
        "record.json",
        "report.html",
        "samples.png",
        "speed-digits-flux.json",
        "tables",
    }
    assert {p.name for p in (folder / "tables").iterdir()} == {f"{name}.csv" for name in TABLES}
    names = {"cosine_per_group_w3", "leak", "pareto", "speed", "cross", "knots", "blocks"}
    assert {p.name for p in (folder / "figures").iterdir()} == {f"{n}.{k}" for n in names for k in ("png", "svg")}
    for path in (folder / "figures").glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 200
    with Image.open(folder / "samples.png") as sheet:
        # digits of 8 pixels, enlarged twelve times, and a white pixel between them
        assert sheet.size == (2 * 97 + 1, 97 + 1)
        pixels = np.asarray(sheet)
        cell = pixels[1:97, 1:97].reshape(8, 12, 8, 12, 3)
        assert (cell == cell[:, :1, :, :1]).all(), "each pixel of the sample is a square of one colour"
        assert len(np.unique(cell)) > 8
    assert len(read_json(folder / "record.json")["cells"]) > 20


def test_tables_are_means_of_the_samples(folder: Path, record: Record) -> None:
    whole = pd.read_csv(folder / "tables" / "whole_update.csv")
    assert len(whole) == sum(bool(c.settings.get("headline")) for c in record.cells)
    for _, row in whole.iterrows():
        samples = record.cell(f"eta=0.7/{row['estimator']}").samples
        for metric in ("cosine", "rel_error", "norm_ratio"):
            assert row[metric] == pytest.approx(np.mean(samples[metric]), rel=1e-5)  # type: ignore[arg-type]
            expected = mean_interval(samples[metric], SCALES[metric])
            assert row[f"{metric}_low"] == pytest.approx(expected.low, rel=1e-5)
            assert row[f"{metric}_high"] == pytest.approx(expected.high, rel=1e-5)
        assert row["n"] == 2
    speed = pd.read_csv(folder / "tables" / "speed.csv")
    assert speed.loc[speed["arm"] == "exact", "speed_up"].tolist() == [1.0]
    assert speed["passes"].tolist() == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    leak = pd.read_csv(folder / "tables" / "leak.csv")
    assert (leak["n"] == 3).all()
    routing = pd.read_csv(folder / "tables" / "routing.csv")
    assert routing["threshold"].tolist() == [0.8, 0.85, 0.9, 0.95, 0.97, 0.99]
    assert routing.loc[routing["asked_for"], ["window", "threshold"]].to_numpy().tolist() == [[3, 0.9]]
    assert routing["jagg_frac"].is_monotonic_decreasing
    blocks = pd.read_csv(folder / "tables" / "blocks.csv")
    assert set(blocks["block"]) == BLOCKS
    assert set(blocks["estimator"]) == set(whole["estimator"])
    cross = pd.read_csv(folder / "tables" / "cross.csv").pivot(index="knot", columns="step", values="cosine")
    np.testing.assert_allclose(cross.to_numpy(), record.cell("eta=0.7/cross").values["cosine"], rtol=1e-5)
    knots = pd.read_csv(folder / "tables" / "knots.csv", dtype={"knots": str}).set_index(["family", "passes"])
    assert knots.loc[("causal", 5), "knots"] == "0 1 2 3 4"
    assert len(knots) == sum(len(record.cell("eta=0.7/knots").values[family]) for family in ("causal", "spline"))
    assert pd.read_csv(folder / "tables" / "floor.csv")["computed"].tolist() == ["again", "halves"]


def test_calibrated_plans_load_back(folder: Path, record: Record) -> None:
    path = folder / "calibration-eta0.7.json"
    for passes in (2, 5):
        plan = Plan.from_calibration(path, passes)
        assert list(plan.knots) == record.cell("eta=0.7/knots").values["causal"][str(passes)]["knots"]
        assert plan.knots[0] == 0


def test_the_page_needs_nothing_else(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:|#|tables/|figures/)[^\s\"'>]+", page) == []
    outside = ("http://", "https://", "<script src", "<link", "<iframe", "@import", "url(")
    assert [word for word in outside if word in page] == []
    assert len(re.findall(r'<img (?:class="pixels" )?src="data:image/png;base64,[A-Za-z0-9+/=]{1000,}"', page)) == 8
    assert page.count("<img ") == 8
    for heading in (
        "Whole update",
        "Group by group",
        "How much may be approximated",
        "Past and future",
        "Where the knots lie",
        "Block by block",
        "Leak",
        "Time of one group",
        "How exact the reference is",
    ):
        assert f"<h2>{heading}" in page
    assert "Learning signal" not in page
    assert "Cells that failed" not in page
    assert str(folder) not in page.replace(" ".join(Record.read(folder / "record.json").command), "")


def test_the_report_comes_from_the_stored_records_alone(folder: Path, tmp_path: Path) -> None:
    """Byte by byte, in another folder that holds only what was computed."""
    expected = contents(folder)
    for name in ("record.json", "speed-digits-flux.json", "samples.png"):
        shutil.copy(folder / name, tmp_path / name)
    write_report(tmp_path)
    found = contents(tmp_path)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


# A stub, where something fails


Run = Callable[..., Record]


@pytest.fixture
def run_stub(stub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the job on the stub into ``tmp_path``; ``python -m bench`` ends with exit code 3 at once."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(reproduce.sys, "executable", str(python))

    def job(**changes: Any) -> Record:
        settings = replace(SMOKE, backbone=stub, reward="ink", speed_backbones=())
        return run(replace(settings, **changes), tmp_path / "run")

    return job


def not_ok(record: Record) -> dict[str, str | None]:
    return {c.name: c.reason for c in record.cells if c.status != "ok"}


def test_what_fails_is_recorded_and_the_rest_still_runs(
    run_stub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = job.judge

    def sabotaged(tables: Any, estimator: Any, windows: Any) -> Any:
        if estimator.name == "jagg-w3-f1":
            raise ArithmeticError("sabotage")
        return judge(tables, estimator, windows)

    monkeypatch.setattr(job, "judge", sabotaged)
    record = run_stub()
    assert not_ok(record) == {"eta=0.7/jagg-w3-f1": "ArithmeticError: sabotage"}
    assert record.cell("samples").status == "ok"
    speed = Record.read(tmp_path / "run" / "speed-stub.json")
    assert not_ok(speed) == {"speed": "python -m bench group ended with exit code 3"}
    _, shown, said = write_report(tmp_path / "run")
    assert shown["failures"]["cell"].tolist() == ["eta=0.7/jagg-w3-f1", "speed"]
    assert set(shown["failures"]["status"]) == {"failed"}
    csv = pd.read_csv(tmp_path / "run" / "tables" / "whole_update.csv")
    assert "jagg-w3-f1" not in csv["estimator"].tolist()
    assert "endpoint-w3-f1" in csv["estimator"].tolist()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Cells that failed" in page
    assert "ended with exit code 3" in page
    assert "ArithmeticError: sabotage" in page
    assert "Whole update" in page
    assert "Time of one group" not in page
    assert not any(text.startswith("Speed") for text in said)
    # the figure that lacks the cell is still drawn, the one that lacks all of them is not
    figures = {p.name for p in (tmp_path / "run" / "figures").glob("*.png")}
    assert figures == {"cosine_per_group_w3.png", "pareto.png", "leak.png", "cross.png", "knots.png"}


@pytest.mark.parametrize(("steps", "window"), [(3, 2), (4, 3), (5, 2), (5, 3), (8, 3)])
def test_the_shortest_schedules_run(steps: int, window: int, run_stub: Run) -> None:
    record = run_stub(windows=(window,), speed_window=2, recipe=Recipe(steps=steps, prompts=1, samples=2))
    assert not_ok(record) == {}
    assert {c.settings["passes"] for c in record.cells if "headline" in c.settings} >= {steps - 1}


def test_each_eta_has_its_own_cells(run_stub: Run) -> None:
    record = run_stub(etas=(0.7, 0.3), calibration_batches=(2, 1), evaluation_batches=(3, 2))
    assert not_ok(record) == {}
    assert {k: len(v) for k, v in record.seeds.items()} == {
        "calibration eta=0.7": 2,
        "evaluation eta=0.7": 3,
        "leak eta=0.7": 3,
        "calibration eta=0.3": 1,
        "evaluation eta=0.3": 2,
    }
    assert len(record.cell("eta=0.7/causal-4").samples["cosine"]) == 3
    assert len(record.cell("eta=0.3/causal-4").samples["cosine"]) == 2
    assert not any(c.name.startswith("eta=0.3/leak") for c in record.cells)


def test_the_same_settings_are_the_same_numbers(run_stub: Run) -> None:
    first, second = run_stub(), run_stub()
    assert plain([vars(c) for c in first.cells]) == plain([vars(c) for c in second.cells])
    other = run_stub(recipe=replace(SMOKE.recipe, seed=1))
    assert other.cell("eta=0.7/jagg-w3-f1").samples != first.cell("eta=0.7/jagg-w3-f1").samples


@pytest.mark.parametrize(("workers", "threads", "expected"), [(0, 1, 1), (0, 3, 3), (0, 9, 4), (1, 4, 1), (3, 1, 3)])
def test_passes_side_by_side(
    workers: int, threads: int, expected: int, run_stub: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers do not depend on how many passes are differentiated at a time."""
    asked: list[int] = []
    differentiate = gradients.differentiate

    def logged(*arguments: Any) -> None:
        asked.append(arguments[5])
        differentiate(*arguments)

    monkeypatch.setattr("analysis.measure.cross_table.differentiate", logged)
    torch.set_num_threads(threads)
    try:
        alone = run_stub(workers=1)
        record = run_stub(workers=workers)
    finally:
        torch.set_num_threads(1)
    # 4 for the floor, 3 tables, 3 for the leak
    assert asked == [1] * 10 + [expected] * 10
    assert plain([vars(c) for c in record.cells]) == plain([vars(c) for c in alone.cells])
    assert record.seeds == alone.seeds


def test_threads_are_given_back(run_stub: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    pull_back = gradients.pull_back

    def failing(*arguments: Any) -> None:
        share = torch.get_num_threads()
        shares.append(share)
        if share < 4:
            raise ArithmeticError("sabotage")
        pull_back(*arguments)

    monkeypatch.setattr(gradients, "pull_back", failing)
    torch.set_num_threads(4)
    try:
        record = run_stub(workers=2)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(1)
    assert not_ok(record) == dict.fromkeys(["eta=0.7/floor", "eta=0.7/knots"], "ArithmeticError: sabotage")
    # the first pass of each batch has all the threads
    assert shares[0] == 4
    assert set(shares) == {4, 2}


def test_a_search_that_fails_costs_only_its_eta(run_stub: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    search = job.KnotSearch
    made: list[object] = []

    def sabotaged(*arguments: Any) -> Any:
        made.append(arguments)
        if len(made) == 2:
            raise FloatingPointError("sabotage")
        return search(*arguments)

    monkeypatch.setattr(job, "KnotSearch", sabotaged)
    record = run_stub(etas=(0.7, 0.3))
    assert not_ok(record) == {"eta=0.7/knots": "FloatingPointError: sabotage"}
    assert [c.name for c in record.cells if c.name.startswith("eta=0.7")] == ["eta=0.7/floor", "eta=0.7/knots"]
    assert record.cell("eta=0.3/causal-4").status == "ok"
    assert record.cell("samples").status == "ok"


def test_rewards_that_do_not_vary_are_said(run_stub: Run) -> None:
    record = run_stub(reward="tests.backbones.stub:constant")
    message = "ValueError: none of the 1 calibration batches has any advantage: the reward does not vary"
    assert not_ok(record) == {"eta=0.7/knots": message}


def test_what_was_done_before_an_interruption_is_stored(
    run_stub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_gradients = job.plan_gradients

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        if list(arguments[4]) == ["exact"]:
            return plan_gradients(*arguments, **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "plan_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stub()
    record = Record.read(tmp_path / "run" / "record.json")
    assert not_ok(record) == {}
    assert len(record.cell("eta=0.7/causal-4").samples["cosine"]) == 2
    assert not any(c.name.startswith("eta=0.7/leak") for c in record.cells)


def test_an_added_and_a_deleted_cell(
    run_stub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stub()
    out = tmp_path / "run"
    (out / "speed-stub.json").unlink()
    monkeypatch.setattr("analysis.report.write.draw_blocks", lambda blocks, *_: [{} for _ in blocks])
    main(["report", str(out)])
    assert "Cells that failed" not in (out / "report.html").read_text()
    record = Record.read(out / "record.json")
    record.cells = [c for c in record.cells if "leak" not in c.name]
    spoilt = record.cell("eta=0.7/causal-4")
    spoilt.status, spoilt.reason, spoilt.samples = "failed", "MemoryError: <too much>", {}
    record.write(out / "record.json")
    with pytest.raises(SystemExit) as caught:
        main(["report", str(out)])
    assert caught.value.code == 1
    assert "1 cells failed" in capsys.readouterr().err
    csv = pd.read_csv(out / "tables" / "failures.csv")
    assert csv.to_dict("records") == [
        {"backbone": "stub", "cell": "eta=0.7/causal-4", "status": "failed", "reason": "MemoryError: <too much>"}
    ]
    page = (out / "report.html").read_text()
    assert "MemoryError: &lt;too much&gt;" in page
    assert "<h2>Leak" not in page
    assert (out / "tables" / "leak.csv").read_text().strip('"\n') == ""


def test_the_stub_is_what_it_pretends_to_be(stub: str) -> None:
    assert isinstance(load_backbone(stub), StubBackbone)


def test_a_run_that_is_killed_leaves_nothing_of_the_one_before(
    run_stub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    stale = ["record.json", "report.html", "samples.png", "calibration-eta9.json", "speed-other.json"]
    stale += ["tables/leak.csv", "figures/leak.png", "figures/leak.svg"]
    for name in (*stale, "notes.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "plan_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stub()
    # what is not an output of the job is the user's
    assert (out / "notes.txt").read_text() == "old"
    assert [name for name in stale if (out / name).exists()] == []


# The reference, and calibrations that are shipped

MADE_WITH = {"transition": "DanceSDE(eta=0.7)", "timestep_mode": "float"}


class Forgetful(StubBackbone):
    """With dropout that is active."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = MlpField(elements=4, samples=64, dtype=torch.float32, dropout=0.4)


def test_a_reference_that_differs_from_itself_is_refused(
    run_stub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "load_backbone", lambda *_, **__: Forgetful())
    with pytest.raises(
        NotReproducible, match=r"of stub differs from itself by .* \(limit 1e-05\): is dropout active\?"
    ):
        run_stub()
    stored = Record.read(tmp_path / "run" / "record.json")
    assert [c.name for c in stored.cells] == ["eta=0.7/floor"]
    assert stored.cells[0].values["again"]["rel_error"] > 0.01
    assert not list((tmp_path / "run").glob("speed-*.json")), "timed before the refusal"


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Ship a calibration of the stub."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "reference")

    def write(schedule: list[float], **causal: list[int]) -> None:
        plans = {"causal": {passes.removeprefix("k"): {"knots": knots} for passes, knots in causal.items()}}
        data = {"schedule": schedule, **MADE_WITH, "plans": plans, "seeds": {"calibration eta=0.7": [7]}}
        write_json(shipped.path("stub", 0.7), data)

    return write


def test_a_shipped_calibration_is_judged_again(run_stub: Run, ship: Callable[..., None]) -> None:
    schedule = dance_schedule(8)[:-2].tolist()
    ship(schedule, k6=[0, 1, 3, 4, 5, 6], k5=[0, 2, 3, 5, 6], k4=[0, 2, 4, 6])
    record = run_stub(etas=(0.7, 0.3), recipe=replace(SMOKE.recipe, steps=8))
    assert not_ok(record) == {}
    assert record.cell("eta=0.7/shipped").values == {"recommended": {}, "seeds": {"calibration eta=0.7": [7]}}
    found = [c for c in record.cells if c.settings.get("family") == "causal-shipped"]
    # with the numbers of passes that are shipped, at the eta it was made for
    assert [c.name for c in found] == ["eta=0.7/shipped-6", "eta=0.7/shipped-5"]
    assert found[1].settings["knots"] == [0, 2, 3, 5, 6]
    assert found[1].settings["headline"]
    assert "w3.group0.cosine" in found[1].samples
    plan = estimators.with_knots(torch.tensor(schedule, dtype=torch.float64), "causal", (0, 2, 3, 5, 6))
    assert found[1].settings["passes"] == plan.passes
    own = record.cell("eta=0.7/causal-5")
    assert (found[1].samples["cosine"] == own.samples["cosine"]) == (own.settings["knots"] == [0, 2, 3, 5, 6])


def test_a_shipped_plan_with_the_same_knots_has_the_same_numbers(run_stub: Run, ship: Callable[..., None]) -> None:
    first = run_stub()
    ship(first.schedule, k5=first.cell("eta=0.7/causal-5").settings["knots"])
    again = run_stub()
    assert again.cell("eta=0.7/shipped-5").samples == first.cell("eta=0.7/causal-5").samples


def test_a_shipped_calibration_of_another_schedule(run_stub: Run, ship: Callable[..., None]) -> None:
    ship(dance_schedule(9)[:-2].tolist(), k5=[0, 1, 2, 3, 4])
    record = run_stub()
    assert not_ok(record) == {}
    assert not [c.name for c in record.cells if "shipped" in c.name]
    assert record.cell("eta=0.7/causal-4").status == "ok"
    assert not [c.name for c in record.cells if c.settings.get("family") == "causal-shipped"]


@pytest.mark.parametrize("changes", [{"timestep_mode": "trunc_fp32"}, {"transition": "flow"}], ids=str)
def test_a_shipped_calibration_of_other_rollouts(
    changes: dict[str, Any], run_stub: Run, ship: Callable[..., None]
) -> None:
    ship(dance_schedule(6)[:-2].tolist(), k5=[0, 1, 2, 3, 4])
    record = run_stub(recipe=replace(SMOKE.recipe, **changes))
    assert not_ok(record) == {}
    assert not [c.name for c in record.cells if "shipped" in c.name]
    assert record.cell("eta=0.7/side-by-side").values == {"rows": []}


def calibrated(frac: float, cosine: float, **recommended: int | None) -> dict[str, Any]:
    """What a calibration file holds, as far as it is compared."""
    held_out = {"held_out_cosine": {"value": cosine, "low": cosine - 0.01, "high": cosine + 0.01}}
    return {
        **MADE_WITH,
        "windows": {"4": {"jagg_frac": frac, "jagg_frac_ci": [frac, 1.0]}},
        "plans": {"causal": {"5": held_out, "8": {"held_out_cosine": None}}},
        "recommended": {target: {"passes": passes} for target, passes in recommended.items()},
    }


def test_shipped_calibrations_stand_side_by_side(
    run_stub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "reference")
    schedule = run_stub().schedule
    for name, found in (("one", calibrated(0.6, 0.9, near=5)), ("two", calibrated(0.8, 0.97, near=8, far=3))):
        write_json(shipped.path(name, 0.7), found | {"schedule": schedule})
    write_json(shipped.path("another-schedule", 0.7), calibrated(0.1, 0.1) | {"schedule": schedule[1:]})
    record = run_stub()
    assert [row["backbone"] for row in record.cell("eta=0.7/side-by-side").values["rows"]] == ["one", "two"]
    table = tables.side_by_side(record)
    assert table["jagg_frac_w4"].tolist() == [0.6, 0.8]
    assert table["passes for near"].tolist() == [5, 8]
    shown = printable(tables.all_tables(record, []))["side_by_side"]
    assert shown["cosine of causal, 5 passes"].tolist() == ["0.900 [0.890, 0.910]", "0.970 [0.960, 0.980]"]
    assert shown["cosine of causal, 8 passes"].tolist() == ["undefined"] * 2
    assert shown["passes for far"].tolist() == ["", "3"]


def test_one_shipped_calibration_is_not_compared(run_stub: Run, ship: Callable[..., None]) -> None:
    ship(run_stub().schedule, k5=[0, 1, 2, 3, 4])
    assert tables.side_by_side(run_stub()).empty
