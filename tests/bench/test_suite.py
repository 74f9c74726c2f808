"""Presets: every cell ends as ok, failed or skipped, with a record or a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import children, progress, suite
from bench.__main__ import main
from bench.presets import PRESETS, Planned
from bench.settings import CollectiveBench, GroupBench, UpdateBench
from bench.suite import needed_bytes, run_suite, why_not
from jagg_core.records import Record

WIDE = GroupBench(backbone="tests.bench.wide:load", window=2, batch=4, rounds=2, steps=4)
CELLS = [
    Planned("group", WIDE),
    Planned("memory", WIDE),
    Planned("update", UpdateBench(backbone="tests.bench.wide:load", window=2, batch=4, rounds=2, steps=4)),
    Planned("group", replace(WIDE, backbone="tests.bench.wide:broken")),
    Planned("collectives", CollectiveBench(backbone="tests.bench.wide:broken", window=2)),
    Planned("group", replace(WIDE, device="cuda:7")),
]


@pytest.fixture
def own_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "smoke", lambda: CELLS)
    monkeypatch.setattr("bench.memory.arm_names", lambda: ["exact"])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_cells_of_their_own_names(name: str) -> None:
    cells = PRESETS[name]()
    assert cells
    assert len({cell.name for cell in cells}) == len({cell.file for cell in cells}) == len(cells)
    assert all(cell.name.startswith(f"{cell.kind}/") and "/" not in cell.file for cell in cells)


def test_names_are_readable() -> None:
    assert PRESETS["digits"]()[2].name == "group/digits-flux/W5/batch16/float32/cpu/checkpointing"
    assert PRESETS["digits"]()[-1].name == "collectives/digits-flux/W5/batch2/float32/cpu/ranks2/checkpointing"
    assert PRESETS["h200"]()[0].name == "group/flux-dev/W5/batch1/bfloat16/cuda/checkpointing"


@pytest.mark.usefixtures("own_preset")
def test_what_became_of_every_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(children, "POLL_S", 0.1)
    with pytest.raises(SystemExit) as caught:
        main(["run", "--preset", "smoke", "--out", str(tmp_path)])
    assert caught.value.code == 1
    record = Record.read(tmp_path / "record.json")
    assert record.kind == "bench" and [cell.name for cell in record.cells] == [cell.name for cell in CELLS]
    assert [cell.status for cell in record.cells] == ["ok", "ok", "ok", "failed", "failed", "skipped"]
    group, memory, update, broken, ranks, skipped = record.cells
    assert Record.read(tmp_path / group.settings["file"]).kind == "group-speed"
    assert Record.read(tmp_path / memory.settings["file"]).kind == "memory"
    assert Record.read(tmp_path / update.settings["file"]).kind == "update-speed"
    # what a page shows beside the samples
    predicted = group.values["fit"]["arms"]
    assert {"prototype", "paper-joint", "closed-form-batched"} <= predicted.keys()
    assert all(arm["predicted_s"] > 0 and arm["measured_s"] > 0 for arm in predicted.values())
    assert update.values == memory.values == {}
    assert "no room for this model" in (broken.reason or "") and "no room for this model" in (ranks.reason or "")
    assert "needs a device cuda:7: device 'cuda:7' cannot be used here" in (skipped.reason or "")
    printed = capsys.readouterr()
    assert_lines_tell_where_it_is(printed.err.splitlines())
    assert "1.00x" in printed.out and "skipped" in printed.out and "whole step" in printed.out
    assert "no room for this model" in printed.err


def assert_lines_tell_where_it_is(lines: list[str]) -> None:
    """Which cell runs, how far it is (of a process that has only begun, what it does first), and what became of it."""
    starts = [lines.index(f"smoke, {number} of 6: {one.name}") for number, one in enumerate(CELLS, 1)]
    assert starts == sorted(starts)
    firsts = [lines[start + 1].partition(" s: ")[2] for start in starts[:5]]
    ranks = "2 ranks verify, count and time the arms"
    assert firsts == ["loads the model", "measured 0 of 1 arms", "loads the model", "loads the model", ranks]
    ends = [line for line in lines if line.startswith(("  ok", "  failed", "  skipped"))]
    assert [line.partition(" after ")[0].strip() for line in ends] == ["ok"] * 3 + ["failed"] * 2 + ["skipped"]


@pytest.mark.usefixtures("own_preset")
def test_a_run_that_is_killed_keeps_what_was_done(tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if line.startswith("smoke, 2 of 6: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_suite("smoke", tmp_path, progress=stop)
    record = Record.read(tmp_path / "record.json")
    assert [cell.name for cell in record.cells] == [cell.name for cell in CELLS]
    assert [cell.reason for cell in record.cells] == [None, *["the run ended before this cell"] * 5]


@pytest.mark.parametrize("cell", [CELLS[0], CELLS[2]], ids=lambda cell: cell.kind)
def test_a_process_notes_how_far_it_is(cell: Planned, tmp_path: Path) -> None:
    note = tmp_path / "note"
    assert isinstance(cell.settings, GroupBench)
    suite._child(0, cell.settings, str(tmp_path / "record.json"), str(note))
    assert note.read_text() == "round 2 of 2"
    assert all(cell.status == "ok" for cell in Record.read(tmp_path / "record.json").cells)


def test_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in `EVERY_S` seconds, and fewer of those that say the same again; none for nobody."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines: list[str] = []
    part, silent = progress.Part(lines.append), progress.Part(None)
    for second in range(1, 61):
        now[0] = 100.0 + second
        for one in (part, silent):
            one.at("starts" if second < 15 else "runs")
    assert lines == ["  10 s: starts", "  20 s: runs", "  50 s: runs"]


@pytest.mark.parametrize("missing", ["diffusers", "transformers", "peft"])
def test_a_library_that_is_missing_is_told_before_anything_runs(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "require_device", torch.device)
    monkeypatch.setattr(suite, "total_memory", lambda device: 2**60)
    cells = PRESETS["h200"]()
    assert [why_not(cell) for cell in cells] == [None] * 4
    found = suite.find_spec
    monkeypatch.setattr(suite, "find_spec", lambda name: None if name == missing else found(name))
    reason = f"needs {missing}, not installed here: pip install 'jagg-core[pretrained]'"
    assert [why_not(cell) for cell in cells] == [reason] * 4
    shipped = Planned("group", GroupBench(backbone="digits-flux"))
    assert (why_not(shipped) is None) == (missing != "diffusers")
    assert why_not(CELLS[0]) is None  # one of one's own


@pytest.mark.usefixtures("own_preset")
def test_a_reason_that_many_arms_share_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.memory.arm_names", lambda: ["exact", "paper-joint"])
    monkeypatch.setitem(
        PRESETS, "smoke", lambda: [Planned("memory", replace(WIDE, backbone="tests.bench.wide:broken"))]
    )
    [cell] = run_suite("smoke", tmp_path).cells
    reason = cell.reason or ""
    assert reason.startswith("exact, paper-joint: ") and reason.count("no room for this model") == 2  # code, and error


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_timeout_that_is_none(timeout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--preset", "smoke", "--timeout", timeout, "--out", str(tmp_path)])
    assert caught.value.code == 2 and "timeout must be positive, got" in capsys.readouterr().err


@pytest.mark.usefixtures("own_preset")
def test_cells_that_hang_are_failed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "smoke", lambda: CELLS[:2])
    record = run_suite("smoke", tmp_path, timeout=0.1)
    assert record.cells[0].reason == "TimeoutError: not done after 0.1 s (setting timeout)"
    assert record.cells[1].reason == "exact: TimeoutError: not done after 0.1 s (setting timeout)"
    json.loads((tmp_path / "record.json").read_text())


def test_updates_of_presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the calibration that ships, and without one elsewhere; models of full size in presets of their own."""
    updates = {name: [c.settings for c in PRESETS[name]() if c.kind == "update"] for name in PRESETS}
    counts = {name: len(found) for name, found in updates.items() if found}
    assert counts == {"smoke": 1, "digits": 1, "laptop": 2, "flux-dev-update": 1, "qwen-image-update": 1}
    [digits] = updates["digits"]
    assert isinstance(digits, UpdateBench) and Path(digits.calibration).is_file()
    monkeypatch.chdir(tmp_path)
    [digits] = [c.settings for c in PRESETS["digits"]() if isinstance(c.settings, UpdateBench)]
    assert digits.calibration == ""


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Planned("group", GroupBench(backbone="flux-dev"))
    # weights, gradients, and the twin's of both, in fp32
    assert needed_bytes(large) == 4 * 4 * 11_901_408_320
    monkeypatch.setattr(suite, "total_memory", lambda device: 2**30)
    assert why_not(large) == "needs 177.3 GiB, cpu has 1.0"
    assert why_not(Planned("group", WIDE)) is None
    # and what the optimizer works on
    assert needed_bytes(replace(large, kind="update")) == 2 * needed_bytes(large)
    lora = replace(large.settings, backbone_options=("lora_rank=4",), dtype="bfloat16")
    assert needed_bytes(Planned("group", lora)) == 2 * 11_901_408_320


def test_an_unknown_preset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preset must be one of \['smoke', .* got 'everything'"):
        run_suite("everything", tmp_path)
