"""Pictures of samples."""

from __future__ import annotations

import io

import torch
from torch import Tensor

LARGE = 96
"""Largest side in pixels to which small images are enlarged."""


def image_grid(images: Tensor, columns: int, scale: int | None = None, gap: int = 1) -> Tensor:
    """Arranges images ``[N, C, H, W]`` in [0, 1] as one RGB picture ``[3, height, width]``, enlarged ``scale`` times.

    ``scale`` None: as many times as keep the longer side within `LARGE`, at least once.

    Raises:
        ValueError: not images, pixels that are not finite, or fewer than one column.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise ValueError(f"images must have shape [N, 1 or 3, H, W], N >= 1, got {list(images.shape)}")
    undefined = ~torch.isfinite(images).flatten(1).all(1)
    if undefined.any():
        raise ValueError(f"images must be finite, got NaN or infinite pixels in sample {int(undefined.nonzero()[0])}")
    if scale is None:
        scale = max(1, LARGE // max(images.shape[-2:]))
    if columns < 1 or scale < 1:
        raise ValueError(f"columns and scale must be at least 1, got {columns} and {scale}")
    large = images.detach().float().cpu().expand(-1, 3, -1, -1)
    large = large.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    rows = -(-len(large) // columns)
    height, width = (side + gap for side in large.shape[-2:])
    grid = torch.ones(3, rows * height + gap, columns * width + gap)
    for n, image in enumerate(large):
        top, left = (n // columns) * height + gap, (n % columns) * width + gap
        grid[:, top : top + height - gap, left : left + width - gap] = image
    return grid


def png_bytes(picture: Tensor) -> bytes:
    """Encodes an RGB picture ``[3, height, width]`` in [0, 1] as a PNG file. Needs Pillow."""
    from PIL import Image

    pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format="PNG")
    return buffer.getvalue()
