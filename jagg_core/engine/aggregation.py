"""The third phase: upstream gradients of all steps are summed into one gradient per knot, ``u_i = sum_j w[i, j] s_j``.

Off policy, a sample may have some steps of a part clipped and others not. Its weights can then be replaced: the plan's
approximation assumes that neighbouring steps pull alike, which a clipped and an unclipped one do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagg_core.distributed import on_any_rank
from jagg_core.engine.passes import Passes
from jagg_core.objective import Upstream
from jagg_core.plans import Plan
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import expand


class Aggregation:
    """Sums upstream gradients by the plan's weights, times the scale of the loss.

    Attributes:
        parts: the plan's independent parts; see `Plan.components`.
        mixed: number of (sample, part) pairs that were made exact.
    """

    def __init__(self, plan: Plan, trajectory: Trajectory, scale: float) -> None:
        self._plan = plan
        self._trajectory = trajectory
        self._scale = scale
        self._weights = plan.weights.to(device=trajectory.latents.device, dtype=trajectory.latents.dtype)
        self._used = plan.used
        self._mixed: dict[int, Tensor] = {}
        self.parts = plan.components()
        self.mixed = 0

    def feeding(self, bundle: list[int]) -> list[int]:
        """Returns the steps that feed the knots in these positions of the plan."""
        return self._used[bundle].any(0).nonzero().flatten().tolist()

    def aggregate(self, position: int, known: dict[int, Upstream]) -> Tensor:
        """Computes ``u = sum_j w[position, j] s_j``, ``[B, *D]``, for one knot."""
        total = torch.zeros_like(self._trajectory.latents[0])
        # only steps of nonzero weight: others may have no upstream gradient, and 0 * NaN would be NaN
        for step in self._used[position].nonzero().flatten().tolist():
            total += expand(self._scale * self._weights[..., position, step], total) * known[step].gradient
        return total

    def approximated(self, step: int, gradient: Tensor) -> Tensor:
        """Returns a step's upstream gradient ``[B, *D]``, 0 for the samples that were made exact there."""
        for part, mixed in self._mixed.items():
            if step in self.parts[part][1]:
                return gradient * expand((~mixed).to(gradient), gradient)
        return gradient

    def make_exact(self, part: int, known: dict[int, Upstream]) -> None:
        """Replaces the weights of samples with some steps of a part clipped and some not by those of the exact plan."""
        positions, steps = self.parts[part]
        if part in self._mixed or len(steps) <= 1:
            return
        clipped = torch.stack([known[j].clipped for j in steps])
        mixed = clipped.any(0) & ~clipped.all(0)
        self._mixed[part] = mixed
        if not mixed.any():
            return
        self.mixed += int(mixed.sum())
        if self._weights.ndim == 2:
            self._weights = self._weights.expand(self._trajectory.batch, -1, -1).clone()
        for i in positions:
            self._weights[mixed, i] = 0
            # a knot at a state of the rollout is differentiated anyway: there the exact pass is free
            if self._plan.knot_sigmas is None and self._plan.knots[i] in steps:
                self._weights[mixed, i, self._plan.knots[i]] = 1
                self._used[i, self._plan.knots[i]] = True

    def run_exact(self, part: int, known: dict[int, Upstream], passes: Passes) -> None:
        """Runs a pass per remaining step of a part, for the samples that were made exact, on all ranks alike."""
        if part not in self._mixed:
            return
        positions, steps = self.parts[part]
        mixed = self._mixed[part]
        done = {self._plan.knots[i] for i in positions} if self._plan.knot_sigmas is None else set()
        inner = [j for j in steps if j not in done]
        here = bool(mixed.any())
        if not inner or not on_any_rank(here, mixed.device):
            return
        # a rank without such samples joins with one sample of weight zero, to keep collectives in step
        members = mixed.nonzero().flatten() if here else torch.zeros(1, dtype=torch.long, device=mixed.device)
        weight = self._scale if here else 0.0
        for step in inner:
            velocity = passes.at_step(step, members)
            passes.backward([velocity], [weight * known[step].gradient[members]])
