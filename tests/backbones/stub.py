"""A backbone of a few dozen weights, for tests of what surrounds a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagg_core.backbones import BackboneEntry
from tests.jagg_core.fields import MlpField


class StubBackbone:
    """Grey images of 2x2 pixels; the prompts are names only."""

    name = "stub"
    dataset = None
    prompts = ("a", "b", "c", "d", "e")
    latent_shape = (4,)
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.transformer = MlpField(elements=4, samples=64, dtype=dtype)
        self.asked: list[tuple[list[str], float]] = []

    def policy(self, prompts: Sequence[str], guidance: float = 1.0) -> MlpField:
        self.asked.append((list(prompts), guidance))
        return self.transformer

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().sigmoid().reshape(-1, 1, 2, 2)

    def enable_gradient_checkpointing(self) -> None:
        self.transformer.checkpointing = True


STUB = BackboneEntry("stub", "for tests", lambda device, dtype: StubBackbone(dtype))
"""Put it into the registry with ``monkeypatch.setitem(registry._REGISTRY, "stub", STUB)``."""


def constant(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that says nothing."""
    return torch.ones(len(images))


def first_pixel(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward of its own."""
    return images[:, 0, 0, 0]
