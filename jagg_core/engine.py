"""The one engine: runs any plan against any policy.

The paper's four phases, for every bundle of knots that shares a backward call:

1. forwards: with a graph at the knots; without one at other steps whose upstream gradient needs a velocity;
2. upstream gradients ``s_j``, from transition and loss alone;
3. aggregation ``u_i = sum_j w[i, j] s_j``;
4. one backward through the network from all knots of the bundle.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from jagg_core.distributed import on_any_rank
from jagg_core.objective import (
    ClippedSurrogate,
    Upstream,
    step_log_prob,
    upstream_autograd,
    upstream_closed_form,
)
from jagg_core.plan import Plan
from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import ReplayMismatch, Trajectory, at_least_fp32, policy_signature, weights_version
from jagg_core.transitions import expand

UpstreamMode = Literal["auto", "autograd", "closed_form", "interpolated"]
BackwardMode = Literal["auto", "joint", "batched", "sequential"]
PartlyClipped = Literal["exact", "keep"]

AUTO_ELEMENTS = 2**20
"""``backward="auto"`` batches knots while a pass holds at most this many latent elements: a rule of shapes alone, so
that ranks with equal shapes make equal numbers of passes. Eight samples of Flux at 720x720."""

ON_POLICY_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest |log ratio| at a knot that the closed form accepts, by dtype of the velocity."""


class OffPolicyError(ValueError):
    """The closed form was asked for, but the policy is not the one that made the rollout."""


class RatioNoise(UserWarning):
    """On policy, yet log ratios exceed the clip range: half precision with another batch shape, or dropout."""


@dataclass(frozen=True)
class Report:
    """What `accumulate_gradients` did. Shares and log ratios are over the (sample, step) pairs that were evaluated.

    Attributes:
        loss: the scaled loss, summed over samples and steps (those of weight zero excluded).
        log_ratio_mean, log_ratio_max: of log ratios to the rollout: mean, and largest magnitude.
        log_ratio_p99: 99th percentile of their magnitude.
        clipped_share: pairs without surrogate gradient. outside_clip_share: pairs whose ratio left the clip range.
        first_step_outside_clip: the same for the first trained step alone; on policy it should be 0.
        partly_clipped: (sample, group) pairs with some steps clipped and some not.
        passes: differentiated passes over steps, each one forward and one backward of the batch.
        forwards: forwards of the batch, with and without graph. reference_forwards: of the reference policy.
        backward_calls: calls of ``torch.autograd.backward``, or of ``backward_fn``.
        upstream, backward: the modes that ran. anticipating: see `Plan.anticipating`.
        log_ratio_by_step: largest magnitude of the log ratio at each step where it was evaluated.
        seconds: per phase (forward, upstream, backward), if a clock was given.
    """

    loss: float
    log_ratio_mean: float
    log_ratio_max: float
    log_ratio_p99: float
    clipped_share: float
    outside_clip_share: float
    first_step_outside_clip: float
    partly_clipped: int
    passes: int
    forwards: int
    reference_forwards: int
    backward_calls: int
    upstream: str
    backward: str
    anticipating: bool
    log_ratio_by_step: dict[int, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def accumulate_gradients(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    plan: Plan,
    objective: ClippedSurrogate,
    upstream: UpstreamMode = "auto",
    backward: BackwardMode = "auto",
    *,
    reference: VelocityPolicy | None = None,
    scale: float = 1.0,
    partly_clipped: PartlyClipped = "exact",
    max_rows: int | None = None,
    clock: Callable[[], float] | None = None,
    backward_fn: Callable[[Tensor], None] | None = None,
) -> Report:
    """Add the plan's gradient of the loss into ``.grad``, as ``backward()`` would.

    The loss is ``scale`` times the sum over samples and trained steps, so that micro-batches add up; a trainer passes
    ``scale = 1 / (samples * steps)``. Everything outside the network runs in the dtype of the trajectory.

    Args:
        policy: differentiated at the plan's knots.
        trajectory: T steps of B samples. Graphs that it kept are used in the place of forwards, once, on policy.
        advantages: ``[B]``.
        plan: for T steps, ``[K, T]`` or ``[B, K, T]``.
        objective: the loss.
        upstream: ``"autograd"`` runs the network at every step (the paper). ``"closed_form"`` only at the knots; legal
            only on policy, which is checked before any forward by the weights, and at every knot by the ratio.
            ``"auto"`` takes it exactly where the weights are known to be the rollout's. ``"interpolated"``: off policy,
            yet with forwards at the knots alone. How far velocities have moved since the rollout is known there, and
            taken for the other steps by the plan's own weights, which must sum to 1 for every step.
        backward: ``"joint"``: one forward per knot, one backward call per independent part of the plan (the paper).
            ``"batched"``: several knots in one pass. ``"sequential"``: one knot at a time, the least memory.
            ``"auto"``: batched while a pass stays small (`AUTO_ELEMENTS`), else sequential.
        reference: policy of the KL term; needed if ``objective.kl_beta`` is positive.
        scale: factor of the loss. Half-precision networks need it large enough for gradients to be representable.
        partly_clipped: what happens to a sample with some steps of a group clipped, some not, under ``"autograd"``:
            ``"exact"`` gives it a pass per step, ``"keep"`` leaves the plan as it is.
        max_rows: most rows (knots times samples) of one batched pass; no limit by default.
        clock: timer in seconds that waits for the device; with it the report has seconds per phase.
        backward_fn: takes the place of ``torch.autograd.backward`` where a trainer has its own for scalars (Accelerate,
            DeepSpeed). It gets ``sum(v * u)``, whose gradient in the velocities v is u; its value means nothing.

    Raises:
        ValueError: arguments that do not fit each other.
        ReplayMismatch: plan, policy and trajectory disagree on the schedule or on settings.
        OffPolicyError: closed form off policy.
        FloatingPointError: a velocity is not finite. As after an `OffPolicyError` at a later knot, ``.grad`` may then
            hold the passes before it: zero it.
    """
    update = _Update(
        policy, trajectory, advantages, plan, objective, reference, scale, partly_clipped, clock, backward_fn
    )
    update.choose(upstream, backward, max_rows)
    for bundle in update.bundles():
        update.run(bundle)
    return update.report()


class _Update:
    """State of one call of `accumulate_gradients`."""

    def __init__(
        self,
        policy: VelocityPolicy,
        trajectory: Trajectory,
        advantages: Tensor,
        plan: Plan,
        objective: ClippedSurrogate,
        reference: VelocityPolicy | None,
        scale: float,
        partly_clipped: PartlyClipped,
        clock: Callable[[], float] | None,
        backward_fn: Callable[[Tensor], None] | None,
    ) -> None:
        if advantages.shape != (trajectory.batch,):
            raise ValueError(f"advantages must have shape [{trajectory.batch}], found {list(advantages.shape)}")
        if not torch.isfinite(advantages).all():
            index = int((~torch.isfinite(advantages)).nonzero()[0])
            raise ValueError(f"advantages must be finite, found {advantages[index].item()} at sample {index}")
        if plan.steps != trajectory.steps:
            raise ReplayMismatch(f"plan: made for {plan.steps} trained steps, the trajectory has {trajectory.steps}")
        if plan.weights.ndim == 3 and len(plan.weights) != trajectory.batch:
            raise ValueError(
                f"plan: weights are for {len(plan.weights)} samples, the trajectory has {trajectory.batch}"
            )
        if partly_clipped not in get_args(PartlyClipped):
            raise ValueError(f"partly_clipped must be one of {list(get_args(PartlyClipped))}, found {partly_clipped!r}")
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, found {scale}")
        if not plan.weights.any():
            raise ValueError("plan: at least one weight must differ from 0, found none")
        sites = plan.knot_sigmas
        if sites is not None and sites.ndim == 2 and len(sites) != trajectory.batch:
            raise ValueError(f"plan: knot_sigmas are for {len(sites)} samples, the trajectory has {trajectory.batch}")
        if objective.kl_beta > 0 and reference is None:
            raise ValueError(f"kl_beta is {objective.kl_beta}: a reference policy is needed")
        trajectory.require(sigmas=plan.sigmas, signature=policy_signature(policy))
        self.policy = policy
        self.trajectory = trajectory
        self.plan = plan
        self.objective = objective
        self.reference = reference
        self.scale = scale
        self.partly_clipped = partly_clipped
        self.clock = clock
        self.backward_fn = backward_fn
        self.advantages = advantages.to(device=trajectory.latents.device, dtype=trajectory.latents.dtype)
        self.rows = trajectory.rows.to(trajectory.latents.device)
        self.weights = plan.weights.to(device=trajectory.latents.device, dtype=trajectory.latents.dtype)
        self.used = plan.used
        self.components = plan.components()
        self.known: dict[int, Upstream] = {}
        self.log_ratios: dict[int, Tensor] = {}
        self.drifts: dict[int, Tensor] = {}
        self.routed: dict[int, Tensor] = {}
        self.mixed = 0
        self.passes = self.forwards = self.reference_forwards = self.backward_calls = 0
        self.seconds = {"forward": 0.0, "upstream": 0.0, "backward": 0.0}

    def choose(self, upstream: UpstreamMode, backward: BackwardMode, max_rows: int | None) -> None:
        if upstream not in get_args(UpstreamMode):
            raise ValueError(f"upstream must be one of {list(get_args(UpstreamMode))}, found {upstream!r}")
        if backward not in get_args(BackwardMode):
            raise ValueError(f"backward must be one of {list(get_args(BackwardMode))}, found {backward!r}")
        batch = self.trajectory.batch
        if max_rows is not None and max_rows < batch:
            raise ValueError(f"max_rows must be at least the batch of {batch}, found {max_rows}")
        if max_rows is not None and backward in ("joint", "sequential"):
            raise ValueError(f"max_rows limits batched passes, but backward is {backward!r}")
        self.on_policy = self._same_weights()
        # of other weights, or of another state than a predicted knot's, the rollout's own graph is of no use
        usable = self.on_policy is True and self.plan.knot_sigmas is None
        self._kept_graphs = self.trajectory.graphs if usable else {}
        if upstream == "closed_form" and self.on_policy is False:
            raise OffPolicyError(
                "upstream='closed_form' is legal only on policy, but the weights changed since the rollout: "
                "use upstream='autograd'"
            )
        if upstream == "closed_form" and self.on_policy is None and self.plan.knot_sigmas is not None:
            raise OffPolicyError(
                "upstream='closed_form' with predicted knots needs a policy with parameters(), also at the rollout: "
                "away from the rollout's states there is no ratio to check"
            )
        self.upstream = upstream if upstream != "auto" else ("closed_form" if self.on_policy else "autograd")
        if self.upstream == "interpolated":
            self._require_interpolating()
        self.routing = self.upstream == "autograd" and self.partly_clipped == "exact"
        fitting = self.plan.passes if max_rows is None else max_rows // batch
        if backward == "auto":
            fitting = min(fitting, AUTO_ELEMENTS // (batch * self.trajectory.elements))
            backward = "batched" if fitting > 1 else "sequential"
        self.backward = backward
        self.knots_per_pass = fitting if backward == "batched" else 1

    def _require_interpolating(self) -> None:
        if self.plan.knot_sigmas is not None:
            raise ValueError("upstream='interpolated' needs velocities at states of the rollout, not predicted knots")
        sums = self.plan.weights.sum(-2)
        if not torch.allclose(sums, torch.ones_like(sums)):
            raise ValueError(
                f"upstream='interpolated' needs a plan whose weights sum to 1 for every step, found {sums.min():g} to "
                f"{sums.max():g} in plan {self.plan.name!r}"
            )

    def _same_weights(self) -> bool | None:
        """Whether the weights are the rollout's, on every rank; None if the policy or the rollout cannot tell."""
        version = weights_version(self.policy)
        if version is None or self.trajectory.weights_version is None:
            return None
        return not on_any_rank(version != self.trajectory.weights_version, self.trajectory.latents.device)

    def bundles(self) -> Iterator[list[int]]:
        """Positions of the knots that share one backward call."""
        if self.backward == "joint":
            yield from (knots for knots, _ in self.components)
            return
        for start in range(0, self.plan.passes, self.knots_per_pass):
            yield list(range(start, min(start + self.knots_per_pass, self.plan.passes)))

    def run(self, bundle: list[int]) -> None:
        knots = [self.plan.knots[i] for i in bundle]
        touched = [n for n, (positions, _) in enumerate(self.components) if set(positions) & set(bundle)]
        if self.routing:
            feeding = sorted({j for n in touched for j in self.components[n][1]})
        else:
            feeding = self.used[bundle].any(0).nonzero().flatten().tolist()
        unknown = [j for j in feeding if j not in self.known]
        # a predicted knot is not a state of the rollout: its velocity says nothing of its step
        at_states = knots if self.plan.knot_sigmas is None else []

        # phase 1: forwards, first those without a graph
        if self.upstream == "autograd":
            for some, found in self._without_graph([j for j in unknown if j not in at_states]):
                self._learn(some, dict(zip(some, found, strict=True)))
        if self.upstream == "interpolated":
            others = sorted({self.plan.knots[i] for n in touched for i in self.components[n][0]} - set(knots))
            for some, found in self._without_graph([k for k in others if k not in self.drifts]):
                self._note_drift(some, found)
        velocities = []
        for positions in self._in_passes(bundle):
            if self._kept_graphs and all(self.plan.knots[i] in self._kept_graphs for i in positions):
                velocities += [self._kept_graphs.pop(self.plan.knots[i]) for i in positions]
                continue
            sites = [self.trajectory.site(self.plan.knots[i], self.plan.knot_sigma(i)) for i in positions]
            velocities += self._velocities(sites)

        # phase 2: upstream gradients
        if self.upstream == "autograd":
            self._learn([k for k in at_states if k in unknown], dict(zip(knots, velocities, strict=True)))
        elif self.upstream == "interpolated":
            self._note_drift(knots, velocities)
            self._learn(unknown, {j: self._drifted(j) for j in unknown})
        else:
            self._check_on_policy(at_states, velocities)
            self._learn(unknown, None)
        self._check_finite(unknown)
        if self.routing:
            self._route(touched)

        # phase 3: aggregation
        with self._phase("upstream"):
            totals = [self._aggregate(i) for i in bundle]

        # phase 4: one backward
        self._backward(velocities, totals)
        self.passes += len(knots)

        if self.routing:
            for n in touched:
                if self.components[n][0][-1] in bundle:
                    self._exact_rows(n)

    def _without_graph(self, steps: Sequence[int]) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Velocities at states of the rollout, a pass at a time."""
        for some in self._in_passes(steps):
            with torch.no_grad():
                found = self._velocities([self.trajectory.site(j) for j in some])
            yield some, found

    def _note_drift(self, steps: Sequence[int], velocities: Sequence[Tensor]) -> None:
        for step, velocity in zip(steps, velocities, strict=True):
            self.drifts[step] = velocity.detach().to(self.trajectory.latents.dtype) - self.trajectory.velocity(step)

    def _drifted(self, step: int) -> Tensor:
        """The rollout's velocity at ``step``, moved as its knots have moved since."""
        velocity = self.trajectory.velocity(step)
        for position in self.used[:, step].nonzero().flatten().tolist():
            drift = self.drifts[self.plan.knots[position]]
            velocity = velocity + expand(self.weights[..., position, step], drift) * drift
        return velocity

    def _in_passes(self, steps: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(steps), self.knots_per_pass):
            yield list(steps[start : start + self.knots_per_pass])

    def _velocities(self, sites: list[tuple[Tensor, Tensor]], members: Tensor | None = None) -> list[Tensor]:
        """Velocities at ``sites`` (see `Trajectory.site`) in one call; of all samples, or of ``members`` only."""
        keep = slice(None) if members is None else members
        with self._phase("forward"):
            latents = torch.cat([z[keep] for z, _ in sites]) if len(sites) > 1 else sites[0][0][keep]
            told = torch.cat([sigma[keep] for _, sigma in sites])
            rows = self.rows[keep].repeat(len(sites))
            velocity = self.policy.velocity(latents, told, rows)
            if velocity.shape != latents.shape:
                raise ValueError(f"velocity must have shape {list(latents.shape)}, found {list(velocity.shape)}")
            self.forwards += len(sites)
        return [velocity] if len(sites) == 1 else list(velocity.chunk(len(sites)))

    def _learn(self, steps: list[int], velocities: dict[int, Tensor] | None) -> None:
        """Upstream gradients of ``steps`` from their velocities, or in closed form without."""
        with self._phase("upstream"):
            for step in steps:
                reference = self._reference_velocity(step)
                if velocities is None:
                    self.known[step] = upstream_closed_form(
                        self.objective, self.trajectory, step, self.advantages, reference
                    )
                else:
                    self.known[step] = upstream_autograd(
                        self.objective, self.trajectory, step, velocities[step], self.advantages, reference
                    )
                    self.log_ratios[step] = self.known[step].log_ratio

    def _reference_velocity(self, step: int) -> Tensor | None:
        if self.objective.kl_beta == 0 or self.reference is None:
            return None
        t = self.trajectory
        self.reference_forwards += 1
        with torch.no_grad():
            return self.reference.velocity(t.latents[step], t.told_sigma(step), self.rows).to(t.latents.dtype)

    def _check_finite(self, steps: list[int]) -> None:
        sums = [torch.stack([self.known[j].log_ratio.sum(), self.known[j].gradient.sum()]) for j in steps]
        if sums and not torch.isfinite(torch.stack(sums)).all():
            raise FloatingPointError(
                f"log ratio or upstream gradient is not finite at one of steps {steps}: "
                "a velocity, the policy's or the reference's, is NaN or infinite"
            )

    def _check_on_policy(self, knots: list[int], velocities: list[Tensor]) -> None:
        if not knots:
            return
        for knot, velocity in zip(knots, velocities, strict=True):
            log_prob = step_log_prob(self.trajectory, knot, velocity.detach().to(self.trajectory.latents.dtype))
            self.log_ratios[knot] = log_prob - self.trajectory.log_probs[knot]
        largest = torch.stack([self.log_ratios[k] for k in knots]).abs().max().item()
        if not math.isfinite(largest):
            raise FloatingPointError(f"the velocity is not finite at one of steps {knots}")
        limit = ON_POLICY_TOLERANCE.get(velocities[0].dtype, 1e-4)
        if largest > limit:
            raise OffPolicyError(
                f"upstream='closed_form' is legal only on policy, found |log ratio| {largest:.3g} (limit {limit:g}) at "
                f"one of steps {knots}: other weights than the rollout's, or dropout; use upstream='autograd'"
            )

    def _route(self, touched: list[int]) -> None:
        """Give the identity to samples of which only some steps of a component are clipped."""
        for n in touched:
            if n in self.routed:
                continue
            positions, steps = self.components[n]
            if len(steps) <= 1:
                self.routed[n] = torch.zeros_like(self.rows, dtype=torch.bool)
                continue
            clipped = torch.stack([self.known[j].clipped for j in steps])
            mixed = clipped.any(0) & ~clipped.all(0)
            self.routed[n] = mixed
            self.mixed += int(mixed.sum())
            if not mixed.any():
                continue
            if self.weights.ndim == 2:
                self.weights = self.weights.expand(self.trajectory.batch, -1, -1).clone()
            for i in positions:
                self.weights[mixed, i] = 0
                if self.plan.knot_sigmas is None and self.plan.knots[i] in steps:
                    self.weights[mixed, i, self.plan.knots[i]] = 1
                    self.used[i, self.plan.knots[i]] = True

    def _exact_rows(self, component: int) -> None:
        """A pass per inner step for the samples that were routed to exact, on all ranks alike."""
        positions, steps = self.components[component]
        mixed = self.routed[component]
        done = {self.plan.knots[i] for i in positions} if self.plan.knot_sigmas is None else set()
        inner = [j for j in steps if j not in done]
        here = bool(mixed.any())
        if not inner or not on_any_rank(here, mixed.device):
            return
        # a rank without such samples joins with one sample of weight zero, to keep collectives in step
        members = mixed.nonzero().flatten() if here else torch.zeros(1, dtype=torch.long, device=mixed.device)
        weight = self.scale if here else 0.0
        for step in inner:
            velocity = self._velocities([self.trajectory.site(step)], members)
            self._backward(velocity, [weight * self.known[step].gradient[members]])
            self.passes += 1

    def _aggregate(self, position: int) -> Tensor:
        """``u = sum_j w[position, j] s_j``, ``[B, *D]``."""
        total = torch.zeros_like(self.trajectory.latents[0])
        for step in self.used[position].nonzero().flatten().tolist():
            total += expand(self.scale * self.weights[..., position, step], total) * self.known[step].gradient
        return total

    def _backward(self, velocities: list[Tensor], totals: list[Tensor]) -> None:
        if not all(v.requires_grad for v in velocities):
            raise ValueError("policy: the velocity has no graph; do its parameters require gradients?")
        if self.plan.knot_sigmas is not None and not all(torch.isfinite(v).all() for v in velocities):
            raise FloatingPointError("the velocity is not finite at one of the predicted knots")
        with self._phase("backward"):
            pairs = list(zip(velocities, totals, strict=True))
            if self.backward_fn is None:
                torch.autograd.backward(velocities, [u.to(v.dtype) for v, u in pairs])
            else:
                self.backward_fn(torch.stack([(at_least_fp32(v) * u).sum() for v, u in pairs]).sum())
        self.backward_calls += 1

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if self.clock is None:
            yield
            return
        start = self.clock()
        yield
        self.seconds[name] += self.clock() - start

    def report(self) -> Report:
        # predicted knots in closed form evaluate no ratio: it is 1 by the weights
        ratios = self.log_ratios or {step: found.log_ratio for step, found in self.known.items()}
        log_ratio = torch.stack(list(ratios.values()))
        magnitude = log_ratio.abs().flatten()
        clip = self.objective.clip_range
        outside = ((log_ratio.exp() - 1).abs() > clip).double()
        first = outside[list(ratios).index(min(ratios))]
        figures = {
            "loss": self.scale * torch.stack([u.loss for u in self.known.values()]).sum(),
            "log_ratio_mean": log_ratio.mean(),
            "log_ratio_max": magnitude.max(),
            "log_ratio_p99": torch.quantile(magnitude, 0.99),
            "clipped_share": torch.stack([u.clipped for u in self.known.values()]).double().mean(),
            "outside_clip_share": outside.mean(),
            "first_step_outside_clip": first.mean(),
        }
        # one transfer from the device for all of them
        values = dict(zip(figures, torch.stack([x.double() for x in figures.values()]).tolist(), strict=True))
        if self.on_policy and values["log_ratio_p99"] > clip:
            warnings.warn(
                f"on policy, yet 1 % of |log ratio| exceed {values['log_ratio_p99']:.2g}, above clip_range {clip:g}: "
                "half precision with another batch shape than the rollout's, or dropout",
                RatioNoise,
                stacklevel=3,
            )
        return Report(
            **values,
            partly_clipped=self.mixed,
            passes=self.passes,
            forwards=self.forwards,
            reference_forwards=self.reference_forwards,
            backward_calls=self.backward_calls,
            upstream=self.upstream,
            backward=self.backward,
            anticipating=self.plan.anticipating,
            log_ratio_by_step=dict(zip(ratios, log_ratio.abs().amax(1).tolist(), strict=True)),
            seconds=dict(self.seconds) if self.clock is not None else {},
        )
