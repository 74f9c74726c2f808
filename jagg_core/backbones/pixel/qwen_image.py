"""The shipped backbone of the Qwen-Image architecture."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from jagg_core.backbones.pixel.base import PixelModule, PixelSpec
from jagg_core.backbones.pixel.flux import PHOTOS_FLUX
from jagg_core.backbones.repairs import unread_text_stream


@dataclass(frozen=True)
class QwenImageSpec(PixelSpec):
    """A small ``QwenImageTransformer2DModel``: a prompt is a few text tokens and nothing else."""

    blocks: int = 5
    text_tokens: int = 4

    def build(self) -> PixelQwenImage:
        """Builds the module with random weights."""
        return PixelQwenImage(self)


class PixelQwenImage(PixelModule):
    """diffusers' ``QwenImageTransformer2DModel`` on patches of pixels."""

    block_lists = ("transformer_blocks",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, spec: QwenImageSpec) -> None:
        from diffusers import QwenImageTransformer2DModel

        _, channels = spec.latent_shape
        transformer = QwenImageTransformer2DModel(
            patch_size=1,
            in_channels=channels,
            out_channels=channels,
            num_layers=spec.blocks,
            attention_head_dim=spec.head_dim,
            num_attention_heads=spec.heads,
            joint_attention_dim=spec.text_dim,
            axes_dims_rope=spec.rope_axes,
        )
        super().__init__(transformer, 1, len(spec.words), spec.text_tokens * spec.text_dim)
        self.text_shape = (spec.text_tokens, spec.text_dim)
        self.image_shape = (1, spec.side, spec.side)
        for module in unread_text_stream(transformer):
            module.requires_grad_(False)

    def call(self, latents: Tensor, sigma: Tensor, prompts: Tensor) -> Tensor:
        """Computes velocities ``[N, tokens, channels]``."""
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            encoder_hidden_states=prompts.unflatten(1, self.text_shape),
            timestep=sigma,
            img_shapes=[self.image_shape] * len(latents),
            return_dict=False,
        )[0]
        return velocity


PHOTOS_QWEN = QwenImageSpec(
    name="photos-qwen",
    dataset="photos",
    prompts=PHOTOS_FLUX.prompts,
    image_channels=PHOTOS_FLUX.image_channels,
    size=PHOTOS_FLUX.size,
    patch=PHOTOS_FLUX.patch,
    mean=PHOTOS_FLUX.mean,
    std=PHOTOS_FLUX.std,
)
