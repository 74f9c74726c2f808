"""What a study concludes, one answer to every question: which plan, what it keeps, what it saves, caution."""

from __future__ import annotations

import pandas as pd

from analysis.report.blocks import QUESTIONS
from analysis.report.fidelity.direction import decisive
from analysis.report.fidelity.printable import with_n
from analysis.report.fidelity.recommendation import Frames, fewest_passes, recommend, recommend_signal
from analysis.report.fidelity.sentences import QUICK
from analysis.report.fidelity.tables import interval_columns
from analysis.statistics.intervals import mean_interval
from analysis.statistics.names import recommended_families
from jagg_core.records import Record

EVIDENCE = {
    "signal": ("Is one plan better than another?", "Learning signal", "Signal kept per cost", "How it was measured"),
    "cosine": ("Whole update", "Whole update", "Whole update", "How it was measured"),
}
"""Blocks of the page that answer the `QUESTIONS`, by what decides."""


def conclusions(record: Record, frames: Frames) -> pd.DataFrame:
    """Makes the table of conclusions: a row per question, a column per eta, and the block with the evidence.

    It is empty without judged plans.
    """
    columns = {f"eta {eta:g}": answers(record, eta, frames) for eta in record.settings["etas"]}
    defined = {title: column for title, column in columns.items() if column}
    evidence = EVIDENCE["signal" if len(frames.get("signal", ())) else "cosine"]
    return pd.DataFrame({"question": QUESTIONS} | defined | {"evidence": evidence}) if defined else pd.DataFrame()


def headline(record: Record, frames: Frames) -> list[str]:
    """Writes the first three lines of the page, at the first eta that was judged."""
    for eta in record.settings["etas"]:
        found = answers(record, eta, frames)
        if found:
            plan, kept, saved, _ = found
            return [f"At eta {eta:g}, run {plan}.", f"It keeps {kept}.", f"It saves {saved}."] if kept else [plan]
    return ["No plan was judged."]


def answers(record: Record, eta: float, frames: Frames) -> list[str]:
    """Answers the `QUESTIONS` at one eta: by the learning signal where it was measured, else by the cosine.

    Returns:
        Four texts, the second and third empty where no plan is recommended; none at all without judged plans.
    """
    signal = frames.get("signal", pd.DataFrame())
    at = signal[signal["eta"] == eta] if len(signal) else signal
    steps = len(record.schedule)
    if len(at):
        direction = frames.get("pathwise")
        text, name = recommend_signal(record, at, direction)
        if name is None:
            return [f"none yet: {text}", "", "", _caution(record)]
        decided = decisive(at, direction)
        row = decided[decided["estimator"] == name].iloc[0]
        timed = at[at["estimator"] == name].dropna(subset=["measured_update_cost"])
        share = {
            key: 1 - row[column] for key, column in (("value", "loss"), ("low", "loss_high"), ("high", "loss_low"))
        }
        kept = f"{share['value']:.1%} [{share['low']:.1%}, {share['high']:.1%}] of exact's learning signal in an update"
        kept += f" of {record.settings['update_samples']} samples, n = {int(row['n'])}"
        saved = _passes_saved(row["passes"], steps)
        if len(timed):
            cost = timed.iloc[0]
            saved += f"; as timed {1 - cost['measured_update_cost']:.0%} of the update's time"
            saved += f" and {1 - cost['measured_step_cost']:.0%} of the training step's"
        return [f"'{row['label']}', {row['passes']} of {steps} passes", kept, saved, _caution(record)]
    target = record.settings.get("min_cosine", 0.99)
    text = recommend(record, eta, target) or ""
    cell = fewest_passes(record, eta, target, recommended_families(record))
    if cell is None:
        return [f"none yet: {text}", "", "", _caution(record)] if text else []
    about = pd.Series(interval_columns("cosine", mean_interval(cell.samples["cosine"], "cosine")))
    kept = f"a cosine to exact of {with_n(about, 'cosine', 4)} batches"
    passes = cell.settings["passes"]
    plan = f"'{cell.settings['label']}', {passes} of {steps} passes"
    return [plan, kept, _passes_saved(passes, steps), _caution(record)]


def _passes_saved(passes: int, steps: int) -> str:
    return f"{1 - passes / steps:.0%} of the update's passes"


def _caution(record: Record) -> str:
    failed = sum(cell.status == "failed" for cell in record.cells)
    parts = [QUICK.removesuffix(".")] if record.settings.get("quick") else []
    reward = f" and reward {record.settings['reward']}" if record.settings.get("reward") else ""
    parts.append(f"measured on {record.backbone}{reward} alone: another model needs its calibration")
    parts += [f"{failed} cells failed"] if failed else []
    return "; ".join(parts)
