"""FLUX.2: packed latents and one text encoder; guidance embedded (dev), by a second velocity (klein base), or none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jagg_core.backbones.pretrained.packed import EIGHT_PIXELS, JOINT_ATTENTION, PackedBackbone, unpack
from jagg_core.backbones.pretrained.published import PublishedModel
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextShape
from jagg_core.backbones.repairs import ExactTimestep

_MOST_SINGLE_BLOCKS = 48
"""Single-stream blocks of the largest model."""


class ExactProjection(ExactTimestep):
    """The sinusoids of sigma times 1000 in fp32. They, not the timestep, are cast to the transformer's dtype.

    The embedding casts sinusoids to the timestep's dtype, so that an fp32 timestep would not fit half-precision layers.
    """

    def __init__(self, embedding: Any) -> None:
        super().__init__(embedding.timestep_embedder, factor=1000)
        self._project = embedding.time_proj

    def _replace(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.sigma() is None:
            return args
        timestep, *others = super()._replace(module, args)
        return (self._project(timestep).to(args[0].dtype), *others)


class Flux2(PackedBackbone):
    """diffusers' ``Flux2Transformer2DModel``. Latents are packed: ``[tokens, 128]``, a token per 16x16 pixels.

    They are normalised by the VAE's batch statistics. Prompts have one length: the models read their padding.
    """

    transformer_class = "Flux2Transformer2DModel"
    pipeline_class = "Flux2Pipeline"
    vae_class = "AutoencoderKLFlux2"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
        # by full name: "attn.to_out" would also match the lists of the double-stream blocks
        *(f"single_transformer_blocks.{place}.attn.to_out" for place in range(_MOST_SINGLE_BLOCKS)),
    )
    tiny = MappingProxyType(
        {
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": [2, 2, 2, 2],
        }
    )
    text_tokens = 512

    @classmethod
    def text_shape(cls, transformer: Mapping[str, Any], text_tokens: int) -> TextShape:
        return TextShape(text_tokens, transformer["joint_attention_dim"])

    def exact_timestep(self) -> ExactTimestep:
        return ExactProjection(self._transformer.time_guidance_embed)

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """Gives evenly spaced sigmas and the pipeline's shift by the numbers of tokens and steps."""
        return {"sigmas": np.linspace(1, 1 / steps, steps), "mu": self._empirical_mu(steps)}

    def _empirical_mu(self, steps: int) -> float:
        import diffusers

        module = import_module(getattr(diffusers, self.pipeline_class).__module__)
        mu: float = module.compute_empirical_mu(image_seq_len=self.latent_shape[0], num_steps=steps)
        return mu

    def encode(self, pipeline: Any, prompt: str) -> Text:
        """Encodes a prompt, padded to the full length, as in training."""
        tokens, _ = pipeline.encode_prompt(prompt, max_sequence_length=self.max_text_tokens)
        return Text(tokens[0])

    def call(self, latents: Tensor, sigma: Tensor, text: TextBatch, guidance: float | None) -> Tensor:
        velocity: Tensor = self._transformer(
            hidden_states=latents,
            timestep=sigma,
            guidance=self.embedded(latents, guidance),
            encoder_hidden_states=text.tokens,
            txt_ids=positions(1, 1, text.tokens.shape[1], latents.device),
            img_ids=positions(*self.grid, 1, latents.device),
            return_dict=False,
        )[0]
        return velocity

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = batch_statistics(vae)
        squares = unpack(latents * std.to(latents) + mean.to(latents), *self.grid)
        images: Tensor = vae.decode(squares, return_dict=False)[0]
        return images


class Flux2Klein(Flux2):
    """The smaller FLUX.2 models: the same transformer, a Qwen3 text encoder, no embedded guidance."""

    pipeline_class = "Flux2KleinPipeline"


def positions(rows: int, columns: int, places: int, device: torch.device) -> Tensor:
    """Computes positions ``[rows * columns * places, 4]`` of tokens: zero, row, column, place in the text; int64."""
    row, column, place = torch.meshgrid(
        *(torch.arange(length, device=device) for length in (rows, columns, places)), indexing="ij"
    )
    return torch.stack([torch.zeros_like(row), row, column, place], dim=-1).reshape(-1, 4)


def batch_statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation ``[C]`` of the packed latents, from the VAE."""
    return vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)


_CONFIG = {
    "patch_size": 1,
    "in_channels": 128,
    "attention_head_dim": 128,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [32, 32, 32, 32],
    "rope_theta": 2000,
    "eps": 1e-6,
}
_DEV = _CONFIG | {
    "num_layers": 8,
    "num_single_layers": 48,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "guidance_embeds": True,
}
_KLEIN_4B = _CONFIG | {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
_KLEIN_9B = _CONFIG | {
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
    "guidance_embeds": False,
}


def _klein(size: str, base: bool, licence: str, parameters: int, config: dict[str, Any]) -> PublishedModel:
    return PublishedModel(
        name=f"flux2-klein-{'base-' if base else ''}{size.lower()}",
        hub_id=f"black-forest-labs/FLUX.2-klein-{'base-' if base else ''}{size}",
        licence=licence,
        parameters=parameters,
        config=config,
        family=Flux2Klein,
        vae=EIGHT_PIXELS,
        guidance="cfg" if base else "none",
        scale=4.0 if base else 1.0,
        description=f"FLUX.2 [klein] {'base ' if base else ''}{size}, text to image"
        + ("" if base else " in few steps, no guidance"),
    )


MODELS = (
    PublishedModel(
        name="flux2-dev",
        hub_id="black-forest-labs/FLUX.2-dev",
        licence="FLUX [dev] Non-Commercial",
        parameters=32_223_281_152,
        config=_DEV,
        family=Flux2,
        vae=EIGHT_PIXELS,
        guidance="embedded",
        scale=4.0,
        description="FLUX.2 [dev], text to image, guidance embedded",
    ),
    _klein("4B", False, "Apache-2.0", 3_875_544_576, _KLEIN_4B),
    _klein("4B", True, "Apache-2.0", 3_875_544_576, _KLEIN_4B),
    _klein("9B", False, "FLUX Non-Commercial", 9_078_581_248, _KLEIN_9B),
    _klein("9B", True, "FLUX Non-Commercial", 9_078_581_248, _KLEIN_9B),
)
