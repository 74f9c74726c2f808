"""FLUX.1: packed latents, T5 and CLIP text, guidance as an embedded number (dev) or none (schnell)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from jagg_core.backbones.pretrained.packed import (
    EIGHT_PIXELS,
    JOINT_ATTENTION,
    PackedBackbone,
    grid_ids,
    token_shift,
    unpack,
)
from jagg_core.backbones.pretrained.published import PublishedModel
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextShape
from jagg_core.backbones.repairs import ExactTimestep


class Flux(PackedBackbone):
    """diffusers' ``FluxTransformer2DModel``. Latents are packed: ``[tokens, 64]``, a token per 16x16 pixels."""

    transformer_class = "FluxTransformer2DModel"
    pipeline_class = "FluxPipeline"
    vae_class = "AutoencoderKL"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    tiny = MappingProxyType(
        {
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": [2, 2, 4],
        }
    )
    text_tokens = 512
    most_text_tokens = 512

    @classmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        return TextShape(text_tokens, transformer["joint_attention_dim"], transformer["pooled_projection_dim"])

    def exact_timestep(self) -> ExactTimestep:
        return ExactTimestep(self._transformer.time_text_embed, factor=1000)

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """Gives evenly spaced sigmas; FLUX.1 [dev] shifts them with the number of tokens."""
        return {"sigmas": np.linspace(1, 1 / steps, steps)} | token_shift(self.configs, self.latent_shape[0])

    def encode(self, pipeline: Any, prompt: str) -> Text:
        """Encodes a prompt; T5 is padded to its full length, as in training."""
        tokens, pooled, _ = pipeline.encode_prompt(prompt, prompt, max_sequence_length=self.max_text_tokens)
        return Text(tokens[0], pooled[0])

    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        velocity: Tensor = self._transformer(
            hidden_states=latents,
            timestep=sigma,
            guidance=self.embedded(latents, guidance),
            pooled_projections=text.pooled,
            encoder_hidden_states=text.tokens,
            txt_ids=latents.new_zeros(text.tokens.shape[1], 3),
            img_ids=grid_ids(*self.grid, latents.device),
            return_dict=False,
        )[0]
        return velocity

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        return super().decode_latents(vae, unpack(latents, *self.grid))


_CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": [16, 56, 56],
}

MODELS = (
    PublishedModel(
        name="flux-dev",
        hub_id="black-forest-labs/FLUX.1-dev",
        licence="FLUX.1 [dev] Non-Commercial",
        parameters=11_901_408_320,
        config=_CONFIG | {"guidance_embeds": True},
        family=Flux,
        vae=EIGHT_PIXELS,
        guidance="embedded",
        scale=3.5,
        description="FLUX.1 [dev], text to image, guidance embedded",
    ),
    PublishedModel(
        name="flux-schnell",
        hub_id="black-forest-labs/FLUX.1-schnell",
        licence="Apache-2.0",
        parameters=11_891_178_560,
        config=_CONFIG | {"guidance_embeds": False},
        family=Flux,
        vae=EIGHT_PIXELS,
        guidance="none",
        scale=1.0,
        description="FLUX.1 [schnell], text to image in few steps, no guidance",
    ),
)
