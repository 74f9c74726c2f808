"""The live meter: one residual at a random step says how far a plan's gradient is from the exact one.

With the residual ``r_j = J_j^T s_j - sum_i w[i, j] J_{k_i}^T s_j`` of every step, the exact gradient is ``G + sum_j
r_j``. Of a plan that does not look ahead the residuals of different steps are orthogonal in expectation. So one of
them, drawn with probability ``p_m``, estimates the distance to exact without bias (``docs/method.md``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from jagg_core.checks import require_at_least
from jagg_core.distributed import AROUND, on_any_rank, ranks
from jagg_core.plans import Plan
from jagg_core.seeding import derive_seed, generator_for
from jagg_core.sharding import Sharding

FEWEST = 4
"""Audits that an interval needs."""


class LowFidelity(UserWarning):
    """The interval of the cosine to the exact gradient lies below the meter's threshold."""


@dataclass(frozen=True)
class Fidelity:
    """The running cosine of the plan's gradient to the exact one.

    Attributes:
        cosine: from the means over the audits; None before the first one, or where they give none.
        low, high: its 95 % interval, by the jackknife over audits with Student's t; None with fewer than `FEWEST`.
        audits: how many it is from.
    """

    cosine: float | None = None
    low: float | None = None
    high: float | None = None
    audits: int = 0


class Meter:
    """Audits one micro-batch in some optimizer steps, and keeps the results of the last audits.

    An audit needs ``.grad`` to begin at zero, so it takes the first micro-batch after the gradients were cleared. It is
    due once in every ``every`` of these, at a place that is drawn. All ranks draw alike.

    Args:
        parameters: whose ``.grad`` the update fills: the policy's trained ones, or their fp32 masters.
        every: optimizer steps for one audit.
        seed: of the draws, which use a separate generator.
        below: warns, once per fall, when the whole interval lies below this cosine. 0: never.
        keep: newest audits that count.

    Raises:
        ValueError: no parameters, or a setting out of range.
    """

    def __init__(
        self, parameters: Sequence[Tensor], every: int = 8, seed: int = 0, *, below: float = 0.0, keep: int = 50
    ) -> None:
        self.parameters = list(parameters)
        self.every, self.seed, self.below, self.keep = every, seed, below, keep
        require_at_least(self, every=1, keep=FEWEST)
        if not self.parameters:
            raise ValueError("parameters must be the trained ones, got none")
        if not 0 <= below < 1:
            raise ValueError(f"below must be at least 0 and below 1, got {below}")
        self._steps = 0
        self._audits: list[tuple[float, float, float]] = []
        self._warned = False

    def is_due(self, plan: Plan) -> bool:
        """Says whether this micro-batch is audited, and counts it if the gradients are zero. Called before its passes.

        Raises:
            ValueError: see `require_auditable`.
        """
        require_auditable(plan)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        begun = bool(gradients) and any(bool(_local(gradient).any()) for gradient in gradients)
        if on_any_rank(begun, self.parameters[0].device):
            return False
        due = self.is_due_next
        self._steps += 1
        return due

    @property
    def is_due_next(self) -> bool:
        """Whether the next optimizer step is audited."""
        block, place = divmod(self._steps, self.every)
        return place == derive_seed(self.seed, "audit", block) % self.every

    def audit(self, plan: Plan, sizes: Tensor, product: Callable[[int], None]) -> None:
        """Draws a step, adds its residual to the averages, and leaves ``.grad`` and generators as they are.

        Called after the passes of a micro-batch for which `is_due` was true. Figures that are not finite are left out.

        Args:
            plan: of the micro-batch.
            sizes: squared norms of the upstream gradients by step, ``[T]``, fp64. Residuals grow with them.
            product: adds the residual of a step into ``.grad``.
        """
        if ranks() > 1:
            with AROUND.get()():
                dist.all_reduce(sizes)
        chances = step_chances(plan, sizes.cpu())
        step = None
        if torch.isfinite(chances).all() and chances.any():
            step = int(torch.multinomial(chances, 1, generator=generator_for(self.seed, "step", self._steps)))
        chance = 1.0 if step is None else float(chances[step])
        size, projection, missed = sums = self.look(step, product)
        if not all(map(math.isfinite, sums)) or size <= 0:
            return
        self._audits = [*self._audits, (size, projection / chance, missed / chance)][-self.keep :]
        self._warn()

    def look(self, step: int | None, product: Callable[[int], None]) -> list[float]:
        """Computes ``|G|^2``, ``<G, r>`` and ``|r|^2`` with the residual r of a step; None: with 0."""
        with _set_aside(self.parameters) as gradients:
            if step is not None:
                product(step)
            return self._products(gradients, [parameter.grad for parameter in self.parameters])

    def fidelity(self) -> Fidelity:
        """Computes the running cosine to exact, and its interval."""
        return fidelity_of(self._audits)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps; strict JSON."""
        return {"steps": self._steps, "audits": [list(audit) for audit in self._audits]}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self._steps = int(state["steps"])
        self._audits = [(float(a), float(b), float(c)) for a, b, c in state["audits"]]

    def _products(self, gradients: Sequence[Tensor | None], residual: Sequence[Tensor | None]) -> list[float]:
        """Computes ``|G|^2``, ``<G, r>`` and ``|r|^2`` in fp64: sums over shards, else means over ranks."""
        sharding = Sharding(self.parameters)
        total = torch.zeros(3, dtype=torch.float64)
        for piece, gradient, part in zip(sharding.pieces, gradients, residual, strict=True):
            if not piece.counted or gradient is None:
                continue  # a parameter without gradient is none of the plan's, nor of the residual's
            g = _local(gradient).double()
            r = torch.zeros_like(g) if part is None else _local(part).double()
            total += torch.stack([(g * g).sum(), (g * r).sum(), (r * r).sum()]).cpu()
        total = total.to(self.parameters[0].device)
        with AROUND.get()():
            if sharding.mesh is not None:
                sharding.sum(total)
            elif ranks() > 1:
                dist.all_reduce(total)
                total /= ranks()
        sums: list[float] = total.tolist()
        return sums

    def _warn(self) -> None:
        now = self.fidelity()
        low = now.high is not None and now.high < self.below
        if low and not self._warned:
            warnings.warn(
                f"the cosine to the exact gradient is {now.cosine:.3f} [{now.low:.3f}, {now.high:.3f}] over "
                f"{now.audits} audits, below {self.below:g}: take more knots, or search them again",
                LowFidelity,
                stacklevel=2,
            )
        self._warned = low


def require_auditable(plan: Plan) -> None:
    """Checks that the residuals of a plan are orthogonal in expectation, and known.

    Raises:
        ValueError: the plan looks ahead, or leaves out a step.
    """
    if plan.anticipating:
        raise ValueError(f"an audit's plan must be one that does not look ahead, got {plan.name!r}")
    if not plan.used.any(0).all():
        raise ValueError(f"an audit's plan must be one that uses every step, got {plan.name!r}")


def step_chances(plan: Plan, sizes: Tensor) -> Tensor:
    """Computes the probability ``[T]`` with which each step is drawn: as ``sizes`` [T], 0 where the plan is exact."""
    apart = torch.tensor([bool(residual_weights(plan, step)) for step in range(plan.steps)])
    chances = torch.where(apart, sizes, 0.0)
    return chances / chances.sum() if chances.any() else chances


def residual_weights(plan: Plan, step: int) -> dict[int | None, Tensor]:
    """Returns the factors, scalars or ``[B]``, of ``s_step`` in its residual, by position of the knot; None: the step.

    Empty where the plan has the step's exact gradient.
    """
    factors: dict[int | None, Tensor] = {None: torch.ones((), dtype=torch.float64)}
    for position in plan.used[:, step].nonzero().flatten().tolist():
        weight = plan.weights[..., position, step]
        if plan.knots[position] == step and plan.knot_sigmas is None:
            factors[None] = factors[None] - weight
        else:
            factors[position] = -weight
    return {position: factor for position, factor in factors.items() if factor.any()}


def fidelity_of(audits: Sequence[tuple[float, float, float]]) -> Fidelity:
    """Computes the cosine from audits ``(|G|^2, <G, r> / p, |r|^2 / p)``, and its jackknife interval."""
    values, n = np.array(audits, dtype=np.float64).reshape(-1, 3), len(audits)
    if n == 0:
        return Fidelity()
    cosine = _cosine(values.sum(0))
    if cosine is None or n < FEWEST:
        return Fidelity(cosine, audits=n)
    without = [_cosine(values.sum(0) - value) for value in values]
    if any(one is None for one in without):
        return Fidelity(cosine, audits=n)
    spread = np.array(without, dtype=np.float64)
    error = float(np.sqrt((n - 1) / n * ((spread - spread.mean()) ** 2).sum()))
    half = _student(n - 1) * error
    return Fidelity(cosine, max(-1.0, cosine - half), min(1.0, cosine + half), n)


def _cosine(sums: np.ndarray) -> float | None:
    """Computes the cosine of G and ``G + R`` from sums; None where ``|G + R|^2`` is estimated as nothing or less."""
    size, projection, missed = (float(x) for x in sums)
    exact = size + 2 * projection + missed
    return min(1.0, (size + projection) / math.sqrt(size * exact)) if exact > 0 < size else None


def _student(degrees: int) -> float:
    """Computes the 97.5 % quantile of Student's t from 3 degrees of freedom, to 1 % (Abramowitz & Stegun 26.7.5)."""
    z, v = 1.959963985, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def _set_aside(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Yields the gradients with ``.grad`` empty meanwhile, and generators that go back to where they were."""
    gradients = [parameter.grad for parameter in parameters]
    # DistributedDataParallel may keep gradients as views into its buckets, which the next backward fills
    shared = ranks() > 1 and not hasattr(parameters[0], "device_mesh")
    kept = [None if g is None else g.clone() for g in gradients] if shared else gradients
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield kept
        finally:
            for parameter, gradient, copy in zip(parameters, gradients, kept, strict=True):
                parameter.grad = gradient
                if gradient is not None and gradient is not copy and copy is not None:
                    gradient.copy_(copy)
