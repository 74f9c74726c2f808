"""Every model under FSDP2 on two ranks, its blocks sharded and checkpointed, against the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backbones.pretrained import sharding_ranks as ranks
from tests.backbones.pretrained.conftest import TINY
from tests.spawning import run_ranks

Found = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def found(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What every rank found."""
    folder = tmp_path_factory.mktemp("sharding")
    todo = {name: {"path": str(folders(name)), **tiny.options} for name, tiny in TINY.items()}
    (folder / "todo.json").write_text(json.dumps(todo))
    return run_ranks(ranks.work, ranks.RANKS, folder)


@pytest.mark.parametrize("name", sorted(TINY))
def test_sharded_equals_plain(name: str, found: list[Found]) -> None:
    for rank in found:
        assert rank[name]["final"] < 1e-5
        assert rank[name]["gradient"] < 1e-4
