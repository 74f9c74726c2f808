"""Models that people train, in diffusers' layout: a file per architecture, and what they share in `base`."""

from jagg_core.backbones.pretrained import flux
from jagg_core.backbones.pretrained.base import (
    PretrainedBackbone,
    PretrainedPolicy,
    PublishedModel,
    Size,
    load_pretrained,
)

MODELS: tuple[PublishedModel, ...] = (*flux.MODELS,)
"""Every published model, in the order of its file."""

__all__ = ["MODELS", "PretrainedBackbone", "PretrainedPolicy", "PublishedModel", "Size", "load_pretrained"]
