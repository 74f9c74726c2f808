"""What causal plans lose of the expected gradient, by pathwise gradients: table, sentences, and what decides on a plan.

From stored records alone.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from analysis.report.fidelity.tables import about, interval_columns
from analysis.statistics.direction import direction_cosine, direction_lost, signal_share, update_loss
from analysis.statistics.intervals import Interval
from analysis.statistics.learning_signal import Verdict, batches_to_tell, read_products, verdict
from jagg_core.records import Cell, Record

SCORE_FUNCTION = "score function"


def pathwise(record: Record) -> pd.DataFrame:
    """Computes what every causal plan loses of the expected gradient, one row per plan and eta.

    ``cosine``: of the expected gradients of plan and exact. ``lost``: ``1 - cosine^2``. ``share``: S of one batch.
    ``loss``: share of exact's signal that an update of ``update_samples`` loses by the policy gradient, where its noise
    was measured. ``verdict``: on the larger of the two losses, against ``max_signal_loss``. The row whose ``upstream``
    is the score function is exact's policy gradient on the same batches: its cosine should be 1 within the interval.
    """
    rows = []
    for head in (c for c in record.cells if c.status == "ok" and "adjoint_norms" in c.values):
        rows += _rows(record, head)
    frame = pd.DataFrame(rows)
    return frame.sort_values(["eta", "passes", "family"], ascending=False, ignore_index=True) if rows else frame


def _rows(record: Record, head: Cell) -> list[dict[str, Any]]:
    cells = [c for c in record.cells if c.status == "ok" and c.name.startswith(f"{head.name}/")]
    first = next((c for c in cells if c.name == f"{head.name}/exact"), None)
    if first is None:
        return []
    exact, target = read_products(first.samples).own, record.settings["max_signal_loss"]
    samples, rows = head.values["samples_per_batch"], []
    for cell in cells:
        gradients = read_products(cell.samples, exact)
        lost, loss = direction_lost(gradients), Interval(None, None, None, gradients.n)
        if "score_powers" in cell.samples:
            powers, of_exact = (one.samples["score_powers"] for one in (cell, first))
            scale = record.settings["update_samples"] / samples
            loss = update_loss(gradients, _numbers(powers), _numbers(of_exact), scale)
        row = about(cell) | {"upstream": cell.settings["upstream"]}
        row |= interval_columns("cosine", direction_cosine(gradients)) | interval_columns("lost", lost)
        row |= interval_columns("share", signal_share(gradients)) | interval_columns("loss", loss)
        row |= {"samples": gradients.n * samples, "reward": head.settings["reward"], "proxy": head.settings["proxy"]}
        row |= {"verdict": _verdict(lost, loss, target)}
        batches = [batches_to_tell(one, target, gradients.n) for one in (lost, loss)]
        row["samples_to_tell"] = None if None in batches else max(map(int, filter(None, batches))) * samples
        rows.append(row)
    return rows


def _numbers(samples: list[float | None]) -> list[float]:
    return [math.nan if sample is None else sample for sample in samples]


def _verdict(lost: Interval, loss: Interval, target: float) -> Verdict:
    """A plan keeps the signal where both losses are below the target; it loses it where either is above."""
    both = {verdict(lost, target), verdict(loss, target)}
    order: tuple[Verdict, ...] = ("no claim: too few batches", "lost", "cannot be told apart", "kept")
    return next(one for one in order if one in both)


def decisive(signal: pd.DataFrame, direction: pd.DataFrame | None) -> pd.DataFrame:
    """Returns the table of the learning signal with the rows that pathwise gradients decide in the place of theirs.

    Those are the plans whose loss in the update is known; the others stay as the score function has them.
    """
    if direction is None or not len(direction):
        return signal
    known = direction[(direction["upstream"] != SCORE_FUNCTION) & direction["loss"].notna()]
    known = known[known["eta"].isin(signal["eta"]) & (known["estimator"] != "exact")]
    others = signal[~signal["estimator"].isin(known["estimator"])]
    return pd.concat([others, known], ignore_index=True) if len(known) else signal


def percent(row: Any, name: str) -> str:
    """``1.2 % [0.8, 1.6]``, with a third digit below one percent."""
    values = [100 * row[key] for key in (name, f"{name}_low", f"{name}_high")]
    digits = 1 if abs(values[0]) >= 1 else 2
    value, low, high = (f"{one:.{digits}f}" for one in values)
    return f"{value} % [{low}, {high}]"


def loss_text(row: Any) -> str:
    """What a plan of the pathwise table loses, with n."""
    by = f"by pathwise gradients of the proxy {row['reward']}" if row["proxy"] else "by pathwise gradients"
    return (
        f"loses {percent(row, 'lost')} of the direction and {percent(row, 'loss')} of the signal of the update, "
        f"n = {int(row['n'])}, {by}"
    )


def direction_sentences(record: Record, direction: pd.DataFrame) -> list[str]:
    """Says what every judged plan loses and whether the score function agrees, or why it is not known."""
    sentences = [
        f"eta {cell.settings['eta']:g}: no pathwise gradients, so losses are by the score function alone: "
        f"{cell.values['reason']}."
        for cell in record.cells
        if cell.status == "ok" and cell.name.endswith("/pathwise") and "reason" in cell.values
    ]
    for eta, part in direction.groupby("eta", sort=False) if len(direction) else ():
        plans = part[(part["upstream"] != SCORE_FUNCTION) & (part["estimator"] != "exact") & part["loss"].notna()]
        row = part.iloc[0]
        kind = "proxy reward" if row["proxy"] else "reward"
        each = [f"'{r['label']}' loses {percent(r, 'lost')}" for _, r in plans.iterrows() if not pd.isna(r["lost"])]
        if each:
            sentences.append(
                f"eta {eta:g}: of the direction of the expected gradient (1 - cosine^2) {'; '.join(each)}; by pathwise "
                f"gradients ({kind} {row['reward']}), n = {int(row['n'])} batches, {int(row['samples'])} samples. "
                "Plans that look ahead are left out: pathwise gradients do not see their leak."
            )
        score, exact = part[part["upstream"] == SCORE_FUNCTION], part[part["estimator"] == "exact"]
        exact = exact[exact["upstream"] != SCORE_FUNCTION]
        if len(score) and len(exact):
            sentences.append(_check_sentence(eta, score.iloc[0], exact.iloc[0]))
    return sentences


def _check_sentence(eta: float, score: pd.Series, exact: pd.Series) -> str:
    """Is the expected gradient that of the score function? Both shares of signal stand beside the cosine."""
    shares = [f"{r['share']:.3f} [{r['share_low']:.3f}, {r['share_high']:.3f}]" for r in (exact, score)]
    text = (
        f"eta {eta:g}: signal of one batch, pathwise {shares[0]}, score function {shares[1]}, n = {int(score['n'])}; "
    )
    if pd.isna(score["cosine"]):
        return text + "their expected gradients cannot be compared, as the score function's cannot be told from zero."
    interval = f"{score['cosine']:.3f} [{score['cosine_low']:.3f}, {score['cosine_high']:.3f}]"
    agree = "agrees with 1" if score["cosine_low"] <= 1 <= score["cosine_high"] else "does not agree with 1"
    return text + f"the cosine of their expected gradients is {interval}, which {agree}."
