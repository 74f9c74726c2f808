"""Ratios of times, and how noisy a machine was: exact timed against itself, which is 1 but for noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

DRAWS = 9999

NOISY = 0.2
"""Noise floor from which a record warns: the paper's whole update is faster by so much, and would not be resolved."""

Samples = Sequence[float | None]


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its 95 % percentile bootstrap interval from ``n`` rounds. None: undefined."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def median_of(samples: Samples) -> float:
    """Computes the median of the defined samples.

    Raises:
        ValueError: none is defined.
    """
    defined = [sample for sample in samples if sample is not None]
    if not defined:
        raise ValueError("samples must have a defined value, got none")
    return float(np.median(defined))


def times_of(cell: Cell) -> list[float]:
    """Returns the seconds of a cell's runs.

    Raises:
        RecordError: fewer than two, or one that is not positive.
    """
    times = [time for time in cell.samples.get("total_s", []) if time is not None]
    if len(times) < 2 or any(not 0 < time < math.inf for time in times):
        raise RecordError(f"arm {cell.name} needs at least two positive times, got {times}")
    return times


def ratio_of_medians(
    numerator: Samples,
    denominator: Samples,
    common: Sequence[Samples] = (),
    *,
    paired: bool = True,
    seed: int = 0,
) -> Ratio:
    """Computes a ratio of medians and its interval; every speed-up and every noise floor is one of these.

    Arms of one run take turns within a round, so a slow round is slow for all of them: rounds are drawn with
    replacement, and every arm keeps the round's time. Two runs share no rounds: each is resampled apart.

    Args:
        numerator: seconds, one per round.
        denominator: likewise.
        common: seconds of the same rounds whose medians are added to both sides, such as a rollout to two updates.
        paired: the samples are of the same rounds.
        seed: of the resampling.

    Raises:
        ValueError: fewer than two samples, or paired samples of different number.
    """
    counts = [len(samples) for samples in (numerator, denominator, *common)]
    if min(counts) < 2 or (paired and len(set(counts)) > 1):
        raise ValueError(f"samples must be paired and at least 2, got {' and '.join(map(str, counts))}")
    arrays = [np.array(samples, dtype=np.float64) for samples in (numerator, denominator, *common)]
    generator = np.random.default_rng(seed)
    rounds = [generator.integers(count, size=(DRAWS, count)) for count in (counts[:1] if paired else counts)]
    places = rounds * len(counts) if paired else rounds

    def ratio(parts: Sequence[np.ndarray]) -> np.ndarray:
        medians = [np.median(part, axis=-1) for part in parts]
        shared = sum(medians[2:])
        return np.asarray((medians[0] + shared) / (medians[1] + shared))

    low, high = np.percentile(ratio([a[place] for a, place in zip(arrays, places, strict=True)]), [2.5, 97.5])
    return Ratio(float(ratio(arrays)), float(low), float(high), min(counts))


def exact_against_itself(record: Record) -> Ratio:
    """Computes the median time of exact-again over exact's.

    Raises:
        RecordError: one of them was not timed in every round.
    """
    cells = {cell.name: cell for cell in record.cells if cell.status == "ok"}
    if not {"exact", "exact-again"} <= cells.keys():
        raise RecordError("a run needs the arms exact and exact-again, whose difference is the noise floor")
    again, exact = times_of(cells["exact-again"]), times_of(cells["exact"])
    if len(again) != len(exact):
        raise RecordError(f"exact and exact-again must have the same rounds, got {len(exact)} and {len(again)}")
    return ratio_of_medians(again, exact)


def noise_floor(record: Record) -> float:
    """Computes how far exact, timed again, may be from exact: the further end of the interval. 0.03 is three percent.

    Raises:
        RecordError: exact was not timed twice.
    """
    ratio = exact_against_itself(record)
    assert ratio.low is not None and ratio.high is not None
    return max(1 / ratio.low, ratio.high) - 1


def noise_findings(record: Record) -> list[str]:
    """Returns a warning if the noise floor of a record is above `NOISY`; nothing where exact was not timed twice."""
    try:
        ratio, floor = exact_against_itself(record), noise_floor(record)
    except RecordError:
        return []
    if floor <= NOISY:
        return []
    return [
        f"warning: exact timed again takes {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times as long as "
        f"exact ({ratio.n} rounds), which should be 1: differences below {floor:.1%} are within the noise; time it "
        "again when the machine does nothing else, or in more rounds"
    ]


def note_noise(record: Record) -> None:
    """Keeps the warning in the record, where its page finds it."""
    findings = noise_findings(record)
    if findings:
        record.cell("exact-again").values["findings"] = findings
    else:
        for cell in record.cells:
            if cell.name == "exact-again":
                cell.values.pop("findings", None)
