"""What fails on one of two ranks ends both, with one error; no rank is left waiting for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jagg_core.files import only_run_in
from jagg_core.grpo.log import read_rows
from tests.grpo.failing_ranks import FAILURES, work
from tests.spawning import run_ranks

TOLD = {
    "nan": "rank 1: RewardNotFinite: reward tests.grpo.failing_ranks:moody is nan for sample 0",
    "error": "rank 1: RewardFailed: reward tests.grpo.failing_ranks:moody failed on update ",
    "velocity": "rank 1: FloatingPointError: the velocity is not finite at step 2",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and what each of two ranks was told; another run held ``taken``."""
    folder = tmp_path_factory.mktemp("ranks")
    with only_run_in(folder / "taken"):
        return folder, run_ranks(work, 2, folder)


@pytest.mark.parametrize("failure", FAILURES)
def test_an_evaluation_that_fails_on_one_rank_ends_on_both(
    ended: tuple[Path, list[dict[str, Any]]], failure: str
) -> None:
    one, other = (rank["evaluation"][failure] for rank in ended[1])
    assert one == other
    assert one.startswith(TOLD[failure])
    assert "rank 0" not in one


@pytest.mark.parametrize(("where", "failure"), [("update", "error"), ("recalibration", "nan")])
def test_so_does_whatever_else_draws_samples(
    ended: tuple[Path, list[dict[str, Any]]], where: str, failure: str
) -> None:
    one, other = (rank["others"][where] for rank in ended[1])
    assert one == other
    assert one.startswith(TOLD[failure])


def test_ranks_that_failed_are_in_step_and_their_weights_as_before(ended: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [rank["same"] for rank in ended[1]] == [True, True]


def test_a_folder_that_another_run_holds_ends_all_ranks(ended: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = ended
    for rank in ranks:
        assert rank["taken"].startswith(f"rank 0: ValueError: out: another run is at work in {folder / 'taken'}: wait")
    assert not (folder / "taken/config.json").exists()


def test_launches_with_other_settings_or_folders_end_all_ranks_before_any_work(
    ended: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = ended
    for rank in ranks:
        assert rank["settings"] == "run.seed must be the same on all ranks, got 0 on rank 0 and 1 on rank 1"
        told = "out must be a folder that all ranks share, got one that some do not see: rank 1: "
        assert rank["unseen"] == f"{told}{folder / 'unseen-1'}"
    assert not (folder / "settings").exists()
    assert [file.name for file in (folder / "unseen-0").iterdir()] == [".lock"]


def test_ranks_of_a_run_share_its_folder_and_keep_its_log_when_an_evaluation_fails(
    ended: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = ended
    for rank in ranks:
        assert rank["run"].startswith(
            "rank 1: RewardNotFinite: reward tests.grpo.failing_ranks:broken_later is nan for sample 0"
        )
    [row] = read_rows(folder / "run/metrics.csv")
    assert (row["update"], row["skipped"]) == ("1", "0")
    with only_run_in(folder / "run"):
        assert not (folder / "run/checkpoints").exists()
