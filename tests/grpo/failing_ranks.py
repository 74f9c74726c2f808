"""What two gloo ranks do in test_failing.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from jagg_core.distributed import RankFailed
from jagg_core.grpo import GRPOTrainer, train
from tests.grpo.ranks import Spoiled
from tests.grpo.runs import changed
from tests.spawning import grouped

CONFIG = changed(
    rollout={"micro_batch": 1},
    reward={"name": "tests.grpo.failing_ranks:moody"},
    run={"updates": 1, "eval_every": 1, "eval_prompts": 2, "eval_samples": 2},
)
"""Two micro-batches on each of two ranks, in updates and evaluations alike."""

LATER = {"name": "tests.grpo.failing_ranks:broken_later"}

FAILURES = ("nan", "error", "velocity")
"""What goes wrong on the second rank alone."""

broken: list[str] = []
"""What `moody` does wrong when it is next asked on the second rank."""


asked: list[int] = []
"""Images that `broken_later` was asked for."""


def moody(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that fails once, if it is told to."""
    values = images.mean((1, 2, 3))
    failure = broken.pop() if broken and dist.get_rank() == 1 else ""
    if failure == "error":
        raise ConnectionError("no answer")
    return values * float("nan") if failure else values


def broken_later(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that on the second rank is no number from its third call on: in the evaluation after an update."""
    asked.append(len(images))
    values = images.mean((1, 2, 3))
    return values * float("nan") if dist.get_rank() == 1 and len(asked) > 2 else values


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Fail in every way; see test_failing.py for what is expected."""
    with grouped(folder / "rendezvous", rank):
        trainer = GRPOTrainer(CONFIG)
        held_out = trainer.evaluate()
        return {
            "evaluation": {failure: _failing(trainer, failure, trainer.evaluate) for failure in FAILURES},
            "others": {
                "update": _failing(trainer, "error", trainer.step),
                "recalibration": _failing(trainer, "nan", partial(trainer.batches, "recalibration")),
            },
            "same": trainer.evaluate() == held_out,
            "taken": _told(lambda: train(CONFIG, folder / "taken")),
            "settings": _told(lambda: train(changed(CONFIG, run={"seed": rank}), folder / "settings")),
            "unseen": _told(lambda: train(CONFIG, folder / f"unseen-{rank}")),
            "run": _told(lambda: train(changed(CONFIG, reward=LATER), folder / "run")),
        }


def _failing(trainer: GRPOTrainer, failure: str, do: Callable[[], object]) -> str:
    """What is told when a failure comes in the first micro-batch of what is done."""
    whole = trainer.learner.policy
    if failure != "velocity":
        broken[:] = [failure]
    elif dist.get_rank() == 1:
        trainer.learner.policy = lambda prompts: Spoiled(whole(prompts), 2)  # type: ignore[method-assign]
    told = _told(do)
    trainer.learner.policy = whole  # type: ignore[method-assign]
    return told


def _told(do: Callable[[], object]) -> str:
    try:
        do()
    except (RankFailed, ValueError) as error:
        return str(error)
    return ""
