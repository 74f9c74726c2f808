"""Arms that take turns: verified one by one, then timed in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

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

    The order of the arms is drawn anew in every round, so that a machine that gets slower does so for all of them.
    """
    timed = [cell for cell in cells if cell.status == "ok"]
    order = generator_for(seed, "arm order")
    for number in range(rounds):
        for index in torch.randperm(len(timed), generator=order).tolist():
            for name, seconds in execute(timed[index].name).items():
                timed[index].samples.setdefault(name, []).append(seconds)
        if progress is not None:
            progress(f"round {number + 1}")
