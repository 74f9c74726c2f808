"""Backbones by name: registered ones, and yours as ``module:function``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import cast

import torch

from jagg_core.backbones.pixel import (
    DIGITS_FLUX,
    EMOJI_FLUX,
    PHOTOS_FLUX,
    PHOTOS_QWEN,
    PixelSpec,
    build_pixel_backbone,
)
from jagg_core.backbones.pretrained import MODELS, load_pretrained
from jagg_core.backbones.protocol import Backbone
from jagg_core.backbones.trained import check_weights, load_weights
from jagg_core.checks import require_device
from jagg_core.imports import import_object
from jagg_core.options import read_values, require_options

Loader = Callable[..., Backbone]
"""Loads a backbone in eval mode: ``(device, dtype, **options)``, the options keyword-only and with defaults."""


@dataclass(frozen=True)
class BackboneEntry:
    """A registered backbone: its loader, and its description for tables.

    Attributes:
        name: name by which it is loaded.
        description: one line.
        load: the `Loader`.
        parameters: number of parameters in the transformer; 0 if not known.
        licence: licence of the weights.
        hub_id: hub id of the weights; None for weights that ship or are yours.
    """

    name: str
    description: str
    load: Loader
    parameters: int = 0
    licence: str = ""
    hub_id: str | None = None


_REGISTRY: dict[str, BackboneEntry] = {}
TRAINED: dict[str, PixelSpec] = {}
"""The shipped backbones that ``python -m jagg_core backbones train`` can rebuild."""


def register_backbone(entry: BackboneEntry) -> None:
    """Adds a backbone.

    Raises:
        ValueError: the name is taken.
    """
    if entry.name in _REGISTRY:
        raise ValueError(f"backbone {entry.name!r} is already registered")
    _REGISTRY[entry.name] = entry


def list_backbones() -> list[BackboneEntry]:
    """Lists all registered backbones, by name."""
    return [_REGISTRY[name] for name in sorted(_REGISTRY)]


def check_backbone_name(name: str) -> None:
    """Checks that ``name`` is registered, or that ``module:function`` names a function of ``(device, dtype)``.

    Raises:
        ValueError: it does not; names the nearest known name and what is allowed.
    """
    _loader(name)


def read_options(name: str, texts: Sequence[str]) -> dict[str, object]:
    """Reads options ``option=value`` of the backbone ``name`` by the types that its loader declares.

    Every backbone has the option ``weights=RUN``, as in `load_backbone`.

    Raises:
        ValueError: unknown name or option, a value that is not of the option's type, or no weights there.
    """
    load = _loader(name)
    ours = [text for text in texts if text.startswith("weights=") and not _takes_weights(load)]
    values = read_values("backbone", name, load, [text for text in texts if text not in ours])
    if len(ours) > 1:
        raise ValueError(f"backbone options must be different, got {ours}")
    for text in ours:
        values["weights"] = text.removeprefix("weights=")
        check_weights(text.removeprefix("weights="))
    return values


def load_backbone(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **options: object
) -> Backbone:
    """Loads a backbone in eval mode.

    Args:
        name: one of `list_backbones`, or ``module:function`` for yours: a function ``(device, dtype) -> Backbone``.
        device: device of the weights.
        dtype: dtype of the weights.
        options: options of the loader, such as those of `jagg_core.backbones.pretrained.load_pretrained`. Every
            backbone has ``weights``: the folder of a run whose trained weights replace the published ones, by
            `jagg_core.backbones.trained.load_weights`, unless the loader itself has an option of that name.

    Raises:
        ValueError: unknown name or option, weights that do not fit, a dtype that is not floating point, a device that
            cannot be used here, or a function whose result lacks a member of `Backbone`.
    """
    load = _loader(name)
    weights = None if _takes_weights(load) else options.pop("weights", None)
    if weights is not None:
        check_weights(str(weights))
    require_options("backbone", name, load, options)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, got {dtype}")
    require_device(device)
    backbone = load(device, dtype, **options)
    _require_members(name, backbone)
    if weights is not None:
        load_weights(backbone, str(weights))
    return backbone


def _takes_weights(load: Loader) -> bool:
    """Tells whether the loader itself has an option called weights."""
    try:
        return "weights" in inspect.signature(load).parameters
    except ValueError:  # some functions written in C do not show theirs
        return False


def _allowed() -> str:
    return f"one of {sorted(_REGISTRY)} or module:function with function(device, dtype) -> Backbone"


def _loader(name: str) -> Loader:
    if ":" in name:
        load = import_object(name, "backbone", _allowed())
        if not callable(load) or not _takes_device_and_dtype(load):
            raise ValueError(f"backbone {name!r} must be a function of (device, dtype), got {load!r}")
        return cast(Loader, load)
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backbone must be {_allowed()}, got {name!r}{hint}")
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
        faults = [f"no {key}" for key in missing] + [f"a {key} that is no method" for key in wrong]
        raise ValueError(
            f"backbone {name!r} gave an object of type {type(backbone).__name__} with {', '.join(faults)}; "
            f"a Backbone has {', '.join(members)}"
        )


def _register_pixel(spec: PixelSpec, parameters: int, description: str) -> None:
    TRAINED[spec.name] = spec
    register_backbone(
        BackboneEntry(
            spec.name,
            description,
            partial(build_pixel_backbone, spec),
            parameters=parameters,
            licence="Apache-2.0",
        )
    )


_register_pixel(DIGITS_FLUX, 1_302_276, "Flux architecture on 8x8 handwritten digits, by class, trained")
_register_pixel(EMOJI_FLUX, 2_304_560, "Flux architecture on 32x32 emoji, by the words of their names, trained")
_register_pixel(PHOTOS_FLUX, 1_310_768, "Flux architecture on 32x32 crops of nine photographs, by class, trained")
_register_pixel(PHOTOS_QWEN, 1_742_192, "Qwen-Image architecture on the same crops, by class, trained")
for _model in MODELS:
    register_backbone(
        BackboneEntry(
            _model.name,
            _model.description,
            partial(load_pretrained, _model),
            parameters=_model.parameters,
            licence=_model.licence,
            hub_id=_model.hub_id,
        )
    )
