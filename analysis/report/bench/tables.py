"""Tables of the records that a run of ``python -m bench run`` leaves, one function per kind of record."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from analysis.report.fidelity.tables import interval_columns, speed
from bench.noise import median_of
from bench.speed_ups import update_speed_ups
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

MIB = 2**20

RANK_SECONDS = re.compile(r"rank\d+_(?:(\w+)_)?s")
"""Samples of one rank: all it does (``rank0_s``, or ``rank0_total_s``), or one part of it (``rank0_all_gather_s``)."""


def groups(record: Record, values: dict[str, Any]) -> pd.DataFrame:
    """Arms of one group: times by phase, speed-up over exact, and what the cost model says. Empty without exact.

    ``values`` are those of the run's cell; ``fit`` among them is the model's.
    """
    found = speed([record])
    if len(found):
        fitted = values.get("fit", {}).get("arms", {})
        for name in ("predicted_s", "error"):
            column = [fitted.get(arm, {}).get(name) for arm in found["arm"]]
            found[name] = pd.Series(column, index=found.index, dtype=float)
    return found


def memory(record: Record, values: dict[str, Any]) -> pd.DataFrame:
    """Peak bytes beyond model and gradients by arm (median of the runs), and their ratio to exact's."""
    peaks = {cell.name: median_of(cell.samples["peak_bytes"]) for cell in _ok(record)}
    exact = peaks.get("exact")
    rows = [
        {"arm": arm, "peak_mib": peak / MIB, "ratio": peak / exact if exact else None} for arm, peak in peaks.items()
    ]
    return pd.DataFrame(rows)


def collectives(record: Record, values: dict[str, Any]) -> pd.DataFrame:
    """Collectives per sharded unit, bytes moved, and seconds of the slowest rank (median of the runs), by arm."""
    cells = {cell.name: cell for cell in _ok(record)}
    if "sharding" not in cells:
        return pd.DataFrame()
    units, rows = cells.pop("sharding").values["units"], []
    for arm, cell in cells.items():
        row: dict[str, Any] = {"arm": arm, "units": units}
        row |= {f"{kind}s_per_unit": count / units for kind, count in cell.values["counts"].items()}
        row["moved_mib"] = sum(cell.values["bytes"].values()) / MIB
        rows.append(row | _slowest(cell))
    return pd.DataFrame(rows)


def _slowest(cell: Cell) -> dict[str, float]:
    """Seconds by part, of the slowest rank in every run: a collective waits for all."""
    parts: dict[str, list[Sequence[float | None]]] = {}
    for name, samples in cell.samples.items():
        match = RANK_SECONDS.fullmatch(name)
        if match is not None:
            parts.setdefault(match[1] or "total", []).append(samples)
    return {f"{part}_s": float(pd.DataFrame(ranks).astype(float).max().median()) for part, ranks in parts.items()}


def updates(record: Record, values: dict[str, Any]) -> pd.DataFrame:
    """Arms of an update: speed-up over exact in backward passes, of the update, and of the training step.

    A step is the update with what was measured around it; without a rollout, or if another part failed, it is
    undefined. Empty without exact.
    """
    about = {"backbone": record.backbone} | {key: record.settings[key] for key in ("window", "jagg_frac", "batch")}
    rows = []
    for found in update_speed_ups(record):
        row = about | {key: value for key, value in found.items() if key not in ("backward", "update", "step")}
        row["backward_speed_up"] = found["backward"]
        for part in ("update", "step"):
            row |= interval_columns(f"{part}_speed_up", found[part])
        rows.append(row)
    return pd.DataFrame(rows)


MAKERS: dict[str, tuple[str, Callable[[Record, dict[str, Any]], pd.DataFrame]]] = {
    "group": ("group-speed", groups),
    "memory": ("memory", memory),
    "collectives": ("collectives", collectives),
    "update": ("update-speed", updates),
}
"""By kind of cell: the kind of its record, and its table."""


def table_of(kind: str, record: Record, values: dict[str, Any]) -> pd.DataFrame:
    """The table of a cell's record.

    Raises:
        RecordError: an unknown kind of cell, a record of another kind, or one that lacks what its kind holds.
    """
    if kind not in MAKERS:
        raise RecordError(f"no table is made of a cell of kind {kind!r}, only of {list(MAKERS)}")
    expected, make = MAKERS[kind]
    if record.kind != expected:
        raise RecordError(f"a record of kind {expected!r} is needed, got {record.kind!r}")
    try:
        return make(record, values)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise RecordError(f"a record of kind {expected!r} lacks what it should hold: {error!r}") from error


def _ok(record: Record) -> list[Cell]:
    return [cell for cell in record.cells if cell.status == "ok"]
