"""Backbones by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from jagg_core.backbones.pixel import DIGITS_FLUX, PHOTOS_FLUX, PixelSpec, build_pixel_backbone
from jagg_core.policy import VelocityPolicy


class Backbone(Protocol):
    """What the commands need of a backbone."""

    @property
    def name(self) -> str:
        """Registered name."""
        ...

    @property
    def dataset(self) -> str | None:
        """Name of the image set whose classifier can judge the samples; None without one."""
        ...

    @property
    def prompts(self) -> tuple[str, ...]:
        """Prompts to draw from."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    @property
    def transformer(self) -> nn.Module:
        """The module that is trained."""
        ...

    def policy(self, prompts: Sequence[str], guidance: float = 1.0) -> VelocityPolicy:
        """A policy for these prompts, one per sample."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to images ``[N, C, H, W]`` in [0, 1]."""
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward."""
        ...


@dataclass(frozen=True)
class BackboneEntry:
    """A registered backbone: how to load it, and what to say of it without loading it."""

    name: str
    description: str
    load: Callable[[torch.device | str, torch.dtype], Backbone]


_REGISTRY: dict[str, BackboneEntry] = {}
TRAINED: dict[str, PixelSpec] = {}
"""The shipped backbones that ``python -m jagg_core backbones train`` can rebuild."""


def register_backbone(entry: BackboneEntry) -> None:
    """Add a backbone.

    Raises:
        ValueError: the name is taken.
    """
    if entry.name in _REGISTRY:
        raise ValueError(f"backbone {entry.name!r} is already registered")
    _REGISTRY[entry.name] = entry


def list_backbones() -> list[BackboneEntry]:
    """All registered backbones, by name."""
    return [_REGISTRY[name] for name in sorted(_REGISTRY)]


def check_backbone_name(name: str) -> None:
    """Raise ValueError, naming the nearest known name, unless ``name`` is registered."""
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backbone must be one of {sorted(_REGISTRY)}, found {name!r}{hint}")


def load_backbone(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Backbone:
    """Load a backbone in eval mode.

    Raises:
        ValueError: unknown name, a dtype that is not floating point, or a device that cannot be used here.
    """
    check_backbone_name(name)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, found {dtype}")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {error}") from error
    return _REGISTRY[name].load(device, dtype)


def _register_pixel(spec: PixelSpec, description: str) -> None:
    TRAINED[spec.name] = spec
    register_backbone(
        BackboneEntry(spec.name, description, lambda device, dtype: build_pixel_backbone(spec, device, dtype))
    )


_register_pixel(DIGITS_FLUX, "Flux architecture on 8x8 handwritten digits, class-conditional, trained, shipped")
_register_pixel(
    PHOTOS_FLUX, "Flux architecture on 32x32 crops of nine photographs, class-conditional, trained, shipped"
)
