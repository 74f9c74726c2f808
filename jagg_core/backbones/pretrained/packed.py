"""Latents packed two by two into tokens, as in FLUX and Qwen-Image, and shifts that grow with their number."""

from __future__ import annotations

import torch
from torch import Tensor

from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.published import Configs, Size
from jagg_core.schedule import dynamic_mu


class PackedBackbone(PretrainedBackbone):
    """A model whose latents are ``[tokens, channels]``, row by row."""

    @classmethod
    def multiple(cls, configs: Configs) -> int:
        """Counts the VAE's pixels in a token of two by two latents."""
        return 2 * vae_pixels(configs)

    @classmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        multiple = cls.multiple(configs)
        return (size.height // multiple) * (size.width // multiple), int(configs.transformer["in_channels"])

    @property
    def grid(self) -> tuple[int, int]:
        """Counts rows and columns of tokens."""
        multiple = self.multiple(self.configs)
        return self.size.height // multiple, self.size.width // multiple

    def embedded(self, latents: Tensor, guidance: float | None) -> Tensor | None:
        """Gives ``guidance`` as ``[N]`` fp32 to a transformer with ``guidance_embeds``; None to another.

        Raises:
            ValueError: the transformer embeds guidance and there is none.
        """
        if not self._transformer.config.guidance_embeds:
            return None
        if guidance is None:
            raise ValueError(f"guidance must be a number for {self.name}, got None; usual: {self.model.scale}")
        return latents.new_full([len(latents)], guidance, dtype=torch.float32)


JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
"""Linear layers of an attention over image and text tokens, by their names in diffusers."""

EIGHT_PIXELS = {"block_out_channels": (128, 256, 512, 512)}
"""What the shape of latents depends on, of the VAEs of FLUX, SD3 and Z-Image: 8x8 pixels per latent."""


def vae_pixels(configs: Configs) -> int:
    """Counts pixels per latent, for VAEs that halve the image between their levels."""
    return int(2 ** (len(configs.vae["block_out_channels"]) - 1))


def token_shift(configs: Configs, image_tokens: int) -> dict[str, float]:
    """Gives ``mu`` to a scheduler that shifts with the number of tokens, nothing to another."""
    scheduler = configs.scheduler
    if not scheduler.get("use_dynamic_shifting"):
        return {}
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    ends = (scheduler.get(name, usual) for name, usual in zip(names, (256, 4096, 0.5, 1.15), strict=True))
    return {"mu": dynamic_mu(image_tokens, *ends)}


def grid_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Computes positions ``[rows * columns, 3]`` of packed tokens: zero, row, column; fp32."""
    lengths = (torch.arange(length, dtype=torch.float32, device=device) for length in (rows, columns))
    row, column = torch.meshgrid(*lengths, indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3)


def unpack(latents: Tensor, rows: int, columns: int) -> Tensor:
    """Unpacks tokens ``[N, rows * columns, 4 C]`` to latents ``[N, C, 2 rows, 2 columns]``."""
    channels = latents.shape[-1] // 4
    squares = latents.reshape(len(latents), rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(len(latents), channels, 2 * rows, 2 * columns)
