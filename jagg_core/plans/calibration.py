"""Calibration files: what ``analysis calibrate`` stores and a trainer reads."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from jagg_core.plans.plan import Plan
from jagg_core.plans.registry import ESTIMATORS, find_estimator
from jagg_core.strict_json import RecordError, read_json
from jagg_core.trajectory import ReplayMismatch, Trajectory


def read_plan(
    path: Path | str,
    passes: int,
    *,
    family: str = "causal",
    predict: bool = False,
    trajectory: Trajectory | None = None,
) -> Plan:
    """Reads the calibrated plan with this many passes from a ``calibration-*.json`` of ``analysis``.

    ``family``: an estimator that takes knots, such as ``"causal"``, or ``module:object``; the knots are those that were
    searched for it, or for the estimator whose knots it takes. ``predict``: shifted knots, for causal plans alone; see
    `causal_plan`. ``trajectory``: a rollout that the plan will be used on. With it, a calibration of another
    schedule, kernel, timestep mode, guidance or backbone is refused here; without it, another schedule is refused by
    the engine. A calibration that was made with ``--quick`` is read with a warning.

    Raises:
        RecordError: not a calibration file, or a damaged one.
        ValueError: a family or number of passes that was not calibrated, or ``predict`` with another family.
        ReplayMismatch: the trajectory was made under other settings; names the first that differs.
    """
    data = read_json(Path(path))
    if not isinstance(data, dict) or data.get("kind") != "calibration":
        raise RecordError(f"{path}: not a calibration file")
    try:
        sigmas = torch.tensor(data["schedule"], dtype=torch.float64)
        plans = {name: {n: plan["knots"] for n, plan in by_passes.items()} for name, by_passes in data["plans"].items()}
        made_with = {**data["signature"], **{key: data[key] for key in ("transition", "timestep_mode")}}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: damaged calibration file: {error}") from error
    if predict and family != "causal":
        raise ValueError(f"predict must be False for families other than causal, got True for {family!r}")
    if family in plans and family not in ESTIMATORS:
        raise ValueError(f"family must be registered or given as module:object, got {family!r}")
    known = ":" in family or family in ESTIMATORS
    # "predict" is how callers have always asked for the causal plan with shifted knots
    estimator = find_estimator("causal-predicted" if predict else family) if known else None
    if estimator is None or estimator.knots_of not in plans:
        raise ValueError(f"family must be one of {sorted(plans)}, got {family!r}")
    calibrated = plans[estimator.knots_of]
    if str(passes) not in calibrated:
        raise ValueError(f"passes must be one of {sorted(map(int, calibrated))}, got {passes}")
    if data.get("quick"):
        warnings.warn(f"{path}: of a quick run, not for use; calibrate without --quick", stacklevel=3)
    if trajectory is not None:
        trajectory.require(sigmas=sigmas)
        ours = {"transition": repr(trajectory.transition), "timestep_mode": trajectory.timestep_mode}
        for key, value in (trajectory.signature | ours).items():
            if value != made_with.get(key, value):
                raise ReplayMismatch(f"{key}: calibrated with {made_with[key]}, the rollout used {value}")
    return estimator.build(sigmas, calibrated[str(passes)])
