"""One update: the four phases of every bundle of knots, and the report."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.choices import BackwardMode, PartlyClipped, UpstreamMode
from jagg_core.distributed import on_any_rank
from jagg_core.engine.aggregation import Aggregation
from jagg_core.engine.meter import Meter, residual_weights
from jagg_core.engine.modes import Modes, choose_modes
from jagg_core.engine.passes import Passes
from jagg_core.engine.report import RatioNoise, Report, figures_of, ratios_of
from jagg_core.engine.upstream import WAYS, Given, Source, UpstreamGradients
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import Plan
from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import ReplayMismatch, Trajectory, policy_signature
from jagg_core.transitions import expand


def accumulate_gradients(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor | None,
    plan: Plan,
    objective: ClippedSurrogate | None,
    upstream: UpstreamMode | Source = "auto",
    backward: BackwardMode = "auto",
    *,
    reference: VelocityPolicy | None = None,
    scale: float = 1.0,
    partly_clipped: PartlyClipped = "keep",
    max_rows: int | None = None,
    clock: Callable[[], float] | None = None,
    backward_fn: Callable[[Tensor], None] | None = None,
    audit: Meter | None = None,
) -> Report:
    """Adds the plan's gradient of the loss into ``.grad``, as ``backward()`` would.

    The loss is ``scale`` times the sum over samples and trained steps, so that micro-batches add up; a trainer passes
    ``scale = 1 / (samples * steps)``. Everything outside the network runs in the dtype of the trajectory.

    Args:
        policy: differentiated at the plan's knots.
        trajectory: T steps of B samples. Graphs that it kept are used in the place of forwards, once, on policy.
        advantages: ``[B]``, or ``[B, T]`` where they differ over steps (tree rollouts, credit by steps), in the order
            of the trajectory's steps, from high noise to low.
        plan: for T steps, ``[K, T]`` or ``[B, K, T]``.
        objective: the loss.
        upstream: ``"autograd"`` runs the network at every step (the paper). ``"closed_form"`` only at the knots; legal
            only on policy, which is checked before any forward by the weights, and at every knot by the ratio.
            ``"auto"`` takes it exactly where the weights are known to be the rollout's. ``"interpolated"`` works off
            policy with forwards at the knots alone: the other steps' velocities move as the knots' have moved since the
            rollout, by the plan's weights, which must sum to 1 for every step. Other upstream gradients are given: a
            tensor ``[T, B, *D]``, which needs forwards at the knots alone, or a
            function of step, latents and velocity ``[B, *D]`` that returns ``[B, *D]`` and is asked at every step that
            the plan uses. ``advantages`` and ``objective`` are then None, and the report's loss and ratios are 0.
        backward: ``"joint"``: one forward per knot, one backward call per independent part of the plan (the paper).
            ``"batched"``: several knots in one pass. ``"sequential"``: one knot at a time, the least memory.
            ``"auto"``: batched while a pass stays small (`jagg_core.engine.modes.AUTO_ELEMENTS`), else sequential.
        reference: policy of the KL term; needed if ``objective.needs_reference``.
        scale: factor of the loss. Half-precision networks need it large enough for gradients to be representable.
        partly_clipped: what happens to a sample with some steps of a group clipped, some not, under ``"autograd"``:
            ``"keep"`` makes the plan's passes and no more: clipped steps have no upstream gradient and add nothing.
            ``"exact"`` gives it a pass per step, soon as many as there are steps (``docs/method.md``).
        max_rows: most rows (knots times samples) of one batched pass; no limit by default.
        clock: timer in seconds that waits for the device; with it the report has seconds per phase.
        backward_fn: replaces ``torch.autograd.backward`` where a trainer has a backward for scalars (Accelerate,
            DeepSpeed). It gets ``sum(v * u)``, whose gradient in the velocities v is u; its value means nothing.
        audit: keeps a running cosine to the exact gradient. Where an audit is due, two more passes follow (one, if the
            step is a knot), through ``backward_fn`` as the others; ``.grad`` is afterwards as without them.

    Raises:
        ValueError: arguments that do not fit each other; an audit of a plan that looks ahead or leaves steps out, or of
            upstream gradients that are given.
        ReplayMismatch: plan, policy and trajectory disagree on the schedule or on settings.
        OffPolicyError: closed form off policy.
        FloatingPointError: a velocity is not finite. As after an `OffPolicyError` at a later knot, ``.grad`` may then
            hold the passes before it: zero it. On several ranks it comes after the last pass, and ``.grad`` is not
            finite, for the other ranks make as many passes.

    Example:
        >>> import torch
        >>> from jagg_core import ClippedSurrogate, DanceSDE, accumulate_gradients, causal_plan, dance_schedule
        >>> from jagg_core import initial_latents, rollout
        >>> class Scaled(torch.nn.Linear):
        ...     def velocity(self, latents, sigma, rows):
        ...         return self(latents)
        >>> policy = Scaled(4, 4)
        >>> noise = initial_latents((4,), seed=0, sample_ids=range(2))
        >>> trajectory = rollout(policy, dance_schedule(7), DanceSDE(0.3), noise, seed=0)
        >>> plan = causal_plan(trajectory.sigmas, knots=[0, 3])
        >>> report = accumulate_gradients(policy, trajectory, torch.tensor([1.0, -1.0]), plan, ClippedSurrogate())
        >>> report.passes, report.forwards, report.upstream
        (2, 2, 'closed_form')
        >>> policy.weight.grad.shape
        torch.Size([4, 4])
    """
    source: Source | None = None
    mode: UpstreamMode | Literal["given"] = "given"
    if isinstance(upstream, str):
        require_one_of("upstream", upstream, UpstreamMode)
        if advantages is None or objective is None:
            raise ValueError(f"advantages and objective must be given with upstream={upstream!r}, got None")
        mode = upstream
    else:
        _require_given(upstream, trajectory, advantages, objective, reference)
        source, advantages, objective = upstream, torch.zeros(trajectory.batch), ClippedSurrogate()
    _require_fitting(trajectory, advantages, plan, objective, reference, scale)
    trajectory.require(sigmas=plan.sigmas, signature=policy_signature(policy))
    modes = choose_modes(policy, trajectory, plan, mode, backward, partly_clipped, max_rows)
    if audit is not None and source is not None:
        raise ValueError("audit must be None where upstream gradients are given: their residuals may not be orthogonal")
    due = audit is not None and audit.is_due(plan)
    passes = Passes(policy, trajectory, plan, modes, clock, backward_fn)
    known = trajectory, advantages.to(trajectory.latents), plan, objective, reference, passes
    gradients = WAYS[modes.upstream](*known) if source is None else Given(*known, source=source)
    update = _Update(plan, modes, passes, gradients, Aggregation(plan, trajectory, scale))
    for bundle in update.bundles():
        update.run(bundle)
    due = due and not on_any_rank(bool(passes.broken), trajectory.latents.device)
    if passes.broken:
        raise FloatingPointError(passes.broken)
    report = update.report(scale, objective)
    if audit is not None and due:
        more, start = Passes(policy, trajectory, plan, modes, None, backward_fn), clock() if clock else 0.0
        audit.audit(plan, update.upstream_sizes(), lambda step: update.add_residual(step, scale, more))
        seconds = {"audit": clock() - start} if clock else {}
        report = replace(report, audit_passes=more.passes, seconds=report.seconds | seconds)
    tightest = min(abs(offset) for offset in objective.ratio_bounds)
    if modes.on_policy and report.log_ratio_p99 > tightest:
        warnings.warn(
            f"on policy, yet 1 % of |log ratio| exceed {report.log_ratio_p99:.2g}, above clip_range "
            f"{tightest:g}: half precision with another batch shape than the rollout's, or dropout",
            RatioNoise,
            stacklevel=2,
        )
    return report


def _require_given(
    upstream: Source,
    trajectory: Trajectory,
    advantages: Tensor | None,
    objective: ClippedSurrogate | None,
    reference: VelocityPolicy | None,
) -> None:
    if advantages is not None or objective is not None or reference is not None:
        raise ValueError("advantages, objective and reference must be None where upstream gradients are given")
    if isinstance(upstream, Tensor):
        if upstream.shape != trajectory.latents.shape:
            raise ValueError(f"upstream must have shape {list(trajectory.latents.shape)}, got {list(upstream.shape)}")
    elif not callable(upstream):
        raise ValueError(f"upstream must be a mode, a tensor or a function, got {type(upstream).__name__}")


def _require_fitting(
    trajectory: Trajectory,
    advantages: Tensor,
    plan: Plan,
    objective: ClippedSurrogate,
    reference: VelocityPolicy | None,
    scale: float,
) -> None:
    batch = trajectory.batch
    if advantages.shape not in ((batch,), (batch, trajectory.steps)):
        allowed = f"[{batch}] or [{batch}, {trajectory.steps}]"
        raise ValueError(f"advantages must have shape {allowed}, got {list(advantages.shape)}")
    if not torch.isfinite(advantages).all():
        index = (~torch.isfinite(advantages)).nonzero()[0].tolist()
        where = f"sample {index[0]}" + (f", step {index[1]}" if advantages.ndim == 2 else "")
        raise ValueError(f"advantages must be finite, got {advantages[tuple(index)].item()} at {where}")
    if plan.steps != trajectory.steps:
        raise ReplayMismatch(f"plan: made for {plan.steps} trained steps, the trajectory has {trajectory.steps}")
    if plan.weights.ndim == 3 and len(plan.weights) != batch:
        raise ValueError(f"plan: weights are for {len(plan.weights)} samples, the trajectory has {batch}")
    if not plan.weights.any():
        raise ValueError("plan: at least one weight must differ from 0, got none")
    sites = plan.knot_sigmas
    if sites is not None and sites.ndim == 2 and len(sites) != batch:
        raise ValueError(f"plan: knot_sigmas are for {len(sites)} samples, the trajectory has {batch}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    objective.require_fitting(trajectory, reference is not None)


@dataclass(frozen=True, eq=False)
class _Update:
    """One call of `accumulate_gradients`."""

    plan: Plan
    modes: Modes
    passes: Passes
    upstream: UpstreamGradients
    aggregation: Aggregation

    def bundles(self) -> Iterator[list[int]]:
        """Yields positions of the knots that share one backward call."""
        if self.modes.backward == "joint":
            yield from (positions for positions, _ in self.aggregation.parts)
        else:
            yield from self.passes.together(range(self.plan.passes))

    def run(self, bundle: list[int]) -> None:
        """Runs the four phases of one bundle."""
        parts = self.aggregation.parts
        touched = [n for n, (positions, _) in enumerate(parts) if set(positions) & set(bundle)]
        if self.modes.exact_where_mixed:
            # whether a sample is partly clipped is only known with all steps of a part
            feeding = sorted({j for n in touched for j in parts[n][1]})
        else:
            feeding = self.aggregation.feeding(bundle)
        unknown = [j for j in feeding if j not in self.upstream.known]
        knots = [self.plan.knots[i] for i in bundle]
        others = sorted({self.plan.knots[i] for n in touched for i in parts[n][0]} - set(knots))

        # phase 1: forwards, first those without a graph, so that no graph is alive meanwhile
        self.upstream.run_forwards(unknown, knots, others)
        velocities = self.passes.at_knots(bundle)

        # phase 2: upstream gradients, from transition and loss alone: the network is not differentiated here
        self.upstream.learn(unknown, knots, velocities)
        if self.modes.exact_where_mixed:
            for n in touched:
                self.aggregation.make_exact(n, self.upstream.known)

        # phase 3: aggregation. The Jacobian is linear: one product with the sum replaces one per step
        with self.passes.timed("upstream"):
            totals = [self.aggregation.aggregate(i, self.upstream.known) for i in bundle]

        # phase 4: one backward from all knots of the bundle, whose graphs are freed with it
        self.passes.backward(velocities, totals)

        if self.modes.exact_where_mixed:
            for n in touched:
                if parts[n][0][-1] in bundle:
                    self.aggregation.run_exact(n, self.upstream.known, self.passes)

    def upstream_sizes(self) -> Tensor:
        """Computes ``|s_j|^2`` of every step, ``[T]``, fp64, without the samples that were made exact there."""
        known = self.upstream.known
        kept = [self.aggregation.approximated(j, known[j].gradient).double() for j in range(self.plan.steps)]
        return torch.stack([gradient.square().sum() for gradient in kept])

    def add_residual(self, step: int, scale: float, passes: Passes) -> None:
        """Adds ``scale`` times the exact gradient of a step less the plan's into ``.grad``."""
        gradient = self.aggregation.approximated(step, self.upstream.known[step].gradient)
        for position, factor in residual_weights(self.plan, step).items():
            velocity = passes.at_step(step) if position is None else passes.at_knots([position])[0]
            passes.backward([velocity], [expand((scale * factor).to(gradient), gradient) * gradient])

    def report(self, scale: float, objective: ClippedSurrogate) -> Report:
        """Collects the counts and figures."""
        known, passes = self.upstream.known, self.passes
        # shifted knots in closed form evaluate no ratio: it is 1 by the weights
        log_ratios = self.upstream.log_ratios or {step: upstream.log_ratio for step, upstream in known.items()}
        return Report(
            **figures_of(known, log_ratios, scale, objective),
            partly_clipped=self.aggregation.mixed,
            passes=passes.passes,
            audit_passes=0,
            forwards=passes.forwards,
            reference_forwards=self.upstream.reference_forwards,
            backward_calls=passes.backward_calls,
            upstream=self.modes.upstream,
            backward=self.modes.backward,
            anticipating=self.plan.anticipating,
            log_ratios=ratios_of(known, log_ratios, self.plan.steps),
            seconds=dict(passes.seconds),
        )
