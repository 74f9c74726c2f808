"""The notebooks run from top to bottom at their smallest settings, and what is stored in them is fit to be read."""

from __future__ import annotations

import ast
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
import torch

from jagg_core.backbones import registry

matplotlib.use("Agg")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000

PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work|tmp|opt|usr|mnt|workspace)/|[A-Za-z]:\\\\|site-packages")
"""A path of somebody's machine."""

RUN_AGAIN = "jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def code_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in cells_of(path) if cell["cell_type"] == "code"]


def text_outputs(cell: dict[str, Any]) -> Iterator[str]:
    """All that is stored below a cell, pictures aside."""
    for output in cell["outputs"]:
        yield "".join(output.get("text", ()))
        for kind, content in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield "".join(content)


def stored_sources(path: Path) -> dict[str, tuple[int, str]]:
    """Folders that the notebook read from when its outputs were made: how many files, and the digest of all."""
    text = "\n".join(text_outputs(code_of(path)[-1]))
    found = re.findall(r"<th>(results/[^<]+)</th>\s*<td>(\d+)</td>\s*<td>([0-9a-f]{16})</td>", text)
    return {folder: (int(files), digest) for folder, files, digest in found}


def run_cell(source: str, name: str, names: dict[str, Any]) -> bool:
    """Run a cell as Jupyter would, its last value shown. Whether there was anything to show."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return False
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    if value is None:
        return False
    shown = [getattr(value, method)() for method in ("_repr_png_", "_repr_html_") if hasattr(value, method)]
    assert shown, f"{name} shows a {type(value).__name__}, which is neither a picture nor a table"
    assert all(shown)
    return True


@pytest.fixture
def left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Notebooks set options of the process, and name a backbone."""
    monkeypatch.setenv("JAGG_SMOKE", "1")
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(
        sys.modules, "analysis.report.notebook", raising=False
    )  # it looks at the environment, and at files
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pd.option_context("display.max_colwidth", 50):
        yield
    sys.modules.pop("analysis.report.notebook", None)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_there_are_five() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_", "5_"]
    assert [path.name for path in (ROOT / "notebooks").iterdir() if path.suffix == ".py"] == []


@each_notebook
def test_it_runs_and_what_it_shows_is_stored(path: Path, left_as_it_was: None) -> None:
    names: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(code_of(path), start=1):
        if run_cell("".join(cell["source"]), f"{path.name}, cell {number}", names):
            kinds = {kind for output in cell["outputs"] for kind in output.get("data", {})}
            assert kinds & {"image/png", "text/html"}, f"cell {number} shows something, nothing is stored"
    shared = sys.modules["analysis.report.notebook"]
    assert shared.SMOKE is True
    assert shared.ROOT == ROOT
    read = {folder: (found["files"], found["digest"]) for folder, found in shared.sources().to_dict("index").items()}
    assert stored_sources(path) == read, f"{path.name} is older than what it reads: {RUN_AGAIN}"


@each_notebook
def test_it_was_run_once_from_top_to_bottom(path: Path) -> None:
    code = code_of(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "error" not in kinds
    assert len(kinds) >= 4
    assert [text for cell in code for text in text_outputs(cell) if "Warning" in text or "WARNING" in text] == []


@each_notebook
def test_nothing_of_a_machine_is_stored(path: Path) -> None:
    host = socket.gethostname()
    for cell in code_of(path):
        for text in text_outputs(cell):
            assert PATH.search(text) is None
            assert len(host) < 4 or host not in text
            assert re.search(r" at 0x[0-9a-f]{6,}", text) is None, "an address differs from run to run"
    assert path.stat().st_size < MOST_BYTES


@each_notebook
def test_the_first_cell_says_what_how_long_and_how(path: Path) -> None:
    first = cells_of(path)[0]
    text = "".join(first["source"])
    assert first["cell_type"] == "markdown"
    assert text.startswith(f"# {path.stem[0]}. ")
    for part in ("What you learn.", "Time.", "How to run.", "pip install -e '.[dev,notebooks]'"):
        assert part in text


def test_a_notebook_that_reads_results_says_which() -> None:
    read = {path.stem[:1]: set(stored_sources(path)) for path in NOTEBOOKS}
    assert "results/reference/bench" in read["2"]
    assert "results/reference/photos-flux-calibration" in read["3"] & read["5"]
    assert read["4"] == set()


@each_notebook
def test_the_first_code_cell_is_one_import_that_finds_the_checkout(path: Path) -> None:
    source = "".join(code_of(path)[0]["source"])
    assert "from analysis.report.notebook import " in source
    assert len(source.splitlines()) <= 8
