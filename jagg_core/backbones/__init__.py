"""Backbones: the only place that knows diffusers. `load_backbone` gives one by name."""

from jagg_core.backbones.registry import (
    Backbone,
    BackboneEntry,
    check_backbone_name,
    list_backbones,
    load_backbone,
    register_backbone,
)

__all__ = [
    "Backbone",
    "BackboneEntry",
    "check_backbone_name",
    "list_backbones",
    "load_backbone",
    "register_backbone",
]
