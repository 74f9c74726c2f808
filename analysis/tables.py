"""Tables from stored records alone."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.routing import calibrated_frac
from analysis.similarity import METRICS
from analysis.statistics import Interval, bootstrap, ratio_of_medians
from jagg_core.plan import groups_of
from jagg_core.records import Cell, Record


def _interval(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high, "n": interval.n}


def _estimator_cells(record: Record) -> list[Cell]:
    return [c for c in record.cells if c.status == "ok" and "headline" in c.settings]


def _about(cell: Cell) -> dict[str, Any]:
    return {key: cell.settings[key] for key in ("eta", "estimator", "label", "family", "passes", "anticipating")}


def whole_update(record: Record) -> pd.DataFrame:
    """Similarity of the whole update to exact, one row per headline estimator: mean and 95 % bootstrap interval."""
    rows = []
    for cell in _estimator_cells(record):
        if cell.settings["headline"]:
            row = _about(cell)
            for metric in METRICS:
                row |= _interval(metric, bootstrap(cell.samples[metric]))
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
                row = _about(cell) | {"window": window, "group": number}
                row |= {"sigma_first": record.schedule[group[0]], "sigma_last": record.schedule[group[-1]]}
                for metric in METRICS:
                    samples = cell.samples[f"w{window}.group{number}.{metric}"]
                    row |= _interval(metric, bootstrap(samples))
                    if metric == "cosine":
                        row["undefined"] = sum(s is None for s in samples)
                rows.append(row)
    return pd.DataFrame(rows)


def pareto(record: Record) -> pd.DataFrame:
    """Cosine against passes for every plan that was judged; ``best`` marks the best of its family at its passes."""
    rows = [
        _about(cell) | _interval("cosine", bootstrap(cell.samples["cosine"]))
        for cell in _estimator_cells(record)
        if cell.settings["family"] in ("jagg", "spline", "causal")
    ]
    frame = pd.DataFrame(rows)
    if rows:
        best = frame.groupby(["eta", "family", "passes"])["cosine"].transform("max")
        frame["best"] = frame["cosine"] == best
        frame = frame.sort_values(["eta", "family", "passes"], ignore_index=True)
    return frame


def routing(record: Record) -> pd.DataFrame:
    """``jagg_frac`` that keeps every routed group's cosine at the threshold, per eta and window."""
    rows = []
    threshold = record.settings["threshold"]
    for cell in _estimator_cells(record):
        window = cell.settings.get("window", 0)
        if cell.settings["family"] == "jagg" and cell.settings.get("jagg_frac") == 1.0 and cell.settings["headline"]:
            numbers = range(len(groups_of(len(record.schedule), window)))
            cosines = [cell.samples[f"w{window}.group{n}.cosine"] for n in numbers]
            row = {"eta": cell.settings["eta"], "window": window, "threshold": threshold}
            rows.append(row | _interval("jagg_frac", calibrated_frac(cosines, threshold)))
    return pd.DataFrame(rows)


def leak(record: Record) -> pd.DataFrame:
    """Squared norm of the mean gradient under advantages of 1, over its sampling noise."""
    return pd.DataFrame(
        [_about(cell) | cell.values for cell in record.cells if "/leak/" in cell.name and cell.status == "ok"]
    )


def speed(records: list[Record]) -> pd.DataFrame:
    """Seconds per group (median over rounds) by phase, and speed-up over exact: ratio of medians, paired by round."""
    rows = []
    for record in records:
        cells = {c.name: c for c in record.cells if c.status == "ok"}
        if "exact" not in cells:
            continue
        exact = cells["exact"].samples
        for name, cell in cells.items():
            row: dict[str, Any] = {"backbone": record.backbone, "window": record.settings["window"]}
            row |= {"batch": record.settings["batch"], "arm": name, "passes": cell.values["passes"]}
            for phase in ("total", "forward", "upstream", "backward"):
                samples = cell.samples.get(f"{phase}_s")
                row[f"{phase}_s"] = None if samples is None else float(pd.Series(samples).median())
            row["fastest_s"] = min(s for s in cell.samples["total_s"] if s is not None)
            row |= _interval("speed_up", ratio_of_medians(exact["total_s"], cell.samples["total_s"]))
            if "backward_s" in cell.samples:
                row["backward_speed_up"] = ratio_of_medians(exact["backward_s"], cell.samples["backward_s"]).value
            rows.append(row)
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
        "leak": leak(record),
        "speed": speed(speed_records),
        "failures": failures([record, *speed_records]),
    }
