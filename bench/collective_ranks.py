"""What each rank of a count does: every arm on the whole model, then laid out. Spawned processes import it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.arms import arms_of
from bench.counting import Counter, Stopwatch
from bench.group import ArmRun, Group, prompts_of, run_of
from bench.layouts import lay_out, without_reduction
from bench.memory import LiveBytes
from bench.timing import clear, gradient, time_in_rounds
from jagg_core import DanceSDE, initial_latents
from jagg_core.backbones import load_backbone, read_options
from jagg_core.distributed import FixedParameters, join_as
from jagg_core.records import Cell
from jagg_core.reference import TOLERANCE, relative_error
from jagg_core.rollouts import rollout
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import derive_seed, generator_for

if TYPE_CHECKING:
    from bench.settings import CollectiveBench

SETTLED_S = 0.2
"""Seconds in which a thread frees a tensor, even on a busy machine."""


@dataclass(frozen=True)
class RankRun:
    """An arm on this rank's share of the transformer. Gradients of a deferred arm wait for its last call."""

    run: ArmRun
    transformer: Any

    def __call__(self, between: Callable[[], None] = lambda: None) -> None:
        """Runs it. ``between`` is called when deferred gradients wait; at the end for other arms."""
        if not self.run.arm.deferred:
            self.run()
            between()
            return
        last = len(self.run.calls) - 1
        with without_reduction(self.transformer):
            for number in range(last):
                self.run.call(number)
        between()
        self.run.call(last)


def work(number: int, settings: CollectiveBench, folder: str) -> None:
    """Measures as rank ``number`` of those that were spawned, and writes the result to ``folder/NUMBER.json``."""
    measured = measure(number, number, settings, f"file://{folder}/rendezvous")
    (Path(folder) / f"{number}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def work_launched(settings: CollectiveBench) -> list[dict[str, Any]]:
    """Measures as the rank that torchrun started. Returns the results of all ranks on every rank."""
    measured = measure(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), settings, "env://")
    everywhere: list[Any] = [None] * settings.ranks
    dist.all_gather_object(everywhere, measured)
    dist.destroy_process_group()
    return everywhere


def measure(rank: int, local_rank: int, settings: CollectiveBench, rendezvous: str) -> dict[str, Any]:
    """Joins the group, then verifies, counts and times every arm.

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
    runs = _runs(settings, group, transformer)
    runs["exact"]()
    unused = any(parameter.grad is None for parameter in group.parameters)
    clear(group.parameters)
    expected = {} if settings.pretend else {name: _gradient(run) for name, run in runs.items()}
    parameters = sum(p.numel() for p in transformer.parameters())
    units = lay_out(backbone.blocks, transformer, settings.layout, dtype, settings.shards_per_copy, unused)
    group = _group(settings, backbone)  # a rollout of the weights as they now lie, which are other tensors
    runs = _runs(settings, group, transformer)
    for _ in range(2):  # sets communication up; DistributedDataParallel sorts its buckets again after a first backward
        _time(runs["exact"])
    cells = []
    for name, run in runs.items():
        values = _count(run)
        if not settings.pretend:
            values["relative_error"] = error = relative_error(_whole(group.parameters), expected[name])
            if not error <= TOLERANCE[dtype]:
                raise ArithmeticError(f"gradient of arm {name} under {settings.layout} is not the plain one: {error:g}")
        clear(group.parameters)
        cells.append(Cell(name, settings={"deferred": run.run.arm.deferred}, values=values))
    if not settings.pretend:
        time_in_rounds(cells, lambda name: _time(runs[name]), settings.rounds, settings.seed)
        time_in_rounds(cells, lambda name: _time_apart(runs[name]), settings.rounds, settings.seed)
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
    """Loads a rollout's first group: the same samples on every rank, so that reduced gradients equal plain ones."""
    seed = derive_seed(settings.seed, "collectives")
    parameters = list(backbone.transformer.parameters())
    policy = FixedParameters(backbone.policy(prompts_of(backbone, settings.batch)), parameters)
    precision = torch.promote_types(torch.float32, getattr(torch, settings.dtype))
    latents = initial_latents(backbone.latent_shape, seed, range(settings.batch)).to(backbone.device, precision)
    trajectory = rollout(policy, dance_schedule(settings.window + 1), DanceSDE(0.7), latents, seed)
    advantages = torch.randn(settings.batch, generator=generator_for(seed, "advantages")).to(backbone.device)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Group(policy, trajectory.select(range(settings.window)), advantages, trained, ())


def _runs(settings: CollectiveBench, group: Group, transformer: Any) -> dict[str, RankRun]:
    """Prepares every arm on a group, by name."""
    return {arm.name: RankRun(run_of(arm, group, settings.seed), transformer) for arm in arms_of("collectives")}


def _count(run: RankRun) -> dict[str, Any]:
    """Counts collectives, and measures the bytes of the gradients that wait on the rank (see `RankRun`)."""
    kept: list[int] = []
    with LiveBytes() as live, Counter() as counter:
        run(lambda: kept.append(_settled(live)))
    return {
        "counts": counter.counts,
        "backward_counts": counter.backward_counts,
        "backwards": len(counter.backwards),
        "bytes": counter.bytes,
        "retained_gradient_bytes": kept[0],
    }


def _settled(live: LiveBytes) -> int:
    """Waits until the bytes alive stay the same and returns them: gloo's threads free reduced tensors a bit later."""
    before = -1
    while before != live.now:
        before = live.now
        time.sleep(SETTLED_S)
    return before


def _time(run: RankRun) -> dict[str, float]:
    start = timer()
    run()
    seconds = timer() - start
    clear(run.run.group.parameters)
    return {"total_s": seconds}


def _time_apart(run: RankRun) -> dict[str, float]:
    with Stopwatch() as stopwatch:
        run()
    clear(run.run.group.parameters)
    return {f"{kind}_s": seconds for kind, seconds in stopwatch.seconds.items()}


def _gradient(run: RankRun) -> list[Tensor]:
    run()
    whole = _whole(run.run.group.parameters)
    clear(run.run.group.parameters)
    return whole


def _whole(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gathers whole gradients of parameters that may be sharded; zeros where there are none."""
    gradients: list[Any] = gradient(parameters)
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients]
