"""SDE steps of a flow-matching sampler: their mean, noise and log-probability, and its derivative in the velocity.

In all three published kernels the mean is linear in latent and velocity, ``mean = a z + b v``, the noise ``scale eps``.
So a kernel is three coefficients and a log-density. sigma runs from 1 (noise) to 0; ``dt = sigma' - sigma < 0``.
Log-probabilities are means over all non-batch dimensions, as in every public implementation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

SIGMA_ONE = 1e-3
"""Above ``1 - SIGMA_ONE`` Flow-SDE takes 1 - sigma from the next step: at 1 its noise would be infinite."""


class Coefficients(NamedTuple):
    """``mean = latent z + velocity v`` and the noise ``scale``; each fp64 of the shape of sigma."""

    latent: Tensor
    velocity: Tensor
    scale: Tensor


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Shapes scalars or ``[B]`` as a tensor that multiplies ``like`` [B, ...], in its dtype and on its device."""
    cast = values.to(device=like.device, dtype=like.dtype)
    return cast.reshape(cast.shape + (1,) * (like.ndim - cast.ndim)) if cast.ndim else cast


def per_sample_mean(values: Tensor) -> Tensor:
    """Computes the mean over all but the first dimension: ``[B, ...]`` to ``[B]``."""
    return values.flatten(1).mean(1)


@dataclass(frozen=True)
class Transition:
    """Base of the kernels. ``eta`` is the noise level.

    Raises:
        ValueError: ``eta`` out of range for the kernel.
    """

    eta: float
    convention: ClassVar[str] = "gaussian"
    """Log-density convention, stored with trajectories: ratios of different conventions must not be mixed."""
    max_eta: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        if not (0 < self.eta <= self.max_eta and math.isfinite(self.eta)):
            limit = "" if math.isinf(self.max_eta) else f" and at most {self.max_eta:g}"
            raise ValueError(f"eta of {type(self).__name__} must be positive{limit}, got {self.eta}")

    def coefficients(self, sigma: Tensor, next_sigma: Tensor) -> Coefficients:
        """Computes the coefficients of the step from ``sigma`` to ``next_sigma`` (equal shapes), fp64."""
        raise TypeError(f"{type(self).__name__} defines no step: use DanceSDE, FlowSDE or CPS")

    def std(self, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        """Computes the noise level by which flow_grpo and verl-omni divide their KL, of the shape of ``sigma``, fp64.

        Raises:
            ValueError: no public trainer separates this kernel's noise level from its scale.
        """
        raise ValueError(f"{type(self).__name__} has no std apart from its scale in any public trainer: use 'noise'")

    def log_prob(self, sample: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Computes the Gaussian log-density of ``sample`` [B, ...], mean over elements: ``[B]``."""
        std = expand(scale, sample)
        quadratic = ((sample - mean) / std).square() / 2
        return per_sample_mean(-quadratic - torch.log(std) - math.log(2 * math.pi) / 2)

    def dlogp_dmean(self, noise: Tensor, scale: Tensor) -> Tensor:
        """Computes the derivative of the log-density (before its mean over elements) in the mean, at ``noise``."""
        return noise / expand(scale, noise)

    def dlogp_dvelocity(self, noise: Tensor, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        """Computes the log-density's derivative in the velocity, at residual ``noise`` [B, ...]."""
        coefficients = self.coefficients(sigma, next_sigma)
        return expand(coefficients.velocity, noise) * self.dlogp_dmean(noise, coefficients.scale)


@dataclass(frozen=True)
class DanceSDE(Transition):
    """DanceGRPO: reverse SDE with constant ``eta``.

    ``mean = z + dt v - eta^2/2 score dt``, ``score = -(z + (1 - sigma) v) / sigma``, noise ``eta sqrt(-dt)``.
    """

    def coefficients(self, sigma: Tensor, next_sigma: Tensor) -> Coefficients:
        """Computes Dance-SDE's coefficients, fp64."""
        sigma, next_sigma = sigma.double(), next_sigma.double()
        dt = next_sigma - sigma
        half = self.eta**2 / 2 * dt / sigma
        return Coefficients(1 + half, dt + half * (1 - sigma), self.eta * torch.sqrt(-dt))


@dataclass(frozen=True)
class FlowSDE(Transition):
    """Flow-GRPO: ``std = eta sqrt(sigma / (1 - sigma))``.

    ``mean = z (1 + std^2/(2 sigma) dt) + v (1 + std^2 (1 - sigma)/(2 sigma)) dt``, noise ``std sqrt(-dt)``.
    flow_grpo replaces a sigma of exactly 1 in the denominator by the second sigma of the schedule. Here every sigma
    within `SIGMA_ONE` of 1 is: rounding 1 to 1 - 1e-7 would otherwise raise std from 5.3 eta to 3162 eta (next 0.9643).
    """

    def coefficients(self, sigma: Tensor, next_sigma: Tensor) -> Coefficients:
        """Computes Flow-SDE's coefficients, fp64."""
        sigma, next_sigma = sigma.double(), next_sigma.double()
        dt = next_sigma - sigma
        variance = self._variance(sigma, next_sigma)
        half = variance / (2 * sigma) * dt
        return Coefficients(1 + half, dt + half * (1 - sigma), torch.sqrt(-dt * variance))

    def std(self, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        """Computes the noise scale without ``sqrt(-dt)``."""
        return torch.sqrt(self._variance(sigma.double(), next_sigma.double()))

    def _variance(self, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        return self.eta**2 * sigma / (1 - torch.where(sigma > 1 - SIGMA_ONE, next_sigma, sigma))


@dataclass(frozen=True)
class CPS(Transition):
    """Coefficients-preserving sampling (flow_grpo's Fast variants): ``std = sigma' sin(eta pi/2)``, eta in (0, 1].

    ``mean = (1 - sigma') x0 + sqrt(sigma'^2 - std^2) x1``. Its log-probability is ``-(sample - mean)^2``, without
    ``1/(2 std^2)``: ratios differ from the Gaussian ones.
    """

    convention: ClassVar[str] = "unscaled_quadratic"
    max_eta: ClassVar[float] = 1.0

    def coefficients(self, sigma: Tensor, next_sigma: Tensor) -> Coefficients:
        """Computes CPS's coefficients, fp64."""
        sigma, next_sigma = sigma.double(), next_sigma.double()
        keep = next_sigma * math.cos(self.eta * math.pi / 2)
        velocity = -sigma * (1 - next_sigma) + (1 - sigma) * keep
        return Coefficients(1 - next_sigma + keep, velocity, next_sigma * math.sin(self.eta * math.pi / 2))

    def std(self, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        """Computes the noise scale, which has no ``sqrt(-dt)`` here."""
        return self.coefficients(sigma, next_sigma).scale

    def log_prob(self, sample: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Computes the negative squared residual, mean over elements: ``[B]``."""
        return per_sample_mean(-(sample - mean).square())

    def dlogp_dmean(self, noise: Tensor, scale: Tensor) -> Tensor:
        """Computes the derivative ``2 c noise`` of the unscaled quadratic in the mean."""
        return 2 * expand(scale, noise) * noise


TRANSITIONS: dict[str, type[Transition]] = {"dance": DanceSDE, "flow": FlowSDE, "cps": CPS}
"""Kernels by their names in configurations, flags and records."""
