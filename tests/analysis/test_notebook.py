"""What notebooks start with: they know which stored results they read, and what those were."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as a notebook that has read nothing yet imports it."""
    monkeypatch.delitem(sys.modules, "analysis.report.notebook", raising=False)
    yield importlib.import_module("analysis.report.notebook")
    sys.modules.pop("analysis.report.notebook", None)


def test_files_that_were_read_are_told_by_folder(
    notebook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "results" / "reference" / "some-run"
    (run / "tables").mkdir(parents=True)
    for name in ("record.json", "tables/signal.csv", "tables/not-read.csv"):
        (run / name).write_text("1")
    (tmp_path / "results" / "alone.json").write_text("2")
    monkeypatch.setattr(notebook, "ROOT", tmp_path)
    monkeypatch.setattr(notebook, "RESULTS", tmp_path / "results")
    notebook._opened.clear()
    assert notebook.sources().empty
    monkeypatch.chdir(run)
    (run / "record.json").read_text()
    (run / "tables" / "signal.csv").read_bytes()
    with open(tmp_path / "results" / "alone.json") as file:
        file.read()
    found = notebook.sources()["files"].to_dict()
    assert found == {"results": 1, "results/reference/some-run": 2}
    before = notebook.sources()["digest"]
    (run / "tables" / "signal.csv").write_text("3")
    after = notebook.sources()["digest"]
    assert before["results"] == after["results"]
    assert before["results/reference/some-run"] != after["results/reference/some-run"]


def test_a_run_is_read_with_its_tables(notebook: ModuleType) -> None:
    record, frames = notebook.read_run("digits-flux-curves")
    assert record.kind == "curves"
    assert len(frames["arms"]) == 8
    assert list(notebook.sources().index) == ["results/reference/digits-flux-curves"]


def test_a_figure_is_shown_as_a_small_picture(notebook: ModuleType) -> None:
    figure, axes = plt.subplots()
    axes.plot([0, 1], [0, 1])
    plt.close(figure)
    picture = notebook.show(figure)
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert len(picture._repr_png_()) < 30_000
    assert repr(picture) == "picture"
