"""A trajectory from a trainer's stored tensors, and its network as a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.engine import OffPolicyError, RatioNoise, accumulate_gradients
from jagg_core.integrations import HostPolicy, host_trajectory, plan_update, window_plan
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import causal_plan, exact_plan
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.trajectory import ReplayMismatch, Trajectory, weights_version
from jagg_core.transitions import CPS, DanceSDE, Transition
from tests.jagg_core.fields import (
    ADVANTAGES,
    MlpField,
    flat_gradient,
    gradient,
    make_rollout,
    noise_like,
    nudge,
    relative_error,
)
from tests.jagg_core.literal import KERNEL_IDS, KERNELS, kernel_step

OBJECTIVE = ClippedSurrogate(clip_range=1e-3)
SCHEDULE = dance_schedule(7)
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)


def stored(trajectory: Trajectory, **more: Any) -> dict[str, Any]:
    """What a trainer would have: batch first."""
    kept = {name: getattr(trajectory, name).transpose(0, 1) for name in ("latents", "next_latents", "log_probs")}
    return kept | {"schedule": SCHEDULE, "transition": trajectory.transition} | more


def velocities(policy: MlpField, trajectory: Trajectory) -> Tensor:
    with torch.no_grad():
        found = [
            policy.velocity(trajectory.latents[j], trajectory.network_sigma(j), trajectory.rows)
            for j in range(trajectory.steps)
        ]
    return torch.stack(found, 1)


def require_alike(found: Trajectory, expected: Trajectory) -> None:
    """Every setting of a replay is the same."""
    found.require(sigmas=expected.sigmas, transition=expected.transition, timestep_mode=expected.timestep_mode)
    assert found.latents.dtype == expected.latents.dtype and found.latents.shape == expected.latents.shape
    assert torch.equal(found.sigmas, expected.sigmas) and torch.equal(found.next_sigmas, expected.next_sigmas)


@each_kernel
def test_noise_follows_from_velocities(kernel: Transition) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy, transition=kernel)
    found = host_trajectory(**stored(trajectory, velocity=velocities(policy, trajectory)))
    torch.testing.assert_close(found.noise, trajectory.noise, rtol=1e-9, atol=1e-9)
    require_alike(found, trajectory)
    given = host_trajectory(**stored(trajectory, noise=trajectory.noise.transpose(0, 1)))
    assert torch.equal(given.noise, trajectory.noise)
    means = torch.stack([trajectory.mean(j) for j in range(trajectory.steps)], 1)
    by_mean = host_trajectory(**stored(trajectory, mean=means))
    torch.testing.assert_close(by_mean.noise, trajectory.noise, rtol=1e-9, atol=1e-9)


def test_a_last_step_with_noise_is_trained() -> None:
    """flow_grpo's and UniRL's windows may end at the last step; their kernels but CPS have noise there."""
    policy, kernel, schedule = MlpField(), DanceSDE(0.3), SCHEDULE
    trajectory = make_rollout(policy, transition=kernel)
    z, told = trajectory.next_latents[-1], schedule[-2].expand(4)
    mean, scale = kernel_step(kernel, z, policy.velocity(z, told, torch.arange(4)), schedule[-2], schedule[-1])
    after = (mean + scale * noise_like(*z.shape)).detach()
    old = kernel.log_prob(after, mean, scale)
    found = host_trajectory(
        z[:, None], after[:, None], old.detach()[:, None], schedule, kernel, steps=torch.tensor([6]), mean=mean[:, None]
    )
    policy.zero_grad()
    OBJECTIVE.surrogate(old - old.detach(), ADVANTAGES).sum().backward()
    expected = flat_gradient(policy)
    policy.zero_grad()
    plan_update(policy, found, ADVANTAGES, exact_plan(found.sigmas), OBJECTIVE, scale=1.0)
    assert relative_error(flat_gradient(policy), expected) < 1e-12
    with pytest.raises(ValueError, match=r"steps must lie in 0..5, the steps that have noise, got 6 to 6"):
        host_trajectory(z[:, None], after[:, None], old.detach()[:, None], schedule, CPS(0.7), steps=torch.tensor([6]))


def test_rows_in_any_order_are_sorted_from_high_noise_to_low() -> None:
    """DanceGRPO: a random permutation for every sample, the first few of it."""
    policy = MlpField()
    trajectory = make_rollout(policy)
    perms = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(4)])
    rows = torch.arange(4)[:, None]
    host = stored(trajectory, noise=trajectory.noise.transpose(0, 1))
    for name in ("latents", "next_latents", "log_probs", "noise"):
        host[name] = host[name][rows, perms]
    found = host_trajectory(**host, steps=perms)
    expected = trajectory.select(perms.sort(dim=1).values)
    require_alike(found, expected)
    for name in ("latents", "next_latents", "log_probs", "noise"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    plan = window_plan(found.sigmas, 2)
    settings: tuple[Any, ...] = (ADVANTAGES, plan, OBJECTIVE, "autograd")
    assert torch.equal(gradient(policy, found, *settings)[0], gradient(policy, expected, *settings)[0])


@pytest.mark.parametrize("cut", [(slice(0), slice(None)), (slice(None), slice(0))], ids=["samples", "steps"])
def test_nothing_stored_is_refused(cut: tuple[slice, slice]) -> None:
    host = stored(make_rollout(MlpField()))
    host |= {name: host[name][cut] for name in ("latents", "next_latents", "log_probs")}
    with pytest.raises(ValueError, match="log_probs must hold at least one sample and one step, got"):
        host_trajectory(**host)


def test_rows_and_schedules_of_another_shape_are_refused() -> None:
    host = stored(make_rollout(MlpField()))
    with pytest.raises(ValueError, match=r"rows must have shape \[4\], got \[3\]"):
        host_trajectory(**host, rows=torch.arange(3))
    with pytest.raises(ValueError, match=r"schedule must have shape \[N \+ 1\], got \[4, 8\]"):
        host_trajectory(**host | {"schedule": SCHEDULE.expand(4, -1)})


def test_one_order_for_all_samples() -> None:
    trajectory = make_rollout(MlpField())
    order = torch.tensor([4, 1, 2])
    host = stored(trajectory)
    for name in ("latents", "next_latents", "log_probs"):
        host[name] = host[name][:, order]
    found = host_trajectory(**host, steps=order)
    assert found.sigmas.shape == (3,)
    assert torch.equal(found.latents, trajectory.select([1, 2, 4]).latents)


@pytest.mark.parametrize("kept", [True, False], ids=["with velocities", "without"])
def test_log_probabilities_without_their_normalising_term(kept: bool) -> None:
    """Case 7.9: DanceGRPO's constant term is never added."""
    policy = MlpField()
    trajectory = make_rollout(policy, transition=DanceSDE(0.3))
    quadratic = []
    for j in range(6):
        z, after = trajectory.latents[j], trajectory.next_latents[j]
        v = velocities(policy, trajectory)[:, j]
        mean, scale = kernel_step(trajectory.transition, z, v, SCHEDULE[j], SCHEDULE[j + 1])
        quadratic.append((-((after - mean) ** 2) / (2 * scale**2)).flatten(1).mean(1))
    host = stored(trajectory) | {"log_probs": torch.stack(quadratic, 1)}
    if kept:
        host["velocity"] = velocities(policy, trajectory)
        with pytest.raises(ReplayMismatch, match="without their normalising term"):
            host_trajectory(**host)
    found = host_trajectory(**host, normalised=False)
    torch.testing.assert_close(found.log_probs, trajectory.log_probs)


@pytest.mark.parametrize(
    "changes",
    [
        {"transition": DanceSDE(0.6)},
        {"transition": CPS(0.7)},
        {"schedule": dance_schedule(7, shift=2.0)},
        {"steps": torch.arange(6) + 1, "schedule": dance_schedule(8)},
    ],
    ids=["eta", "kernel", "shift", "steps"],
)
def test_another_rollout_is_refused(changes: dict[str, Any]) -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    with pytest.raises(ReplayMismatch, match="log_probs: stored"):
        host_trajectory(**stored(trajectory, velocity=velocities(policy, trajectory)) | changes)


def test_bf16_latents_pass_the_check() -> None:
    policy = MlpField(elements=600)
    trajectory = rollout(policy, SCHEDULE, DanceSDE(0.3), noise_like(4, 20, 30), seed=0)
    host = stored(trajectory, velocity=velocities(policy, trajectory).bfloat16())
    host["latents"], host["next_latents"] = host["latents"].bfloat16(), host["next_latents"].bfloat16()
    with pytest.warns(RatioNoise, match=r"up to .*: latents are bfloat16 and next_latents are bfloat16"):
        found = host_trajectory(**host)
    assert found.latents.dtype == found.noise.dtype == found.log_probs.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": torch.zeros(4, 5)}, r"log_probs \[B, S\], got"),
        ({"next_latents": torch.zeros(4, 6, 3)}, "latents and next_latents must have shape"),
        ({"velocity": torch.zeros(4, 6, 3, 1)}, r"velocity must have the shape \[4, 6, 3, 2\]"),
        ({"noise": torch.zeros(4, 6, 3, 2), "velocity": torch.zeros(4, 6, 3, 2)}, "velocity and noise say the same"),
        ({"steps": torch.arange(5)}, r"steps must have shape \[6\] or \[4, 6\], got \[5\]"),
        ({"steps": torch.arange(2, 8)}, r"steps must lie in 0..6, the steps that have noise, got 2 to 7"),
        ({"steps": torch.tensor([0, 1, 2, 3, 4, 4])}, "steps must differ from one another"),
        ({"schedule": dance_schedule(7).flip(0)}, "schedule must decrease strictly"),
        ({"timestep_mode": "floor"}, "timestep_mode must be one of"),
        ({"transition": CPS(0.7), "normalised": False}, "normalised must be True for CPS"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        host_trajectory(**stored(make_rollout(MlpField())) | changes)


# Without the rollout's noise


def test_without_noise_the_gradient_is_exact_by_autograd() -> None:
    policy = MlpField()
    trajectory = make_rollout(policy)
    plan = causal_plan(trajectory.sigmas, [0, 2, 4])
    expected, _ = gradient(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")
    policy.zero_grad()
    report = plan_update(policy, host_trajectory(**stored(trajectory)), ADVANTAGES, plan, OBJECTIVE, scale=1.0)
    assert (report.upstream, report.passes, report.forwards) == ("autograd", 3, 6)
    assert relative_error(flat_gradient(policy), expected) < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"upstream": "closed_form"}, "upstream='closed_form' needs the rollout's noise"),
        ({"upstream": "interpolated"}, "upstream='interpolated' needs the rollout's noise"),
        ({"plan": causal_plan(SCHEDULE[:6], [0, 3], predict=True)}, "'causal-predicted' has shifted knots"),
    ],
)
def test_what_needs_the_noise_is_refused_without_it(settings: dict[str, Any], message: str) -> None:
    policy = MlpField()
    host = host_trajectory(**stored(make_rollout(policy)))
    policy.calls.clear()
    arguments = {"plan": exact_plan(host.sigmas)} | settings
    with pytest.raises(ValueError, match=message):
        plan_update(policy, host, ADVANTAGES, objective=OBJECTIVE, scale=1.0, **arguments)
    assert policy.calls == []
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(policy, host, ADVANTAGES, arguments["plan"], OBJECTIVE, arguments.get("upstream", "auto"))
    assert policy.calls == []


class InOtherUnits(MlpField):
    """Told sigma, takes it for sigma * 1000 once ``wrong`` is set."""

    wrong = False

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return super().velocity(latents, sigma / 1000 if self.wrong else sigma, rows)


@pytest.mark.parametrize("kept", [True, False], ids=["with velocities", "without"])
@pytest.mark.parametrize("backward", ["sequential", "batched", "joint"])
def test_a_timestep_in_other_units_is_caught(kept: bool, backward: Any) -> None:
    """Without velocities by the weights, which are the rollout's while the ratios are not 1."""
    policy = InOtherUnits()
    trajectory = make_rollout(policy)
    more = {"velocity": velocities(policy, trajectory)} if kept else {}
    host = host_trajectory(**stored(trajectory, weights_version=weights_version(policy), **more))
    plan = causal_plan(host.sigmas, [0, 2, 4])
    report = plan_update(policy, host, ADVANTAGES, plan, OBJECTIVE, scale=1.0, backward=backward)
    assert report.upstream == ("closed_form" if kept else "autograd")
    policy.zero_grad()
    policy.wrong = True
    with pytest.raises(OffPolicyError, match=r"weights are the rollout's.* \(sigma, or sigma \* 1000\)"):
        plan_update(policy, host, ADVANTAGES, plan, OBJECTIVE, scale=1.0, backward=backward)
    assert policy.inner.grad is None
    nudge(policy, 0.01)
    assert plan_update(policy, host, ADVANTAGES, plan, OBJECTIVE, scale=1.0).upstream == "autograd"


@pytest.mark.parametrize("kept", [True, False], ids=["with velocities", "without"])
def test_one_tensor_in_half_precision_is_named(kept: bool) -> None:
    """flow_grpo's Flux pipeline rounds the states after it has taken their log-probability."""
    policy = MlpField(elements=600)
    trajectory = rollout(policy, SCHEDULE, DanceSDE(0.3), noise_like(4, 20, 30), seed=0)
    host = stored(trajectory, **({"velocity": velocities(policy, trajectory)} if kept else {}))
    host["next_latents"] = host["next_latents"].bfloat16()
    measured = r"up to 0\.00\d" if kept else "not measurable"
    with pytest.raises(ReplayMismatch, match=f"^next_latents are bfloat16, the other states are not: .*{measured}"):
        host_trajectory(**host)


def test_states_rounded_before_their_log_probability_are_welcome() -> None:
    """Flow-Factory: through the storage dtype and back, then the log-probability."""
    policy = MlpField(elements=600)
    trajectory = rollout(policy, SCHEDULE, DanceSDE(0.3), noise_like(4, 20, 30).float(), seed=0)
    host = stored(trajectory, velocity=velocities(policy, trajectory))
    host["next_latents"] = host["next_latents"].bfloat16()
    kernel = trajectory.transition
    means = [
        kernel_step(kernel, trajectory.latents[j], host["velocity"][:, j], SCHEDULE[j], SCHEDULE[j + 1])
        for j in range(6)
    ]
    after = host["next_latents"].float()
    log_probs = [kernel.log_prob(after[:, j], mean, scale.flatten()) for j, (mean, scale) in enumerate(means)]
    host_trajectory(**host | {"log_probs": torch.stack(log_probs, 1)})


def test_the_compute_dtype_decides_how_far_ratios_may_be_from_one() -> None:
    """Accelerate returns fp32 from a network in bf16, and the weights of a LoRA are fp32."""
    field = MlpField(elements=600, dtype=torch.float32)
    trajectory = rollout(field, SCHEDULE, DanceSDE(0.3), noise_like(4, 20, 30).float(), seed=0)
    host = host_trajectory(
        **stored(trajectory, velocity=velocities(field, trajectory), weights_version=weights_version(field))
    )

    def rounded(latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return field.velocity(latents, sigma, rows) * 1.03

    plan = exact_plan(host.sigmas)
    with pytest.raises(OffPolicyError, match=r"limit 0.0001 of torch.float32.* the policy's compute_dtype must name"):
        plan_update(HostPolicy(rounded, field.parameters()), host, ADVANTAGES, plan, OBJECTIVE, scale=1.0)
    policy = HostPolicy(rounded, field.parameters(), compute_dtype=torch.bfloat16)
    report = plan_update(policy, host, ADVANTAGES, plan, ClippedSurrogate(clip_range=0.1), scale=1.0)
    assert 1e-4 < report.log_ratio_max < 2e-2


def test_advantages_by_step_are_in_the_order_of_the_stored_steps() -> None:
    """Every sample in an order of its own, as DanceGRPO has it."""
    policy = MlpField()
    trajectory = make_rollout(policy)
    perms = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:4] for i in range(4)])
    rows = torch.arange(4)[:, None]
    host = stored(trajectory, noise=trajectory.noise.transpose(0, 1))
    for name in ("latents", "next_latents", "log_probs", "noise"):
        host[name] = host[name][rows, perms]
    by_step = noise_like(4, 6, seed=2)
    expected_trajectory = trajectory.select(perms.sort(dim=1).values)
    plan = window_plan(expected_trajectory.sigmas, 2)
    in_order = by_step.gather(1, perms.sort(dim=1).values)
    expected, _ = gradient(policy, expected_trajectory, in_order, plan, OBJECTIVE, "autograd")
    found = host_trajectory(**host, steps=perms)
    policy.zero_grad()
    plan_update(policy, found, by_step[rows, perms], plan, OBJECTIVE, scale=1.0)
    assert relative_error(flat_gradient(policy), expected) < 1e-12
    policy.zero_grad()
    for part, advantages in zip(found.split(1), by_step[rows, perms].split(1), strict=True):
        plan_update(policy, part, advantages, window_plan(part.sigmas, 2), OBJECTIVE, scale=1.0)
    assert relative_error(flat_gradient(policy), expected) < 1e-11


# The policy


def test_guidance_is_of_a_pair() -> None:
    policy = HostPolicy(lambda latents, sigma, rows: (latents, latents / 2), guidance=3.0)
    latents = torch.ones(2, 3)
    assert torch.equal(policy.velocity(latents, torch.ones(2), torch.arange(2)), torch.full((2, 3), 2.0))
    assert policy.signature() == {"guidance": "3.0"}
    assert HostPolicy(policy.velocity, guidance=3).signature() == policy.signature()


@pytest.mark.parametrize(("guidance", "given"), [(3.0, "one velocity"), (None, "a pair")])
def test_a_pair_without_guidance_and_the_reverse_are_named(guidance: float | None, given: str) -> None:
    pair = guidance is None
    policy = HostPolicy(lambda latents, sigma, rows: (latents, latents) if pair else latents, guidance=guidance)
    with pytest.raises(ValueError, match=f"guidance is {guidance}, but the policy's function gives {given}"):
        policy.velocity(torch.ones(2, 3), torch.ones(2), torch.arange(2))


def test_whether_the_weights_moved_follows_from_the_parameters() -> None:
    field = MlpField()
    policy = HostPolicy(field.velocity, field.parameters(), settings={"dtype": "fp64"})
    assert policy.signature() == {"dtype": "fp64", "guidance": "None"}
    trajectory = make_rollout(field)
    host = host_trajectory(
        **stored(trajectory, velocity=velocities(field, trajectory)), weights_version=weights_version(policy)
    )
    plan = exact_plan(host.sigmas)
    assert plan_update(policy, host, ADVANTAGES, plan, OBJECTIVE, scale=1.0).upstream == "closed_form"
    nudge(field, 0.01)
    assert plan_update(policy, host, ADVANTAGES, plan, OBJECTIVE, scale=1.0).upstream == "autograd"
    with pytest.raises(OffPolicyError, match="the weights changed since the rollout"):
        plan_update(policy, host, ADVANTAGES, plan, OBJECTIVE, scale=1.0, upstream="closed_form")
    assert weights_version(HostPolicy(field.velocity)) is None


def test_partitioned_parameters_are_refused() -> None:
    parameter = torch.zeros(0)
    parameter.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="parameters must be None under DeepSpeed ZeRO-3"):
        HostPolicy(lambda latents, sigma, rows: latents, [parameter])


@each_kernel
def test_a_policy_from_the_mean_of_a_step_is_the_velocitys(kernel: Transition) -> None:
    field = MlpField()
    trajectory = make_rollout(field, transition=kernel)
    seen: set[int] = set()

    def mean(latents: Tensor, steps: Tensor, rows: Tensor) -> Tensor:
        seen.update(steps.tolist())
        sigma, after = SCHEDULE[steps].to(latents), SCHEDULE[steps + 1].to(latents)
        return kernel_step(kernel, latents, field.velocity(latents, sigma, rows), sigma, after)[0]

    policy = HostPolicy.from_mean(mean, SCHEDULE, kernel, field.parameters())
    plan = causal_plan(trajectory.sigmas, [0, 3])
    expected, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")
    field.zero_grad()
    accumulate_gradients(policy, trajectory, ADVANTAGES, plan, OBJECTIVE, "autograd")
    assert relative_error(flat_gradient(field), expected) < 1e-10
    assert seen == set(range(6))
    with pytest.raises(ValueError, match="sigma must be one of the schedule's under from_mean"):
        policy.velocity(trajectory.latents[0], SCHEDULE[:1].expand(4) - 0.01, torch.arange(4))
