"""Records: strict JSON, whole files or none, and cells that say why they hold nothing."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jagg_core.records import (
    SCHEMA_VERSION,
    Cell,
    Record,
    RecordError,
    only_run_in,
    plain,
    read_json,
    recorded,
    require_writable,
    write_json,
)


def make_record(*cells: Cell, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "kind": "test",
        "command": ["python", "-m", "analysis"],
        "backbone": "digits-flux",
        "settings": {"etas": [0.7, 0.3], "recipe": {"steps": 21, "nothing": None, "on": True}},
        "seeds": {"evaluation": [2**62, 3]},
        "schedule": [1.0, 0.75],
        "environment": {"threads": 1},
        "cells": list(cells),
    }
    return Record(**{**fields, **changes})


OK = Cell("exact", settings={"passes": 20}, samples={"total_s": [0.5, None, 0.25]}, values={"ratio": 1.5})


# Round trip


def test_round_trip(tmp_path: Path) -> None:
    others = [Cell(status, status, f"because {status}") for status in ("failed", "skipped", "undefined")]
    record = make_record(OK, *others)
    record.write(tmp_path / "deep" / "record.json")
    assert Record.read(tmp_path / "deep" / "record.json") == record


def test_values_come_back_as_json_types(tmp_path: Path) -> None:
    cell = Cell("c", values={"a": np.float32(0.5), "b": torch.tensor([1, 2]), 3: (torch.bfloat16, Path("x/y"))})
    make_record(cell).write(tmp_path / "r.json")
    assert Record.read(tmp_path / "r.json").cell("c").values == {"a": 0.5, "b": [1, 2], "3": ["bfloat16", "x/y"]}


def test_the_same_record_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_record(OK).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_cells_by_name() -> None:
    record = make_record(OK, Cell("other"))
    assert record.cell("exact") is OK
    with pytest.raises(KeyError, match=r"no cell 'paper'.*'exact', 'other'"):
        record.cell("paper")


def test_equal_names_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    record = make_record(Cell("a"), Cell("twice"), Cell("twice"))
    with pytest.raises(RecordError, match=r"unique, found \['twice'\]"):
        record.write(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


# One run in a folder


def test_a_folder_is_held_by_one_run_whatever_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with pytest.raises(KeyboardInterrupt), only_run_in(folder):
        told = rf"another run is at work in {folder}: .* or choose another folder"
        with pytest.raises(ValueError, match=told), only_run_in(folder):
            pass
        with only_run_in(tmp_path / "other"):
            pass
        raise KeyboardInterrupt
    with only_run_in(folder):
        pass


def test_a_process_that_is_killed_lets_go_of_its_folder(tmp_path: Path) -> None:
    held = (
        "import sys, pathlib\nfrom jagg_core.records import only_run_in\n"
        "with only_run_in(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", held, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run is at work"), only_run_in(tmp_path):
            pass
        process.kill()
    with only_run_in(tmp_path):
        pass


@pytest.mark.parametrize("missing", ["module", "file system"])
def test_where_there_are_no_locks_nothing_is_guarded(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if missing == "module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", refuse)
    with only_run_in(tmp_path), only_run_in(tmp_path):
        pass


def test_a_file_where_a_folder_is_needed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    for folder, message in (
        ("file", "out must be a folder, got the file .*/file$"),
        ("file/run/deep", "out must be below a folder, got the file .*/file$"),
        ("gone", "out must be a folder, got the broken link .*/gone$"),
    ):
        with pytest.raises(ValueError, match=message), only_run_in(tmp_path / folder):
            pass
    with pytest.raises(ValueError, match=r"out must be a folder, got the file .*/file$"):
        require_writable(tmp_path / "file/x.json")
    with pytest.raises(ValueError, match=f"out must be a file, got the folder {tmp_path}$"):
        require_writable(tmp_path)
    assert (tmp_path / "file").read_text() == "x"


def test_a_write_is_tried_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "deep/x.json")
    assert list((tmp_path / "deep").iterdir()) == []
    with pytest.raises(ValueError, match=r"out: .* cannot be written: File name too long$"):
        require_writable(tmp_path / ("x" * 300))

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(ValueError, match=r"out: .*x\.json cannot be written: Read-only file system$"):
        require_writable(tmp_path / "x.json")
    with pytest.raises(ValueError, match="cannot be written: Read-only"), only_run_in(tmp_path / "run"):
        pass
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ValueError, match=r"out: the folder .*new cannot be made: Read-only file system$"):
        require_writable(tmp_path / "new/x.json")


# Strict JSON

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_is_not_finite_is_refused_by_place(bad: float, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    make_record(OK).write(path)
    before = path.read_bytes()
    spoilt = make_record(OK, Cell("slow", samples={"total_s": [1.0, bad]}))
    with pytest.raises(RecordError, match=rf"^r\.json: record\.cells\.1\.samples\.total_s\.1 = {bad} is not finite"):
        spoilt.write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_tensor_that_is_not_finite_is_refused_by_place(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"record\.a\.1\.0 = inf"):
        write_json(tmp_path / "x.json", {"a": torch.tensor([[1.0], [math.inf]])})


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity"])
def test_reading_refuses_what_is_not_strict(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    make_record(OK).write(path)
    path.write_text(path.read_text().replace("0.25", bad))
    with pytest.raises(RecordError, match=f"{bad} is not strict JSON"):
        Record.read(path)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    make_record(OK).write(path)
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"r\.json: not JSON, perhaps truncated"):
            Record.read(path)


def test_binary_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    make_record(OK).write(path)
    path.write_bytes(path.read_bytes()[:50] + b"\xff\xfe" + path.read_bytes()[52:])
    with pytest.raises(RecordError, match="not JSON"):
        Record.read(path)


def test_no_file() -> None:
    with pytest.raises(FileNotFoundError):
        read_json(Path("nowhere") / "r.json")


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, None, str(SCHEMA_VERSION)])
def test_other_schema_versions_are_refused(version: object, tmp_path: Path) -> None:
    data = asdict(make_record(OK)) | {"schema_version": version}
    write_json(tmp_path / "r.json", data)
    with pytest.raises(RecordError, match=f"schema_version must be {SCHEMA_VERSION}, found {version}"):
        Record.read(tmp_path / "r.json")


@pytest.mark.parametrize("data", [[1], 3, "text", None])
def test_json_that_is_no_record_is_refused(data: object, tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", data)
    with pytest.raises(RecordError, match="schema_version must be"):
        Record.read(tmp_path / "r.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("seeds"),
        lambda data: data.pop("cells"),
        lambda data: data.update(colour="red"),
        lambda data: data["cells"][0].update(colour="red"),
        lambda data: data["cells"].append("text"),
    ],
    ids=["no seeds", "no cells", "unknown field", "unknown field of a cell", "a cell that is none"],
)
def test_other_fields_are_refused(change: Any, tmp_path: Path) -> None:
    data = asdict(make_record(OK))
    change(data)
    write_json(tmp_path / "r.json", data)
    with pytest.raises(RecordError, match="not a record of schema"):
        Record.read(tmp_path / "r.json")


# Status


@pytest.mark.parametrize("status", ["failed", "skipped", "undefined"])
def test_every_status_but_ok_needs_a_reason(status: Any) -> None:
    with pytest.raises(RecordError, match="'c': a reason goes with every status but ok, found None"):
        Cell("c", status)
    assert Cell("c", status, "why").reason == "why"


def test_ok_has_no_reason() -> None:
    with pytest.raises(RecordError, match="'c': a reason goes with every status but ok, found 'why'"):
        Cell("c", "ok", "why")


def test_other_statuses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"status of cell 'c' must be one of .*'undefined'\], found 'nan'"):
        Cell("c", "nan", "why")  # type: ignore[arg-type]
    data = asdict(make_record(OK))
    data["cells"][0]["status"] = "nan"
    write_json(tmp_path / "r.json", data)
    with pytest.raises(RecordError, match="found 'nan'"):
        Record.read(tmp_path / "r.json")


# Recording


def test_recorded_cells() -> None:
    cells: list[Cell] = []
    with recorded(cells, "good", dtype=torch.float32) as cell:
        cell.values = {"a": 1}
    with recorded(cells, "bad", window=5) as cell:
        cell.samples, cell.values = {"total_s": [1.0]}, {"a": 1}
        raise ArithmeticError("off by one")
    with recorded(cells, "after"):
        pass
    assert cells == [
        Cell("good", settings={"dtype": "float32"}, values={"a": 1}),
        Cell("bad", "failed", "ArithmeticError: off by one", {"window": 5}),
        Cell("after"),
    ]


def test_a_failed_cell_can_be_written_and_read(tmp_path: Path) -> None:
    record = make_record()
    with recorded(record.cells, "bad"):
        raise FloatingPointError
    record.write(tmp_path / "r.json")
    assert Record.read(tmp_path / "r.json").cell("bad").reason == "FloatingPointError: "


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_stopping_is_not_recorded(error: type[BaseException]) -> None:
    cells: list[Cell] = []
    with pytest.raises(error), recorded(cells, "stopped"):
        raise error
    assert cells == []


# What can be stored


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.1, 0.1),
        ("é", "é"),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor(True), True),
        (torch.tensor([0.5], requires_grad=True), [0.5]),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7),
        (np.bool_(False), False),
        (np.arange(3), [0, 1, 2]),
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.device("cuda", 1), "cuda:1"),
        (Path("results") / "a", str(Path("results") / "a")),
        (range(3), [0, 1, 2]),
        ((1, (2, [np.int32(3)])), [1, [2, [3]]]),
        ({1: {"a": (torch.float16,)}}, {"1": {"a": ["float16"]}}),
    ],
    ids=repr,
)
def test_plain(value: object, expected: object) -> None:
    found = plain(value)
    assert found == expected
    # 1 == True == 1.0 in Python, but not in JSON
    assert json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, b"bytes", print], ids=lambda value: type(value).__name__)
def test_what_is_unknown_is_refused_by_type(value: object, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=f"cannot store a {type(value).__name__} in a record"):
        plain([{"deep": value}])
    with pytest.raises(RecordError):
        write_json(tmp_path / "x.json", value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("samples", None, "samples of cell 'a' must be an object"),
        ("samples", {"total_s": 5}, r"samples\.total_s of cell 'a' must be a list of numbers and nulls"),
        ("samples", {"total_s": ["1"]}, r"samples\.total_s of cell 'a' must be a list of numbers and nulls"),
        ("name", 3, "name of a cell must be text, found 3"),
        ("values", [], "values of cell 'a' must be an object"),
    ],
)
def test_a_cell_of_other_types_is_damaged(place: str, value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record("group", [], "digits-flux", {}, {}, cells=[Cell("a")]).write(path)
    data = json.loads(path.read_text())
    data["cells"][0][place] = value
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=message):
        Record.read(path)


def test_two_cells_of_a_name_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record("group", [], "digits-flux", {}, {}, cells=[Cell("a")]).write(path)
    data = json.loads(path.read_text())
    data["cells"] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match="cell names must be unique"):
        Record.read(path)


def test_a_child_holds_the_folder_after_its_parent(tmp_path: Path) -> None:
    """As the timing that a killed main job leaves behind, which would write into the next run's folder."""
    with only_run_in(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with pytest.raises(ValueError, match="another run is at work"), only_run_in(tmp_path):
            pass
    finally:
        child.communicate(b"\n")
    with only_run_in(tmp_path):
        pass
