"""Figures from the tables. Readable in black and white: every family has its own marker and line style."""

from __future__ import annotations

import io
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

from analysis.blocks import ordered_blocks

STYLES: dict[str, tuple[str, str, str]] = {
    "jagg": ("#c0392b", "o", "-"),
    "jagg-index": ("#e59866", "s", "--"),
    "endpoint": ("#7f8c8d", "v", ":"),
    "subsample": ("#bdc3c7", "x", "-."),
    "spline": ("#2980b9", "^", "--"),
    "causal": ("#1e8449", "D", "-"),
    "causal-predicted": ("#145a32", "P", ":"),
    "causal-shipped": ("#52be80", "d", "--"),
    "window": ("#6c3483", "s", ":"),
    "half": ("#873600", "<", ":"),
    "exact": ("black", "*", "-"),
}
"""Colour, marker and line of each family."""

FAMILY_LABELS = {
    "exact": "exact",
    "jagg": "JAGG (paper), every W and fraction",
    "spline": "spline, calibrated knots",
    "causal": "causal, calibrated knots",
    "causal-predicted": "causal, predicted knots",
    "subsample": "random steps (shared, or per sample)",
    "window": "windows of MixGRPO and Flow-GRPO-Fast",
    "half": "high- or low-noise half only",
}

ARM_LABELS = {
    "exact-again": "exact, timed again (noise floor)",
    "exact-bare": "exact, bare model calls",
    "exact-batched": "exact, all steps in one pass",
    "exact-deferred": "exact, gradients scattered once",
    "exact-closed-form": "exact, closed-form s",
    "prototype": "the authors' prototype (W + 2 forwards)",
    "paper": "paper JAGG (joint backward)",
    "paper-joint": "paper JAGG (joint backward)",
    "closed-form-sequential": "JAGG, closed-form s, sequential",
    "closed-form-batched": "JAGG, closed-form s, batched",
    "jagg-closed-form-sequential": "JAGG, closed-form s, sequential",
    "jagg-closed-form-batched": "JAGG, closed-form s, batched",
    "endpoint-only": "endpoint-only",
    "subsample": "random steps, as many passes as JAGG",
}
"""Arms of a group, and ways to make an update."""


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure."""
    settings: dict[Any, Any] = {"font.size": 9, "legend.frameon": False, "grid.alpha": 0.3, "svg.hashsalt": "jagg"}
    look = {"axes.grid": True, "axes.spines.top": False, "axes.spines.right": False}
    with sns.axes_style("ticks", look), matplotlib.rc_context(settings):
        yield


def _line(axes: Axes, x: pd.Series, data: pd.DataFrame, family: str, label: str) -> None:
    colour, marker, line = STYLES[family]
    axes.plot(x, data["cosine"], color=colour, marker=marker, linestyle=line, markersize=4, label=label)
    axes.fill_between(x, data["cosine_low"].astype(float), data["cosine_high"].astype(float), color=colour, alpha=0.15)


def _panels(table: pd.DataFrame) -> tuple[Figure, dict[float, Axes]]:
    """A figure with a panel per eta, the highest first."""
    etas = sorted(table["eta"].unique(), reverse=True)
    figure = Figure(figsize=(4.6 * len(etas), 4.0), layout="constrained")
    return figure, dict(zip(etas, figure.subplots(1, len(etas), sharey=True, squeeze=False)[0], strict=True))


def _finish(figure: Figure, axes: Axes, label: str) -> None:
    """Name the shared y axis, and put the legend of ``axes`` below all panels."""
    figure.axes[0].set_ylabel(label)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, ncols=2, loc="outside lower center")


def cosine_per_group(table: pd.DataFrame, window: int) -> Figure:
    """Cosine of each group's contribution, every group approximated; a panel per eta, a line per family."""
    with style():
        figure, panels = _panels(table)
        for eta, axes in panels.items():
            part = table[(table["eta"] == eta) & (table["window"] == window)]
            grouped = [f"{family}-w{window}-f1" for family in ("jagg", "jagg-index", "endpoint")]
            # all three take the same number; a cell may have failed
            budget = part.loc[part["estimator"].isin(grouped), "passes"].max()
            for family in STYLES:
                data = part[(part["family"] == family) & (part["passes"] == budget)]
                if family in ("jagg", "jagg-index", "endpoint"):
                    data = data[data["estimator"].isin(grouped)]
                if len(data):
                    _line(axes, data["group"], data, family, data["label"].iloc[0])
            axes.set_title(f"eta {eta:g}: {budget} passes, W = {window}")
            axes.set_xlabel("group of steps (0: highest noise)")
            axes.set_xticks(range(int(part["group"].max()) + 1))
        _finish(figure, axes, "cosine to the exact group gradient")
    return figure


def pareto_front(table: pd.DataFrame, paper: str) -> Figure:
    """1 - cosine of the whole update against passes, log scale; the paper's recipe is ringed."""
    with style():
        figure, panels = _panels(table)
        for eta, axes in panels.items():
            # a logarithmic axis cannot show the plans that are exact
            part = table[(table["eta"] == eta) & (table["cosine"] < 1 - 1e-9)]
            for family in ("jagg", "spline", "causal"):
                data = part[part["best"] & (part["family"] == family)].sort_values("passes")
                colour, marker, line = STYLES[family]
                label = "JAGG (paper), best W and fraction" if family == "jagg" else f"{family}, calibrated knots"
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
        _finish(figure, axes, "1 - cosine to the exact update")
    return figure


def speed_bars(table: pd.DataFrame) -> Figure:
    """Seconds per group by phase, and the speed-up over exact; a panel per backbone."""
    names = list(table["backbone"].unique())
    with style():
        figure = Figure(figsize=(5.2 * len(names), 3.2), layout="constrained")
        panels = figure.subplots(1, len(names), squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
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
            axes.set_yticks(part.index, [ARM_LABELS.get(arm, arm) for arm in part["arm"]])
            axes.set_xlim(0, left.max() * 1.15)
            axes.set_xlabel("milliseconds per group (median)")
            axes.set_title(f"{name}, W = {part['window'].iloc[0]}, batch {part['batch'].iloc[0]}")
            axes.grid(axis="y", visible=False)
        panels[0].legend(fontsize=7, loc="lower right")
    return figure


def past_and_future(table: pd.DataFrame) -> Figure:
    """Cosine of ``C[knot, step]`` to ``C[step, step]``: the past below the diagonal, the future above."""
    with style():
        figure, panels = _panels(table)
        for eta, axes in panels.items():
            part = table[table["eta"] == eta].pivot(index="step", columns="knot", values="cosine").astype(float)
            image = axes.imshow(part, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            axes.plot([-0.5, len(part) - 0.5], [-0.5, len(part) - 0.5], color="#c0392b", linewidth=0.8)
            axes.grid(visible=False)
            axes.set_title(f"eta {eta:g}")
            axes.set_xlabel("knot: step whose Jacobian is taken (0: highest noise)")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            ends = len(part) - 1
            axes.text(0.04 * ends, 0.97 * ends, "past", fontsize=9, color="#c0392b", va="bottom")
            axes.text(0.96 * ends, 0.03 * ends, "future", fontsize=9, color="#c0392b", ha="right", va="top")
        figure.colorbar(image, ax=list(panels.values()), label="cosine to the step's own gradient (0 and below: white)")
        figure.axes[0].set_ylabel("step whose loss gradient it is")
    return figure


def knot_placement(table: pd.DataFrame, schedule: list[float]) -> Figure:
    """Sigma of the calibrated causal knots, a row per number of passes; ticks below are the steps."""
    table = table[table["family"] == "causal"]
    with style():
        figure, panels = _panels(table)
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
    return figure


def block_heat_map(table: pd.DataFrame) -> Figure:
    """Cosine of the whole update in each block of parameters, a row per estimator that is not exact."""
    table = table[(table["eta"] == table["eta"].max()) & table["family"].isin(["jagg", "spline", "causal"])]
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
    return figure


def signal_per_cost(table: pd.DataFrame, samples: int) -> Figure:
    """Share of exact's learning signal against the cost of the update and of the training step, at the first eta."""
    table = table[(table["eta"] == table["eta"].max()) & table["loss"].notna()]
    with style():
        figure = Figure(figsize=(9.2, 4.4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, cost, label in (
            (panels[0], "update_cost", "cost of the update (exact: 1)"),
            (panels[1], "step_cost", "cost of the training step with its rollout (exact: 1)"),
        ):
            for family, part in table.groupby("family", sort=False):
                colour, marker, _ = STYLES[str(family)]
                part = part.sort_values(cost)
                kept = 1 - part["loss"].astype(float)
                spread = [part["loss_high"] - part["loss"], part["loss"] - part["loss_low"]]
                axes.errorbar(
                    part[cost],
                    kept,
                    yerr=np.maximum(np.array(spread, dtype=float), 0),  # a value may lie outside its interval
                    color=colour,
                    marker=marker,
                    linestyle="",
                    markersize=5,
                    linewidth=0.7,
                    capsize=2,
                    label=FAMILY_LABELS[str(family)],
                )
            axes.axhline(1, color="black", linewidth=0.6)
            axes.set_xlabel(label)
        _finish(figure, panels[0], f"share of exact's signal in an update of {samples} samples")
    return figure


def loss_by_batch(table: pd.DataFrame, target: float) -> Figure:
    """Loss of learning signal against samples per update; the dashed line is the loss that is allowed.

    Causal plans and the paper's rule, one of each number of passes; markers and dashes tell them apart.
    """
    shown = table[table["family"].isin(["causal", "jagg"]) & table["loss"].notna()]
    with style():
        figure, panels = _panels(table)
        for eta, axes in panels.items():
            part = shown[shown["eta"] == eta]
            for family, own in part.groupby("family", sort=False):
                colour, marker, _ = STYLES[str(family)]
                for rank, (_, data) in enumerate(own.groupby("passes", sort=True)):
                    data = data[data["estimator"] == data["estimator"].iloc[0]]
                    axes.plot(
                        data["update_samples"],
                        data["loss"],
                        color=colour,
                        marker=marker,
                        markersize=3 + rank % 3,
                        fillstyle=("none", "full")[rank % 2],
                        linestyle=(0, (max(1, 7 - rank), rank % 4)),
                        linewidth=1,
                        label=data["label"].iloc[0],
                    )
            axes.axhline(target, color="black", linestyle="--", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_title(f"eta {eta:g}")
            axes.set_xlabel("samples per update")
        _finish(figure, axes, "share of exact's signal that is lost")
    return figure


def leak_bars(table: pd.DataFrame) -> Figure:
    """Squared mean gradient over its noise with advantages 1; 1 is no leak."""
    with style():
        figure = Figure(figsize=(7.2, 0.3 * len(table) + 1.0), layout="constrained")
        axes = figure.subplots()
        part = table.iloc[::-1].reset_index(drop=True)
        for row in part.itertuples():
            filled = "#c0392b" if row.anticipating else "#1e8449"
            hatch = "//" if row.anticipating else ""
            axes.barh(row.Index, row.ratio, color=filled, hatch=hatch, edgecolor="white")
            axes.text(row.ratio, row.Index, f" {row.ratio:.2f} (p = {row.p_value:.3f})", va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(right=part["ratio"].max() * 5)
        axes.set_yticks(part.index, list(part["label"]))
        axes.set_xlabel("squared mean gradient / its noise (1: no leak; hatched: looks ahead)")
        axes.grid(axis="y", visible=False)
    return figure


def cost_by_devices(table: pd.DataFrame) -> Figure:
    """Predicted speed-up over exact against the number of devices: of a group, of the update, of the whole step."""
    with style():
        parts = ("group", "update", "step")
        figure = Figure(figsize=(12.5, 3.8), layout="constrained")
        panels = figure.subplots(1, len(parts))
        markers = "osv^DPX<>"
        for axes, part in zip(panels, parts, strict=True):
            for number, (_, own) in enumerate(table.groupby("scheme", sort=False)):
                marker, label = markers[number % len(markers)], own["label"].iloc[0]
                axes.plot(own["ranks"], own[f"{part}_speed_up"], marker=marker, markersize=4, linewidth=1, label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(table["ranks"])), [str(n) for n in sorted(set(table["ranks"]))])
            axes.set_xlabel("devices")
            axes.set_title({"group": "one group", "update": "the update", "step": "a whole training step"}[part])
        panels[0].set_ylabel("predicted speed-up over exact")
        panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def rendered(figure: Figure) -> dict[str, bytes]:
    """The figure as PNG and SVG, free of dates."""
    files = {}
    with style():
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            files[kind] = buffer.getvalue()
            figure.set_layout_engine("none")  # laid out once is enough, and half of the time
    return files
