"""Qwen-Image: packed latents, unpadded text by Qwen2.5-VL, classifier-free guidance that keeps the norm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.packed import JOINT_ATTENTION, PackedBackbone, token_shift, unpack
from jagg_core.backbones.pretrained.published import Configs, PublishedModel, Size
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextShape
from jagg_core.backbones.repairs import ExactTimestep, unread_text_stream

VARIANTS = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
"""Settings of the same transformer class that need more than a prompt: editing, layers, distilled guidance."""


class QwenImage(PackedBackbone):
    """diffusers' ``QwenImageTransformer2DModel``. Latents are packed: ``[tokens, 64]``, a token per 16x16 pixels."""

    transformer_class = "QwenImageTransformer2DModel"
    pipeline_class = "QwenImagePipeline"
    vae_class = "AutoencoderKLQwenImage"
    block_lists = ("transformer_blocks",)
    lora_targets = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    tiny = MappingProxyType(
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": [2, 2, 4],
        }
    )
    text_tokens = 512
    most_text_tokens = 1024
    negative_prompt = " "

    @classmethod
    def multiple(cls, configs: Configs) -> int:
        """Counts the VAE's pixels in a token of two by two latents."""
        return 2 * 2 ** len(configs.vae["temperal_downsample"])

    @classmethod
    def check_size(cls, configs: Configs, size: Size) -> None:
        """Checks also that the transformer draws from a prompt alone.

        Raises:
            ValueError: the size does not fit, or the transformer edits images or draws layers.
        """
        for name in VARIANTS:
            if configs.transformer.get(name):
                raise ValueError(
                    f"path: the transformer's {name} must be off for text to image, got "
                    f"{configs.transformer[name]!r}: another model of the Qwen-Image family?"
                )
        super().check_size(configs, size)

    @classmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        return TextShape(text_tokens, transformer["joint_attention_dim"])

    def exact_timestep(self) -> ExactTimestep:
        """Names the time embedding, which multiplies sigma by 1000 itself."""
        return ExactTimestep(self._transformer.time_text_embed, factor=1)

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """Gives evenly spaced sigmas and a shift by the number of tokens, as FLUX.1 [dev] does.

        Raises:
            ValueError: one step, which cannot both begin at 1 and end at the scheduler's terminal sigma.
        """
        if steps < 2 and self.configs.scheduler.get("shift_terminal"):
            raise ValueError(f"steps must be at least 2 for a schedule with a terminal sigma, got {steps}")
        return {"sigmas": np.linspace(1, 1 / steps, steps)} | token_shift(self.configs, self.latent_shape[0])

    def encode(self, pipeline: Any, prompt: str) -> Text:
        """Encodes a prompt without padding."""
        tokens, _ = pipeline.encode_prompt(prompt, max_sequence_length=self.max_text_tokens)
        return Text(tokens[0])

    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        rows, columns = self.grid
        velocity: Tensor = self._transformer(
            hidden_states=latents,
            timestep=sigma,
            encoder_hidden_states=text.tokens,
            encoder_hidden_states_mask=text.mask,
            img_shapes=[[(1, rows, columns)]] * len(latents),
            return_dict=False,
            **text_lengths(self._transformer, text),
        )[0]
        return velocity

    def combine(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Guides, and scales every token back to its conditional norm; fp32."""
        combined = super().combine(conditional, unconditional, scale)
        norm, wanted = (torch.linalg.vector_norm(part, dim=-1, keepdim=True) for part in (combined, conditional))
        rescaled: Tensor = combined * (wanted / norm)
        return rescaled

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        """Decodes one frame by the video VAE."""
        unpacked = unpack(latents, *self.grid).unsqueeze(2)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        images: Tensor = vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
        return images

    def unread(self) -> list[nn.Module]:
        """Returns the end of the last block's text stream."""
        return unread_text_stream(self._transformer)


def text_lengths(transformer: nn.Module, text: TextBatch) -> dict[str, list[int]]:
    """Gives ``txt_seq_lens`` to a transformer that takes it: positions for all tokens, padding included.

    diffusers before 0.37 requires it, 0.37 and 0.38 ignore it, later releases refuse it.

    Raises:
        ValueError: padded prompts under a diffusers that takes a mask and does not use it.
    """
    if "txt_seq_lens" not in inspect.signature(transformer.forward).parameters:
        return {}
    if text.mask is not None and not uses_mask():
        raise ValueError(
            "prompts of different length need diffusers 0.37 or later: before, their padding is attended to"
        )
    return {"txt_seq_lens": [text.tokens.shape[1]] * len(text.tokens)}


def uses_mask() -> bool:
    """Tells whether the installed transformer reads the mask of its prompts; for one that takes their lengths."""
    return hasattr(
        import_module("diffusers.models.transformers.transformer_qwenimage"), "compute_text_seq_len_from_mask"
    )


MODELS = (
    PublishedModel(
        name="qwen-image",
        hub_id="Qwen/Qwen-Image",
        licence="Apache-2.0",
        parameters=20_430_401_088,
        config=(
            {
                "patch_size": 2,
                "in_channels": 64,
                "out_channels": 16,
                "num_layers": 60,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 3584,
                "guidance_embeds": False,
                "axes_dims_rope": [16, 56, 56],
            }
        ),
        family=QwenImage,
        vae={"temperal_downsample": (False, True, True)},
        guidance="cfg",
        scale=4.0,
        description="Qwen-Image, text to image, classifier-free guidance",
    ),
)
