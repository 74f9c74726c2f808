"""Kinds of parameters: where in the network a gradient, or its error, sits."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from jagg_core import VelocityPolicy

RULES: tuple[tuple[str, str], ...] = (
    (r"lora_A|lora_embedding_A", "LoRA A"),
    (r"lora_B|lora_embedding_B", "LoRA B"),
    (r"norm\w*\.linear|adaln|modulation|(img|txt)_mod|scale_shift_table|time_proj", "modulation"),
    (r"attn", "attention"),
    (r"\bff|mlp|feed_forward|blocks\.\d+\.proj_out|\bnet\.", "MLP"),
    (r"embed|^(img|txt|context|time)_in|^proj_out|^(x|context)_proj", "embedders"),
)
"""Pattern of a parameter's name, and its block; the first that matches counts. Names as diffusers and peft give them.

The final projection counts as an embedder: it maps tokens back to latents."""

OTHER = "other"
"""Block of parameters that no rule knows."""


def block_of(name: str) -> str:
    """The block of a parameter, by its name in the transformer."""
    return next((block for pattern, block in RULES if re.search(pattern, name)), OTHER)


def parameter_blocks(policy: VelocityPolicy, module: nn.Module) -> dict[Tensor, str]:
    """Block of each of the policy's parameters that ``module`` names."""
    own = {id(p) for p in getattr(policy, "parameters", list)()}
    return {p: block_of(name) for name, p in module.named_parameters() if id(p) in own}


def ordered_blocks(labels: Sequence[str]) -> list[str]:
    """Distinct labels in the order of `RULES`, unknown ones last."""
    known = [block for _, block in RULES]
    return sorted(set(labels), key=lambda label: (known.index(label) if label in known else len(known), label))
