"""What each rank of a count does: every arm without sharding, then every arm with it. Spawned processes import it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.group import TOLERANCE, Arm, arms_for, relative_error
from jagg_core import (
    ClippedSurrogate,
    DanceSDE,
    Plan,
    Trajectory,
    VelocityPolicy,
    accumulate_gradients,
    exact_plan,
    initial_latents,
)
from jagg_core.backbones import load_backbone, read_options
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import derive_seed, generator_for
from jagg_core.trajectory import rollout

if TYPE_CHECKING:
    from bench.collectives import CollectiveBench

KINDS = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce"}
"""How torch's operators name collectives, and what they are called here."""

DEFERRED = "exact-deferred"
"""Exact, with gradients kept unsharded until the group's last backward."""


class Counter(TorchDispatchMode):
    """Counts collectives by kind, and the bytes that a rank receives (gather) or contributes (scatter)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(KINDS.values(), 0)
        self.bytes = dict.fromkeys(KINDS.values(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name
            kind = next((ours for theirs, ours in KINDS.items() if theirs in name), None)
            if kind is not None:
                self.counts[kind] += 1
                self.bytes[kind] += max(tensor.nbytes for tensor in _tensors(args))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def shard(blocks: list[nn.Module], transformer: nn.Module, reshard_after_forward: bool) -> int:
    """Shard every block, and the rest of the transformer. Returns how many units there are."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(transformer, reshard_after_forward=reshard_after_forward)
    return len(blocks) + 1


def work(rank: int, settings: CollectiveBench, folder: str) -> None:
    """Count on this rank, and write what was found to ``folder/RANK.json``."""
    _join(rank, settings, folder)
    device = torch.device(settings.device, rank) if settings.device == "cuda" else torch.device(settings.device)
    options = read_options(settings.backbone, settings.backbone_options)
    backbone: Any = load_backbone(settings.backbone, device, getattr(torch, settings.dtype), **options)
    if settings.checkpointing:
        backbone.enable_gradient_checkpointing()
    expected = {name: _gradient(run, backbone.transformer) for name, run in _runs(settings, backbone).items()}
    parameters = sum(p.numel() for p in backbone.transformer.parameters())
    units = shard(backbone.blocks, backbone.transformer, settings.reshard == "after_forward")
    runs = _runs(settings, backbone)  # with a rollout of the sharded weights, which are other tensors
    found = {}
    for name, run in runs.items():
        _gradient(run, backbone.transformer)  # the first pass sets communication up
        with Counter() as counter:
            seconds, retained = _timed(run, device, backbone.transformer, name == DEFERRED)
        error = None if settings.pretend else _error(_take(backbone.transformer), expected[name])
        _clear(backbone.transformer)
        found[name] = {
            "counts": counter.counts,
            "bytes": counter.bytes,
            "relative_error": error,
            "retained_gradient_bytes": retained,
            "seconds": [seconds],
        }
        if error is not None and error > TOLERANCE[getattr(torch, settings.dtype)]:
            raise ValueError(f"the sharded gradient of arm {name} differs from the plain one by {error:g}")
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"units": units, "parameters": parameters, "arms": found}))
    dist.destroy_process_group()


def _join(rank: int, settings: CollectiveBench, folder: str) -> None:
    if settings.device == "cpu":
        torch.set_num_threads(1)
    if settings.pretend:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=settings.ranks, store=FakeStore())
        return
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.timeout),
    )


def _group(settings: CollectiveBench, backbone: Any) -> tuple[VelocityPolicy, Trajectory, Tensor]:
    """A rollout's first group. Every rank has the same samples, so that sharded gradients equal plain ones."""
    seed = derive_seed(settings.seed, "collectives")
    prompts = [backbone.prompts[i % len(backbone.prompts)] for i in range(settings.batch)]
    policy = _Kept(backbone.policy(prompts), list(backbone.transformer.parameters()))
    precision = torch.promote_types(torch.float32, getattr(torch, settings.dtype))
    latents = initial_latents(backbone.latent_shape, seed, range(settings.batch)).to(backbone.device, precision)
    trajectory = rollout(policy, dance_schedule(settings.window + 1), DanceSDE(0.7), latents, seed)
    advantages = torch.randn(settings.batch, generator=generator_for(seed, "advantages")).to(backbone.device)
    return policy, trajectory.select(range(settings.window)), advantages


class _Kept:
    """A policy that always shows the same parameters: a module shows gathered ones while it is not resharded."""

    def __init__(self, policy: Any, parameters: list[nn.Parameter]) -> None:
        self.velocity = policy.velocity
        self.signature = policy.signature
        self._parameters = parameters

    def parameters(self) -> list[nn.Parameter]:
        """As they were when the arms were made."""
        return self._parameters


def _runs(settings: CollectiveBench, backbone: Any) -> dict[str, Callable[[], None]]:
    """Every arm on a rollout's first group, by name."""
    policy, trajectory, advantages = _group(settings, backbone)

    def run(plan: Plan, part: Trajectory, arm: Arm) -> None:
        modes: dict[str, Any] = {"upstream": arm.upstream, "backward": arm.backward}
        accumulate_gradients(policy, part, advantages, plan, ClippedSurrogate(), **modes)

    def run_deferred(arm: Arm) -> None:
        last = trajectory.steps - 1
        first, rest = (trajectory.select(steps) for steps in (range(last), range(last, last + 1)))
        with _without_scatter(backbone.transformer):
            run(exact_plan(first.sigmas), first, arm)
        run(exact_plan(rest.sigmas), rest, arm)

    found: dict[str, Callable[[], None]] = {}
    for arm in arms_for(trajectory.sigmas, settings.window):
        if arm.plan is not None and arm.name != "exact-again":
            found[arm.name] = partial(run, arm.plan, trajectory, arm)
        if arm.name == "exact":
            found[DEFERRED] = partial(run_deferred, arm)
    return found


@contextmanager
def _without_scatter(transformer: Any) -> Iterator[None]:
    switch = getattr(transformer, "set_requires_gradient_sync", lambda on: None)  # not there before it is sharded
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _timed(run: Callable[[], None], device: torch.device, transformer: Any, deferred: bool) -> tuple[float, int]:
    """Seconds of a run, and bytes of gradients that it keeps unsharded meanwhile."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    # FSDP2 accumulates unsharded gradients in the dtype of reduction, fp32 unless told otherwise
    return seconds, 4 * sum(p.numel() for p in transformer.parameters() if p.requires_grad) if deferred else 0


def _gradient(run: Callable[[], None], transformer: nn.Module) -> list[Tensor | None]:
    run()
    found = _take(transformer)
    _clear(transformer)
    return found


def _take(transformer: nn.Module) -> list[Tensor | None]:
    """Whole gradients by parameter."""
    found: list[Tensor | None] = []
    for parameter in transformer.parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found.append(None if whole is None else whole.detach().clone())
    return found


def _clear(transformer: nn.Module) -> None:
    for parameter in transformer.parameters():
        parameter.grad = None


def _error(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    if [gradient is None for gradient in found] != [gradient is None for gradient in expected]:
        raise ValueError("sharding changes which parameters get a gradient")
    return relative_error(*([gradient for gradient in part if gradient is not None] for part in (found, expected)))
