"""A short training run of a real backbone, and what is compared of two of them. Spawned processes import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jagg_core.grpo import GRPOConfig, GRPOTrainer, Metrics, train
from jagg_core.grpo.settings import ModelSettings, PlanSettings, RewardSettings, RolloutSettings, RunSettings

SMALL = GRPOConfig(
    model=ModelSettings(ema_decay=0.9),
    rollout=RolloutSettings(prompts=2, samples=2, micro_batch=2, steps=5),
    reward=RewardSettings("ink"),
    plan=PlanSettings("causal", knots=(0, 2)),
    run=RunSettings(updates=6, checkpoint_every=3),
)
"""digits-flux, four samples of four trained steps."""


def changed(config: GRPOConfig = SMALL, **sections: dict[str, Any]) -> GRPOConfig:
    """``config`` with some settings of some sections changed."""
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def tensors(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """All that a checkpoint holds, whole and copied."""
    found = trainer.learner.tensors()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in found.items()}


def weights(trainer: GRPOTrainer) -> Tensor:
    """The trained weights as one vector."""
    return torch.cat([t.flatten() for name, t in tensors(trainer).items() if name.startswith("weights/")])


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> Sequence[str]:
    """Names of tensors that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def train_until_killed(number: int, folder: str, update: int, wait: bool = False) -> None:
    """Train, and die after ``update`` by a signal that cannot be caught; or ``wait`` for it, which a file tells."""
    torch.set_num_threads(1)

    def die(metrics: Metrics) -> None:
        if metrics.update == update and wait:
            (Path(folder) / "waiting").touch()
            time.sleep(600)
        if metrics.update == update:
            os.kill(os.getpid(), signal.SIGKILL)

    train(SMALL, Path(folder), progress=die)


def not_a_number(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that is broken for one sample."""
    return torch.tensor([float("nan"), *[1.0] * (len(images) - 1)])


def constant(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward without signal."""
    return torch.full((len(images),), 0.95)


def failing(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward whose server is down."""
    raise ConnectionError("no answer")
