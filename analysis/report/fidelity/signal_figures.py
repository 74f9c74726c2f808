"""Figures of the learning signal."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.report.figures import PANEL_HEIGHT, legend_below, panels_by_eta, style
from analysis.statistics.names import families, family_label, family_style

BESIDE = 0.006
"""By how much families are drawn apart along the cost, so that their intervals do not hide each other. Not exact."""

MARKERS = "osD^vPX<>"
"""Of the numbers of passes, the fewest first."""


def signal_per_cost(table: pd.DataFrame, samples: int) -> Figure:
    """Share of exact's learning signal against the cost of the update and of the training step, at the first eta."""
    table = table[(table["eta"] == table["eta"].max()) & table["loss"].notna()]
    with style():
        figure = Figure(figsize=(7.2, PANEL_HEIGHT + 0.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, cost, label in (
            (panels[0], "update_cost", "cost of the update (exact: 1)"),
            (panels[1], "step_cost", "cost of the training step with its rollout (exact: 1)"),
        ):
            families = table.groupby("family", sort=False)
            for rank, (family, part) in enumerate(families):
                colour, marker, _ = family_style(str(family))
                part = part.sort_values(cost)
                kept = 1 - part["loss"].astype(float)
                spread = [part["loss_high"] - part["loss"], part["loss"] - part["loss_low"]]
                axes.errorbar(
                    part[cost] + (0 if family == "exact" else (rank - len(families) / 2) * BESIDE),
                    kept,
                    yerr=np.maximum(np.array(spread, dtype=float), 0),  # a value may lie outside its interval
                    color=colour,
                    marker=marker,
                    linestyle="",
                    markersize=5,
                    linewidth=0.7,
                    capsize=2,
                    label=family_label(str(family)),
                )
            axes.axhline(1, color="black", linewidth=0.6)
            axes.set_xlabel(label)
        panels[0].set_ylabel(f"share of exact's signal in an update of {samples} samples")
        legend_below(figure, 2)
    figure.set_label(
        f"Share of exact's learning signal that an update of {samples} samples keeps, against its cost; bars are 95 % "
        "intervals."
    )
    return figure


def loss_by_batch(table: pd.DataFrame, target: float) -> Figure:
    """Loss of learning signal against samples per update; the dashed line is the loss that is allowed.

    Plans on searched knots and the paper's rule, one for each number of passes, which the marker shows; the scale is
    linear up to 0.01 and logarithmic from there.
    """
    searched = [f.name for f in families().values() if f.recommended and f.knots_of == f.name]
    shown = table[table["family"].isin(["jagg", *searched]) & table["loss"].notna()]
    with style():
        figure, panels = panels_by_eta(table)
        for eta, axes in panels.items():
            part = shown[shown["eta"] == eta]
            for family, own in part.groupby("family", sort=False):
                colour = family_style(str(family))[0]
                for rank, (_, data) in enumerate(own.groupby("passes", sort=True)):
                    data = data[data["estimator"] == data["estimator"].iloc[0]]
                    axes.plot(
                        data["update_samples"],
                        data["loss"],
                        color=colour,
                        marker=MARKERS[rank % len(MARKERS)],
                        fillstyle="full" if family in searched else "none",
                        linestyle="-" if family in searched else "--",
                        markersize=4,
                        linewidth=1,
                        label=data["label"].iloc[0],
                    )
            axes.axhline(target, color="black", linestyle="--", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_yscale("symlog", linthresh=0.01)
            axes.set_title(f"eta {eta:g}")
            axes.set_xlabel("samples per update")
        figure.axes[0].set_ylabel("share of exact's signal that is lost")
        legend_below(figure, len(panels))
    figure.set_label(
        "Share of exact's learning signal that a plan loses, against the samples of an update; the dashed line is the "
        "loss that is allowed."
    )
    return figure
