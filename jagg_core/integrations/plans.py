"""Plans for as many steps as a trainer happens to train on."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.plans import Plan, causal_plan, exact_plan, groups_of, jagg_plan

Estimator = Literal["causal", "jagg", "exact"]


def window_plan(sigmas: Tensor, window: int, estimator: Estimator = "causal") -> Plan:
    """Groups ``window`` steps each; the steps left over by the last whole group are exact, all if there is none.

    ``"causal"`` makes one pass per group, at its first step. ``"jagg"`` makes two, at its ends: a window of 2 is exact.
    The groups follow from the number of steps alone: every rank makes equally many passes.

    Args:
        sigmas: of the trained steps, ``[T]`` or ``[B, T]``, decreasing.
        window: steps per group.
        estimator: ``"causal"``, ``"jagg"`` (the paper's rule on every group) or ``"exact"``.

    Raises:
        ValueError: a setting out of range.
    """
    require_one_of("estimator", estimator, Estimator)
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    # the constructors check sigmas
    steps = sigmas.shape[-1] if sigmas.ndim else 0
    if estimator == "exact" or window > steps:
        return exact_plan(sigmas)
    if estimator == "jagg":
        return jagg_plan(sigmas, window, jagg_frac=1.0)
    groups = groups_of(steps, window)
    return causal_plan(sigmas, [*(group[0] for group in groups), *range(groups[-1].stop, steps)])
