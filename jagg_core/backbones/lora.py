"""LoRA by peft, through diffusers' adapter interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jagg_core.trajectory import at_least_fp32


def check_lora(rank: int, alpha: int | None) -> None:
    """Raises ValueError unless ``rank`` is at least 0 and ``alpha``, if given, is positive and has a rank."""
    if rank < 0:
        raise ValueError(f"lora_rank must be at least 0, got {rank}")
    if alpha is not None and not (rank > 0 and alpha > 0):
        raise ValueError(f"lora_alpha must be positive and needs a lora_rank, got {alpha} at rank {rank}")


def add_lora(transformer: Any, targets: Sequence[str], rank: int, alpha: int | None = None, seed: int = 0) -> None:
    """Freezes ``transformer`` and adds a trainable LoRA to its layers ``targets``; ``alpha`` None is twice the rank.

    The A matrices are Gaussian (``seed``), the B matrices zero: the velocity is unchanged at first. Both stay in fp32
    under a half-precision transformer, as diffusers' training scripts keep them.

    Raises:
        ValueError: peft is missing, or the transformer has none of the layers.
    """
    described = {
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "init_lora_weights": "gaussian",
        "target_modules": list(targets),
    }
    add_adapter(transformer, seed, **described)


def add_adapter(transformer: Any, seed: int = 0, **described: Any) -> None:
    """Freezes ``transformer`` and adds the trainable LoRA that peft's configuration ``described`` describes.

    Raises:
        ValueError: peft is missing, or the transformer has none of the layers.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("a LoRA needs peft: pip install 'jagg-core[pretrained]'") from error
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer.add_adapter(LoraConfig(**described))
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = at_least_fp32(parameter.data)
