"""What each of two gloo ranks does in test_ranks.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from jagg_core.engine import Report
from jagg_core.objective import ClippedSurrogate
from jagg_core.plans import jagg_plan
from tests.jagg_core.fields import ADVANTAGES, MlpField, gradient, make_rollout, nudge, with_log_ratios
from tests.spawning import grouped

WORLD = 2
OBJECTIVE = ClippedSurrogate(clip_range=1e-3)


def summary(report: Report, policy: MlpField, found: torch.Tensor, alone: torch.Tensor) -> dict[str, object]:
    """What the test looks at. ``alone`` is the same update without a process group."""
    return {
        "upstream": report.upstream,
        "forwards": report.forwards,
        "passes": report.passes,
        "backward_calls": report.backward_calls,
        "partly_clipped": report.partly_clipped,
        "calls": [[len(call.rows), call.sigmas[0], call.grad] for call in policy.calls],
        "gradient": found.tolist(),
        "alone": alone.tolist(),
    }


def work(rank: int, folder: Path) -> dict[str, object]:
    """Two cases: only rank 0 has partly clipped samples; only rank 1 has changed weights."""
    warnings.simplefilter("ignore")

    policy = MlpField()
    clipped = make_rollout(policy, seed=rank)
    if rank == 0:
        log_ratios = torch.zeros(6, 4, dtype=torch.float64)
        log_ratios[0, 0] = 0.05
        log_ratios[2, 2] = 0.05
        clipped = with_log_ratios(clipped, log_ratios)
    changed_policy = MlpField()
    changed = make_rollout(changed_policy, seed=rank)
    if rank == 1:
        nudge(changed_policy, 1e-6)
    plan = jagg_plan(clipped.sigmas, 3, 1.0)

    cases = {
        "clipped-joint": (policy, clipped, "autograd", "joint"),
        "clipped-batched": (policy, clipped, "autograd", "batched"),
        "clipped-sequential": (policy, clipped, "autograd", "sequential"),
        "changed-auto": (changed_policy, changed, "auto", "joint"),
    }
    alone = {
        name: gradient(p, t, ADVANTAGES, plan, OBJECTIVE, upstream, backward, partly_clipped="exact")[0]
        for name, (p, t, upstream, backward) in cases.items()
    }
    results = {}
    with grouped(folder / "rendezvous", rank, WORLD):
        for name, (p, t, upstream, backward) in cases.items():
            p.calls.clear()
            found, report = gradient(p, t, ADVANTAGES, plan, OBJECTIVE, upstream, backward, partly_clipped="exact")
            results[name] = summary(report, p, found, alone[name])
    return results
