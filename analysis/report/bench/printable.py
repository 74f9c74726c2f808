"""Short tables of a bench run for people; the CSV files hold every column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.report.bench.run import BROKEN, Measured
from analysis.report.fidelity.printable import interval_text
from analysis.report.figures import arm_labels
from bench.speed_ups import PARTS, PHASES


def printable(cells: Sequence[Measured], frames: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """What became of the cells, the paper's figures, a table per measured cell by its name, and what is broken."""
    status = frames["cells"]
    shown = {"cells": status.assign(reason=status["reason"].map(_last_line)), "beside_the_paper": _paper(frames)}
    for one in cells:
        if one.kind in SHORT and len(one.table):
            shown[one.name] = SHORT[one.kind](one.table)
    broken = status[status["status"].isin(BROKEN)]
    return shown | ({"failures": broken} if len(broken) else {})


def _paper(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    paper = frames["beside_the_paper"]
    absolute = [
        "" if pd.isna(row["baseline"]) else f" ({row['baseline']:g} to {row['jagg']:g} {row['unit']})"
        for _, row in paper.iterrows()
    ]
    predicted = [
        "" if pd.isna(row["predicted"]) else f"{row['predicted']:.1%} ({row['predicted_for']})"
        for _, row in paper.iterrows()
    ]
    return pd.DataFrame(
        {
            "what": paper["what"],
            "algorithm": paper["algorithm"].fillna(""),
            "backbone of the paper": paper["backbone"].fillna(""),
            "published, less": paper["published"].map("{:.1%}".format) + absolute,
            "predicted, less": predicted,
            "measured here, less": [share_text(row) for _, row in paper.iterrows()],
            "measured on": paper["measured_on"].fillna(""),
            "source of the published figure": paper["source"],
        }
    )


def share_text(row: pd.Series) -> str:
    """Writes a measured share of time saved with its interval; a negative one is time lost."""
    if pd.isna(row["measured"]):
        return "not measured"
    text = f"{row['measured']:.1%}"
    return text if pd.isna(row["measured_low"]) else f"{text} [{row['measured_low']:.1%}, {row['measured_high']:.1%}]"


def _group(table: pd.DataFrame) -> pd.DataFrame:
    columns: dict[str, Any] = {"arm": arm_labels(table), "passes": table["passes"]}
    columns |= {f"{phase}, ms": _numbers(table[f"{phase}_s"] * 1000, "{:.1f}") for phase in PHASES}
    columns["speed-up"] = _intervals(table, "speed_up")
    if table["predicted_s"].notna().any():
        columns["model, ms"] = _numbers(table["predicted_s"] * 1000, "{:.1f}")
        columns["model's error"] = _numbers(table["error"], "{:+.1%}")
    return pd.DataFrame(columns)


def _memory(table: pd.DataFrame) -> pd.DataFrame:
    ratio = _numbers(table["ratio"], "{:.2f}")
    return pd.DataFrame(
        {"arm": arm_labels(table), "peak, MiB": _numbers(table["peak_mib"], "{:.1f}"), "over exact": ratio}
    )


def _collectives(table: pd.DataFrame) -> pd.DataFrame:
    columns: dict[str, Any] = {"arm": arm_labels(table)}
    for name in table.columns:
        if name.endswith("s_per_unit"):
            title = name.removesuffix("_per_unit").replace("_", "-")
            columns[f"{title} per unit"] = _numbers(table[name], "{:.3g}")
    columns["moved, MiB"] = _numbers(table["moved_mib"], "{:.1f}")
    for name in table.columns:
        if name.endswith("_s"):
            columns[f"{name.removesuffix('_s').replace('_', '-')}, s"] = _numbers(table[name], "{:.3g}")
    return pd.DataFrame(columns)


def _update(table: pd.DataFrame) -> pd.DataFrame:
    columns: dict[str, Any] = {"arm": arm_labels(table), "passes": table["passes"]}
    columns["update, s"] = _numbers(table["update_s"], "{:.3g}")
    columns |= {f"{part}, s": _numbers(table[f"{part}_s"], "{:.3g}") for part in PARTS if f"{part}_s" in table}
    columns["backward passes"] = _numbers(table["backward_speed_up"], "{:.2f}x")
    columns["update speed-up"] = _intervals(table, "update_speed_up")
    columns["step speed-up"] = _intervals(table, "step_speed_up")
    return pd.DataFrame(columns)


SHORT: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "group": _group,
    "memory": _memory,
    "collectives": _collectives,
    "update": _update,
}
"""By kind of cell."""


def _numbers(column: pd.Series, form: str) -> pd.Series:
    """As text; empty where undefined."""
    return column.map(lambda value: "" if pd.isna(value) else form.format(value))


def _intervals(table: pd.DataFrame, name: str) -> list[str]:
    return [interval_text(row, name, 2) for _, row in table.iterrows()]


def _last_line(reason: str) -> str:
    """Of a traceback, the error."""
    return reason.strip().splitlines()[-1] if reason.strip() else ""
