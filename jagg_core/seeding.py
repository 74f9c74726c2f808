"""Random streams that depend on their purpose alone, not on batches or other draws."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Computes a 63-bit seed for one purpose: equal parts (as text) give equal seeds, others unrelated ones."""
    text = "/".join(str(part).replace("\\", "\\\\").replace("/", "\\/") for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> torch.Generator:
    """Makes a CPU generator with the seed of `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def initial_latents(shape: Sequence[int], seed: int, sample_ids: Sequence[int]) -> Tensor:
    """Draws pure noise ``[len(sample_ids), *shape]``, fp32, on the CPU; equal ids get equal noise, as in DanceGRPO.

    Raises:
        ValueError: no samples.
    """
    if len(sample_ids) == 0:
        raise ValueError("sample_ids must have at least one, got none")
    return torch.stack([torch.randn(tuple(shape), generator=generator_for(seed, "latents", i)) for i in sample_ids])
