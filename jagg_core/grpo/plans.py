"""From settings to the plan of a rollout."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from jagg_core.grpo.settings import PlanSettings
from jagg_core.plans import (
    Plan,
    causal_plan,
    endpoint_plan,
    exact_plan,
    jagg_plan,
    spline_plan,
    subsample_plan,
)
from jagg_core.records import RecordError, read_json
from jagg_core.seeding import generator_for
from jagg_core.trajectory import Trajectory


def make_plan(settings: PlanSettings, sigmas: Tensor, seed: int, trajectory: Trajectory | None = None) -> Plan:
    """The plan for trained steps at ``sigmas``, ``[T]`` or ``[B, T]``; ``seed`` is of the steps that a subsample keeps.

    With ``trajectory`` a calibration of other rollouts is refused here.

    Raises:
        ReplayMismatch: a calibration of other rollouts.
        RecordError: the calibration has no such window.
    """
    name = settings.estimator
    if name == "exact":
        return exact_plan(sigmas)
    if name == "jagg":
        return jagg_plan(sigmas, settings.window, jagg_frac_of(settings), settings.weighting)
    if name == "endpoint":
        return endpoint_plan(sigmas, settings.window, jagg_frac_of(settings))
    if name == "subsample":
        return subsample_plan(sigmas, settings.passes, generator_for(seed, "subsample"))
    if settings.calibration:
        return Plan.from_calibration(
            settings.calibration, settings.passes, family=name, predict=settings.predict, trajectory=trajectory
        )
    return (
        causal_plan(sigmas, settings.knots, settings.predict)
        if name == "causal"
        else spline_plan(sigmas, settings.knots)
    )


def jagg_frac_of(settings: PlanSettings) -> float:
    """The share of groups that is approximated: as given, or as calibrated for the window.

    Raises:
        RecordError: not a calibration file, or none of this window.
    """
    if settings.jagg_frac != "calibrated":
        return settings.jagg_frac
    path = Path(settings.calibration)
    data = read_json(path)
    windows = data.get("windows", {}) if isinstance(data, dict) else {}
    found = windows.get(str(settings.window))
    if not isinstance(found, dict) or not isinstance(found.get("jagg_frac"), (int, float)):
        raise RecordError(f"{path}: no jagg_frac for window {settings.window}; it has windows {sorted(windows)}")
    return float(found["jagg_frac"])
