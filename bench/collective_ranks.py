"""What each rank of a count does: every arm on the whole model, then laid out. Spawned processes import it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.arms import Group, arms_for, run_arm
from bench.counting import Counter, Stopwatch
from bench.group import clear, gradient, prompts_of
from bench.layouts import lay_out, without_reduction
from bench.memory import LiveBytes
from bench.rounds import time_in_rounds
from jagg_core import DanceSDE, exact_plan, initial_latents
from jagg_core.backbones import load_backbone, read_options
from jagg_core.distributed import FixedParameters, join_as
from jagg_core.records import Cell
from jagg_core.reference import TOLERANCE, relative_error
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import derive_seed, generator_for

if TYPE_CHECKING:
    from bench.settings import CollectiveBench

DEFERRED = "exact-deferred"
"""Exact, with gradients kept on the rank until the group's last backward reduces their sum."""

SETTLED_S = 0.2
"""Seconds for a thread that has only to let go of a tensor, on a machine that is busy with other things."""

LEFT_OUT = ("exact-again", "exact-bare")
"""Arms that are there to time the others against."""


@dataclass(frozen=True)
class Run:
    """An arm: its last part reduces gradients; what comes before it, if anything does, leaves them on the rank."""

    last: Callable[[], object]
    before: Callable[[], object] | None = None

    def __call__(self, transformer: Any, between: Callable[[], None] = lambda: None) -> None:
        """Run it. ``between`` is called when the gradients of ``before`` wait; without them, at the end."""
        if self.before is None:
            self.last()
            between()
            return
        with without_reduction(transformer):
            self.before()
        between()
        self.last()


def work(number: int, settings: CollectiveBench, folder: str) -> None:
    """Measure as rank ``number`` of those that were spawned, and write what was found to ``folder/NUMBER.json``."""
    found = measure(number, number, settings, f"file://{folder}/rendezvous")
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def work_launched(settings: CollectiveBench) -> list[dict[str, Any]]:
    """Measure as the rank that torchrun started. Every rank has what all of them found."""
    found = measure(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), settings, "env://")
    everywhere: list[Any] = [None] * settings.ranks
    dist.all_gather_object(everywhere, found)
    dist.destroy_process_group()
    return everywhere


def measure(rank: int, local_rank: int, settings: CollectiveBench, rendezvous: str) -> dict[str, Any]:
    """Join the group, then verify, count and time every arm.

    Raises:
        ValueError: the backbone has no blocks to shard.
        ArithmeticError: an arm's gradient is not that of the whole model.
    """
    device = _join(rank, local_rank, settings, rendezvous)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    options = read_options(settings.backbone, settings.backbone_options)
    backbone: Any = load_backbone(settings.backbone, device, dtype, **options)
    if not hasattr(backbone, "blocks"):
        raise ValueError(f"backbone {settings.backbone!r} has no blocks to shard: a list of modules is needed")
    if settings.checkpointing:
        backbone.enable_gradient_checkpointing()
    transformer = backbone.transformer
    group = _group(settings, backbone)
    runs = _runs(settings, group)
    runs["exact"](transformer)
    unused = any(parameter.grad is None for parameter in group.parameters)
    clear(group.parameters)
    expected = {} if settings.pretend else {name: _gradient(run, transformer, group) for name, run in runs.items()}
    parameters = sum(p.numel() for p in transformer.parameters())
    units = lay_out(backbone.blocks, transformer, settings.layout, dtype, settings.shards_per_copy, unused)
    group = _group(settings, backbone)  # a rollout of the weights as they now lie, which are other tensors
    runs = _runs(settings, group)
    for _ in range(2):  # sets communication up; DistributedDataParallel sorts its buckets anew after a first backward
        _time(runs["exact"], transformer, group)
    cells = []
    for name, run in runs.items():
        values = _count(run, transformer)
        if not settings.pretend:
            values["relative_error"] = error = relative_error(_whole(group.parameters), expected[name])
            if not error <= TOLERANCE[dtype]:
                raise ArithmeticError(f"gradient of arm {name} under {settings.layout} is not the plain one: {error:g}")
        clear(group.parameters)
        cells.append(Cell(name, settings={"deferred": run.before is not None}, values=values))
    if not settings.pretend:
        time_in_rounds(cells, lambda name: _time(runs[name], transformer, group), settings.rounds, settings.seed)
        time_in_rounds(cells, lambda name: _time_apart(runs[name], transformer, group), settings.rounds, settings.seed)
    return {"units": units, "parameters": parameters, "cells": [vars(cell) for cell in cells]}


def _join(rank: int, local_rank: int, settings: CollectiveBench, rendezvous: str) -> torch.device:
    if settings.device == "cpu":
        torch.set_num_threads(1)
    if settings.pretend:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=settings.ranks, store=FakeStore())
        return torch.device(settings.device)
    return join_as(rank, local_rank, settings.ranks, settings.device, settings.timeout, rendezvous)


def _group(settings: CollectiveBench, backbone: Any) -> Group:
    """A rollout's first group. Every rank has the same samples, so that reduced gradients equal plain ones."""
    seed = derive_seed(settings.seed, "collectives")
    parameters = list(backbone.transformer.parameters())
    policy = FixedParameters(backbone.policy(prompts_of(backbone, settings.batch)), parameters)
    precision = torch.promote_types(torch.float32, getattr(torch, settings.dtype))
    latents = initial_latents(backbone.latent_shape, seed, range(settings.batch)).to(backbone.device, precision)
    trajectory = rollout(policy, dance_schedule(settings.window + 1), DanceSDE(0.7), latents, seed)
    advantages = torch.randn(settings.batch, generator=generator_for(seed, "advantages")).to(backbone.device)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Group(policy, trajectory.select(range(settings.window)), advantages, trained, ())


def _runs(settings: CollectiveBench, group: Group) -> dict[str, Run]:
    """Every arm on a group, by name."""
    found: dict[str, Run] = {}
    for arm in arms_for(group.trajectory.sigmas, settings.window, settings.seed):
        if arm.name not in LEFT_OUT:
            found[arm.name] = Run(partial(run_arm, arm, group))
        if arm.name == "exact":
            end = settings.window - 1
            parts = [group.trajectory.select(steps) for steps in (range(end), range(end, end + 1))]
            before, last = (
                partial(run_arm, replace(arm, plan=exact_plan(part.sigmas)), replace(group, trajectory=part))
                for part in parts
            )
            found[DEFERRED] = Run(last, before)
    return found


def _count(run: Run, transformer: Any) -> dict[str, Any]:
    """Collectives of a run, and bytes of the gradients that it left on the rank (see `Run`), measured."""
    kept: list[int] = []
    with LiveBytes() as live, Counter() as counter:
        run(transformer, lambda: kept.append(_settled(live)))
    return {
        "counts": counter.counts,
        "backward_counts": counter.backward_counts,
        "backwards": len(counter.backwards),
        "bytes": counter.bytes,
        "retained_gradient_bytes": kept[0],
    }


def _settled(live: LiveBytes) -> int:
    """Bytes alive once they stay the same: gloo's threads let go of what they reduced a moment after it is there."""
    found = -1
    while found != live.now:
        found = live.now
        time.sleep(SETTLED_S)
    return found


def _time(run: Run, transformer: Any, group: Group) -> dict[str, float]:
    start = timer()
    run(transformer)
    seconds = timer() - start
    clear(group.parameters)
    return {"total_s": seconds}


def _time_apart(run: Run, transformer: Any, group: Group) -> dict[str, float]:
    with Stopwatch() as stopwatch:
        run(transformer)
    clear(group.parameters)
    return {f"{kind}_s": seconds for kind, seconds in stopwatch.seconds.items()}


def _gradient(run: Run, transformer: Any, group: Group) -> list[Tensor]:
    run(transformer)
    found = _whole(group.parameters)
    clear(group.parameters)
    return found


def _whole(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Whole gradients of parameters that may be sharded; zeros where there are none."""
    found: list[Any] = gradient(parameters)
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]
