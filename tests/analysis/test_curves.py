"""Reward curves: arms in lockstep on the same samples, and what may be said of them."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from torch import Tensor

from analysis.measure.curve_settings import Curves
from analysis.measure.reward_curves import NOT_REACHED, run
from analysis.report.curve_tables import (
    all_tables,
    arms,
    held_out,
    reached,
    speed_ups,
    time_ratio,
    training,
    verdict,
    watched,
)
from analysis.report.curves import sentences
from analysis.report.write import write_report
from analysis.statistics.paired import holm, paired
from jagg_core.records import Cell, Record

SMALL = Curves(
    updates=2,
    longer=1.5,
    seeds=2,
    prompts=2,
    samples=2,
    micro_batch=4,
    steps=5,
    eval_every=1,
    eval_prompts=2,
    eval_samples=1,
    arms=("exact", "paper-1.0"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    """Two arms and two seeds of a real training."""
    folder = tmp_path_factory.mktemp("curves")
    return run(SMALL, folder), folder


def test_arms_of_a_seed_start_from_the_same_samples_and_go_on_longer(made: tuple[Record, Path]) -> None:
    record, _ = made
    assert [cell.name for cell in record.cells] == [f"{arm}/seed={s}" for s in (0, 1) for arm in SMALL.arms]
    exact, paper, other = (record.cells[place] for place in (0, 1, 2))
    assert exact.samples["reward"][0] == paper.samples["reward"][0] != other.samples["reward"][0]
    assert exact.samples["reward"][1] != paper.samples["reward"][1]
    assert (len(exact.samples["reward"]), len(paper.samples["reward"])) == (2, 3)
    assert exact.samples["evaluated_after"] == [0.0, 1.0, 2.0]
    assert exact.samples["held_out ink"][0] == paper.samples["held_out ink"][0]
    assert len(paper.samples["held_out classifier"]) == 4
    assert (exact.values["passes"], paper.values["passes"]) == (4, 2)


def test_seeds_that_are_there_are_not_run_again(made: tuple[Record, Path], tmp_path: Path) -> None:
    record, _ = made
    begun = Record(**{**vars(record), "cells": list(record.cells)})
    begun.cells[2:] = [Cell(cell.name, "skipped", NOT_REACHED) for cell in record.cells[2:]]
    begun.cells[0] = replace(record.cells[0], samples={**record.cells[0].samples, "grad_norm": [7.0, 7.0]})
    begun.write(tmp_path / "record.json")
    found = run(SMALL, tmp_path)
    assert found.cells[0].samples["grad_norm"] == [7.0, 7.0]
    assert found.cells[2].samples["reward"] == record.cells[2].samples["reward"]


def test_seeds_side_by_side(made: tuple[Record, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(replace(SMALL, workers=2), tmp_path)
    assert "10/10" in capsys.readouterr().err  # two seeds of two and three updates
    for ours, theirs in zip(found.cells, made[0].cells, strict=True):
        assert ours.name == theirs.name
        assert ours.samples["reward"] == pytest.approx(theirs.samples["reward"], rel=1e-4)


def test_finished_seeds_serve_a_run_of_more(made: tuple[Record, Path], tmp_path: Path) -> None:
    made[0].write(tmp_path / "record.json")
    with pytest.raises(ValueError, match=r"is a record of curves with updates 2; choose another folder"):
        run(replace(SMALL, updates=3), tmp_path)
    with pytest.raises(ValueError, match=r"seeds: .* holds \['exact/seed=1', 'paper-1.0/seed=1'\] too"):
        run(replace(SMALL, seeds=1), tmp_path)
    assert Record.read(tmp_path / "record.json").cells == made[0].cells
    found = run(replace(SMALL, seeds=3), tmp_path)
    assert found.cells[:4] == made[0].cells
    assert [cell.status for cell in found.cells] == ["ok"] * 6


def fails_at_first(images: Tensor, prompts: list[str]) -> Tensor:
    raise ValueError("no reward today")


def dies(images: Tensor, prompts: list[str]) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return images


def test_what_fails_before_the_first_update_is_recorded(tmp_path: Path) -> None:
    found = run(replace(SMALL, reward=f"{__name__}:fails_at_first", seeds=2, watched=()), tmp_path)
    assert {cell.status for cell in found.cells} == {"failed"}
    assert all(str(cell.reason).endswith("ValueError: no reward today") for cell in found.cells)
    assert Record.read(tmp_path / "record.json").cells == found.cells


def test_a_killed_worker_ends_the_run_with_a_message(tmp_path: Path) -> None:
    settings = replace(SMALL, reward=f"{__name__}:dies", workers=2, watched=())
    with pytest.raises(MemoryError, match=r"was killed, perhaps for memory: try fewer than 2 workers"):
        run(settings, tmp_path)


def test_its_page_can_be_made(made: tuple[Record, Path]) -> None:
    page, shown, said = write_report(made[1])
    assert "Does the cheaper gradient train as well?" in page.read_text()
    assert list(shown["times"]["passes"]) == [4, 2]
    assert any(sentence.startswith("JAGG (paper), W = 4, all groups: 2.00x in backward passes") for sentence in said)


def curve_record(final: dict[str, list[float]], watched: float = 0.5) -> Record:
    """Two evaluations per run: 0 at the start, ``final`` after two updates, half as much more after three."""
    cells = []
    for arm, values in final.items():
        for seed, value in enumerate(values):
            seconds = 4.0 if arm == "exact" else 1.0
            count = 2 if arm == "exact" else 3
            after, rewards = [0.0, 2.0, 3.0][:count], [0.0, value, 1.5 * value][:count]
            cells.append(
                Cell(
                    f"{arm}/seed={seed}",
                    settings={"arm": arm, "seed": seed},
                    samples={
                        "reward": [0.1] * count,
                        "grad_norm": [1.0] * count,
                        "update_s": [seconds] * count,
                        "step_s": [seconds + 1] * count,
                        "evaluated_after": after,
                        "held_out ink": rewards,
                        "held_out sharpness": [watched] * count,
                    },
                    values={"passes": 20 if arm == "exact" else 5},
                )
            )
    settings = {"updates": 2, "longer": 1.5, "reward": "ink", "watched": ["sharpness"]}
    return Record("curves", [], "b", settings, {}, cells=cells)


def test_costs_and_rewards_are_compared_with_exact() -> None:
    record = curve_record({"exact": [1.0, 1.2, 1.1], "causal-5": [1.0, 1.1, 1.0]})
    frame = arms(record, training(record), held_out(record)).set_index("arm")
    row = frame.loc["causal-5"]
    assert (row["backward_speed_up"], row["update_speed_up"], row["step_speed_up"]) == (4.0, 4.0, 2.5)
    assert row["final"] == pytest.approx(3.1 / 3)
    assert row["difference"] == pytest.approx(-0.2 / 3)
    assert row["verdict"] == "inconclusive"
    # 1.1 lies between 3.1 / 3 after two updates and 1.5 times that after three
    updates = 2 + (1.1 - 3.1 / 3) / (0.5 * 3.1 / 3)
    assert row["updates_to_exact"] == pytest.approx(updates)
    assert row["time_to_exact"] == pytest.approx(updates * 2 / (2 * 5))
    # exact reaches it at its second and last update; five updates would fit in its time, three are there
    assert row["time_ratio"] == pytest.approx(row["time_to_exact"])
    assert row["time_ratio_low"] <= row["time_ratio"] <= row["time_ratio_high"]
    assert (row["equal_time_updates"], row["equal_time_share"]) == (3, 0.6)
    assert row["equal_time_difference"] == pytest.approx(1.5 * 3.1 / 3 - 1.1)
    assert (row["exact_gain"], row["margin"]) == pytest.approx((1.1, 0.11))
    assert (row["seeds_lower"], row["seeds_higher"]) == (2, 0)


def test_speed_ups_compare_what_ran_in_the_same_turn() -> None:
    record = curve_record({"exact": [1.0, 1.2, 1.1], "causal-5": [1.0, 1.1, 1.0]})
    for cell in record.cells:
        if cell.settings["seed"] == 2:  # the machine was ten times slower
            for name in ("update_s", "step_s"):
                cell.samples[name] = [10 * value for value in cell.samples[name] if value is not None]
        if cell.name == "causal-5/seed=0":
            cell.samples["update_s"][2] = 1e6  # after exact has ended
    found = speed_ups(training(record), updates=2)
    names = ("update_speed_up", "step_speed_up", "update_speed_up_min", "step_speed_up_max")
    assert found.loc["causal-5", list(names)].tolist() == [4.0, 2.5, 4.0, 2.5]
    assert found.loc["exact", list(names)].tolist() == [1.0] * 4
    # the seconds are of the same turns
    row = arms(record, training(record), held_out(record)).set_index("arm")["update_s"]
    assert row["exact"] / row["causal-5"] == 4.0


def test_a_run_that_diverges_is_a_failed_cell(tmp_path: Path) -> None:
    record = run(replace(SMALL, seeds=1, learning_rate=1e30), tmp_path)
    assert [cell.status for cell in record.cells] == ["failed", "failed"]
    assert all("finite" in cell.reason for cell in record.cells)
    assert [cell.reason for cell in Record.read(tmp_path / "record.json").cells] == [c.reason for c in record.cells]


def test_what_was_not_trained_is_compared_too() -> None:
    record = curve_record({"exact": [1.0, 1.2, 1.1], "causal-5": [1.0, 1.1, 1.0]})
    for cell in record.cells:
        drift = 5.0 if cell.settings["arm"] == "causal-5" else 0.0
        cell.samples["held_out sharpness"] = [drift + 0.1 * cell.settings["seed"]] * len(cell.samples["reward"])
    [row] = watched(record, held_out(record)).to_dict("records")
    assert (row["reward"], row["arm"], row["seeds"], row["place"]) == (
        "sharpness",
        "causal-5",
        3,
        "higher than exact's",
    )
    assert (row["p_value"], row["p_corrected"]) == (0, 0)
    assert (row["difference"], row["difference_low"], row["difference_high"]) == pytest.approx((5.0, 5.0, 5.0))
    record.settings |= {"prompts": 4, "samples": 8, "eta": 0.7, "centring": "prompt"}
    said = sentences(record, all_tables(record))[-1]
    assert said.startswith(
        "sharpness, watched: causal, 5 passes ends +5.0000 [+5.0000, +5.0000] from exact's 0.1000, n = 3, "
    )


def test_one_seed_has_a_page_without_intervals(tmp_path: Path) -> None:
    record = curve_record({"exact": [1.0], "causal-5": [1.1]})
    record.settings |= {"prompts": 4, "samples": 8, "eta": 0.7, "centring": "prompt"}
    record.write(tmp_path / "record.json")
    _, shown, said = write_report(tmp_path)
    assert "difference to exact +0.1000, n = 1: inconclusive" in said[2]
    assert shown["watched"]["place"].tolist() == ["not resolved"]
    assert not any("watched" in text for text in said)


@pytest.mark.parametrize(
    ("differences", "corrected", "expected"),
    [
        ([0.0], None, "inconclusive"),
        ([-0.01, 0.0, 0.02], 1.0, "equivalent"),
        ([-0.09, 0.0, 0.08], 1.0, "inconclusive"),
        ([-0.5, -0.6, -0.55], 0.04, "worse"),
        ([-0.5, -0.6, -0.55], 0.06, "inconclusive"),
        ([0.5, 0.6, 0.55], 0.04, "better"),
        ([-0.02, -0.02, -0.021], 0.01, "worse by less than the margin"),
        ([0.02, 0.02, 0.021], 0.01, "better by less than the margin"),
    ],
)
def test_a_verdict_needs_an_interval_or_a_corrected_p(
    differences: list[float], corrected: float | None, expected: str
) -> None:
    assert verdict(paired(differences), corrected, margin=0.1) == expected


def test_the_interval_is_students() -> None:
    found = paired([1.0, 2.0, 3.0])
    half = 4.302652729749464 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    # t = 2 sqrt(3) with two degrees of freedom: p = 1 - t / sqrt(2 + t^2)
    assert found.p_value == pytest.approx(1 - math.sqrt(12 / 14))
    with pytest.raises(ValueError, match="at least one value"):
        paired([])


def test_p_values_are_corrected_by_holms_rule() -> None:
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_a_reward_that_some_resamples_do_not_reach_has_no_upper_end() -> None:
    exact = pd.DataFrame({0: [0.0, 1.0], 1: [0.0, 1.0]}, index=[0, 2])
    arm = pd.DataFrame({0: [0.0, 0.5], 1: [0.0, 4.0]}, index=[0, 2])
    value, low, high = time_ratio(arm, exact, 2, 2.0)
    assert (value, low, high) == pytest.approx((1 / 2.25 / 2, 1 / 4 / 2, None))


def test_when_a_curve_reaches_a_reward() -> None:
    assert reached([0, 5, 10], [0.0, 1.0, 3.0], 2.0) == 7.5
    assert reached([0, 5], [0.0, 1.0], 2.0) is None
    assert reached([0, 5], [2.0, 1.0], 2.0) == 0.0


def test_without_exact_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    record = curve_record({"exact": [1.0, 1.2], "causal-5": [1.0, 1.1]})
    for cell in record.cells[:2]:
        cell.status, cell.reason, cell.samples = "failed", "ValueError: no", {}
    assert list(all_tables(record)) == ["failures"]
    record.write(tmp_path / "record.json")
    _, shown, said = write_report(tmp_path)
    assert list(shown["failures"]["reason"]) == ["ValueError: no"] * 2
    assert said == ["No run of exact ended well: there is nothing to compare with."]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arms": ("paper-0.6",)}, "arms must have 'exact'"),
        ({"arms": ("exact", "causal-5")}, "arms must be one of"),
        ({"longer": 0.5}, "longer must be at least 1, got 0.5"),
        ({"updates": 0}, "updates must be at least 1, got 0"),
        ({"eta": 0.0}, "eta of DanceSDE must be positive"),
        ({"centring": "none"}, "centring must be one of"),
    ],
    ids=["exact", "unknown", "longer", "updates", "eta", "centring"],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curves(**settings)  # type: ignore[arg-type]
