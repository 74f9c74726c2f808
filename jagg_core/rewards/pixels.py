"""Rewards computed from pixels alone. They ignore the prompt and are easily hacked: good for tests and short runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from jagg_core.rewards.base import check_images


class Colourfulness:
    """The metric M3 of Hasler and Suesstrunk, "Measuring colourfulness in natural images" (2003), on pixels in [0, 1].

    With ``rg = R - G`` and ``yb = (R + G) / 2 - B``: ``sqrt(var rg + var yb) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2)``,
    population variances over the pixels. 0 for any grey image. The published scale, for pixels up to 255, is 255 times
    this one.
    """

    name = "colourfulness"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the colourfulness of every image, ``[N]``.

        Raises:
            ValueError: the images are not RGB.
        """
        check_images(images, self.name, channels=(3,))
        red, green, blue = images.float().flatten(2).unbind(1)
        opponents = torch.stack([red - green, 0.5 * (red + green) - blue])
        spread = opponents.var(dim=-1, correction=0).sum(0).sqrt()
        return spread + 0.3 * opponents.mean(-1).square().sum(0).sqrt()


class Sharpness:
    """Mean absolute 4-neighbour Laplacian of the luminance, over the pixels that have all four neighbours.

    Luminance is Rec. 601 luma, ``0.299 R + 0.587 G + 0.114 B``, or the grey image itself. 0 for a constant image, 4 for
    a checkerboard of single black and white pixels, the largest value.
    """

    name = "sharpness"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the sharpness of every image, ``[N]``.

        Raises:
            ValueError: neither grey nor RGB, or a side of fewer than 3 pixels.
        """
        check_images(images, self.name, channels=(1, 3))
        if min(images.shape[2:]) < 3:
            raise ValueError(f"images: sharpness takes sides of 3 pixels or more, got {list(images.shape)}")
        channels = images.float().unbind(1)
        if len(channels) == 3:
            red, green, blue = channels
            luma = 0.299 * red + 0.587 * green + 0.114 * blue
        else:
            (luma,) = channels
        vertical = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1]
        horizontal = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
        # sums of two and of four equal numbers are exact, so a constant image gives exactly 0
        laplacian = vertical + horizontal - 4 * luma[:, 1:-1, 1:-1]
        return laplacian.abs().flatten(1).mean(1)


class Redness:
    """Mean of ``R - (G + B) / 2`` over the pixels: 1 for pure red, 0 for any grey, -0.5 for pure green or blue."""

    name = "redness"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the redness of every image, ``[N]``.

        Raises:
            ValueError: the images are not RGB.
        """
        check_images(images, self.name, channels=(3,))
        red, green, blue = images.float().flatten(2).unbind(1)
        return (red - 0.5 * (green + blue)).mean(-1)


class Ink:
    """Mean intensity of a grey image (the digits are bright on black, so this is the amount of ink)."""

    name = "ink"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the ink of every image, ``[N]``.

        Raises:
            ValueError: the images are not grey.
        """
        check_images(images, self.name, channels=(1,))
        return images.float().flatten(1).mean(1)


class Random:
    """A uniform number in [0, 1) from a digest of the pixels: the control for what training does without a reward.

    It is deterministic, as rewards must be, and no property of the image predicts it. It has no gradient.
    """

    name = "random"

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the number of every image, ``[N]``."""
        check_images(images, self.name, channels=(1, 3))
        digests = [hashlib.sha256(image.float().cpu().numpy().tobytes()).digest() for image in images.detach()]
        values = [int.from_bytes(digest[:4], "big") / 2**32 for digest in digests]
        return torch.tensor(values, dtype=torch.float32, device=images.device)
