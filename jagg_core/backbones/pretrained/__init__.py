"""Published models in diffusers' layout: a file per architecture, and what they share in `base`."""

from jagg_core.backbones.pretrained import flux, flux2, qwen_image, sd3, wan, z_image
from jagg_core.backbones.pretrained.base import PretrainedBackbone
from jagg_core.backbones.pretrained.loading import load_pretrained
from jagg_core.backbones.pretrained.policy import PretrainedPolicy
from jagg_core.backbones.pretrained.published import PublishedModel, Size

MODELS: tuple[PublishedModel, ...] = (
    *flux.MODELS,
    *sd3.MODELS,
    *qwen_image.MODELS,
    *flux2.MODELS,
    *z_image.MODELS,
    *wan.MODELS,
)
"""Every published model, in the order of its file."""

__all__ = ["MODELS", "PretrainedBackbone", "PretrainedPolicy", "PublishedModel", "Size", "load_pretrained"]
