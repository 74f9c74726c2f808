"""Folders of CLIP networks small enough for tests, of the classes and files that the published ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.backbones.pretrained.parts import clip, seeded

SIZE = 28
"""Side of the images that the network takes, in pixels."""


def write_clip(folder: Path, act: str = "quick_gelu", projection: int = 12) -> Any:
    """Write network, tokenizer and preprocessing; returns the CLIPModel that was written."""
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    text, tokenizer = clip()
    vision = {
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": 14,
        "hidden_act": act,
        "initializer_factor": 8.0,
    }
    words = text.config.to_dict() | {"intermediate_size": 64, "hidden_act": act, "initializer_factor": 8.0}
    config = CLIPConfig(text_config=words, vision_config=vision, projection_dim=projection)
    model = seeded(CLIPModel, config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = {"height": SIZE, "width": SIZE}
    CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=side).save_pretrained(folder)
    return model
