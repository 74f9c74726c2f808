"""Updates on two ranks: seconds of communication, deferred gradients, what is kept in fp32, and values that break."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from jagg_core.grpo import GRPOConfig, GRPOTrainer
from jagg_core.grpo.communication import covered
from tests.grpo.ranks import ADAPTED, AUDITED, BROKEN_AT, NFT, PARALLEL, PATHWISE, SLEEP, SMALL, work
from tests.grpo.runs import changed
from tests.spawning import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(work, 2, tmp_path_factory.mktemp("ranks"))


def test_waiting_for_a_slow_rank_is_communication(found: list[dict[str, Any]]) -> None:
    fast, slow = (rank["waiting"]["seconds"] for rank in found)
    # two micro-batches, each with a reward that sleeps
    assert slow["reward"] > 2 * SLEEP
    assert fast["communication"] > slow["communication"] + SLEEP


@pytest.mark.parametrize("name", ["waiting", *PARALLEL])
def test_every_collective_is_timed_and_lies_in_a_stage(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        update = rank[name]
        assert update["timed"] == sum(update["counts"].values())
        seconds = dict(update["seconds"])
        communication = seconds.pop("communication")
        assert 0 < communication < sum(seconds.values())


def test_one_rank_communicates_with_nobody() -> None:
    assert GRPOTrainer(SMALL).step().seconds["communication"] == 0


def test_time_that_collectives_share_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (1, 3), (2, 4), (2, 2.5), (4, 4.5)]) == 4.5


@pytest.mark.parametrize(
    ("at_once", "deferred", "kind"),
    [("at once", "deferred", "reduce_scatter"), ("copies", "copies, deferred", "all_reduce")],
    ids=["sharded", "copies"],
)
def test_deferred_gradients_move_the_weights_alike_with_one_reduction_per_unit_and_step(
    found: list[dict[str, Any]], at_once: str, deferred: str, kind: str
) -> None:
    steps, micro_batches, knots = 2, 2, 2
    for rank in found:
        one, other = rank[at_once], rank[deferred]
        assert rank["moved"] > 1e-4
        assert other["difference"] < 1e-6 * rank["moved"]
        assert other["counts"][kind] == steps * other["units"]
        # more passes than the plan has knots: of samples that are partly clipped, which is known late
        assert one["counts"][kind] == one["passes"] * steps * micro_batches * one["units"]
        assert one["passes"] > knots
        others = [key for key in one["counts"] if key != kind]
        assert [other["counts"][key] for key in others] == [one["counts"][key] for key in others]
        assert other["passes"] == one["passes"]


def test_deferred_gradients_that_do_not_fit_are_refused(found: list[dict[str, Any]]) -> None:
    for rank, free in zip(found, ("1024.00", "0.00"), strict=True):
        told = "defer_gradient_sync keeps 0.01 GiB of unreduced gradients on every rank, got"
        assert rank["refused"].startswith(f"{told} {free} GiB free on this one")


def test_frozen_weights_stay_in_half_precision_and_trained_ones_are_fp32(found: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = GRPOTrainer(ADAPTED).step()
    for rank in found:
        adapted = rank["adapted"]
        assert adapted["dtypes"] == {"trained": ["torch.float32"], "frozen": ["torch.bfloat16"]}
        assert adapted["metrics"]["reward_mean"] == pytest.approx(alone.reward_mean, rel=1e-2)
        assert adapted["metrics"]["grad_norm"] == pytest.approx(alone.grad_norm, rel=0.1)


def test_weights_of_a_network_in_half_precision_are_trained_in_fp32(found: list[dict[str, Any]]) -> None:
    alone = GRPOTrainer(changed(SMALL, model={"dtype": "bfloat16"})).step()
    for rank in found:
        assert (rank["half"]["dtypes"], rank["half"]["moved"]) == (["torch.float32"], True)
        assert rank["half"]["grad_norm"] == pytest.approx(alone.grad_norm, rel=0.1)


@pytest.mark.parametrize("where", ["reward", *BROKEN_AT])
def test_a_value_that_is_no_number_on_one_rank_skips_the_update_on_all(found: list[dict[str, Any]], where: str) -> None:
    there, here = (rank["broken"]["skipped"][where] for rank in found)
    assert there == here
    assert here.startswith("rank 1: ") and "rank 0" not in here
    assert "nan for sample 0" in here if where == "reward" else "the velocity is not finite" in here
    for rank in found:
        assert (rank["broken"]["kept"], rank["broken"]["last"], rank["broken"]["steps"]) == (True, "", 1)


@pytest.mark.parametrize(("name", "config"), [("pathwise", PATHWISE), ("nft", NFT)])
def test_updates_by_other_upstream_gradients_are_those_of_one_rank(
    found: list[dict[str, Any]], name: str, config: GRPOConfig
) -> None:
    alone = GRPOTrainer(config).step()
    for rank in found:
        assert rank[name]["grad_norm"] == pytest.approx(alone.grad_norm, rel=1e-4)
        assert rank[name]["passes"] == alone.passes


@pytest.mark.parametrize("name", PARALLEL)
def test_an_audit_on_two_ranks_is_that_of_one(found: list[dict[str, Any]], name: str) -> None:
    """The micro-batch of two ranks together is one of twice as many samples on one rank."""
    alone = GRPOTrainer(changed(AUDITED, rollout={"micro_batch": 4}))
    alone.step()
    assert alone.meter is not None
    [expected] = alone.meter.state()["audits"]
    for rank in found:
        audited = rank["audited"][name]
        [figures] = audited["state"]["audits"]
        # gradients of ranks are means, and the loss is a mean over this rank's samples: twice as large
        assert figures == pytest.approx(expected, rel=1e-6)
        assert audited["apart"] < 1e-12
