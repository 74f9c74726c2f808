"""FLUX.2 folders with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.flux2 import Flux2, batch_statistics
from tests.backbones.pretrained.parts import CHAT, byte_level_tokenizer, louder, qwen3, seeded

SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True}
WIDTH = 8
"""Of a hidden state; prompts are three of them side by side."""


def mistral() -> tuple[Any, Any]:
    """A Mistral 3 of as many layers as the pipeline takes hidden states from, and its tokenizer.

    The published folder has a processor around the tokenizer, which needs torchvision and does the same to texts.
    """
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralVisionConfig,
        PreTrainedTokenizerFast,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer("<pad>", "[IMG]", "<|im_start|>", "<|im_end|>"),
        pad_token="<pad>",
        padding_side="left",
        chat_template=CHAT,
    )
    text = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=30,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32
    )
    image = tokenizer.convert_tokens_to_ids("[IMG]")
    config = Mistral3Config(vision_config=vision, text_config=text, image_token_index=image)
    return seeded(Mistral3ForConditionalGeneration, config), tokenizer


def autoencoder() -> Any:
    """A VAE that halves the image once, with batch statistics of its own for every channel."""
    from diffusers import AutoencoderKLFlux2

    vae = seeded(
        AutoencoderKLFlux2,
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
    )
    channels = len(vae.bn.running_mean)
    vae.bn.running_mean.copy_(torch.linspace(-1, 1, channels))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2, channels))
    return vae


def write(folder: Path, name: str = "flux2-dev") -> None:
    """A whole pipeline of ``name``: Mistral and embedded guidance (dev), or Qwen3 (klein), distilled unless base."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Pipeline,
        Flux2Transformer2DModel,
    )

    dev = name == "flux2-dev"
    encoder, tokenizer = mistral() if dev else qwen3(WIDTH, layers=27, head=True)
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": autoencoder(),
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "transformer": louder(
            seeded(Flux2Transformer2DModel, **Flux2.tiny, guidance_embeds=dev),
            "time_guidance_embed.timestep_embedder.linear_2",  # opens the gates of all blocks
            factor=16,
        ),
    }
    pipeline = Flux2Pipeline(**parts) if dev else Flux2KleinPipeline(**parts, is_distilled="base" not in name)
    pipeline.save_pretrained(folder)


def to_pipeline(backbone: PretrainedBackbone, latents: Tensor) -> Tensor:
    """Packed ``[N, tokens, C]`` to ``[N, C, rows, columns]``, which the pipelines pack themselves."""
    rows = backbone.size.height // backbone.multiple(backbone.configs)
    return latents.transpose(1, 2).unflatten(2, (rows, -1))


def from_pipeline(backbone: PretrainedBackbone, latents: Tensor) -> Tensor:
    """Packed latents: dev returns them, klein returns what its VAE decodes."""
    if latents.ndim == 3:
        return latents
    from diffusers import AutoencoderKLFlux2

    mean, std = batch_statistics(AutoencoderKLFlux2.from_pretrained(backbone.folder.path, subfolder="vae"))
    squares = torch.nn.functional.pixel_unshuffle(latents, 2)
    return (squares.flatten(2).transpose(1, 2) - mean) / std
