"""Rivals of a plan: published ways to save passes that train on some of the steps only, as plans.

Which steps are kept changes from batch to batch, so each is drawn from the batch's seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.measure.estimators import NamedPlan
from jagg_core import Plan, subsample_plan
from jagg_core.seeding import generator_for

MIX_WINDOW = 4
"""Steps of MixGRPO's window by default."""

FAST_WINDOW = 2
"""Steps of Flow-GRPO-Fast's window, drawn from the noisier half of the schedule."""


def kept_steps_plan(sigmas: Tensor, kept: list[int], name: str) -> Plan:
    """Makes the exact gradient of some steps alone."""
    weights = torch.zeros(len(kept), sigmas.shape[-1], dtype=torch.float64)
    weights[range(len(kept)), kept] = 1
    return Plan(tuple(kept), weights, sigmas, name)


def per_sample_plan(sigmas: Tensor, count: int, batch: int, generator: torch.Generator) -> Plan:
    """Makes a plan of ``count`` random steps per sample (DanceGRPO's ``timestep_fraction``), weighted ``T / count``.

    Raises:
        ValueError: ``count`` outside 1..T.
    """
    drawn = [subsample_plan(sigmas, count, generator) for _ in range(batch)]
    steps = sigmas.shape[-1]
    weights = torch.zeros(batch, steps, steps, dtype=torch.float64)
    for sample, plan in enumerate(drawn):
        weights[sample, list(plan.knots)] = plan.weights
    return Plan(tuple(range(steps)), weights, sigmas, "per-sample")


def per_sample(sigmas: Tensor, batch: int, counts: Sequence[int], seed: int) -> list[NamedPlan]:
    """Draws random steps of every sample for one rollout batch of so many samples."""
    plans = []
    for count in (c for c in counts if c < sigmas.shape[-1]):
        plan = per_sample_plan(sigmas, count, batch, generator_for(seed, "rivals", "per-sample", count))
        label = f"subsample, {count} random steps per sample"
        plans.append(NamedPlan(f"per-sample-{count}", label, "subsample", (plan,), {}))
    return plans


def rivals(sigmas: Tensor, counts: Sequence[int], seed: int) -> list[NamedPlan]:
    """Makes every rival that trains all samples on the same steps; subsampling with each of ``counts`` passes.

    All of them are sums of exact's passes.
    """
    steps = sigmas.shape[-1]
    plans = []

    def start(purpose: str, stop: int) -> int:
        return int(torch.randint(max(1, stop), (), generator=generator_for(seed, "rivals", purpose)))

    for count in (c for c in counts if c < steps):
        shared = subsample_plan(sigmas, count, generator_for(seed, "rivals", "subsample", count))
        text = f"{count} random steps"
        plans.append(NamedPlan(f"subsample-{count}", f"subsample, {text}", "subsample", (shared,), {}))
    for name, label, size, stop in (
        ("mixgrpo", "MixGRPO's window", MIX_WINDOW, steps - MIX_WINDOW + 1),
        ("flow-grpo-fast", "Flow-GRPO-Fast's window", FAST_WINDOW, steps // 2 - FAST_WINDOW + 1),
    ):
        if size < steps:
            first = start(name, stop)
            plan = kept_steps_plan(sigmas, list(range(first, first + size)), name)
            plans.append(NamedPlan(name, f"{label}, {size} steps", "window", (plan,), {}))
    for name, kept in (("high-noise", range(steps // 2)), ("low-noise", range(steps // 2, steps))):
        if len(kept):
            plan = kept_steps_plan(sigmas, list(kept), name)
            plans.append(NamedPlan(f"{name}-half", f"{name} half only", "half", (plan,), {}))
    return plans
