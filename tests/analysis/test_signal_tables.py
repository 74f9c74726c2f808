"""Tables of the learning signal from records made by hand, and what is recommended by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.report.fidelity import signal_tables
from analysis.report.fidelity.printable import printable
from analysis.report.fidelity.recommendation import calibration, frac_by_signal, recommend_signal
from analysis.report.fidelity.sentences import findings
from analysis.report.fidelity.signal_tables import (
    TOO_FEW,
    UNTOLD,
    UPDATE_SAMPLES,
    all_tables,
    by_batch,
    centring,
    noise,
    pairs,
    products_of,
    said_of_difference,
    signal,
)
from analysis.report.fidelity.tables import all_tables as other_tables
from analysis.statistics.intervals import Interval, leak_test, mean_interval
from analysis.statistics.learning_signal import (
    Products,
    batches_to_tell,
    bias_interval,
    effective_dimension,
    kept_difference,
    paired_difference,
    signal_loss,
    signal_samples,
    verdict,
)
from analysis.statistics.names import CENTRINGS, PER_PROMPT
from jagg_core import dance_schedule
from jagg_core.records import Cell, Record
from jagg_core.strict_json import plain

STEPS, BATCH, N = 20, 8, 12
Gradients = dict[str, np.ndarray]


def draw(name: str, seed: int = 0, signal: float = 1.0, bias: float = 0.0, n: int = N) -> np.ndarray:
    """Gradients ``[n, 40]`` of one estimator: exact's of the same seed, and its own noise and bias."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(N, 40)) / 40**0.5
    exact[:, 0] += signal
    own = np.random.default_rng([seed, *name.encode()]).normal(size=(N, 40)) / 40**0.5
    found = exact if name == "exact" else exact + 0.3 * own
    found[:, 1] += bias
    return found[:n]


def direct(exact: np.ndarray, own: np.ndarray) -> Products:
    return Products(exact @ exact.T, own @ exact.T, own @ own.T)


FAMILIES = {
    "exact": ("exact", 20, {}),
    "jagg-w4-f0.6": ("jagg", 14, {"window": 4, "jagg_frac": 0.6}),
    "jagg-w4-f0.4": ("jagg", 16, {"window": 4, "jagg_frac": 0.4}),
    "jagg-w4-f1": ("jagg", 10, {"window": 4, "jagg_frac": 1.0}),
    "causal-5": ("causal", 5, {"knots": [0, 4, 9, 14, 18]}),
    "causal-predicted-5": ("causal-predicted", 5, {"knots": [0, 4, 9, 14, 18], "whole_update_only": True}),
    "subsample-5": ("subsample", 5, {}),
}


def cell_of(name: str, own: np.ndarray, exact: np.ndarray, under: str = PER_PROMPT, eta: float = 0.7) -> Cell:
    family, passes, more = FAMILIES[name]
    about = {"estimator": name, "label": f"{name} <label>", "family": family, "passes": passes}
    about |= {"anticipating": family == "jagg", "eta": eta, "centring": under, **more}
    samples = {"own": (own @ own.T)[np.triu_indices(len(own))].tolist()}
    if name != "exact":
        samples |= {"cross": (own @ exact.T).flatten().tolist()}
    return Cell(f"eta={eta:g}/signal/{under}/{name}", settings=about, samples=samples, values={"batches": len(own)})


def cells_of(gradients: Gradients, under: str = PER_PROMPT, eta: float = 0.7) -> list[Cell]:
    return [cell_of(name, own, gradients["exact"], under, eta) for name, own in gradients.items()]


def record_of(*cells: Cell, etas: tuple[float, ...] = (0.7,), **changes: Any) -> Record:
    settings = {"windows": [4], "etas": list(etas), "jagg_frac": 0.6, "threshold": 0.9, "update_samples": 64}
    settings |= {"max_signal_loss": 0.05, "min_cosine": 0.99, "reward": "ink"} | changes
    batches = [Cell(f"eta={eta:g}/signal", settings={"eta": eta}, values={"samples_per_batch": BATCH}) for eta in etas]
    schedule = dance_schedule(STEPS + 1)[:-2].tolist()
    return Record("calibrate", ["python"], "stub", settings, {}, schedule, {}, [*batches, *cells])


@pytest.fixture
def gradients() -> Gradients:
    """One with bias, one that was measured on fewer batches."""
    found = {name: draw(name) for name in ("exact", "jagg-w4-f0.6", "causal-5", "subsample-5")}
    return found | {"jagg-w4-f1": draw("jagg-w4-f1", bias=0.9), "causal-predicted-5": draw("causal-predicted-5", n=7)}


def same(row: Any, name: str, interval: Interval) -> bool:
    found = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
    return [None if pd.isna(v) else v for v in found] == [interval.value, interval.low, interval.high]


# The table of the signal


def test_columns_are_those_of_the_vectors(gradients: Gradients) -> None:
    table = signal(record_of(*cells_of(gradients))).set_index("estimator")
    assert set(table.index) == set(gradients)
    for name, own in gradients.items():
        found, row = direct(gradients["exact"], own), table.loc[name]
        loss = signal_loss(found, 64 / BATCH)
        assert loss.value is not None
        assert same(row, "signal", mean_interval(signal_samples(found), "cosine"))
        assert same(row, "difference", paired_difference(found))
        assert same(row, "loss", loss)
        assert same(row, "bias2", bias_interval(found))
        assert row["verdict"] == verdict(loss, 0.05)
        assert row["samples"] == len(own) * BATCH
        told = batches_to_tell(loss, 0.05, len(own))
        assert row["samples_to_tell"] == (told or 0) * BATCH
        assert row["undefined"] == 0
        assert row["label"] == f"{name} <label>"
    assert table.loc["exact", "loss"] == 0
    assert table.loc["jagg-w4-f1", "verdict"] == "lost"
    assert table.loc["jagg-w4-f1", "bias2"] > 0.1 > table.loc["causal-5", "bias2"]


def test_more_samples_and_other_targets_change_what_is_said(gradients: Gradients) -> None:
    cells = cells_of(gradients)
    few, many = (
        signal(record_of(*cells, update_samples=size)).set_index("estimator").loc["jagg-w4-f1", "loss"]
        for size in (8, 4096)
    )
    assert few < many
    lenient = signal(record_of(*cells, max_signal_loss=0.9)).set_index("estimator")
    assert lenient["verdict"].to_dict() == dict.fromkeys(gradients, "kept") | {"causal-predicted-5": TOO_FEW}


def test_the_dearest_come_first(gradients: Gradients) -> None:
    low = [cell for cell in cells_of(gradients, eta=0.3) if cell.settings["estimator"] in ("exact", "causal-5")]
    table = signal(record_of(*low, *cells_of(gradients), etas=(0.7, 0.3)))
    assert table["eta"].tolist() == [0.7] * 6 + [0.3] * 2
    assert table["passes"].tolist() == [20, 14, 10, 5, 5, 5, 20, 5]


def test_each_eta_has_an_exact_of_its_own(gradients: Gradients) -> None:
    other = {name: draw(name, seed=1) for name in ("exact", "causal-5")}
    record = record_of(*cells_of(gradients), *cells_of(other, eta=0.3), etas=(0.7, 0.3))
    table = signal(record).set_index(["eta", "estimator"])
    for eta, own in ((0.7, gradients), (0.3, other)):
        expected = signal_loss(direct(own["exact"], own["causal-5"]), 8)
        assert same(table.loc[(eta, "causal-5")], "loss", expected)


def test_fewer_batches_are_compared_with_all_of_exact(gradients: Gradients) -> None:
    products = {cell.settings["estimator"]: p for cell, p in products_of(record_of(*cells_of(gradients)))}
    own, exact = gradients["causal-predicted-5"], gradients["exact"]
    np.testing.assert_array_equal(products["causal-predicted-5"].cross, own @ exact.T)
    assert (products["causal-predicted-5"].m, products["causal-predicted-5"].n) == (7, N)
    assert products["exact"].m == N


def test_what_exact_has_failed_for_is_left_out(gradients: Gradients) -> None:
    cells = cells_of(gradients) + cells_of(gradients, "ones")
    spoilt = next(c for c in cells if c.settings["estimator"] == "exact" and c.settings["centring"] == PER_PROMPT)
    spoilt.status, spoilt.reason, spoilt.samples = "failed", "why", {}
    record = record_of(*cells)
    assert len(signal(record)) == len(by_batch(record)) == len(noise(record)) == 0
    assert set(centring(record)["centring"]) == {"ones"}


def test_without_cells_there_are_no_rows() -> None:
    assert {name: len(frame) for name, frame in all_tables(record_of()).items()} == {
        "signal": 0,
        "by_batch": 0,
        "centring": 0,
        "noise": 0,
        "pairs": 0,
    }


# Costs


def test_costs_by_passes(gradients: Gradients) -> None:
    """Exact: 21 forwards of the rollout, then 20 of the update with a backward that counts two."""
    table = signal(record_of(*cells_of(gradients))).set_index("estimator")
    assert table["update_cost"].to_dict() == {
        "exact": 1,
        "jagg-w4-f0.6": 0.7,
        "jagg-w4-f1": 0.5,
        "causal-5": 0.25,
        "causal-predicted-5": 0.25,
        "subsample-5": 0.25,
    }
    assert table.loc["causal-5", "step_cost"] == pytest.approx(36 / 81)
    assert table.loc["jagg-w4-f0.6", "step_cost"] == pytest.approx(63 / 81)
    assert table.loc["exact", "step_cost"] == 1
    row = table.loc["causal-5"]
    assert row["kept_per_update_cost"] == pytest.approx((1 - row["loss"]) / 0.25)
    assert row["kept_per_step_cost"] == pytest.approx((1 - row["loss"]) * 81 / 36)
    assert pd.isna(row["measured_update_cost"])
    assert pd.isna(row["kept_per_measured_step_cost"])


def times_of(**seconds: list[float]) -> Cell:
    samples: dict[str, list[float | None]] = {f"{name.replace('_', '-')}_s": [*s] for name, s in seconds.items()}
    return Cell("eta=0.7/times", settings={"eta": 0.7, "batch": BATCH}, samples=samples)


def test_measured_costs_lie_on_a_line(gradients: Gradients) -> None:
    times = times_of(
        rollout=[2.0, 2.0, 90.0], reward=[1.0] * 3, exact=[10.0, 9.0, 30.0], causal_5=[4.0] * 3, causal_10=[6.0] * 3
    )
    table = signal(record_of(*cells_of(gradients), times)).set_index("estimator")
    # two seconds and 0.4 a pass; medians
    assert table.loc["causal-5", "measured_update_cost"] == pytest.approx(0.4)
    assert table.loc["jagg-w4-f0.6", "measured_update_cost"] == pytest.approx(0.76)
    assert table.loc["exact", "measured_update_cost"] == pytest.approx(1)
    assert table.loc["causal-5", "measured_step_cost"] == pytest.approx(7 / 13)
    row = table.loc["causal-5"]
    assert row["kept_per_measured_update_cost"] == pytest.approx((1 - row["loss"]) / 0.4)


@pytest.mark.parametrize("status", ["one point", "failed"])
def test_what_cannot_be_measured_is_empty(status: str, gradients: Gradients) -> None:
    times = times_of(rollout=[2.0], reward=[1.0], exact=[10.0], jagg_w4_f1=[7.0])
    if status == "failed":
        times = Cell("eta=0.7/times", "failed", "why", settings={"eta": 0.7})
    table = signal(record_of(*cells_of(gradients), times))
    assert table[["measured_update_cost", "measured_step_cost"]].isna().all(axis=None)


# Undefined


@pytest.fixture
def silent() -> Gradients:
    """Exact gradients whose mean cannot be told from zero."""
    return {name: draw(name, seed=5, signal=0.0) for name in ("exact", "jagg-w4-f1", "causal-5")}


def test_an_undefined_loss_is_an_empty_cell(silent: Gradients) -> None:
    record = record_of(*cells_of(silent))
    assert signal_loss(direct(silent["exact"], silent["causal-5"]), 8).value is None
    for name, frame in all_tables(record).items():
        text = frame.to_csv(index=False)
        assert not [word for word in ("nan", "NaN", "None", "inf") if word in text], name
    table = signal(record)
    for column in ("loss", "loss_low", "loss_high", "bias2", "samples_to_tell", "kept_per_update_cost"):
        assert table[column].isna().all(), column
    assert set(table["verdict"]) == {"cannot be told apart"}
    assert by_batch(record)["loss"].isna().all()
    assert table["signal"].notna().all()
    shown = printable(other_tables(record, []) | all_tables(record))
    assert set(shown["signal"]["loss in the update"]) == {"undefined"}
    assert set(shown["signal"]["samples to tell"]) == {""}
    assert set(shown["signal_cost"]["signal kept per cost of the update, passes"]) == {""}


def test_batches_without_a_gradient_are_counted(gradients: Gradients) -> None:
    gradients["causal-5"][3] = 0
    table = signal(record_of(*cells_of(gradients))).set_index("estimator")
    assert table["undefined"].to_dict() == {name: int(name == "causal-5") for name in gradients}


# Other sizes, other centrings, the noise


def test_loss_by_samples_per_update(gradients: Gradients) -> None:
    gradients["jagg-w4-f0.4"] = draw("jagg-w4-f0.4")
    table = by_batch(record_of(*cells_of(gradients)))
    assert set(table["estimator"]) == {"jagg-w4-f0.6", "jagg-w4-f1", "causal-5", "causal-predicted-5"}
    for name, part in table.groupby("estimator"):
        assert part["update_samples"].tolist() == list(UPDATE_SAMPLES)
        found = direct(gradients["exact"], gradients[str(name)])
        for _, row in part.iterrows():
            assert same(row, "loss", signal_loss(found, row["update_samples"] / BATCH))
    lost = table[table["estimator"] == "jagg-w4-f1"]["loss"]
    assert lost.is_monotonic_increasing


def test_every_centring_of_those_that_are_watched() -> None:
    names = ("exact", "jagg-w4-f1", "causal-5")
    sets = {c: {name: draw(name, seed, bias=0.2 * seed)[:6] for name in names} for seed, c in enumerate(CENTRINGS)}
    unwatched = cell_of("subsample-5", draw("subsample-5")[:6], draw("exact")[:6])
    record = record_of(unwatched, *(cell for under, own in sets.items() for cell in cells_of(own, under)))
    table = centring(record).set_index(["centring", "estimator"])
    assert set(table.index) == {(c, name) for c in CENTRINGS for name in names}
    for (under, name), row in table.iterrows():  # type: ignore[misc]
        found = direct(sets[under]["exact"], sets[under][name])
        if under == "ones":
            test = leak_test(found.own)
            assert same(row, "share", test.share)
            assert (row["p_value"], row["p_text"], row["n"]) == (test.p_value, test.p_text, 6)
            assert row[["difference", "bias2", "signal"]].isna().all()
        elif name == "exact":
            assert same(row, "signal", mean_interval(signal_samples(found), "cosine"))
            assert row[["difference", "bias2", "share"]].isna().all()
        else:
            assert same(row, "difference", paired_difference(found))
            assert same(row, "bias2", bias_interval(found))
            assert row[["share", "p_value", "signal"]].isna().all()


def test_the_noise_of_exact(gradients: Gradients) -> None:
    [row] = noise(record_of(*cells_of(gradients))).to_dict("records")
    exact = gradients["exact"] @ gradients["exact"].T
    assert (row["eta"], row["batches"], row["samples_per_batch"]) == (0.7, N, BATCH)
    assert same(row, "signal", mean_interval(signal_samples(Products(exact, exact, exact)), "cosine"))
    assert row["effective_dimension"] == pytest.approx(effective_dimension(exact))


def test_all_tables_are_those(gradients: Gradients) -> None:
    record = record_of(*cells_of(gradients), *cells_of(gradients, "ones"))
    found = all_tables(record)
    assert list(found) == ["signal", "by_batch", "centring", "noise", "pairs"]
    for name, frame in found.items():
        pd.testing.assert_frame_equal(frame, getattr(signal_tables, name)(record))


# What is recommended


def row_of(
    estimator: str,
    family: str,
    passes: int,
    loss: tuple[float, float, float] | None,
    told: int | None = None,
    samples: int = 192,
) -> dict[str, Any]:
    value, low, high = loss or (None, None, None)
    said = verdict(Interval(value, low, high, 24), 0.05)
    row = {"eta": 0.7, "estimator": estimator, "label": estimator.upper(), "family": family, "passes": passes}
    row |= {"loss": value, "loss_low": low, "loss_high": high, "verdict": said}
    return row | {"samples": samples, "samples_to_tell": told, "n": 24}


EXACT = row_of("exact", "exact", 20, (0.0, 0.0, 0.0))
KEPT, LOST, OPEN = (0.01, -0.01, 0.03), (0.2, 0.1, 0.3), (0.02, -0.1, 0.14)
KEPT_TEXT = "loss 1.0% [-1.0%, 3.0%], n = 24"
WHERE = "eta 0.7, at most 5% of the learning signal lost in an update of 64 samples (reward ink): "


def recommended(*rows: dict[str, Any]) -> tuple[str, str | None]:
    paper = [row["estimator"] for row in rows if row["family"] == "jagg"]
    about = {"eta": 0.7, "family": "jagg", "centring": PER_PROMPT}
    cells = [Cell(name, settings={**about, "window": int(name.split("-")[1][1:])}) for name in paper]
    text, estimator = recommend_signal(record_of(*cells), pd.DataFrame([EXACT, *rows]))
    assert text.startswith(WHERE)
    assert text.endswith(".")
    assert "nan" not in text
    return text.removeprefix(WHERE), estimator


def test_the_fewest_passes_that_keep_the_signal() -> None:
    text, estimator = recommended(
        row_of("jagg-w4-f1", "jagg", 10, LOST),
        row_of("jagg-w4-f0.6", "jagg", 14, KEPT),
        row_of("jagg-w8-f0.5", "jagg", 14, LOST),
        row_of("causal-8", "causal", 8, KEPT),
        row_of("causal-5", "causal", 5, KEPT),
        row_of("causal-3", "causal", 3, OPEN, 900),
        row_of("causal-2", "causal", 2, LOST),
        row_of("subsample-2", "subsample", 2, LOST),
    )
    assert estimator == "causal-5"
    assert text == (
        "run 'CAUSAL-5', 5 of 20 passes (loss 1.0% [-1.0%, 3.0%], n = 24); the paper's rule needs 14 (JAGG-W4-F0.6: "
        "loss 1.0% [-1.0%, 3.0%], n = 24), judged at W = 4, 8; "
        "no method that trains on a subset of the steps is shown to keep it."
    )


def test_a_plan_behind_one_that_does_not_keep_it_is_not_looked_at() -> None:
    rows = [row_of("causal-8", "causal", 8, KEPT), row_of("causal-5", "causal", 5, OPEN, 900)]
    assert recommended(*rows, row_of("causal-3", "causal", 3, KEPT))[1] == "causal-8"


def test_few_batches_are_no_claim() -> None:
    row = row_of("causal-5", "causal", 5, KEPT) | {"verdict": TOO_FEW, "n": 4}
    assert recommended(row) == ("no claim, n = 4 batches; at least 8 are needed.", None)
    assert verdict(Interval(0.0, -0.01, 0.01, 7), 0.05) == said_of_difference(Interval(0.1, 0.05, 0.2, 7)) == TOO_FEW


def test_predicted_knots_may_be_recommended() -> None:
    rows = row_of("causal-8", "causal", 8, KEPT), row_of("causal-predicted-5", "causal-predicted", 5, KEPT)
    assert recommended(*rows)[1] == "causal-predicted-5"


def test_what_looks_ahead_is_not_recommended() -> None:
    text, estimator = recommended(
        row_of("spline-2", "spline", 2, KEPT),
        row_of("jagg-w20-f1", "jagg", 2, KEPT),
        row_of("causal-5", "causal", 5, KEPT),
    )
    assert estimator == "causal-5"
    assert "the paper's rule needs 2 (JAGG-W20-F1: loss" in text


def test_the_best_rival_is_named() -> None:
    rows = [row_of("causal-5", "causal", 5, KEPT), row_of("low-noise-half", "half", 10, KEPT)]
    assert recommended(*rows)[0].endswith(f"; of the rivals 'LOW-NOISE-HALF' keeps it with 10 passes ({KEPT_TEXT}).")
    rows.append(row_of("mixgrpo", "window", 4, KEPT))
    assert recommended(*rows)[0].endswith(f"; of the rivals 'MIXGRPO' keeps it with 4 passes ({KEPT_TEXT}).")
    assert "paper" not in recommended(*rows)[0]


def test_too_few_samples_to_tell_say_how_many_would() -> None:
    text, estimator = recommended(
        row_of("causal-8", "causal", 8, OPEN, 1200, samples=128),
        row_of("causal-5", "causal", 5, OPEN, 800),
        row_of("causal-3", "causal", 3, LOST, 10),
        row_of("jagg-w4-f1", "jagg", 10, OPEN, 5),
    )
    assert estimator is None
    assert text == (
        "cannot be told with 192 samples; about 800 would tell it of 'CAUSAL-5' (loss 2.0% [-10.0%, 14.0%], n = 24)."
    )


def test_nothing_keeps_the_signal() -> None:
    for rows in ([row_of("causal-5", "causal", 5, LOST)], [], [row_of("causal-5", "causal", 5, OPEN)]):
        assert recommended(*rows) == ("none of the causal plans that were measured.", None)


def test_a_signal_that_cannot_be_told_from_zero() -> None:
    rows = [row_of("causal-5", "causal", 5, None), row_of("jagg-w4-f1", "jagg", 10, None)]
    text, estimator = recommended(*rows)
    assert estimator is None
    assert text == "the signal itself cannot be told from zero with 192 samples; take more of them."


def fractions(*losses: tuple[float, float, float] | None, names: range = range(1, 6)) -> Any:
    rows = [row_of(f"jagg-w4-f{r / 5:g}", "jagg", 20 - 2 * r, loss) for r, loss in zip(names, losses, strict=True)]
    return frac_by_signal(record_of(), pd.DataFrame(rows), 4)


def test_the_fraction_that_keeps_the_signal() -> None:
    assert fractions(KEPT, KEPT, KEPT, LOST, LOST) == {"jagg_frac": 0.6, "low": 0.6, "high": 0.6}
    assert fractions(KEPT, OPEN, (0.06, 0.04, 0.2), LOST, LOST) == {"jagg_frac": 0.4, "low": 0.2, "high": 0.6}
    assert fractions(LOST, KEPT, KEPT, KEPT, KEPT) == {"jagg_frac": 0, "low": 0, "high": 0}, "leading groups only"
    assert fractions(KEPT, KEPT, KEPT, KEPT, KEPT) == {"jagg_frac": 1, "low": 1, "high": 1}
    assert fractions((0.05, 0.05, 0.05), LOST, LOST, LOST, LOST) == {"jagg_frac": 0.2, "low": 0.2, "high": 0.2}


def test_without_a_defined_loss_there_is_no_fraction() -> None:
    assert fractions(KEPT, None, KEPT, KEPT, KEPT) is None
    assert fractions(KEPT, KEPT, names=range(1, 3)) is None, "not every fraction was measured"
    assert frac_by_signal(record_of(), pd.DataFrame(), 4) is None


# Together


def test_the_calibration_file_and_the_page_say_the_same(gradients: Gradients) -> None:
    knots = {"causal": {"5": {"knots": [0, 4, 9, 14, 18], "cosine": 0.99}}, "spline": {}}
    about = {"transition": "DanceSDE(eta=0.7)", "timestep_mode": "float", "signature": {}}
    record = record_of(
        Cell("eta=0.7/knots", settings={"eta": 0.7}, values={**knots, **about}),
        *cells_of(gradients),
        max_signal_loss=0.3,
    )
    frames = other_tables(record, []) | all_tables(record)
    data = plain(calibration(record, 0.7, frames))
    found = data["recommended"]["signal loss <= 0.3"]
    assert [found[key] for key in ("family", "passes", "knots")] == ["causal", 5, [0, 4, 9, 14, 18]]
    assert found["text"] in findings(record, frames)
    loss = data["plans"]["causal"]["5"]["signal_loss"]
    expected = signal_loss(direct(gradients["exact"], gradients["causal-5"]), 8).value
    assert loss["value"] == pytest.approx(expected, rel=1e-5)
    assert data["plans"]["causal"]["5"]["predicted"]["signal_loss"]["value"] is not None


# One plan beside another


def test_every_pair_of_plans_once_the_cheaper_one_first(gradients: Gradients) -> None:
    table = pairs(record_of(*cells_of(gradients)))
    found = list(zip(table["plan_name"], table["beside_name"], strict=True))
    names = ["causal-5", "causal-predicted-5", "jagg-w4-f1", "jagg-w4-f0.6"]
    assert found == [(one, other) for n, one in enumerate(names) for other in names[n + 1 :]]
    row = table.set_index(["plan_name", "beside_name"]).loc[("causal-5", "jagg-w4-f1")]
    one, other = (direct(gradients["exact"], gradients[name]) for name in ("causal-5", "jagg-w4-f1"))
    assert same(row, "difference", kept_difference(one, other, 8))
    assert (row["verdict"], row["samples"]) == ("keeps more", N * BATCH)
    assert pd.isna(row["more_samples"]), "it is told already"


def test_what_cannot_be_told_says_how_many_more_samples_would(gradients: Gradients) -> None:
    table = pairs(record_of(*cells_of(gradients))).set_index(["plan_name", "beside_name"])
    row = table.loc[("causal-5", "jagg-w4-f0.6")]
    interval = Interval(row["difference"], row["difference_low"], row["difference_high"], N)
    assert row["verdict"] == UNTOLD
    assert row["more_samples"] == ((batches_to_tell(interval, 0.0, N) or 0) - N) * BATCH > 0


def test_plans_at_different_eta_are_not_compared(gradients: Gradients) -> None:
    cells = [*cells_of(gradients), *cells_of(gradients, eta=0.3)]
    table = pairs(record_of(*cells, etas=(0.7, 0.3)))
    assert table["eta"].value_counts().to_dict() == {0.7: 6, 0.3: 6}


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.01, 0.2, "keeps more"), (-0.2, -0.01, "keeps less"), (-0.1, 0.1, UNTOLD), (None, None, UNTOLD)],
)
def test_words_of_a_difference(low: float | None, high: float | None, said: str) -> None:
    assert said_of_difference(Interval(0.0, low, high, 9)) == said


def test_the_page_answers_whether_a_plan_is_better_and_what_would_tell(gradients: Gradients) -> None:
    record = record_of(*cells_of(gradients))
    frames = other_tables(record, []) | all_tables(record)
    said = [text for text in findings(record, frames) if "beside the paper's recipe" in text]
    assert len(said) == 2
    row = frames["pairs"].set_index(["plan_name", "beside_name"]).loc[("causal-5", "jagg-w4-f0.6")]
    assert "in an update of 64 samples: which is better cannot be told with 96 samples; " in said[0]
    assert f"; about {int(row['more_samples'])} more would tell; " in said[0]
    assert printable(frames)["pairs"]["the plan"].tolist() == frames["pairs"]["verdict"].tolist()


def test_a_difference_that_is_told_and_one_that_is_undefined(gradients: Gradients) -> None:
    better = gradients | {"jagg-w4-f0.6": draw("jagg-w4-f0.6", bias=0.9)}
    record = record_of(*cells_of(better))
    [text, _] = [t for t in findings(record, other_tables(record, []) | all_tables(record)) if "beside the paper" in t]
    assert "it keeps more of the signal; difference in the share of the signal that is kept 0." in text
    nothing = {name: draw(name, signal=0.0) for name in ("exact", "jagg-w4-f0.6", "causal-5")}
    record = record_of(*cells_of(nothing))
    [text] = [t for t in findings(record, other_tables(record, []) | all_tables(record)) if "beside the paper" in t]
    assert text.endswith("undefined, as the signal cannot be told from zero with 96 samples; take more of them.")


def test_undefined_differences_share_a_line() -> None:
    names = ("exact", "jagg-w4-f0.6", "jagg-w4-f1", "causal-5", "causal-predicted-5")
    nothing = {name: draw(name, signal=0.0) for name in names}
    record = record_of(*cells_of(nothing))
    frames = other_tables(record, []) | all_tables(record)
    assert len(frames["pairs"]) == 6
    assert frames["pairs"]["difference"].isna().all()
    [text] = [text for text in findings(record, frames) if "beside the paper" in text]
    named = "2 plans ('causal-5 <label>' (5 passes), 'causal-predicted-5 <label>' (5 passes))"
    assert text == (
        f"eta 0.7, {named} beside the paper's recipe (14 passes) in an update of 64 samples: undefined, as the signal "
        "cannot be told from zero with 96 samples; take more of them."
    )
    [row] = printable(frames)["pairs"].to_dict("records")
    assert (row["plan"], row["difference in share kept"], row["samples"]) == ("6 pairs of plans", "undefined", 96)


def test_defined_differences_keep_their_rows_beside_undefined_ones(gradients: Gradients) -> None:
    record = record_of(*cells_of(gradients))
    frames = other_tables(record, []) | all_tables(record)
    before = printable(frames)["pairs"]
    frames["pairs"].loc[[0, 1], ["difference", "difference_low", "difference_high"]] = None
    found = printable(frames)["pairs"]
    merged = found[found["plan"].str.endswith("pairs of plans")]
    samples = frames["pairs"]["samples"].iloc[:2]
    assert len(merged) == samples.nunique()
    assert found.iloc[: -len(merged)].astype(str).to_numpy().tolist() == before.iloc[2:].astype(str).to_numpy().tolist()
