"""A small convolutional backbone whose weights lie in memory as ``channels_last`` and transposed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Convolutions(nn.Module):
    """A velocity of latents ``[3, 4, 4]``, which a convolution and a matrix of the pixels compute."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 3, 3, padding=1)
        self.mix = nn.Linear(16, 16)

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        level = sigma.to(latents.dtype)[:, None, None, None].expand(-1, 1, 4, 4)
        found = self.convolution(torch.cat([latents, level], dim=1)).tanh()
        mixed: Tensor = self.mix(found.flatten(2)).unflatten(2, (4, 4))
        return mixed


class ChannelsLast:
    """Images of 4x4 RGB pixels."""

    name = "channels-last"
    dataset = None
    prompts = ("a", "b")
    latent_shape = (3, 4, 4)

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.transformer = Convolutions().to(device)
        convolution, matrix = self.transformer.convolution.weight, self.transformer.mix.weight
        convolution.data = convolution.data.to(memory_format=torch.channels_last)
        matrix.data = matrix.data.t().contiguous().t()

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> Convolutions:
        """See `jagg_core.backbones.Backbone`."""
        return self.transformer

    def decode(self, latents: Tensor) -> Tensor:
        """See `jagg_core.backbones.Backbone`."""
        return latents.float().sigmoid()

    def enable_gradient_checkpointing(self) -> None:
        """See `jagg_core.backbones.Backbone`."""


def channels_last(device: torch.device | str, dtype: torch.dtype) -> ChannelsLast:
    """Loads it."""
    return ChannelsLast(device)
