"""Z-Image folders with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from jagg_core.backbones.pretrained.z_image import ZImage
from tests.backbones.pretrained.parts import autoencoder_kl, louder, qwen3, seeded


def write(folder: Path, name: str = "z-image-turbo") -> None:
    """A whole pipeline of ``name``, with learned tokens at the padding that differ from zero."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    encoder, tokenizer = qwen3(layers=2)
    transformer = seeded(ZImageTransformer2DModel, **ZImage.tiny)
    with torch.no_grad():
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            token.copy_(torch.linspace(-1, 1, token.numel()).reshape(token.shape))
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if name == "z-image-turbo" else 6.0),
        vae=autoencoder_kl(latent_channels=4),
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=louder(transformer, "cap_embedder.1"),
    ).save_pretrained(folder)
