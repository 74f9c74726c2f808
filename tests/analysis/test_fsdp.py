"""Collecting under FSDP2: sharded parameters and a split batch against one process with plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.analysis import fsdp_ranks as ranks
from tests.spawning import run_ranks

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank found in each layout."""
    found = run_ranks(ranks.work, ranks.RANKS, tmp_path_factory.mktemp("ranks"))
    return {layout: [rank[layout] for rank in found[: ranks.ranks_of(layout)]] for layout in ranks.LAYOUTS}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same of the whole batch and plain parameters."""
    return ranks.results_of(ranks.Field(range(ranks.SAMPLES)))


each_layout = pytest.mark.parametrize("layout", ranks.LAYOUTS)


def same(found: Any, expected: Any) -> bool:
    """Whether vectors or matrices agree to 1e-10 of the norm."""
    reference = np.array(expected)
    assert np.linalg.norm(reference) > 0, "nothing to compare with"
    return bool(np.linalg.norm(np.array(found) - reference) <= 1e-10 * np.linalg.norm(reference))


@each_layout
@pytest.mark.parametrize(("space", "dimension"), [("auto", None), ("projected", ranks.DIMENSION)])
def test_tables_are_those_of_the_whole_batch_on_one_process(
    space: str, dimension: int | None, layout: str, results: Results, alone: dict[str, Any]
) -> None:
    assert set(alone[space]) == {"weight", "bias", "all"}
    for rank, found in enumerate(results[layout]):
        assert found["dimensions"][space] == alone["dimensions"][space] == dimension, "auto is exact where it fits"
        assert list(found[space]) == list(alone[space])
        for block, gram in alone[space].items():
            assert np.shape(gram) == (ranks.STEPS**2 + 2,) * 2, "with two rows of the predicted plan"
            assert same(found[space][block], gram), (rank, block)
        assert found[space] == results[layout][0][space], "the same on all ranks, bit by bit"


@each_layout
def test_projected_plans_are_those_of_the_whole_batch_on_one_process(
    layout: str, results: Results, alone: dict[str, Any]
) -> None:
    for found in results[layout]:
        for name, gradient in alone["plans"].items():
            assert len(gradient) == ranks.DIMENSION
            assert same(found["plans"][name], gradient), name


def test_shards_are_uneven_and_some_are_empty(results: Results) -> None:
    """Else the tests above would say less than they seem to."""
    held = {layout: np.array([rank["held"] for rank in found]) for layout, found in results.items()}
    whole = [p.numel() for p in ranks.Field([0]).parameters()]
    for layout in ("1", "2", "3"):
        assert held[layout].sum(0).tolist() == whole
    assert held["2x1"].tolist() == [whole, whole], "replicated"
    assert (held["3"] == 0).any()
    assert ((held["3"].min(0) > 0) & (held["3"].min(0) < held["3"].max(0))).any()


@each_layout
def test_measuring_leaves_grads_as_they_are(layout: str, results: Results) -> None:
    for rank in results[layout]:
        assert rank["stay"]
        assert rank["stay after an error"]


@each_layout
def test_the_choice_of_the_space_is_shared(layout: str, results: Results) -> None:
    """Only rank 0 finds too little memory for whole gradients."""
    for rank in results[layout]:
        assert rank["chosen"] == 4
        assert rank["little memory"].startswith("MemoryError: the cross gradients take")


@each_layout
def test_changed_weights_of_one_rank_are_refused_by_all(layout: str, results: Results) -> None:
    for rank in results[layout]:
        assert len(rank["changed"]) == 2
        for refused in rank["changed"]:
            assert refused.startswith("OffPolicyError: the weights changed since the rollout")


@each_layout
def test_a_gradient_of_one_rank_that_is_not_finite_is_refused_by_all(layout: str, results: Results) -> None:
    elsewhere = "FloatingPointError: a gradient on another rank is not finite"
    for number, rank in enumerate(results[layout]):
        exact, projected = rank["infinite"]
        assert projected.startswith("FloatingPointError: gradient 0 of 8 is not finite")
        assert exact == (elsewhere if number else projected)


def test_gathered_parameters_are_refused(results: Results) -> None:
    """Gradients with respect to them would be those of each rank's samples, and nothing would say so."""
    for rank in results["2"]:
        assert rank["gathered"].startswith("ValueError: policy: parameters() must give the sharded parameters")
