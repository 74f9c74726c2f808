"""Plans: every way of computing the update gradient, as data.

A plan says at which steps the network is differentiated (its knots) and how the upstream gradients of all steps are
spread over them: ``G = sum_i J_{k_i}^T sum_j w[i, j] s_j``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jagg_core.schedule import check_sigmas

if TYPE_CHECKING:
    from jagg_core.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Plan:
    """Knots and weights for ``T`` trained steps, from high noise to low.

    Attributes:
        knots: increasing step indices, K of them. One pass (forward and backward) each.
        weights: ``[K, T]``, or ``[B, K, T]`` where samples differ. fp64 on the CPU.
        knot_sigmas: where the Jacobian of each knot is taken, ``[K]`` or ``[B, K]``: the state is carried there from
            the knot along the rollout's velocity. None: at the knots themselves.
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
                f"got {list(weights.shape)}"
            )
        check_knots(knots, self.steps)
        if not torch.isfinite(weights).all():
            where = (~torch.isfinite(weights)).nonzero()[0].tolist()
            raise ValueError(f"weights must be finite, got {weights[tuple(where)].item()} at {where}")
        if self.knot_sigmas is not None:
            sites = self.knot_sigmas.detach().to(device="cpu", dtype=torch.float64)
            if sites.ndim not in (1, 2) or sites.shape[-1] != len(knots) or not ((sites >= 0) & (sites <= 1)).all():
                raise ValueError(f"knot_sigmas must be [K] or [B, K] in [0, 1], K = {len(knots)}, got {sites.tolist()}")
            object.__setattr__(self, "knot_sigmas", sites)
        if self.sigmas is not None:
            sigmas = check_sigmas(self.sigmas)
            if sigmas.shape[-1] != self.steps:
                raise ValueError(f"sigmas must have {self.steps} steps as the weights have, got {sigmas.shape[-1]}")
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
        """Returns where the Jacobian of a knot is taken: a scalar or ``[B]``; None: at the knot itself."""
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
        """Finds the plan's independent parts, in order: positions in ``knots`` and the steps that feed them."""
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
    def from_weights(cls, sigmas: Tensor, knots: Sequence[int], weights: Tensor, name: str) -> Plan:
        """Builds a plan from weights of any rule, checked as the constructors check theirs.

        Args:
            sigmas: of the trained steps, ``[T]`` or ``[B, T]``, decreasing.
            knots: increasing steps within ``0 .. T - 1``, K of them.
            weights: ``[K, T]`` or ``[B, K, T]``: row i says which share of every step's upstream gradient knot i takes.
            name: for reports.

        Raises:
            ValueError: sigmas that are no schedule, bad knots, weights of another shape or not finite.

        Example:
            >>> import torch
            >>> plan = Plan.from_weights(torch.tensor([0.9, 0.6, 0.3]), [1], torch.ones(1, 3), "middle")
            >>> plan.name, plan.passes, plan.anticipating
            ('middle', 1, True)
        """
        return cls(tuple(knots), weights, sigmas, name)

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
        """Reads the calibrated plan with this many passes; see `jagg_core.plans.calibration.read_plan`."""
        from jagg_core.plans.calibration import read_plan  # which needs the constructors, which need this class

        return read_plan(path, passes, family=family, predict=predict, trajectory=trajectory)


def whole_knots(knots: Sequence[int]) -> list[int]:
    """Returns knots as a list of ints. Raises ValueError for anything that is not a sequence of whole numbers."""
    try:
        return [operator.index(k) for k in knots]
    except TypeError as error:
        raise ValueError(f"knots must be whole numbers, got {knots!r}") from error


def check_knots(knots: Sequence[int], steps: int) -> None:
    """Raises ValueError unless ``knots`` is a non-empty increasing list within ``0 .. steps - 1``."""
    if len(knots) == 0:
        raise ValueError("knots must not be empty, got none")
    if min(knots) < 0 or max(knots) >= steps:
        raise ValueError(f"knots must lie in 0..{steps - 1}, got {list(knots)}")
    if any(b <= a for a, b in pairwise(knots)):
        raise ValueError(f"knots must increase strictly, got {list(knots)}")
