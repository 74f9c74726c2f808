"""How noisy a machine was: exact timed against itself, which is 1 but for noise."""

from __future__ import annotations

import math

import numpy as np

from jagg_core.records import Cell, Record, RecordError

DRAWS = 9999

NOISY = 0.2
"""Noise floor from which a record warns: the paper's whole update is faster by so much, and would not be told."""


def times_of(cell: Cell) -> list[float]:
    """Seconds of a cell's runs.

    Raises:
        RecordError: fewer than two, or one that is not positive.
    """
    times = [time for time in cell.samples.get("total_s", []) if time is not None]
    if len(times) < 2 or any(not 0 < time < math.inf for time in times):
        raise RecordError(f"arm {cell.name} needs at least two positive times, found {times}")
    return times


def ratio_of_medians(numerator: list[float], denominator: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Ratio of medians of two runs' samples, and its 95 % percentile bootstrap interval (runs resampled apart)."""
    generator = np.random.default_rng(seed)
    medians = [
        np.median(generator.choice(np.asarray(samples), (DRAWS, len(samples))), axis=1)
        for samples in (numerator, denominator)
    ]
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return float(np.median(numerator) / np.median(denominator)), float(low), float(high)


def exact_against_itself(record: Record) -> tuple[float, float, float]:
    """Median time of exact-again over exact's, with its interval.

    Raises:
        RecordError: one of them was not timed.
    """
    cells = {cell.name: cell for cell in record.cells if cell.status == "ok"}
    if not {"exact", "exact-again"} <= cells.keys():
        raise RecordError("a run needs the arms exact and exact-again, whose difference is the noise floor")
    return ratio_of_medians(times_of(cells["exact-again"]), times_of(cells["exact"]))


def floor_of(low: float, high: float) -> float:
    """The further end of an interval around 1: 0.03 is three percent."""
    return max(1 / low, high) - 1


def noise_findings(record: Record) -> list[str]:
    """A warning if the noise floor of a record is above `NOISY`; nothing where exact was not timed twice."""
    try:
        ratio, low, high = exact_against_itself(record)
    except RecordError:
        return []
    floor = floor_of(low, high)
    if floor <= NOISY:
        return []
    return [
        f"warning: exact timed again takes {ratio:.3f} [{low:.3f}, {high:.3f}] times as long as exact, which is 1 but "
        f"for noise: differences below {floor:.0%} cannot be told; time it again when the machine does nothing else, "
        "or in more rounds"
    ]


def note_noise(record: Record) -> None:
    """Keep the warning in the record, where its page finds it."""
    findings = noise_findings(record)
    if findings:
        record.cell("exact-again").values["findings"] = findings
