"""Kept arrays: found again by what they were made from, made anew where there are none or the file is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.measure.cache import Arrays, Store

KEY: dict[str, Any] = {"eta": 0.7, "recipe": {"steps": 6, "seed": 0}, "knots": (0, 2), "past": None}
OTHERS: list[dict[str, Any]] = [
    {"eta": 0.3},
    {"recipe": {"steps": 6, "seed": 1}},
    {"knots": (0, 3)},
    {"knots": (2, 0)},
    {"past": 0},
    {"more": 1},
]


class Maker:
    """Makes other arrays at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {"rows": np.full((2, 3), self.calls, dtype=np.float32), "names": np.array(["a", "bc"])}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep" / "collected")


def files(store: Store) -> list[Path]:
    assert store.folder is not None
    return sorted(store.folder.iterdir())


def test_what_was_kept_is_found_again(store: Store) -> None:
    make = Maker()
    first = store.get("table", KEY, make)
    again = Store(store.folder).get("table", KEY, make)
    assert make.calls == 1
    assert again.keys() == first.keys() == {"rows", "names"}
    for name, array in first.items():
        assert again[name].dtype == array.dtype
        assert np.array_equal(again[name], array)
    assert [path.name.startswith("table-") and path.suffix == ".npz" for path in files(store)] == [True]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_another_key_is_another_file(store: Store, change: dict[str, Any]) -> None:
    make = Maker()
    store.get("table", KEY, make)
    assert store.get("table", KEY | change, make)["rows"][0, 0] == 2
    assert store.get("table", KEY, make)["rows"][0, 0] == 1
    assert len(files(store)) == 2


def test_another_name_is_another_file(store: Store) -> None:
    make = Maker()
    store.get("table", KEY, make)
    store.get("bank", KEY, make)
    assert (make.calls, len(files(store))) == (2, 2)


def test_the_order_of_a_key_is_none_of_its_own(store: Store) -> None:
    turned = dict(reversed(KEY.items())) | {"recipe": {"seed": 0, "steps": 6}}
    assert list(turned) != list(KEY)
    assert store.path("table", turned) == store.path("table", KEY)


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "a flipped byte", "a pickle"])
def test_a_damaged_file_is_made_anew(store: Store, damage: str) -> None:
    make = Maker()
    store.get("table", KEY, make)
    [path] = files(store)
    whole = path.read_bytes()
    middle = whole.index(b"\x00\x00\x80\x3f")  # a 1 of the rows
    spoilt = {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "garbage": b"not a zip archive",
        "a flipped byte": whole[:middle] + b"\xff" + whole[middle + 1 :],
    }
    if damage == "a pickle":
        np.savez(path, rows=np.array([{}], dtype=object))
    else:
        path.write_bytes(spoilt[damage])
    assert store.get("table", KEY, make)["rows"][0, 0] == 2
    assert store.get("table", KEY, make)["rows"][0, 0] == 2
    assert make.calls == 2
    assert files(store) == [path]


def test_none_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make = Maker()
    store = Store(None)
    assert store.path("table", KEY) is None
    assert [store.get("table", KEY, make)["rows"][0, 0] for _ in range(2)] == [1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_making_that_fails_leaves_nothing(store: Store, error: type[BaseException]) -> None:
    def fail() -> Arrays:
        raise error

    make = Maker()
    store.get("other", KEY, make)
    before = files(store)
    with pytest.raises(error):
        store.get("table", KEY, fail)
    assert files(store) == before
    assert store.get("table", KEY, make)["rows"][0, 0] == 2


def test_a_write_that_fails_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="no space left"):
            store.get("table", KEY, Maker())
    assert files(store) == []
    assert store.get("table", KEY, Maker())["rows"][0, 0] == 1
