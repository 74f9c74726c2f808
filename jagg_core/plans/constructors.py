"""Constructors of the plans: exact, the paper's rule and its variants, and what is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.plans.plan import Plan, check_knots, whole_knots
from jagg_core.schedule import check_sigmas

Weighting = Literal["sigma", "index"]
Outside = Literal["constant", "linear"]


def groups_of(steps: int, window: int) -> list[range]:
    """Returns whole groups of ``window`` consecutive steps, high noise first; the steps left over belong to none.

    Raises:
        ValueError: ``window`` below 1 or above ``steps``.
    """
    if not 1 <= window <= steps:
        raise ValueError(f"window must be between 1 and the {steps} trained steps, got {window}")
    return [range(start, start + window) for start in range(0, steps - window + 1, window)]


def routed_groups(groups: int, jagg_frac: float) -> int:
    """Counts the first groups that are approximated: ``jagg_frac`` of all, rounded to whole groups (half up).

    Raises:
        ValueError: ``jagg_frac`` outside [0, 1].
    """
    if not 0 <= jagg_frac <= 1:
        raise ValueError(f"jagg_frac must be between 0 and 1, got {jagg_frac}")
    # the tolerance keeps 0.58 * 50 at 29, whatever its binary fraction
    return int(jagg_frac * groups + 0.5 + 1e-9)


def _matrix(sigmas: Tensor) -> Tensor:
    """Makes zero weights ``[T, T]`` or ``[B, T, T]``: one row per step, before unused rows are dropped."""
    return sigmas.new_zeros(*sigmas.shape, sigmas.shape[-1])


def _from_matrix(
    matrix: Tensor, knots: Sequence[int], sigmas: Tensor, name: str, knot_sigmas: Tensor | None = None
) -> Plan:
    """Builds a plan from the rows of its knots; ``sigmas`` have been checked, and are not checked again."""
    plan = Plan(tuple(knots), matrix[..., list(knots), :], None, name, knot_sigmas)
    object.__setattr__(plan, "sigmas", sigmas)
    return plan


def exact_plan(sigmas: Tensor) -> Plan:
    """Builds the reference, one pass per step. ``sigmas`` ``[T]`` or ``[B, T]``, decreasing.

    Raises:
        ValueError: sigmas that are no schedule, as from every constructor here.
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    return _from_matrix(torch.eye(steps, dtype=torch.float64), range(steps), sigmas, "exact")


def _grouped_plan(sigmas: Tensor, window: int, jagg_frac: float, name: str, position: Tensor | None) -> Plan:
    """Keeps both ends of routed groups; inner steps are interpolated along ``position`` [..., T], or lost if None."""
    steps = sigmas.shape[-1]
    groups = groups_of(steps, window)
    matrix = _matrix(sigmas)
    matrix[..., range(steps), range(steps)] = 1
    knots = set(range(steps))
    for group in groups[: routed_groups(len(groups), jagg_frac)]:
        first, last = group[0], group[-1]
        for step in group[1:-1]:
            knots.discard(step)
            if position is not None:
                span = position[..., last] - position[..., first]
                alpha = (position[..., step] - position[..., first]) / span
                matrix[..., first, step] = 1 - alpha
                matrix[..., last, step] = alpha
    return _from_matrix(matrix, sorted(knots), sigmas, name)


def jagg_plan(sigmas: Tensor, window: int = 5, jagg_frac: float = 0.6, weighting: Weighting = "sigma") -> Plan:
    """Builds the paper's rule: both ends of each routed group of ``window`` steps, every step of the others.

    Step j of a routed group counts ``1 - alpha_j`` at its first step and ``alpha_j`` at its last, with
    ``alpha_j = (sigma_0 - sigma_j) / (sigma_0 - sigma_{W-1})``; ``weighting="index"`` takes ``j / (W - 1)``, as the
    authors' prototype did. The first ``jagg_frac`` of the groups (high noise first, rounded to whole groups) are
    routed; steps left over by the last whole group are exact.

    Args:
        sigmas: of the trained steps, ``[T]`` or ``[B, T]``, decreasing.
        window: steps per group; 1 and 2 are exact.
        jagg_frac: share of the groups that is approximated.
        weighting: ``"sigma"`` (paper) or ``"index"``.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> import torch
        >>> plan = jagg_plan(torch.tensor([0.9, 0.8, 0.6, 0.5, 0.3]), window=4, jagg_frac=1.0)
        >>> plan.knots
        (0, 3, 4)
        >>> plan.weights[0].round(decimals=2)
        tensor([1.0000, 0.7500, 0.2500, 0.0000, 0.0000], dtype=torch.float64)
    """
    require_one_of("weighting", weighting, Weighting)
    sigmas = check_sigmas(sigmas)
    if weighting == "sigma":
        return _grouped_plan(sigmas, window, jagg_frac, "jagg", sigmas)
    return _grouped_plan(sigmas, window, jagg_frac, "jagg-index", torch.arange(sigmas.shape[-1], dtype=torch.float64))


def endpoint_plan(sigmas: Tensor, window: int = 5, jagg_frac: float = 1.0) -> Plan:
    """Builds the paper's ablation: both ends of each routed group with their upstream gradient; inner steps are lost.

    ``sigmas``, ``window`` and ``jagg_frac`` as in `jagg_plan`.

    Raises:
        ValueError: a setting out of range.
    """
    return _grouped_plan(check_sigmas(sigmas), window, jagg_frac, "endpoint", None)


def subsample_plan(sigmas: Tensor, count: int, generator: torch.Generator) -> Plan:
    """Draws ``count`` steps, weighted ``T / count``: unbiased, as trainers do it (``timestep_fraction``).

    ``sigmas`` ``[T]`` or ``[B, T]``, decreasing; all samples keep the same steps. ``generator``: on the CPU.

    Raises:
        ValueError: ``count`` outside 1..T.
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    if not 1 <= count <= steps:
        raise ValueError(f"count must be between 1 and the {steps} trained steps, got {count}")
    kept = sorted(torch.randperm(steps, generator=generator)[:count].tolist())
    matrix = torch.eye(steps, dtype=torch.float64) * (steps / count)
    return _from_matrix(matrix, kept, sigmas, "subsample")


def spline_plan(sigmas: Tensor, knots: Sequence[int], outside: Outside = "constant") -> Plan:
    """Interpolates the Jacobian linearly in sigma between neighbouring knots, which share their passes.

    ``sigmas`` ``[T]`` or ``[B, T]``, decreasing. Step j between knots a and b counts ``1 - alpha`` at a and ``alpha``
    at b, with ``alpha = (sigma_a - sigma_j) / (sigma_a - sigma_b)``. Beyond the outer knots the nearest one is taken
    (``"constant"``), or the outer segment is prolonged (``"linear"``, at least two knots).

    Raises:
        ValueError: bad knots; linear with a single knot.
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    knots = whole_knots(knots)
    check_knots(knots, steps)
    require_one_of("outside", outside, Outside)
    if outside == "linear" and len(knots) < 2:
        raise ValueError(f"knots must be at least two for outside='linear', got {knots}")
    matrix = _matrix(sigmas)
    for step in range(steps):
        inside = knots[0] <= step <= knots[-1]
        if step in knots or (outside == "constant" and not inside):
            matrix[..., step if step in knots else (knots[0] if step < knots[0] else knots[-1]), step] = 1
            continue
        right = next((i for i, k in enumerate(knots) if k > step), len(knots) - 1)
        left_knot, right_knot = knots[max(right, 1) - 1], knots[max(right, 1)]
        span = sigmas[..., left_knot] - sigmas[..., right_knot]
        alpha = (sigmas[..., left_knot] - sigmas[..., step]) / span
        matrix[..., left_knot, step] = 1 - alpha
        matrix[..., right_knot, step] = alpha
    return _from_matrix(matrix, knots, sigmas, "spline")


def causal_plan(sigmas: Tensor, knots: Sequence[int], predict: bool = False) -> Plan:
    """Gives every step the last knot at or before it; steps before the first knot take that one ("lead-in").

    ``sigmas`` ``[T]`` or ``[B, T]``, decreasing; ``knots``: increasing steps within ``0 .. T - 1``.

    With ``predict`` knots are shifted: each Jacobian is taken at the mean sigma of the steps that it serves, at the
    state that the rollout's velocity reaches from the knot: still causal, and no extra pass.

    With first knot 0 no knot's state contains the noise of a step that it serves: with advantages that do not depend on
    the noise the expected gradient is zero, as the exact one's is.

    Raises:
        ValueError: bad knots.

    Example:
        >>> import torch
        >>> plan = causal_plan(torch.tensor([0.9, 0.8, 0.6, 0.5]), knots=[0, 2])
        >>> plan.weights
        tensor([[1., 1., 0., 0.],
                [0., 0., 1., 1.]], dtype=torch.float64)
        >>> plan.passes, plan.anticipating
        (2, False)
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    knots = whole_knots(knots)
    check_knots(knots, steps)
    matrix = torch.zeros(steps, steps, dtype=torch.float64)
    for step in range(steps):
        matrix[max([k for k in knots if k <= step], default=knots[0]), step] = 1
    if not predict:
        return _from_matrix(matrix, knots, sigmas, "causal")
    served = matrix[knots]
    means = (served @ sigmas[..., None]).squeeze(-1) / served.sum(-1)
    return _from_matrix(matrix, knots, sigmas, "causal-predicted", means)
