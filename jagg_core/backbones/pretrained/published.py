"""How a published model is described: where its weights are, its configuration, and what it draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jagg_core.backbones.pretrained.base import PretrainedBackbone

GuidanceMode = Literal["embedded", "cfg", "none"]
"""Guidance by a number that the model embeds, by a second velocity without the prompt, or none."""

Calls = Literal["batched", "separate"]
"""Whether the two velocities of classifier-free guidance are one call of twice the batch, or two calls."""


@dataclass(frozen=True)
class Size:
    """Size of a sample: pixels, and frames of a video (1 for images)."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class PublishedModel:
    """A model as it was published.

    Attributes:
        name: registered name.
        hub_id: hub id of the weights.
        licence: licence by the model card.
        parameters: number of parameters in all transformers.
        config: published configuration of the transformer.
        family: class that loads the model.
        guidance: kind of guidance.
        scale: guidance that its makers or the field's trainers use; 1 is none.
        description: one line.
        size: size that the field's trainers use.
        transformers: number of transformers with this configuration.
        vae: entries of the VAE's configuration that decide the shape of latents.
    """

    name: str
    hub_id: str
    licence: str
    parameters: int
    config: Mapping[str, Any]
    family: type[PretrainedBackbone]
    guidance: GuidanceMode
    scale: float
    description: str
    size: Size = Size(512, 512)
    transformers: int = 1
    vae: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configs:
    """Configurations of the parts of a model folder, as diffusers stores them."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
