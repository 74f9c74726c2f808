"""The cells that pytest times: what is in the file, what became of every cell, and what a plain run leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.arms import PHASES
from bench.cells.grid import Grid, read_grid

ROOT = Path(__file__).parents[2]
WIDE, BROKEN = "tests.bench.wide:load", "tests.bench.wide:broken"
GRID = [f"--bench-backbone={WIDE},{BROKEN}", "--bench-phase=total,backward", "--bench-rounds=2"]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", *arguments]
    # pytest-benchmark times nothing where it takes itself for a part of a distributed run
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = own | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], str, int]]:
    """A run with cells of every fate: its file, what it printed, and the size of the file."""
    path = tmp_path_factory.mktemp("cells") / "cells.json"
    device = "--bench-device=cpu,cuda:77"
    arms = "--bench-arm=exact,exact-bare,closed-form-batched"
    done = run_pytest("--benchmark-enable", f"--benchmark-json={path}", *GRID, arms, device, "-k", "not exact-bare")
    assert done.returncode == 1, done.stdout + done.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    yield json.loads(path.read_text(), parse_constant=refuse), done.stdout, path.stat().st_size


def test_every_cell_is_accounted_for(timed: tuple[dict[str, Any], str, int]) -> None:
    data, printed, _ = timed
    cells = data["cells"]
    assert cells["ok"] == [
        f"{arm}-{phase}-{WIDE}-W3-float32-b2"
        for arm in ("exact", "closed-form-batched")
        for phase in ("total", "backward")
    ]
    assert [len(cells[status]) for status in ("failed", "skipped", "missing")] == [4, 8, 4]
    assert all(BROKEN in name for name in cells["failed"])
    assert all(name.endswith("-cuda-77") for name in cells["skipped"])
    assert all(name.startswith("exact-bare-total") for name in cells["missing"])
    assert "4 ok, 4 failed, 8 skipped, 4 missing" in printed
    assert f"failed   exact-total-{BROKEN}-W3-float32-b2" in printed
    assert "no room for this model" in printed and "needs a device cuda:77: device 'cuda:77' cannot be used" in printed


def test_the_file_is_small_and_says_where_and_what(timed: tuple[dict[str, Any], str, int]) -> None:
    data, _, size = timed
    assert size < 200_000
    machine = data["machine_info"]
    assert machine["packages"]["torch"] == torch.__version__
    assert {"threads", "cpu_mhz", "load_average", "commit", "dirty"} <= machine.keys()
    assert "node" not in machine
    for one in data["benchmarks"]:
        about = one["extra_info"]
        assert (about["W"], about["T"], about["dtype"], about["device"]) == (3, 20, "float32", "cpu")
        assert about["threads"] == machine["threads"]
        assert about["relative_error"] < 1e-4
        assert "params" not in one
        assert len(one["stats"]["data"]) == one["stats"]["rounds"] == 2


def test_a_phase_has_its_own_clock(timed: tuple[dict[str, Any], str, int]) -> None:
    """A backward lies within the call that it is part of."""
    clocks = {one["extra_info"]["phase"]: one["options"]["timer"] for one in timed[0]["benchmarks"]}
    assert clocks == {"total": "timer", "backward": "backward_clock"}
    assert all(seconds > 0 for one in timed[0]["benchmarks"] for seconds in one["stats"]["data"])


def test_a_plain_run_writes_no_file(tmp_path: Path) -> None:
    path, before = tmp_path / "cells.json", set(ROOT.glob(".benchmarks/**/*"))
    smoke = [f"--bench-backbone={WIDE}", "--bench-arm=exact", f"--benchmark-json={path}"]
    done = run_pytest(*smoke)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout and " ok, " not in done.stdout
    assert not path.exists() and set(ROOT.glob(".benchmarks/**/*")) == before


def test_what_compiling_took_is_no_part_of_the_rounds(tmp_path: Path) -> None:
    """The second of two cells of an arm, whichever it is, has nothing left to compile."""
    path = tmp_path / "cells.json"
    flags = ["--bench-backbone=tests.bench.wide:deep", "--bench-compile=eager", "--bench-arm=exact", "--bench-rounds=2"]
    done = run_pytest("--benchmark-enable", f"--benchmark-json={path}", *flags, "--bench-phase=total,backward")
    assert done.returncode == 0, done.stdout + done.stderr
    about = {one["extra_info"]["phase"]: one["extra_info"] for one in json.loads(path.read_text())["benchmarks"]}
    assert {one["compile"] for one in about.values()} == {"eager"}
    second, first = sorted(one["compile_s"] for one in about.values())
    assert second == 0 < first


def test_names_are_readable() -> None:
    one = Grid(window=(5,), batch=(16,), arm=("closed-form-batched",), phase=("total",), checkpointing=("off", "on"))
    assert [cell.name for cell in one.cells()] == [
        "closed-form-batched-total-digits-flux-W5-float32-b16",
        "closed-form-batched-total-digits-flux-W5-float32-b16-checkpointing",
    ]
    [compiled] = Grid(compile=("inductor",), arm=("exact",), phase=("total",)).cells()
    assert compiled.name == "exact-total-digits-flux-W3-float32-b2-compile-inductor"


def test_the_smoke_grid_has_every_arm_and_phase() -> None:
    names = [cell.name for cell in Grid().cells()]
    assert len(names) == len(set(names)) == len(Grid.arm) * (1 + len(PHASES)) - len(PHASES)
    assert "prototype-forward-digits-flux-W3-float32-b2" in names


def test_values_are_separated_by_commas() -> None:
    found = read_grid({"window": "4, 5,4", "rounds": "7", "dtype": None})
    assert (found.window, found.rounds, found.dtype) == ((4, 5, 4), 7, ("float32",))
    assert [settings.window for settings in found.settings()] == [4, 5]
    assert {settings.rounds for settings in found.settings()} == {7}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"window": "five"}, "window must be of type int, got 'five'"),
        ({"window": "1"}, "window must be at least 2, got 1"),
        ({"rounds": "5,6"}, "rounds must be one value, got '5,6'"),
        ({"phase": "total,sideways"}, r"phase must be of \['total', 'forward', .*got 'sideways'"),
        ({"arm": "papr-joint"}, "arm must be of .*got 'papr-joint'"),
        ({"checkpointing": "maybe"}, r"checkpointing must be of \['off', 'on'\], got 'maybe'"),
        ({"compile": "gcc"}, r"compile must be of \['off', 'inductor', .*got 'gcc'"),
        ({"backbone": "digit-flux"}, "did you mean 'digits-flux'"),
    ],
)
def test_what_is_refused(given: dict[str, str | None], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_grid(given)
