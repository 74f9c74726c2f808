"""What a backbone is: the protocol, and the sigmas of its rollouts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from jagg_core.checks import require_one_of
from jagg_core.choices import ScheduleName
from jagg_core.imports import source_fingerprint
from jagg_core.policy import VelocityPolicy
from jagg_core.schedule import dance_schedule


class Backbone(Protocol):
    """What the commands need of a backbone.

    Optional methods are ``schedule(steps)``, which gives the sigmas of its own sampler ``[steps + 1]``, and
    ``fingerprints()``, which gives by name what tells its parts beside the transformer from others: see
    `fingerprints_of`. ``parts()`` gives by name the modules that a pipeline loads apart, where they are several.
    """

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

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> VelocityPolicy:
        """A policy for these prompts, one per sample. ``guidance`` None is the backbone's usual one."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to images ``[N, C, H, W]`` in [0, 1]."""
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward."""
        ...


def fingerprints_of(backbone: Backbone, name: str) -> dict[str, str]:
    """Computes, by name, what decides the samples of a backbone beside its transformer and its options.

    ``name``: by which it was loaded. These are its prompts, for ``module:function`` its source file, and what its
    method ``fingerprints`` adds.
    """
    prompts = hashlib.blake2b(json.dumps(list(backbone.prompts)).encode(), digest_size=8).hexdigest()
    found = {"prompts": f"{len(backbone.prompts)} with digest {prompts}"}
    if ":" in name:
        found["backbone"] = f"source {source_fingerprint(name.partition(':')[0])}"
    more: Callable[[], dict[str, str]] = getattr(backbone, "fingerprints", dict)
    return found | more()


def schedule_of(backbone: Backbone, name: ScheduleName, steps: int, shift: float) -> Tensor:
    """Sigmas ``[steps + 1]`` of a rollout; ``shift`` is for the schedule ``dance``.

    Raises:
        ValueError: the backbone has no ``schedule(steps)`` of its own.
    """
    if name == "dance":
        return dance_schedule(steps, shift)
    own: Callable[[int], Tensor] | None = getattr(backbone, "schedule", None)
    if own is None:
        raise ValueError(f"schedule: {backbone.name} has no method schedule(steps); allowed: dance, got {name!r}")
    return own(steps)


def check_schedule(name: str, steps: int, shift: float) -> None:
    """Check what can be checked of a schedule before the backbone is loaded.

    Raises:
        ValueError: unknown name, too few steps, or a shift that is not positive.
    """
    require_one_of("schedule", name, ScheduleName)
    dance_schedule(steps, shift)
