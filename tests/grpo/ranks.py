"""What two gloo ranks do in test_ranks.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.counting import Counter
from jagg_core.distributed import FixedParameters
from jagg_core.grpo import GRPOConfig, GRPOTrainer, deferred
from jagg_core.grpo.deferred import DeferredGradients
from jagg_core.sharding import shard
from tests.grpo.runs import changed
from tests.spawning import grouped

SLEEP = 1.0
"""Seconds that the second rank's reward takes."""

SMALL = changed(model={"ema_decay": 0.0}, rollout={"micro_batch": 1}, run={"max_skipped": 4})
"""Two micro-batches on each of two ranks."""

# the second step of a rollout is off policy, where some samples are partly clipped and get passes of their own
CLIPPED = changed(
    SMALL,
    model={"dtype": "float64"},
    plan={
        "estimator": "jagg",
        "knots": (),
        "window": 4,
        "jagg_frac": 1.0,
        "backward": "sequential",
        "partly_clipped": "exact",
    },
    objective={"clip_range": 1e-5},
    optimizer={"epochs": 2},
)
PARALLEL: dict[str, dict[str, Any]] = {
    "at once": {},
    "deferred": {"defer_gradient_sync": True},
    "copies": {"shards": 1},
    "copies, deferred": {"shards": 1, "defer_gradient_sync": True},
}
"""How weights and gradients lie over the ranks."""

ADAPTED = changed(
    SMALL,
    model={"dtype": "bfloat16", "options": ("lora_rank=2",)},
    objective={"kl_beta": 0.1},
    parallel={"defer_gradient_sync": True},
)

PATHWISE = changed(SMALL, plan={"upstream": "pathwise"}, rollout={"samples": 3})
NFT = changed(SMALL, plan={"estimator": "exact", "knots": (), "upstream": "nft", "states": 2})

AUDITED = changed(
    SMALL, model={"dtype": "float64"}, rollout={"micro_batch": 2}, objective={"clip_range": 1.0}, run={"audit_every": 1}
)
"""Every optimizer step is audited, on the one micro-batch of each rank."""

BROKEN_AT = {"rollout": 2, "update": 5}
"""Which of a policy's velocities is not a number: it makes five in a rollout, then those of the update."""


asked: list[int] = []
"""Images that `broken_once` was asked for."""


def slow(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that is slow on the second rank."""
    time.sleep(SLEEP * dist.get_rank())
    return images.mean((1, 2, 3))


def broken_once(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """A reward that is no number for the first sample of the second rank's first micro-batch."""
    values = images.mean((1, 2, 3))
    if dist.get_rank() == 1 and not asked:
        values[0] = float("nan")
    asked.append(len(values))
    return values


class Spoiled(FixedParameters):
    """A policy one of whose velocities is not a number."""

    def __init__(self, policy: Any, at: int) -> None:
        super().__init__(policy, policy.parameters())
        self.at = at

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        found = super().velocity(latents, sigma, rows)
        return found * float("nan") if self.calls == self.at + 1 else found


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Measure and compare; see test_ranks.py for what is expected."""
    with grouped(folder / "rendezvous", rank):
        found: dict[str, Any] = {
            "waiting": _update(changed(SMALL, reward={"name": "tests.grpo.ranks:slow"})),
            "adapted": _adapted(),
            "half": _half(),
            "broken": _broken(rank),
            "refused": _refused(rank),
            "pathwise": asdict(GRPOTrainer(PATHWISE).step()),
            "nft": asdict(GRPOTrainer(NFT).step()),
            "audited": {name: _audited(parallel) for name, parallel in PARALLEL.items()},
        }
        moved: dict[str, list[Tensor]] = {}
        for name, parallel in PARALLEL.items():
            found[name] = _update(changed(CLIPPED, parallel=parallel), moved.setdefault(name, []))
    found["moved"] = max(part.abs().max().item() for part in moved["at once"])
    for one, other in (("at once", "deferred"), ("copies", "copies, deferred")):
        pairs = zip(moved[one], moved[other], strict=True)
        found[other]["difference"] = max((a - b).abs().max().item() for a, b in pairs if a.numel())
    return found


def _audited(parallel: dict[str, Any]) -> dict[str, Any]:
    """What an audit says, and the weights' largest difference to those without it."""
    trainers = [GRPOTrainer(changed(AUDITED, parallel=parallel, run={"audit_every": every})) for every in (1, 0)]
    for trainer in trainers:
        trainer.step()
    pairs = zip(*map(_weights, trainers), strict=True)
    apart = max((one - other).abs().max().item() for one, other in pairs if one.numel())
    assert trainers[0].meter is not None
    return {"apart": apart, "state": trainers[0].meter.state()}


def _update(config: GRPOConfig, moved: list[Tensor] | None = None) -> dict[str, Any]:
    """An update: its seconds and passes, its collectives as they are counted, and how many were timed."""
    trainer = GRPOTrainer(config)
    trainer.learner.step = partial(_descend, trainer)  # type: ignore[method-assign]
    before = _weights(trainer)
    with Counter() as counter:
        metrics = trainer.step()
    if moved is not None:
        moved += [after - start for after, start in zip(_weights(trainer), before, strict=True)]
    blocks: Any = trainer.learner.backbone
    return {
        "seconds": metrics.seconds,
        "passes": metrics.passes,
        "counts": counter.counts,
        "timed": len(trainer.learner.collectives.spans),
        "units": len(blocks.blocks) + 1,
    }


def _refused(rank: int) -> str:
    """What is said where deferred gradients do not fit on the second rank."""
    parts = [nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)]
    module = nn.Sequential(*parts)
    shard(parts, module, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, "free_memory", lambda device: 2**40 if rank == 0 else 2**20)
        with pytest.raises(ValueError, match="defer_gradient_sync") as caught:
            DeferredGradients(module, list(module.parameters()))
    return str(caught.value)


def _descend(trainer: GRPOTrainer) -> float:
    """A step along the gradient itself, which hides no difference and is quick on sharded tensors."""
    tensors: list[Any] = trainer.learner.masters.tensors
    for tensor in tensors:
        tensor.detach().to_local().sub_(tensor.grad.to_local())
    trainer.learner.masters.clear_gradients()
    return 1.0


def _weights(trainer: GRPOTrainer) -> list[Tensor]:
    """This rank's share of the trained weights."""
    tensors: list[Any] = trainer.learner.masters.tensors
    return [tensor.detach().to_local().clone() for tensor in tensors]


def _adapted() -> dict[str, Any]:
    """A LoRA in half precision, with the KL to the weights without it."""
    trainer = GRPOTrainer(ADAPTED)
    metrics = trainer.step()
    dtypes: dict[str, list[str]] = {"trained": [], "frozen": []}
    for parameter in trainer.learner.backbone.transformer.parameters():
        shard: Any = parameter
        dtypes["trained" if parameter.requires_grad else "frozen"].append(str(shard.to_local().dtype))
    return {"dtypes": {kind: sorted(set(found)) for kind, found in dtypes.items()}, "metrics": asdict(metrics)}


def _half() -> dict[str, Any]:
    """All weights in half precision."""
    trainer = GRPOTrainer(changed(SMALL, model={"dtype": "bfloat16"}))
    before = _weights(trainer)
    metrics = trainer.step()
    after = _weights(trainer)
    moved = any(not torch.equal(*pair) for pair in zip(after, before, strict=True))
    return {"dtypes": sorted({str(part.dtype) for part in after}), "moved": moved, "grad_norm": metrics.grad_norm}


def _broken(rank: int) -> dict[str, Any]:
    """Updates in each of which one value on the second rank is no number, and one in which all are."""
    trainer = GRPOTrainer(changed(SMALL, reward={"name": "tests.grpo.ranks:broken_once"}))
    whole, before = trainer.learner.policy, _weights(trainer)
    skipped = {"reward": trainer.step().skipped}
    for where, at in BROKEN_AT.items():
        if rank == 1:
            trainer.learner.policy = partial(_spoiled, whole, at)  # type: ignore[method-assign]
        skipped[where] = trainer.step().skipped
    kept = all(torch.equal(*pair) for pair in zip(_weights(trainer), before, strict=True))
    trainer.learner.policy = whole  # type: ignore[method-assign]
    return {"skipped": skipped, "kept": kept, "last": trainer.step().skipped, "steps": trainer.learner.steps}


def _spoiled(policy: Callable[[Sequence[str]], Any], at: int, prompts: Sequence[str]) -> Spoiled:
    return Spoiled(policy(prompts), at)
