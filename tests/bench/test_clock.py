"""What a clock sees: a device that works on after a call returned, first calls that compile, compiling in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.benchmark.utils.timer import timer as torch_timer

from bench import group, update
from bench.arms import ARMS, PHASES, arms_of
from bench.cells import test_cells
from bench.group import Group, load_group, run_group_bench, run_of, time_arm
from bench.settings import GroupBench, UpdateBench
from bench.timing import time_in_rounds
from bench.update import run_update_bench
from jagg_core.records import Cell

ENQUEUE, RUN = 1e-4, 5e-3
"""Seconds that a call of the model takes to return, and then on the device."""

WINDOW = 4
NAMES = [arm.name for arm in arms_of("group")]


class FakeDevice:
    """Runs what is enqueued one after the other, in its own time; its timer waits for it."""

    def __init__(self, enqueue: float = ENQUEUE, run: float = RUN) -> None:
        self.enqueue_s, self.run_s = enqueue, run
        self.host = self.done = 0.0
        self.events: list[str] = []

    def enqueue(self) -> None:
        self.host += self.enqueue_s
        self.done = max(self.host, self.done) + self.run_s
        self.events.append("run")

    def timer(self) -> float:
        self.host = max(self.host, self.done)
        self.events.append("sync")
        return self.host


class OnDevice:
    """A policy whose forwards and backwards run on a fake device."""

    def __init__(self, policy: Any, device: FakeDevice) -> None:
        self.policy, self.device = policy, device

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        self.device.enqueue()
        velocity: Tensor = self.policy.velocity(latents, sigma, rows)
        if velocity.requires_grad:
            velocity.register_hook(lambda _: self.device.enqueue())
        return velocity

    def parameters(self) -> Any:
        return self.policy.parameters()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """One whose timer is the bench's."""
    found = FakeDevice()
    monkeypatch.setattr(group, "timer", found.timer)
    monkeypatch.setattr(update, "timer", found.timer)
    return found


def on_device(stub: str, device: FakeDevice, window: int = WINDOW) -> Group:
    work = load_group(GroupBench(stub, batch=2, window=window, steps=2 * window))
    return replace(work, policy=OnDevice(work.policy, device))


def timed(name: str, work: Group) -> dict[str, float]:
    return time_arm(run_of(ARMS[name], work))


def test_everything_is_timed_by_torchs_timer() -> None:
    assert group.timer is update.timer is test_cells.timer is test_cells.CLOCKS["total"] is torch_timer


@pytest.mark.parametrize("name", NAMES)
def test_a_total_waits_for_the_device_at_its_ends_only(
    name: str, stub: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "asynchronous", True)
    found = timed(name, on_device(stub, device))
    assert device.events[0] == "sync"
    runs = device.events[1:].index("sync")
    assert runs >= 2  # one batched forward, and its backward
    # what is enqueued later overlaps with what runs
    assert found["total_s"] == pytest.approx(ENQUEUE + runs * RUN)
    # phases are of a second call, which does as much, and waits in between
    assert device.events.count("run") == 2 * runs
    if name != "exact-bare":
        assert runs * RUN < found["forward_s"] + found["backward_s"] <= 1.0001 * runs * (ENQUEUE + RUN)


def test_short_kernels_are_not_inflated(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 of 50 microseconds. Waits between them make phases longer by a launch each, and leave the total alone."""
    device = FakeDevice(enqueue=1e-5, run=5e-5)
    monkeypatch.setattr(group, "timer", device.timer)
    monkeypatch.setattr(Group, "asynchronous", True)
    work = on_device(stub, device, window=100)
    found = time_arm(run_of(ARMS["exact"], work))
    assert device.events.count("run") == 2 * 200
    assert found["total_s"] == pytest.approx(0.01, rel=0.01)
    assert found["forward_s"] + found["backward_s"] == pytest.approx(200 * (1e-5 + 5e-5))


def test_the_timer_waits_for_the_gpu_that_was_asked_for(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's timer waits for the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    load = group.load_backbone
    monkeypatch.setattr(group, "load_backbone", lambda name, device, dtype: load(name, "cpu", dtype))
    for device in ("cpu", "cuda", "cuda:1"):
        group.load(GroupBench(stub, device=device))
    assert current == [torch.device("cuda", 1)]


@pytest.mark.parametrize("name", NAMES)
def test_phases_have_what_they_started(name: str, stub: str, device: FakeDevice) -> None:
    found = timed(name, on_device(stub, device))
    runs = device.events.count("run")
    assert found["total_s"] >= runs * RUN
    if name != "exact-bare":
        assert found.keys() == {"total_s", *(f"{phase}_s" for phase in PHASES)}
        assert found["upstream_s"] == 0
        assert found["forward_s"] + found["backward_s"] == pytest.approx(found["total_s"])


def test_a_step_of_training_waits_twice_per_call(stub: str, device: FakeDevice) -> None:
    record = run_update_bench(UpdateBench(stub, batch=2, rounds=2, window=2, steps=5))
    assert {cell.status for cell in record.cells} == {"ok"}
    calls = 3 * len(record.cells)  # once before the rounds
    assert device.events == ["sync", "sync"] * calls


class SlowAtFirst:
    """A policy that takes a millisecond, and a second at its first call with a graph and at its first one without."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.now = 0.0
        self.modes: set[bool] = set()

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        mode = torch.is_grad_enabled()
        self.now += 1e-3 if mode in self.modes else 1.0
        self.modes.add(mode)
        velocity: Tensor = self.policy.velocity(latents, sigma, rows)
        return velocity

    def parameters(self) -> Any:
        return self.policy.parameters()


def test_first_calls_of_both_modes_are_warm_up(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GroupBench(stub, batch=2, rounds=2, window=WINDOW, steps=8)
    work = load_group(settings)
    slow = SlowAtFirst(work.policy)
    monkeypatch.setattr(group, "load_group", lambda _: replace(work, policy=slow))
    monkeypatch.setattr(group, "timer", lambda: slow.now)
    record = run_group_bench(settings)
    assert slow.modes == {False, True}
    for cell in record.cells:
        assert cell.status == "ok"
        assert max(s for s in cell.samples["total_s"] if s is not None) < 0.1
    assert record.cell("exact").samples["total_s"] == pytest.approx([WINDOW * 1e-3] * 2)


def test_an_arm_that_compiles_after_the_warm_up_fails() -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    sizes = {"steady": iter([2, 2]), "other": iter([2, 3])}

    def execute(name: str) -> dict[str, float]:
        compiled(torch.ones(next(sizes[name])))
        return {"total_s": 1.0}

    cells = [Cell("steady"), Cell("other")]
    time_in_rounds(cells, execute, 2, 0)
    assert (cells[0].status, cells[0].samples) == ("ok", {"total_s": [1.0, 1.0]})
    assert (cells[1].status, cells[1].reason) == ("failed", "torch.compile made graphs after the warm-up, 1 in all")
    assert cells[1].samples == {}
