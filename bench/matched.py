"""Savings of a training step under settings that match: with checkpointing and without, on policy and off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bench.arms import ARMS, CLOSED_FORM, PAPER, Arm, Tally
from bench.cost import Machine, Update, seconds
from bench.work import PassWork

OPTIMIZER_STEPS = 3
"""Per rollout in DanceGRPO's public Flux script: 12 generations, accumulation 4. Only the first is on policy."""

TRIED = ((16, 9), (16, 15), (20, 19), (21, 20), (25, 24), (28, 27))
"""Sampling and trained steps under which published figures are looked for; the first are DanceGRPO's public ones."""

OTHER = (0.0, 0.1, 0.34)
"""Likewise, shares of other time in a step: decoding, rewards, communication."""


def rows_of(update: Update) -> list[tuple[str, Arm, Update, int]]:
    """Returns the plans to compare: label, what each runs, its update, and forwards off policy beyond one per step."""
    every = replace(update, jagg_frac=1.0)
    rows = [
        ("the paper's rule, first groups", ARMS[PAPER], update, 0),
        ("the same plan, closed-form s", ARMS[CLOSED_FORM], update, 0),
        ("the paper's rule, all groups", ARMS[PAPER], every, 0),
        ("all groups, closed-form s", ARMS[CLOSED_FORM], every, 0),
    ]
    for passes in update.passes:
        plan = ARMS["causal-{passes}-sequential"].at(passes)
        rows.append((f"causal, {passes} knots, closed-form s", plan, update, 0))
        rows.append((f"causal, {passes} shifted knots, closed-form s", plan, update, passes))
    return rows


def matched(work: PassWork, update: Update, machine: Machine) -> list[dict[str, Any]]:
    """Computes shares of a training step that plans save over exact on one device.

    ``with_checkpointing`` and ``without`` are on policy: one optimizer step per rollout. ``several_steps``, with
    checkpointing, has `OPTIMIZER_STEPS` of them: all but the first part of the samples are off policy, so that closed
    forms need a forward of every step as well, and of shifted knots another one at each site.
    """
    rows = []
    for label, arm, settings, sites in rows_of(update):
        tally = settings.tally(arm)
        # off policy the log-probabilities of all steps are needed; a knot's forward is one of these
        replayed = replace(tally, forwards=max(tally.forwards, settings.trained) + sites)
        on, off = (_saved(work, settings, replace(machine, checkpointing=True), each) for each in (tally, replayed))
        rows.append(
            {
                "plan": label,
                "passes": int(tally.backwards),
                "with_checkpointing": on,
                "without": _saved(work, settings, replace(machine, checkpointing=False), tally),
                "several_steps": (on + (OPTIMIZER_STEPS - 1) * off) / OPTIMIZER_STEPS,
            }
        )
    return rows


def _saved(
    work: PassWork, update: Update, machine: Machine, tally: Tally, sampled: int | None = None, stage: bool = False
) -> float:
    """Computes the saved share of exact's step, or of its update (``stage``); the rollout has ``sampled`` steps."""
    steps = update.steps if sampled is None else sampled
    rollout = seconds(Tally(steps, 0, steps, 0), work, machine, 1)
    exact = seconds(update.tally(ARMS["exact"]), work, machine, 1)
    others = 0.0 if stage else rollout + machine.other * (rollout + exact)
    return (exact - seconds(tally, work, machine, 1)) / (exact + others)


def fitting(work: PassWork, published: Sequence[float], machine: Machine) -> list[dict[str, Any]]:
    """Lists the settings of the paper's scheme whose predicted saving of a step lies between the published ones.

    They are `TRIED` steps, windows of 3 to 6, every number of leading groups, and `OTHER` time. Each has the saving of
    the update stage alone, which has no other time.
    """
    rows = []
    for (sampled, trained), window, other in product(TRIED, range(3, 7), OTHER):
        groups = trained // window
        for count in range(1, groups + 1):
            update = Update(trained + 1, window, count / groups)
            tally = update.tally(ARMS[PAPER])
            step = _saved(work, update, replace(machine, other=other), tally, sampled)
            if min(published) <= round(step, 3) <= max(published):
                about = {"sampled": sampled, "trained": trained, "window": window, "groups": f"{count} of {groups}"}
                stage = _saved(work, update, machine, tally, stage=True)
                rows.append(about | {"other": other, "step": step, "update_stage": stage})
    return rows
