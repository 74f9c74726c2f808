"""Comparing runs: verdicts from samples and noise, refusals, and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.__main__ import main
from bench.compare import Comparison, compare
from bench.noise import Ratio, ratio_of_medians
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

SETTINGS = {"backbone": "digits-flux", "window": 5, "batch": 16, "device": "cpu", "dtype": "float32", "steps": 21}
MACHINE = {"processor": "one", "cores": 2, "threads": 2, "cuda_devices": []}


def run(noise: float = 0.01, rounds: int = 15, seed: int = 0, **medians: float) -> Record:
    """A run with ``exact`` at 1 s, twice, and further arms."""
    generator = np.random.default_rng(seed)
    times = {"exact": 1.0, "exact-again": 1.0} | {name.replace("_", "-"): median for name, median in medians.items()}
    cells = [
        Cell(name, samples={"total_s": (median * (1 + noise * generator.standard_normal(rounds))).tolist()})
        for name, median in times.items()
    ]
    return Record("group-speed", [], "digits-flux", dict(SETTINGS), {}, environment=dict(MACHINE), cells=cells)


def verdicts(first: Record, second: Record, **options: Any) -> dict[str, str]:
    return {one.arm: one.verdict for one in compare(first, second, **options)[1]}


def test_faster_slower_and_same() -> None:
    first = run(paper=0.6, batched=0.3, sequential=0.4)
    second = run(seed=1, paper=0.9, batched=0.2, sequential=0.4)
    found = verdicts(first, second)
    assert found == {
        "exact": "same",
        "exact-again": "same",
        "paper": "slower",
        "batched": "faster",
        "sequential": "same",
    }
    assert verdicts(second, first)["paper"] == "faster"


def test_a_change_within_the_noise_is_none() -> None:
    floor, found = compare(run(noise=0.2, paper=0.6), run(noise=0.2, seed=1, paper=0.63))
    assert floor > 0.05
    assert {one.arm: one.verdict for one in found}["paper"] == "same"


def test_too_few_rounds_for_a_change_beyond_the_noise() -> None:
    first, second = run(noise=0.001), run(noise=0.001, seed=1)
    first.cells.append(Cell("wide", samples={"total_s": [0.4, 0.6, 0.8]}))
    second.cells.append(Cell("wide", samples={"total_s": [0.5, 0.7, 0.9]}))
    floor, found = compare(first, second)
    wide = found[-1]
    assert wide.verdict == "ambiguous"
    assert wide.ratio is not None and wide.low is not None and wide.low < 1 < 1 + floor < wide.ratio


def test_the_floor_is_the_worse_of_both_runs() -> None:
    quiet, noisy = run(noise=0.001), run(noise=0.1, seed=1)
    floor = compare(quiet, noisy)[0]
    assert floor == compare(noisy, quiet)[0] > compare(quiet, quiet)[0] > 0


def test_cells_that_are_missing_or_failed_are_told_apart() -> None:
    first, second = run(paper=0.6, batched=0.3), run(seed=1, paper=0.6, extra=0.5)
    first.cells.append(Cell("joint", "failed", "out of memory"))
    second.cells.append(Cell("joint", samples={"total_s": [1.0, 1.0]}))
    found = {one.arm: one for one in compare(first, second)[1]}
    assert found["batched"] == Comparison("batched", "missing")
    assert found["extra"].verdict == "missing"
    assert found["joint"].verdict == "failed"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: setattr(r, "kind", "cost"), "records of python -m bench group are compared, got kind 'cost'"),
        (lambda r: r.settings.update(batch=4), "batch must be the same in both runs, got 16 and 4"),
        (lambda r: r.environment.update(processor="two"), r"different machines \(processor: 'one' and 'two'\)"),
        (lambda r: r.environment.update(threads=4), r"different machines \(threads: 2 and 4\)"),
        (lambda r: r.cells.pop(1), "needs the arms exact and exact-again"),
        (lambda r: r.cells[0].samples.update(total_s=[1.0]), "arm exact needs at least two positive times"),
        (lambda r: r.cells[0].samples.update(total_s=[0.0, 1.0]), "arm exact needs at least two positive times"),
    ],
)
def test_what_is_not_compared(change: Any, match: str) -> None:
    second = run(seed=1)
    change(second)
    with pytest.raises(RecordError, match=match):
        compare(run(), second)


def test_other_machines_are_compared_on_request() -> None:
    second = run(seed=1)
    second.environment["processor"] = "two"
    assert verdicts(run(), second, across_machines=True)["exact"] == "same"


def test_the_ratio_and_its_interval() -> None:
    assert ratio_of_medians([2.0] * 9, [1.0] * 9, paired=False) == Ratio(2.0, 2.0, 2.0, 9)
    samples = np.random.default_rng(0).normal(2.0, 0.1, 15).tolist()
    found = ratio_of_medians(samples, [1.0] * 15, paired=False)
    assert found.low < found.value < found.high < found.low + 0.3  # type: ignore[operator]
    assert ratio_of_medians(samples, [1.0] * 15, paired=False) == found


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    run(paper=0.6).write(before)
    run(seed=1, paper=0.9).write(after)
    main(["compare", str(before), str(after)])
    printed = capsys.readouterr().out
    assert "noise floor" in printed and "slower     paper" in printed
    main(["compare", str(before), str(after), "--fail-on", "missing", "failed"])
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(before), str(after), "--fail-on", "slower"])
    assert caught.value.code == 1
    assert "paper: slower" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(before), str(tmp_path / "nowhere.json")])
    assert caught.value.code == 2
    assert "nowhere.json" in capsys.readouterr().err
