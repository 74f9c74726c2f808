"""Peak memory by arm: what one graph, two graphs and five graphs at a time need."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from threading import Thread

import pytest
import torch

from bench.__main__ import main
from bench.memory import LiveBytes, arm_names, measure, run_memory_bench
from bench.settings import GroupBench
from jagg_core.records import Record

SETTINGS = GroupBench(backbone="tests.bench.wide:load", batch=512, window=5)
GRAPH = 512 * 4096 * 4
"""Bytes of one layer's activations of a batch."""


@pytest.fixture(scope="module")
def peaks() -> dict[str, float]:
    record = run_memory_bench(SETTINGS, ["exact", "exact-batched", "paper-joint", "closed-form-sequential"])
    assert [(cell.name, cell.reason) for cell in record.cells if cell.status != "ok"] == []
    assert all(len(cell.samples["peak_bytes"]) == 1 for cell in record.cells)
    return {cell.name: median(p for p in cell.samples["peak_bytes"] if p is not None) for cell in record.cells}


def test_graphs_at_a_time(peaks: dict[str, float]) -> None:
    """A graph of this network keeps two hidden activations."""
    assert 2 * GRAPH < peaks["exact"] < 6 * GRAPH
    assert peaks["exact-batched"] > 4 * peaks["exact"]
    assert peaks["paper-joint"] > 1.4 * peaks["exact"]


def test_closed_form_one_after_the_other_needs_no_more_than_exact(peaks: dict[str, float]) -> None:
    assert peaks["closed-form-sequential"] <= 1.001 * peaks["exact"]


def test_the_prototype_holds_what_exact_holds(peaks: dict[str, float], tmp_path: Path) -> None:
    """Which is why it is left out."""
    measure(0, SETTINGS, ["prototype"], str(tmp_path))
    found = json.loads((tmp_path / "prototype.json").read_text())
    assert len(found) == 1
    assert 0.9 * peaks["exact"] < median(found) < 1.1 * peaks["exact"]


def test_live_bytes() -> None:
    with LiveBytes() as live:
        first = torch.ones(1000)
        kept = first + 1
        assert live.now == 8000
        del first
        view = kept.reshape(10, 100)
        view.add_(1)
        assert (live.now, live.peak) == (4000, 8000)
        del kept
        assert live.now == 4000  # the view keeps it
        del view
        torch.zeros(10)
    assert (live.now, live.peak) == (0, 8000)


def test_live_bytes_of_tensors_that_other_threads_let_go() -> None:
    """As gloo's threads do, at any moment."""
    handed: SimpleQueue[torch.Tensor | None] = SimpleQueue()

    def let_go() -> None:
        while handed.get() is not None:
            pass

    threads = [Thread(target=let_go) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with LiveBytes() as live:
            for thread in threads:
                thread.start()
            for _ in range(20_000):
                handed.put(torch.ones(10))
            for _ in threads:
                handed.put(None)
            for thread in threads:
                thread.join()
        assert live.now == 0 and live.peak >= 40
    finally:
        sys.setswitchinterval(before)


def test_an_arm_that_fails_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the group is there, for every arm at once."""
    record = run_memory_bench(GroupBench(backbone="tests.bench.wide:broken"), ["exact", "paper-joint"])
    assert [cell.status for cell in record.cells] == ["failed"] * 2
    assert all("no room for this model" in (cell.reason or "") for cell in record.cells)


def test_arms_around_the_one_that_ends_the_process_are_measured() -> None:
    record = run_memory_bench(SETTINGS, ["exact", "no-such-arm", "paper-joint"])
    assert [cell.name for cell in record.cells] == ["exact", "no-such-arm", "paper-joint"]
    assert [cell.status for cell in record.cells] == ["ok", "failed", "ok"]
    assert "no-such-arm" in (record.cells[1].reason or "")


def test_compiled_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="compile must be None where memory is measured, got 'eager'"):
        run_memory_bench(replace(SETTINGS, compile="eager"))


def test_an_arm_does_not_see_those_before_it(peaks: dict[str, float]) -> None:
    alone = run_memory_bench(SETTINGS, ["closed-form-sequential"])
    assert alone.cells[0].samples["peak_bytes"] == [peaks["closed-form-sequential"]]


def test_an_arm_that_hangs_is_recorded() -> None:
    record = run_memory_bench(SETTINGS, ["exact", "paper-joint"], timeout=0.1)
    assert [cell.reason for cell in record.cells] == ["TimeoutError: not done after 0.1 s (setting timeout)"] * 2


def test_arms_that_differ_in_memory() -> None:
    assert arm_names() == [
        "exact",
        "exact-batched",
        "paper-joint",
        "closed-form-sequential",
        "closed-form-batched",
        "endpoint-only",
    ]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bench.memory.arm_names", lambda: ["exact"])
    out = tmp_path / "memory.json"
    main(["memory", "--backbone", "tests.bench.wide:load", "--batch", "64", "--out", str(out)])
    assert Record.read(out).kind == "memory"
    assert "MiB beyond model and gradients" in capsys.readouterr().out
