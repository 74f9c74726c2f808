"""Z-Image: one stream of image and text tokens, a time that is 0 for noise, guidance (base) or none (Turbo)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.packed import EIGHT_PIXELS, token_shift, vae_pixels
from jagg_core.backbones.pretrained.published import Configs, PublishedModel, Size
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextShape
from jagg_core.backbones.repairs import ExactTimestep

PATCH = 2
"""Latents per side of a token; the pipeline uses no other."""


class ReversedTimestep(ExactTimestep):
    """The time embedding sees ``(1 - sigma) * factor``: 0 is noise."""

    def sigma(self) -> Tensor | None:
        sigma = super().sigma()
        return None if sigma is None else 1 - sigma


class ZImage(PretrainedBackbone):
    """diffusers' ``ZImageTransformer2DModel``. Latents are the VAE's: ``[16, H / 8, W / 8]``.

    The network predicts data minus noise. It pads every text and image to a multiple of 32 tokens by itself, with
    learned tokens that attention sees, so a text must reach it without padding.

    A guidance of 1 is none, as for all models; the pipeline's ``guidance_scale`` is lower by 1 for the same velocity.
    """

    transformer_class = "ZImageTransformer2DModel"
    pipeline_class = "ZImagePipeline"
    vae_class = "AutoencoderKL"
    block_lists = ("noise_refiner", "context_refiner", "layers")
    lora_targets = (
        "attention.to_q",
        "attention.to_k",
        "attention.to_v",
        "attention.to_out.0",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )
    # its time embedding has 280,000 parameters more, at any size
    tiny = MappingProxyType(
        {
            "in_channels": 4,
            "dim": 16,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [4, 2, 2],
            "axes_lens": [128, 32, 32],
        }
    )
    text_tokens = 512

    @classmethod
    def multiple(cls, configs: Configs) -> int:
        """Counts the VAE's pixels in a token of two by two latents."""
        return vae_pixels(configs) * PATCH

    @classmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        pixels = vae_pixels(configs)
        return int(configs.transformer["in_channels"]), size.height // pixels, size.width // pixels

    @classmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        return TextShape(text_tokens, transformer["cap_feat_dim"])

    def exact_timestep(self) -> ExactTimestep:
        return ReversedTimestep(self._transformer.t_embedder, factor=self._transformer.t_scale)

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        _, rows, columns = self.latent_shape
        tokens = (rows // PATCH) * (columns // PATCH)
        return {"sigmas": np.linspace(1, 1 / steps, steps)} | token_shift(self.configs, tokens)

    def encode(self, pipeline: Any, prompt: str) -> Text:
        texts, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=self.max_text_tokens
        )
        return Text(texts[0])

    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        texts = [tokens[:length] for tokens, length in zip(text.tokens, text.lengths(), strict=True)]
        frames = list(latents.unsqueeze(2))
        towards_data = self._transformer(frames, 1 - sigma, texts)[0]
        return -torch.stack(towards_data).squeeze(2)


_CONFIG = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}

MODELS = (
    PublishedModel(
        name="z-image-turbo",
        hub_id="Tongyi-MAI/Z-Image-Turbo",
        licence="Apache-2.0",
        parameters=6_154_908_736,
        config=_CONFIG,
        family=ZImage,
        vae=EIGHT_PIXELS,
        guidance="none",
        scale=1.0,
        description="Z-Image-Turbo, text to image in few steps, no guidance",
    ),
    PublishedModel(
        name="z-image",
        hub_id="Tongyi-MAI/Z-Image",
        licence="Apache-2.0",
        parameters=6_154_908_736,
        config=_CONFIG,
        family=ZImage,
        vae=EIGHT_PIXELS,
        guidance="cfg",
        scale=5.0,
        description="Z-Image, text to image",
    ),
)
