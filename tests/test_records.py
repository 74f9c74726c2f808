"""Records: strict JSON, whole files or none, and cells that say why they hold nothing."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jagg_core.records import SCHEMA_VERSION, Cell, Record, recorded
from jagg_core.strict_json import RecordError, plain, read_json, write_json


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
    with pytest.raises(RecordError, match=r"unique, got \['twice'\]"):
        record.write(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


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
    with pytest.raises(RecordError, match=f"schema_version must be {SCHEMA_VERSION}, got {version}"):
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
    with pytest.raises(RecordError, match="'c': a reason goes with every status but ok, got None"):
        Cell("c", status)
    assert Cell("c", status, "why").reason == "why"


def test_ok_has_no_reason() -> None:
    with pytest.raises(RecordError, match="'c': a reason goes with every status but ok, got 'why'"):
        Cell("c", "ok", "why")


def test_other_statuses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"status of cell 'c' must be one of .*'undefined'\], got 'nan'"):
        Cell("c", "nan", "why")  # type: ignore[arg-type]
    data = asdict(make_record(OK))
    data["cells"][0]["status"] = "nan"
    write_json(tmp_path / "r.json", data)
    with pytest.raises(RecordError, match="got 'nan'"):
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
        ("name", 3, "name of a cell must be text, got 3"),
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
