"""A figure is a function and a block: it is then stored and stands on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.report import write
from analysis.report.blocks import Block, drawn_from
from tests.analysis.test_report import judged, record_of
from tests.test_docs import CONTRIBUTING, python_blocks, sections


def test_a_figure_of_contributing_is_stored_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    [code] = python_blocks(sections(CONTRIBUTING.read_text("utf-8"))["Add a figure"])
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    draw = drawn_from("pareto", "mine", lambda record, table: names["cosine_by_passes"](table))
    monkeypatch.setattr(write, "STUDY", (Block("Cosine by passes", draw=draw, note="{{ record.backbone }} alone"),))
    recipe = {"prompts": 1, "samples": 2, "guidance": None, "steps": 7, "shift": 1.0}
    settings = {"windows": [3], "etas": [0.7], "jagg_frac": 0.5, "threshold": 0.9, "recipe": recipe, "reward": "ink"}
    record_of(
        judged("causal-4", "causal", 4, [0.9, 0.95]), judged("causal-3", "causal", 3, [0.8, 0.9]), settings=settings
    ).write(tmp_path / "record.json")
    page, _, _ = write.write_report(tmp_path)
    text = page.read_text()
    assert "<h2>Cosine by passes</h2>" in text
    assert 'alt="Cosine by passes: mine."' in text
    assert "stub alone" in text
    assert (tmp_path / "figures" / "mine.png").exists()
    assert "of the update&#39;s passes" in text or "no claim" in text  # the page opens with its conclusions
