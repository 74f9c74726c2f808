"""Options of the cells that pytest times, and an account of every cell in pytest-benchmark's file and summary."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from bench.cells.grid import GRID, Grid, read_grid
from jagg_core.environment import environment
from jagg_core.flags import described
from jagg_core.strict_json import plain


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option per field of the grid."""
    options = parser.getgroup("bench", "cells of bench/cells (values separated by commas)")
    about = described(Grid)
    for field in fields(Grid):
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        options.addoption(f"--bench-{field.name}", help=f"{about.get(field.name, '')} (default {default})")


def pytest_configure(config: pytest.Config) -> None:
    """Reads the grid before anything is loaded."""
    given = {field.name: config.getoption(f"--bench-{field.name}") for field in fields(Grid)}
    try:
        grid = read_grid(given)
    except ValueError as error:
        raise pytest.UsageError(f"--bench-{error}") from error
    config.stash[GRID] = grid
    config.pluginmanager.register(Account([cell.name for cell in grid.cells()]))


class Account:
    """What became of every cell that was asked for. pytest-benchmark leaves out, without a word, cells that raise."""

    def __init__(self, expected: list[str]) -> None:
        self.expected = expected
        self.outcomes: dict[str, str] = {}
        self.recorded: set[str] | None = None

    def sorted(self) -> dict[str, list[str]]:
        """Lists cells' names by ``ok``, ``failed``, ``skipped`` and ``missing``: not run, or run but not recorded."""
        outcomes: dict[str, list[str]] = {"ok": [], "failed": [], "skipped": [], "missing": []}
        for name in self.expected:
            outcome = self.outcomes.get(name, "missing")
            if outcome == "ok" and self.recorded is not None and name not in self.recorded:
                outcome = "missing"
            outcomes[outcome].append(name)
        return outcomes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a cell's outcome; a failure at any stage is one."""
        name = _cell_of(report.nodeid)
        if report.failed:
            self.outcomes[name] = "failed"
        elif report.skipped:
            self.outcomes.setdefault(name, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(name, "ok")

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Stores versions, threads and clocks, as every record does; no name of the machine."""
        machine_info.pop("node", None)
        machine_info.get("cpu", {}).pop("flags", None)
        machine_info.update(plain(environment()))

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Adds the account. Parameters, which are whole settings, are in ``extra_info``."""
        for one in output_json["benchmarks"]:
            del one["params"]
        self.recorded = {_cell_of(one["fullname"]) for one in output_json["benchmarks"]}
        output_json["cells"] = self.sorted()

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Prints the account of a timed run."""
        if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
            return
        outcomes = self.sorted()
        terminalreporter.section("cells")
        terminalreporter.line(", ".join(f"{len(names)} {status}" for status, names in outcomes.items()))
        for status in ("failed", "skipped", "missing"):
            for name in outcomes[status]:
                terminalreporter.line(f"{status:<8} {name}")


def _cell_of(nodeid: str) -> str:
    """Turns ``bench/cells/test_cells.py::test_cell[NAME]`` into ``NAME``."""
    return nodeid.partition("::test_cell[")[2].removesuffix("]")
