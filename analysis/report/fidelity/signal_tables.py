"""Tables of the learning signal, from stored records alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from analysis.report.fidelity.tables import about, interval_columns, leak_columns
from analysis.statistics.intervals import CLAIM_BATCHES, Interval, mean_interval
from analysis.statistics.learning_signal import (
    Products,
    Verdict,
    batches_to_tell,
    bias_interval,
    effective_dimension,
    kept_difference,
    paired_difference,
    read_products,
    signal_loss,
    signal_losses,
    signal_samples,
    verdict,
)
from analysis.statistics.names import CENTRINGS, PER_PROMPT, families_of, grouped_name, recommended_families
from jagg_core.records import Cell, Record

UPDATE_SAMPLES = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Samples per update of the table by batch."""


def products_of(record: Record, centring: str = PER_PROMPT) -> Iterator[tuple[Cell, Products]]:
    """Every estimator's inner products over batches, under one centring of advantages."""
    cells = {c.name: c for c in record.cells if c.status == "ok" and c.settings.get("centring") == centring}
    exact = {
        cell.settings["eta"]: read_products(cell.samples).own
        for cell in cells.values()
        if cell.settings["estimator"] == "exact"
    }
    for cell in cells.values():
        if cell.settings["eta"] in exact:
            yield cell, read_products(cell.samples, exact[cell.settings["eta"]])


def signal(record: Record) -> pd.DataFrame:
    """How much of exact's learning signal every estimator keeps in the user's update, and at what price.

    ``signal``: cosine to the mean of other batches' exact gradients; ``difference``: of it to exact's, paired.
    ``loss``: share of the signal lost at ``update_samples``; ``bias2``: relative squared bias. Costs are shares of
    exact's, of the update and of a training step with its rollout: by passes (a backward is two forwards, upstream
    gradients in closed form), and as measured.
    """
    rows = []
    for cell, found in products_of(record):
        samples = cell_batch(record, cell)
        loss = signal_loss(found, record.settings["update_samples"] / samples)
        target = record.settings["max_signal_loss"]
        row = about(cell)
        row |= interval_columns("signal", mean_interval(signal_samples(found), "cosine"))
        row |= interval_columns("difference", paired_difference(found))
        row |= interval_columns("loss", loss) | interval_columns("bias2", bias_interval(found))
        told = batches_to_tell(loss, target, found.m)
        row |= {"verdict": verdict(loss, target), "samples": found.m * samples}
        row |= {"samples_to_tell": None if told is None else told * samples, "undefined": int(_undefined(found))}
        row |= _costs(record, cell)
        kept = None if loss.value is None else 1 - loss.value
        for name in ("update", "step", "measured_update", "measured_step"):
            share = row[f"{name}_cost"]
            row[f"kept_per_{name}_cost"] = None if kept is None or share is None else kept / share
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.sort_values(["eta", "passes", "family"], ascending=False, ignore_index=True) if rows else frame


def by_batch(record: Record) -> pd.DataFrame:
    """The loss of signal in updates of other sizes: rollout noise hides a bias at small ones, not at large ones."""
    rows, steps = [], len(record.schedule)
    fracs = (record.settings["jagg_frac"], 1.0)
    ours = recommended_families(record)
    shown = {grouped_name(steps, "jagg", window, frac) for window in record.settings["windows"] for frac in fracs}
    for cell, found in products_of(record):
        if cell.settings["estimator"] in shown or cell.settings["family"] in ours:
            scales = [size / cell_batch(record, cell) for size in UPDATE_SAMPLES]
            for size, loss in zip(UPDATE_SAMPLES, signal_losses(found, scales), strict=True):
                rows.append(about(cell) | {"update_samples": size} | interval_columns("loss", loss))
    return pd.DataFrame(rows)


def pairs(record: Record) -> pd.DataFrame:
    """Is one plan better than another in the user's update, and if that cannot be told, how many samples would tell?

    A row per pair of plans whose bias is of interest at full length (exact's batches), and of predicted knots with
    them. ``difference``: share of exact's signal that ``plan`` keeps minus what ``beside`` keeps. ``more_samples``: in
    rollouts beyond those measured (``samples``); empty where the difference is told already, or undefined.
    """
    rows = []
    recommended = recommended_families(record)
    borrowing = [name for name in recommended if families_of(record)[name].knots_of != name]
    found = [
        (cell, products)
        for cell, products in products_of(record)
        if cell.settings["family"] in ("jagg", *recommended)
        and (products.m == products.n or cell.settings["family"] in borrowing)
    ]
    found.sort(key=lambda pair: pair[0].settings["passes"])
    for (cell, one), (other_cell, other) in combinations(found, 2):
        ours, theirs = cell.settings, other_cell.settings
        if ours["eta"] != theirs["eta"]:
            continue
        batch = cell_batch(record, cell)
        difference = kept_difference(one, other, record.settings["update_samples"] / batch)
        needed = batches_to_tell(difference, 0.0, difference.n)
        open_ = said_of_difference(difference) == UNTOLD
        row = {"eta": ours["eta"], "plan": ours["label"], "plan_passes": ours["passes"], "plan_name": ours["estimator"]}
        row |= {"beside": theirs["label"], "beside_passes": theirs["passes"], "beside_name": theirs["estimator"]}
        row |= interval_columns("difference", difference) | {"verdict": said_of_difference(difference)}
        row |= {"samples": difference.n * batch}
        row["more_samples"] = (needed - difference.n) * batch if open_ and needed is not None else None
        rows.append(row)
    return pd.DataFrame(rows)


UNTOLD: Verdict = "cannot be told apart"
TOO_FEW: Verdict = "no claim: too few batches"


def said_of_difference(difference: Interval) -> str:
    """Whether an interval says that the first keeps more of the signal, or less."""
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return UNTOLD
    if difference.n < CLAIM_BATCHES:
        return TOO_FEW
    return "keeps more" if difference.low > 0 else "keeps less"


def centring(record: Record) -> pd.DataFrame:
    """Bias under other centrings of the advantages, and the leak: the mean gradient when all advantages are 1."""
    rows = []
    for name in CENTRINGS:
        for cell, found in products_of(record, name):
            row = about(cell) | {"centring": name}
            if name == "ones":
                row |= leak_columns(found.own)
            elif cell.settings["estimator"] != "exact":
                row |= interval_columns("difference", paired_difference(found))
                row |= interval_columns("bias2", bias_interval(found))
            else:
                row |= interval_columns("signal", mean_interval(signal_samples(found), "cosine"))
            rows.append(row)
    watched = {row["estimator"] for row in rows if row["centring"] == "ones"}
    return pd.DataFrame([row for row in rows if row["estimator"] in watched])


def noise(record: Record) -> pd.DataFrame:
    """The exact gradient's own signal and noise: what every statement about loss of signal rests on."""
    rows = []
    for cell, found in products_of(record):
        if cell.settings["estimator"] == "exact":
            row: dict[str, Any] = {"eta": cell.settings["eta"], "batches": found.n}
            row |= {"samples_per_batch": cell_batch(record, cell)}
            row |= interval_columns("signal", mean_interval(signal_samples(found), "cosine"))
            row["effective_dimension"] = effective_dimension(found.exact)
            rows.append(row)
    return pd.DataFrame(rows)


def all_tables(record: Record) -> dict[str, pd.DataFrame]:
    """Every table by the name of its file."""
    return {
        "signal": signal(record),
        "by_batch": by_batch(record),
        "centring": centring(record),
        "noise": noise(record),
        "pairs": pairs(record),
    }


def cell_batch(record: Record, cell: Cell) -> int:
    """Samples of one rollout batch of the learning signal."""
    return int(record.cell(f"eta={cell.settings['eta']:g}/signal").values["samples_per_batch"])


def _costs(record: Record, cell: Cell) -> dict[str, float | None]:
    steps, passes = len(record.schedule), cell.settings["passes"]
    forwards = steps + 1
    costs: dict[str, float | None] = {
        "update_cost": passes / steps,
        "step_cost": (forwards + 3 * passes) / (forwards + 3 * steps),
        "measured_update_cost": None,
        "measured_step_cost": None,
    }
    times = next(
        (c for c in record.cells if c.name == f"eta={cell.settings['eta']:g}/times" and c.status == "ok"), None
    )
    if times is not None:
        seconds = {name.removesuffix("_s"): float(pd.Series(s).median()) for name, s in times.samples.items()}
        timed = {int(name.split("-")[1]): s for name, s in seconds.items() if name.startswith("causal-")}
        if timed:  # a line needs two points
            slope, base = np.polyfit([*timed, steps], [*timed.values(), seconds["exact"]], 1)
            update, rest = base + slope * passes, seconds["rollout"] + seconds["reward"]
            costs["measured_update_cost"] = float(update / seconds["exact"])
            costs["measured_step_cost"] = float((rest + update) / (rest + seconds["exact"]))
    return costs


def _undefined(found: Products) -> int:
    return sum(sample is None for sample in signal_samples(found))
