"""Plans: every way of computing the update gradient, as data.

A plan says at which steps the network is differentiated (its knots) and how the upstream gradients of all steps are
spread over them: ``G = sum_i J_{k_i}^T sum_j w[i, j] s_j``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.records import RecordError, read_json
from jagg_core.schedule import check_sigmas
from jagg_core.trajectory import ReplayMismatch, Trajectory

Weighting = Literal["sigma", "index"]
Outside = Literal["constant", "linear"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Knots and weights for ``T`` trained steps, from high noise to low.

    Attributes:
        knots: increasing step indices, K of them. One pass (forward and backward) each.
        weights: ``[K, T]``, or ``[B, K, T]`` where samples differ. fp64 on the CPU.
        knot_sigmas: where the Jacobian of each knot is taken, ``[K]`` or ``[B, K]``: the state is carried there from
            the knot along the rollout's own velocity. None: at the knots themselves.
        sigmas: the schedule the weights were made for, ``[T]`` or ``[B, T]``; checked at replay. None: any.
        name: for reports.

    Raises:
        ValueError: no knots, knots out of order or range, weights of another shape or not finite.
    """

    knots: tuple[int, ...]
    weights: Tensor
    sigmas: Tensor | None = None
    name: str = "plan"
    knot_sigmas: Tensor | None = None

    def __post_init__(self) -> None:
        knots = tuple(whole_knots(self.knots))
        weights = self.weights.detach().to(device="cpu", dtype=torch.float64)
        object.__setattr__(self, "knots", knots)
        object.__setattr__(self, "weights", weights)
        if weights.ndim not in (2, 3) or weights.shape[-2] != len(knots) or weights.shape[-1] == 0:
            raise ValueError(
                f"weights must have shape [K, T] or [B, K, T] with K = {len(knots)} knots and T >= 1, "
                f"found {list(weights.shape)}"
            )
        check_knots(knots, self.steps)
        if not torch.isfinite(weights).all():
            where = (~torch.isfinite(weights)).nonzero()[0].tolist()
            raise ValueError(f"weights must be finite, found {weights[tuple(where)].item()} at {where}")
        if self.knot_sigmas is not None:
            sites = self.knot_sigmas.detach().to(device="cpu", dtype=torch.float64)
            if sites.ndim not in (1, 2) or sites.shape[-1] != len(knots) or not ((sites >= 0) & (sites <= 1)).all():
                raise ValueError(
                    f"knot_sigmas must be [K] or [B, K] in [0, 1], K = {len(knots)}, found {sites.tolist()}"
                )
            object.__setattr__(self, "knot_sigmas", sites)
        if self.sigmas is not None:
            sigmas = check_sigmas(self.sigmas)
            if sigmas.shape[-1] != self.steps:
                raise ValueError(f"sigmas must have {self.steps} steps as the weights have, found {sigmas.shape[-1]}")
            object.__setattr__(self, "sigmas", sigmas)

    @property
    def steps(self) -> int:
        """Number of trained steps T."""
        return self.weights.shape[-1]

    @property
    def passes(self) -> int:
        """Number of differentiated forwards and of backwards, K."""
        return len(self.knots)

    def knot_sigma(self, position: int) -> Tensor | None:
        """Where the Jacobian of the knot at ``position`` is taken: a scalar or ``[B]``; None: at the knot itself."""
        return None if self.knot_sigmas is None else self.knot_sigmas[..., position]

    @property
    def used(self) -> Tensor:
        """Which step feeds which knot for at least one sample, bool ``[K, T]``."""
        nonzero = self.weights != 0
        return nonzero.any(0) if nonzero.ndim == 3 else nonzero

    @property
    def anticipating(self) -> bool:
        """Whether a step's upstream gradient is put on a later knot, whose state already contains the step's noise."""
        later = torch.tensor(self.knots)[:, None] > torch.arange(self.steps)[None, :]
        return bool((self.used & later).any())

    def components(self) -> list[tuple[list[int], list[int]]]:
        """The plan's independent parts, in order: positions in ``knots`` and the steps that feed them."""
        used = self.used
        parts: list[tuple[set[int], set[int]]] = []
        for position in range(self.passes):
            knots, steps = {position}, set(used[position].nonzero().flatten().tolist())
            apart = []
            for other in parts:
                if other[1] & steps:
                    knots, steps = knots | other[0], steps | other[1]
                else:
                    apart.append(other)
            parts = [*apart, (knots, steps)]
        return sorted((sorted(knots), sorted(steps)) for knots, steps in parts)

    @classmethod
    def from_calibration(
        cls,
        path: Path | str,
        passes: int,
        *,
        family: str = "causal",
        predict: bool = False,
        trajectory: Trajectory | None = None,
    ) -> Plan:
        """The calibrated plan with this many passes, from a ``calibration-*.json`` of ``analysis``.

        ``family``: ``"causal"`` or ``"spline"``. ``predict``: for causal plans alone, see `causal_plan`.
        ``trajectory``: a rollout that the plan will be used on. With it, a calibration of another schedule, kernel,
        timestep mode, guidance or backbone is refused here; without it, another schedule is refused by the engine.

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
            plans = {name: {n: plan["knots"] for n, plan in found.items()} for name, found in data["plans"].items()}
            made_with = {**data["signature"], **{key: data[key] for key in ("transition", "timestep_mode")}}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}: damaged calibration file: {error}") from error
        if predict and family != "causal":
            raise ValueError(f"predict is for the family causal, found {family!r}")
        if family not in plans:
            raise ValueError(f"family must be one of {sorted(plans)}, found {family!r}")
        if str(passes) not in plans[family]:
            raise ValueError(f"passes must be one of {sorted(map(int, plans[family]))}, found {passes}")
        if trajectory is not None:
            trajectory.require(sigmas=sigmas)
            ours = {"transition": repr(trajectory.transition), "timestep_mode": trajectory.timestep_mode}
            for key, found in (trajectory.signature | ours).items():
                if found != made_with.get(key, found):
                    raise ReplayMismatch(f"{key}: calibrated with {made_with[key]}, the rollout used {found}")
        knots = plans[family][str(passes)]
        return causal_plan(sigmas, knots, predict) if family == "causal" else spline_plan(sigmas, knots)

    def window(self, start: int, stop: int) -> Plan:
        """The part of the plan on steps ``start .. stop - 1``, for a trajectory of only those.

        Raises:
            ValueError: the cut would separate a step from its knot.
        """
        inside = [i for i, k in enumerate(self.knots) if start <= k < stop]
        outside_steps = [j for j in range(self.steps) if not start <= j < stop]
        used = self.used
        others = [i for i in range(self.passes) if i not in inside]
        if used[inside][:, outside_steps].any() or used[others][:, start:stop].any():
            raise ValueError(f"plan {self.name!r} has weights across steps {start} or {stop}: it cannot be cut there")
        return Plan(
            tuple(self.knots[i] - start for i in inside),
            self.weights[..., inside, start:stop],
            None if self.sigmas is None else self.sigmas[..., start:stop],
            self.name,
            None if self.knot_sigmas is None else self.knot_sigmas[..., inside],
        )


def whole_knots(knots: Sequence[int]) -> list[int]:
    """Knots as a list of ints. Raises ValueError for anything that is not a sequence of whole numbers."""
    try:
        return [operator.index(k) for k in knots]
    except TypeError as error:
        raise ValueError(f"knots must be whole numbers, found {knots!r}") from error


def check_knots(knots: Sequence[int], steps: int) -> None:
    """Raise ValueError unless ``knots`` is a non-empty increasing list within ``0 .. steps - 1``."""
    if len(knots) == 0:
        raise ValueError("knots: at least one is needed, found none")
    if min(knots) < 0 or max(knots) >= steps:
        raise ValueError(f"knots must lie in 0..{steps - 1}, found {list(knots)}")
    if any(b <= a for a, b in pairwise(knots)):
        raise ValueError(f"knots must increase strictly, found {list(knots)}")


def groups_of(steps: int, window: int) -> list[range]:
    """Whole groups of ``window`` consecutive steps, high noise first; the steps left over belong to none.

    Raises:
        ValueError: ``window`` below 1 or above ``steps``.
    """
    if not 1 <= window <= steps:
        raise ValueError(f"window must be between 1 and the {steps} trained steps, found {window}")
    return [range(start, start + window) for start in range(0, steps - window + 1, window)]


def routed_groups(groups: int, jagg_frac: float) -> int:
    """How many of the first groups are approximated: ``jagg_frac`` of them, rounded to whole groups (half up).

    Raises:
        ValueError: ``jagg_frac`` outside [0, 1].
    """
    if not 0 <= jagg_frac <= 1:
        raise ValueError(f"jagg_frac must be between 0 and 1, found {jagg_frac}")
    # the tolerance keeps 0.58 * 50 at 29, whatever its binary fraction
    return int(jagg_frac * groups + 0.5 + 1e-9)


def _matrix(sigmas: Tensor) -> Tensor:
    """Zero weights ``[T, T]`` or ``[B, T, T]``: one row per step, before unused rows are dropped."""
    return sigmas.new_zeros(*sigmas.shape, sigmas.shape[-1])


def _from_matrix(matrix: Tensor, knots: Sequence[int], sigmas: Tensor, name: str) -> Plan:
    return Plan(tuple(knots), matrix[..., list(knots), :], sigmas, name)


def exact_plan(sigmas: Tensor) -> Plan:
    """One pass per step: the reference. ``sigmas`` ``[T]`` or ``[B, T]``, decreasing.

    Raises:
        ValueError: sigmas that are no schedule, as from every constructor here.
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    return Plan(tuple(range(steps)), torch.eye(steps, dtype=torch.float64), sigmas, "exact")


def _grouped_plan(sigmas: Tensor, window: int, jagg_frac: float, name: str, position: Tensor | None) -> Plan:
    """Both ends of each routed group; inner steps interpolated along ``position`` [..., T], or lost if it is None."""
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
    """The paper's rule: both ends of each routed group of ``window`` steps, every step of the others.

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
    """
    require_one_of("weighting", weighting, Weighting)
    sigmas = check_sigmas(sigmas)
    if weighting == "sigma":
        return _grouped_plan(sigmas, window, jagg_frac, "jagg", sigmas)
    return _grouped_plan(sigmas, window, jagg_frac, "jagg-index", torch.arange(sigmas.shape[-1], dtype=torch.float64))


def endpoint_plan(sigmas: Tensor, window: int = 5, jagg_frac: float = 1.0) -> Plan:
    """The paper's ablation: both ends of each routed group with their own upstream gradient; inner steps are lost.

    ``sigmas``, ``window`` and ``jagg_frac`` as in `jagg_plan`.

    Raises:
        ValueError: a setting out of range.
    """
    return _grouped_plan(check_sigmas(sigmas), window, jagg_frac, "endpoint", None)


def subsample_plan(sigmas: Tensor, count: int, generator: torch.Generator) -> Plan:
    """``count`` random steps, weighted ``T / count``: unbiased, and what trainers do today (``timestep_fraction``).

    ``sigmas`` ``[T]`` or ``[B, T]``, decreasing; all samples keep the same steps. ``generator``: on the CPU.

    Raises:
        ValueError: ``count`` outside 1..T.
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    if not 1 <= count <= steps:
        raise ValueError(f"count must be between 1 and the {steps} trained steps, found {count}")
    kept = sorted(torch.randperm(steps, generator=generator)[:count].tolist())
    matrix = torch.eye(steps, dtype=torch.float64) * (steps / count)
    return _from_matrix(matrix, kept, sigmas, "subsample")


def spline_plan(sigmas: Tensor, knots: Sequence[int], outside: Outside = "constant") -> Plan:
    """Piecewise-linear interpolation of the Jacobian in sigma between neighbouring knots, which share their passes.

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
        raise ValueError(f"outside='linear' needs at least two knots, found {knots}")
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
    """Every step takes the last knot at or before it; steps before the first knot take that one ("lead-in").

    ``sigmas`` ``[T]`` or ``[B, T]``, decreasing; ``knots``: increasing steps within ``0 .. T - 1``.

    With ``predict`` each knot's Jacobian is taken at the mean sigma of the steps that it serves, at the state that the
    rollout's own velocity reaches from the knot: still causal, and no extra pass.

    With first knot 0 no knot's state contains the noise of a step that it serves: with advantages that do not depend on
    the noise the expected gradient is zero, as the exact one's is.

    Raises:
        ValueError: bad knots.
    """
    sigmas = check_sigmas(sigmas)
    steps = sigmas.shape[-1]
    knots = whole_knots(knots)
    check_knots(knots, steps)
    matrix = torch.zeros(steps, steps, dtype=torch.float64)
    for step in range(steps):
        matrix[max([k for k in knots if k <= step], default=knots[0]), step] = 1
    plan = _from_matrix(matrix, knots, sigmas, "causal")
    if not predict:
        return plan
    sites = (plan.weights @ sigmas[..., None]).squeeze(-1) / plan.weights.sum(-1)
    return replace(plan, knot_sigmas=sites, name="causal-predicted")
