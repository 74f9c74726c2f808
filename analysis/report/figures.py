"""Figures from the tables. Readable in black and white: every family has its own marker and line style."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from analysis.statistics.names import families, family_label, family_style
from analysis.statistics.parameter_kinds import ordered_blocks
from bench.arms import label_of


def in_groups() -> list[str]:
    """Lists the families that take a window."""
    return [family.name for family in families().values() if family.kind == "groups"]


def in_front() -> list[str]:
    """Lists the families of the Pareto front."""
    return [family.name for family in families().values() if family.in_front]


def arm_labels(table: pd.DataFrame) -> list[str]:
    """Lists the labels of the arms of a table, by their names and, where they are known, their passes."""
    passes = table["passes"] if "passes" in table else [None] * len(table)
    return [label_of(*pair) for pair in zip(table["arm"], passes, strict=True)]


PANEL_HEIGHT = 3.2
DPI = 160
LEGEND_ROW = 0.19
"""Inches. Two panels beside each other fill the text width of a page at nearly the size of its letters."""


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure."""
    settings: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8, "legend.frameon": False}
    settings |= {"grid.alpha": 0.3, "svg.hashsalt": "jagg"}
    look = {"axes.grid": True, "axes.spines.top": False, "axes.spines.right": False}
    with sns.axes_style("ticks", look), matplotlib.rc_context(settings):
        yield


def _line(axes: Axes, x: pd.Series, data: pd.DataFrame, family: str, label: str) -> None:
    colour, marker, line = family_style(family)
    axes.plot(x, data["cosine"], color=colour, marker=marker, linestyle=line, markersize=4, label=label)
    axes.fill_between(x, data["cosine_low"].astype(float), data["cosine_high"].astype(float), color=colour, alpha=0.15)


def panels_by_eta(table: pd.DataFrame) -> tuple[Figure, dict[float, Axes]]:
    """A figure with a panel per eta, the highest first."""
    etas = sorted(table["eta"].unique(), reverse=True)
    figure = Figure(figsize=(max(4.2, 3.6 * len(etas)), PANEL_HEIGHT), layout="constrained")
    return figure, dict(zip(etas, figure.subplots(1, len(etas), sharey=True, squeeze=False)[0], strict=True))


def legend_below(figure: Figure, ncols: int) -> None:
    """One legend for what any panel shows, below all of them; the figure grows by its height."""
    known = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {label: handle for some, labels in known for handle, label in zip(some, labels, strict=True)}
    if handles:
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(handles) / ncols))
        figure.legend(handles.values(), handles, ncols=ncols, loc="outside lower center")


def cosine_per_group(table: pd.DataFrame, window: int) -> Figure:
    """Cosine of each group's contribution, every group approximated; a panel per eta, a line per family."""
    with style():
        figure, panels = panels_by_eta(table)
        for eta, axes in panels.items():
            part = table[(table["eta"] == eta) & (table["window"] == window)]
            grouped = [f"{family}-w{window}-f1" for family in in_groups()]
            # all three take the same number; a cell may have failed
            budget = part.loc[part["estimator"].isin(grouped), "passes"].max()
            for family in families():
                data = part[(part["family"] == family) & (part["passes"] == budget)]
                if family in in_groups():
                    data = data[data["estimator"].isin(grouped)]
                if len(data):
                    _line(axes, data["group"], data, family, data["label"].iloc[0])
            axes.set_title(f"eta {eta:g}: {budget} passes, W = {window}")
            axes.set_xlabel("group of steps (0: highest noise)")
            axes.set_xticks(range(int(part["group"].max()) + 1))
        figure.axes[0].set_ylabel("cosine to the exact group gradient")
        legend_below(figure, len(panels))
    figure.set_label(
        f"Cosine of every group's part of the update to exact's, all groups of W = {window} approximated, at equal "
        "passes; bands are 95 % intervals over rollout batches."
    )
    return figure


def pareto_front(table: pd.DataFrame, paper: str) -> Figure:
    """1 - cosine of the whole update against passes, log scale; the paper's recipe is ringed."""
    with style():
        figure, panels = panels_by_eta(table)
        for eta, axes in panels.items():
            # a logarithmic axis cannot show the plans that are exact
            part = table[(table["eta"] == eta) & (table["cosine"] < 1 - 1e-9)]
            for family in in_front():
                data = part[part["best"] & (part["family"] == family)].sort_values("passes")
                colour, marker, line = family_style(family)
                label = family_label(family)
                if family in in_groups():
                    label += ", best of every W and fraction"
                loss = 1 - data["cosine"]
                axes.semilogy(
                    data["passes"], loss, color=colour, marker=marker, linestyle=line, markersize=4, label=label
                )
                low, high = 1 - data["cosine_high"].astype(float), 1 - data["cosine_low"].astype(float)
                axes.fill_between(data["passes"], low, high, color=colour, alpha=0.15)
            point = part[part["estimator"] == paper]
            axes.plot(point["passes"], 1 - point["cosine"], "o", markersize=11, fillstyle="none", color="black")
            axes.set_title(f"eta {eta:g} (ring: the paper's recipe)")
            axes.set_xlabel("passes per update (exact: all trained steps)")
        figure.axes[0].set_ylabel("1 - cosine to the exact update")
        legend_below(figure, len(panels))
    figure.set_label(
        "Distance of the whole update to exact's, 1 - cosine, against passes: lower is better. Bands are 95 % "
        "intervals over rollout batches; the ring is the paper's recipe."
    )
    return figure


def speed_bars(table: pd.DataFrame) -> Figure:
    """Seconds per group by phase, and the speed-up over exact; a panel per backbone."""
    names = list(table["backbone"].unique())
    with style():
        figure = Figure(figsize=(4.6 * len(names), 2.8), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            part = table[(table["backbone"] == name) & ~table["arm"].isin(["exact-again", "exact-bare"])]
            part = part.iloc[::-1].reset_index(drop=True)
            left = pd.Series(0.0, index=part.index)
            for phase, colour, hatch in (
                ("forward", "#5dade2", ""),
                ("upstream", "#f4d03f", "xx"),
                ("backward", "#34495e", ""),
            ):
                width = part[f"{phase}_s"].astype(float) * 1000
                axes.barh(part.index, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=phase)
                left = left + width
            for row, total in left.items():
                axes.text(total, row, f" {part['speed_up'][row]:.2f}x", va="center", fontsize=8)
            axes.set_yticks(part.index, arm_labels(part))
            axes.set_xlim(0, left.max() * 1.15)
            axes.set_xlabel("milliseconds per group (median)")
            axes.set_title(f"{name}, W = {part['window'].iloc[0]}, batch {part['batch'].iloc[0]}")
            axes.grid(axis="y", visible=False)
        legend_below(figure, 3)
    figure.set_label("Milliseconds of one group by phase, medians, and the speed-up over exact at each bar.")
    return figure


def past_and_future(table: pd.DataFrame) -> Figure:
    """Cosine of ``C[knot, step]`` to ``C[step, step]``: the past below the diagonal, the future above.

    The Jacobian is taken at the knot.
    """
    with style():
        figure, panels = panels_by_eta(table)
        for eta, axes in panels.items():
            part = table[table["eta"] == eta].pivot(index="step", columns="knot", values="cosine").astype(float)
            axes.set_facecolor("#f5cba7")
            image = axes.imshow(np.ma.masked_invalid(part), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            axes.plot([-0.5, len(part) - 0.5], [-0.5, len(part) - 0.5], color="#c0392b", linewidth=0.8)
            axes.grid(visible=False)
            axes.set_title(f"eta {eta:g}")
            axes.set_xlabel("step of the knot (0: highest noise)")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            ends = len(part) - 1
            axes.text(0.04 * ends, 0.97 * ends, "past", fontsize=9, color="#c0392b", va="bottom")
            axes.text(0.96 * ends, 0.03 * ends, "future", fontsize=9, color="#c0392b", ha="right", va="top")
        figure.colorbar(
            image,
            ax=list(panels.values()),
            label="cosine to the own gradient\n(white: not above 0; orange: not computed)",
        )
        figure.axes[0].set_ylabel("step whose loss gradient it is")
    figure.set_label(
        "Cosine of a step's gradient, taken through the network at another state of the rollout, to the step's exact "
        "one."
    )
    return figure


def knot_placement(table: pd.DataFrame, schedule: list[float]) -> Figure:
    """Sigma of the calibrated causal knots, a row per number of passes; ticks below are the steps."""
    table = table[table["family"] == "causal"]
    with style():
        figure, panels = panels_by_eta(table)
        for eta, axes in panels.items():
            part = table[(table["eta"] == eta) & (table["passes"] < len(schedule))]
            for row in part.itertuples():
                sigmas = [schedule[int(k)] for k in row.knots.split()]
                axes.plot(sigmas, [row.passes] * len(sigmas), "D-", color="#1e8449", markersize=4, linewidth=0.6)
            axes.plot(schedule, [0] * len(schedule), "|", color="black", markersize=8)
            axes.invert_xaxis()
            axes.set_title(f"eta {eta:g}")
            axes.set_xlabel("sigma (1: pure noise; black: the trained steps)")
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.axes[0].set_ylabel("passes of the causal plan")
    figure.set_label(
        "Noise levels of the causal plan's knots, a row for each number of passes; black ticks are the trained steps."
    )
    return figure


def block_heat_map(table: pd.DataFrame) -> Figure:
    """Cosine of the whole update in each block of parameters, a row per estimator that is not exact."""
    table = table[(table["eta"] == table["eta"].max()) & table["family"].isin(in_front())]
    # another fraction that routes as many groups is the same plan under the same label
    table = table.sort_values(["passes", "family"], ascending=[False, True]).drop_duplicates(["label", "block"])
    wide = table.pivot(index="label", columns="block", values="cosine").astype(float).loc[table["label"].unique()]
    wide = wide[ordered_blocks(list(wide.columns))]
    with style():
        figure = Figure(figsize=(2.8 + 1.1 * len(wide.columns), 0.3 * len(wide) + 1.2), layout="constrained")
        axes = figure.subplots()
        # shades of the loss on a logarithmic scale: cosines close to 1 are what differs
        shades = np.log10(np.maximum(1 - wide.to_numpy(), 1e-5))
        axes.imshow(shades, cmap="Greys", vmin=-4, vmax=0, aspect="auto")
        for y, x in np.ndindex(wide.shape):
            colour = "white" if shades[y, x] > -1.6 else "black"
            text = "" if np.isnan(shades[y, x]) else f"{wide.iloc[y, x]:.4f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(wide.columns)), list(wide.columns))
        axes.set_yticks(range(len(wide)), list(wide.index))
        axes.grid(visible=False)
        axes.set_title(f"cosine to exact by parameter block, eta {table['eta'].max():g} (dark: far from 1)")
    figure.set_label("Cosine of the whole update to exact's in each kind of parameters; dark is far from 1.")
    return figure


def leak_bars(table: pd.DataFrame) -> Figure:
    """Squared mean gradient over a batch's noise at advantage 1; 0: no leak. What looks ahead is dark and hatched."""
    with style():
        figure = Figure(figsize=(7.2, 0.3 * len(table) + 1.0), layout="constrained")
        axes = figure.subplots()
        part = table.iloc[::-1].reset_index(drop=True)
        for row in part.itertuples():
            colour, hatch, edge = ("#c0392b", "//", "white") if row.anticipating else ("#a9dfbf", "", "black")
            axes.barh(row.Index, row.share, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.6)
            axes.plot([row.share_low, row.share_high], [row.Index] * 2, color="black", linewidth=0.8)
            text = f" {row.share:.2f} ({row.p_text})"
            axes.text(max(row.share_high, 0), row.Index, text, va="center", fontsize=8)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlim(min(part["share_low"].min(), 0), 1.4 * max(part["share_high"].max(), 0.1))  # room for the numbers
        axes.set_yticks(part.index, list(part["label"]))
        axes.set_xlabel(f"|mu|^2 / V, n = {part['n'].max()} batches (0: no leak; hatched: looks ahead)")
        axes.grid(axis="y", visible=False)
    figure.set_label(
        "Leak: squared mean gradient over the noise of one batch, with all advantages 1. 0 is none; hatched plans look "
        "ahead; lines are 95 % intervals."
    )
    return figure


def cost_by_devices(table: pd.DataFrame) -> Figure:
    """Predicted speed-up over exact against the number of devices: of a group, of the update, of the whole step."""
    with style():
        parts = ("group", "update", "step")
        figure = Figure(figsize=(8.4, PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(1, len(parts))
        markers, lines = "osv^DPX<>", ("-", "--", ":", "-.")
        for axes, part in zip(panels, parts, strict=True):
            for number, (_, rows) in enumerate(table.groupby("arm", sort=False)):
                axes.plot(
                    rows["ranks"],
                    rows[f"{part}_speed_up"],
                    marker=markers[number % len(markers)],
                    linestyle=lines[number % len(lines)],
                    markersize=4,
                    linewidth=1,
                    label=rows["label"].iloc[0],
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(table["ranks"])), [str(n) for n in sorted(set(table["ranks"]))])
            axes.set_xlabel("devices")
            axes.set_title({"group": "one group", "update": "the update", "step": "a whole training step"}[part])
        panels[0].set_ylabel("predicted speed-up over exact")
        legend_below(figure, 2)
    figure.set_label("Predicted speed-up over exact against devices: of a group, of the update, of a whole step.")
    return figure


def rendered(figure: Figure) -> dict[str, bytes]:
    """Renders the figure as PNG, in 256 colours, and SVG, both free of dates."""
    files = {}
    with style():
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
            files[kind] = in_256_colours(buffer) if kind == "png" else buffer.getvalue()
            figure.set_layout_engine("none")  # laid out once is enough, and half of the time
    return files


def in_256_colours(png: io.BytesIO) -> bytes:
    """Compresses a PNG to a third of its size."""
    small = io.BytesIO()
    Image.open(png).convert("RGB").quantize(256).save(small, format="PNG", optimize=True)
    return small.getvalue()
