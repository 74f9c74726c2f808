"""The page of reward curves: reward against updates and time, and what may be said of quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report import curve_tables
from analysis.report.blocks import Block, all_figures, answers_table, draw_blocks, written
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

AS_GOOD = ("equivalent", "better", "better by less than the margin")
"""Verdicts of an arm that trains as well as exact."""

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
    figure.set_label(
        "Held-out rewards by arm: lines are means over seeds, the band is the range of exact's seeds. Time is in "
        "training steps of exact."
    )
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
        rows = [row for _, row in table.iterrows()]
        about = {"arm": table["arm"].map(LABELS), "n": table["seeds"]}
        rewards = {
            "final reward": table["final"].map("{:.4f}".format),
            "difference to exact": [_signed(row) for row in rows],
            "p, corrected": table["p_corrected"].map(_p_text),
            "seeds lower, higher": [f"{row['seeds_lower']}, {row['seeds_higher']}" for row in rows],
            "verdict": table["verdict"],
        }
        watched = {name: table[name].map("{:.4f}".format) for name in table if name.startswith("final ")}
        times = {
            "passes": table["passes"],
            "backward passes": table["backward_speed_up"].map("{:.2f}x".format),
            "update": [_speed(row, "update") for row in rows],
            "step": [_speed(row, "step") for row in rows],
            "time to exact's final reward": [_times(row) for row in rows],
            "difference at equal time": [_signed(row, "equal_time_difference") for row in rows],
            "share of exact's time": table["equal_time_share"].map("{:.2f}".format),
        }
        shown["arms"], shown["times"] = pd.DataFrame(about | rewards | watched), pd.DataFrame(about | times)
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


METHOD = (
    "The same GRPO training by every estimator. Runs of one seed draw the same prompts and the same noise, and take "
    "turns at every update, so that all are timed on the same machine in the same minutes. Held-out rewards are of "
    "samples from other noise, drawn without SDE noise; their prompts and noise are the same for every arm and "
    "evaluation of a seed."
)

BLOCKS = (
    Block(
        "Reward against updates and time",
        draw=lambda record, frames: {"curves": curves_figure(record, dict(frames))} if "arms" in frames else {},
        before=METHOD,
        opened=True,
    ),
    Block(
        "Compared with exact",
        "arms",
        note=(
            "After {{ record.settings.updates }} updates. Differences are paired by seed, with 95 % t intervals; p "
            'values are corrected by Holm\'s rule for the number of comparisons in their table. "Equivalent": the '
            'whole interval lies within 10 % of exact\'s gain in reward. "Better" and "worse": the corrected p '
            "value is below 0.05. All else is inconclusive. A seed counts as lower or higher where it differs by more "
            "than 1 % of exact's gain."
        ),
        opened=True,
    ),
    Block(
        "What it costs",
        "times",
        csv="arms",
        note=(
            "Arms other than exact went on for {{ record.settings.longer }} times as many updates. Speed-ups are "
            "medians over seeds and the updates that all arms share of exact's seconds over the arm's in the same "
            "turn, with the lowest and highest median of one seed in parentheses. Times to exact's final reward are "
            "over the time that exact itself needs to reach it first; their interval is from resampled seeds, and too "
            "narrow with as few as four. At equal time: after as many updates as fit in exact's time, or at the arm's "
            "last one, with the share of exact's time that it then has had. Exact and the paper's scheme run as "
            "published, with a forward of every step; the other arms take upstream gradients in closed form, which is "
            "legal here as every update follows its rollout."
        ),
        opened=True,
    ),
    Block(
        "Rewards that were not trained",
        "watched",
        note=(
            "After {{ record.settings.updates }} updates, paired by seed. A part of the trained sum may be listed "
            "here too. An arm that moves a reward more than exact does, although nothing rewards it, follows another "
            "gradient than exact."
        ),
        opened=True,
    ),
    Block("Runs that did not end well", "failures", opened=True),
)
"""Of the page of reward curves."""

EVIDENCE = ("Compared with exact", "Compared with exact", "What it costs")


def answers(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """Says which arm to run, what it keeps and what it saves: the fastest that is shown to train as well as exact.

    Where none is, it is the one whose reward is closest to exact's, named as that.
    """
    others = frames["arms"][frames["arms"]["arm"] != "exact"] if "arms" in frames else pd.DataFrame()
    if not len(others):
        return ["No run of exact ended well: there is nothing to compare with.", "", ""]
    good = others[others["verdict"].isin(AS_GOOD)]
    if len(good):
        row = good.loc[good["step_speed_up"].idxmax()]
        which = f"Run '{LABELS[row['arm']]}': of the arms that train as well as exact it is the fastest."
    else:
        row = others.loc[others["difference"].abs().idxmin()]
        which = (
            f"No arm is shown to train as well as exact with {row['seeds']} seeds; "
            f"'{LABELS[row['arm']]}' comes closest."
        )
    kept = f"Its final reward is {row['final']:.4f}, {_signed(row)} from exact's, n = {row['seeds']}: {row['verdict']}."
    saved = (
        f"It saves {1 - 1 / row['backward_speed_up']:.0%} of the backward passes, "
        f"{1 - 1 / row['update_speed_up']:.0%} of the update's time and {1 - 1 / row['step_speed_up']:.0%} of the "
        "training step's."
    )
    return [which, kept, saved]


def write_curve_report(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Writes tables, figure and ``report.html`` of reward curves. Returns page, short tables, findings."""
    frames = curve_tables.all_tables(record)
    top = answers(frames)
    frames["conclusions"] = answers_table(top, EVIDENCE)
    drawn = draw_blocks(BLOCKS, record, frames)
    pictures = write_tables_and_figures(run, frames, all_figures(drawn))
    shown, findings = printable(frames) | {"conclusions": frames["conclusions"]}, sentences(record, frames)
    page = render(
        title=f"Does the cheaper gradient train as well? {record.backbone}",
        top=[line for line in top if line],
        shown=shown,
        blocks=BLOCKS,
        drawn=drawn,
        pictures=pictures,
        files=written(frames),
        record=record,
        findings=findings,
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, findings
