"""The three kernels against their published formulas, and the closed-form derivative against the table and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jagg_core.schedule import dance_schedule
from jagg_core.transitions import CPS, DanceSDE, FlowSDE, Transition, expand, per_sample_mean
from tests.jagg_core.fields import noise_like
from tests.jagg_core.literal import KERNEL_IDS, KERNELS, kernel_log_prob, kernel_step

SIGMAS = dance_schedule(7)
STEPS = range(6)

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
each_step = pytest.mark.parametrize("step", STEPS)


def mean_of(kernel: Transition, z: Tensor, v: Tensor, sigma: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale from the kernel's coefficients."""
    a, b, scale = kernel.coefficients(sigma, after)
    return expand(a, z) * z + expand(b, z) * v, scale


@each_kernel
@each_step
def test_mean_and_noise_are_the_published_ones(kernel: Transition, step: int) -> None:
    z, v = noise_like(2, 4, 3, 2)
    mean, scale = mean_of(kernel, z, v, SIGMAS[step], SIGMAS[step + 1])
    expected_mean, expected_scale = kernel_step(kernel, z, v, SIGMAS[step], SIGMAS[step + 1])
    torch.testing.assert_close(mean, expected_mean, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(scale, expected_scale, atol=1e-13, rtol=1e-12)
    assert scale > 0


@each_kernel
def test_samples_may_be_at_different_steps(kernel: Transition) -> None:
    z, v, sample = noise_like(3, 6, 3, 2)
    mean, scale = mean_of(kernel, z, v, SIGMAS[:6], SIGMAS[1:7])
    for row in STEPS:
        one = slice(row, row + 1)
        alone, alone_scale = mean_of(kernel, z[one], v[one], SIGMAS[row], SIGMAS[row + 1])
        torch.testing.assert_close(mean[one], alone, atol=1e-14, rtol=1e-13)
        torch.testing.assert_close(
            kernel.log_prob(sample, mean, scale)[one], kernel.log_prob(sample[one], alone, alone_scale)
        )


@each_kernel
@each_step
def test_log_prob_is_the_mean_of_the_published_density(kernel: Transition, step: int) -> None:
    z, v, sample = noise_like(3, 4, 3, 2)
    mean, scale = kernel_step(kernel, z, v, SIGMAS[step], SIGMAS[step + 1])
    found = kernel.log_prob(sample, mean, scale)
    torch.testing.assert_close(found, kernel_log_prob(kernel, sample, mean, scale), atol=1e-12, rtol=1e-12)


@each_kernel
def test_log_prob_does_not_grow_with_the_number_of_elements(kernel: Transition) -> None:
    sample, mean = noise_like(2, 4, 3, 2)
    scale = torch.tensor(0.3, dtype=torch.float64)
    once = kernel.log_prob(sample, mean, scale)
    often = kernel.log_prob(sample.repeat(1, 5, 2), mean.repeat(1, 5, 2), scale)
    torch.testing.assert_close(often, once, atol=0, rtol=1e-12)
    assert once.shape == (4,)


def table(kernel: Transition, noise: Tensor, sigma: Tensor, after: Tensor) -> Tensor:
    """The closed forms as conventions.md lists them (Flow-SDE only below sigma 1)."""
    root, eta = torch.sqrt(sigma - after), kernel.eta
    if isinstance(kernel, FlowSDE):
        return -noise * root * torch.sqrt((1 - sigma) / sigma) * (1 + eta**2 / 2) / eta
    if isinstance(kernel, DanceSDE):
        return -noise * root * (1 + eta**2 / 2 * (1 - sigma) / sigma) / eta
    std = after * math.sin(eta * math.pi / 2)
    return 2 * std * noise * (-sigma * (1 - after) + (1 - sigma) * after * math.cos(eta * math.pi / 2))


@each_kernel
@each_step
def test_derivative_is_the_table_and_autograd(kernel: Transition, step: int) -> None:
    sigma, after = SIGMAS[step], SIGMAS[step + 1]
    z, v, noise = noise_like(3, 4, 3, 2)
    found = kernel.dlogp_dvelocity(noise, sigma, after)
    if not (isinstance(kernel, FlowSDE) and sigma == 1):
        torch.testing.assert_close(found, table(kernel, noise, sigma, after), atol=1e-13, rtol=1e-11)
    velocity = v.requires_grad_(True)
    mean, scale = kernel_step(kernel, z, velocity, sigma, after)
    sample = (mean + scale * noise).detach()
    kernel_log_prob(kernel, sample, mean, scale).sum().backward()
    torch.testing.assert_close(found / 6, velocity.grad, atol=1e-12, rtol=1e-9)
    assert found.norm() > 1e-3


# Case 4.6: the singularity at sigma 1

NEAR_ONE = [1.0, 1 - 1e-7, 0.9999]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sigma", NEAR_ONE)
def test_flow_sde_is_capped_near_one(sigma: float, dtype: torch.dtype) -> None:
    coefficients = FlowSDE(0.7).coefficients(torch.tensor(sigma, dtype=dtype), torch.tensor(0.9643, dtype=dtype))
    std = coefficients.scale / math.sqrt(sigma - 0.9643)
    assert std.item() == pytest.approx(0.7 * math.sqrt(1 / 0.0357), rel=2e-3)  # 3.70; uncapped 0.7 * 3162
    assert all(torch.isfinite(c) and c.dtype == torch.float64 for c in coefficients)


@each_kernel
@pytest.mark.parametrize("sigma", NEAR_ONE)
def test_no_kernel_is_singular_near_one(kernel: Transition, sigma: float) -> None:
    found = torch.stack(kernel.coefficients(torch.tensor(sigma), torch.tensor(0.9643)))
    at_one = torch.stack(kernel.coefficients(torch.tensor(1.0), torch.tensor(0.9643)))
    torch.testing.assert_close(found, at_one, atol=1e-3, rtol=5e-3)


def test_flow_sde_is_not_capped_further_down() -> None:
    sigma, after = torch.tensor(0.99, dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64)
    assert FlowSDE(0.7).coefficients(sigma, after).scale.item() == pytest.approx(0.7 * math.sqrt(99 * 0.04), rel=1e-12)


# Case 7.9: two log-prob conventions


def log_prob_at(kernel: Transition, x: float, mean: float, std: float) -> float:
    """Log-probability of a single number."""
    sample, centre = torch.tensor([[x]], dtype=torch.float64), torch.tensor([[mean]], dtype=torch.float64)
    return kernel.log_prob(sample, centre, torch.tensor(std, dtype=torch.float64)).item()


@pytest.mark.parametrize(("kernel", "expected"), [(DanceSDE(1), 1.5768), (FlowSDE(1), 1.5768), (CPS(1), -0.0025)])
def test_log_prob_of_one_number(kernel: Transition, expected: float) -> None:
    assert log_prob_at(kernel, 0.05, 0.0, 0.05) == pytest.approx(expected, abs=5e-5)


def test_scaled_and_unscaled_quadratic_give_other_ratios() -> None:
    std = 0.05
    dance, cps = (log_prob_at(k, 0.05, 0.0, std) - log_prob_at(k, 0.05, 0.01, std) for k in (DanceSDE(1), CPS(1)))
    assert dance == pytest.approx(-(0.05**2 - 0.04**2) / (2 * std**2), rel=1e-9)
    assert cps == pytest.approx(dance * 2 * std**2, rel=1e-9)


def test_conventions_are_told_apart() -> None:
    assert DanceSDE(0.3).convention == FlowSDE(0.3).convention
    assert CPS(0.3).convention != DanceSDE(0.3).convention


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DanceSDE(0.0), "eta of DanceSDE must be positive, got 0.0"),
        (lambda: DanceSDE(-0.3), "eta of DanceSDE must be positive, got -0.3"),
        (lambda: FlowSDE(math.nan), "eta of FlowSDE must be positive, got nan"),
        (lambda: FlowSDE(math.inf), "eta of FlowSDE must be positive, got inf"),
        (lambda: CPS(0.0), "eta of CPS must be positive and at most 1, got 0.0"),
        (lambda: CPS(1.01), "eta of CPS must be positive and at most 1, got 1.01"),
    ],
)
def test_eta_out_of_range_is_named(make: Callable[[], Transition], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_eta_may_exceed_one_where_it_is_a_noise_level() -> None:
    assert FlowSDE(1.2).eta == 1.2  # Qwen-Image's setting in flow_grpo
    assert CPS(1.0).coefficients(SIGMAS[1], SIGMAS[2]).scale.item() == pytest.approx(SIGMAS[2].item(), rel=1e-12)


def test_the_base_class_defines_no_step() -> None:
    with pytest.raises(TypeError, match="Transition defines no step: use DanceSDE, FlowSDE or CPS"):
        Transition(0.5).coefficients(SIGMAS[0], SIGMAS[1])


def test_expand_follows_dtype_and_shape() -> None:
    like = torch.zeros(3, 2, 2, dtype=torch.float32)
    assert expand(torch.ones((), dtype=torch.float64), like).dtype == torch.float32
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert (like + expand(values, like)).mean((1, 2)).tolist() == [1.0, 2.0, 3.0]
    assert per_sample_mean(like + expand(values, like)).tolist() == [1.0, 2.0, 3.0]
