"""Processes of a measurement: watched while they run, and gone when the call is over."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from bench import children
from bench.children import run_children


def write_on_and_on(number: int, folder: str) -> None:
    while True:
        (Path(folder) / f"{number}-{time.monotonic_ns()}").touch()


def end(number: int) -> None:
    """What a process does that has nothing to do."""


def test_none_is_left_when_the_time_is_over(tmp_path: Path) -> None:
    """One that is dying could still write into a folder that its caller removes."""
    with pytest.raises(TimeoutError, match=r"not done after 0\.1 s \(setting timeout\)"):
        run_children(write_on_and_on, (str(tmp_path),), 2, 0.1)
    assert multiprocessing.active_children() == []


def test_a_short_time_is_not_rounded_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However fast processes are that would have needed longer."""
    monkeypatch.setattr(children, "POLL_S", 1e6)
    with pytest.raises(TimeoutError):
        run_children(write_on_and_on, (str(tmp_path),), 1, 0.1)


def test_the_caller_is_told_that_they_are_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "POLL_S", 1e-3)
    told: list[float] = []
    run_children(end, (), 1, 100, waiting=lambda: told.append(time.monotonic()))
    assert told
