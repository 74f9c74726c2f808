"""Calibrations that come with the project, for the backbones that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.estimators import Estimator, with_knots
from jagg_core.records import RecordError, read_json

FOLDER = Path(__file__).resolve().parent.parent / "results" / "reference"
PASSES = (10, 8, 6, 5)
"""Of the shipped causal plans that the main job judges again."""


def path(backbone: str, eta: float) -> Path:
    """Where the calibration of a backbone would be; there may be none."""
    return FOLDER / f"{backbone}-calibration" / f"calibration-eta{eta:g}.json"


def read(backbone: str, eta: float, sigmas: Tensor) -> dict[str, Any] | None:
    """The shipped calibration; None if there is none for this schedule.

    Raises:
        RecordError: it is damaged.
    """
    if not path(backbone, eta).exists():
        return None
    data = read_json(path(backbone, eta))
    try:
        schedule = torch.tensor(data["schedule"], dtype=torch.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path(backbone, eta).name}: damaged calibration file: {error}") from error
    if schedule.shape != sigmas.shape or (schedule - sigmas).abs().max() > 1e-6:
        return None
    return dict(data)


def estimators(calibration: dict[str, Any], sigmas: Tensor) -> list[Estimator]:
    """Its causal plans, under names of their own."""
    found = []
    for passes in PASSES:
        plan = calibration["plans"]["causal"].get(str(passes))
        if plan is not None:
            made = with_knots(sigmas, "causal", tuple(plan["knots"]))
            label = f"causal, {passes} knots of the shipped calibration"
            found.append(Estimator(f"shipped-{passes}", label, "causal-shipped", made.plans, made.settings))
    return found
