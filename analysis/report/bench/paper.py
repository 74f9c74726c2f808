"""The paper's figures of time, beside what the cost model predicts for its backbones and what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.report.bench.run import Measured
from analysis.report.cost import PUBLISHED
from bench.arms import PAPER
from jagg_core.records import Record
from jagg_core.strict_json import read_json

RECIPE = {"window": 4, "jagg_frac": 0.6}
"""What the paper's figures fit; it states neither."""

SMALLEST = 3
"""Window from which the paper's rule saves anything: in a group of two both steps are ends."""

MEASURED = {
    "training step": ("update", "step_speed_up"),
    "update stage": ("update", "update_speed_up"),
    "backward of a group": ("group", "backward_speed_up"),
}
"""What is measured for a published figure: a kind of cell, and a column of its table in the row `PAPER`."""


def beside_the_paper(cells: Sequence[Measured]) -> pd.DataFrame:
    """Published, predicted and measured shares of time saved: a row per figure and cell whose recipe is nearest.

    Figures that are not of time are left out. A prediction is for the figure's backbone, from a cost record of the
    folder; a measurement is on the backbone and machine of this run.
    """
    published = read_json(PUBLISHED)
    predictions = [one for one in cells if one.kind == "cost" and one.record is not None]
    rows = []
    for figure in published["figures"]:
        if figure["what"] in MEASURED:
            about = {key: figure[key] for key in ("what", "algorithm", "backbone", "baseline", "jagg", "unit")}
            about |= {"published": figure["reduction"], **_predicted(figure, predictions)}
            rows += [about | found | {"source": published["source"]} for found in _measured(figure["what"], cells)]
    return pd.DataFrame(rows)


def _predicted(figure: dict[str, Any], predictions: Sequence[Measured]) -> dict[str, Any]:
    for one in predictions:
        if one.record is not None and figure["backbone"] in (None, one.record.backbone):
            for row in one.table.to_dict("records"):
                if (row["what"], row["algorithm"]) == (figure["what"], figure["algorithm"]):
                    return {key: row[key] for key in ("predicted", "predicted_for")}
    return {"predicted": None, "predicted_for": None}


def _measured(what: str, cells: Sequence[Measured]) -> list[dict[str, Any]]:
    """The paper's scheme in the cells whose settings are nearest to its recipe; one row without a value if none is."""
    kind, ratio = MEASURED[what]
    found: list[tuple[float, dict[str, Any]]] = []
    for one in cells:
        if one.kind != kind or one.record is None or not len(one.table) or one.record.settings["window"] < SMALLEST:
            continue
        rows = one.table[one.table["arm"] == PAPER]
        if len(rows):
            row, settings = rows.iloc[0], one.record.settings
            distance = sum(abs(settings[key] - value) for key, value in RECIPE.items() if key in settings)
            ends = {"": ratio, "_low": f"{ratio}_low", "_high": f"{ratio}_high"}
            reductions = {f"measured{end}": saved(row.get(source)) for end, source in ends.items()}
            found.append((distance, {**reductions, "measured_on": _about(one.record), "cell": one.name}))
    nearest = min((distance for distance, _ in found), default=0.0)
    nothing = {"measured": None, "measured_low": None, "measured_high": None, "measured_on": None, "cell": None}
    return [row for distance, row in found if distance == nearest] or [nothing]


def saved(speed_up: float | None) -> float | None:
    """Share of time that a speed-up saves; None if it is undefined."""
    return None if speed_up is None or pd.isna(speed_up) else 1 - 1 / speed_up


def _about(record: Record) -> str:
    settings = record.settings
    frac = [f"jagg_frac {settings['jagg_frac']:g}"] if "jagg_frac" in settings else []
    kept = ["checkpointing"] if settings.get("checkpointing") else []
    return ", ".join([record.backbone, f"W = {settings['window']}", *frac, f"batch {settings['batch']}", *kept])
