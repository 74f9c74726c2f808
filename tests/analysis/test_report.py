"""Tables, sentences and figures from records made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.report import figures
from analysis.report.fidelity import tables
from analysis.report.fidelity.printable import interval_text, printable
from analysis.report.fidelity.sentences import findings
from analysis.report.write import named_folder, write_report
from analysis.statistics.names import METRICS, families, family_style
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError


def record_of(*cells: Cell, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "kind": "reproduce",
        "command": ["python", "-m", "analysis"],
        "backbone": "stub",
        "settings": {"windows": [3], "etas": [0.7], "jagg_frac": 0.5, "threshold": 0.9},
        "seeds": {},
        "schedule": [1.0, 0.9, 0.8, 0.6, 0.4, 0.2],
        "environment": {},
        "cells": list(cells),
    }
    return Record(**{**fields, **changes})


def judged(name: str, family: str, passes: int, cosines: list[float | None], headline: bool = True) -> Cell:
    settings = {"eta": 0.7, "estimator": name, "label": f"{name} <label>", "family": family, "passes": passes}
    samples = {metric: list(cosines) for metric in METRICS}
    for group in range(2):
        samples |= {f"w3.group{group}.{metric}": list(cosines) for metric in METRICS}
    window = {"window": 3, "jagg_frac": 1.0} if family == "jagg" else {"knots": list(range(passes))}
    return Cell(
        f"eta=0.7/{name}",
        settings={**settings, "anticipating": family == "jagg", "headline": headline, **window},
        samples=samples,
    )


def speed_record(**seconds: list[float]) -> Record:
    """A record of arms by their total seconds; underscores in names become dashes."""
    cells = [
        Cell(name.replace("_", "-"), samples={"total_s": values}, values={"passes": 3})
        for name, values in seconds.items()
    ]
    return record_of(*cells, kind="group-speed", settings={"window": 3, "batch": 2})


# Tables


def test_undefined_batches_are_counted_and_left_out() -> None:
    record = record_of(judged("jagg-w3-f1", "jagg", 4, [0.9, None, 0.8]))
    [row] = tables.whole_update(record).to_dict("records")
    assert (row["cosine"], row["n"]) == (pytest.approx(0.85), 2)
    groups = tables.per_group(record)
    assert groups["undefined"].tolist() == [1, 1]
    assert groups["group"].tolist() == [0, 1]
    assert groups["sigma_first"].tolist() == [1.0, 0.6]
    assert groups["sigma_last"].tolist() == [0.8, 0.2]


def test_only_the_headline_is_in_the_main_table() -> None:
    record = record_of(
        judged("causal-4", "causal", 4, [0.9, 0.9]), judged("causal-3", "causal", 3, [0.8, 0.8], headline=False)
    )
    assert tables.whole_update(record)["estimator"].tolist() == ["causal-4"]
    assert tables.pareto(record)["estimator"].tolist() == ["causal-3", "causal-4"]


def test_the_best_of_a_family_at_its_passes() -> None:
    record = record_of(
        judged("jagg-w3-f1", "jagg", 4, [0.9, 0.9]),
        judged("jagg-w4-f1", "jagg", 4, [0.95, 0.95]),
        judged("jagg-w5-f1", "jagg", 5, [0.8, 0.8]),
        judged("causal-4", "causal", 4, [0.7, 0.7]),
    )
    front = tables.pareto(record).set_index("estimator")["best"]
    assert front.to_dict() == {"jagg-w3-f1": False, "jagg-w4-f1": True, "jagg-w5-f1": True, "causal-4": True}


def test_what_failed_is_in_no_table_but_its_own() -> None:
    spoilt = judged("causal-4", "causal", 4, [0.9, 0.9])
    spoilt.status, spoilt.reason = "failed", "why"
    record = record_of(spoilt, Cell("knots", "skipped", "not needed"))
    found = tables.all_tables(record, [])
    assert [name for name, frame in found.items() if len(frame)] == ["failures"]
    assert found["failures"]["status"].tolist() == ["failed", "skipped"]
    assert found["failures"]["reason"].tolist() == ["why", "not needed"]


def test_speed_is_a_ratio_of_medians_to_exact() -> None:
    record = speed_record(exact=[2.0, 2.2, 2.1], paper_joint=[1.0, 1.1, 1.05])
    table = tables.speed([record]).set_index("arm")
    assert table.loc["exact", "speed_up"] == 1
    assert table.loc["paper-joint", "speed_up"] == pytest.approx(2)
    assert table.loc["paper-joint", "total_s"] == 1.05
    assert table["n"].tolist() == [3, 3]
    assert pd.isna(table.loc["exact", "forward_s"])


def test_without_exact_there_is_no_speed() -> None:
    assert len(tables.speed([speed_record(paper_joint=[1.0, 1.1])])) == 0


# Text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.99123, 0.98, 0.995, "0.991 [0.980, 0.995]"),
        (0.5, None, None, "0.500"),
        (None, None, None, "undefined"),
        (float("nan"), float("nan"), float("nan"), "undefined"),
    ],
)
def test_intervals_as_text(value: float | None, low: float | None, high: float | None, text: str) -> None:
    assert interval_text({"x": value, "x_low": low, "x_high": high}, "x") == text


def test_the_engine_is_compared_with_its_bare_calls() -> None:
    frames = tables.all_tables(record_of(), [speed_record(exact=[1.1, 1.1], exact_bare=[1.0, 1.0])])
    [text] = findings(record_of(), frames)
    assert text.endswith("Engine over its bare model calls, fastest rounds: +10.0 %.")


def test_where_causal_is_below_is_said_once() -> None:
    record = record_of(
        judged("jagg-w3-f1", "jagg", 4, [0.9, 0.9]),
        judged("jagg-w3-f0.5", "jagg", 4, [0.9, 0.9]),  # another fraction, the same plan
        judged("causal-4", "causal", 4, [0.8, 0.8]),
    )
    said = findings(record, tables.all_tables(record, []))
    assert [text for text in said if text.endswith("causal's mean cosine is lower at 4 passes.")]


def test_where_causal_is_nowhere_below() -> None:
    record = record_of(
        judged("jagg-w3-f0.5", "jagg", 4, [0.9, 0.9]),
        judged("causal-4", "causal", 4, [0.9, 0.9]),
    )
    said = findings(record, tables.all_tables(record, []))
    assert [
        text for text in said if text.endswith("(4 to 4), causal's mean cosine is at least as high at all of them.")
    ]


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ((), ""),
        ((4,), "W = 4"),
        ((5, 4), "W = 4, 5"),
        ((5, 3, 4), "W = 3 to 5"),
        ((20, 3, 4, 5, 8, 9), "W = 3 to 5, 8, 9, 20"),
    ],
)
def test_windows_of_the_paper_s_rule_are_named(windows: tuple[int, ...], text: str) -> None:
    cells = [judged(f"jagg-w{window}-f1", "jagg", 4, [0.9, 0.9], headline=False) for window in windows]
    for cell, window in zip(cells, windows, strict=True):
        cell.settings["window"] = window
    leak = Cell("eta=0.7/leak/jagg", settings={"eta": 0.7, "family": "jagg", "window": 7})
    failed = Cell("failed", "failed", "why", settings={"eta": 0.7, "family": "jagg", "window": 6, "headline": True})
    signal = Cell("signal", settings={"eta": 0.7, "family": "jagg", "window": 10, "centring": "per prompt"})
    record = record_of(*cells, leak, failed, signal, judged("causal-4", "causal", 4, [0.9, 0.9]))
    assert tables.windows_of_paper(record, 0.7) == text
    assert tables.windows_of_paper(record, 0.3) == ""
    assert tables.windows_of_paper(record, 0.7, "per prompt") == "W = 10"


def test_the_best_window_is_of_those_that_are_named() -> None:
    record = record_of(
        judged("jagg-w3-f0.5", "jagg", 4, [0.9, 0.9]),
        judged("causal-4", "causal", 4, [0.9, 0.9]),
    )
    said = findings(record, tables.all_tables(record, []))
    where = "against the paper's rule with its best fraction and window of W = 3 at the same number of passes"
    assert [text for text in said if where in text]


def test_the_lines_of_the_page_name_the_run_as_its_command_did() -> None:
    command = ["python", "-m", "analysis", "calibrate", "--out", "results/mine"]
    assert named_folder(record_of(command=command), Path("/elsewhere")) == Path("results/mine")
    assert named_folder(record_of(command=command[:4]), Path("results/stub")) == Path("results/stub")


def test_a_quick_run_says_so_first() -> None:
    record = record_of(judged("causal-4", "causal", 4, [0.9] * 8))
    record.settings["quick"] = True
    assert findings(record, tables.all_tables(record, []))[0].startswith("Quick run, not for use")


def test_every_printed_table_of_intervals_has_its_number() -> None:
    record = record_of(judged("jagg-w3-f1", "jagg", 4, [0.9] * 8), judged("causal-4", "causal", 4, [0.9] * 7 + [None]))
    shown = printable(tables.all_tables(record, []))
    assert sorted(shown["whole_update"]["n"]) == [7, 8]
    assert sorted(set(shown["per_group"]["n"])) == ["7", "8"]
    assert (shown["routing"]["n"] == 8).all()


def test_nothing_measured_is_nothing_said() -> None:
    frames = tables.all_tables(record_of(), [])
    assert findings(record_of(), frames) == []
    assert printable(frames) == {}


# Figures


def test_exact_plans_do_not_stretch_the_logarithmic_axis() -> None:
    cells = [
        judged("jagg-w3-f1", "jagg", 6, [1.0, 1.0 - 1e-16]),
        judged("jagg-w3-f0.5", "jagg", 6, [1.0, 1.0]),
        judged("causal-6", "causal", 6, [1.0, 1.0]),
    ]
    for more in ([], [judged("causal-4", "causal", 4, [0.98, 0.99])]):
        table = tables.pareto(record_of(*cells, *more))
        figure = figures.pareto_front(table, "jagg-w3-f0.5")
        [axes] = figure.axes
        figure.draw_without_rendering()
        assert axes.get_yscale() == "log"
        assert axes.get_ylim()[0] > 1e-6
        drawn = [line for line in axes.lines if len(line.get_xdata())]  # type: ignore[arg-type]
        assert len(drawn) == len(more)


@pytest.mark.parametrize("missing", ["jagg-w3-f1", "causal-4", "endpoint-w3-f1"])
def test_a_line_per_family_that_has_a_cell(missing: str) -> None:
    cells = [
        judged("jagg-w3-f1", "jagg", 4, [0.9, 0.8]),
        judged("endpoint-w3-f1", "endpoint", 4, [0.7, 0.8]),
        judged("causal-4", "causal", 4, [0.95, 0.96]),
        judged("causal-3", "causal", 3, [0.85, 0.86]),
    ]
    kept = [c for c in cells if c.settings["estimator"] != missing]
    figure = figures.cosine_per_group(tables.per_group(record_of(*kept)), 3)
    [axes] = figure.axes
    assert axes.get_title() == "eta 0.7: 4 passes, W = 3"
    assert len(axes.lines) == 2
    for line in axes.lines:
        assert list(line.get_xdata()) == [0, 1]  # type: ignore[arg-type]


def test_every_family_looks_different_in_black_and_white() -> None:
    looks = [(marker, line) for _, marker, line in map(family_style, families())]
    assert len(set(looks)) == len(looks)


def test_the_same_figure_is_the_same_file() -> None:
    record = record_of(judged("jagg-w3-f1", "jagg", 4, [0.9, 0.8]))
    first, second = (figures.rendered(figures.cosine_per_group(tables.per_group(record), 3)) for _ in range(2))
    assert first == second
    assert first["png"].startswith(b"\x89PNG")
    assert b"<svg" in first["svg"]
    assert b"<dc:date>" not in first["svg"]


# Refusals


def test_a_folder_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no record\.json: is it the folder of a finished run\?"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["record.json", "speed-stub.json"])
def test_a_damaged_record(name: str, tmp_path: Path) -> None:
    record_of().write(tmp_path / "record.json")
    (tmp_path / name).write_text('{"kind": "repr')
    with pytest.raises(RecordError, match=f"{name}: not JSON, perhaps truncated"):
        write_report(tmp_path)
