"""Stable Diffusion 3.5: unpacked latents, two CLIPs and T5, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.packed import EIGHT_PIXELS, JOINT_ATTENTION, token_shift, vae_pixels
from jagg_core.backbones.pretrained.published import Configs, PublishedModel, Size
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextShape
from jagg_core.backbones.repairs import ExactTimestep


class StableDiffusion3(PretrainedBackbone):
    """diffusers' ``SD3Transformer2DModel``. Latents are ``[16, H/8, W/8]``; the transformer makes the patches."""

    transformer_class = "SD3Transformer2DModel"
    pipeline_class = "StableDiffusion3Pipeline"
    vae_class = "AutoencoderKL"
    block_lists = ("transformer_blocks",)
    lora_targets = (
        *JOINT_ATTENTION,
        "attn2.to_q",
        "attn2.to_k",
        "attn2.to_v",
        "attn2.to_out.0",
    )
    tiny = MappingProxyType(
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 12,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        }
    )
    text_tokens = 256
    most_text_tokens = 512

    @classmethod
    def multiple(cls, configs: Configs) -> int:
        """Counts the VAE's pixels in a patch."""
        return vae_pixels(configs) * int(configs.transformer["patch_size"])

    @classmethod
    def check_size(cls, configs: Configs, size: Size) -> None:
        """Checks also that the positions, a table, reach so far."""
        super().check_size(configs, size)
        largest = cls.multiple(configs) * int(configs.transformer["pos_embed_max_size"])
        for name, value in (("height", size.height), ("width", size.width)):
            if value > largest:
                raise ValueError(f"{name} must be at most {largest}, where the model's positions end, got {value}")

    @classmethod
    def shape_of(cls, configs: Configs, size: Size) -> tuple[int, ...]:
        pixels = vae_pixels(configs)
        return int(configs.transformer["in_channels"]), size.height // pixels, size.width // pixels

    @classmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        """Counts CLIP's 77 tokens, then T5's."""
        return TextShape(77 + text_tokens, transformer["joint_attention_dim"], transformer["pooled_projection_dim"])

    def exact_timestep(self) -> ExactTimestep:
        return ExactTimestep(self._transformer.time_text_embed, factor=1000)

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """Gives a shift by the number of tokens if the folder's scheduler has one; the published one has none."""
        multiple = self.multiple(self.configs)
        return token_shift(self.configs, (self.size.height // multiple) * (self.size.width // multiple))

    def encode(self, pipeline: Any, prompt: str) -> Text:
        """Encodes a prompt: CLIP's tokens, then T5's, padded as in training."""
        tokens, _, pooled, _ = pipeline.encode_prompt(
            prompt, prompt, prompt, do_classifier_free_guidance=False, max_sequence_length=self.max_text_tokens
        )
        return Text(tokens[0], pooled[0])

    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        velocity: Tensor = self._transformer(
            hidden_states=latents,
            timestep=sigma,
            encoder_hidden_states=text.tokens,
            pooled_projections=text.pooled,
            return_dict=False,
        )[0]
        return velocity


_CONFIG = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}

MODELS = (
    PublishedModel(
        name="sd3.5-medium",
        hub_id="stabilityai/stable-diffusion-3.5-medium",
        licence="Stability AI Community",
        parameters=2_243_171_520,
        config=(
            _CONFIG
            | {
                "num_layers": 24,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
            }
        ),
        family=StableDiffusion3,
        vae=EIGHT_PIXELS,
        guidance="cfg",
        scale=4.5,
        description="Stable Diffusion 3.5 Medium, text to image",
    ),
    PublishedModel(
        name="sd3.5-large",
        hub_id="stabilityai/stable-diffusion-3.5-large",
        licence="Stability AI Community",
        parameters=8_056_627_520,
        config=(
            _CONFIG
            | {
                "num_layers": 38,
                "num_attention_heads": 38,
                "caption_projection_dim": 2432,
                "pos_embed_max_size": 192,
                "dual_attention_layers": (),
            }
        ),
        family=StableDiffusion3,
        vae=EIGHT_PIXELS,
        guidance="cfg",
        scale=4.5,
        description="Stable Diffusion 3.5 Large, text to image",
    ),
)
