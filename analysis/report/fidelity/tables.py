"""Tables from stored records alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from analysis.statistics.intervals import Interval, leak_test, mean_interval
from analysis.statistics.jagg_frac import calibrated_frac
from analysis.statistics.names import METRICS, SCALES, families_of, searched_families
from bench.noise import Ratio
from bench.speed_ups import group_speed_ups
from jagg_core.plans import groups_of
from jagg_core.records import Cell, Record


def interval_columns(name: str, interval: Interval | Ratio) -> dict[str, Any]:
    """An interval as columns of a table."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high, "n": interval.n}


def _estimator_cells(record: Record) -> list[Cell]:
    return [c for c in record.cells if c.status == "ok" and "headline" in c.settings]


def about(cell: Cell) -> dict[str, Any]:
    """Columns that say which estimator a row is of."""
    return {key: cell.settings[key] for key in ("eta", "estimator", "label", "family", "passes", "anticipating")}


def windows_of_paper(record: Record, eta: float, centring: str | None = None) -> str:
    """Windows at which the paper's rule was judged, such as ``W = 3 to 5, 8``; empty if it was not.

    By its cosine to exact; under a ``centring`` of advantages, by its learning signal.
    """
    cells = _estimator_cells(record) if centring is None else [c for c in record.cells if c.status == "ok"]
    about = [c.settings for c in cells if c.settings.get("centring") == centring]
    windows = sorted({s["window"] for s in about if s["family"] == "jagg" and s["eta"] == eta})
    runs: list[list[int]] = []
    for window in windows:
        if runs and window == runs[-1][-1] + 1:
            runs[-1].append(window)
        else:
            runs.append([window])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"W = {', '.join(texts)}" if texts else ""


def whole_update(record: Record) -> pd.DataFrame:
    """Similarity of the whole update to exact, one row per headline estimator: mean and 95 % interval."""
    rows = []
    for cell in _estimator_cells(record):
        if cell.settings["headline"]:
            row = about(cell)
            for metric in METRICS:
                row |= interval_columns(metric, mean_interval(cell.samples[metric], SCALES[metric]))
            rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.sort_values(["eta", "passes", "cosine"], ascending=False, ignore_index=True) if rows else frame


def per_group(record: Record) -> pd.DataFrame:
    """The same for what each group of steps contributes. ``undefined`` counts batches left out (zero gradients)."""
    rows = []
    steps = len(record.schedule)
    for cell in _estimator_cells(record):
        by_group = cell.settings["headline"] and "whole_update_only" not in cell.settings
        for window in record.settings["windows"] if by_group else ():
            for number, group in enumerate(groups_of(steps, window)):
                row = about(cell) | {"window": window, "group": number}
                row |= {"sigma_first": record.schedule[group[0]], "sigma_last": record.schedule[group[-1]]}
                for metric in METRICS:
                    samples = cell.samples[f"w{window}.group{number}.{metric}"]
                    row |= interval_columns(metric, mean_interval(samples, SCALES[metric]))
                    if metric == "cosine":
                        row["undefined"] = sum(s is None for s in samples)
                rows.append(row)
    return pd.DataFrame(rows)


def pareto(record: Record) -> pd.DataFrame:
    """Cosine against passes for every plan that was judged; ``best`` marks the best of its family at its passes."""
    families = families_of(record)
    rows = [
        about(cell) | interval_columns("cosine", mean_interval(cell.samples["cosine"], "cosine"))
        for cell in _estimator_cells(record)
        if families[cell.settings["family"]].in_front
    ]
    frame = pd.DataFrame(rows)
    if rows:
        best = frame.groupby(["eta", "family", "passes"])["cosine"].transform("max")
        frame["best"] = frame["cosine"] == best
        frame = frame.sort_values(["eta", "family", "passes"], ignore_index=True)
    return frame


TARGETS = (0.8, 0.85, 0.9, 0.95, 0.97, 0.99)
"""Thresholds at which `routing` shows how ``jagg_frac`` depends on them, beside the one that was asked for."""


def routing(record: Record) -> pd.DataFrame:
    """``jagg_frac`` that keeps every routed group's cosine at a threshold, per eta and window."""
    rows = []
    wanted = record.settings["threshold"]
    for cell in _estimator_cells(record):
        window = cell.settings.get("window", 0)
        if cell.settings["family"] == "jagg" and cell.settings.get("jagg_frac") == 1.0 and cell.settings["headline"]:
            numbers = range(len(groups_of(len(record.schedule), window)))
            cosines = [cell.samples[f"w{window}.group{n}.cosine"] for n in numbers]
            for threshold in sorted({*TARGETS, wanted}):
                row = {"eta": cell.settings["eta"], "window": window, "threshold": threshold}
                row |= {"groups": len(numbers), "asked_for": threshold == wanted}
                rows.append(row | interval_columns("jagg_frac", calibrated_frac(cosines, threshold)))
    return pd.DataFrame(rows)


def blocks(record: Record) -> pd.DataFrame:
    """Similarity of the whole update in each block of parameters alone."""
    rows = []
    for cell in _estimator_cells(record):
        names = [key.split(".")[1] for key in cell.samples if key.startswith("block.") and key.endswith(".cosine")]
        for block in names:
            row = about(cell) | {"block": block}
            for metric in METRICS:
                samples = cell.samples[f"block.{block}.{metric}"]
                row |= interval_columns(metric, mean_interval(samples, SCALES[metric]))
            rows.append(row)
    return pd.DataFrame(rows)


def cross(record: Record) -> pd.DataFrame:
    """Mean cosine of ``C[knot, step]`` to ``C[step, step]``: the knot before the step (past), or after it (future)."""
    rows = []
    for cell in record.cells:
        if cell.name.endswith("/cross") and cell.status == "ok":
            for knot, cosines in enumerate(cell.values["cosine"]):
                for step, cosine in enumerate(cosines):
                    rows.append({"eta": cell.settings["eta"], "knot": knot, "step": step, "cosine": cosine})
    return pd.DataFrame(rows)


def knots(record: Record) -> pd.DataFrame:
    """Calibrated knots for every number of passes, with the cosine on the rollouts they were searched on."""
    rows = []
    for cell in record.cells:
        if cell.name.endswith("/knots") and cell.status == "ok":
            for family in searched_families(record, cell.values):
                for passes, found in cell.values[family].items():
                    row = {"eta": cell.settings["eta"], "family": family, "passes": int(passes)}
                    rows.append(row | {"knots": " ".join(map(str, found["knots"])), "cosine": found["cosine"]})
    return pd.DataFrame(rows)


def floor(record: Record) -> pd.DataFrame:
    """How far the exact gradient is from itself: computed again, and in half batches; ``distance``: 1 - cosine."""
    rows = []
    for cell in record.cells:
        if cell.name.endswith("/floor") and cell.status == "ok":
            for what, found in cell.values.items():
                row = {"eta": cell.settings["eta"], "computed": what, "distance": 1 - found["cosine"]}
                rows.append(row | {name: found[name] for name in ("rel_error", "norm_ratio")})
    return pd.DataFrame(rows)


def leak(record: Record) -> pd.DataFrame:
    """Squared norm of the mean gradient under advantages of 1, over the noise power of a batch."""
    rows = []
    for cell in record.cells:
        if "/leak/" in cell.name and cell.status == "ok":
            gram = np.array(cell.samples["gram"], dtype=np.float64)
            side = math.isqrt(len(gram))
            rows.append(about(cell) | leak_columns(gram.reshape(side, side)))
    return pd.DataFrame(rows)


def leak_columns(gram: np.ndarray) -> dict[str, Any]:
    """The leak test of inner products ``[n, n]`` as columns of a table."""
    test = leak_test(gram)
    columns = {"p_value": test.p_value, "p_floor": test.p_floor, "p_text": test.p_text}
    return interval_columns("share", test.share) | columns


def side_by_side(record: Record) -> pd.DataFrame:
    """What the shipped calibrations found, one row per backbone; empty unless there are two to compare."""
    rows = []
    for cell in record.cells:
        if cell.name.endswith("/side-by-side") and cell.status == "ok" and len(cell.values["rows"]) > 1:
            for row in cell.values["rows"]:
                targets = {f"passes for {target}": passes for target, passes in row["recommended"].items()}
                rows.append({key: value for key, value in row.items() if key != "recommended"} | targets)
    return pd.DataFrame(rows)


def speed(records: list[Record]) -> pd.DataFrame:
    """Seconds per group (median over rounds) by phase, and speed-up over exact: ratio of medians, paired by round."""
    rows = []
    for record in records:
        for found in group_speed_ups(record):  # none of a run that failed, which has no settings
            backward = found.pop("backward")
            row = {"backbone": record.backbone} | {name: record.settings[name] for name in ("window", "batch")}
            row |= found | interval_columns("speed_up", found["speed_up"])
            rows.append(row | {"backward_speed_up": None if backward is None else backward.value})
    return pd.DataFrame(rows)


def failures(records: list[Record]) -> pd.DataFrame:
    """Cells that are not ok, with their reasons."""
    return pd.DataFrame(
        [
            {"backbone": record.backbone, "cell": cell.name, "status": cell.status, "reason": cell.reason}
            for record in records
            for cell in record.cells
            if cell.status != "ok"
        ]
    )


def all_tables(record: Record, speed_records: list[Record]) -> dict[str, pd.DataFrame]:
    """Every table by the name of its file."""
    return {
        "whole_update": whole_update(record),
        "per_group": per_group(record),
        "pareto": pareto(record),
        "routing": routing(record),
        "blocks": blocks(record),
        "cross": cross(record),
        "knots": knots(record),
        "floor": floor(record),
        "leak": leak(record),
        "side_by_side": side_by_side(record),
        "speed": speed(speed_records),
        "failures": failures([record, *speed_records]),
    }
