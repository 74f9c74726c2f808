"""The shipped backbones of the Flux architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_core.backbones.pixel.base import PixelModule, PixelSpec


@dataclass(frozen=True)
class FluxSpec(PixelSpec):
    """A small ``FluxTransformer2DModel``: a prompt is one text token and the pooled projection."""

    double_blocks: int = 2
    single_blocks: int = 4

    def build(self) -> PixelFlux:
        """Builds the module with random weights."""
        return PixelFlux(self)


class PixelFlux(PixelModule):
    """diffusers' ``FluxTransformer2DModel`` on patches of pixels."""

    block_lists = ("transformer_blocks", "single_transformer_blocks")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, spec: FluxSpec) -> None:
        from diffusers import FluxTransformer2DModel

        tokens, channels = spec.latent_shape
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=channels,
            num_layers=spec.double_blocks,
            num_single_layers=spec.single_blocks,
            attention_head_dim=spec.head_dim,
            num_attention_heads=spec.heads,
            joint_attention_dim=spec.text_dim,
            pooled_projection_dim=spec.text_dim,
            axes_dims_rope=spec.rope_axes,
        )
        super().__init__(transformer, 1000, len(spec.words), spec.text_dim)
        rows, columns = torch.meshgrid(torch.arange(spec.side), torch.arange(spec.side), indexing="ij")
        image_ids = torch.stack([torch.zeros(tokens), rows.flatten(), columns.flatten()], dim=-1)
        self.register_buffer("image_ids", image_ids, persistent=False)
        self.register_buffer("text_ids", torch.zeros(1, 3), persistent=False)

    def call(self, latents: Tensor, sigma: Tensor, prompts: Tensor) -> Tensor:
        """Computes velocities ``[N, tokens, channels]``."""
        return self.predict(latents, sigma, prompts.unsqueeze(1), prompts)

    def predict(self, latents: Tensor, sigma: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """Computes `call`'s velocities from text tokens ``[N, L, width]`` and pooled prompts ``[N, width]``."""
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=sigma,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )[0]
        return velocity


DIGITS_FLUX = FluxSpec(
    name="digits-flux",
    dataset="digits",
    prompts=tuple("0123456789"),
    image_channels=1,
    size=8,
    patch=2,
    mean=0.305,
    std=0.376,
)

PHOTOS_FLUX = FluxSpec(
    name="photos-flux",
    dataset="photos",
    prompts=("astronaut", "cat", "coffee", "galaxies", "tissue", "retina", "rocket", "temple", "flower"),
    image_channels=3,
    size=32,
    patch=4,
    mean=0.402,
    std=0.287,
)
