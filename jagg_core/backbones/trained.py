"""Trained weights as files: written as diffusers loads them, and read into a backbone again.

A LoRA has the layout of diffusers' training scripts (``load_lora_weights`` takes it): names with the prefix
``transformer.`` and without the adapter's, alpha and rank in the header. All other weights have the transformer's
names (``load_state_dict`` and ``from_single_file`` take them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from jagg_core.backbones.lora import add_adapter
from jagg_core.backbones.protocol import Backbone

FILE = "weights.safetensors"
PREFIX = "transformer."
HEADER = "lora_adapter_metadata"
"""Key of the header under which diffusers keeps the adapter's configuration, as JSON."""

KEPT = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias")
"""Entries of peft's configuration that decide the velocity; all of it would bind the file to one version of peft."""

_ADAPTER = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+\.lora_\w+)\.(?P<adapter>[^.]+)(?P<end>\.weight|\.bias)")


@dataclass(frozen=True)
class WeightsFile:
    """Contents of a file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def is_adapter(transformer: nn.Module, trained: Iterable[str]) -> bool:
    """Tells whether the ``trained`` parameters are exactly those of one LoRA that peft made."""
    matches = [_ADAPTER.fullmatch(name) for name in trained]
    if not all(matches):
        return False
    names = {match["adapter"] for match in matches if match}
    known = {name for module in transformer.modules() for name in getattr(module, "peft_config", ())}
    return len(names) == 1 and names <= known


def weights_files(backbone: Backbone, tensors: Mapping[str, Tensor]) -> dict[str, WeightsFile]:
    """Sorts whole tensors into files, by their path in the run folder.

    ``tensors``: by their names in ``backbone.transformer``: those of one LoRA alone, or all.
    """
    adapter = is_adapter(backbone.transformer, tensors)
    files = {}
    for path, prefix, part in _parts(backbone):
        mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        metadata = {"format": "pt"}
        if adapter:
            [name] = {match["adapter"] for match in map(_ADAPTER.fullmatch, mine) if match}
            metadata[HEADER] = json.dumps(_described(_configs(part)[name], mine), sort_keys=True)
            mine = {_published(name): tensor for name, tensor in mine.items()}
        files[path] = WeightsFile(mine, metadata)
    return files


def check_weights(path: str) -> None:
    """Checks that there are weights before anything is loaded.

    Raises:
        ValueError: ``path`` is neither a file nor the folder of a run that has ended.
    """
    place = Path(path).expanduser()
    if not place.is_file() and not (place / FILE).is_file():
        raise ValueError(f"weights must be a safetensors file, or the folder of a run with {FILE}, got {path}")


def load_weights(backbone: Backbone, path: str) -> None:
    """Reads the trained weights of a run into a backbone; a LoRA becomes its adapter, the only trained weights.

    Args:
        backbone: a backbone of the kind that was trained, not sharded. Its LoRA, if any, must have the file's rank and
            alpha; a file with all weights fits any LoRA.
        path: the run's folder or, for a model of one transformer, a file.

    Raises:
        ValueError: no such file, a damaged one, or one of another model; names the first tensor that does not fit.
    """
    check_weights(path)
    place = Path(path).expanduser()
    parts = _parts(backbone)
    if place.is_file() and len(parts) > 1:
        raise ValueError(f"weights must be the folder of a run for {backbone.name}, which has two parts, got {path}")
    for relative, _, part in parts:
        file = place if place.is_file() else place / relative
        stored, metadata = _read(file)
        if any(".lora_" in name for name in stored):
            _fit_adapter(part, metadata, file)
            wanted = {
                _published(name): p for name, p in part.named_parameters() if ".lora_" in name and p.requires_grad
            }
        else:
            state = part.state_dict()
            wanted = {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}
        _copy(stored, wanted, file)


def _parts(backbone: Backbone) -> list[tuple[str, str, nn.Module]]:
    """Lists path of the file, prefix in the transformer's names, and module, for each transformer of a pipeline."""
    parts: dict[str, nn.Module] = getattr(backbone, "parts", dict)() or {"transformer": backbone.transformer}
    names = {id(module): name for name, module in backbone.transformer.named_modules()}
    prefixes = {part: f"{names[id(module)]}." if names[id(module)] else "" for part, module in parts.items()}
    return [
        (FILE if part == "transformer" else f"{part}/{FILE}", prefixes[part], module) for part, module in parts.items()
    ]


def _configs(part: nn.Module) -> dict[str, Any]:
    """Returns the peft configurations of a module's adapters, by name."""
    configs: dict[str, Any] = getattr(part, "peft_config", {})
    return configs


def _described(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Describes an adapter with parameters ``names`` for the header: its layers are those that were trained."""
    matches = [match for match in map(_ADAPTER.fullmatch, names) if match]
    values = {name: getattr(config, name) for name in KEPT if hasattr(config, name)}
    values["target_modules"] = sorted({match["layer"].rpartition(".")[0] for match in matches})
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def _published(name: str) -> str:
    """Returns a LoRA parameter's name as diffusers writes it."""
    match = _ADAPTER.fullmatch(name)
    return name if match is None else f"{PREFIX}{match['layer']}{match['end']}"


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
        return load_file(file), metadata
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights: {file} cannot be read: {error}") from error


def _fit_adapter(part: nn.Module, metadata: Mapping[str, str], file: Path) -> None:
    """Gives a part the adapter that the file describes, or compares it with the one that it has."""
    if HEADER not in metadata:
        raise ValueError(f"weights: {file} must name its alpha in the header, as {HEADER}, got {sorted(metadata)}")
    described = {key.removeprefix(PREFIX): value for key, value in json.loads(metadata[HEADER]).items()}
    if not _configs(part):
        add_adapter(part, **described)
    [config] = _configs(part).values()
    for option, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if getattr(config, name) != described[name]:
            raise ValueError(f"{option} must be {described[name]}, as in {file}, got {getattr(config, name)}")


@torch.no_grad()
def _copy(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    for name in sorted({*stored, *wanted}):
        if name not in wanted or name not in stored or stored[name].shape != wanted[name].shape:
            need, got = (list(some[name].shape) if name in some else "none" for some in (wanted, stored))
            raise ValueError(f"weights: {file} must hold {name} of shape {need}, got {got}: another model's weights?")
    for name, tensor in wanted.items():
        tensor.copy_(stored[name])
