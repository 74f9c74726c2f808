"""Blocks that torch.compile makes: verified against the plain loop as it is written, compiled before the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import group
from bench.__main__ import main
from bench.arms import PAPER, arms_of
from bench.compiling import compile_blocks, compile_seconds, compiled_graphs
from bench.group import run_group_bench
from bench.settings import GroupBench, UpdateBench
from bench.update import PARTS, run_update_bench
from jagg_core.backbones import load_backbone
from jagg_core.records import Record

# torch's own: its tracer looks whether inputs have gradients
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

DEEP = "tests.bench.wide:deep"
SMALL: dict[str, Any] = {"batch": 2, "rounds": 2, "window": 3, "steps": 6}
ARMS = [arm.name for arm in arms_of("group")]
NEW = {"exact", "exact-batched", "prototype", "closed-form-batched"}
"""Arms that are the first with a shape: one step, five steps, one step without a graph, two steps."""


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_every_shape_and_grad_mode_compiles_before_the_rounds(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch", "2", "--rounds", "2", "--window", "3", "--steps", "6", "--checkpointing"]
    main(["group", "--backbone", DEEP, "--compile", backend, *sizes, "--out", str(tmp_path / "speed.json")])
    record = Record.read(tmp_path / "speed.json")
    assert record.settings["compile"] == backend
    assert [(cell.name, cell.reason) for cell in record.cells if cell.status != "ok"] == []
    assert [cell.name for cell in record.cells] == ARMS
    assert {cell.name for cell in record.cells if cell.values["compile_s"] > 0} == NEW
    assert all(cell.values["relative_error"] < 1e-5 for cell in record.cells)
    seconds = sum(cell.values["compile_s"] for cell in record.cells)
    assert f"torch.compile took {seconds:.1f} s before the rounds" in capsys.readouterr().out


def test_updates_and_what_stands_beside_them() -> None:
    record = run_update_bench(UpdateBench(DEEP, compile="eager", **SMALL))
    assert [(cell.name, cell.reason) for cell in record.cells if cell.status != "ok"] == []
    assert {len(cell.samples["total_s"]) for cell in record.cells} == {2}
    compiled = {cell.name for cell in record.cells if cell.values["compile_s"] > 0}
    assert {"exact", PAPER} <= compiled and compiled.isdisjoint(PARTS[1:])


def test_without_it_nothing_is_compiled() -> None:
    before = compiled_graphs(), compile_seconds()
    record = run_group_bench(GroupBench(DEEP, **SMALL))
    assert (compiled_graphs(), compile_seconds()) == before
    assert all(cell.values["compile_s"] == 0 for cell in record.cells)


def wrong(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend whose backwards give too much."""
    return lambda *given: [found + 0.01 * (found - found.detach()) for found in graph(*given)]


def none(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend that finds no compiler."""
    raise RuntimeError("no working C++ compiler")


@pytest.mark.parametrize(
    ("backend", "reason"), [(wrong, "gradient differs from the plain loop"), (none, "no working C++ compiler")]
)
def test_arms_fail_with_the_backends_reason(backend: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "compile_blocks", lambda backbone, _: compile_blocks(backbone, backend))
    record = run_group_bench(GroupBench(DEEP, compile="eager", **SMALL))
    assert [(cell.name, cell.status) for cell in record.cells] == [(name, "failed") for name in ARMS]
    assert reason in (record.cell("exact").reason or "")
    record = run_update_bench(UpdateBench(DEEP, compile="eager", **SMALL))
    assert record.cell(PAPER).status == "failed" and reason in (record.cell("exact").reason or "")


def test_a_policy_that_goes_past_the_blocks_fails(stub: str) -> None:
    record = run_group_bench(GroupBench(stub, compile="eager", **SMALL))
    assert {cell.status for cell in record.cells} == {"failed"}
    assert "compile: eager made no graph" in (record.cell("exact").reason or "")


def test_a_transformer_without_blocks_is_compiled_as_a_whole() -> None:
    backbone = load_backbone("tests.bench.wide:load")
    before = compiled_graphs()
    compile_blocks(backbone, "eager")
    assert isinstance(backbone.transformer, nn.Sequential)
    backbone.transformer(torch.zeros(2, 17))
    assert compiled_graphs() == before + 1
