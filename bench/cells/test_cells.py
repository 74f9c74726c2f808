"""Every arm's phases as cells of pytest-benchmark: each verifies its gradient against a plain loop, then is timed.

A plain ``pytest`` runs the smoke grid once, untimed. To time one, values separated by commas::

    python -m pytest bench --benchmark-enable --benchmark-json=cells.json \
        --bench-backbone digits-flux,photos-flux --bench-window 4,5 --bench-batch 16 --bench-checkpointing off,on

``python -m pytest bench --help`` has all options (``--bench-device``, ``--bench-dtype``, ``--bench-compile``,
``--bench-arm``, ``--bench-phase``, ``--bench-rounds``, ``--bench-warmup``). With a backend of torch.compile a cell
compiles what no cell before it has, and its rounds are without that: ``compile_s`` says how long it took. The file also
says which of the cells that were asked for are ok, failed, skipped or missing. `python -m bench group` interleaves its
arms, and is the one to compare arms by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from bench.arms import PHASES, arms_of
from bench.cells.grid import GRID
from bench.compiling import compile_seconds, compiled_graphs, require_graphs
from bench.group import load_group, run_of
from bench.presets import Planned
from bench.settings import GroupBench
from bench.suite import why_not
from bench.timing import clear, expected_gradient, gradient, verify
from jagg_core.strict_json import plain

pytestmark = [
    # half precision has another rounding in another batch shape; that is not what is timed
    pytest.mark.filterwarnings("ignore::jagg_core.RatioNoise"),
    # the tracer of torch.compile looks whether inputs have gradients
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

SPENT = dict.fromkeys(PHASES, 0.0)
"""Seconds that runs spent in each phase so far, by the one timer: a phase's clock."""


def forward_clock() -> float:
    """Returns seconds spent in forwards."""
    return SPENT["forward"]


def upstream_clock() -> float:
    """Returns seconds spent on upstream gradients and their sums."""
    return SPENT["upstream"]


def backward_clock() -> float:
    """Returns seconds spent in backwards."""
    return SPENT["backward"]


CLOCKS: dict[str, Callable[[], float]] = {
    "total": timer,
    "forward": forward_clock,
    "upstream": upstream_clock,
    "backward": backward_clock,
}
"""What pytest-benchmark reads before and after a run. In a total no clock is read in between, as that waits for the
device."""


class Loaded:
    """A group, its arms, and the gradients that they have to give."""

    def __init__(self, settings: GroupBench) -> None:
        self.settings = settings
        self.group = load_group(settings)
        self.runs = {arm.name: run_of(arm, self.group, settings.seed) for arm in arms_of("group")}
        self.graphs = compiled_graphs()
        self._expected: dict[str, list[Tensor]] = {}

    def expected(self, arm: str) -> list[Tensor]:
        """Computes an arm's gradient by a plain loop, once per arm."""
        if arm not in self._expected:
            self._expected = {arm: expected_gradient(self.runs[arm], self.settings.compile)}
        return self._expected[arm]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test per cell of the grid."""
    grid = metafunc.config.stash[GRID]
    cells = [
        pytest.param(
            cell.settings,
            cell.arm,
            cell.phase,
            id=cell.name,
            marks=pytest.mark.benchmark(timer=CLOCKS[cell.phase], group=cell.name.removeprefix(f"{cell.arm}-")),
        )
        for cell in grid.cells()
    ]
    metafunc.parametrize(("loaded", "arm", "phase"), cells, indirect=["loaded"], scope="module")


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """Loads the group of some settings once for all of its cells."""
    reason = why_not(Planned("group", request.param))
    if reason is not None:
        pytest.skip(reason)
    return Loaded(request.param)


def test_cell(loaded: Loaded, arm: str, phase: str, benchmark: Any) -> None:
    """Verifies, then times."""
    one, group, settings = loaded.runs[arm], loaded.group, loaded.settings
    clear(group.parameters)
    before = compile_seconds()
    one()
    compiling = compile_seconds() - before
    require_graphs(settings.compile, loaded.graphs)
    error = verify(gradient(group.parameters), loaded.expected(arm), settings.dtype)
    about = {
        name: getattr(settings, name) for name in ("backbone", "batch", "dtype", "device", "checkpointing", "compile")
    }
    about |= {"arm": arm, "phase": phase, "W": settings.window, "T": settings.steps - 1}
    about |= {"threads": torch.get_num_threads(), "passes": one.plan.passes, "relative_error": error}
    about["compile_s"] = compiling
    benchmark.extra_info.update(plain(about))

    def run() -> None:
        for name, seconds in one(None if phase == "total" else timer).items():
            SPENT[name] += seconds

    repeats = {"rounds": settings.rounds, "warmup_rounds": settings.warmup, "iterations": 1}
    graphs = compiled_graphs()
    benchmark.pedantic(run, setup=lambda: clear(group.parameters), **repeats)
    clear(group.parameters)
    assert compiled_graphs() == graphs, "torch.compile made graphs after the warm-up, so that the rounds hold that too"
