"""A stub in the registry; one thread, as everywhere where networks are this small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jagg_core.backbones import registry
from tests.backbones.stub import STUB


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which the stub backbone is registered."""
    monkeypatch.setitem(registry._REGISTRY, "stub", STUB)
    return "stub"
