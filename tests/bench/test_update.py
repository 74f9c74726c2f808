"""Whole updates: every way is verified, the paper's parts amount to its plan, and ratios add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.update import ROLLOUT, UpdateBench, paper_parts, run_update_bench, speed_ups
from jagg_core import dance_schedule, jagg_plan
from jagg_core.records import Cell, Record

CALIBRATION = (
    Path(__file__).parents[2] / "results" / "reference" / "digits-flux-calibration" / "calibration-eta0.7.json"
)
SIGMAS = dance_schedule(21)[:-2]


@pytest.mark.parametrize(("window", "frac"), [(4, 0.6), (4, 1.0), (6, 1.0), (5, 0.0)])
def test_the_papers_parts_amount_to_its_plan(window: int, frac: float) -> None:
    weights = torch.zeros(len(SIGMAS), len(SIGMAS), dtype=torch.float64)
    for part in paper_parts(SIGMAS, window, frac):
        start = part.steps.start
        for row, knot in enumerate(part.plan.knots):
            weights[start + knot, start : part.steps.stop] += part.plan.weights[row]
    plan = jagg_plan(SIGMAS, window, frac)
    expected = torch.zeros_like(weights)
    expected[list(plan.knots)] = plan.weights
    torch.testing.assert_close(weights, expected, atol=1e-12, rtol=0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "update.json"
    sizes = ["--batch", "2", "--rounds", "2", "--calibration", str(CALIBRATION), "--passes", "5"]
    main(["update", "--backbone", "digits-flux", *sizes, "--out", str(out)])
    record = Record.read(out)
    assert [cell.name for cell in record.cells] == [
        "exact",
        "exact-again",
        "exact-closed-form",
        "paper",
        "jagg-closed-form-sequential",
        "jagg-closed-form-batched",
        "causal-5-sequential",
        "causal-5-batched",
        ROLLOUT,
    ]
    assert [(cell.name, cell.reason) for cell in record.cells if cell.status != "ok"] == []
    assert all(len(cell.samples["total_s"]) == 2 for cell in record.cells)
    assert all(cell.values["relative_error"] < 1e-4 for cell in record.cells if cell.values)
    assert {c.name: c.values["passes"] for c in record.cells if c.values}["paper"] == 14
    assert "rollout + update" in capsys.readouterr().out


def test_ratios_of_parts_and_of_the_whole() -> None:
    times = {"exact": (20, 9.0), "paper": (10, 6.0), ROLLOUT: (0, 6.0)}
    cells = [
        Cell(name, samples={"total_s": [time] * 3}, values={"passes": passes} if passes else {})
        for name, (passes, time) in times.items()
    ]
    exact, paper = speed_ups(Record("update-speed", [], "any", {}, {}, cells=cells))
    assert (exact["backward"], exact["update"], exact["step"]) == (1, 1, 1)
    assert (paper["backward"], paper["update"], paper["step"]) == (2, 1.5, 1.25)


def test_a_calibration_of_another_backbone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backbone"):
        run_update_bench(UpdateBench(batch=1, rounds=2, calibration=str(CALIBRATION)))


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--calibration", str(CALIBRATION), "--passes", "99"], "passes must be one of"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
        (["--jagg-frac", "2"], "jagg_frac must be between 0 and 1, found 2"),
        (["--window", "21"], "window must be at most the 20 trained steps, found 21"),
    ],
)
def test_what_is_refused(flags: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["update", *flags, "--out", str(tmp_path / "u.json")])
    assert caught.value.code == 2 and match in capsys.readouterr().err
