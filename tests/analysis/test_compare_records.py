"""Two results of any kind against each other, and all records as one table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.report.compare import compare, load_records, markdown, shown
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError
from tests.analysis.test_reference import REFERENCE, RUNS

BENCH = sorted((REFERENCE / "bench").glob("*.json"))
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("path", [*(REFERENCE / name for name in RUNS), *BENCH], ids=lambda path: path.stem)
def test_every_kind_of_record_is_the_same_as_itself(path: Path) -> None:
    frame, warnings = compare(path, path)
    assert warnings == [] and len(frame) > 5
    assert not set(frame["verdict"]) & {"HIGHER", "LOWER", "FASTER", "SLOWER"}


def folder(root: Path, name: str, value: float, half: float, seconds: float | None = None) -> Path:
    (root / name / "tables").mkdir(parents=True)
    samples = {} if seconds is None else {"total_s": [seconds, seconds * 1.01, seconds * 0.99]}
    cells = [Cell("exact", samples=samples, values={"passes": 20}), Cell("exact-again", samples=samples)]
    Record("group-speed", ["x"], "digits-flux", {"arm": "exact"}, seeds={}, cells=cells).write(
        root / name / "record.json"
    )
    row = {"arm": "causal", "cosine": value, "cosine_low": value - half, "cosine_high": value + half}
    pd.DataFrame([row]).to_csv(root / name / "tables" / "whole.csv", index=False)
    return root / name


@pytest.mark.parametrize(
    ("value", "half", "seconds", "verdicts"),
    [
        (0.90, 0.001, 1.0, {"cosine": "SAME", "total_s": "SAME"}),
        (0.95, 0.001, 2.0, {"cosine": "HIGHER", "total_s": "SLOWER"}),
        (0.85, 0.001, 0.5, {"cosine": "LOWER", "total_s": "FASTER"}),
        (0.95, 0.080, 1.0, {"cosine": "UNDECIDED", "total_s": "SAME"}),
    ],
)
def test_verdicts_follow_the_rule(
    value: float, half: float, seconds: float, verdicts: dict[str, str], tmp_path: Path
) -> None:
    frame, _ = compare(folder(tmp_path, "a", 0.9, 0.001, 1.0), folder(tmp_path, "b", value, half, seconds))
    assert dict(zip(frame["quantity"], frame["verdict"], strict=True)) == verdicts


def test_half_widths_add_in_quadrature(tmp_path: Path) -> None:
    frame, _ = compare(folder(tmp_path, "a", 0.5, 0.03), folder(tmp_path, "b", 0.6, 0.04))
    [row] = [row for _, row in frame.iterrows() if row["quantity"] == "cosine"]
    assert (row["change"], row["low"], row["high"]) == pytest.approx((0.1, 0.05, 0.15))


def test_the_command_fails_on_what_is_asked(tmp_path: Path, capsys: Capture) -> None:
    a, b = folder(tmp_path, "a", 0.9, 0.001), folder(tmp_path, "b", 0.8, 0.001)
    main(["compare", str(a), str(b)])
    assert "LOWER" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(a), str(b), "--fail-on", "LOWER", "--markdown"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("| verdict | of | quantity |")
    main(["compare", str(a), str(b), "--latex"])
    assert capsys.readouterr().out.startswith("\\begin{tabular}")


@pytest.mark.parametrize(
    ("second", "arguments", "message"),
    [
        ("photos-flux-curves", [], "records must be of one kind, got 'reproduce'"),
        ("nowhere", [], "nowhere"),
        ("photos-qwen", ["--margin", "0"], "margin must be positive, got 0.0"),
    ],
)
def test_what_cannot_be_compared_is_one_line(second: str, arguments: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(REFERENCE / "photos-flux"), str(REFERENCE / second), *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and message in printed[0]


def test_differences_of_settings_and_machine_are_warnings() -> None:
    _, warnings = compare(REFERENCE / "photos-flux", REFERENCE / "photos-qwen")
    assert "backbone differs: 'photos-flux' and 'photos-qwen'" in warnings


def test_all_records_are_one_table(tmp_path: Path) -> None:
    shutil.copy(BENCH[0], tmp_path / "one.json")
    cells = [Cell("broken", "failed", "no memory"), Cell("good", values={"a": {"b": 2}}, samples={"s": [1.0, None]})]
    Record("memory", ["x"], "digits-flux", {}, seeds={}, cells=cells).write(tmp_path / "deep" / "two.json")
    frame = load_records(tmp_path)
    assert set(frame["path"]) == {"one.json", "deep/two.json"}
    mine = frame[frame["path"] == "deep/two.json"]
    rows = mine[["cell", "status", "quantity", "sample", "value"]].astype(object).where(mine.notna(), None)
    assert rows.to_numpy().tolist() == [
        ["broken", "failed", None, None, None],
        ["good", "ok", "s", 0.0, 1.0],
        ["good", "ok", "s", 1.0, None],
        ["good", "ok", "a.b", None, 2.0],
    ]
    with pytest.raises(RecordError, match="holds no records"):
        load_records(tmp_path / "empty")


def test_bars_do_not_end_a_cell_of_a_markdown_table() -> None:
    frame = pd.DataFrame([["t", "a|b", "q", 1.0, 2.0, 1.0, None, None, "HIGHER"]])
    frame.columns = ["table", "of", "quantity", "first", "second", "change", "low", "high", "verdict"]
    assert "t: a\\|b" in markdown(shown(frame))
