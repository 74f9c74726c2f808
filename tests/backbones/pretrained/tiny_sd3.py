"""Stable Diffusion 3.5 folders with random weights."""

from __future__ import annotations

from pathlib import Path

from jagg_core.backbones.pretrained.sd3 import StableDiffusion3
from tests.backbones.pretrained.parts import autoencoder_kl, clip, louder, seeded, t5


def write(folder: Path, name: str = "sd3.5-medium") -> None:
    """A whole pipeline of ``name``: with a layer of dual attention (medium) or without (large)."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    dual = StableDiffusion3.tiny["dual_attention_layers"] if name == "sd3.5-medium" else ()
    config = dict(StableDiffusion3.tiny) | {"dual_attention_layers": dual}
    (encoder, tokenizer), (encoder_2, tokenizer_2) = (clip(width=8, projection=True) for _ in range(2))
    encoder_3, tokenizer_3 = t5()
    StableDiffusion3Pipeline(
        transformer=louder(seeded(SD3Transformer2DModel, **config), "time_text_embed.text_embedder.linear_1"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder_kl(latent_channels=4),
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=encoder_3,
        tokenizer_3=tokenizer_3,
    ).save_pretrained(folder)
