"""From advantages to upstream gradients ``s_j = dL_j / dv_j``: clipped surrogate, KL.

Every upstream gradient comes in two ways that the tests hold against each other: by autograd through transition and
loss (the paper's second phase, no transformer involved), and in closed form, which on policy needs no forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import Transition, expand, per_sample_mean

KLForm = Literal["noise", "std", "mean", "velocity", "log_ratio"]
"""Measure of the KL term of `ClippedSurrogate`."""

Bounds = float | tuple[float, float]
"""Limits below and above: ``c`` stands for ``(-c, c)``."""


@dataclass(frozen=True)
class ClippedSurrogate:
    """PPO's clipped surrogate on mean log-probabilities, with an optional KL.

    Per sample and step ``max(-A r, -A clip(r, 1 + low, 1 + high)) + kl_beta KL``. A is the advantage, clipped to
    ``adv_clip``; r is the ratio to the rollout's policy. ``clip_range`` and ``adv_clip`` are a number ``c``, which
    stands for ``(-c, c)``, or the offsets ``(low, high)`` with ``low < 0 < high`` (Flow-Factory).

    ``kl_form`` is the measure of the KL, a mean over latent elements. With means m of the transition under the policy
    and ``m_ref`` under a reference policy:

    - ``"noise"``: ``(m - m_ref)^2 / (2 c^2)`` with c the whole noise scale of the step, the KL of the two Gaussians.
      flow_grpo's Wan script and verl-omni's ``dance_sde`` have it.
    - ``"std"``: the same with c the scale without ``sqrt(-dt)``. flow_grpo has it since July 2025 and verl-omni too,
      both with Flow-SDE and with CPS (whose scale has no ``sqrt(-dt)``). No public trainer has it with Dance-SDE.
    - ``"mean"``: ``(m - m_ref)^2``, Flow-Factory's ``x-based``.
    - ``"velocity"``: ``(v - v_ref)^2``, Flow-Factory's ``v-based``.
    - ``"log_ratio"``: ``(log r)^2 / 2``, MixGRPO's ``kl_coeff``; it needs no reference policy.

    Raises:
        ValueError: a setting out of range.
    """

    clip_range: Bounds = 1e-4
    adv_clip: Bounds = 5.0
    kl_beta: float = 0.0
    kl_form: KLForm = "noise"

    def __post_init__(self) -> None:
        for name in ("clip_range", "adv_clip"):
            _bounds(name, getattr(self, name))
        if not (self.kl_beta >= 0 and math.isfinite(self.kl_beta)):
            raise ValueError(f"kl_beta must be at least 0, got {self.kl_beta}")
        require_one_of("kl_form", self.kl_form, KLForm)

    @property
    def needs_reference(self) -> bool:
        """Tells whether the KL is to a reference policy."""
        return self.kl_beta > 0 and self.kl_form != "log_ratio"

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Returns the offsets of the ratio from 1 at which it is clipped, below and above."""
        return _bounds("clip_range", self.clip_range)

    def clip_advantages(self, advantages: Tensor) -> Tensor:
        """Clips advantages to ``adv_clip``."""
        return advantages.clamp(*_bounds("adv_clip", self.adv_clip))

    def surrogate(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Computes the loss per sample ``[B]`` without KL."""
        ratio, (low, high) = log_ratio.exp(), self.ratio_bounds
        clipped = ratio.clamp(1 + low, 1 + high)
        return torch.maximum(-advantages * ratio, -advantages * clipped)

    def is_clipped(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Marks samples whose surrogate has no gradient, ``[B]`` bool."""
        ratio, (low, high) = log_ratio.exp(), self.ratio_bounds
        return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 + low))

    def kl_factor(self, transition: Transition, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        """Computes the factor of the mean of ``(m - m_ref)^2`` at a step, fp64 of the shape of ``sigma``.

        Raises:
            ValueError: no public trainer has this form with this kernel, or the form has no reference.
        """
        _, b, scale = transition.coefficients(sigma, next_sigma)
        if self.kl_form == "noise":
            return 1 / (2 * scale.square())
        if self.kl_form == "std":
            return 1 / (2 * transition.std(sigma, next_sigma).square())
        if self.kl_form == "mean":
            return torch.ones_like(scale)
        if self.kl_form == "velocity":
            return 1 / b.square()
        raise ValueError(f"kl_form {self.kl_form!r} has no reference policy")

    def require_fitting(self, trajectory: Trajectory, has_reference: bool) -> None:
        """Checks that the KL fits the trajectory's kernel and the reference policy.

        Raises:
            ValueError: it does not, or the reference policy is missing.
        """
        if not self.needs_reference:
            return
        if not has_reference:
            raise ValueError(f"kl_beta is {self.kl_beta}: a reference policy is needed")
        try:
            self.kl_factor(trajectory.transition, trajectory.sigma(0), trajectory.next_sigma(0))
        except ValueError as error:
            raise ValueError(f"kl_form {self.kl_form!r} does not fit the trajectory: {error}") from None


def _bounds(name: str, value: Bounds) -> tuple[float, float]:
    """Reads offsets (low, high) around 0."""
    if isinstance(value, (int, float)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
        return -value, value
    if len(value) != 2 or not value[0] < 0 < value[1]:
        raise ValueError(f"{name} must be a number, or offsets (low, high) with low < 0 < high, got {tuple(value)}")
    return float(value[0]), float(value[1])


@dataclass(frozen=True)
class Upstream:
    """The upstream gradient of one step, and the figures that go with it.

    Attributes:
        gradient: ``s_j`` [B, *D].
        loss: loss per sample ``[B]``, with the KL.
        kl: KL per sample ``[B]``, without the factor ``kl_beta``; 0 without a KL.
        log_ratio: log ratio per sample ``[B]``.
        clipped: samples without surrogate gradient, ``[B]`` bool.
    """

    gradient: Tensor
    loss: Tensor
    kl: Tensor
    log_ratio: Tensor
    clipped: Tensor


def _mean_and_scale(trajectory: Trajectory, step: int, velocity: Tensor) -> tuple[Tensor, Tensor]:
    a, b, scale = trajectory.transition.coefficients(trajectory.sigma(step), trajectory.next_sigma(step))
    latents = trajectory.latents[step]
    return expand(a, latents) * latents + expand(b, latents) * velocity, scale


def step_log_prob(trajectory: Trajectory, step: int, velocity: Tensor) -> Tensor:
    """Computes the log-probability ``[B]`` of the stored next latents of ``step`` under ``velocity`` [B, *D]."""
    mean, scale = _mean_and_scale(trajectory, step, velocity)
    return trajectory.transition.log_prob(trajectory.next_latents[step], mean, scale)


def _kl_factor(objective: ClippedSurrogate, trajectory: Trajectory, step: int, like: Tensor) -> Tensor:
    factor = objective.kl_factor(trajectory.transition, trajectory.sigma(step), trajectory.next_sigma(step))
    return factor.to(like)


def upstream_autograd(
    objective: ClippedSurrogate,
    trajectory: Trajectory,
    step: int,
    velocity: Tensor,
    advantages: Tensor,
    reference_velocity: Tensor | None = None,
) -> Upstream:
    """Computes the upstream gradient by autograd, from a detached ``velocity`` [B, *D] through transition and loss.

    ``advantages`` [B] are clipped here. ``reference_velocity`` is needed if ``objective.needs_reference``.

    Raises:
        ValueError: it is needed and missing.
    """
    advantages = objective.clip_advantages(advantages)
    with torch.enable_grad():
        proxy = velocity.detach().to(trajectory.latents.dtype).requires_grad_(True)
        mean, scale = _mean_and_scale(trajectory, step, proxy)
        log_prob = trajectory.transition.log_prob(trajectory.next_latents[step], mean, scale)
        log_ratio = log_prob - trajectory.log_probs[step]
        loss, kl = objective.surrogate(log_ratio, advantages), torch.zeros_like(log_ratio)
        if objective.needs_reference:
            distance = mean - _mean_and_scale(trajectory, step, _needed(reference_velocity))[0]
            kl = _kl_factor(objective, trajectory, step, mean) * per_sample_mean(distance.square())
        elif objective.kl_beta > 0:
            kl = log_ratio.square() / 2
        loss = loss + objective.kl_beta * kl
        (gradient,) = torch.autograd.grad(loss.sum(), proxy)
    log_ratio = log_ratio.detach()
    return Upstream(gradient, loss.detach(), kl.detach(), log_ratio, objective.is_clipped(log_ratio, advantages))


@torch.no_grad()
def upstream_closed_form(
    objective: ClippedSurrogate,
    trajectory: Trajectory,
    step: int,
    advantages: Tensor,
    reference_velocity: Tensor | None = None,
    velocity: Tensor | None = None,
) -> Upstream:
    """Computes the upstream gradient from the formula ``s = -A r / D dlogp/dv`` (0 where clipped), plus the KL's.

    Without ``velocity`` the policy is taken to be the rollout's: the ratio r is 1, the residual is the stored
    noise, and no forward is needed. The caller checks that this holds.

    Raises:
        ValueError: ``objective.needs_reference`` and ``reference_velocity`` is missing.
    """
    advantages = objective.clip_advantages(advantages)
    transition, sigma, next_sigma = trajectory.transition, trajectory.sigma(step), trajectory.next_sigma(step)
    _, b, scale = transition.coefficients(sigma, next_sigma)
    if velocity is None:
        mean, residual = trajectory.mean(step), trajectory.noise[step]
        log_ratio = torch.zeros_like(trajectory.log_probs[step])
    else:
        mean = _mean_and_scale(trajectory, step, velocity.to(trajectory.latents.dtype))[0]
        residual = (trajectory.next_latents[step] - mean) / expand(scale, mean)
        log_ratio = transition.log_prob(trajectory.next_latents[step], mean, scale) - trajectory.log_probs[step]
    clipped = objective.is_clipped(log_ratio, advantages)
    weight = torch.where(clipped, 0.0, -advantages * log_ratio.exp())
    loss, kl = objective.surrogate(log_ratio, advantages), torch.zeros_like(log_ratio)
    if objective.kl_beta > 0 and not objective.needs_reference:
        kl = log_ratio.square() / 2
        weight = weight + objective.kl_beta * log_ratio
    gradient = expand(weight / trajectory.elements, residual) * transition.dlogp_dvelocity(residual, sigma, next_sigma)
    if objective.needs_reference:
        distance = mean - _mean_and_scale(trajectory, step, _needed(reference_velocity))[0]
        kl = _kl_factor(objective, trajectory, step, mean) * per_sample_mean(distance.square())
        slope = 2 * objective.kl_beta / trajectory.elements * b * objective.kl_factor(transition, sigma, next_sigma)
        gradient = gradient + expand(slope, distance) * distance
    return Upstream(gradient, loss + objective.kl_beta * kl, kl, log_ratio, clipped)


def _needed(reference_velocity: Tensor | None) -> Tensor:
    if reference_velocity is None:
        raise ValueError("kl_beta is positive: a reference policy is needed")
    return reference_velocity
