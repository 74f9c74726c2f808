"""From rewards to advantages."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from jagg_core.checks import require_one_of

DEGENERATE_STD = 1e-6
"""A group whose rewards spread less than this share of their size has no signal: its advantages are zero."""

ROUNDING = 1e-12
"""A reward is its group's mean if it differs by less than this share of the group's largest: fp64 sums round."""

Over = Literal["prompt", "batch", "none"]
"""Samples that a statistic of rewards is taken over."""

Std = Literal["sample", "population"]
"""Standard deviation with or without Bessel's correction."""


class NoGroupSignal(UserWarning):
    """A prompt, or the batch, has too few samples for its statistics."""


def group_advantages(
    rewards: Tensor,
    prompt_ids: Tensor,
    *,
    centre: Over = "prompt",
    scale: Over = "prompt",
    std: Std = "sample",
    eps: float = 1e-8,
) -> Tensor:
    """Computes ``(reward - mean) / (std + eps)`` from ``rewards`` [B] by fp64 statistics; fp32 ``[B]``.

    DanceGRPO takes mean and sample std inside a prompt's samples; flow_grpo the population std; its ``global_std`` is
    ``scale="batch"``. Statistics are taken once per sample, before anything is repeated over steps. A group (or batch)
    of equal rewards has zero advantages, also if rounding makes its std positive.

    Raises:
        ValueError: shapes that do not match, a reward that is not finite, unknown options.
    """
    for name, value in (("centre", centre), ("scale", scale)):
        require_one_of(name, value, Over)
    require_one_of("std", std, Std)
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be at least 0, got {eps}")
    if rewards.ndim != 1 or rewards.shape != prompt_ids.shape or len(rewards) == 0:
        raise ValueError(
            f"rewards and prompt_ids must both have shape [B], B >= 1, "
            f"got {list(rewards.shape)} and {list(prompt_ids.shape)}"
        )
    values = rewards.detach().double()
    if not torch.isfinite(values).all():
        index = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"rewards must be finite, got {values[index].item()} at sample {index}")
    groups = prompt_ids.unique(return_inverse=True)[1].to(values.device)
    whole = torch.zeros_like(groups)
    alone = groups.bincount() == 1
    if "prompt" in (centre, scale) and alone.any():
        warnings.warn(
            "no group signal: a prompt has a single sample, so its advantage is 0; draw several samples per prompt",
            NoGroupSignal,
            stacklevel=2,
        )
    elif "batch" in (centre, scale) and len(values) == 1:
        warnings.warn(
            "no group signal: the batch has a single sample, so its advantage is 0; draw several samples",
            NoGroupSignal,
            stacklevel=2,
        )
    by = {"prompt": groups, "batch": whole, "none": whole}
    mean = _group_mean(values, by[centre]) if centre != "none" else torch.zeros_like(values)
    centred = values - mean
    if centre != "none":
        centred = torch.where(centred.abs() > ROUNDING * _group_max(values.abs(), by[centre]), centred, 0.0)
    if scale == "none":
        return centred.float()
    members = by[scale]
    _, spread, _ = _statistics(values, members, std)
    signal = spread > DEGENERATE_STD * _group_max(values.abs(), members)
    return torch.where(signal, centred / (spread + eps), 0.0).float()


def advantage_slopes(
    rewards: Tensor,
    prompt_ids: Tensor,
    *,
    centre: Over = "prompt",
    scale: Over = "prompt",
    std: Std = "sample",
    eps: float = 1e-8,
) -> Tensor:
    """Computes ``dA_i / dR_i`` of `group_advantages` for every sample, fp32 ``[B]``, for pathwise gradients.

    Without a division by the std it is ``1 - 1/G`` for G samples per prompt. Where a loss clips the advantage its slope
    is 0; that is for the caller to do.

    Raises:
        ValueError: as `group_advantages`; two samples in a standard deviation.
    """
    advantages = group_advantages(rewards, prompt_ids, centre=centre, scale=scale, std=std, eps=eps)
    values = rewards.detach().double()
    groups = prompt_ids.to(values.device).unique(return_inverse=True)[1]
    by = {"prompt": groups, "batch": torch.zeros_like(groups), "none": torch.arange(len(values), device=values.device)}
    size = by[centre].bincount()[by[centre]].double()
    slopes = 1 - 1 / size if centre != "none" else torch.ones_like(values)
    if scale == "none":
        return slopes.float()
    members = by[scale]
    if (members.bincount() == 2).any():
        # of two rewards the scaled advantage is only a sign: its derivative is 0, and a jump where they are equal
        raise ValueError("scale must have at least 3 samples per standard deviation for pathwise gradients, got 2")
    deviation, spread, freedom = _statistics(values, members, std)
    signal = spread > DEGENERATE_STD * _group_max(values.abs(), members)
    safe = torch.where(signal, spread, 1.0)
    bend = deviation / (freedom * safe)  # derivative of the std
    return torch.where(signal, (slopes - advantages.double() * bend) / (safe + eps), 0.0).float()


def _statistics(values: Tensor, members: Tensor, std: Std) -> tuple[Tensor, Tensor, Tensor]:
    """Computes deviation from the group's mean, standard deviation and its degrees of freedom, each ``[B]``."""
    deviation = values - _group_mean(values, members)
    freedom = (members.bincount().to(values.dtype) - int(std == "sample")).clamp_min(1)
    squares = torch.zeros_like(freedom).index_add_(0, members, deviation.square())
    return deviation, (squares / freedom).sqrt()[members], freedom[members]


def _group_mean(values: Tensor, members: Tensor) -> Tensor:
    count = members.bincount().to(values.dtype)
    return (torch.zeros_like(count).index_add_(0, members, values) / count)[members]


def _group_max(magnitudes: Tensor, members: Tensor) -> Tensor:
    largest = torch.zeros(int(members.max()) + 1, dtype=magnitudes.dtype, device=magnitudes.device)
    return largest.scatter_reduce_(0, members, magnitudes, "amax")[members]


def groups_without_signal(advantages: Tensor, prompt_ids: Tensor) -> int:
    """Counts the prompts that have only zero advantages; both arguments are ``[B]``."""
    groups = prompt_ids.unique(return_inverse=True)[1].to(advantages.device)
    largest = torch.zeros(int(groups.max()) + 1, dtype=advantages.dtype, device=advantages.device)
    return int((largest.scatter_reduce_(0, groups, advantages.abs(), "amax") == 0).sum())
