"""Schedules against diffusers and by hand, timestep modes, and the check that every schedule goes through."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jagg_core.rollouts import rollout
from jagg_core.schedule import (
    TimestepMode,
    check_sigmas,
    dance_schedule,
    dynamic_mu,
    flux_schedule,
    network_sigma,
    qwen_image_schedule,
    sd3_schedule,
    time_shift,
)
from jagg_core.transitions import DanceSDE
from tests.jagg_core.fields import MlpField

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def scheduler() -> Callable[..., Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler


@pytest.mark.parametrize("shift", [3.0, 5.0])
@pytest.mark.parametrize("steps", [1, 2, 10, 28])
def test_sd3_schedule_is_diffusers(scheduler: Callable[..., Any], steps: int, shift: float) -> None:
    theirs = scheduler(shift=shift)
    theirs.set_timesteps(steps)
    ours = sd3_schedule(steps, shift)
    torch.testing.assert_close(ours.float(), theirs.sigmas, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours[:-1].float() * 1000, theirs.timesteps, atol=2e-3, rtol=0)
    theirs.set_timesteps(steps)  # a double shift would show here
    torch.testing.assert_close(ours.float(), theirs.sigmas, atol=2e-6, rtol=0)


def mu_by_hand(tokens: int, max_tokens: int, max_shift: float) -> float:
    return 0.5 + (max_shift - 0.5) * (tokens - 256) / (max_tokens - 256)


@pytest.mark.parametrize("tokens", [256, 1024, 2025, 4096])
@pytest.mark.parametrize("steps", [1, 6, 28])
def test_flux_schedule_is_diffusers(scheduler: Callable[..., Any], steps: int, tokens: int) -> None:
    theirs = scheduler(use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu_by_hand(tokens, 4096, 1.15))
    torch.testing.assert_close(flux_schedule(steps, tokens).float(), theirs.sigmas, atol=2e-6, rtol=0)


@pytest.mark.parametrize("tokens", [256, 2025, 8192])
@pytest.mark.parametrize("steps", [2, 10, 20])
def test_qwen_image_schedule_is_diffusers(scheduler: Callable[..., Any], steps: int, tokens: int) -> None:
    theirs = scheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu_by_hand(tokens, 8192, 0.9))
    ours = qwen_image_schedule(steps, tokens)
    torch.testing.assert_close(ours.float(), theirs.sigmas, atol=2e-6, rtol=0)
    assert ours[-2].item() == pytest.approx(0.02, abs=1e-12)


@pytest.mark.parametrize(("tokens", "mu"), [(256, 0.5), (4096, 1.15), (2176, 0.825)])
def test_dynamic_mu_is_linear_in_the_tokens(tokens: int, mu: float) -> None:
    assert dynamic_mu(tokens) == pytest.approx(mu, abs=1e-12)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("steps", [1, 7, 10, 16])
def test_dance_schedule_by_hand(steps: int, shift: float) -> None:
    grid = [1 - i / steps for i in range(steps + 1)]
    expected = [shift * t / (1 + (shift - 1) * t) for t in grid]
    assert dance_schedule(steps, shift).tolist() == pytest.approx(expected, abs=1e-15)


ALL = {
    "dance": lambda n: dance_schedule(n),
    "sd3": lambda n: sd3_schedule(n),
    "flux": lambda n: flux_schedule(n, 1024),
    "qwen": lambda n: qwen_image_schedule(n, 1024),
}


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("steps", [2, 21, 50])
def test_every_schedule_runs_from_one_to_zero(family: str, steps: int) -> None:
    sigmas = ALL[family](steps)
    assert sigmas.dtype == torch.float64
    assert len(sigmas) == steps + 1
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert torch.equal(check_sigmas(sigmas), sigmas)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dance_schedule(0), "steps must be at least 1, got 0"),
        (lambda: sd3_schedule(-1), "steps must be at least 1, got -1"),
        (lambda: flux_schedule(0, 256), "steps must be at least 1, got 0"),
        (lambda: qwen_image_schedule(1, 256), "steps must be at least 2, got 1"),
        (lambda: flux_schedule(4, 0), "image_tokens must be at least 1, got 0"),
        (lambda: qwen_image_schedule(4, 256, terminal=0.0), "terminal must be between 0 and 1, got 0"),
        (lambda: qwen_image_schedule(4, 256, terminal=1.0), "terminal must be between 0 and 1, got 1"),
        (lambda: dance_schedule(4, shift=0.0), "shift must be positive, got 0"),
        (lambda: sd3_schedule(4, shift=-3.0), "shift must be positive, got -3"),
        (lambda: time_shift(torch.ones(1), math.nan), "shift must be positive, got nan"),
    ],
)
def test_bad_settings_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Timestep modes (cases 2.3 and 2.4)


def dance_in_fp32() -> Tensor:
    """DanceGRPO's own arithmetic: grid and shift in fp32."""
    return time_shift(torch.linspace(1, 0, 11), 3.0)


@pytest.mark.parametrize(
    ("sigmas", "mode", "third", "ninth"),
    [
        (dance_in_fp32(), "trunc_fp32", 874, 250),
        (dance_schedule(10), "trunc_fp64", 874, 249),
        (dance_in_fp32(), "round", 875, 250),
        (dance_schedule(10), "round", 875, 250),
    ],
    ids=["trunc_fp32", "trunc_fp64", "round of fp32", "round of fp64"],
)
def test_integer_timesteps_depend_on_the_precision(sigmas: Tensor, mode: TimestepMode, third: int, ninth: int) -> None:
    told = network_sigma(sigmas, mode)
    assert told.dtype == torch.float64
    assert told[3].item() == third / 1000
    assert told[9].item() == ninth / 1000


def test_float_mode_tells_sigma_itself() -> None:
    sigmas = dance_schedule(10)
    assert torch.equal(network_sigma(sigmas, "float"), sigmas)


def test_an_unknown_timestep_mode_is_named() -> None:
    with pytest.raises(ValueError, match=r"timestep_mode must be one of .*trunc_fp32.* got 'floor'"):
        network_sigma(torch.ones(1), "floor")  # type: ignore[arg-type]


class Listener(MlpField):
    """Keeps the sigmas it is told, as tensors."""

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        self.told = [*getattr(self, "told", []), sigma.clone()]
        return super().velocity(latents, sigma, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigma_reaches_the_network_in_fp32(dtype: torch.dtype) -> None:
    """Rounded to bf16 before the factor 1000 it would be 976 and 684 (case 2.3)."""
    policy = Listener(elements=4, dtype=torch.float32)
    trajectory = rollout(policy, dance_schedule(10, shift=5.0), DanceSDE(0.3), torch.randn(2, 4).to(dtype), seed=0)
    assert len(policy.told) == 10
    assert all(told.dtype == torch.float32 and told.shape == (2,) for told in policy.told)
    for step, timestep in ((1, 978.2609), (7, 681.8182)):
        assert policy.told[step].tolist() == pytest.approx([timestep / 1000] * 2, abs=1e-7)
        assert torch.equal(trajectory.network_sigma(step), policy.told[step])


@pytest.mark.parametrize("mode", ["float", "trunc_fp32", "trunc_fp64", "round"])
def test_a_replay_tells_what_the_rollout_told(mode: TimestepMode) -> None:
    policy = Listener(elements=4)
    latents = torch.zeros(2, 4, dtype=torch.float64)
    trajectory = rollout(policy, dance_schedule(10), DanceSDE(0.3), latents, seed=0, timestep_mode=mode)
    assert torch.equal(torch.stack([trajectory.network_sigma(j) for j in range(9)]), torch.stack(policy.told[:9]))
    assert policy.told[9][0].item() == {"float": dance_schedule(10)[9].item(), "trunc_fp64": 0.249}.get(mode, 0.25)
    assert torch.equal(trajectory.sigmas, dance_schedule(10)[:9]), "steps are taken with the exact sigma in any mode"


# check_sigmas


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([0.1, 0.5, 0.9], "got 0.1 then 0.5 at step 0"),
        ([1.0, 0.5, 0.5, 0.0], "got 0.5 then 0.5 at step 1"),
        ([1.0, 0.5, 0.6], "got 0.5 then 0.6 at step 1"),
        ([1.0, math.nan, 0.0], r"must lie in \[0, 1\], got nan"),
        ([math.inf, 0.5], r"must lie in \[0, 1\], got 0.5 to inf"),
        ([1.2, 0.5], r"must lie in \[0, 1\], got 0.5 to 1.2"),
        ([0.5, -0.1], r"must lie in \[0, 1\], got -0.1 to 0.5"),
        ([], re.escape("must have shape [T] or [B, T] with T >= 1, got [0]")),
        (0.5, re.escape("got []")),
        ([[[1.0, 0.5]]], re.escape("got [1, 1, 2]")),
        ([[1.0, 0.5, 0.2], [1.0, 0.3, 0.3]], "got 0.3 then 0.3 at step 1"),
    ],
)
def test_what_is_no_schedule_is_refused(sigmas: list[float], message: str) -> None:
    with pytest.raises(ValueError, match="own_name.*" + message):
        check_sigmas(torch.tensor(sigmas), "own_name")


@pytest.mark.parametrize("sigmas", [[0.7], [1.0, 0.4], [[1.0, 0.5], [0.9, 0.2]]])
def test_short_and_per_row_schedules_are_schedules(sigmas: list[float]) -> None:
    given = torch.tensor(sigmas, dtype=torch.float32, requires_grad=True)
    checked = check_sigmas(given)
    assert checked.dtype == torch.float64
    assert not checked.requires_grad
    assert torch.equal(checked, given.detach().double())
