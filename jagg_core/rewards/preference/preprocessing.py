"""Images as CLIP networks take them, in torch: resized, cut or padded to a square, normalised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jagg_core.hub import read_object

Fit = Literal["crop", "pad"]
"""Way to a square: the centre of the image is cut out, or black is added around it."""

_BICUBIC = 3
"""PIL's number of the filter, as preprocessor_config.json writes it."""


@dataclass(frozen=True)
class Preprocessing:
    """Converts images in [0, 1] to a network's input; first rounds to 8 bits, as the published code does.

    ``crop`` is what transformers' CLIPImageProcessor does with PIL: the short side to ``resized`` pixels, columns first
    and then rows, each rounded to 8 bits, then the centre of ``size`` pixels. Few pixels differ from it, by one of 255.
    ``pad`` is what HPSv2 does (ResizeMaxSize of its transform.py): the long side to ``size`` pixels, without rounding
    and with the filter's overshoots, and black around the rest. Both filters are bicubic and antialiased.

    Attributes:
        size: side of the square, in pixels.
        resized: short side after resizing, in pixels; at least ``size``. Not used by ``pad``.
        mean: subtracted from each channel.
        std: divisor of each channel.
        fit: ``crop`` or ``pad``.
    """

    size: int
    resized: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Fit = "crop"

    def __call__(self, images: Tensor) -> Tensor:
        """Converts images ``[N, 3, H, W]`` in [0, 1] to ``[N, 3, size, size]``, fp32."""
        images = _rounded(images.float())
        squares = self._cropped(images) if self.fit == "crop" else self._padded(images)
        mean, std = (squares.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (squares - mean) / std

    def _cropped(self, images: Tensor) -> Tensor:
        short = min(images.shape[2:])
        height, width = (int(self.resized * side / short) for side in images.shape[2:])
        images = _rounded(_resize(_rounded(_resize(images, [images.shape[2], width])), [height, width]))
        top, left = ((side - self.size) // 2 for side in images.shape[2:])
        return images[:, :, top : top + self.size, left : left + self.size]

    def _padded(self, images: Tensor) -> Tensor:
        scale = self.size / max(images.shape[2:])
        height, width = (max(1, round(side * scale)) for side in images.shape[2:])
        below, right = self.size - height, self.size - width
        images = _resize(images, [height, width])
        return F.pad(images, (right // 2, right - right // 2, below // 2, below - below // 2))


def _rounded(images: Tensor) -> Tensor:
    clamped = images.clamp(0, 1)
    rounded = clamped.mul(255).round().div(255)
    # rounding has no gradient: the clamped image's is used (the straight-through estimator)
    return clamped + (rounded - clamped).detach() if clamped.requires_grad else rounded


def _resize(images: Tensor, size: list[int]) -> Tensor:
    if list(images.shape[2:]) == size:
        return images
    with torch.autocast(images.device.type, enabled=False):
        return F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True)


def read_preprocessing(file: Path, size: int, fit: Fit) -> Preprocessing:
    """Reads a ``preprocessor_config.json`` for a network that takes squares of ``size`` pixels.

    Raises:
        ValueError: it cannot be read, or asks for steps that `Preprocessing` does not have.
    """
    read = read_object(file)
    mean, std = (_three(read, name, file) for name in ("image_mean", "image_std"))
    resized, cropped = _side(read.get("size"), "shortest_edge"), _side(read.get("crop_size"), "height", "width")
    if cropped != size:
        raise ValueError(f"processor: crop_size in {file} must be the network's {size}, got {read.get('crop_size')}")
    if resized is None or resized < size:
        raise ValueError(f"processor: size in {file} must be a shortest_edge of {size} or more, got {read.get('size')}")
    steps = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
    wrong = [step for step in steps if not read.get(step, True)]
    if wrong or read.get("resample", _BICUBIC) != _BICUBIC:
        setting = f"{wrong[0]} false" if wrong else f"resample {read['resample']}"
        raise ValueError(f"processor: {file} must ask for {', '.join(steps)} and resample {_BICUBIC}, got {setting}")
    return Preprocessing(size, resized, mean, std, fit)


def _three(read: dict[str, Any], name: str, file: Path) -> tuple[float, ...]:
    values = read.get(name)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"processor: {name} in {file} must be three numbers, got {values!r}")
    return tuple(map(float, values))


def _side(value: Any, *names: str) -> int | None:
    """Reads a length from a number, or from an object whose ``names`` all hold it; None from anything else."""
    values = [value.get(name) for name in names] if isinstance(value, dict) else [value]
    return values[0] if isinstance(values[0], int) and len(set(values)) == 1 else None
