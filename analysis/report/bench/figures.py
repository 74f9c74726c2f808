"""Figures of a bench run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report.figures import arm_labels, legend_below, style

COLUMNS = 2
"""Panels beside each other."""

STEP_PARTS = (
    ("rollout", "#5dade2", ""),
    ("reward", "#f4d03f", "xx"),
    ("update", "#34495e", ""),
    ("optimizer", "#a9dfbf", "//"),
)
"""Parts of a training step in the order in which they run, with colour and hatch."""


def _grid(tables: Mapping[str, pd.DataFrame], row_height: float) -> tuple[Figure, dict[str, Axes]]:
    """A figure with a panel per table, titled by its name."""
    columns = min(COLUMNS, len(tables))
    rows = math.ceil(len(tables) / columns)
    height = max(len(table) for table in tables.values()) * row_height + 1.0
    figure = Figure(figsize=(5.2 * columns, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[len(tables) :]:
        unused.set_visible(False)
    for axes, name in zip(panels, tables, strict=False):
        axes.set_title(name, fontsize=9)
        axes.grid(axis="y", visible=False)
    return figure, dict(zip(tables, panels, strict=False))


def speed_up_intervals(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Speed-up over exact of every arm with its interval; a panel per group cell. Grey: exact timed again."""
    with style():
        figure, panels = _grid(tables, 0.27)
        for name, axes in panels.items():
            part = tables[name].iloc[::-1].reset_index(drop=True)
            value = part["speed_up"].astype(float)
            low, high = (part[f"speed_up_{end}"].astype(float) for end in ("low", "high"))
            whiskers = np.maximum(np.array([value - low, high - value]), 0)  # a value may lie outside its interval
            axes.errorbar(value, part.index, xerr=whiskers, fmt="o", color="#34495e", markersize=4, capsize=2)
            for again in part[part["arm"] == "exact-again"].itertuples():
                axes.axvspan(again.speed_up_low, again.speed_up_high, color="#bdc3c7", alpha=0.5, linewidth=0)
            for row in part.index:
                axes.text(max(value[row], high[row]), row, f"  {value[row]:.2f}x", va="center", fontsize=8)
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set_xlim(min(0.95, low.min(), value.min()) * 0.95, max(1.1, high.max(), value.max()) * 1.12)
            axes.set_ylim(-0.6, len(part) - 0.4)
            axes.set_yticks(part.index, arm_labels(part))
            axes.set_xlabel("speed-up over exact (grey: exact timed again)")
    return figure


def step_bars(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Seconds of a training step by part, and its speed-up over exact; a panel per update cell, a bar per arm."""
    with style():
        figure, panels = _grid(tables, 0.3)
        for name, axes in panels.items():
            part = tables[name].iloc[::-1].reset_index(drop=True)
            left = pd.Series(0.0, index=part.index)
            for what, colour, hatch in STEP_PARTS:
                if f"{what}_s" in part:
                    width = part[f"{what}_s"].astype(float)
                    axes.barh(part.index, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=what)
                    left = left + width
            for row, total in left.items():
                ratio = part["step_speed_up"][row]
                axes.text(total, row, "" if pd.isna(ratio) else f" {ratio:.2f}x", va="center", fontsize=8)
            axes.set_xlim(0, left.max() * 1.15)
            axes.set_yticks(part.index, arm_labels(part))
            axes.set_xlabel("seconds of a training step (sums of medians)")
        legend_below(figure, len(STEP_PARTS))
    return figure
