"""What each of two gloo ranks does in test_ranks.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from jagg_core.engine import Meter, accumulate_gradients
from jagg_core.integrations import HostPolicy, plan_update
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import causal_plan, jagg_plan
from jagg_core.trajectory import Trajectory
from tests.jagg_core.fields import ADVANTAGES, MlpField, flat_gradient, gradient, make_rollout, with_log_ratios
from tests.spawning import grouped

WORLD = 2
CASES = [(upstream, backward) for upstream in ("auto", "autograd") for backward in ("sequential", "batched", "joint")]
OBJECTIVE = ClippedSurrogate(clip_range=1e-3)


class Field(MlpField):
    """`MlpField` with its velocity as its forward, which DistributedDataParallel wraps."""

    def forward(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self.velocity(latents, sigma, rows)


def rollout_of(field: Field, rank: int, clipped: bool) -> Trajectory:
    """Samples of this rank's own; rank 0 may have some that are partly clipped."""
    log_ratios = torch.zeros(6, 4, dtype=torch.float64)
    if clipped and rank == 0:
        log_ratios[1, 0] = 0.05
    return with_log_ratios(make_rollout(field, seed=rank), log_ratios)


def reentrant_cases(rank: int) -> dict[str, Any]:
    """By mode of the backward: the gradient under reentrant checkpointing and DistributedDataParallel, or the error."""
    found: dict[str, Any] = {}
    for backward in ("batched", "joint"):
        field = Field(checkpointing=True, reentrant=True)
        wrapped = torch.nn.parallel.DistributedDataParallel(field)
        trajectory = rollout_of(field, rank, False)
        plan = jagg_plan(trajectory.sigmas, 3, 1.0)
        try:
            accumulate_gradients(
                HostPolicy(wrapped, field.parameters()), trajectory, ADVANTAGES, plan, OBJECTIVE, "auto", backward
            )
            found[backward] = flat_gradient(field).tolist()
        except ValueError as error:
            found[backward] = str(error)
            assert field.inner.grad is None
    return found


def audited_cases(rank: int) -> dict[str, Any]:
    """With a reduction and without one: what an audit says under DistributedDataParallel, and what it changes."""
    found: dict[str, Any] = {}
    for synchronised in (True, False):
        gradients, meter = [], None
        for audited in (False, True):
            field = Field()
            wrapped = torch.nn.parallel.DistributedDataParallel(field, gradient_as_bucket_view=True)
            trajectory = rollout_of(field, rank, False)
            plan = causal_plan(trajectory.sigmas, [0, 2, 4])
            meter = Meter(list(field.parameters()), every=1) if audited else None
            with nullcontext() if synchronised else wrapped.no_sync():
                plan_update(
                    HostPolicy(wrapped, field.parameters()),
                    trajectory,
                    ADVANTAGES,
                    plan,
                    OBJECTIVE,
                    scale=1.0,
                    backward="batched",
                    audit=meter,
                )
            gradients.append(flat_gradient(field))
        assert meter is not None
        same = torch.equal(*gradients)
        found[str(synchronised)] = {"same": same, "audits": meter.state()["audits"], "size": gradients[1].norm().item()}
    return found


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Two micro-batches of six steps per optimizer step, through Accelerate's DistributedDataParallel."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # Accelerate asks for them, though the group stands
    field = Field()
    alone: dict[str, list[float]] = {}
    for upstream, backward in CASES:
        trajectory = rollout_of(field, rank, upstream == "autograd")
        plan = causal_plan(trajectory.sigmas, [0, 2, 4])
        found, _ = gradient(field, trajectory, ADVANTAGES, plan, OBJECTIVE, upstream, backward, scale=2 / 12)
        alone[f"{upstream}-{backward}"] = found.tolist()
    field.zero_grad()

    with grouped(folder / "rendezvous", rank, WORLD):
        return under_accelerate(rank, field, alone)


def under_accelerate(rank: int, field: Field, alone: dict[str, list[float]]) -> dict[str, Any]:
    """The same in a process group, beside what each rank found ``alone``."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=12)
    wrapped = accelerator.prepare(field)
    reductions: list[int] = []

    def reduce(group, bucket):  # type: ignore[no-untyped-def]  # torch does not read postponed annotations
        reductions.append(1)
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, reduce)
    policy = HostPolicy(wrapped, field.parameters())
    results: dict[str, Any] = {}
    for upstream, backward in CASES:
        field.zero_grad()
        reductions.clear()
        trajectory = rollout_of(field, rank, upstream == "autograd")
        plan = causal_plan(trajectory.sigmas, [0, 2, 4])
        reports = [
            plan_update(
                policy,
                trajectory,
                ADVANTAGES,
                plan,
                OBJECTIVE,
                scale=1.0,
                upstream=upstream,
                backward=backward,
                partly_clipped="exact",
                accelerator=accelerator,
                models=[wrapped],
            )
            for _ in range(2)
        ]
        name = f"{upstream}-{backward}"
        results[name] = {
            "type": type(wrapped).__name__,
            "passes": [report.passes for report in reports],
            "upstream": [report.upstream for report in reports],
            "reductions": len(reductions),
            "contexts": accelerator.step,
            "gradient": flat_gradient(field).tolist(),
            "alone": alone[name],
        }
    results["reentrant"] = reentrant_cases(rank)
    results["audited"] = audited_cases(rank)
    return results
