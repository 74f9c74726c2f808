"""Two processes under Accelerate's DistributedDataParallel: gradients are means over ranks, reduced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import ranks
from tests.jagg_core.fields import relative_error
from tests.spawning import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(ranks.work, ranks.WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("upstream", "backward"), ranks.CASES)
def test_gradients_are_the_mean_over_ranks(results: list[dict[str, Any]], upstream: str, backward: str) -> None:
    here, there = (rank[f"{upstream}-{backward}"] for rank in results)
    assert here["type"] == "DistributedDataParallel"
    assert here["upstream"] == there["upstream"] == ["closed_form" if upstream == "auto" else "autograd"] * 2
    mean = (torch.tensor(here["alone"]) + torch.tensor(there["alone"])) / 2
    for rank in (here, there):
        assert relative_error(torch.tensor(rank["gradient"]), mean) < 1e-6


@pytest.mark.parametrize(("upstream", "backward"), ranks.CASES)
def test_ranks_stay_in_step(results: list[dict[str, Any]], upstream: str, backward: str) -> None:
    """The passes that one rank's clipping asks for are made by both; without them gradients are reduced once."""
    here, there = (rank[f"{upstream}-{backward}"] for rank in results)
    for key in ("passes", "reductions", "contexts"):
        assert here[key] == there[key], key
    assert here["passes"] == [3 if upstream == "auto" else 4] * 2
    assert here["contexts"] % 12 == 0
    if upstream == "auto":
        assert here["reductions"] == 1


def test_a_joint_backward_through_reentrant_checkpointing_is_refused(results: list[dict[str, Any]]) -> None:
    """DistributedDataParallel would reduce a gradient before both graphs have added to it, and ranks would differ."""
    here, there = (rank["reentrant"] for rank in results)
    assert here["joint"] == there["joint"]
    assert "use_reentrant=False" in here["joint"]
    assert here["batched"] == there["batched"]


def test_an_audit_sees_the_gradient_that_the_last_pass_left(results: list[dict[str, Any]]) -> None:
    """That of all ranks where they were reduced; else each rank its own, and the figures are means over ranks."""
    here, there = (rank["audited"] for rank in results)
    for case in ("True", "False"):
        assert here[case]["same"] and there[case]["same"]
        assert here[case]["audits"] == there[case]["audits"]
    size = here["True"]["size"]
    assert here["True"]["audits"][0][0] == pytest.approx(size**2, rel=1e-9)
    sizes = [rank["False"]["size"] ** 2 for rank in (here, there)]
    assert here["False"]["audits"][0][0] == pytest.approx(sum(sizes) / 2, rel=1e-9)
