"""Tiny fields in fp64, and a stub in the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jagg_core import (
    Plan,
    Trajectory,
    causal_plan,
    endpoint_plan,
    environment,
    exact_plan,
    jagg_plan,
    spline_plan,
    subsample_plan,
)
from jagg_core.backbones import registry
from tests.backbones.stub import STUB
from tests.jagg_core.fields import MlpField, make_rollout

MakePlan = Callable[[Tensor], Plan]

CONSTRUCTORS: dict[str, MakePlan] = {
    "exact": exact_plan,
    "jagg-w4-f0.6": lambda s: jagg_plan(s, 4, 0.6),
    "jagg-w4-f1": lambda s: jagg_plan(s, 4, 1.0),
    "jagg-w5-f0.6": lambda s: jagg_plan(s, 5, 0.6),
    "jagg-w5-f1": lambda s: jagg_plan(s, 5, 1.0),
    "jagg-index": lambda s: jagg_plan(s, 5, 1.0, "index"),
    "endpoint": lambda s: endpoint_plan(s, 4),
    "subsample": lambda s: subsample_plan(s, 4, torch.Generator().manual_seed(2)),
    "spline": lambda s: spline_plan(s, [0, 3, 7]),
    "spline-inside": lambda s: spline_plan(s, [2, 5]),
    "spline-linear": lambda s: spline_plan(s, [2, 5], "linear"),
    "causal": lambda s: causal_plan(s, [0, 2, 6]),
    "causal-lead-in": lambda s: causal_plan(s, [3, 6]),
}


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="package")
def one_commit() -> Iterator[None]:
    """Records that are compared byte by byte name the same commit, whoever edits the checkout meanwhile."""
    found = environment.git_state(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "git_state", lambda checkout: found)
        yield


@pytest.fixture(params=CONSTRUCTORS)
def make_plan(request: pytest.FixtureRequest) -> MakePlan:
    """Every constructor of plans in turn."""
    return CONSTRUCTORS[request.param]


@pytest.fixture
def every_plan() -> dict[str, MakePlan]:
    """All of them at once."""
    return CONSTRUCTORS


@pytest.fixture
def field() -> MlpField:
    """A tanh network in fp64."""
    return MlpField()


@pytest.fixture
def trajectory(field: MlpField) -> Trajectory:
    """Ten trained steps of four samples of ``field``: two groups of five, or two of four and two steps over."""
    return make_rollout(field, steps=10)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which the stub backbone is registered."""
    monkeypatch.setitem(registry._REGISTRY, "stub", STUB)
    return "stub"
