"""The second phase: upstream gradients ``s_j`` by step, computed in one of three ways or given."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jagg_core.engine.modes import OffPolicyError
from jagg_core.engine.passes import Passes
from jagg_core.objective import (
    ClippedSurrogate,
    Upstream,
    step_log_prob,
    upstream_autograd,
    upstream_closed_form,
)
from jagg_core.plans import Plan
from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import expand

ON_POLICY_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest |log ratio| at a knot that the closed form accepts, by the coarsest dtype of weights and velocity."""


@dataclass(eq=False)
class UpstreamGradients(ABC):
    """Upstream gradients, as far as they are known. `Autograd`, `ClosedForm` and `Interpolated` compute them.

    Attributes:
        advantages: ``[B]`` or ``[B, T]``, on the trajectory's device and in its dtype.
        reference: policy of the KL term.
        known: upstream gradients by step.
        log_ratios: ``[B]`` by step, where the present velocity was compared with the rollout's.
        reference_forwards: forwards of the reference policy.
    """

    trajectory: Trajectory
    advantages: Tensor
    plan: Plan
    objective: ClippedSurrogate
    reference: VelocityPolicy | None
    passes: Passes
    known: dict[int, Upstream] = field(default_factory=dict)
    log_ratios: dict[int, Tensor] = field(default_factory=dict)
    reference_forwards: int = 0

    def run_forwards(self, steps: list[int], knots: list[int], others: list[int]) -> None:  # noqa: B027 - may be none
        """Runs the forwards without a graph that ``steps`` need, besides those at ``knots`` of this backward call.

        ``others``: the knots of other calls that these steps may be spread over.
        """

    @abstractmethod
    def learn(self, steps: list[int], knots: list[int], velocities: list[Tensor]) -> None:
        """Computes what is known of ``steps`` with the velocities ``[B, *D]`` at ``knots``.

        Raises:
            OffPolicyError: closed form, and a ratio at a knot is not 1.
            FloatingPointError: a velocity is not finite.
        """

    def at_states(self, knots: list[int]) -> list[int]:
        """Returns ``knots``, or none if they are shifted: a velocity away from the rollout is not that of a step."""
        return knots if self.plan.knot_sigmas is None else []

    def from_velocities(self, steps: Iterable[int], velocities: Iterable[Tensor]) -> None:
        """Computes upstream gradients of steps by autograd from their velocities ``[B, *D]``."""
        with self.passes.timed("upstream"):
            for step, velocity in zip(steps, velocities, strict=True):
                self.known[step] = upstream_autograd(
                    self.objective, self.trajectory, step, velocity, self._advantages(step), self._reference(step)
                )
                self.log_ratios[step] = self.known[step].log_ratio

    def in_closed_form(self, steps: list[int]) -> None:
        """Computes upstream gradients of steps from the noise of the rollout."""
        with self.passes.timed("upstream"):
            for step in steps:
                self.known[step] = upstream_closed_form(
                    self.objective, self.trajectory, step, self._advantages(step), self._reference(step)
                )

    def require_finite(self, steps: list[int]) -> None:
        """Reports by `Passes.not_finite` unless log ratios and upstream gradients of ``steps`` are finite."""
        sums = [torch.stack([self.known[j].log_ratio.sum(), self.known[j].gradient.sum()]) for j in steps]
        if sums and not torch.isfinite(torch.stack(sums)).all():
            self.passes.not_finite(
                f"log ratio or upstream gradient is not finite at one of steps {steps}: "
                "a velocity, the policy's or the reference's, is NaN or infinite"
            )

    def require_ratio_one(self, steps: list[int], velocities: list[Tensor]) -> None:
        """Compares the log ratios of steps with what rounding explains; ``velocities`` are theirs.

        Raises:
            OffPolicyError: one is larger.
        """
        if not steps:
            return
        largest = torch.stack([self.log_ratios[j] for j in steps]).abs().max().item()
        if not math.isfinite(largest):
            self.passes.not_finite(f"the velocity is not finite at one of steps {steps}")
            return
        # guidance may combine velocities of a half-precision network in fp32: they are as coarse as its weights
        dtypes = {velocities[0].dtype, *self.passes.compute_dtypes}
        coarsest = max(dtypes, key=lambda dtype: ON_POLICY_TOLERANCE.get(dtype, 1e-4))
        limit = ON_POLICY_TOLERANCE.get(coarsest, 1e-4)
        if largest <= limit:
            return
        if self.passes.on_policy:
            why = (
                "the weights are the rollout's, so the network was asked otherwise: a timestep in other units "
                "(sigma, or sigma * 1000), another guidance or prompt, or dropout; or it computes in half precision, "
                "which the policy's compute_dtype must name"
            )
        else:
            why = "other weights than the rollout's, or dropout; use upstream='autograd'"
        raise OffPolicyError(
            f"on policy every ratio is 1, got |log ratio| {largest:.3g} (limit {limit:g} of {coarsest}) at one of "
            f"steps {steps}: {why}"
        )

    def _advantages(self, step: int) -> Tensor:
        """Returns the advantages of one step, ``[B]``."""
        return self.advantages if self.advantages.ndim == 1 else self.advantages[:, step]

    def _reference(self, step: int) -> Tensor | None:
        """Computes the reference policy's velocity ``[B, *D]`` at a step; None without a KL to it."""
        if not self.objective.needs_reference or self.reference is None:
            return None
        t = self.trajectory
        self.reference_forwards += 1
        with torch.no_grad():
            return self.reference.velocity(t.latents[step], t.network_sigma(step), self.passes.rows).to(t.latents.dtype)


class Autograd(UpstreamGradients):
    """The paper's way: from the velocity at every step, with a forward at each that is no knot."""

    def run_forwards(self, steps: list[int], knots: list[int], others: list[int]) -> None:
        """Runs a forward at each of ``steps`` that is no knot."""
        at_states = self.at_states(knots)
        for some, velocities in self.passes.without_graph([j for j in steps if j not in at_states]):
            self.from_velocities(some, velocities)

    def learn(self, steps: list[int], knots: list[int], velocities: list[Tensor]) -> None:
        """Computes upstream gradients of ``knots`` by autograd; those of the other steps are known."""
        at = dict(zip(knots, velocities, strict=True))
        states = [k for k in self.at_states(knots) if k in steps]
        self.from_velocities(states, [at[k] for k in states])
        self.require_finite(steps)
        if self.passes.on_policy and not self.trajectory.knows_noise:
            # nothing else has compared the network's input with the rollout's
            self.require_ratio_one([j for j in steps if j in self.log_ratios], velocities)


class ClosedForm(UpstreamGradients):
    """On policy: from the noise of the rollout, without any forward; the ratio is checked at the knots."""

    def learn(self, steps: list[int], knots: list[int], velocities: list[Tensor]) -> None:
        """Checks the ratio at ``knots``, and computes the closed form of ``steps``."""
        self._require_on_policy(self.at_states(knots), velocities)
        self.in_closed_form(steps)
        self.require_finite(steps)

    def _require_on_policy(self, knots: list[int], velocities: list[Tensor]) -> None:
        if not knots:
            return
        for knot, velocity in zip(knots, velocities, strict=True):
            log_prob = step_log_prob(self.trajectory, knot, velocity.detach().to(self.trajectory.latents.dtype))
            self.log_ratios[knot] = log_prob - self.trajectory.log_probs[knot]
        self.require_ratio_one(knots, velocities)


@dataclass(eq=False)
class Interpolated(UpstreamGradients):
    """Off policy with forwards at knots alone: elsewhere a velocity has moved as its knots have, by the weights."""

    drifts: dict[int, Tensor] = field(default_factory=dict)
    """Velocity ``[B, *D]`` minus the rollout's, by knot."""

    def run_forwards(self, steps: list[int], knots: list[int], others: list[int]) -> None:
        """Runs forwards at the knots of other calls, and notes how far velocities have moved."""
        for some, velocities in self.passes.without_graph([k for k in others if k not in self.drifts]):
            self._note_drift(some, velocities)

    def learn(self, steps: list[int], knots: list[int], velocities: list[Tensor]) -> None:
        """Moves the velocities of ``steps`` as those of their knots have moved, and differentiates the loss there."""
        self._note_drift(knots, velocities)
        self.from_velocities(steps, [self._drifted(j) for j in steps])
        self.require_finite(steps)

    def _note_drift(self, knots: Sequence[int], velocities: Sequence[Tensor]) -> None:
        for knot, velocity in zip(knots, velocities, strict=True):
            self.drifts[knot] = velocity.detach().to(self.trajectory.latents.dtype) - self.trajectory.velocity(knot)

    def _drifted(self, step: int) -> Tensor:
        """Computes the rollout's velocity at ``step``, moved as its knots have moved since."""
        velocity = self.trajectory.velocity(step)
        for position in self.plan.used[:, step].nonzero().flatten().tolist():
            drift = self.drifts[self.plan.knots[position]]
            velocity = velocity + expand(self.plan.weights[..., position, step], drift) * drift
        return velocity


Source = Tensor | Callable[[int, Tensor, Tensor], Tensor]
"""Upstream gradients that a caller gives: ``[T, B, *D]``, or a function of step, latents and velocity ``[B, *D]``."""


@dataclass(eq=False)
class Given(UpstreamGradients):
    """Upstream gradients from the caller. A tensor needs no forward but at the knots, a function one at every step."""

    source: Source | None = None

    def run_forwards(self, steps: list[int], knots: list[int], others: list[int]) -> None:
        """Asks a function for every step that is no knot."""
        if not isinstance(self.source, Tensor):
            at_states = self.at_states(knots)
            for some, velocities in self.passes.without_graph([j for j in steps if j not in at_states]):
                self._ask(some, velocities)

    def learn(self, steps: list[int], knots: list[int], velocities: list[Tensor]) -> None:
        """Takes the given tensor, or asks the function at ``knots``."""
        if isinstance(self.source, Tensor):
            for step in steps:
                self._keep(step, self.source[step])
        else:
            at = dict(zip(knots, velocities, strict=True))
            states = [k for k in self.at_states(knots) if k in steps]
            self._ask(states, [at[k] for k in states])
        self.require_finite(steps)

    def _ask(self, steps: Sequence[int], velocities: Sequence[Tensor]) -> None:
        assert callable(self.source)
        with self.passes.timed("upstream"), torch.no_grad():
            for step, velocity in zip(steps, velocities, strict=True):
                latents = self.trajectory.latents[step]
                self._keep(step, self.source(step, latents, velocity.detach().to(latents.dtype)))

    def _keep(self, step: int, gradient: Tensor) -> None:
        latents = self.trajectory.latents[step]
        if gradient.shape != latents.shape:
            raise ValueError(f"upstream must give {list(latents.shape)} at step {step}, got {list(gradient.shape)}")
        nothing = torch.zeros_like(self.advantages)
        self.known[step] = Upstream(gradient.detach().to(latents), nothing, nothing, nothing, nothing.bool())


WAYS: dict[str, type[UpstreamGradients]] = {
    "autograd": Autograd,
    "closed_form": ClosedForm,
    "interpolated": Interpolated,
}
"""Ways to upstream gradients, by mode of `jagg_core.engine.accumulate_gradients`."""
