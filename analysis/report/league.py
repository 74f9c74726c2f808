"""The page of a league: methods with their rollouts, by signal, work, direction and leak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.report.blocks import Block, Frames, all_figures, answers_table, draw_blocks, written
from analysis.report.fidelity.tables import interval_columns
from analysis.report.figures import style
from analysis.report.page import render, write_tables_and_figures
from analysis.statistics.direction import direction_cosine, direction_lost, signal_ratio, signal_share
from analysis.statistics.intervals import CLAIM_BATCHES, Interval, leak_test
from analysis.statistics.learning_signal import Products, read_products
from jagg_core.files import write_atomically
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

COLOURS = {
    "score function": "#145a32",
    "pathwise": "#c0392b",
    "pathwise, network left out": "#e67e22",
    "AWM": "#2980b9",
    "DiffusionNFT": "#8e44ad",
}
"""By upstream gradient; others are grey."""

TARGETS = (0.02, 0.05, 0.1)
"""Shares of the direction that may be lost, for which the page names the cheapest method."""


def table(record: Record) -> pd.DataFrame:
    """Computes a row per method, those with the most signal per work first.

    ``share``: S, the share of a batch's squared gradient that is its mean's. ``cosine``: of the expected gradient to
    the reference's, ``lost``: ``1 - cosine^2``; both None where S cannot be told from 0. ``per_batch``, ``per_work``:
    signal-to-noise of a batch, and for the same network evaluations, over those of exact. ``leak``: ``|mu|^2 / V``
    with advantages 1. ``step_time``: network evaluations of a training step over exact's.

    Raises:
        RecordError: no reference among the methods.
    """
    cells = {cell.name: cell for cell in record.cells if cell.status == "ok"}
    reference = record.settings["reference"]
    if reference not in cells:
        return pd.DataFrame()
    target = read_products(cells[reference].samples).own
    exact = cells.get("exact")
    base = None if exact is None else (read_products(exact.samples, target), exact.values["step_evaluations"])
    rows = [_row(cell, target, base) for cell in cells.values()]
    return pd.DataFrame(rows).sort_values(["per_work", "share"], ascending=False, ignore_index=True)


def _row(cell: Cell, target: np.ndarray, base: tuple[Products, int] | None) -> dict[str, Any]:
    gradients = read_products(cell.samples, target)
    none = Interval(None, None, None, gradients.n)
    share = signal_share(gradients)
    told_from_zero = share.low is not None and share.low > 0
    cosine, lost = (f(gradients) if told_from_zero else none for f in (direction_cosine, direction_lost))
    work = cell.values["step_evaluations"]
    ratio, faster = none, None
    if base is not None:
        faster = work / base[1]
        ratio = signal_ratio(gradients, base[0]) if told_from_zero else none
    row: dict[str, Any] = {"method": cell.name} | {k: cell.settings[k] for k in ("label", "rollout", "upstream")}
    row |= cell.values | {"step_time": faster}
    for name, interval, factor in (
        ("share", share, 1.0),
        ("cosine", cosine, 1.0),
        ("lost", lost, 1.0),
        ("per_batch", ratio, 1.0),
        ("per_work", ratio, 1 / faster if faster else 1.0),
    ):
        value, low, high = (end and end * factor for end in (interval.value, interval.low, interval.high))
        row |= interval_columns(name, Interval(value, low, high, interval.n))
    if "ones" in cell.samples:
        leak = leak_test(np.reshape(np.array(cell.samples["ones"], dtype=np.float64), (gradients.n, gradients.n)))
        row |= interval_columns("leak", leak.share) | {"leak_p": leak.p_value}
    return row


def printable(frame: pd.DataFrame) -> pd.DataFrame:
    """Makes the short table of a page and of the terminal."""

    def each(name: str, form: str = "{:.3f}") -> list[str]:
        columns = frame[[name, f"{name}_low", f"{name}_high"]].to_numpy(dtype=float)
        return ["" if np.isnan(v[0]) else "{} [{}, {}]".format(*(form.format(x) for x in v)) for v in columns]

    return pd.DataFrame(
        {
            "method": frame["label"],
            "rollout": frame["rollout"],
            "upstream": frame["upstream"],
            "passes": frame["passes"],
            "work": frame["step_evaluations"],
            "signal S": each("share"),
            "signal per work": each("per_work", "{:.1f}"),
            "cosine": each("cosine"),
            "leak": each("leak", "{:.2f}"),
        }
    )


def sentences(record: Record, frame: pd.DataFrame) -> list[str]:
    """Says which method is cheapest for a direction that may be lost, and which cannot be judged."""
    n = int(frame["n"].iloc[0])
    if n < CLAIM_BATCHES:
        return [f"{n} batches: no claim below {CLAIM_BATCHES}."]
    made = []
    for limit in TARGETS:
        enough = frame[(frame["lost_high"] <= limit) & frame["per_work"].notna()]
        if len(enough):
            row = enough.iloc[0]
            made.append(
                f"At most {limit:.0%} of the direction lost (95 %): {row['label']} has the most signal per work, "
                f"{row['per_work']:.1f} [{row['per_work_low']:.1f}, {row['per_work_high']:.1f}] times exact's, n = {n}."
            )
    unknown = frame[frame["cosine"].isna()]["label"].tolist()
    if unknown:
        made.append(f"Signal that cannot be told from 0, so without a cosine: {'; '.join(unknown)}; n = {n}.")
    made.append(f"Reward {record.settings['reward']}, eta {record.settings['eta']:g}; no training is compared here.")
    return made


def conclusions(frame: pd.DataFrame) -> pd.DataFrame:
    """Answers which method to run, what it keeps and saves: the most signal per work within 5 % of the direction."""
    enough = frame[(frame["lost_high"] <= TARGETS[1]) & frame["per_work"].notna() & (frame["n"] >= CLAIM_BATCHES)]
    if enough.empty:
        return answers_table((), ())
    row = enough.iloc[0]
    keeps = (
        f"It keeps the direction: cosine {row['cosine']:.3f} [{row['cosine_low']:.3f}, {row['cosine_high']:.3f}] to "
        "the reference."
    )
    saves = (
        f"It gives {row['per_work']:.1f} [{row['per_work_low']:.1f}, {row['per_work_high']:.1f}] times exact's "
        f"signal for the same network evaluations, n = {row['n']:.0f}."
    )
    caution = "one reward; more signal does not say that training ends better, and rewards are over-optimised sooner"
    return answers_table((f"Run '{row['label']}'.", keeps, saves, caution), (BLOCKS[1].title,) * 4)


def draw(_: Record, frames: Frames) -> dict[str, Figure]:
    """Draws the cosine to the reference against signal per work, a point a method, with 95 % intervals."""
    frame = frames["league"]
    shown = frame[frame["cosine"].notna() & frame["per_work"].notna()]
    if shown.empty:
        return {}
    with style():
        made = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = made.subplots()
        for number, (_, row) in enumerate(shown.iterrows(), start=1):
            colour = COLOURS.get(row["upstream"], "grey")
            x, y = row["per_work"], row["cosine"]
            axes.errorbar(
                x,
                y,
                xerr=[[x - row["per_work_low"]], [row["per_work_high"] - x]],
                yerr=[[y - row["cosine_low"]], [row["cosine_high"] - y]],
                color=colour,
                marker="o",
                markersize=3,
                elinewidth=0.6,
                alpha=0.8,
            )
            axes.annotate(str(number), (x, y), xytext=(3, 3), textcoords="offset points", fontsize=8, color=colour)
        axes.set(xscale="log", xlabel="signal per network evaluation, exact = 1", ylabel="cosine to the reference")
        axes.axhline(1, color="grey", linewidth=0.6)
        axes.text(0.98, 0.95, "better \N{RIGHTWARDS ARROW}", transform=axes.transAxes, ha="right")
        text = [f"{number} {label}" for number, label in enumerate(shown["label"], start=1)]
        made.legend(
            handles=[axes.plot([], [], color=COLOURS.get(up, "grey"))[0] for up in shown["upstream"]],
            labels=text,
            loc="outside right upper",
            fontsize=7,
        )
    made.set_label(
        "Cosine of the expected gradient to the reference against signal per network evaluation, exact = 1; bars are "
        "95 % intervals, numbers those of the legend. A cosine below 1 is a bias: another direction."
    )
    return {"league": made}


BLOCKS = (
    Block(
        "Signal per work against direction",
        draw=draw,
        opened=True,
    ),
    Block(
        "Methods",
        table="league",
        before="Every method on its rollouts, the same weights, reward, prompts and initial noise.",
        note=(
            "Work: network evaluations of a step, per sample: a forward is 1, a backward 2. S: share of the squared "
            "norm of a batch's gradient that is the expected gradient's. Signal per work: S / (1 - S) over the work, "
            "exact = 1. The CSV file has the update's part, and the work where the rollout's graphs serve the update. "
            "Cosine: of the expected gradient to that of all steps of the 20-step SDE sampler, by pathwise gradients; "
            "empty where S cannot be told from 0. Leak: |mu|^2 / V with all advantages 1. Intervals: delete-one "
            "jackknife over batches, Student's t, 95 %."
        ),
        opened=True,
    ),
    Block("Methods that failed", table="failures"),
)


def write_league_report(run: Path, record: Record) -> tuple[Path, dict[str, pd.DataFrame], list[str]]:
    """Writes tables, figure and ``report.html`` of a league. Returns page, short tables, sentences.

    Raises:
        RecordError: the reference did not end well.
    """
    frame = table(record)
    failed = [(c.name, c.reason) for c in record.cells if c.status != "ok"]
    if frame.empty:
        raise RecordError(f"{run / 'record.json'} must hold the reference {record.settings['reference']}, got {failed}")
    frames = {"league": frame}
    texts = sentences(record, frame)
    frames["conclusions"] = conclusions(frame)
    drawn = draw_blocks(BLOCKS, record, frames)
    pictures = write_tables_and_figures(run, frames, all_figures(drawn))
    shown = {"league": printable(frame), "conclusions": frames["conclusions"]}
    if failed:
        shown["failures"] = pd.DataFrame(failed, columns=["method", "reason"])
    page = render(
        title=f"Which method keeps the gradient, at what work? {record.backbone}",
        record=record,
        top=shown["conclusions"]["answer"].tolist()[:3] or texts,
        findings=texts,
        shown=shown,
        blocks=BLOCKS,
        drawn=drawn,
        pictures=pictures,
        files=written(frames),
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html", shown, texts
