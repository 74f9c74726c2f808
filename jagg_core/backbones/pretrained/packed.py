"""Latents packed two by two into tokens, as FLUX and Qwen-Image have them, and shifts that grow with their number."""

from __future__ import annotations

import torch
from torch import Tensor

from jagg_core.backbones.pretrained.base import Configs, PretrainedBackbone, Size
from jagg_core.schedule import dynamic_mu


class PackedBackbone(PretrainedBackbone):
    """A model whose latents are ``[tokens, channels]``, row by row."""

    @classmethod
    def multiple(cls, configs: Configs) -> int:
        """See `PretrainedBackbone`: VAE pixels, packed two by two."""
        return 2 * vae_pixels(configs)

    @classmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        """See `PretrainedBackbone`."""
        multiple = cls.multiple(configs)
        return (size.height // multiple) * (size.width // multiple), int(configs.transformer["in_channels"])

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        multiple = self.multiple(self.configs)
        return self.size.height // multiple, self.size.width // multiple


EIGHT_PIXELS = {"block_out_channels": (128, 256, 512, 512)}
"""What the shape of latents depends on, of the VAEs of FLUX, SD3 and Z-Image: 8x8 pixels per latent."""


def vae_pixels(configs: Configs) -> int:
    """Pixels per latent, for VAEs that halve the image between their levels."""
    return int(2 ** (len(configs.vae["block_out_channels"]) - 1))


def token_shift(configs: Configs, image_tokens: int) -> dict[str, float]:
    """``mu`` for a scheduler that shifts with the number of tokens, nothing for another."""
    scheduler = configs.scheduler
    if not scheduler.get("use_dynamic_shifting"):
        return {}
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    ends = (scheduler.get(name, usual) for name, usual in zip(names, (256, 4096, 0.5, 1.15), strict=True))
    return {"mu": dynamic_mu(image_tokens, *ends)}


def grid_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Positions ``[rows * columns, 3]`` of packed tokens: zero, row, column; fp32."""
    lengths = (torch.arange(length, dtype=torch.float32, device=device) for length in (rows, columns))
    row, column = torch.meshgrid(*lengths, indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3)


def unpack(latents: Tensor, rows: int, columns: int) -> Tensor:
    """Packed tokens ``[N, rows * columns, 4 C]`` to latents ``[N, C, 2 rows, 2 columns]``."""
    channels = latents.shape[-1] // 4
    squares = latents.reshape(len(latents), rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(len(latents), channels, 2 * rows, 2 * columns)
