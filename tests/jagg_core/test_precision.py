"""Everything outside the network runs in fp32 or better, and nothing depends on the number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from jagg_core.engine import OffPolicyError
from jagg_core.objective import ClippedSurrogate, step_log_prob, upstream_closed_form
from jagg_core.plans import Plan, exact_plan, jagg_plan
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import initial_latents
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import DanceSDE, Transition
from tests.jagg_core.fields import ADVANTAGES, SHAPE, MlpField, gradient, make_rollout, relative_error
from tests.jagg_core.literal import KERNEL_IDS, KERNELS, kernel_log_prob, kernel_step

OBJECTIVE = ClippedSurrogate(clip_range=0.5)


class Received(MlpField):
    """Keeps the gradients that arrive at its velocities."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        velocity = super().velocity(latents, sigma, rows)
        self.received: list[Tensor] = getattr(self, "received", [])
        if velocity.requires_grad:
            velocity.register_hook(lambda grad: self.received.append(grad.clone()))
        return velocity


def sum_of_upstream(trajectory: Trajectory) -> Tensor:
    """``sum_j s_j`` in fp64, from the trajectory's own fp32 numbers."""
    ups = [upstream_closed_form(OBJECTIVE, trajectory, j, ADVANTAGES.float()) for j in range(trajectory.steps)]
    return torch.stack([u.gradient.double() for u in ups]).sum(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upstream_gradients_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Case 3.5: a running sum in bf16 loses what is small. Here 64 steps are put on one knot and rounded once.

    All draws are made positive, so that the sum grows.
    """
    policy = Received(dtype=dtype)
    trajectory = make_rollout(policy, steps=64, dtype=torch.float32)
    trajectory = dataclasses.replace(trajectory, noise=trajectory.noise.abs())
    plan = Plan((0,), torch.ones(1, 64))
    gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form")
    [received] = policy.received
    exact = sum_of_upstream(trajectory)
    assert received.dtype == dtype

    def rounded_once(total: Tensor) -> bool:
        return bool(((total.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * 1.01 * exact.abs()).all())

    assert rounded_once(received)
    ups = [upstream_closed_form(OBJECTIVE, trajectory, j, ADVANTAGES.float()).gradient.to(dtype) for j in range(64)]
    running = torch.zeros_like(ups[0])
    for up in ups:
        running += up
    assert not rounded_once(running)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_weights_are_not_rounded_to_the_networks_precision(dtype: torch.dtype, upstream: str) -> None:
    policy = Received(dtype=dtype)
    trajectory = make_rollout(policy, dtype=torch.float32)
    plan = jagg_plan(trajectory.sigmas, 6, 1.0)
    gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, "joint")
    ups = [upstream_closed_form(OBJECTIVE, trajectory, j, ADVANTAGES.float()).gradient.double() for j in range(6)]
    ends = [sum(w * s for w, s in zip(row, ups, strict=True)) for row in plan.weights]
    eps = torch.finfo(dtype).eps
    for end in ends:
        assert isinstance(end, Tensor)
        close = [(got.double() - end).abs().max() <= eps / 2 * 1.01 * end.abs().max() for got in policy.received]
        assert any(close)
    assert len(policy.received) == 2


def test_a_scale_keeps_fp16_gradients_representable() -> None:
    policy = Received(dtype=torch.float16)
    trajectory = make_rollout(policy, dtype=torch.float32)
    plan = exact_plan(trajectory.sigmas)
    lost = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, scale=1e-10)[0]
    kept = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, scale=1.0)[0]
    assert (lost == 0).all()
    assert (kept != 0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
def test_log_probs_in_fp32_are_those_of_fp64(kernel: Transition) -> None:
    policy = MlpField(dtype=torch.float32)
    trajectory = make_rollout(policy, transition=kernel, dtype=torch.float32)
    for step in range(trajectory.steps):
        z, after = trajectory.latents[step].double(), trajectory.next_latents[step].double()
        velocity = policy.velocity(trajectory.latents[step], trajectory.network_sigma(step), trajectory.rows).detach()
        mean, scale = kernel_step(kernel, z, velocity.double(), trajectory.sigma(step), trajectory.next_sigma(step))
        expected = kernel_log_prob(kernel, after, mean, scale)
        found = step_log_prob(trajectory, step, velocity)
        assert found.dtype == torch.float32
        assert (found.double() - expected).abs().max() < 3e-6
        assert (trajectory.log_probs[step].double() - expected).abs().max() < 3e-6


def test_a_bf16_network_is_stepped_in_fp32() -> None:
    """Only the velocity is rounded: the step from it is not."""
    policy = MlpField(dtype=torch.bfloat16)
    latents = initial_latents(SHAPE, 3, range(4))
    trajectory = rollout(policy, dance_schedule(7), DanceSDE(0.7), latents, seed=3)
    for step in range(6):
        velocity = policy.velocity(trajectory.latents[step], trajectory.network_sigma(step), trajectory.rows).detach()
        assert velocity.dtype == torch.bfloat16
        mean, scale = kernel_step(
            DanceSDE(0.7),
            trajectory.latents[step].double(),
            velocity.double(),
            trajectory.sigma(step),
            trajectory.next_sigma(step),
        )
        expected = mean + scale * trajectory.noise[step].double()
        assert (trajectory.next_latents[step].double() - expected).abs().max() < 3e-6


def test_a_bf16_network_is_on_policy_with_itself() -> None:
    policy = MlpField(dtype=torch.bfloat16)
    trajectory = make_rollout(policy, dtype=torch.float32)
    plan = exact_plan(trajectory.sigmas)
    closed, report = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "closed_form", "joint")
    assert report.log_ratio_max == 0, "equal shapes"
    assert policy.inner.grad is not None
    assert policy.inner.grad.dtype == torch.bfloat16
    autograd = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd", "joint")[0]
    assert relative_error(closed, autograd) < 1e-2


@pytest.mark.parametrize(("dtype", "accepted"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_the_weights_decide_how_exact_a_ratio_must_be(dtype: torch.dtype, accepted: bool) -> None:
    """Guided models combine velocities of a half-precision network in fp32, yet another batch shape moves them."""

    class Guided(MlpField):
        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            velocity = super().velocity(latents, sigma, rows).float()
            return velocity if len(rows) == 4 else velocity * 1.005

    policy = Guided(dtype=dtype)
    trajectory = make_rollout(policy, dtype=torch.float32)
    arguments = (policy, trajectory.cut(range(2)), ADVANTAGES[:2], exact_plan(trajectory.sigmas), OBJECTIVE)
    if accepted:
        assert 1e-4 < gradient(*arguments, "closed_form", "sequential")[1].log_ratio_max < 2e-2
    else:
        with pytest.raises(OffPolicyError, match=r"limit 0\.0001"):
            gradient(*arguments, "closed_form", "sequential")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    """Case 6.7: another reduction order, the same gradient. Large enough for torch to use several threads."""
    results = []
    for count in (1, 4):
        torch.set_num_threads(count)
        policy = MlpField(hidden=512, samples=64)
        latents = initial_latents(SHAPE, 3, range(64)).double()
        trajectory = rollout(policy, dance_schedule(7), DanceSDE(0.7), latents, seed=3)
        advantages = ADVANTAGES.repeat(16)
        plan = jagg_plan(trajectory.sigmas, 3, 1.0)
        results.append(gradient(policy, trajectory, advantages, plan, OBJECTIVE, "autograd")[0])
        assert torch.get_num_threads() == count
    assert relative_error(results[1], results[0]) < 1e-10
