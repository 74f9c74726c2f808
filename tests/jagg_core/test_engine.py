"""The engine against a plain loop of backwards: every plan, every mode, every way of cutting the work."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagg_core.engine import OffPolicyError, RatioNoise, Report, accumulate_gradients, modes
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import (
    Plan,
    causal_plan,
    exact_plan,
    jagg_plan,
    spline_plan,
)
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import ReplayMismatch, Trajectory
from jagg_core.transitions import DanceSDE, Transition
from tests.jagg_core.fields import (
    ADVANTAGES,
    PLANS,
    SHAPE,
    ConstantField,
    MlpField,
    flat_gradient,
    full_weights,
    gradient,
    make_rollout,
    noise_like,
    nudge,
    relative_error,
    trajectory_at,
    with_log_ratios,
)
from tests.jagg_core.literal import KERNEL_IDS, KERNELS, loop_gradient

OBJECTIVE = ClippedSurrogate(clip_range=1e-3)
UPSTREAM = ["autograd", "closed_form", "auto"]
BACKWARD = ["joint", "batched", "sequential", "auto"]

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
each_upstream = pytest.mark.parametrize("upstream", UPSTREAM)
each_backward = pytest.mark.parametrize("backward", BACKWARD)


def slow(
    policy: nn.Module,
    trajectory: Trajectory,
    weights: Tensor | None = None,
    advantages: Tensor = ADVANTAGES,
    **settings: Any,
) -> Tensor:
    """The gradient by the plain loop, from zero."""
    policy.zero_grad()
    loop_gradient(policy, trajectory, advantages, weights, clip_range=1e-3, **settings)  # type: ignore[arg-type]
    return flat_gradient(policy)


# The gradient itself


@each_kernel
@each_upstream
@each_backward
@pytest.mark.parametrize("kl_beta", [0.0, 0.04])
def test_exact_is_the_plain_loop(kernel: Transition, upstream: str, backward: str, kl_beta: float) -> None:
    policy, reference = MlpField(), MlpField(seed=1) if kl_beta else None
    trajectory = make_rollout(policy, transition=kernel)
    expected = slow(policy, trajectory, kl_beta=kl_beta, reference=reference)
    objective = dataclasses.replace(OBJECTIVE, kl_beta=kl_beta)
    plan = exact_plan(trajectory.sigmas)
    found, report = gradient(policy, trajectory, ADVANTAGES, plan, objective, upstream, backward, reference=reference)
    assert relative_error(found, expected) < 1e-11
    assert report.passes == report.forwards == 6
    assert report.reference_forwards == (6 if kl_beta else 0)
    assert not report.anticipating
    if reference is not None:
        assert all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kl_beta", [0.0, 0.04])
def test_every_plan_is_its_formula(name: str, kl_beta: float) -> None:
    policy, reference = MlpField(), MlpField(seed=1) if kl_beta else None
    trajectory = make_rollout(policy)
    plan = PLANS[name](trajectory.sigmas)
    expected = slow(policy, trajectory, full_weights(plan), kl_beta=kl_beta, reference=reference)
    exact = slow(policy, trajectory, kl_beta=kl_beta, reference=reference)
    if name != "exact":
        assert relative_error(expected, exact) > 1e-3, "an approximation is meant to differ"
    objective = dataclasses.replace(OBJECTIVE, kl_beta=kl_beta)
    for upstream, backward in itertools.product(UPSTREAM, BACKWARD):
        found, report = gradient(
            policy, trajectory, ADVANTAGES, plan, objective, upstream, backward, reference=reference
        )
        assert relative_error(found, expected) < 1e-11, (upstream, backward)
        assert report.passes == plan.passes
        assert report.anticipating is plan.anticipating


@pytest.mark.parametrize("moved", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("name", PLANS)
def test_advantages_may_differ_over_steps(name: str, moved: bool) -> None:
    """Tree rollouts and credit by steps: ``[B, T]``."""
    policy = MlpField()
    trajectory = make_rollout(policy)
    nudge(policy, 0.05 if moved else 0.0)
    advantages = noise_like(4, 6, seed=5)
    plan = PLANS[name](trajectory.sigmas)
    expected = slow(policy, trajectory, full_weights(plan), advantages)
    for upstream, backward in itertools.product(["autograd"] if moved else UPSTREAM, BACKWARD):
        found, report = gradient(
            policy, trajectory, advantages, plan, OBJECTIVE, upstream, backward, partly_clipped="keep"
        )
        assert relative_error(found, expected) < 1e-11, (upstream, backward)
    if not moved:
        used = advantages[:, plan.used.any(0)]
        assert report.policy_loss == pytest.approx(-used.mean().item(), rel=1e-9)
    one = gradient(policy, trajectory, advantages[:, 0], plan, OBJECTIVE, "autograd", partly_clipped="keep")[0]
    assert relative_error(one, expected) > 1e-2, "they matter"


@each_upstream
@each_backward
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_a_scalar_surrogate_gives_the_same_gradient(upstream: str, backward: str, dtype: torch.dtype) -> None:
    """Trainers whose backward takes a scalar loss."""
    policy = MlpField(dtype=dtype)
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 0.5)
    arguments: tuple[Any, ...] = (ADVANTAGES, plan, ClippedSurrogate(clip_range=0.1), upstream, backward)
    expected, before = gradient(policy, trajectory, *arguments)
    losses: list[Tensor] = []

    def backward_fn(loss: Tensor) -> None:
        losses.append(loss.detach())
        loss.backward()

    found, report = gradient(policy, trajectory, *arguments, backward_fn=backward_fn)
    assert relative_error(found, expected) < (1e-12 if dtype == torch.float64 else 1e-2)
    assert report == before
    assert len(losses) == report.backward_calls
    assert all(loss.shape == () and loss.dtype == torch.float64 for loss in losses)


@pytest.mark.parametrize("name", PLANS)
def test_off_policy_every_plan_is_its_formula(name: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    nudge(policy, 0.05)
    plan = PLANS[name](trajectory.sigmas)
    expected = slow(policy, trajectory, full_weights(plan))
    for backward in BACKWARD:
        found, report = gradient(
            policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", backward, partly_clipped="keep"
        )
        assert relative_error(found, expected) < 1e-11, backward
        assert report.log_ratio_max > OBJECTIVE.clip_range
        assert 0 < report.clipped_share < 1


@pytest.mark.parametrize("name", PLANS)
def test_in_fp32_all_modes_agree(name: str) -> None:
    policy = MlpField(dtype=torch.float32)
    trajectory = make_rollout(policy, dtype=torch.float32)
    plan = PLANS[name](trajectory.sigmas)
    advantages = ADVANTAGES.float()
    expected = gradient(policy, trajectory, advantages, plan, OBJECTIVE, "autograd", "joint")[0]
    for upstream, backward in itertools.product(UPSTREAM, BACKWARD):
        found, report = gradient(policy, trajectory, advantages, plan, OBJECTIVE, upstream, backward)
        assert relative_error(found, expected) < 1e-6, (upstream, backward)
        assert report.log_ratio_max < 1e-6


@pytest.mark.parametrize("window", [1, 2])
@each_upstream
def test_groups_of_one_and_two_are_exact_with_kl(window: int, upstream: str) -> None:
    """Case 7.7."""
    policy, reference = MlpField(dtype=torch.float32), MlpField(seed=1, dtype=torch.float32)
    trajectory = make_rollout(policy, dtype=torch.float32)
    objective = ClippedSurrogate(kl_beta=0.04)
    plan = jagg_plan(trajectory.sigmas, window, 1.0)
    found, expected = (
        gradient(policy, trajectory, ADVANTAGES, p, objective, upstream, reference=reference)[0]
        for p in (plan, exact_plan(trajectory.sigmas))
    )
    assert relative_error(found, expected) < 1e-6
    without = gradient(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(), upstream)[0]
    assert relative_error(without, expected) > 1e-3


def test_the_loss_is_the_loops() -> None:
    policy, reference = MlpField(), MlpField(seed=1)
    trajectory = make_rollout(policy)
    objective = ClippedSurrogate(kl_beta=0.04)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    losses = [
        gradient(policy, trajectory, ADVANTAGES, plan, objective, upstream, reference=reference, scale=0.25)[1].loss
        for upstream in ("autograd", "closed_form")
    ]
    kl = 0.0
    for j in range(6):
        v, w = (
            p.velocity(trajectory.latents[j], trajectory.network_sigma(j), trajectory.rows).detach()
            for p in (policy, reference)
        )
        _, b, scale = DanceSDE(0.7).coefficients(trajectory.sigma(j), trajectory.next_sigma(j))
        kl += ((b * (v - w)) ** 2 / (2 * scale**2)).flatten(1).mean(1).sum().item()
    expected = 0.25 * (-6 * ADVANTAGES.sum().item() + 0.04 * kl)
    assert losses == pytest.approx([expected] * 2, rel=1e-9)
    report = gradient(policy, trajectory, ADVANTAGES, plan, objective, reference=reference, scale=0.25)[1]
    assert report.policy_loss == pytest.approx(-ADVANTAGES.mean().item(), rel=1e-9)
    assert report.kl == pytest.approx(kl / 24, rel=1e-9)
    assert report.mean_loss == pytest.approx(report.policy_loss + 0.04 * report.kl, rel=1e-9)


@each_upstream
@each_backward
def test_it_adds_into_existing_gradients(upstream: str, backward: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    alone = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward)[0]
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    accumulate_gradients(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward)  # type: ignore[arg-type]
    torch.testing.assert_close(flat_gradient(policy), alone + 1, atol=1e-12, rtol=1e-12)


@each_upstream
def test_scale_multiplies_loss_and_gradient(upstream: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    one, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream)
    half, half_report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, scale=0.5)
    assert relative_error(half, one / 2) < 1e-12
    assert half_report.loss == pytest.approx(report.loss / 2, rel=1e-12)


def test_the_trajectory_and_the_plan_are_left_alone() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    trajectory = with_log_ratios(trajectory, mixed_log_ratios())
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    kept = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    kept = {name: value.clone() for name, value in kept.items() if isinstance(value, Tensor)}
    weights, advantages = plan.weights.clone(), ADVANTAGES.clone()
    with pytest.warns(RatioNoise):
        gradient(policy, trajectory, advantages, plan, OBJECTIVE, "autograd")
    assert all(torch.equal(getattr(trajectory, name), value) for name, value in kept.items())
    assert torch.equal(plan.weights, weights)
    assert torch.equal(advantages, ADVANTAGES)


# Cutting the batch


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_micro_batches_add_up(size: int, upstream: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    whole = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream)[0]
    policy.zero_grad()
    for part, advantages in zip(trajectory.split(size), ADVANTAGES.split(size), strict=True):
        accumulate_gradients(policy, part, advantages, plan, OBJECTIVE, upstream)  # type: ignore[arg-type]
    assert relative_error(flat_gradient(policy), whole) < 1e-11


OWN_STEPS = torch.tensor([[0, 1, 2, 4], [1, 3, 4, 5], [2, 3, 4, 5], [0, 2, 3, 5]])


@pytest.mark.parametrize("make", [lambda s: jagg_plan(s, 4, 1.0), lambda s: spline_plan(s, [0, 2]), exact_plan])
@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
@each_backward
def test_samples_on_their_own_steps_add_up(make: Callable[[Tensor], Plan], upstream: str, backward: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy).select(OWN_STEPS)
    plan = make(trajectory.sigmas)
    found = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward)[0]
    policy.zero_grad()
    for row, part in enumerate(trajectory.split(1)):
        own = make(trajectory.sigmas[row])
        accumulate_gradients(policy, part, ADVANTAGES[row : row + 1], own, OBJECTIVE, upstream)  # type: ignore[arg-type]
    assert relative_error(found, flat_gradient(policy)) < 1e-11


def test_gaps_change_the_weights_but_not_the_rule() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy).select([0, 1, 4, 5])
    plan = jagg_plan(trajectory.sigmas, 4, 1.0)
    expected = slow(policy, trajectory, full_weights(plan))
    assert relative_error(gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[0], expected) < 1e-11


@each_backward
@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_weights_may_differ_between_samples(upstream: str, backward: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    weights = noise_like(4, 3, 6)
    weights[:, 1, 4] = 0
    plan = Plan((0, 2, 5), weights)
    expected = slow(policy, trajectory, full_weights(plan))
    found = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward, partly_clipped="keep")[0]
    assert relative_error(found, expected) < 1e-11


# Passes, forwards, backwards


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of roots of every call of ``torch.autograd.backward``."""
    calls: list[int] = []
    original = torch.autograd.backward

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1 if isinstance(tensors, Tensor) else len(tensors))
        original(tensors, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    return calls


@pytest.mark.parametrize(("steps", "window"), [(6, 3), (8, 4), (10, 5), (5, 5)])
def test_the_paper_to_the_letter(steps: int, window: int, backward_calls: list[int]) -> None:
    """Per group: W forwards of which the two at the ends have a graph, and one backward call from both."""
    policy = MlpField()
    trajectory = make_rollout(policy, steps=steps)
    plan = jagg_plan(trajectory.sigmas, window, 1.0)
    report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", "joint")[1]
    groups = steps // window
    assert backward_calls == [2] * groups
    assert report.backward_calls == groups
    assert report.forwards == len(policy.calls) == steps
    assert report.passes == 2 * groups
    assert all(call.rows == [0, 1, 2, 3] for call in policy.calls)
    for group in range(groups):
        calls = policy.calls[group * window : (group + 1) * window]
        assert sorted(call.grad for call in calls) == [False] * (window - 2) + [True, True]
        told = [call.sigmas[0] for call in calls]
        inside = range(group * window, (group + 1) * window)
        assert sorted(told, reverse=True) == [trajectory.sigma(j).item() for j in inside]
        ends = {trajectory.sigma(inside[0]).item(), trajectory.sigma(inside[-1]).item()}
        assert {sigma for sigma, call in zip(told, calls, strict=True) if call.grad} == ends


def test_unrouted_groups_take_a_pass_per_step(backward_calls: list[int]) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy, steps=8)
    report = gradient(
        policy, trajectory, ADVANTAGES, jagg_plan(trajectory.sigmas, 4, 0.5), OBJECTIVE, "autograd", "joint"
    )[1]
    assert backward_calls == [2, 1, 1, 1, 1]
    assert report.passes == 6
    assert report.forwards == 8


@pytest.mark.parametrize(
    ("backward", "calls", "roots"), [("joint", 4, [2, 2]), ("sequential", 4, [1] * 4), ("batched", 1, [4])]
)
def test_closed_form_runs_the_network_only_at_the_knots(
    backward: str, calls: int, roots: list[int], backward_calls: list[int]
) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy, steps=10)
    plan = jagg_plan(trajectory.sigmas, 5, 1.0)
    report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form", backward)[1]
    assert report.forwards == report.passes == plan.passes == 4
    assert len(policy.calls) == calls
    assert all(call.grad for call in policy.calls)
    assert backward_calls == roots
    told = [sigma for call in policy.calls for sigma in call.sigmas[::4]]
    assert told == [trajectory.sigma(k).item() for k in plan.knots]


def test_sequential_holds_one_graph_at_a_time() -> None:
    class Watched(MlpField):
        alive = most = 0

        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            velocity = super().velocity(latents, sigma, rows)
            if velocity.requires_grad:
                self.alive += 1
                self.most = max(self.most, self.alive)
                velocity.register_hook(self.freed)
            return velocity

        def freed(self, grad: Tensor) -> None:
            self.alive -= 1

    for upstream, backward, expected in (
        ("closed_form", "sequential", 1),
        ("autograd", "sequential", 1),
        ("autograd", "joint", 2),
    ):
        policy = Watched()
        trajectory = make_rollout(policy)
        gradient(policy, trajectory, ADVANTAGES, jagg_plan(trajectory.sigmas, 3, 1.0), OBJECTIVE, upstream, backward)
        assert policy.most == expected, (upstream, backward)
        assert policy.alive == 0


@pytest.mark.parametrize(("max_rows", "sizes"), [(4, [1] * 4), (9, [2, 2]), (12, [3, 1]), (100, [4])])
def test_max_rows_limits_a_pass(max_rows: int, sizes: list[int]) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    expected = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[0]
    policy.calls.clear()
    found, report = gradient(
        policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form", "batched", max_rows=max_rows
    )
    assert [len(call.rows) // 4 for call in policy.calls] == sizes
    assert all(call.rows == [0, 1, 2, 3] * (len(call.rows) // 4) for call in policy.calls)
    assert report.backward_calls == len(sizes)
    assert relative_error(found, expected) < 1e-12
    policy.calls.clear()
    found = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", "batched", max_rows=max_rows)[0]
    assert max(len(call.rows) for call in policy.calls) <= max_rows
    assert relative_error(found, expected) < 1e-11


def test_auto_batches_while_a_pass_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)  # 4 samples of 6 elements
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    for elements, mode, calls in ((4 * 24, "batched", 1), (3 * 24, "batched", 2), (47, "sequential", 4)):
        monkeypatch.setattr(modes, "AUTO_ELEMENTS", elements)
        policy.calls.clear()
        report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[1]
        assert report.backward == mode
        assert len(policy.calls) == calls


def test_the_clock_sees_every_phase() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    ticks = itertools.count()
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    report = gradient(
        policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", "joint", clock=lambda: float(next(ticks))
    )[1]
    assert report.seconds["forward"] == report.forwards == 6
    assert report.seconds["backward"] == report.backward_calls == 2
    assert report.seconds["upstream"] > 0
    assert gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[1].seconds == {}


@pytest.mark.parametrize("training", [False, True])
@each_backward
@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_activation_checkpointing_changes_nothing(training: bool, backward: str, upstream: str) -> None:
    plain, saving = MlpField(), MlpField(checkpointing=True)
    trajectory = make_rollout(plain)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    saving.train(training)
    expected = gradient(plain, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward)[0]
    found = gradient(saving, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward)[0]
    assert relative_error(found, expected) < 1e-12
    differentiated = sum(call.grad for call in saving.calls)
    assert saving.block_calls == len(saving.calls) + differentiated, "each differentiated pass recomputes its block"
    assert plain.block_calls == len(plain.calls)


# On and off policy


def test_closed_form_off_policy_is_refused_before_any_forward() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    policy.bias.data[0] = torch.nextafter(policy.bias.data[0], torch.tensor(9.0, dtype=torch.float64))
    with pytest.raises(OffPolicyError, match=r"the weights changed since the rollout: use upstream='autograd'"):
        gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE, "closed_form")
    assert policy.calls == []
    assert policy.inner.grad is None


@each_backward
def test_without_parameters_the_first_knot_decides(backward: str) -> None:
    policy = ConstantField(noise_like(4, *SHAPE))
    latents = noise_like(4, *SHAPE, seed=1)
    trajectory = rollout(policy, dance_schedule(7), DanceSDE(0.7), latents, seed=0)
    assert trajectory.weights_version is None
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)

    def update(upstream: str) -> Report:
        return accumulate_gradients(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward)  # type: ignore[arg-type]

    assert update("auto").upstream == "autograd", "auto takes the closed form only where the weights are known"
    automatic = policy.offset.grad
    policy.offset.grad = None
    assert update("closed_form").upstream == "closed_form"
    assert policy.offset.grad is not None
    assert automatic is not None
    assert policy.offset.grad.item() == pytest.approx(automatic.item(), rel=1e-10)
    policy.offset.grad = None
    policy.values = policy.values + 0.1
    policy.calls.clear()
    with pytest.raises(
        OffPolicyError, match=r"got \|log ratio\| 0\.\d+ \(limit 0.0001 of torch.float64\) at one of steps \[0"
    ):
        update("closed_form")
    assert policy.offset.grad is None
    assert len(policy.calls) <= 2


def test_a_rollout_of_unknown_weights_is_checked_at_the_knots() -> None:
    policy = MlpField()
    trajectory = dataclasses.replace(make_rollout(policy), weights_version=None)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    automatic, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)
    assert report.upstream == "autograd"
    assert (
        relative_error(gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form")[0], automatic) < 1e-11
    )
    nudge(policy, 0.05)
    with pytest.raises(OffPolicyError, match="other weights than the rollout's"):
        gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form")
    assert policy.inner.grad is None


def test_auto_falls_back_after_a_weight_change() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    assert gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[1].upstream == "closed_form"
    nudge(policy, 0.01)
    found, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, partly_clipped="keep")
    assert report.upstream == "autograd"
    assert relative_error(found, slow(policy, trajectory, full_weights(plan))) < 1e-11


def test_frozen_weights_do_not_hide_a_change() -> None:
    policy = MlpField()
    policy.outer.requires_grad_(False)
    trajectory = make_rollout(policy)
    policy.outer.data *= 1.01
    plan = exact_plan(trajectory.sigmas)
    assert gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)[1].upstream == "autograd"


def test_dropout_is_noticed() -> None:
    """Case 2.6: rollout in eval(), update in train()."""
    policy = MlpField(dropout=0.1).eval()
    trajectory = make_rollout(policy)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    for upstream in UPSTREAM:
        report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, "joint")[1]
        assert report.log_ratio_max == 0
        assert report.outside_clip_above == report.outside_clip_below == 0
    policy.train()
    with torch.random.fork_rng(), pytest.warns(RatioNoise, match=r"above clip_range 0.001.*dropout"):
        torch.manual_seed(0)
        report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")[1]
    assert report.log_ratio_p99 > OBJECTIVE.clip_range
    policy.zero_grad()
    with torch.random.fork_rng(), pytest.raises(OffPolicyError, match="or dropout"):
        torch.manual_seed(0)
        gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form")
    assert policy.inner.grad is None


def test_ratios_off_policy_do_not_warn() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    nudge(policy, 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE)[1]
    assert report.log_ratio_p99 > OBJECTIVE.clip_range


def test_another_batch_shape_is_harmless_in_fp32() -> None:
    """Case 2.1: rollout of four, replay one by one."""
    policy = MlpField(dtype=torch.float32)
    trajectory = make_rollout(policy, dtype=torch.float32)
    plan = exact_plan(trajectory.sigmas)
    for part, advantage in zip(trajectory.split(1), ADVANTAGES.split(1), strict=True):
        report = gradient(policy, part, advantage, plan, ClippedSurrogate(), "autograd", "joint")[1]
        assert report.log_ratio_max <= 1e-6
        assert len(policy.calls[-1].rows) == 1
    report = gradient(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(), "autograd", "joint")[1]
    assert report.log_ratio_max == 0, "equal shapes"


# Clipping


def mixed_log_ratios(size: float = 0.05) -> Tensor:
    """Log ratios ``[6, 4]``: sample 0 clipped in part of group 0, 1 in part of group 1, 2 in all of group 0, 3 outside
    the range but on the side that is not clipped. Advantages are +, -, +, -.
    """
    log_ratios = torch.zeros(6, 4, dtype=torch.float64)
    log_ratios[2, 0] = size
    log_ratios[3, 1] = -size
    log_ratios[:3, 2] = size
    log_ratios[2, 3] = size
    return log_ratios


@pytest.mark.filterwarnings("ignore::jagg_core.engine.RatioNoise")
@each_backward
@pytest.mark.parametrize("per_row", [False, True])
def test_partly_clipped_samples_are_routed_to_exact(backward: str, per_row: bool) -> None:
    policy = MlpField()
    trajectory = with_log_ratios(make_rollout(policy), mixed_log_ratios())
    plan = jagg_plan(trajectory.sigmas.expand(4, -1) if per_row else trajectory.sigmas, 3, 1.0)
    found, report = gradient(
        policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", backward, partly_clipped="exact"
    )
    weights = full_weights(plan).expand(4, 6, 6).clone()
    eye = torch.eye(6, dtype=torch.float64)
    weights[0, :3] = eye[:3]
    weights[1, 3:] = eye[3:]
    expected = slow(policy, trajectory, weights)
    assert relative_error(found, expected) < 1e-11
    assert report.partly_clipped == 2
    assert report.passes == 4 + 2, "one more for the inner step of each of the two groups"
    if backward == "joint":
        assert report.forwards == 6 + 2
    assert report.clipped_share == pytest.approx(5 / 24)
    assert report.outside_clip_above + report.outside_clip_below == pytest.approx(6 / 24)

    kept, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", backward)
    assert relative_error(kept, slow(policy, trajectory, full_weights(plan))) < 1e-11
    assert relative_error(kept, expected) > 1e-3
    assert report.partly_clipped == 0
    assert report.passes == 4
    assert report.clipped_share == pytest.approx(5 / 24)


@pytest.mark.filterwarnings("ignore::jagg_core.engine.RatioNoise")
def test_only_routed_samples_take_the_extra_pass() -> None:
    policy = MlpField()
    trajectory = with_log_ratios(make_rollout(policy), mixed_log_ratios())
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", "joint", partly_clipped="exact")
    extra = [(call.rows, call.sigmas[0]) for call in policy.calls if len(call.rows) < 4]
    assert extra == [([0], trajectory.sigma(1).item()), ([1], trajectory.sigma(4).item())]


@pytest.mark.filterwarnings("ignore::jagg_core.engine.RatioNoise")
@each_backward
@pytest.mark.parametrize(
    "make",
    [
        lambda s: spline_plan(s, [1, 3]),
        lambda s: causal_plan(s, [0, 3]),
        lambda s: Plan((0, 3), torch.tensor([[0, 0.5, 0.5, 1, 0, 0], [1, 0.5, 0.5, 0, 1, 1]]), s),
    ],
    ids=["spline", "causal", "knots without their own step"],
)
def test_routing_works_for_any_plan(make: Callable[[Tensor], Plan], backward: str) -> None:
    policy = MlpField()
    trajectory = with_log_ratios(make_rollout(policy), mixed_log_ratios())
    plan = make(trajectory.sigmas)
    found = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", backward, partly_clipped="exact")[0]
    weights = full_weights(plan).expand(4, 6, 6).clone()
    eye = torch.eye(6, dtype=torch.float64)
    for positions, steps in plan.components():
        clipped = (mixed_log_ratios() * ADVANTAGES > 0)[steps]
        mixed = clipped.any(0) & ~clipped.all(0)
        assert mixed.any()
        rows = mixed.nonzero().flatten().tolist()
        for row in rows:
            weights[row][:, steps] = eye[:, steps]
        assert len(positions) < len(steps)
    assert relative_error(found, slow(policy, trajectory, weights)) < 1e-11


@pytest.mark.filterwarnings("ignore::jagg_core.engine.RatioNoise")
@pytest.mark.parametrize("partly_clipped", ["exact", "keep"])
def test_all_clipped_has_no_gradient(partly_clipped: str) -> None:
    policy = MlpField()
    trajectory = with_log_ratios(make_rollout(policy), 0.05 * ADVANTAGES.sign().expand(6, 4))
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    found, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", partly_clipped=partly_clipped)
    assert (found == 0).all()
    assert report.clipped_share == report.outside_clip_above + report.outside_clip_below == 1
    assert report.partly_clipped == 0
    assert report.passes == 4
    assert policy.inner.grad is not None


def test_a_tiny_clip_range_meets_the_noise_floor() -> None:
    """Case 2.5."""
    policy = MlpField()
    log_ratios = torch.zeros(6, 4, dtype=torch.float64)
    log_ratios[0] = torch.tensor([0, 2e-5, -2e-5, 0])
    trajectory = with_log_ratios(make_rollout(policy), log_ratios)
    plan = jagg_plan(trajectory.sigmas, 3, 1.0)
    for upstream in ("autograd", "closed_form"):
        with pytest.warns(RatioNoise, match="clip_range 1e-05"):
            report = gradient(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(clip_range=1e-5), upstream)[1]
        assert report.log_ratio_max == pytest.approx(2e-5, rel=1e-6)
        assert report.log_ratio_mean == pytest.approx(0, abs=1e-12)
    report = gradient(policy, trajectory, ADVANTAGES, plan, ClippedSurrogate(clip_range=1e-4))[1]


def test_the_report_on_known_log_ratios() -> None:
    policy = MlpField()
    log_ratios = torch.linspace(-0.1, 0.3, 24, dtype=torch.float64).reshape(6, 4)
    trajectory = with_log_ratios(make_rollout(policy), log_ratios)
    with pytest.warns(RatioNoise):
        report = gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE, "autograd")[1]
    assert report.log_ratio_mean == pytest.approx(0.1, rel=1e-9)
    assert report.log_ratio_max == pytest.approx(0.3, rel=1e-9)
    assert report.log_ratio_p99 == pytest.approx(torch.quantile(log_ratios.abs(), 0.99).item(), rel=1e-9)
    assert report.clipped_share == pytest.approx((log_ratios * ADVANTAGES > 1e-3).double().mean().item())
    assert report.ratio_mean == pytest.approx(log_ratios.exp().mean().item(), rel=1e-9)
    assert report.approx_kl == pytest.approx(log_ratios.square().mean().item() / 2, rel=1e-9)
    pair = ClippedSurrogate(clip_range=(-0.05, 0.2))
    with pytest.warns(RatioNoise, match="above clip_range 0.05"):
        report = gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), pair, "autograd")[1]
    above, below = log_ratios.exp() - 1 > 0.2, log_ratios.exp() - 1 < -0.05
    assert (report.outside_clip_above, report.outside_clip_below) == pytest.approx(
        (above.double().mean().item(), below.double().mean().item())
    )


# What a gradient reaches


class PartlyUsed(MlpField):
    """Has a parameter that nothing uses and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.outer.requires_grad_(False)


@pytest.mark.parametrize("name", PLANS)
@each_backward
def test_the_same_parameters_get_a_gradient_as_under_exact(name: str, backward: str) -> None:
    """Case 7.6."""
    reached = []
    for plan_name in ("exact", name):
        policy = PartlyUsed()
        trajectory = make_rollout(policy)
        gradient(policy, trajectory, ADVANTAGES, PLANS[plan_name](trajectory.sigmas), OBJECTIVE, "auto", backward)
        reached.append({n for n, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0})
        assert policy.unused.grad is None
        assert policy.outer.grad is None
    assert reached[0] == reached[1] == {"inner", "bias"}


@each_upstream
@each_backward
def test_a_frozen_policy_is_named(upstream: str, backward: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    policy.requires_grad_(False)
    with pytest.raises(ValueError, match="the velocity has no graph; do its parameters require gradients"):
        gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE, upstream, backward)


def test_no_grad_around_the_update_is_named() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    with torch.no_grad(), pytest.raises(ValueError, match="the velocity has no graph"):
        gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE)


# Refusals


class Broken(MlpField):
    """Spoils one element of one sample's velocity wherever it is told ``sigma``."""

    sigma: float | None = None
    value = math.nan

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        velocity = super().velocity(latents, sigma, rows)
        here = (sigma == self.sigma) & (rows == 1) if self.sigma is not None else torch.zeros_like(sigma) > 1
        spoiled = here[:, None, None] & (torch.arange(SHAPE[1]) == 0)
        return torch.where(spoiled, self.value, velocity)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("upstream", "step"),
    [("autograd", 0), ("autograd", 1), ("autograd", 2), ("closed_form", 0), ("closed_form", 2)],
)
@pytest.mark.parametrize("backward", ["joint", "batched", "sequential"])
def test_a_velocity_that_is_not_finite_never_reaches_the_gradient(
    value: float, upstream: str, step: int, backward: str
) -> None:
    policy = Broken()
    trajectory = make_rollout(policy)
    policy.sigma, policy.value = trajectory.sigma(step).item(), value
    with pytest.raises(FloatingPointError, match="finite at one of steps"):
        gradient(policy, trajectory, ADVANTAGES, jagg_plan(trajectory.sigmas, 3, 1.0), OBJECTIVE, upstream, backward)
    assert torch.isfinite(flat_gradient(policy)).all()
    if backward != "sequential" or step == 0:
        # one by one, the knot of a finite velocity may have its pass before the other one is met
        assert policy.inner.grad is None


@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_reference_that_is_not_finite_never_reaches_the_gradient(upstream: str, step: int) -> None:
    policy, reference = MlpField(), Broken()
    trajectory = make_rollout(policy)
    reference.sigma = trajectory.sigma(step).item()
    with pytest.raises(FloatingPointError, match="or the reference's"):
        gradient(
            policy,
            trajectory,
            ADVANTAGES,
            jagg_plan(trajectory.sigmas, 3, 1.0),
            ClippedSurrogate(kl_beta=0.04),
            upstream,
            reference=reference,
        )
    assert policy.inner.grad is None


@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_a_predicted_knot_that_is_not_finite_never_reaches_the_gradient(upstream: str) -> None:
    policy = Broken()
    trajectory = make_rollout(policy)
    plan = causal_plan(trajectory.sigmas, [0, 3], predict=True)
    assert plan.knot_sigmas is not None
    policy.sigma = plan.knot_sigmas[0].item()
    with pytest.raises(FloatingPointError, match="not finite at one of the shifted knots"):
        gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, "joint")
    assert policy.inner.grad is None


class Signed(MlpField):
    """A policy with a guidance scale to its name."""

    guidance = "3.5"

    def signature(self) -> dict[str, str]:
        return {"guidance": self.guidance}


def test_another_guidance_is_refused_before_any_forward() -> None:
    policy = Signed()
    trajectory = make_rollout(policy)
    policy.guidance = "4.0"
    with pytest.raises(ReplayMismatch, match=r"guidance: the rollout used '3.5', the policy now has '4.0'"):
        gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE)
    assert policy.calls == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (exact_plan(dance_schedule(8)[:7]), "plan: made for 7 trained steps, the trajectory has 6"),
        (exact_plan(dance_schedule(8)[:6]), "sigmas: first differing step is 1"),
        (jagg_plan(dance_schedule(7, shift=5.0)[:6], 3), "sigmas: first differing step is 1"),
        (exact_plan(dance_schedule(7)[:6].expand(3, -1)), "sigmas: the rollout has 4 samples, got 3"),
    ],
    ids=["longer", "finer", "shift", "samples"],
)
def test_a_plan_for_another_schedule_is_refused_before_any_forward(plan: Plan, message: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    with pytest.raises(ReplayMismatch, match=message):
        gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE)
    assert policy.calls == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.ones(3)}, r"advantages must have shape \[4\] or \[4, 6\], got \[3\]"),
        ({"advantages": torch.ones(4, 1)}, r"advantages must have shape \[4\] or \[4, 6\], got \[4, 1\]"),
        ({"advantages": torch.full((4, 6), math.inf)}, "advantages must be finite, got inf at sample 0, step 0"),
        (
            {"objective": ClippedSurrogate(kl_beta=1.0, kl_form="std"), "reference": MlpField()},
            "kl_form 'std' does not",
        ),
        ({"advantages": torch.tensor([0, 1, math.nan, 0])}, "advantages must be finite, got nan at sample 2"),
        ({"plan": Plan((0,), torch.ones(3, 1, 6))}, "plan: weights are for 3 samples, the trajectory has 4"),
        ({"objective": ClippedSurrogate(kl_beta=0.04)}, "kl_beta is 0.04: a reference policy is needed"),
        ({"upstream": "exact"}, "upstream must be one of .* got 'exact'"),
        ({"backward": "twice"}, "backward must be one of .* got 'twice'"),
        ({"partly_clipped": "drop"}, "partly_clipped must be one of .* got 'drop'"),
        ({"max_rows": 3}, "max_rows must be at least the batch of 4, got 3"),
    ],
)
def test_bad_arguments_are_refused_before_any_forward(changes: dict[str, Any], message: str) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    arguments: dict[str, Any] = {
        "advantages": ADVANTAGES,
        "plan": exact_plan(trajectory.sigmas),
        "objective": OBJECTIVE,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(policy, trajectory, **arguments)
    assert policy.calls == []
    assert policy.inner.grad is None


def test_a_velocity_of_another_shape_is_refused() -> None:
    class Flat(MlpField):
        flat = False

        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            velocity = super().velocity(latents, sigma, rows)
            return velocity.flatten(1) if self.flat else velocity

    policy = Flat()
    trajectory = make_rollout(policy)
    policy.flat = True
    with pytest.raises(ValueError, match=r"velocity must have shape \[4, 3, 2\], got \[4, 6\]"):
        gradient(policy, trajectory, ADVANTAGES, exact_plan(trajectory.sigmas), OBJECTIVE, "closed_form", "joint")


def test_a_trajectory_made_by_hand_replays_on_policy() -> None:
    """The helper that the theory tests stand on agrees with the rollout."""
    policy = MlpField()
    trajectory = make_rollout(policy)
    schedule = dance_schedule(7)[:7]
    by_hand = trajectory_at(policy, list(trajectory.latents), schedule, DanceSDE(0.7), trajectory.noise)
    torch.testing.assert_close(by_hand.next_latents, trajectory.next_latents, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(by_hand.log_probs, trajectory.log_probs, atol=1e-12, rtol=1e-12)
    assert by_hand.weights_version == trajectory.weights_version
