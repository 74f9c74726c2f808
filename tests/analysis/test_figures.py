"""Figures of the calibration from small tables made by hand: they draw without a warning, whatever is undefined."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.report import figures
from analysis.report.fidelity.signal_figures import loss_by_batch, signal_per_cost
from analysis.report.figures import block_heat_map, knot_placement, past_and_future
from analysis.statistics.names import families, family_label, family_style

SCHEDULE = [1.0, 0.9, 0.75, 0.5]
FAMILIES = ("exact", "jagg", "spline", "causal", "causal-predicted", "subsample", "window", "half")
Change = Callable[[pd.DataFrame], pd.DataFrame]


def cross(etas: tuple[float, ...] = (0.7, 0.3)) -> pd.DataFrame:
    rows = [
        {"eta": eta, "knot": i, "step": j, "cosine": 1 - 0.2 * abs(i - j) if abs(i - j) < 3 else None}
        for eta in etas
        for i in range(4)
        for j in range(4)
    ]
    return pd.DataFrame(rows)


def knots() -> pd.DataFrame:
    found = {1: "0", 2: "0 2", 3: "0 2 3", 4: "0 1 2 3"}
    rows = [
        {"eta": eta, "family": family, "passes": passes, "knots": text, "cosine": 0.9}
        for eta in (0.7, 0.3)
        for family in ("causal", "spline")
        for passes, text in found.items()
    ]
    return pd.DataFrame(rows)


def blocks() -> pd.DataFrame:
    rows = [
        {
            "eta": eta,
            "label": f"{family} {passes}",
            "family": family,
            "passes": passes,
            "block": block,
            "cosine": cosine,
        }
        for eta in (0.7, 0.3)
        for family, passes in (("jagg", 3), ("causal", 3), ("causal", 2), ("endpoint", 3))
        for block, cosine in (("MLP", 0.99), ("attention", 0.2), ("embedders", 1.0), ("other", -0.5))
    ]
    return pd.DataFrame(rows)


def losses() -> dict[str, float]:
    return {"loss": 0.02, "loss_low": -0.01, "loss_high": 0.06}


def signal() -> pd.DataFrame:
    rows = [
        {"eta": eta, "family": family, "label": family, "update_cost": 1 / n, "step_cost": 1.2 / (n + 0.2), **losses()}
        for eta in (0.7, 0.3)
        for n, family in enumerate(FAMILIES, start=1)
    ]
    return pd.DataFrame(rows)


def sizes() -> pd.DataFrame:
    rows = [
        {
            "eta": eta,
            "family": family,
            "estimator": f"{family}-5",
            "passes": 5,
            "label": f"{family} {eta}",
            "update_samples": size,
            **losses(),
        }
        for eta in (0.7, 0.3)
        for family in ("jagg", "causal", "causal-predicted")
        for size in (8, 64, 512)
    ]
    return pd.DataFrame(rows)


FIGURES: dict[str, Callable[[Change], Figure]] = {
    "past_and_future": lambda change: past_and_future(change(cross())),
    "knot_placement": lambda change: knot_placement(change(knots()), SCHEDULE),
    "block_heat_map": lambda change: block_heat_map(change(blocks())),
    "signal_per_cost": lambda change: signal_per_cost(change(signal()), 64),
    "loss_by_batch": lambda change: loss_by_batch(change(sizes()), 0.05),
}


def undefined(table: pd.DataFrame) -> pd.DataFrame:
    """Nothing that was measured has a value, as `pandas` makes it of a record's None."""
    columns = [c for c in ("loss", "loss_low", "loss_high", "cosine") if c in table]
    return table.assign(**dict.fromkeys(columns, None))


def partly(table: pd.DataFrame) -> pd.DataFrame:
    """The first value is missing."""
    columns = [c for c in ("loss", "loss_low", "loss_high", "cosine") if c in table]
    table = table.copy()
    table.loc[table.index[0], columns] = np.nan
    return table


CHANGES: dict[str, Change] = {
    "whole": lambda table: table,
    "one eta": lambda table: table[table["eta"] == 0.7],
    "partly": partly,
    "undefined": undefined,
}


def drawn(figure: Figure) -> list[str]:
    """The texts of the figure as it is drawn, which SVG has in comments; warnings are errors here."""
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return re.findall(r"<!-- (.*?) -->", file.getvalue())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FIGURES)
def test_it_draws(name: str, change: str) -> None:
    texts = drawn(FIGURES[name](CHANGES[change]))
    assert len(texts) > 5
    assert not [text for text in texts if "nan" in text]
    assert any("eta 0.7" in text for text in texts) != (name == "signal_per_cost")
    assert plt.get_fignums() == []


@pytest.mark.parametrize("name", [n for n in FIGURES if n != "block_heat_map"])
def test_axes_say_what_they_are(name: str) -> None:
    figure = FIGURES[name](lambda t: t)
    panels = figure.axes[:2]
    assert all(axes.get_xlabel() for axes in panels)
    assert figure.axes[0].get_ylabel()
    if name != "signal_per_cost":
        assert [axes.get_title() for axes in panels] == ["eta 0.7", "eta 0.3"]


def test_the_past_is_below_the_diagonal() -> None:
    table = cross((0.7,))
    table["cosine"] = [0.9 if step > knot else 0.1 for knot, step in zip(table["knot"], table["step"], strict=True)]
    [image] = past_and_future(table).axes[0].get_images()
    shown: Any = image.get_array()
    # rows are steps, columns are knots: a knot before the step is the past
    assert shown[3, 0] == 0.9
    assert shown[0, 3] == 0.1


def test_knots_lie_at_their_sigmas() -> None:
    figure = knot_placement(knots(), SCHEDULE)
    for axes in figure.axes:
        lines = {line.get_ydata()[0]: list(line.get_xdata()) for line in axes.lines}  # type: ignore[index, arg-type]
        assert lines == {1: [1.0], 2: [1.0, 0.75], 3: [1.0, 0.75, 0.5], 0: SCHEDULE}
        low, high = axes.get_xlim()
        assert low > high, "time runs to the right, and sigma falls"


def test_blocks_of_what_can_be_chosen_at_the_highest_eta() -> None:
    [axes] = block_heat_map(blocks()).axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["attention", "MLP", "embedders", "other"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["causal 3", "jagg 3", "causal 2"]
    assert [t.get_text() for t in axes.texts[:4]] == ["0.2000", "0.9900", "1.0000", "-0.5000"]
    assert "eta 0.7" in axes.get_title()


def test_the_share_that_is_kept_against_both_costs() -> None:
    figure = signal_per_cost(signal(), 64)
    assert [axes.get_xlabel().split(" (")[0] for axes in figure.axes] == [
        "cost of the update",
        "cost of the training step with its rollout",
    ]
    assert "64 samples" in figure.axes[0].get_ylabel()
    for axes in figure.axes:
        assert len(axes.containers) == len(FAMILIES)
        for family, bars in zip(FAMILIES, axes.containers, strict=True):
            assert bars.get_label() == family_label(family)
            points, _, [spread] = bars.lines  # type: ignore[attr-defined]
            assert points.get_ydata()[0] == pytest.approx(0.98)
            low, high = spread.get_segments()[0][:, 1]
            assert (low, high) == (pytest.approx(0.94), pytest.approx(1.01))


def test_a_loss_outside_its_interval_is_drawn() -> None:
    """The percentile bootstrap of a ratio allows it."""
    outside = {"loss_low": [0.03] * 16, "loss_high": [0.06] * 16}
    figure = signal_per_cost(signal().assign(**outside), 64)
    [spread] = figure.axes[0].containers[0].lines[2]  # type: ignore[attr-defined]
    assert spread.get_segments()[0][:, 1].tolist() == pytest.approx([0.94, 0.98])


def test_the_loss_that_is_allowed_is_dashed() -> None:
    for axes in loss_by_batch(sizes(), 0.05).axes:
        assert axes.get_xscale() == "log"
        dashed = [line for line in axes.lines if line.get_linestyle() == "--" and line.get_color() == "black"]
        assert [list(line.get_ydata()) for line in dashed] == [[0.05, 0.05]]  # type: ignore[arg-type]
        # predicted knots would lie on the others
        assert len(axes.lines) == 3
        for line in axes.lines[:2]:
            assert list(line.get_xdata()) == [8, 64, 512]  # type: ignore[arg-type]


def test_every_family_has_a_style_and_a_name() -> None:
    assert set(FAMILIES) <= set(families())
    assert len({*map(family_label, families())}) == len({*map(family_style, families())}) == len(families())


@pytest.mark.parametrize(
    ("name", "passes", "label"),
    [
        ("paper-joint", 14, "paper JAGG (joint backward)"),
        ("paper", 14, "paper JAGG (joint backward)"),
        ("causal-8-batched", 8, "causal, 8 passes, batched"),
        ("causal-12-sequential", 12, "causal, 12 passes, sequential"),
        ("unknown", 3, "unknown"),
    ],
)
def test_labels_of_arms(name: str, passes: int, label: str) -> None:
    table = pd.DataFrame([{"arm": name, "passes": passes}])
    assert figures.arm_labels(table) == [label]


def test_bars_of_the_leak_start_at_zero_and_can_be_told_apart_in_grey() -> None:
    rows = [
        {"label": "causal", "share": 0.1, "p_text": "p = 0.88", "anticipating": False, "n": 8},
        {"label": "jagg", "share": 2.0, "p_text": "p <= 0.0078", "anticipating": True, "n": 8},
    ]
    table = pd.DataFrame(rows)
    figure = figures.leak_bars(table.assign(share_low=table["share"] / 2, share_high=table["share"] * 2))
    figure.draw_without_rendering()
    [axes] = figure.axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    bars = {bar.get_width(): bar for bar in axes.patches}  # type: ignore[attr-defined]
    assert set(bars) == {0.1, 2.0}
    assert {bar.get_x() for bar in bars.values()} == {0}
    grey = {width: float(np.dot(bar.get_facecolor()[:3], (0.2126, 0.7152, 0.0722))) for width, bar in bars.items()}
    assert grey[0.1] - grey[2.0] > 0.4
    assert (bars[0.1].get_hatch(), bars[2.0].get_hatch()) == ("", "//")
    room = axes.get_window_extent().x1
    assert all(text.get_window_extent().x1 <= room for text in axes.texts)
