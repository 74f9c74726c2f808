"""The protocol of a backbone, and the sigmas of its rollouts."""

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
    """A backbone, as the commands use it.

    Optional methods: ``schedule(steps)`` gives the sigmas of its sampler ``[steps + 1]``; ``fingerprints()`` gives
    digests of its parts except the transformer, for `fingerprints_of`; ``parts()`` gives by name the modules that a
    pipeline loads separately, where they are several.
    """

    @property
    def name(self) -> str:
        """Names the backbone in records and reports."""
        ...

    @property
    def dataset(self) -> str | None:
        """Names the data set whose classifier can judge the samples; None without one."""
        ...

    @property
    def prompts(self) -> tuple[str, ...]:
        """Returns the prompts to sample from."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Returns the shape of one sample's latents."""
        ...

    @property
    def device(self) -> torch.device:
        """Returns the device of the weights."""
        ...

    @property
    def transformer(self) -> nn.Module:
        """Returns the module that is trained."""
        ...

    def policy(self, prompts: Sequence[str], guidance: float | None = None) -> VelocityPolicy:
        """Makes a policy for these prompts, one per sample. ``guidance`` None is the backbone's usual one."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents to images ``[N, C, H, W]`` in [0, 1]."""
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Makes the backward recompute activations."""
        ...


def fingerprints_of(backbone: Backbone, name: str) -> dict[str, str]:
    """Computes digests of all that decides a backbone's samples, except its transformer and its options.

    These are its prompts, for a ``name`` ``module:function`` the source file, and the result of its method
    ``fingerprints``. ``name`` is the one by which it was loaded.
    """
    prompts = hashlib.blake2b(json.dumps(list(backbone.prompts)).encode(), digest_size=8).hexdigest()
    digests = {"prompts": f"{len(backbone.prompts)} with digest {prompts}"}
    if ":" in name:
        digests["backbone"] = f"source {source_fingerprint(name.partition(':')[0])}"
    more: Callable[[], dict[str, str]] = getattr(backbone, "fingerprints", dict)
    return digests | more()


def schedule_of(backbone: Backbone, name: ScheduleName, steps: int, shift: float) -> Tensor:
    """Computes the sigmas ``[steps + 1]`` of a rollout; ``shift`` is for the schedule ``dance``.

    Raises:
        ValueError: the backbone has no method ``schedule(steps)``.
    """
    if name == "dance":
        return dance_schedule(steps, shift)
    schedule: Callable[[int], Tensor] | None = getattr(backbone, "schedule", None)
    if schedule is None:
        raise ValueError(f"schedule must be dance for {backbone.name}, which has no schedule(steps), got {name!r}")
    return schedule(steps)


def check_schedule(name: str, steps: int, shift: float) -> None:
    """Checks a schedule as far as possible before the backbone is loaded.

    Raises:
        ValueError: unknown name, too few steps, or a shift that is not positive.
    """
    require_one_of("schedule", name, ScheduleName)
    dance_schedule(steps, shift)
