"""One call in the place of a trainer's loop over steps, and the contexts that Accelerate counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.engine import Meter, PartlyClipped, Report, UpstreamMode, accumulate_gradients
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import Plan
from jagg_core.policy import VelocityPolicy
from jagg_core.trajectory import Trajectory

HostBackward = Literal["sequential", "batched", "joint"]
"""`jagg_core.engine.BackwardMode` without ``"auto"``: a trainer must know how many backward calls there will be."""


def plan_update(
    policy: VelocityPolicy,
    trajectory: Trajectory,
    advantages: Tensor,
    plan: Plan,
    objective: ClippedSurrogate,
    *,
    scale: float,
    upstream: UpstreamMode = "auto",
    backward: HostBackward = "sequential",
    reference: VelocityPolicy | None = None,
    partly_clipped: PartlyClipped = "keep",
    max_rows: int | None = None,
    clock: Callable[[], float] | None = None,
    backward_fn: Callable[[Tensor], None] | None = None,
    accelerator: Any = None,
    models: Sequence[Any] = (),
    audit: Meter | None = None,
) -> Report:
    """Adds the plan's gradient of a micro-batch into ``.grad``, in the place of a loop over its T steps.

    With ``accelerator`` the call counts as T contexts of ``accelerator.accumulate(*models)``, however many passes it
    makes and however it ends, so ``accelerator.sync_gradients`` is afterwards what the loop would have left. Clip, step
    and zero after it as in the loop. Gradients go through ``accelerator.backward``, which divides them by
    ``gradient_accumulation_steps``, as it does the loop's. All passes but the last run in contexts that do not
    synchronise, the last in one that does if the loop's last would.

    Args:
        policy: as in `jagg_core.engine.accumulate_gradients`; so are all that say no more.
        trajectory: T steps of B samples; see `jagg_core.integrations.host_trajectory`.
        advantages: ``[B]``, or ``[B, T]``, which may differ over steps: in the order in which the steps were given to
            `jagg_core.integrations.host_trajectory`. Of a trajectory that was not made there: from high noise to low.
        plan: for T steps.
        objective: the loss.
        scale: factor of the loss, summed over samples and steps, before the host's. For a trainer whose loss of a
            step is a mean over its micro-batch: ``1 / B``.
        upstream: as there; only ``"autograd"``, or ``"auto"`` in its place, where the rollout's noise is not known.
        backward: as there, without ``"auto"``. ``"sequential"`` holds one graph at a time, as the loop did.
        reference: policy of the KL term.
        partly_clipped: what happens to samples with some steps clipped, some not. ``"keep"`` makes no more passes than
            the plan: clipped steps have no upstream gradient, and add nothing to a knot. ``"exact"`` soon makes as many
            as there are steps (``docs/method.md``).
        max_rows: most rows of a batched pass.
        clock: timer in seconds.
        backward_fn: a backward for scalars, of a trainer without Accelerate.
        accelerator: an ``accelerate.Accelerator``, DeepSpeed's included. Not together with ``backward_fn``.
        models: what the loop gives to ``accelerator.accumulate``.
        audit: keeps a running cosine to the exact gradient, from the first micro-batch after the gradients were cleared
            in one of ``audit.every`` optimizer steps; two more passes there. Its calls of ``backward`` share the last
            context, and ``.grad`` is afterwards as without them.

    Raises:
        ValueError: settings that do not fit each other; an optimizer step of the loop within the T steps; under
            DeepSpeed, passes whose number depends on what is clipped, or an audit, which reads ``.grad``; under FSDP1
            an audit. All before any forward.
        ReplayMismatch, OffPolicyError, FloatingPointError: see `jagg_core.engine.accumulate_gradients`.
    """
    require_one_of("backward", backward, HostBackward)
    require_one_of("upstream", upstream, UpstreamMode)
    if accelerator is not None and backward_fn is not None:
        raise ValueError("backward_fn must be None with accelerator, which has a backward")
    advantages = _in_order(advantages, trajectory)

    def run(through: Callable[[Tensor], None] | None) -> Report:
        return accumulate_gradients(
            policy,
            trajectory,
            advantages,
            plan,
            objective,
            upstream,
            backward,
            reference=reference,
            scale=scale,
            partly_clipped=partly_clipped,
            max_rows=max_rows,
            clock=clock,
            backward_fn=through,
            audit=audit,
        )

    if accelerator is None:
        return run(backward_fn)
    kind = _kind(accelerator)
    if audit is not None and (kind == "DEEPSPEED" or (kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False))):
        raise ValueError(f"audit must be None under {kind}, which does not keep gradients in .grad; FSDP2 does")
    if kind == "DEEPSPEED" and upstream in ("auto", "autograd") and partly_clipped == "exact":
        raise ValueError(
            "DeepSpeed steps the optimizer in every backward call of the last context, and partly_clipped='exact' "
            f"makes as many as clipping asks for under upstream={upstream!r}: use partly_clipped='keep'"
        )
    calls = _backward_calls(plan, backward, trajectory.batch, max_rows)
    window = _Window(accelerator, models, trajectory.steps, calls)
    try:
        return run(window.backward)
    finally:
        window.close()


def _in_order(advantages: Tensor, trajectory: Trajectory) -> Tensor:
    """Returns advantages ``[B]``, or ``[B, T]`` in the trajectory's order of steps."""
    if advantages.ndim != 2:
        return advantages
    if (advantages == advantages[:, :1]).all():
        return advantages[:, 0]
    if trajectory.order is None or advantages.shape != trajectory.order.shape:
        return advantages
    return advantages.gather(1, trajectory.order.to(advantages.device))


def _backward_calls(plan: Plan, backward: HostBackward, batch: int, max_rows: int | None) -> int:
    """Counts the backward calls of the plan itself; samples that are partly clipped may add some."""
    if backward == "joint":
        return len(plan.components())
    if backward == "sequential":
        return plan.passes
    return 1 if max_rows is None else -(-plan.passes // max(max_rows // batch, 1))


def _kind(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


class _Window:
    """``steps`` contexts of ``accelerator.accumulate``, of which ``calls`` backward calls fill the first and the last.

    Every call except the last one takes the next context; then contexts pass by empty; the last call has the last one.
    """

    def __init__(self, accelerator: Any, models: Sequence[Any], steps: int, calls: int) -> None:
        every, done = accelerator.gradient_accumulation_steps, accelerator.step
        at_end = accelerator.gradient_state.end_of_dataloader and accelerator.gradient_state.sync_with_dataloader
        if steps > 1 and (at_end or done % every + steps > every):
            where = "at the end of a dataloader" if at_end else f"after {done % every} contexts of the current one"
            raise ValueError(
                f"gradient_accumulation_steps is {every}: {where} the loop steps the optimizer within these {steps} "
                "steps, and one update cannot; it must be a multiple of the trained steps of a micro-batch"
            )
        self.accelerator, self.models = accelerator, models
        self.steps, self.calls = steps, calls
        self.entered = self.made = 0
        self.context = ExitStack()
        self._next()

    def backward(self, loss: Tensor) -> None:
        """Calls `accelerator.backward`, and enters the context of the next call."""
        self.accelerator.backward(loss)
        self.made += 1
        if self.made < self.calls:
            self._next()

    def close(self) -> None:
        """Leaves, having counted ``steps`` contexts."""
        self.context.close()
        self._pass_by(self.steps)

    def _next(self) -> None:
        self.context.close()
        if self.made == self.calls - 1:
            self._pass_by(self.steps - 1)
        self.context.enter_context(self.accelerator.accumulate(*self.models))
        self.entered += 1

    def _pass_by(self, until: int) -> None:
        for _ in range(until - self.entered):
            with self.accelerator.accumulate():
                self.entered += 1
