"""What a pass through a backbone costs: floating-point operations, counted on the meta device, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from jagg_core.backbones import Backbone, list_backbones, load_backbone


@dataclass(frozen=True)
class PassWork:
    """Work of one velocity of one sample, guided as asked for (two calls where a model contrasts).

    Attributes:
        forward: floating-point operations of a forward (a multiplication and an addition are two).
        backward: of a backward, without recomputation.
        parameters: of the transformer.
    """

    forward: float
    backward: float
    parameters: int


def count_work(backbone: str, options: dict[str, object], guidance: float | None = None) -> PassWork:
    """Counts one sample's pass through a backbone, without memory for it: a published one by its configuration alone.

    ``guidance``: see `jagg_core.backbones.Backbone.policy`; at 1 a model makes one call per velocity.

    Raises:
        ValueError: an option that the backbone has not, or a backbone of yours that the meta device cannot hold.
    """
    unread = {"random_weights": True} if is_published(backbone) else {}
    try:
        loaded = load_backbone(backbone, "meta", torch.bfloat16, **(options | unread))
        return _counted(loaded, guidance)
    except RuntimeError as error:  # what torch raises for operators and copies that meta tensors cannot do
        raise ValueError(f"backbone {backbone!r} cannot be counted on the device meta in bfloat16: {error}") from error


def is_published(backbone: str) -> bool:
    """Returns whether a backbone's weights are on the hub, so that it is built by its configuration without them."""
    return any(entry.name == backbone and entry.hub_id is not None for entry in list_backbones())


def _counted(loaded: Backbone, guidance: float | None) -> PassWork:
    policy = loaded.policy(loaded.prompts[:1], guidance)
    latents = torch.zeros(1, *loaded.latent_shape, device="meta")
    sigma, rows = torch.full((1,), 0.5, device="meta"), torch.zeros(1, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        velocity = policy.velocity(latents, sigma, rows)
    with FlopCounterMode(display=False) as backward:
        velocity.float().sum().backward()
    parameters = sum(p.numel() for p in loaded.transformer.parameters())
    return PassWork(float(forward.get_total_flops()), float(backward.get_total_flops()), parameters)
