"""Two runs of ``python -m bench group`` against each other, arm by arm, from raw samples and a noise floor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.noise import Ratio, noise_floor, ratio_of_medians, times_of
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

Verdict = Literal["faster", "slower", "same", "ambiguous", "missing", "failed"]

FAILING = ("slower", "ambiguous", "missing", "failed")
COMPARE_EXAMPLE = "example: python -m bench compare results/before.json results/after.json --fail-on slower missing"

ALIKE = ("backbone", "window", "batch", "device", "dtype", "checkpointing", "compile", "eta", "steps")
"""Settings that two runs must share to be compared."""

MACHINE = ("processor", "cores", "threads", "devices")
"""What makes a machine, of a record's environment."""


@dataclass(frozen=True)
class Comparison:
    """One arm of two runs.

    Attributes:
        arm: its name.
        verdict: of the second run, seen from the first. ``faster``, ``slower``: the whole interval lies beyond the
            noise floor; ``same``: the ratio does not; ``ambiguous``: the ratio does, the interval does not, and more
            rounds would tell. ``missing``, ``failed``: there is nothing to compare in one of the runs.
        ratio: of median times, second over first; None without samples.
        low: lower end of its 95 % bootstrap interval.
        high: upper end.
    """

    arm: str
    verdict: Verdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(first: Record, second: Record, across_machines: bool = False) -> tuple[float, list[Comparison]]:
    """Compares every arm of either run. Returns the noise floor, of which 0.03 is three percent, and the arms.

    The floor is what timing exact twice in one run shows: the further end of the interval of that ratio, in the worse
    of the two runs.

    Raises:
        RecordError: another kind of record, other settings, no noise floor, or another machine (unless allowed).
    """
    _require_alike(first, second, across_machines)
    floor = max(noise_floor(record) for record in (first, second))
    cells = [{cell.name: cell for cell in record.cells} for record in (first, second)]
    names = [cell.name for cell in first.cells] + [c.name for c in second.cells if c.name not in cells[0]]
    return floor, [_compare_arm(name, cells[0].get(name), cells[1].get(name), floor) for name in names]


def _require_alike(first: Record, second: Record, across_machines: bool) -> None:
    for record in (first, second):
        if record.kind != "group-speed":
            raise RecordError(f"records of python -m bench group are compared, got kind {record.kind!r}")
    for name in ALIKE:
        one, other = (record.settings.get(name) for record in (first, second))
        if one != other:
            raise RecordError(f"{name} must be the same in both runs, got {one!r} and {other!r}")
    for name in MACHINE:
        # records of CUDA devices alone had them under another name
        one, other = (r.environment.get(name, r.environment.get(f"cuda_{name}")) for r in (first, second))
        if one != other and not across_machines:
            raise RecordError(
                f"the runs are of different machines ({name}: {one!r} and {other!r}); compare them all the same with "
                "--across-machines"
            )


def _compare_arm(name: str, first: Cell | None, second: Cell | None, floor: float) -> Comparison:
    if first is None or second is None:
        return Comparison(name, "missing")
    if first.status != "ok" or second.status != "ok":
        return Comparison(name, "failed")
    verdict, ratio = compare_times(times_of(first), times_of(second), floor)
    return Comparison(name, verdict, ratio.value, ratio.low, ratio.high)


def compare_times(first: Sequence[float], second: Sequence[float], floor: float) -> tuple[Verdict, Ratio]:
    """Compares seconds of two runs: the verdict on the second, and the ratio of medians, second over first."""
    ratio = ratio_of_medians(second, first, paired=False)
    assert ratio.value is not None and ratio.low is not None and ratio.high is not None
    upper, lower = 1 + floor, 1 / (1 + floor)
    if ratio.low > upper:
        return "slower", ratio
    if ratio.high < lower:
        return "faster", ratio
    return "same" if lower <= ratio.value <= upper else "ambiguous", ratio


def add_compare(commands: Any) -> None:
    """Adds the command ``compare``."""
    compared = commands.add_parser(
        "compare",
        help="is a run of bench group faster than another?",
        description="Ratios of median times with intervals, arm by arm, against the noise floor: what timing exact "
        "twice shows.",
        epilog=COMPARE_EXAMPLE,
    )
    compared.add_argument("first", type=Path, help="record of the run before")
    compared.add_argument("second", type=Path, help="record of the run after")
    compared.add_argument("--across-machines", action="store_true", help="compare runs of different machines")
    compared.add_argument(
        "--fail-on",
        nargs="*",
        choices=FAILING,
        default=[],
        help="exit with 1 if an arm has such a verdict",
    )


def compare_runs(arguments: argparse.Namespace) -> list[str]:
    """Prints a line per arm. Returns the verdicts that the caller asked to fail on."""
    first, second = (Record.read(path) for path in (arguments.first, arguments.second))
    floor, compared = compare(first, second, arguments.across_machines)
    print(f"noise floor {floor:.1%}; ratios of median times, second run over first, with 95 % intervals")
    for one in compared:
        numbers = "" if one.ratio is None else f"{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}]"
        print(f"{one.verdict:<10} {one.arm:<24} {numbers}".rstrip())
    return [f"{one.arm}: {one.verdict}" for one in compared if one.verdict in arguments.fail_on]
