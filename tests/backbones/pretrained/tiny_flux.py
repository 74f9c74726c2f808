"""FLUX.1 folders with random weights."""

from __future__ import annotations

from pathlib import Path

from jagg_core.backbones.pretrained.flux import Flux
from tests.backbones.pretrained.parts import autoencoder_kl, clip, louder, seeded, t5


def write(folder: Path, name: str = "flux-dev") -> None:
    """A whole pipeline of ``name``: guidance embedded (dev) or not (schnell), and its scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    dev = name == "flux-dev"
    encoder, tokenizer = clip()
    encoder_2, tokenizer_2 = t5()
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if dev else 1.0, use_dynamic_shifting=dev),
        vae=autoencoder_kl(latent_channels=4),
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=louder(
            seeded(FluxTransformer2DModel, **Flux.tiny, guidance_embeds=dev), "time_text_embed.text_embedder.linear_1"
        ),
    ).save_pretrained(folder)
