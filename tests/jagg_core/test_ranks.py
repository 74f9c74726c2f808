"""Two processes: what one rank finds decides for both, so that their passes and collectives stay in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.jagg_core import ranks
from tests.jagg_core.fields import relative_error
from tests.spawning import run_ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(ranks.work, ranks.WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("backward", "forwards"), [("joint", 7), ("batched", 7), ("sequential", 9)])
def test_partly_clipped_samples_of_one_rank_cost_both_the_same(results: Results, backward: str, forwards: int) -> None:
    here, there = (rank[f"clipped-{backward}"] for rank in results)
    assert here["partly_clipped"] == 2
    assert there["partly_clipped"] == 0
    for key in ("forwards", "passes", "backward_calls"):
        assert here[key] == there[key], key
    assert here["passes"] == 5
    assert here["forwards"] == forwards
    assert [call[1:] for call in here["calls"]] == [call[1:] for call in there["calls"]]
    extra = [(call, other) for call, other in zip(here["calls"], there["calls"], strict=True) if call != other]
    assert [(call[0], other[0]) for call, other in extra] == [(2, 1)], "rank 1 joins with one sample"


@pytest.mark.parametrize("backward", ["joint", "batched", "sequential"])
@pytest.mark.parametrize("rank", [0, 1])
def test_keeping_in_step_does_not_change_the_gradient(results: Results, backward: str, rank: int) -> None:
    case = results[rank][f"clipped-{backward}"]
    assert relative_error(torch.tensor(case["gradient"]), torch.tensor(case["alone"])) < 1e-6


def test_the_choice_of_the_upstream_gradient_is_shared(results: Results) -> None:
    """Rank 0's weights are the rollout's, rank 1's are not: both run the network at every step."""
    here, there = (rank["changed-auto"] for rank in results)
    assert here["upstream"] == there["upstream"] == "autograd"
    assert here["forwards"] == there["forwards"] == 6
    assert relative_error(torch.tensor(here["gradient"]), torch.tensor(here["alone"])) < 1e-6
