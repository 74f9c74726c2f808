"""Tensors in open_clip's names as transformers' CLIPModel names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_OUTSIDE = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TRANSPOSED = ("text_projection", "visual.proj")
"""open_clip multiplies by these from the right, without a Linear."""


def convert_open_clip(state: Mapping[str, Tensor], config: Any, where: str) -> dict[str, Tensor]:
    """Converts the state of an open_clip CLIP, both towers ViT-like, to that of transformers' CLIPModel.

    Source: open_clip's model.py and transformer.py. Its blocks keep queries, keys and values in one matrix, in this
    order. ``config`` is the CLIPConfig, with the number of layers; errors name the file ``where``.

    Raises:
        ValueError: a tensor is missing or unknown; names the first of them.
    """
    names: dict[str, tuple[str, ...]] = {key: (value,) for key, value in _OUTSIDE.items()}
    towers = (
        ("transformer.resblocks", "text_model.encoder.layers", config.text_config),
        ("visual.transformer.resblocks", "vision_model.encoder.layers", config.vision_config),
    )
    for theirs, ours, tower in towers:
        for i in range(tower.num_hidden_layers):
            for part in ("weight", "bias"):
                names[f"{theirs}.{i}.attn.in_proj_{part}"] = tuple(
                    f"{ours}.{i}.self_attn.{letter}_proj.{part}" for letter in "qkv"
                )
                for key, value in _BLOCK.items():
                    names[f"{theirs}.{i}.{key}.{part}"] = (f"{ours}.{i}.{value}.{part}",)
    require_names(state, names, where)
    converted: dict[str, Tensor] = {}
    for key, targets in names.items():
        tensor = state[key].t() if key in _TRANSPOSED else state[key]
        converted |= zip(targets, tensor.chunk(len(targets)) if len(targets) > 1 else (tensor,), strict=True)
    return converted


def require_names(actual: Mapping[str, object], expected: Mapping[str, object], where: str) -> None:
    """Raises ValueError, with missing and unknown names, unless both have the same names."""
    missing, unknown = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or unknown:
        faults = [
            f"{len(names)} tensors are {kind}, such as {', '.join(names[:3])}"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ValueError(f"path: {where} holds another network: {'; '.join(faults)}")
