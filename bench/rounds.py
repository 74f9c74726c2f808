"""Arms that take turns: verified one by one, then timed in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bench.compiling import compiled_graphs
from jagg_core.records import Cell
from jagg_core.seeding import generator_for


def time_in_rounds(
    cells: Sequence[Cell],
    execute: Callable[[str], dict[str, float]],
    rounds: int,
    seed: int,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Add to every cell that is ok what ``execute(name)`` measures (seconds by name), once per round.

    The order of the arms is drawn anew in every round, so that a machine that gets slower does so for all of them. An
    arm during which torch.compile made a graph timed that instead: it is failed after the rounds.
    """
    timed = [cell for cell in cells if cell.status == "ok"]
    compiled = dict.fromkeys(range(len(timed)), 0)
    order = generator_for(seed, "arm order")
    for number in range(rounds):
        for index in torch.randperm(len(timed), generator=order).tolist():
            before = compiled_graphs()
            for name, seconds in execute(timed[index].name).items():
                timed[index].samples.setdefault(name, []).append(seconds)
            compiled[index] += compiled_graphs() - before
        if progress is not None:
            progress(f"round {number + 1} of {rounds}")
    for index, graphs in compiled.items():
        if graphs:
            cell = timed[index]
            cell.status, cell.reason = "failed", f"torch.compile made graphs after the warm-up, {graphs} in all"
            cell.samples, cell.values = {}, {}
