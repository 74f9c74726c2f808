"""The backbones that ship: small class-conditional transformers on pixels, trained by rectified flow."""

from jagg_core.backbones.pixel.base import (
    PixelBackbone,
    PixelModule,
    PixelPolicy,
    PixelSpec,
    build_pixel_backbone,
    save_pixel_weights,
    spec_json,
    weights_path,
)
from jagg_core.backbones.pixel.emoji import EMOJI_FLUX, WordFlux, WordFluxSpec
from jagg_core.backbones.pixel.flux import DIGITS_FLUX, PHOTOS_FLUX, FluxSpec, PixelFlux
from jagg_core.backbones.pixel.qwen_image import PHOTOS_QWEN, PixelQwenImage, QwenImageSpec

__all__ = [
    "DIGITS_FLUX",
    "EMOJI_FLUX",
    "PHOTOS_FLUX",
    "PHOTOS_QWEN",
    "FluxSpec",
    "PixelBackbone",
    "PixelFlux",
    "PixelModule",
    "PixelPolicy",
    "PixelQwenImage",
    "PixelSpec",
    "QwenImageSpec",
    "WordFlux",
    "WordFluxSpec",
    "build_pixel_backbone",
    "save_pixel_weights",
    "spec_json",
    "weights_path",
]
