"""Knots for the policy as it is, searched during training."""

from __future__ import annotations

from analysis.measure.cross_table import collect_table
from analysis.measure.knot_search import KnotSearch
from jagg_core import causal_plan
from jagg_core.distributed import on_any_rank
from jagg_core.grpo import GRPOTrainer
from jagg_core.grpo.plans import make_plan
from jagg_core.grpo.trainer import Recalibration

REACH = 12
"""Steps that a knot is compared with after its step: a table has about ``T (REACH + 1)`` backwards."""


def causal_knots(trainer: GRPOTrainer) -> Recalibration:
    """Searches the best causal knots, as many as the trainer's plan has, on one rollout batch of the policy as it is.

    Costs a backward per pair of steps within `REACH`. Under FSDP2 called on every rank.

    Raises:
        ValueError: no sample has an advantage, or the plan has too few knots to be judged within `REACH`.
    """
    sigmas = trainer.sigmas[:-2]
    before = make_plan(trainer.plan, sigmas, 0).knots
    tables = [
        collect_table(policy, trajectory, advantages, trainer.objective, past=REACH, future=0)
        for policy, trajectory, advantages in trainer.batches("recalibration")
        if on_any_rank(bool(advantages.any()), advantages.device)  # where weights are sharded all take part
    ]
    search = KnotSearch(tables, sigmas, causal_plan)
    searched = search.search().get(len(before))
    if searched is None:
        raise ValueError(
            f"recalibrate: {len(before)} knots of {len(sigmas)} steps cannot be judged within {REACH} steps"
        )
    # a search goes down from all steps and may miss what is already in use
    best = max((searched, before), key=search.score)
    return Recalibration(best, search.score(before), search.score(best))
