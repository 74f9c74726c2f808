"""Speed-ups over exact of a record's arms, with intervals: the one tally that commands and pages print."""

from __future__ import annotations

from typing import Any

from bench.arms import name_of
from bench.noise import Ratio, median_of, ratio_of_medians
from jagg_core.records import Cell, Record

PARTS = ("rollout", "reward", "optimizer")
"""Cells of what every training step has besides the update: the rollout without gradients; decoding, and scoring
the images; clipping the gradient's norm, a step of AdamW, and clearing the gradients."""

PHASES = ("total", "forward", "upstream", "backward")
"""Of an arm of a group."""


def ok_cells(record: Record) -> dict[str, Cell]:
    """Returns the cells that were measured, by name."""
    return {cell.name: cell for cell in record.cells if cell.status == "ok"}


def group_speed_ups(record: Record) -> list[dict[str, Any]]:
    """Returns every arm of a timed group: median seconds by phase, and its speed-ups over exact in the same rounds.

    ``speed_up`` is of the whole group, ``backward`` of the backward phase (None where an arm has no such phase). Empty
    if exact failed.
    """
    cells = ok_cells(record)
    if "exact" not in cells:
        return []
    exact, rows = cells["exact"].samples, []
    for name, cell in cells.items():
        samples = cell.samples
        row: dict[str, Any] = {"arm": name_of(name), "passes": cell.values.get("passes")}
        for phase in PHASES:
            row[f"{phase}_s"] = median_of(samples[f"{phase}_s"]) if f"{phase}_s" in samples else None
        row["fastest_s"] = min(second for second in samples["total_s"] if second is not None)
        row["speed_up"] = ratio_of_medians(exact["total_s"], samples["total_s"])
        both = "backward_s" in samples and "backward_s" in exact
        row["backward"] = ratio_of_medians(exact["backward_s"], samples["backward_s"]) if both else None
        rows.append(row)
    return rows


def update_speed_ups(record: Record) -> list[dict[str, Any]]:
    """Returns every arm of an update, with its speed-ups over exact in the same rounds.

    ``backward`` is the ratio of passes, ``update`` that of the updates' seconds, ``step`` that of whole training steps:
    rollout, reward, update and optimizer, without a part that was skipped. ``step`` is undefined without a rollout, or
    if a part failed. Empty if exact failed.
    """
    cells = ok_cells(record)
    around = {part: cells.pop(part).samples["total_s"] for part in PARTS if part in cells}
    if "exact" not in cells:
        return []
    whole = "rollout" in around and not any(c.name in PARTS and c.status == "failed" for c in record.cells)
    exact, rows = cells["exact"], []
    for name, cell in cells.items():
        times = cell.samples["total_s"]
        step = ratio_of_medians(exact.samples["total_s"], times, list(around.values()))
        rows.append(
            {"arm": name_of(name), "passes": cell.values["passes"], "update_s": median_of(times)}
            | {f"{part}_s": median_of(samples) for part, samples in around.items()}
            | {"backward": exact.values["passes"] / cell.values["passes"]}
            | {"update": ratio_of_medians(exact.samples["total_s"], times)}
            | {"step": step if whole else Ratio(None, None, None, step.n)}
        )
    return rows
