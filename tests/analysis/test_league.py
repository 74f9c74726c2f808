"""The league: every method on its rollout, judged by one reference."""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.__main__ import main
from analysis.measure import league
from analysis.measure.league_methods import FULL, METHODS, SCORE, Method, Setting
from analysis.measure.league_settings import League
from analysis.report.league import TARGETS, sentences, table
from analysis.report.write import write_report
from analysis.statistics.direction import signal_ratio
from analysis.statistics.learning_signal import products, stored_products
from jagg_core import dance_schedule
from jagg_core.records import Cell, Record

SMALL: dict[str, Any] = {
    "backbone": "tests.bench.wide:load",
    "reward": "ink",
    "batches": 3,
    "prompts": 1,
    "samples": 3,
    "dimension": 512,
    "calibration": "results/reference/digits-flux-calibration/calibration-eta0.7.json",
}
CHOSEN = ("exact", "causal-5", "steps-5-causal-3", "mixgrpo", "fraction-0.6", "awm-5", "nft-5", "frozen")
OWN = """
from analysis.measure.league_methods import FULL, SCORE, Method
from jagg_core import exact_plan

def plan(setting, batch):
    return exact_plan(batch.trajectory.sigmas)

def broken(setting, batch):
    raise RuntimeError("no plan today")

mine = Method("mine", "mine", FULL, SCORE, plan)
fails = Method("fails", "fails", FULL, SCORE, broken)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A league of a few methods of every kind, a stranger's and one that fails among them."""
    folder = tmp_path_factory.mktemp("league")
    (folder / "my_league.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    try:
        settings = League(methods=(*CHOSEN, "my_league:mine", "my_league:fails"), **SMALL)
        league.run(settings, folder)
    finally:
        sys.path.remove(str(folder))
        del sys.modules["my_league"]
    return folder


def test_work_is_counted_in_network_evaluations(ran: Path) -> None:
    record = Record.read(ran / "record.json")
    counted = {c.name: tuple(c.values.values()) for c in record.cells if c.status == "ok"}
    assert counted == {
        "pathwise": (20, 20 * 5, 21 + 20 * 5, None),
        "exact": (20, 60, 81, 61),
        "causal-5": (5, 15, 36, None),
        "steps-5-causal-3": (3, 9, 15, None),
        "mixgrpo": (4, 12, 37, 33),
        "fraction-0.6": (12, 36, 57, 45),
        "awm-5": (5, 15, 25, None),
        "nft-5": (5, 20, 30, None),
        "frozen": (20, 60, 81, None),
        "mine": (20, 60, 81, 61),
    }
    failed = record.cell("fails")
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: no plan today")


def test_a_strangers_copy_of_exact_is_exact(ran: Path) -> None:
    record = Record.read(ran / "record.json")
    assert record.cell("mine").samples == record.cell("exact").samples


def test_the_page_has_every_method(ran: Path) -> None:
    page, shown, texts = write_report(ran)
    frame = pd.read_csv(ran / "tables" / "league.csv")
    assert len(frame) == len(shown["league"]) == 10
    assert frame["label"].tolist()[0] and set(frame["method"]) == {"pathwise", "mine", *CHOSEN}
    assert shown["failures"]["method"].tolist() == ["fails"]
    assert texts == ["3 batches: no claim below 8."]
    assert all(label in html.unescape(page.read_text()) for label in frame["label"])


def test_it_goes_on_from_what_is_kept(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "collected").symlink_to(ran / "collected")
    monkeypatch.setattr(league, "upstream_rows", None)
    record = league.run(League(methods=("exact", "awm-5"), **SMALL), tmp_path)
    assert [c.status for c in record.cells] == ["ok"] * 3
    assert record.cell("exact").samples == Record.read(ran / "record.json").cell("exact").samples
    with pytest.raises(ValueError, match="reference could not be measured: TypeError"):  # another seed is not kept
        league.run(League(methods=("exact",), **SMALL | {"seed": 1}), tmp_path)


def test_knots_on_fewer_steps_are_those_nearest_in_sigma() -> None:
    setting = Setting(None, League())  # type: ignore[arg-type]
    full, few = dance_schedule(21)[:-2], dance_schedule(6)[:-2]
    knots = setting.knots_on(full, 3)
    assert knots[0] == 0 and len(knots) == 3
    on_few = setting.knots_on(few, 3)
    assert on_few[0] == 0 and len(on_few) == 3
    for knot in knots[1:]:
        assert int((few - full[knot]).abs().argmin()) in on_few


def gaussian(mean: float, seed: int, n: int = 12) -> np.ndarray:
    rows = torch.randn(n, 400, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[:, 0] += mean
    return rows.numpy()


def test_the_ratio_of_signal_to_noise_holds_the_truth() -> None:
    one, other = (products(rows, rows) for rows in (gaussian(40, 0), gaussian(20, 1)))
    ratio = signal_ratio(one, other)
    assert ratio.low is not None and ratio.high is not None
    assert ratio.low < 4 < ratio.high < 6
    alternating = np.outer([1.0, -1.0] * 6, gaussian(0, 2)[0])
    assert signal_ratio(products(alternating, alternating), other).value is None
    with pytest.raises(ValueError, match="equally many batches, got 12 and 9"):
        signal_ratio(one, products(gaussian(20, 1, 9), gaussian(20, 1, 9)))


def stored(name: str, rows: np.ndarray, reference: np.ndarray, work: int) -> Cell:
    values = {"passes": 1, "update_evaluations": 3, "step_evaluations": work, "kept_graph_evaluations": None}
    settings = {"label": name, "rollout": "r", "upstream": "u"}
    samples = stored_products(products(rows, reference), of_exact=name == "pathwise")
    return Cell(name, settings=settings, values=values, samples=samples)


def test_sentences_name_the_cheapest_method_within_each_loss() -> None:
    reference = gaussian(200, 0)
    turned = gaussian(190, 1)
    turned[:, 1] += 60
    cells = [
        stored("pathwise", reference, reference, 100),
        stored("exact", gaussian(40, 2), reference, 80),
        stored("biased", turned, reference, 10),
        stored("nothing", np.outer([1.0, -1.0] * 6, gaussian(0, 3)[0]), reference, 10),
    ]
    settings = {"reference": "pathwise", "reward": "ink", "eta": 0.7}
    record = Record("league", ["x"], "digits-flux", settings, seeds={}, cells=cells)
    texts = sentences(record, table(record))
    assert ["pathwise" in text for text in texts[:2]] == [True, True]
    assert texts[2].startswith(f"At most {TARGETS[2]:.0%} of the direction lost (95 %): biased has")
    assert texts[3] == "Signal that cannot be told from 0, so without a cosine: nothing; n = 12."


def test_every_method_of_the_registry_is_there_and_named_once() -> None:
    assert len(METHODS) >= 12 and len({m.label for m in METHODS.values()}) == len(METHODS)
    assert league.chosen_methods(League())[0].name == "pathwise"
    added = league.chosen_methods(League(methods=("exact",), steps=(20, 8), passes=(5,)))
    assert [m.name for m in added] == ["pathwise", "steps-8", "steps-8-causal-5", "exact"]
    assert Method("x", "x", FULL, SCORE, METHODS["exact"].plan).rollout is METHODS["exact"].rollout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "greedy"], "methods 'greedy' cannot be read; allowed: exact, paper-0.6"),
        (["--methods", "json:dumps"], "methods must be analysis.measure.league_methods.Method objects"),
        (["--batches", "2"], "batches must be at least 3, got 2"),
        (["--samples", "2"], "samples must be at least 3 for pathwise gradients, got 2"),
        (["--steps", "1"], "steps must be at least 2, got [1]"),
        (["--eta", "0.3"], "calibration must be a file of analysis calibrate for digits-flux"),
        (["--reward", "random"], "reward must be differentiable for the league's reference, got random"),
    ],
)
def test_bad_settings_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["league", "--out", str(tmp_path / "x"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
