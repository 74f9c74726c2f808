"""Accumulation counters, scalar backward, and plans for remainders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch import Tensor

from jagg_core.integrations import plan_update, window_plan
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import Plan, causal_plan, exact_plan, jagg_plan
from jagg_core.schedule import dance_schedule
from tests.jagg_core.fields import (
    ADVANTAGES,
    MlpField,
    flat_gradient,
    gradient,
    make_rollout,
    nudge,
    relative_error,
    with_log_ratios,
)

OBJECTIVE = ClippedSurrogate(clip_range=1e-3)
SIGMAS = dance_schedule(7)[:6]
CAUSAL = causal_plan(SIGMAS, [0, 2, 3])


def make_accelerator(steps: int, kind: type[Accelerator] = Accelerator) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return kind(cpu=True, gradient_accumulation_steps=steps)


# Counters


def counted(accelerator: Accelerator, times: int, run: Callable[[], object]) -> list[tuple[int, bool]]:
    """The counter and whether gradients synchronise, after each of some runs."""
    found = []
    for _ in range(times):
        run()
        found.append((accelerator.step, accelerator.sync_gradients))
    return found


@pytest.mark.parametrize("plan", [exact_plan(SIGMAS), CAUSAL, causal_plan(SIGMAS, [0])], ids=["6", "3", "1 passes"])
@pytest.mark.parametrize("backward", ["sequential", "batched", "joint"])
def test_a_window_counts_as_its_steps(plan: Plan, backward: str) -> None:
    """flow_grpo: accumulation steps are micro-batches times trained steps."""
    policy = MlpField()
    trajectory = make_rollout(policy)

    def loop() -> None:
        for _ in range(6):
            with accelerator.accumulate():
                pass

    accelerator = make_accelerator(3 * 6)
    expected = counted(accelerator, 7, loop)
    assert [sync for _, sync in expected] == [False, False, True] * 2 + [False]
    accelerator = make_accelerator(3 * 6)

    def ours() -> None:
        plan_update(
            policy, trajectory, ADVANTAGES, plan, OBJECTIVE, scale=0.25, backward=backward, accelerator=accelerator
        )

    assert counted(accelerator, 7, ours) == expected


def test_only_the_last_call_synchronises() -> None:
    accelerator = make_accelerator(6)
    policy = MlpField()
    trajectory = make_rollout(policy)
    at: list[bool] = []
    backward = accelerator.backward

    def watched(loss: Tensor, **settings: Any) -> None:
        at.append(accelerator.sync_gradients)
        backward(loss, **settings)

    accelerator.backward = watched
    plan_update(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=1.0, accelerator=accelerator)
    assert at == [False, False, True]


def test_a_window_that_fails_counts_all_the_same() -> None:
    class Failing(MlpField):
        good = 1000

        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            return super().velocity(latents, sigma, rows) * (1 if len(self.calls) < self.good else torch.nan)

    policy = Failing()
    trajectory = make_rollout(policy)
    policy.good = len(policy.calls) + 2  # the second pass fails
    accelerator = make_accelerator(6)
    with pytest.raises(FloatingPointError):
        plan_update(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=1.0, accelerator=accelerator)
    assert (accelerator.step, accelerator.sync_gradients) == (6, True)


@pytest.mark.parametrize(("every", "done"), [(4, 0), (8, 3), (9, 6)])
def test_an_optimizer_step_within_the_window_is_refused(every: int, done: int) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    accelerator = make_accelerator(every)
    for _ in range(done):
        with accelerator.accumulate():
            pass
    policy.calls.clear()
    with pytest.raises(ValueError, match=f"gradient_accumulation_steps is {every}: .* within these 6 steps"):
        plan_update(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=1.0, accelerator=accelerator)
    assert policy.calls == []


def test_the_end_of_a_dataloader_is_refused() -> None:
    """Accelerate then steps the optimizer in every context."""
    policy = MlpField()
    trajectory = make_rollout(policy)
    accelerator = make_accelerator(6)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(2)))
    seen = []
    for _ in loader:
        with suppress(ValueError):
            plan_update(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=1.0, accelerator=accelerator)
            seen.append("ran")
            continue
        seen.append("refused")
    assert seen == ["ran", "refused"]


# Backward


@pytest.mark.parametrize("backward", ["sequential", "batched", "joint"])
def test_the_loss_is_divided_as_the_hosts_own(backward: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    expected, _ = gradient(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=0.25 / 12)
    policy.zero_grad()
    accelerator = make_accelerator(12)
    plan_update(
        policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=0.25, backward=backward, accelerator=accelerator
    )
    assert relative_error(flat_gradient(policy), expected) < 1e-12


class Engine:
    """The part of a DeepSpeed engine that Accelerate's wrapper calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundary = is_boundary

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")
        loss.backward()

    def step(self) -> None:
        assert self.boundary
        self.calls.append("step")


class WithDeepSpeed(Accelerator):
    """Accelerate as it is where it finds DeepSpeed, with `Engine` behind its own wrapper."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.engine = Engine()
        self.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(self.engine)

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.DEEPSPEED


def test_deepspeed_steps_once_however_many_passes_there_are() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    accelerator = make_accelerator(12, WithDeepSpeed)
    for _ in range(4):
        plan_update(
            policy,
            trajectory,
            ADVANTAGES,
            CAUSAL,
            OBJECTIVE,
            scale=1.0,
            partly_clipped="keep",
            accelerator=accelerator,
            models=[policy],
        )
    assert accelerator.engine.calls == (["backward"] * 6 + ["step"]) * 2


def test_deepspeed_refuses_passes_that_depend_on_clipping() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    accelerator = make_accelerator(6, WithDeepSpeed)
    policy.calls.clear()
    with pytest.raises(ValueError, match="use partly_clipped='keep'"):
        plan_update(
            policy,
            trajectory,
            ADVANTAGES,
            CAUSAL,
            OBJECTIVE,
            scale=1.0,
            partly_clipped="exact",
            accelerator=accelerator,
        )
    assert policy.calls == []
    assert accelerator.step == 0


def test_passes_for_partly_clipped_samples_stay_in_the_window() -> None:
    policy = MlpField()
    log_ratios = torch.zeros(6, 4, dtype=torch.float64)
    log_ratios[1, 0] = 0.1  # clipped: its advantage is positive
    trajectory = with_log_ratios(make_rollout(policy), log_ratios)
    nudge(policy, 1e-9)
    plan = causal_plan(SIGMAS, [0, 3])
    exact = {"scale": 1 / 6, "partly_clipped": "exact"}
    expected, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", "sequential", **exact)
    policy.zero_grad()
    accelerator = make_accelerator(6)
    settings = {"scale": 1.0, "accelerator": accelerator}
    report = plan_update(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, partly_clipped="exact", **settings)
    assert (report.partly_clipped, report.backward_calls, report.passes) == (1, 4, 4)
    assert relative_error(flat_gradient(policy), expected) < 1e-12
    assert (accelerator.step, accelerator.sync_gradients) == (6, True)
    kept = plan_update(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, **settings)
    assert (kept.partly_clipped, kept.backward_calls, kept.passes) == (0, 2, 2), "as many as the plan, by default"


def test_a_backward_of_the_hosts_own() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    expected, _ = gradient(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE)
    policy.zero_grad()
    losses: list[Tensor] = []

    def own(loss: Tensor) -> None:
        losses.append(loss.detach())
        (2 * loss).backward()

    plan_update(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE, scale=1.0, backward_fn=own)
    assert [loss.shape for loss in losses] == [()] * 3
    assert relative_error(flat_gradient(policy), 2 * expected) < 1e-12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backward": "auto"}, "backward must be one of .* got 'auto'"),
        ({"upstream": "exact"}, "upstream must be one of .* got 'exact'"),
        ({"backward_fn": torch.Tensor.backward, "accelerator": object()}, "backward_fn must be None with accelerator"),
        ({"advantages": ADVANTAGES[:, None] * torch.arange(5)}, r"advantages must have shape \[4\] or \[4, 6\], got"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    policy.calls.clear()
    arguments = {"advantages": ADVANTAGES, "scale": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        plan_update(policy, trajectory, plan=CAUSAL, objective=OBJECTIVE, **arguments)
    assert policy.calls == []


def test_advantages_may_be_repeated_over_steps() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    expected, _ = gradient(policy, trajectory, ADVANTAGES, CAUSAL, OBJECTIVE)
    policy.zero_grad()
    plan_update(policy, trajectory, ADVANTAGES[:, None].expand(4, 6), CAUSAL, OBJECTIVE, scale=1.0)
    assert relative_error(flat_gradient(policy), expected) < 1e-12


# Plans


@pytest.mark.parametrize(
    ("steps", "window", "estimator", "knots"),
    [
        (6, 3, "causal", (0, 3)),
        (7, 3, "causal", (0, 3, 6)),
        (5, 2, "causal", (0, 2, 4)),
        (2, 3, "causal", (0, 1)),
        (6, 1, "causal", (0, 1, 2, 3, 4, 5)),
        (6, 3, "jagg", (0, 2, 3, 5)),
        (7, 4, "jagg", (0, 3, 4, 5, 6)),
        (6, 2, "jagg", (0, 1, 2, 3, 4, 5)),
        (3, 4, "jagg", (0, 1, 2)),
        (4, 2, "exact", (0, 1, 2, 3)),
    ],
)
def test_what_is_left_over_is_exact(steps: int, window: int, estimator: str, knots: tuple[int, ...]) -> None:
    plan = window_plan(dance_schedule(steps + 1)[:steps], window, estimator)
    assert plan.knots == knots
    assert plan.weights.sum(-2).tolist() == pytest.approx([1.0] * steps)
    assert plan.anticipating is (estimator == "jagg" and window > 2 and steps >= window)


def test_rows_on_different_steps_have_weights_of_their_own() -> None:
    schedule = dance_schedule(9)
    sigmas = schedule[torch.tensor([[0, 1, 5], [2, 3, 4]])]
    plan = window_plan(sigmas, 3, "jagg")
    for row in range(2):
        assert torch.equal(plan.weights[row], jagg_plan(sigmas[row], 3, 1.0).weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [((0,), "window must be at least 1, got 0"), ((2, "spline"), "estimator must be one of .* got 'spline'")],
)
def test_bad_windows_are_named(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_plan(SIGMAS, *settings)
