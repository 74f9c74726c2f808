"""The protocol of a reward, checked calls of one, and weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

RANGE_TOLERANCE = 1e-3
"""Largest distance of a pixel from [0, 1] that `score` accepts."""


class RewardNotFinite(ValueError):
    """A reward is NaN or infinite for some sample."""


class RewardFailed(RuntimeError):
    """A reward raised an error, which is the cause; names the reward, the update, the prompts and that error."""


@runtime_checkable
class Reward(Protocol):
    """Values each image for its prompt; larger is better.

    A reward is a pure, deterministic function. It follows the device of the images, and each sample's
    value depends on that sample alone: a batch gives what single calls give. Failing means raising, never returning
    zero or NaN. Call it through `score`, which checks both sides and builds no graph. One that is differentiable in the
    images has a graph where autograd is on; `differentiable` calls it so.
    """

    @property
    def name(self) -> str:
        """Names the reward in records; for rewards of this package also in `load_reward`."""
        ...

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes values ``[N]``, fp32 on the images' device, from images ``[N, C, H, W]`` in [0, 1] and N prompts."""
        ...


class FunctionReward:
    """A plain function ``(images, prompts) -> Tensor[N]`` as a `Reward`."""

    def __init__(self, function: Callable[[Tensor, Sequence[str]], Tensor], name: str) -> None:
        self.function = function
        self.name = name

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Calls the function."""
        return self.function(images, prompts)


class WeightedSum:
    """``sum_k weight_k reward_k``. Each term is checked as by `score`, so an error names the term.

    Raises:
        ValueError: no terms, or a weight that is not finite.
    """

    def __init__(self, terms: Sequence[tuple[float, Reward]]) -> None:
        if not terms:
            raise ValueError("terms must have at least one reward, got none")
        for weight, reward in terms:
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {reward.name} must be finite, got {weight}")
        self.terms = tuple(terms)

    @property
    def name(self) -> str:
        """Writes the sum as `load_reward` reads it, e.g. ``classifier+0.5*colourfulness``."""
        parts = [("" if weight == 1 else f"{weight:.15g}*") + reward.name for weight, reward in self.terms]
        return "+".join(parts).replace("+-", "-")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the weighted sum ``[N]``."""
        return torch.stack([weight * _checked(reward, images, prompts) for weight, reward in self.terms]).sum(0)


def reward_versions(reward: Reward) -> dict[str, str]:
    """Returns the versions of the networks' weights, by the name of the term that uses them.

    Empty for rewards without networks.
    """
    terms = [term for _, term in reward.terms] if isinstance(reward, WeightedSum) else [reward]
    return {term.name: str(term.version) for term in terms if hasattr(term, "version")}


def check_images(images: Tensor, reward: str, channels: tuple[int, ...]) -> None:
    """Checks that images are ``[N, C, H, W]`` with C one of ``channels``.

    Raises:
        ValueError: names the reward and the shape.
    """
    if images.ndim != 4:
        raise ValueError(f"images: {reward} takes [N, C, H, W], got shape {list(images.shape)}")
    if images.shape[1] not in channels:
        wanted = " or ".join({1: "1 channel (grey)", 3: "3 channels (RGB)"}.get(c, f"{c} channels") for c in channels)
        kind = "1-channel (grey)" if images.shape[1] == 1 else f"{images.shape[1]}-channel"
        raise ValueError(f"images: {reward} takes {wanted}, got {kind} images of shape {list(images.shape)}")


def _first(bad: Tensor) -> int:
    return int(bad.nonzero()[0])


@torch.no_grad()
def score(reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Computes the rewards of images ``[N, C, H, W]`` in [0, 1] for N prompts: fp32 ``[N]`` on the images' device.

    A reward may return a list, a tuple or an array of N numbers instead of a tensor. A NaN is never silently replaced:
    not by a zero, not by the group's mean. It is an error, and so is whatever the reward itself raises.

    Raises:
        TypeError: ``prompts`` is one string; images are not floating point; the reward returns no numbers.
        ValueError: as many prompts as images are not given, pixels lie outside [0, 1], or the result is not of shape
            [N]. Names the first sample concerned.
        RewardNotFinite: a value is NaN or infinite.
    """
    return _checked(reward, images.detach(), prompts).detach()


def differentiable(
    reward: Reward, decode: Callable[[Tensor], Tensor], prompts: Sequence[str]
) -> Callable[[Tensor], Tensor]:
    """Builds the function from final latents ``[N, *D]`` to rewards ``[N]`` with a graph, as `adjoint_sweep` takes it.

    Args:
        reward: a reward that is differentiable in the images, as all registered ones are.
        decode: the backbone's decoder, latents to images ``[N, C, H, W]`` in [0, 1], with a graph.
        prompts: one per sample.

    Raises:
        ValueError: by the function: images or rewards without a graph.
    """

    def value(latents: Tensor) -> Tensor:
        images = decode(latents)
        if not images.requires_grad:
            raise ValueError("decode: images have no gradient in the latents; is it computed under no_grad?")
        values = _checked(reward, images, prompts)
        if not values.requires_grad:
            raise ValueError(
                f"reward {reward.name} has no gradient in the images, so it cannot be used pathwise: name a "
                "differentiable reward in its place"
            )
        return values

    return value


def _checked(reward: Reward, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Computes what `score` returns, with a graph where autograd is on."""
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a sequence with one string per image, got the single string {prompts!r}")
    if not images.is_floating_point():
        raise TypeError(f"images must be floating point in [0, 1], got {images.dtype}")
    if images.ndim != 4 or len(images) == 0:
        raise ValueError(f"images must be of shape [N, C, H, W] with N at least 1, got {list(images.shape)}")
    if len(images) != len(prompts):
        raise ValueError(f"prompts: one per image is needed, got {len(prompts)} for {len(images)} images")
    images = images.float()
    low, high = images.detach().flatten(1).aminmax(dim=1)
    outside = ~((low >= -RANGE_TOLERANCE) & (high <= 1 + RANGE_TOLERANCE))
    if outside.any():
        i = _first(outside)
        raise ValueError(
            f"images must be in [0, 1], got {low[i].item():g} to {high[i].item():g} in sample {i} "
            f"({int(outside.sum())} of {len(images)} samples concerned)"
        )
    values = _as_tensor(reward(images, prompts), reward.name, len(images))
    if values.shape != (len(images),):
        raise ValueError(f"reward {reward.name} must return shape [{len(images)}], got {list(values.shape)}")
    values = values.to(images.device, torch.float32)
    undefined = ~values.isfinite()
    if undefined.any():
        i = _first(undefined)
        raise RewardNotFinite(
            f"reward {reward.name} is {values[i].item()} for sample {i} (prompt {prompts[i]!r}; "
            f"{int(undefined.sum())} of {len(images)} samples concerned): a NaN is never silently replaced"
        )
    return values


def _as_tensor(values: object, reward: str, count: int) -> Tensor:
    """Converts the result of a reward: a tensor, or a list, tuple or array of ``count`` numbers."""
    if isinstance(values, Tensor):
        return values
    wanted = f"reward {reward} must return a tensor of shape [{count}], or a list or array of {count} numbers"
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise TypeError(f"{wanted}, got {type(values).__name__}")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got a {type(values).__name__} that is no array: {error}") from error
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{wanted}, got a {type(values).__name__} of {array.dtype}")
    return torch.from_numpy(array.astype(np.float64))


def score_in_update(reward: Reward, images: Tensor, prompts: Sequence[str], update: int) -> Tensor:
    """Computes `score` in a training run.

    Raises:
        RewardNotFinite, FloatingPointError: a value is not finite.
        RewardFailed: any other error of the reward.
    """
    try:
        return score(reward, images, prompts)
    except (RewardNotFinite, FloatingPointError):
        raise
    except Exception as error:
        different = list(dict.fromkeys(prompts))
        shown = ", ".join(map(repr, different[:3])) + (f" and {len(different) - 3} more" if different[3:] else "")
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardFailed(f"reward {reward.name} failed on update {update}, prompts {shown}: {text}") from error
