"""Wan folders with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jagg_core.backbones.pretrained.wan import Wan
from tests.backbones.pretrained.parts import seeded, t5

BOUNDARY = 0.875


def write(folder: Path, name: str = "wan2.1-1.3b") -> None:
    """A whole pipeline of ``name``: with 2.2's VAE and a timestep per token (5B), or with two experts (A14B)."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    channels = 6 if name == "wan2.2-5b" else 4
    encoder, tokenizer = t5(multilingual=True)
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae(channels, patched=name == "wan2.2-5b"),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=transformer(channels),
        transformer_2=transformer(channels, other=True) if name == "wan2.2-a14b" else None,
        boundary_ratio=BOUNDARY if name == "wan2.2-a14b" else None,
        expand_timesteps=name == "wan2.2-5b",
    ).save_pretrained(folder)


def transformer(channels: int, other: bool = False) -> Any:
    """A tiny transformer; the ``other`` of two experts has other weights."""
    from diffusers import WanTransformer3DModel

    made = seeded(WanTransformer3DModel, **dict(Wan.tiny) | {"in_channels": channels, "out_channels": channels})
    if other:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(-1)
    return made


def vae(channels: int, patched: bool) -> Any:
    """A VAE over 4x4 pixels and groups of 4 frames; ``patched`` over 8x8 pixels, with residual sampling as in 2.2."""
    from diffusers import AutoencoderKLWan

    pixels = 12 if patched else 3
    return seeded(
        AutoencoderKLWan,
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1 * channel for channel in range(channels)],
        latents_std=[1.0 + 0.1 * channel for channel in range(channels)],
        is_residual=patched,
        in_channels=pixels,
        out_channels=pixels,
        patch_size=2 if patched else None,
        scale_factor_temporal=4,
        scale_factor_spatial=8 if patched else 4,
    )
