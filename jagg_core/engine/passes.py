"""Passes: the network run on the batch at some steps (the first phase), and differentiated there (the fourth)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from jagg_core.distributed import ranks
from jagg_core.engine.modes import Modes
from jagg_core.plans import Plan
from jagg_core.policy import VelocityPolicy, has_reentrant_checkpointing
from jagg_core.trajectory import Trajectory, at_least_fp32


class Passes:
    """Forwards and backwards of one update, counted and timed.

    Attributes:
        rows: of the trajectory, on its device.
        compute_dtypes: of the policy's parameters, and its ``compute_dtype``; empty if it shows none.
        on_policy: see `jagg_core.engine.modes.Modes`.
        passes, forwards, backward_calls, seconds: as in `jagg_core.engine.Report`.
        broken: why the update has to fail after its last pass; empty if it has not.
    """

    def __init__(
        self,
        policy: VelocityPolicy,
        trajectory: Trajectory,
        plan: Plan,
        modes: Modes,
        clock: Callable[[], float] | None,
        backward_fn: Callable[[Tensor], None] | None,
    ) -> None:
        self._policy = policy
        self._trajectory = trajectory
        self._plan = plan
        self._knots_per_pass = modes.knots_per_pass
        self._joint = modes.backward == "joint"
        self._clock = clock
        self._backward_fn = backward_fn
        self.rows = trajectory.rows.to(trajectory.latents.device)
        self.compute_dtypes = {parameter.dtype for parameter in getattr(policy, "parameters", list)()}
        self.compute_dtypes |= {getattr(policy, "compute_dtype", None)} - {None}
        self.on_policy = modes.on_policy
        # of other weights, or at another state than a shifted knot's, the rollout's graph is of no use
        usable = modes.on_policy is True and plan.knot_sigmas is None
        self._kept_graphs = trajectory.graphs if usable else {}
        self.broken = ""
        self.passes = self.forwards = self.backward_calls = 0
        self.seconds: dict[str, float] = {} if clock is None else {"forward": 0.0, "upstream": 0.0, "backward": 0.0}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time of the body to ``seconds`` of ``phase``, if there is a clock."""
        if self._clock is None:
            yield
            return
        start = self._clock()
        yield
        self.seconds[phase] += self._clock() - start

    def together(self, items: Sequence[int]) -> Iterator[list[int]]:
        """Yields ``items`` (steps or knots) in the portions that share a pass."""
        for start in range(0, len(items), self._knots_per_pass):
            yield list(items[start : start + self._knots_per_pass])

    def without_graph(self, steps: Sequence[int]) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Computes velocities ``[B, *D]`` at states of the rollout, a pass at a time."""
        for some in self.together(steps):
            with torch.no_grad():
                velocities = self._velocities([self._trajectory.site(j) for j in some])
            yield some, velocities

    def at_knots(self, bundle: Sequence[int]) -> list[Tensor]:
        """Computes velocities ``[B, *D]`` with a graph at knots, given by their positions in the plan."""
        velocities = []
        for positions in self.together(bundle):
            knots = [self._plan.knots[i] for i in positions]
            if self._kept_graphs and all(knot in self._kept_graphs for knot in knots):
                velocities += [self._kept_graphs.pop(knot) for knot in knots]
                continue
            sigmas = [self._plan.knot_sigma(i) for i in positions]
            velocities += self._velocities([self._trajectory.site(*at) for at in zip(knots, sigmas, strict=True)])
        return velocities

    def at_step(self, step: int, members: Tensor | None = None) -> Tensor:
        """Computes the velocity ``[M, *D]`` with a graph at a step, for samples ``members`` [M]; None: for all."""
        return self._velocities([self._trajectory.site(step)], members)[0]

    def _velocities(self, sites: list[tuple[Tensor, Tensor]], members: Tensor | None = None) -> list[Tensor]:
        """Computes velocities at ``sites`` (see `Trajectory.site`) in one call, for all samples or ``members`` only."""
        keep = slice(None) if members is None else members
        with self.timed("forward"):
            latents = torch.cat([z[keep] for z, _ in sites]) if len(sites) > 1 else sites[0][0][keep]
            sigmas = torch.cat([sigma[keep] for _, sigma in sites])
            rows = self.rows[keep].repeat(len(sites))
            velocity = self._policy.velocity(latents, sigmas, rows)
            if velocity.shape != latents.shape:
                raise ValueError(f"velocity must have shape {list(latents.shape)}, got {list(velocity.shape)}")
            self.forwards += len(sites)
        return [velocity] if len(sites) == 1 else list(velocity.chunk(len(sites)))

    def not_finite(self, reason: str) -> None:
        """Raises FloatingPointError; on several ranks after the last pass, as the others still gather weights."""
        if ranks() == 1:
            raise FloatingPointError(reason)
        self.broken = self.broken or reason

    def backward(self, velocities: list[Tensor], totals: list[Tensor]) -> None:
        """Makes one backward call from ``velocities`` with their gradients ``totals``, each ``[B, *D]``.

        Raises:
            ValueError: a velocity without a graph; on several ranks, a joint backward through reentrant checkpointing,
                under which DistributedDataParallel reduces a gradient before all graphs have added to it.
            FloatingPointError: see `not_finite`.
        """
        if not all(v.requires_grad for v in velocities):
            raise ValueError("policy: the velocity has no graph; do its parameters require gradients?")
        if self._joint and len(velocities) > 1 and ranks() > 1 and any(map(has_reentrant_checkpointing, velocities)):
            raise ValueError(
                "checkpointing must have use_reentrant=False for backward='joint' on several ranks, got reentrant: "
                "each inner backward call may reduce gradients too early; or use backward='sequential' or 'batched'"
            )
        if self._plan.knot_sigmas is not None and not all(torch.isfinite(v).all() for v in velocities):
            self.not_finite("the velocity is not finite at one of the shifted knots")
        with self.timed("backward"):
            pairs = list(zip(velocities, totals, strict=True))
            if self._backward_fn is None:
                torch.autograd.backward(velocities, [u.to(v.dtype) for v, u in pairs])
            else:
                self._backward_fn(torch.stack([(at_least_fp32(v) * u).sum() for v, u in pairs]).sum())
        self.backward_calls += 1
        self.passes += len(velocities)
