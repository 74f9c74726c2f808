"""The page of reward curves: reward against updates and time, and what may be said of quality."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report import curve_tables
from analysis.report.figures import legend_below, style
from analysis.report.page import render, write_tables_and_figures
from jagg_core.files import write_atomically
from jagg_core.records import Record

LOOKS: dict[str, tuple[str, str, str]] = {
    "exact": ("black", "*", "-"),
    "paper-0.6": ("#c0392b", "o", "-"),
    "paper-1.0": ("#e59866", "s", "--"),
    "endpoint-only": ("#7f8c8d", "v", ":"),
    "subsample-8": ("#8e44ad", "x", "-."),
    "causal-8": ("#145a32", "D", "-"),
    "causal-5": ("#1e8449", "^", "--"),
    "causal-2": ("#52be80", "P", ":"),
}
"""Colour, marker and line of each arm."""

TIME_ENDS = ("time_ratio_low", "time_ratio_high")
"""Columns of the interval of a ratio of times."""

COLUMNS = 2
"""Panels beside each other."""

LABELS = {
    "exact": "exact, step by step",
    "paper-0.6": "JAGG (paper), W = 4, first 0.6 of the groups",
    "paper-1.0": "JAGG (paper), W = 4, all groups",
    "endpoint-only": "endpoint-only, W = 4, all groups",
    "subsample-8": "8 random steps",
    "causal-8": "causal, 8 passes",
    "causal-5": "causal, 5 passes",
    "causal-2": "causal, 2 passes",
}


def _draw(axes: Axes, evaluated: pd.DataFrame, scale: dict[str, float]) -> None:
    """Mean over seeds of every arm, exact's with the range of its seeds; ``scale``: what an update is on the x axis."""
    for arm, part in evaluated.groupby("arm", sort=False):
        colour, marker, line = LOOKS[str(arm)]
        by = part.groupby("after")["value"]
        mean = by.mean()
        x = mean.index.to_numpy() * scale[str(arm)]
        axes.plot(x, mean, color=colour, marker=marker, linestyle=line, markersize=4, label=LABELS[str(arm)])
        if arm == "exact":  # the others' would hide it
            axes.fill_between(x, by.min(), by.max(), color=colour, alpha=0.15, linewidth=0)


def curves_figure(record: Record, frames: dict[str, pd.DataFrame]) -> Figure:
    """Held-out reward against updates and against time, and every watched reward against updates."""
    evaluated, arms = frames["held_out"], frames["arms"].set_index("arm")
    trained, watched = record.settings["reward"], list(record.settings["watched"])
    one = dict.fromkeys(arms.index, 1.0)
    time = {str(arm): 1 / float(value) for arm, value in arms["step_speed_up"].items()}
    with style():
        rows = math.ceil((2 + len(watched)) / COLUMNS)
        figure = Figure(figsize=(3.6 * COLUMNS, 2.8 * rows), layout="constrained")
        panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        _draw(panels[0], evaluated[evaluated["reward"] == trained], one)
        panels[0].set(xlabel="updates", ylabel=f"held-out {trained}", title="trained reward")
        _draw(panels[1], evaluated[evaluated["reward"] == trained], time)
        panels[1].set(xlabel="time, in training steps of exact", ylabel=f"held-out {trained}", title="trained reward")
        for unused in panels[2 + len(watched) :]:
            unused.set_visible(False)
        for axes, name in zip(panels[2:], watched, strict=False):
            _draw(axes, evaluated[evaluated["reward"] == name], one)
            axes.set(xlabel="updates", ylabel=f"held-out {name}", title=f"watched: {name}")
        legend_below(figure, COLUMNS)
    return figure


def sentences(record: Record, frames: dict[str, pd.DataFrame]) -> list[str]:
    """What the curves say; backward, update and step together, never one alone."""
    if "arms" not in frames:
        return ["No run of exact ended well: there is nothing to compare with."]
    settings = record.settings
    said = [
        f"Trained on {settings['reward']}: {settings['updates']} updates of {settings['prompts']} prompts with "
        f"{settings['samples']} samples each, eta {settings['eta']:g}, advantages normalised over the "
        f"{settings['centring']}."
    ]
    for _, row in frames["arms"].iterrows():
        if row["arm"] == "exact":
            said.append(
                f"exact: {row['final']:.4f} [{row['final_min']:.4f}, {row['final_max']:.4f}] over {row['seeds']} "
                f"seeds, a gain of {row['exact_gain']:.4f}; an arm counts as equivalent within {row['margin']:.4f} "
                f"of it ({curve_tables.MARGIN:.0%} of the gain)."
            )
            continue
        interval = ""
        if not pd.isna(row["difference_low"]):
            interval = f" [{row['difference_low']:+.4f}, {row['difference_high']:+.4f}]"
        said.append(
            f"{LABELS[row['arm']]}: {row['backward_speed_up']:.2f}x in backward passes, "
            f"{row['update_speed_up']:.2f}x in the update, {row['step_speed_up']:.2f}x in the step; final reward "
            f"{row['final']:.4f}, difference to exact {row['difference']:+.4f}{interval}, "
            f"n = {row['seeds']}{_corrected(row)}: {row['verdict']}; time to exact's final reward {_times(row)} of "
            f"what exact needs; after {row['equal_time_share']:.2f} of exact's time "
            f"{_signed(row, 'equal_time_difference')} from its final reward."
        )
    for _, row in frames["watched"].iterrows():
        if row["place"] != "not resolved":
            said.append(
                f"{row['reward']}, watched: {LABELS[row['arm']]} ends {_signed(row)} from exact's {row['exact']:.4f}, "
                f"n = {row['seeds']}{_corrected(row)}: {row['place']}."
            )
    return said


def printable(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Short tables for people; the CSV files hold every column."""
    shown = {}
    if "arms" in frames:
        table = frames["arms"]
        plain = {
            "arm": table["arm"].map(LABELS),
            "passes": table["passes"],
            "seeds": table["seeds"],
            "backward": table["backward_speed_up"].map("{:.2f}x".format),
            "update": [_speed(row, "update") for _, row in table.iterrows()],
            "step": [_speed(row, "step") for _, row in table.iterrows()],
            "final reward": table["final"].map("{:.4f}".format),
            "difference to exact": [_signed(row) for _, row in table.iterrows()],
            "p, corrected": table["p_corrected"].map(_p_text),
            "seeds lower, higher": [f"{row['seeds_lower']}, {row['seeds_higher']}" for _, row in table.iterrows()],
            "verdict": table["verdict"],
            "time to exact's final reward, over exact's": [_times(row) for _, row in table.iterrows()],
            "difference at equal time (share of exact's)": [
                f"{_signed(row, 'equal_time_difference')} ({row['equal_time_share']:.2f})"
                for _, row in table.iterrows()
            ],
        }
        watched = {name: table[name].map("{:.4f}".format) for name in table if name.startswith("final ")}
        shown["arms"] = pd.DataFrame(plain | watched)
        moved = frames["watched"]
        shown["watched"] = pd.DataFrame(
            {
                "reward": moved["reward"],
                "arm": moved["arm"].map(LABELS),
                "exact's": moved["exact"].map("{:.4f}".format),
                "n": moved["seeds"],
                "difference to exact": [_signed(row) for _, row in moved.iterrows()],
                "p, corrected": moved["p_corrected"].map(_p_text),
                "place": moved["place"],
            }
        )
    if len(frames["failures"]):
        shown["failures"] = frames["failures"]
    return shown


def _signed(row: pd.Series, name: str = "difference") -> str:
    if row["arm"] == "exact" and name == "difference":
        return ""
    if pd.isna(row[f"{name}_low"]):
        return f"{row[name]:+.4f}"
    return f"{row[name]:+.4f} [{row[f'{name}_low']:+.4f}, {row[f'{name}_high']:+.4f}]"


def _speed(row: pd.Series, part: str) -> str:
    """A ratio with the lowest and the highest of one seed."""
    name = f"{part}_speed_up"
    return f"{row[name]:.2f}x ({row[f'{name}_min']:.2f} to {row[f'{name}_max']:.2f})"


def _times(row: pd.Series) -> str:
    """The ratio of times to exact's final reward with its interval; an end that is not reached is a word."""
    value, low, high = ("not reached" if pd.isna(x) else f"{x:.2f}" for x in row[["time_ratio", *TIME_ENDS]])
    return f"{value} [{low}, {high}]"


def _p_text(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2g}"


def _corrected(row: pd.Series) -> str:
    text = _p_text(row["p_corrected"])
    return f", corrected p {text}" if text else ""


def write_curve_report(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Tables, figure and ``report.html`` of reward curves. Returns page, short tables, findings."""
    frames = curve_tables.all_tables(record)
    figures = {"curves": curves_figure(record, frames)} if "arms" in frames else {}
    pictures = write_tables_and_figures(run, frames, figures)
    shown, said = printable(frames), sentences(record, frames)
    page = render("curves.html", record=record, findings=said, shown=shown, pictures=pictures)
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, said
