"""Backbones by name: registered ones, and your own as ``module:function``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from jagg_core.backbones.pixel import DIGITS_FLUX, PHOTOS_FLUX, PixelSpec, build_pixel_backbone
from jagg_core.imports import import_object
from jagg_core.policy import VelocityPolicy


class Backbone(Protocol):
    """What the commands need of a backbone."""

    @property
    def name(self) -> str:
        """Name, for records and reports."""
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


Loader = Callable[[torch.device | str, torch.dtype], Backbone]
"""Loads a backbone in eval mode on a device, in a dtype."""


@dataclass(frozen=True)
class BackboneEntry:
    """A registered backbone: how to load it, and what to say of it without loading it."""

    name: str
    description: str
    load: Loader


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
    """Check that ``name`` is registered, or that ``module:function`` names a function of ``(device, dtype)``.

    Raises:
        ValueError: it does not; names the nearest known name and what is allowed.
    """
    _loader(name)


def load_backbone(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Backbone:
    """Load a backbone in eval mode.

    ``name``: one of `list_backbones`, or ``module:function`` for your own: a function ``(device, dtype) -> Backbone``.

    Raises:
        ValueError: unknown name, a dtype that is not floating point, a device that cannot be used here, or a function
            whose result lacks a member of `Backbone`.
    """
    load = _loader(name)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, found {dtype}")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {error}") from error
    backbone = load(device, dtype)
    _require_members(name, backbone)
    return backbone


def _allowed() -> str:
    return f"one of {sorted(_REGISTRY)} or module:function with function(device, dtype) -> Backbone"


def _loader(name: str) -> Loader:
    if ":" in name:
        found = import_object(name, "backbone", _allowed())
        if not callable(found) or not _takes_device_and_dtype(found):
            raise ValueError(f"backbone {name!r} must be a function of (device, dtype), found {found!r}")
        return cast(Loader, found)
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backbone must be {_allowed()}, found {name!r}{hint}")
    return _REGISTRY[name].load


def _takes_device_and_dtype(function: Callable[..., object]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not show theirs
        return True
    try:
        signature.bind("cpu", torch.float32)
    except TypeError:
        return False
    return True


def _require_members(name: str, backbone: object) -> None:
    members = {key: value for key, value in vars(Backbone).items() if not key.startswith("_")}
    missing = [key for key in members if not hasattr(backbone, key)]
    methods = [key for key, value in members.items() if isinstance(value, FunctionType) and key not in missing]
    wrong = [key for key in methods if not callable(getattr(backbone, key))]
    if missing or wrong:
        found = [f"no {key}" for key in missing] + [f"a {key} that is no method" for key in wrong]
        raise ValueError(
            f"backbone {name!r} gave an object of type {type(backbone).__name__} with {', '.join(found)}; "
            f"a Backbone has {', '.join(members)}"
        )


def _register_pixel(spec: PixelSpec, description: str) -> None:
    TRAINED[spec.name] = spec
    register_backbone(
        BackboneEntry(spec.name, description, lambda device, dtype: build_pixel_backbone(spec, device, dtype))
    )


_register_pixel(DIGITS_FLUX, "Flux architecture on 8x8 handwritten digits, class-conditional, trained, shipped")
_register_pixel(
    PHOTOS_FLUX, "Flux architecture on 32x32 crops of nine photographs, class-conditional, trained, shipped"
)
