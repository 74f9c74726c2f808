"""From settings to the plan of a rollout."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from jagg_core.grpo.settings import PlanSettings
from jagg_core.plans import Plan, find_estimator
from jagg_core.seeding import generator_for
from jagg_core.strict_json import RecordError, read_json
from jagg_core.trajectory import Trajectory


def make_plan(settings: PlanSettings, sigmas: Tensor, seed: int, trajectory: Trajectory | None = None) -> Plan:
    """The plan for trained steps at ``sigmas``, ``[T]`` or ``[B, T]``; ``seed`` is of the steps that a subsample keeps.

    With ``trajectory`` a calibration of other rollouts is refused here.

    Raises:
        ReplayMismatch: a calibration of other rollouts.
        RecordError: the calibration has no such window.
    """
    estimator = find_estimator(settings.estimator)
    if estimator.kind == "groups":
        options = {"weighting": settings.weighting} if estimator.name == "jagg" else {}
        return estimator.build(sigmas, settings.window, jagg_frac_of(settings), **options)
    if estimator.kind == "random":
        return estimator.build(sigmas, settings.passes, generator_for(seed, estimator.name))
    if estimator.kind == "exact":
        return estimator.build(sigmas)
    if settings.calibration:
        return Plan.from_calibration(
            settings.calibration,
            settings.passes,
            family=estimator.name,
            predict=settings.predict,
            trajectory=trajectory,
        )
    return find_estimator("causal-predicted" if shifted(settings) else estimator.name).build(sigmas, settings.knots)


def shifted(settings: PlanSettings) -> bool:
    """Says whether the causal plan takes its knots at the mean sigma of the steps they serve."""
    return settings.predict or settings.estimator == "causal-predicted"


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
