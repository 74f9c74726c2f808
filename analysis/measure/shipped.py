"""Calibrations that come with the project, for the backbones that do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.measure.estimators import NamedPlan, with_knots
from analysis.statistics.names import COMPARED_PASSES, COMPARED_WINDOWS
from jagg_core.strict_json import RecordError, read_json

FOLDER = Path(__file__).resolve().parents[2] / "results" / "reference"
PASSES = (10, 8, 6, 5)
"""Of the shipped causal plans that the main job judges again."""


def path(backbone: str, eta: float) -> Path:
    """Returns where the calibration of a backbone would be; there may be none."""
    return FOLDER / f"{backbone}-calibration" / f"calibration-eta{eta:g}.json"


def read(backbone: str, eta: float, sigmas: Tensor, made_with: Mapping[str, str]) -> dict[str, Any] | None:
    """Reads the shipped calibration; None if there is none for this schedule, kernel and timestep mode.

    ``made_with``: see `analysis.measure.study.Study.made_with`.

    Raises:
        RecordError: it is damaged.
    """
    if not path(backbone, eta).exists():
        return None
    data = read_json(path(backbone, eta))
    try:
        schedule = torch.tensor(data["schedule"], dtype=torch.float64)
        same = all(data[key] == value for key, value in made_with.items())
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path(backbone, eta).name}: damaged calibration file: {error}") from error
    if not same or schedule.shape != sigmas.shape or (schedule - sigmas).abs().max() > 1e-6:
        return None
    return dict(data)


def side_by_side(eta: float, sigmas: Tensor, made_with: Mapping[str, str]) -> list[dict[str, Any]]:
    """Lists results of every shipped calibration of this eta, schedule, kernel and timestep mode, by backbone.

    Columns: jagg_frac by window and held-out cosines of causal plans by passes, with their intervals; passes that the
    calibration recommends by each of its targets (None: no plan reaches it).

    Raises:
        RecordError: one is damaged.
    """
    rows = []
    for file in sorted(FOLDER.glob(f"*-calibration/calibration-eta{eta:g}.json")):
        backbone = file.parent.name.removesuffix("-calibration")
        data = read(backbone, eta, sigmas, made_with)
        if data is None:
            continue
        row: dict[str, Any] = {"backbone": backbone, "eta": eta}
        for window in COMPARED_WINDOWS:
            one = data.get("windows", {}).get(str(window), {})
            low, high = one.get("jagg_frac_ci", (None, None))
            row |= _columns(f"jagg_frac_w{window}", one.get("jagg_frac"), low, high)
        for passes in COMPARED_PASSES:
            held_out = data["plans"]["causal"].get(str(passes), {}).get("held_out_cosine") or {}
            row |= _columns(f"causal_{passes}", *(held_out.get(key) for key in ("value", "low", "high")))
            row["n"] = held_out.get("n")
        row["recommended"] = {target: one.get("passes") for target, one in data.get("recommended", {}).items()}
        rows.append(row)
    return rows


def _columns(name: str, value: Any, low: Any, high: Any) -> dict[str, Any]:
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def estimators(calibration: dict[str, Any], sigmas: Tensor) -> list[NamedPlan]:
    """Makes its causal plans, under the names ``shipped-K``."""
    plans = []
    for passes in PASSES:
        plan = calibration["plans"]["causal"].get(str(passes))
        if plan is not None:
            made = with_knots(sigmas, "causal", tuple(plan["knots"]))
            label = f"causal, {passes} knots of the shipped calibration"
            plans.append(NamedPlan(f"shipped-{passes}", label, "causal-shipped", made.plans, made.settings))
    return plans
