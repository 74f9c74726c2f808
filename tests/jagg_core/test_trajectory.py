"""Rollouts: reproducible, cut in any way, and a record that a replay can be checked against."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from jagg_core.objective import step_log_prob
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule, time_shift
from jagg_core.seeding import initial_latents
from jagg_core.trajectory import ReplayMismatch, Trajectory, policy_signature, weights_version
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition
from tests.jagg_core.fields import SHAPE, ConstantField, MlpField, make_rollout, noise_like
from tests.jagg_core.literal import KERNEL_IDS, KERNELS, kernel_log_prob, kernel_step

SIGMAS = dance_schedule(7)
TENSORS = ("latents", "next_latents", "noise", "log_probs", "sigmas", "next_sigmas", "final", "rows")


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether two trajectories hold the same tensors."""
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)


def start(batch: int = 4, seed: int = 3) -> Tensor:
    """Initial latents of ``batch`` samples, fp64."""
    return initial_latents(SHAPE, seed, range(batch)).double()


# The rollout


def test_shapes_and_contents() -> None:
    trajectory = rollout(MlpField(), SIGMAS, DanceSDE(0.7), start(), seed=3)
    assert (trajectory.steps, trajectory.batch, trajectory.elements) == (6, 4, 6)
    assert trajectory.latents.shape == trajectory.next_latents.shape == trajectory.noise.shape == (6, 4, *SHAPE)
    assert trajectory.log_probs.shape == (6, 4)
    assert torch.equal(trajectory.latents[0], start())
    assert torch.equal(trajectory.latents[1:], trajectory.next_latents[:-1])
    assert torch.equal(trajectory.sigmas, SIGMAS[:6])
    assert torch.equal(trajectory.next_sigmas, SIGMAS[1:7])
    assert trajectory.rows.tolist() == [0, 1, 2, 3]
    assert not any(getattr(trajectory, name).requires_grad for name in TENSORS)


@pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
def test_every_step_is_the_published_one(kernel: Transition) -> None:
    policy = MlpField()
    trajectory = rollout(policy, SIGMAS, kernel, start(), seed=3)
    for step in range(6):
        sigma, after = SIGMAS[step], SIGMAS[step + 1]
        velocity = policy.velocity(trajectory.latents[step], sigma.expand(4), torch.arange(4)).detach()
        mean, scale = kernel_step(kernel, trajectory.latents[step], velocity, sigma, after)
        expected = mean + scale * trajectory.noise[step]
        torch.testing.assert_close(trajectory.next_latents[step], expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(trajectory.mean(step), mean, atol=1e-12, rtol=1e-12)
        log_probs = kernel_log_prob(kernel, trajectory.next_latents[step], mean, scale)
        torch.testing.assert_close(trajectory.log_probs[step], log_probs, atol=1e-12, rtol=1e-12)
        replayed = step_log_prob(trajectory, step, velocity)
        assert torch.equal(replayed, trajectory.log_probs[step]), (
            "equal shapes in equal precision: a ratio of exactly 1"
        )


def test_the_last_step_is_deterministic() -> None:
    policy = MlpField()
    a = rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3)
    last = a.next_latents[-1]
    velocity = policy.velocity(last, SIGMAS[6].expand(4), torch.arange(4)).detach()
    torch.testing.assert_close(a.final, last - SIGMAS[6] * velocity, atol=1e-14, rtol=1e-13)


def test_the_same_seed_gives_the_same_rollout() -> None:
    policy = MlpField()
    a = rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3)
    torch.randn(7)  # the global state does not matter
    assert same(a, rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3))
    assert not torch.equal(a.noise, rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=4).noise)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [1, 3], [2, 2]])
def test_a_batch_may_be_cut_in_any_way(sizes: list[int]) -> None:
    class Unconditional(MlpField):
        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            return super().velocity(latents, sigma, torch.zeros_like(rows))

    policy = Unconditional()
    whole = rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3)
    done = 0
    for size in sizes:
        ids = range(done, done + size)
        latents = initial_latents(SHAPE, 3, ids).double()
        part = rollout(policy, SIGMAS, DanceSDE(0.7), latents, seed=3, sample_ids=ids)
        cut = slice(done, done + size)
        assert torch.equal(part.noise, whole.noise[:, cut])
        torch.testing.assert_close(part.final, whole.final[cut], atol=1e-12, rtol=1e-12)
        assert part.rows.tolist() == list(range(size)), "rows count the policy's samples, whatever their names"
        done += size


def test_shared_start_but_own_noise() -> None:
    latents = initial_latents(SHAPE, 3, [0, 0, 0]).double()
    trajectory = rollout(MlpField(), SIGMAS, DanceSDE(0.7), latents, seed=3)
    assert torch.equal(trajectory.latents[0, 0], trajectory.latents[0, 2])
    assert not torch.equal(trajectory.noise[:, 0], trajectory.noise[:, 2])


def test_one_seed_for_both_streams_keeps_them_apart() -> None:
    latents = initial_latents((64,), 3, range(8))
    policy = ConstantField(torch.zeros(8, 64))
    noise = rollout(policy, SIGMAS, DanceSDE(0.7), latents, seed=3).noise
    assert noise.dtype == latents.dtype
    flat = torch.cat([latents.flatten()[None], noise.flatten(1)]).double()
    correlation = torch.corrcoef(flat)
    assert (correlation - torch.eye(7)).abs().max() < 6 / flat.shape[1] ** 0.5


def test_global_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    rollout(MlpField(), SIGMAS, DanceSDE(0.7), start(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_given_latents_are_left_alone() -> None:
    latents = start()
    kept = latents.clone()
    trajectory = rollout(MlpField(), SIGMAS, DanceSDE(0.7), latents, seed=3)
    trajectory.latents.zero_()
    assert torch.equal(latents, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_latents_are_raised(dtype: torch.dtype) -> None:
    latents = start().to(dtype)
    trajectory = rollout(MlpField(dtype=dtype), SIGMAS, DanceSDE(0.7), latents, seed=3)
    for name in ("latents", "next_latents", "noise", "log_probs", "final"):
        assert getattr(trajectory, name).dtype == torch.float32, name
    assert torch.equal(trajectory.latents[0], latents.float())
    assert not torch.equal(trajectory.next_latents, trajectory.next_latents.to(dtype).float())


def test_a_window_keeps_its_steps_and_the_others_add_no_noise() -> None:
    policy = MlpField()
    found = rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3, window=range(2, 4))
    whole = rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3)
    assert (found.steps, found.sigmas.tolist(), found.next_sigmas.tolist()) == (
        2,
        SIGMAS[2:4].tolist(),
        SIGMAS[3:5].tolist(),
    )
    assert torch.equal(found.noise, whole.noise[2:4])
    state = start()
    for step in range(7):
        if step == 2:
            assert torch.equal(found.latents[0], state)
            state = found.next_latents[1]
        if step in (2, 3):
            continue
        told = SIGMAS[step].expand(4)
        state = state + (SIGMAS[step + 1] - SIGMAS[step]) * policy.velocity(state, told, torch.arange(4)).detach()
    torch.testing.assert_close(found.final, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [range(0), range(5, 7), range(-1, 2), range(0, 4, 2)], ids=str)
def test_a_window_lies_within_the_steps_that_can_be_trained(window: range) -> None:
    with pytest.raises(ValueError, match=r"window must be a range of steps within 0\.\.5"):
        rollout(MlpField(), SIGMAS, DanceSDE(0.7), start(), seed=3, window=window)


def test_one_call_per_step_without_a_graph() -> None:
    policy = MlpField()
    rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3)
    assert [(call.rows, call.grad) for call in policy.calls] == [([0, 1, 2, 3], False)] * 7


class Broken(MlpField):
    """Returns ``value`` in one element of one sample, at one call."""

    def __init__(self, value: float, at: int) -> None:
        super().__init__()
        self.value, self.at = value, at

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        velocity = super().velocity(latents, sigma, rows).clone()
        if len(self.calls) - 1 == self.at:
            velocity[1, 0, 0] = self.value
        return velocity


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_velocity_that_is_not_finite_is_refused(value: float, step: int) -> None:
    policy = Broken(value, step)
    with pytest.raises(FloatingPointError, match=rf"not finite at step {step} \(sigma {SIGMAS[step]:g}\)"):
        rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3)
    assert len(policy.calls) == step + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigmas": torch.tensor([1.0, 0.0])}, "sigmas must have shape .* N >= 2 steps"),
        ({"sigmas": SIGMAS.expand(4, -1)}, "sigmas must have shape"),
        ({"sigmas": SIGMAS.flip(0)}, "sigmas must decrease strictly"),
        ({"latents": torch.zeros(0, 3)}, "latents must be floating point"),
        ({"latents": torch.zeros(3)}, "latents must be floating point"),
        ({"latents": torch.zeros(4, 3, 2, dtype=torch.long)}, "latents must be floating point .* got torch.int64"),
        ({"sample_ids": [0, 1]}, "sample_ids must name 4 samples, got 2"),
        ({"timestep_mode": "floor"}, "timestep_mode must be one of"),
    ],
)
def test_bad_arguments_are_refused_before_any_forward(settings: dict[str, object], message: str) -> None:
    policy = MlpField()
    arguments = {"sigmas": SIGMAS, "latents": start(), **settings}
    with pytest.raises(ValueError, match=message):
        rollout(policy, transition=DanceSDE(0.7), seed=3, **arguments)  # type: ignore[arg-type]
    assert policy.calls == []


# Selecting and splitting


def test_select_keeps_steps_with_gaps() -> None:
    whole = make_rollout(MlpField())
    some = whole.select([1, 2, 5])
    assert some.steps == 3
    for position, step in enumerate([1, 2, 5]):
        assert torch.equal(some.latents[position], whole.latents[step])
        assert torch.equal(some.next_latents[position], whole.next_latents[step])
        assert torch.equal(some.noise[position], whole.noise[step])
        assert torch.equal(some.log_probs[position], whole.log_probs[step])
        assert some.sigma(position) == whole.sigma(step)
        assert some.next_sigma(position) == whole.next_sigma(step)
        assert torch.equal(some.mean(position), whole.mean(step))
    assert torch.equal(some.final, whole.final)


def test_select_may_differ_between_samples() -> None:
    whole = make_rollout(MlpField())
    steps = torch.tensor([[0, 1, 2], [1, 3, 5], [3, 4, 5], [0, 2, 4]])
    some = whole.select(steps)
    assert some.sigmas.shape == some.next_sigmas.shape == (4, 3)
    for row in range(4):
        alone = whole.select(steps[row])
        assert torch.equal(some.latents[:, row], alone.latents[:, row])
        assert torch.equal(some.next_latents[:, row], alone.next_latents[:, row])
        assert torch.equal(some.noise[:, row], alone.noise[:, row])
        assert torch.equal(some.log_probs[:, row], alone.log_probs[:, row])
        assert torch.equal(some.sigmas[row], alone.sigmas)
        assert torch.equal(some.next_sigmas[row], alone.next_sigmas)
        for position in range(3):
            assert some.network_sigma(position)[row] == whole.network_sigma(int(steps[row, position]))[row]
            assert torch.equal(some.mean(position)[row], alone.mean(position)[row])


def test_select_of_a_selection() -> None:
    whole = make_rollout(MlpField())
    steps = torch.tensor([[0, 1, 2], [1, 3, 5], [3, 4, 5], [0, 2, 4]])
    assert same(whole.select(steps).select([0, 2]), whole.select(steps[:, [0, 2]]))
    again = torch.tensor([[0, 1], [1, 2], [0, 2], [0, 1]])
    assert same(whole.select(steps).select(again), whole.select(steps.gather(1, again)))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], r"steps must have shape \[S\] or \[4, S\] with S >= 1, got \[0\]"),
        ([[0, 1], [0, 1]], r"got \[2, 2\]"),
        ([2, 1], r"steps must increase within 0..5, got \[2, 1\]"),
        ([1, 1], "must increase"),
        ([-1, 2], "must increase within 0..5"),
        ([0, 6], "must increase within 0..5"),
        ([[0, 1], [0, 1], [3, 2], [0, 1]], "must increase"),
    ],
)
def test_select_refuses(steps: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rollout(MlpField()).select(torch.tensor(steps))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("size", "expected"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (9, [4])])
def test_split_cuts_every_tensor(per_row: bool, size: int, expected: list[int]) -> None:
    whole = make_rollout(MlpField())
    if per_row:
        whole = whole.select(torch.tensor([[0, 1, 2], [1, 3, 5], [3, 4, 5], [0, 2, 4]]))
    parts = whole.split(size)
    assert [part.batch for part in parts] == expected
    for name in ("latents", "next_latents", "noise", "log_probs"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name))
    for name in ("final", "rows"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    for name in ("sigmas", "next_sigmas"):
        tensors = [getattr(part, name) for part in parts]
        assert torch.equal(torch.cat(tensors) if per_row else tensors[-1], getattr(whole, name))
    assert parts[-1].weights_version == whole.weights_version


def test_split_refuses_size_zero() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        make_rollout(MlpField()).split(0)


# Replay


def settled(**changes: object) -> Trajectory:
    """A trajectory with a signature, changed."""
    trajectory = dataclasses.replace(make_rollout(MlpField()), signature={"guidance": "3.5"})
    return dataclasses.replace(trajectory, **changes)  # type: ignore[arg-type]


def test_a_replay_with_equal_settings_passes() -> None:
    trajectory = settled()
    trajectory.require()
    trajectory.require(
        sigmas=trajectory.sigmas.float(),
        transition=DanceSDE(0.7),
        timestep_mode="float",
        signature={"guidance": "3.5"},
    )


def test_a_schedule_of_another_length_is_refused() -> None:
    """Case 2.8: rolled out on 14 points, trained on 15."""
    trajectory = make_rollout(MlpField(), steps=14)
    with pytest.raises(ReplayMismatch, match="sigmas: the rollout has 14 trained steps, got 15"):
        trajectory.require(sigmas=dance_schedule(16)[:15])


def test_another_schedule_names_the_first_differing_step() -> None:
    trajectory = make_rollout(MlpField())
    other = trajectory.sigmas.clone()
    other[2:] -= 0.01
    with pytest.raises(
        ReplayMismatch, match=f"sigmas: first differing step is 2, rollout {SIGMAS[2]:.6g}, got {other[2]:.6g}"
    ):
        trajectory.require(sigmas=other)


def test_a_per_row_schedule_names_the_values_that_differ() -> None:
    steps = torch.tensor([[0, 1, 2], [1, 3, 5], [3, 4, 5], [0, 2, 4]])
    trajectory = make_rollout(MlpField()).select(steps)
    other = trajectory.sigmas.clone()
    other[2, 1] -= 0.02
    with pytest.raises(
        ReplayMismatch, match=f"sigmas: first differing step is 1, rollout {SIGMAS[4]:.6g}, got {other[2, 1]:.6g}"
    ):
        trajectory.require(sigmas=other)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_per_row_schedule_for_other_samples_is_refused(rows: int) -> None:
    trajectory = make_rollout(MlpField())
    with pytest.raises(ReplayMismatch, match=f"sigmas: the rollout has 4 samples, got {rows}"):
        trajectory.require(sigmas=trajectory.sigmas.expand(rows, -1))


def test_another_timestep_mode_names_the_first_differing_step() -> None:
    """Case 2.4: on DanceGRPO's fp32 grid truncation first differs from sigma itself at step 1 (964.28)."""
    sigmas = time_shift(torch.linspace(1, 0, 11), 3.0)
    latents = torch.zeros(2, *SHAPE, dtype=torch.float64)
    trajectory = rollout(MlpField(), sigmas, DanceSDE(0.3), latents, seed=0, timestep_mode="trunc_fp32")
    with pytest.raises(ReplayMismatch, match=r"rollout trunc_fp32, replay float: first .* 1, rollout 964, got 964.2"):
        trajectory.require(timestep_mode="float")
    with pytest.raises(ReplayMismatch, match=r"replay round: first differing step is 3, rollout 874, got 875"):
        trajectory.require(timestep_mode="round")


def test_another_timestep_mode_is_refused_where_it_makes_no_difference() -> None:
    trajectory = make_rollout(MlpField()).select([0])  # sigma 1 is step 1000 in any mode
    with pytest.raises(ReplayMismatch, match="timestep_mode: the rollout used 'float', got 'round'"):
        trajectory.require(timestep_mode="round")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DanceSDE(0.3), r"transition: the rollout used DanceSDE\(eta=0.7\), got DanceSDE\(eta=0.3\)$"),
        (FlowSDE(0.7), r"got FlowSDE\(eta=0.7\)$"),
        (CPS(0.7), r"got CPS\(eta=0.7\) \(log-prob conventions gaussian and unscaled_quadratic\)"),
    ],
)
def test_another_kernel_is_refused(other: Transition, message: str) -> None:
    with pytest.raises(ReplayMismatch, match=message):
        make_rollout(MlpField()).require(transition=other)


def test_another_guidance_is_refused() -> None:
    with pytest.raises(ReplayMismatch, match=r"guidance: the rollout used '3.5', the policy now has '4.0'"):
        settled().require(signature={"guidance": "4.0"})


def test_the_policy_signs_its_rollouts() -> None:
    class Signed(MlpField):
        def signature(self) -> dict[str, str]:
            return {"guidance": "3.5"}

    assert make_rollout(Signed()).signature == {"guidance": "3.5"}
    assert policy_signature(MlpField()) == {}


# Weights


def test_any_changed_weight_changes_the_version() -> None:
    policy = MlpField()
    before = weights_version(policy)
    for parameter in policy.parameters():
        flat = parameter.data.view(-1)
        for index in (0, len(flat) - 1):
            kept = flat[index].clone()
            flat[index] = torch.nextafter(kept, kept + 1)
            assert weights_version(policy) != before
            flat[index] = kept
    assert weights_version(policy) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_versions_exist_in_every_precision(dtype: torch.dtype) -> None:
    policy = MlpField(dtype=dtype)
    before = weights_version(policy)
    assert before == weights_version(MlpField(dtype=dtype))
    policy.bias.data[3] *= 1.01
    assert weights_version(policy) != before


def test_equal_values_elsewhere_are_another_version() -> None:
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((3,), 2.0))

    class Two:
        def __init__(self, *tensors: torch.nn.Parameter) -> None:
            self.tensors = tensors

        def parameters(self) -> tuple[torch.nn.Parameter, ...]:
            return self.tensors

        def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
            return latents

    assert weights_version(Two(a, b)) != weights_version(Two(b, a))


def test_a_policy_without_parameters_has_no_version() -> None:
    policy = ConstantField(noise_like(4, *SHAPE))
    assert weights_version(policy) is None
    assert rollout(policy, SIGMAS, DanceSDE(0.7), start(), seed=3).weights_version is None
