"""From rewards to upstream gradients ``s_j = dL_j / dv_j``: advantages, clipped surrogate, KL to a reference.

Every upstream gradient comes in two ways that the tests hold against each other: by autograd through transition and
loss (the paper's second phase, no transformer involved), and in closed form, which on policy needs no forward.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jagg_core.checks import require_one_of
from jagg_core.trajectory import Trajectory
from jagg_core.transitions import expand, per_sample_mean

DEGENERATE_STD = 1e-6
"""A group whose rewards spread less than this share of their size has no signal: its advantages are zero."""

ROUNDING = 1e-12
"""A reward is its group's mean if it differs by less than this share of the group's largest: fp64 sums round."""


Over = Literal["prompt", "batch", "none"]
"""What a statistic of rewards is taken over."""


class NoGroupSignal(UserWarning):
    """A prompt, or the batch, has too few samples for statistics of its own."""


def group_advantages(
    rewards: Tensor,
    prompt_ids: Tensor,
    *,
    centre: Over = "prompt",
    scale: Over = "prompt",
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-8,
    nan: Literal["raise", "exclude"] = "raise",
) -> Tensor:
    """Advantages ``(reward - mean) / (std + eps)`` of ``rewards`` [B], fp64 statistics, returned in fp32 ``[B]``.

    DanceGRPO takes mean and sample std inside a prompt's samples; flow_grpo the population std; its ``global_std`` is
    ``scale="batch"``. Statistics are taken once per sample, before anything is repeated over steps. A group (or batch)
    of equal rewards has zero advantages, also if rounding makes its std positive. ``nan="exclude"`` leaves rewards that
    are not finite out of the statistics and gives them advantage 0.

    Raises:
        ValueError: shapes that do not match, a reward that is not finite (under ``nan="raise"``), unknown options.
    """
    for name, value in (("centre", centre), ("scale", scale)):
        require_one_of(name, value, Over)
    require_one_of("std", std, ("sample", "population"))
    require_one_of("nan", nan, ("raise", "exclude"))
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be at least 0, found {eps}")
    if rewards.ndim != 1 or rewards.shape != prompt_ids.shape or len(rewards) == 0:
        raise ValueError(
            f"rewards and prompt_ids must both have shape [B], B >= 1, "
            f"found {list(rewards.shape)} and {list(prompt_ids.shape)}"
        )
    values = rewards.detach().double()
    valid = torch.isfinite(values)
    if nan == "raise" and not valid.all():
        index = int((~valid).nonzero()[0])
        raise ValueError(f"rewards must be finite, found {values[index].item()} at sample {index}")
    values = torch.where(valid, values, 0.0)
    groups = prompt_ids.unique(return_inverse=True)[1].to(values.device)
    whole = torch.zeros_like(groups)
    alone = groups[valid].bincount(minlength=1) == 1
    if "prompt" in (centre, scale) and alone.any():
        warnings.warn(
            "no group signal: a prompt has a single sample, so its advantage is 0; draw several samples per prompt",
            NoGroupSignal,
            stacklevel=2,
        )
    elif "batch" in (centre, scale) and int(valid.sum()) == 1:
        warnings.warn(
            "no group signal: the batch has a single sample, so its advantage is 0; draw several samples",
            NoGroupSignal,
            stacklevel=2,
        )
    by = {"prompt": groups, "batch": whole, "none": whole}
    mean = _group_mean(values, by[centre], valid) if centre != "none" else torch.zeros_like(values)
    centred = torch.where(valid, values - mean, 0.0)
    if centre != "none":
        centred = torch.where(centred.abs() > ROUNDING * _group_max(values.abs(), by[centre]), centred, 0.0)
    if scale == "none":
        return centred.float()
    members = by[scale]
    deviation = values - _group_mean(values, members, valid)
    count = torch.zeros(int(members.max()) + 1, dtype=values.dtype, device=values.device)
    count.index_add_(0, members, valid.to(values.dtype))
    squares = torch.zeros_like(count).index_add_(0, members, torch.where(valid, deviation.square(), 0.0))
    spread = (squares / (count - int(std == "sample")).clamp_min(1)).sqrt()[members]
    signal = spread > DEGENERATE_STD * _group_max(values.abs(), members)
    return torch.where(signal, centred / (spread + eps), 0.0).float()


def _group_mean(values: Tensor, members: Tensor, valid: Tensor) -> Tensor:
    count = torch.zeros(int(members.max()) + 1, dtype=values.dtype, device=values.device)
    total = torch.zeros_like(count).index_add_(0, members, values * valid)
    count.index_add_(0, members, valid.to(values.dtype))
    return (total / count.clamp_min(1))[members]


def _group_max(magnitudes: Tensor, members: Tensor) -> Tensor:
    largest = torch.zeros(int(members.max()) + 1, dtype=magnitudes.dtype, device=magnitudes.device)
    return largest.scatter_reduce_(0, members, magnitudes, "amax")[members]


def groups_without_signal(advantages: Tensor, prompt_ids: Tensor) -> int:
    """How many prompts have only zero advantages; both arguments are ``[B]``."""
    groups = prompt_ids.unique(return_inverse=True)[1].to(advantages.device)
    largest = torch.zeros(int(groups.max()) + 1, dtype=advantages.dtype, device=advantages.device)
    return int((largest.scatter_reduce_(0, groups, advantages.abs(), "amax") == 0).sum())


@dataclass(frozen=True)
class ClippedSurrogate:
    """PPO's clipped surrogate on mean log-probabilities, with an optional KL to a reference policy.

    Per sample and step ``max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range)) + kl_beta KL`` where A is the advantage
    clipped to ``+-adv_clip``, and ``KL = mean((mean - mean_ref)^2 / (2 scale^2))`` (flow_grpo; scale holds sqrt(-dt)).

    Raises:
        ValueError: a setting out of range.
    """

    clip_range: float = 1e-4
    adv_clip: float = 5.0
    kl_beta: float = 0.0

    def __post_init__(self) -> None:
        for name, minimum in (("clip_range", 0.0), ("adv_clip", 0.0)):
            if not getattr(self, name) > minimum:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        if not (self.kl_beta >= 0 and math.isfinite(self.kl_beta)):
            raise ValueError(f"kl_beta must be at least 0, found {self.kl_beta}")

    def clip_advantages(self, advantages: Tensor) -> Tensor:
        """Advantages within ``+-adv_clip``."""
        return advantages.clamp(-self.adv_clip, self.adv_clip)

    def surrogate(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Loss per sample ``[B]`` without KL."""
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        return torch.maximum(-advantages * ratio, -advantages * clipped)

    def is_clipped(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Samples whose surrogate has no gradient, ``[B]`` bool."""
        ratio = log_ratio.exp()
        above = (advantages > 0) & (ratio > 1 + self.clip_range)
        return above | ((advantages < 0) & (ratio < 1 - self.clip_range))


@dataclass(frozen=True)
class Upstream:
    """What one step contributes: the upstream gradient and the figures that go with it.

    Attributes:
        gradient: ``s_j`` [B, *D].
        loss: per sample ``[B]``.
        log_ratio: per sample ``[B]``.
        clipped: samples without surrogate gradient, ``[B]`` bool.
    """

    gradient: Tensor
    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor


def _mean_and_scale(trajectory: Trajectory, step: int, velocity: Tensor) -> tuple[Tensor, Tensor]:
    a, b, scale = trajectory.transition.coefficients(trajectory.sigma(step), trajectory.next_sigma(step))
    latents = trajectory.latents[step]
    return expand(a, latents) * latents + expand(b, latents) * velocity, scale


def step_log_prob(trajectory: Trajectory, step: int, velocity: Tensor) -> Tensor:
    """Log-probability ``[B]`` of the stored next latents of ``step`` under ``velocity`` [B, *D]."""
    mean, scale = _mean_and_scale(trajectory, step, velocity)
    return trajectory.transition.log_prob(trajectory.next_latents[step], mean, scale)


def upstream_autograd(
    objective: ClippedSurrogate,
    trajectory: Trajectory,
    step: int,
    velocity: Tensor,
    advantages: Tensor,
    reference_velocity: Tensor | None = None,
) -> Upstream:
    """The upstream gradient by autograd from a detached copy of ``velocity`` [B, *D] through transition and loss.

    ``advantages`` [B] are clipped here. ``reference_velocity`` is needed when ``kl_beta`` is positive.

    Raises:
        ValueError: it is needed and missing.
    """
    advantages = objective.clip_advantages(advantages)
    with torch.enable_grad():
        proxy = velocity.detach().to(trajectory.latents.dtype).requires_grad_(True)
        mean, scale = _mean_and_scale(trajectory, step, proxy)
        log_prob = trajectory.transition.log_prob(trajectory.next_latents[step], mean, scale)
        log_ratio = log_prob - trajectory.log_probs[step]
        loss = objective.surrogate(log_ratio, advantages)
        if objective.kl_beta > 0:
            reference = _mean_and_scale(trajectory, step, _needed(reference_velocity))[0]
            distance = (mean - reference) / expand(scale, mean)
            loss = loss + objective.kl_beta * per_sample_mean(distance.square() / 2)
        (gradient,) = torch.autograd.grad(loss.sum(), proxy)
    log_ratio = log_ratio.detach()
    return Upstream(gradient, loss.detach(), log_ratio, objective.is_clipped(log_ratio, advantages))


@torch.no_grad()
def upstream_closed_form(
    objective: ClippedSurrogate,
    trajectory: Trajectory,
    step: int,
    advantages: Tensor,
    reference_velocity: Tensor | None = None,
    velocity: Tensor | None = None,
) -> Upstream:
    """The upstream gradient from the formula ``s = -A r / D dlogp/dv`` (0 where clipped), plus the KL's.

    Without ``velocity`` the policy is taken to be the rollout's own: the ratio r is 1, the residual is the stored
    noise, and no forward is needed. Whoever calls it so must know that it is.

    Raises:
        ValueError: ``kl_beta`` is positive and ``reference_velocity`` missing.
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
    weight = torch.where(clipped, 0.0, -advantages * log_ratio.exp()) / trajectory.elements
    gradient = expand(weight, residual) * transition.dlogp_dvelocity(residual, sigma, next_sigma)
    loss = objective.surrogate(log_ratio, advantages)
    if objective.kl_beta > 0:
        reference = _mean_and_scale(trajectory, step, _needed(reference_velocity))[0]
        distance = (mean - reference) / expand(scale, mean)
        loss = loss + objective.kl_beta * per_sample_mean(distance.square() / 2)
        factor = objective.kl_beta / trajectory.elements * b / scale
        gradient = gradient + expand(factor, distance) * distance
    return Upstream(gradient, loss, log_ratio, clipped)


def _needed(reference_velocity: Tensor | None) -> Tensor:
    if reference_velocity is None:
        raise ValueError("kl_beta is positive: a reference policy is needed")
    return reference_velocity
