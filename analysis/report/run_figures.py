"""Figures of training runs, from their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.report.figures import legend_below, style
from analysis.report.run_tables import Run

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
"""Of Okabe and Ito; readers with a colour deficiency can tell them apart."""
LINES = ("-", "--", "-.", ":")
STAGE_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#999999")
POLICY = {
    "log_ratio_max": "largest |log ratio|",
    "clipped_share": "clipped share",
    "grad_norm": "gradient norm, before clipping",
    "groups_without_signal": "prompts without signal",
}
MARKED = 30
"""Points up to which a line has markers."""
RUNS_DRAWN = 4
"""Runs whose knots and samples are on the page; those of all are in their folders and in the tables."""


def _panel(axes: Axes, table: pd.DataFrame, log: str, figure: str) -> None:
    """A line per arm, its interval over seeds as a band."""
    selected = table[(table["log"] == log) & (table["figure"] == figure)]
    arms = list(dict.fromkeys(table["arm"]))
    for place, arm in enumerate(arms):
        part = selected[selected["arm"] == arm].sort_values("update")
        if part.empty:
            continue
        colour, line = COLOURS[place % len(COLOURS)], LINES[place % len(LINES)]
        marker = "o" if len(part) <= MARKED else ""
        axes.plot(part["update"], part["mean"], color=colour, linestyle=line, marker=marker, markersize=3, label=arm)
        low, high = part["low"].astype(float), part["high"].astype(float)
        axes.fill_between(part["update"], low, high, color=colour, alpha=0.15)
    axes.set_xlabel("updates")
    axes.set_xlim(0, max(1, table["update"].max()) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log == "metrics" and figure in POLICY:
        top = max(1.1 * selected["mean"].max(), selected["high"].astype(float).max())
        axes.set_ylim(0, top if top > 0 else 1)


def panels(table: pd.DataFrame, shown: Sequence[tuple[str, str, str]], *, share: bool = False) -> Figure:
    """Draws figures of a log by update, two panels beside each other; ``shown``: log, figure, label of the y axis.

    ``share``: give all panels one y axis.
    """
    with style():
        columns = min(2, len(shown))
        rows = math.ceil(len(shown) / columns)
        figure = Figure(figsize=(3.7 * columns if columns > 1 else 5.0, 2.6 * rows), layout="constrained")
        every = list(figure.subplots(rows, columns, squeeze=False, sharey=share).flat)
        for axes, (log, name, label) in zip(every, shown, strict=False):
            _panel(axes, table, log, name)
            axes.set_ylabel(label)
        for unused in every[len(shown) :]:
            unused.set_visible(False)
        if table["arm"].nunique() > 1:
            legend_below(figure, columns)
    return figure


def seconds_figure(table: pd.DataFrame) -> Figure:
    """Draws seconds per stage, stacked: by update for one arm, medians over updates for several."""
    stages = [name for name in table if name not in ("arm", "update")]
    arms = list(dict.fromkeys(table["arm"]))
    with style():
        figure = Figure(figsize=(6.2, 2.8 if len(arms) == 1 else 1.6 + 0.4 * len(arms)), layout="constrained")
        axes = figure.subplots()
        if len(arms) == 1:
            axes.bar(table["update"], 0 * table["update"])  # bars, so that a single update is seen too
            bottom = 0 * table["update"].astype(float)
            for stage, colour in zip(stages, STAGE_COLOURS, strict=False):
                heights = table[stage].astype(float)
                axes.bar(table["update"], heights, width=1.0, bottom=bottom, color=colour, linewidth=0, label=stage)
                bottom = bottom + heights
            axes.set(xlabel="updates", ylabel="seconds of an update")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            medians = table.groupby("arm", sort=False)[stages].median().iloc[::-1]
            left = pd.Series(0.0, index=medians.index)
            for stage, colour in zip(stages, STAGE_COLOURS, strict=False):
                axes.barh(medians.index, medians[stage], left=left, color=colour, linewidth=0, label=stage)
                left = left + medians[stage]
            axes.set(xlabel="seconds of an update, medians over updates")
        legend_below(figure, 4)
    return figure


def knots_figure(table: pd.DataFrame, updates: int) -> Figure:
    """Draws knots by update, a panel per run, as far as there is room."""
    runs = list(table.groupby(["arm", "seed"], sort=False))[:RUNS_DRAWN]
    with style():
        figure = Figure(figsize=(3.7 * max(2, len(runs)) / 2 + 1.5, 2.6), layout="constrained")
        for axes, ((arm, seed), part) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
            places = [[int(k) for k in text.split()] for text in part["knots"]]
            starts = [*part["update"], updates]
            for step, knots in enumerate(places):
                axes.hlines(knots, starts[step], starts[step + 1], color=COLOURS[2], linewidth=3)
            for update in starts[1:-1]:
                axes.axvline(update, color="#999999", linewidth=0.8, linestyle=":")
            axes.set(xlabel="updates", ylabel="knot (0: highest noise)")
            axes.set_title(f"seed {seed}" if len(runs) == 1 else f"{arm}, seed {seed}", fontsize=8)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            axes.invert_yaxis()
    return figure


def make_figures(
    runs: Sequence[Run], frames: dict[str, pd.DataFrame], further: list[tuple[str, str]]
) -> dict[str, Figure]:
    """Draws every figure that the logs allow, by the name of its file."""
    table, reward = frames["by_update"], runs[0].reward
    there = set(zip(table["log"], table["figure"], strict=True))

    def known(shown: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        return [one for one in shown if one[:2] in there]

    others = [name for log, name in there if log == "evaluation" and name not in (reward, "evaluation_s")]
    of_panels = {
        "reward": [
            ("metrics", "reward_mean", f"{reward}, training samples"),
            ("evaluation", reward, f"{reward}, held out"),
        ],
        "policy": [("metrics", name, label) for name, label in POLICY.items()],
        "watched": [("evaluation", name, f"{name}, held out") for name in sorted(others)],
        "recalibration": [
            ("recalibration", "cosine_before", "cosine to exact, old knots"),
            ("recalibration", "cosine", "cosine to exact, new knots"),
        ],
        "further": [(log, name, name.replace("_", " ")) for log, name in further],
    }
    there_are = {name: known(shown) for name, shown in of_panels.items() if known(shown)}
    made = {name: panels(table, shown, share=name == "recalibration") for name, shown in there_are.items()}
    made["seconds"] = seconds_figure(frames["seconds"])
    if len(frames["knots"]):
        made["knots"] = knots_figure(frames["knots"], max(len(run.logs["metrics"]) for run in runs))
    return made
