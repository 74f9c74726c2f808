"""Backbones: the only place that knows diffusers. `load_backbone` gives one by name."""

from jagg_core.backbones.protocol import Backbone, check_schedule, fingerprints_of, schedule_of
from jagg_core.backbones.registry import (
    BackboneEntry,
    check_backbone_name,
    list_backbones,
    load_backbone,
    read_options,
    register_backbone,
)
from jagg_core.choices import ScheduleName

__all__ = [
    "Backbone",
    "BackboneEntry",
    "ScheduleName",
    "check_backbone_name",
    "check_schedule",
    "fingerprints_of",
    "list_backbones",
    "load_backbone",
    "read_options",
    "register_backbone",
    "schedule_of",
]
