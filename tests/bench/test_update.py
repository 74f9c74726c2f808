"""Whole updates: every way is verified, the paper's parts amount to its plan, and ratios add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import update
from bench.__main__ import main
from bench.arms import ARMS
from bench.settings import UpdateBench
from bench.speed_ups import PARTS, update_speed_ups
from bench.update import Optimizer, grouped_calls, run_update_bench
from jagg_core import dance_schedule, jagg_plan
from jagg_core.records import Cell, Record

CALIBRATION = (
    Path(__file__).parents[2] / "results" / "reference" / "digits-flux-calibration" / "calibration-eta0.7.json"
)
SIGMAS = dance_schedule(21)[:-2]


@pytest.mark.parametrize(("window", "frac"), [(4, 0.6), (4, 1.0), (6, 1.0), (5, 0.0)])
def test_the_papers_parts_amount_to_its_plan(window: int, frac: float) -> None:
    weights = torch.zeros(len(SIGMAS), len(SIGMAS), dtype=torch.float64)
    for steps, part in grouped_calls(ARMS["paper-joint"], SIGMAS, window, frac):
        for row, knot in enumerate(part.knots):
            weights[steps.start + knot, steps.start : steps.stop] += part.weights[row]
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
        "paper-joint",
        "closed-form-sequential",
        "closed-form-batched",
        "causal-5-sequential",
        "causal-5-batched",
        *PARTS,
    ]
    assert [(cell.name, cell.reason) for cell in record.cells if cell.status != "ok"] == []
    assert all(len(cell.samples["total_s"]) == 2 for cell in record.cells)
    assert all(cell.values["relative_error"] < 1e-4 for cell in record.cells if cell.name not in PARTS)
    assert record.cell("paper-joint").values["passes"] == 14
    assert all(cell.values["compile_s"] >= 0 for cell in record.cells)
    assert record.cell("reward").settings == {"reward": "ink"}
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("backward", "update", "whole step", "besides the update: rollout"))


def timed(passes: int, seconds: float) -> dict[str, object]:
    return {"samples": {"total_s": [seconds] * 3}, "values": {"passes": passes} if passes else {}}


def step_record(*more: Cell) -> Record:
    """Rollout, reward and optimizer 60, forwards 10, backwards 20; half of the backwards saved, and no forward."""
    cells = [
        Cell("exact", **timed(20, 30.0)),  # type: ignore[arg-type]
        Cell("paper", **timed(10, 20.0)),  # type: ignore[arg-type]
        Cell("rollout", **timed(0, 55.0)),  # type: ignore[arg-type]
        Cell("optimizer", **timed(0, 2.0)),  # type: ignore[arg-type]
    ]
    return Record("update-speed", [], "any", {}, {}, cells=[*cells, *more])


def test_ratios_of_parts_and_of_the_whole() -> None:
    exact, paper = update_speed_ups(step_record(Cell("reward", **timed(0, 3.0))))  # type: ignore[arg-type]
    assert (exact["backward"], exact["update"].value, exact["step"].value) == (1, 1, 1)
    assert (paper["backward"], paper["update"].value, paper["step"].value) == (2, 1.5, 1.125)


def test_a_step_of_which_a_part_failed_has_no_ratio() -> None:
    """One that was skipped is no part of the step."""
    paper = update_speed_ups(step_record(Cell("reward", "failed", "no such image")))[1]
    assert (paper["backward"], paper["update"].value, paper["step"].value) == (2, 1.5, None)
    skipped = update_speed_ups(step_record(Cell("reward", "skipped", "no decoder")))[1]
    assert skipped["step"].value == pytest.approx(87 / 77)
    record = step_record()
    record.cells[0] = Cell("exact", "failed", "out of memory")
    assert update_speed_ups(record) == []


def test_left_over_steps_are_exact() -> None:
    """20 steps in groups of 6: two are left."""
    calls = grouped_calls(ARMS["paper-joint"], SIGMAS, 6, 1.0)
    assert [len(steps) for steps, _ in calls] == [6, 6, 6, 2]
    assert [plan.passes for _, plan in calls] == [2, 2, 2, 2]


@pytest.mark.parametrize(("reward", "said"), [("", None), ("sharpness", "sharpness")])
def test_the_reward_of_a_backbone_without_data_set(reward: str, said: str | None, stub: str) -> None:
    sizes = {"batch": 2, "rounds": 2, "steps": 6, "window": 2}
    record = run_update_bench(UpdateBench(stub, reward=reward, **sizes))  # type: ignore[arg-type]
    cell = record.cell("reward")
    assert cell.settings == {"reward": said}
    # images of 2x2 pixels have no Laplacian
    assert cell.status == ("failed" if reward else "ok")
    assert (update_speed_ups(record)[0]["step"].value is None) == bool(reward)


def test_an_unknown_reward_is_refused_before_the_rollout(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "group_of", lambda *_: pytest.fail("rolled out before the refusal"))
    with pytest.raises(ValueError, match="unknown reward 'inc', nearest is 'ink'"):
        run_update_bench(UpdateBench(stub, reward="inc"))


def test_random_weights_are_not_decoded(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "read_options", lambda *_: {"random_weights": True})
    record = run_update_bench(UpdateBench(stub, batch=2, rounds=2, steps=6, window=2))
    assert (record.cell("reward").status, record.cell("reward").samples) == ("skipped", {})
    assert update_speed_ups(record)[0]["step"].value == 1


def test_the_optimizer_works_on_copies() -> None:
    """Of parameters and gradients: what is timed later finds the rollout's weights."""
    weights = [torch.ones(3, requires_grad=True), torch.full((2,), -0.0, requires_grad=True)]
    gradients = [torch.full((3,), 100.0), torch.ones(2)]
    optimizer = Optimizer(weights, gradients)
    for _ in range(2):
        optimizer.prepare()
        optimizer.step()
    assert all(copy.grad is None for copy in optimizer.copies)
    assert [w.tolist() for w in weights] == [[1, 1, 1], [-0.0, -0.0]]
    assert [g.tolist() for g in gradients] == [[100] * 3, [1, 1]]
    assert all((copy < weight).all() for copy, weight in zip(optimizer.copies, weights, strict=True))


def test_every_part_of_a_step_is_timed_in_every_round(stub: str) -> None:
    record = run_update_bench(UpdateBench(stub, batch=2, rounds=3, steps=6, window=2))
    assert {cell.name for cell in record.cells} >= {"exact", "paper-joint", *PARTS}
    assert {len(cell.samples["total_s"]) for cell in record.cells} == {3}


def test_a_calibration_of_another_backbone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backbone"):
        run_update_bench(UpdateBench(batch=1, rounds=2, calibration=str(CALIBRATION)))


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--calibration", str(CALIBRATION), "--passes", "99"], "different numbers from 1 to the 20 trained"),
        (["--calibration", str(CALIBRATION), "--passes", "-3"], "different numbers from 1 to the 20 trained"),
        (
            ["--calibration", str(CALIBRATION), "--passes", "5", "5"],
            "different numbers from 1 to the 20 trained",
        ),
        (["--passes", "8"], "calibration must be given with passes, got passes [8]"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
        (["--jagg-frac", "2"], "jagg_frac must be between 0 and 1, got 2"),
        (["--window", "21"], "window must be at most the 20 trained steps, got 21"),
    ],
)
def test_what_is_refused(flags: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["update", *flags, "--out", str(tmp_path / "u.json")])
    assert caught.value.code == 2 and match in capsys.readouterr().err
