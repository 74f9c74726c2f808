"""Sigma schedules and timestep modes of the public trainers and pipelines.

A schedule is a strictly decreasing fp64 tensor on the CPU from (about) 1 to 0. It has one more entry than there are
sampling steps; the last step is never trained. Sources: DanceGRPO, flow_grpo, diffusers' flow-matching scheduler.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from jagg_core.choices import TimestepMode


def _check_steps(steps: int, at_least: int = 1) -> None:
    if steps < at_least:
        raise ValueError(f"steps must be at least {at_least}, got {steps}")


def time_shift(sigmas: Tensor, shift: float) -> Tensor:
    """Computes the static shift ``shift sigma / (1 + (shift - 1) sigma)``; any shape. SD3 (Esser et al. 2024).

    Raises:
        ValueError: ``shift`` not positive.
    """
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def dance_schedule(steps: int, shift: float = 3.0) -> Tensor:
    """Builds DanceGRPO's and MixGRPO's schedule: an even grid from 1 to 0, shifted. ``[steps + 1]``.

    DanceGRPO computes the grid in fp32, ``time_shift(torch.linspace(1, 0, steps + 1), shift)``, which decides whether a
    truncated timestep is 874 or 875.

    Raises:
        ValueError: fewer than 1 step, or ``shift`` not positive.
    """
    _check_steps(steps)
    return time_shift(1 - torch.arange(steps + 1, dtype=torch.float64) / steps, shift)


def sd3_schedule(steps: int, shift: float = 3.0) -> Tensor:
    """Builds diffusers' schedule with a static shift, for SD3.5 (3) and Wan 2.1 (3; 5 at 720p). ``[steps + 1]``.

    The grid runs between the shifted ends of the 1000 training steps and is shifted once more, as diffusers does.

    Raises:
        ValueError: fewer than 1 step, or ``shift`` not positive.
    """
    _check_steps(steps)
    lowest = time_shift(torch.tensor(1 / 1000, dtype=torch.float64), shift)
    grid = torch.linspace(1, float(lowest), steps, dtype=torch.float64)
    return torch.cat([time_shift(grid, shift), torch.zeros(1, dtype=torch.float64)])


def dynamic_mu(
    image_tokens: int, base_tokens: int = 256, max_tokens: int = 4096, base_shift: float = 0.5, max_shift: float = 1.15
) -> float:
    """Computes the shift parameter mu, linear in the number of image tokens (Flux; Qwen-Image with other ends).

    Raises:
        ValueError: fewer than 1 image token.
    """
    if image_tokens < 1:
        raise ValueError(f"image_tokens must be at least 1, got {image_tokens}")
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (image_tokens - base_tokens)


def _dynamic_grid(steps: int, mu: float) -> Tensor:
    grid = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    # e^mu / (e^mu + 1 / grid - 1), in the form that is exactly 1 at 1
    return 1 / (1 + math.exp(-mu) * (1 / grid - 1))


def flux_schedule(steps: int, image_tokens: int) -> Tensor:
    """Builds Flux's schedule: from 1 to 1/steps, shifted for ``image_tokens`` packed tokens. ``[steps + 1]``.

    ``e^mu / (e^mu + 1 / sigma - 1)`` with the mu of `dynamic_mu`; last entry 0.

    Raises:
        ValueError: fewer than 1 step or image token.
    """
    _check_steps(steps)
    return torch.cat([_dynamic_grid(steps, dynamic_mu(image_tokens)), torch.zeros(1, dtype=torch.float64)])


def qwen_image_schedule(steps: int, image_tokens: int, terminal: float = 0.02) -> Tensor:
    """Builds Qwen-Image's schedule: Flux's with other ends, stretched to end at ``terminal``. ``[steps + 1]``.

    The shift grows up to 0.9 at 8192 tokens. ``terminal`` is the last sigma before the 0 at the end.

    Raises:
        ValueError: fewer than 2 steps or 1 image token, or ``terminal`` not between 0 and 1.
    """
    _check_steps(steps, at_least=2)
    if not 0 < terminal < 1:
        raise ValueError(f"terminal must be between 0 and 1, got {terminal}")
    grid = _dynamic_grid(steps, dynamic_mu(image_tokens, max_tokens=8192, max_shift=0.9))
    stretched = 1 - (1 - grid) * (1 - terminal) / (1 - grid[-1])
    return torch.cat([stretched, torch.zeros(1, dtype=torch.float64)])


def network_sigma(sigma: Tensor, mode: TimestepMode = "float") -> Tensor:
    """Computes the network's timestep for ``sigma`` (any shape): the step ``n / 1000`` that ``mode`` gives. fp64.

    Truncation depends on the precision: 1000 x 0.25 of a shifted grid is 250 in fp32 and 249 in fp64.

    Raises:
        ValueError: unknown mode.
    """
    if mode == "float":
        return sigma.double()
    if mode == "trunc_fp32":
        return (sigma.float() * 1000).long().double() / 1000
    if mode == "trunc_fp64":
        return (sigma.double() * 1000).long().double() / 1000
    if mode == "round":
        return (sigma.double() * 1000).round() / 1000
    raise ValueError(f"timestep_mode must be one of {list(get_args(TimestepMode))}, got {mode!r}")


def check_sigmas(sigmas: Tensor, name: str = "sigmas") -> Tensor:
    """Checks a schedule, ``[T]`` or ``[B, T]``, decreasing, in [0, 1]. Returns it as fp64 on the CPU.

    Raises:
        ValueError: names the fault and its first step.
    """
    values = sigmas.detach().to(device="cpu", dtype=torch.float64)
    if values.ndim not in (1, 2) or values.shape[-1] == 0:
        raise ValueError(f"{name} must have shape [T] or [B, T] with T >= 1, got {list(values.shape)}")
    if not torch.isfinite(values).all() or values.min() < 0 or values.max() > 1:
        raise ValueError(f"{name} must lie in [0, 1], got {values.min().item():g} to {values.max().item():g}")
    wrong = (values.diff(dim=-1) >= 0).nonzero()
    if len(wrong):
        step = int(wrong[0, -1])
        row = values.reshape(-1, values.shape[-1])[int(wrong[0, 0]) if values.ndim == 2 else 0]
        raise ValueError(
            f"{name} must decrease strictly (1 is noise), got {row[step]:g} then {row[step + 1]:g} at step {step}"
        )
    return values
