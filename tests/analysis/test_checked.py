"""Damaged records: a report says in one line which file and which field, and never ends in a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import analysis.__main__
from analysis.report.checked import Fields, read_record
from analysis.report.write import write_report
from jagg_core.records import Cell, Record
from jagg_core.strict_json import RecordError

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RECORDS = sorted(REFERENCE.rglob("*.json"))
Damage = Callable[[dict[str, Any]], Any]


def stored(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((REFERENCE / name / "record.json").read_text())
    return data


def cell(data: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [c for c in data["cells"] if c["name"] == name]
    assert isinstance(found, dict)
    return found


STUDY, CURVES, CALIBRATION = "photos-flux", "digits-flux-curves", "photos-flux-calibration"
JAGG, EXACT = "eta=0.7/jagg-w4-f0.6", "eta=0.7/signal/per prompt/exact"

CASES: list[tuple[str, Damage, str]] = [
    (STUDY, lambda d: d["settings"].pop("windows"), "settings lacks the field 'windows'; it has 'backbone'"),
    (STUDY, lambda d: d["settings"].update(etas=0.7), "settings.etas must be a list of numbers, got 0.7"),
    (STUDY, lambda d: d.update(settings=[1]), "settings must be an object, got [1]"),
    (STUDY, lambda d: d.update(schedule="dance"), "schedule must be a list of numbers, got 'dance'"),
    (STUDY, lambda d: d.update(cells=[3]), "not a record of schema 1"),
    (STUDY, lambda d: cell(d, JAGG)["settings"].pop("label"), "cell 'eta=0.7/jagg-w4-f0.6', settings lacks the field"),
    (
        STUDY,
        lambda d: cell(d, JAGG)["settings"].update(passes="14"),
        "settings.passes must be an integer or a list of them, got '14'",
    ),
    (STUDY, lambda d: cell(d, JAGG)["samples"].pop("cosine"), "samples lacks the field 'cosine'"),
    (
        STUDY,
        lambda d: cell(d, JAGG)["samples"].update(cosine=["x"]),
        "samples.cosine of cell 'eta=0.7/jagg-w4-f0.6' must be a list of numbers and nulls",
    ),
    (STUDY, lambda d: cell(d, JAGG).update(samples=[]), "samples of cell 'eta=0.7/jagg-w4-f0.6' must be an object"),
    (STUDY, lambda d: cell(d, "eta=0.7/knots")["values"].pop("causal"), "values lacks the field 'causal'"),
    (STUDY, lambda d: cell(d, "eta=0.7/cross")["values"].update(cosine=1), "damaged, no report can be made of it"),
    (CALIBRATION, lambda d: cell(d, "eta=0.7/signal")["values"].clear(), "values lacks the field 'samples_per_batch'"),
    (CALIBRATION, lambda d: cell(d, EXACT)["samples"]["own"].pop(), "damaged, no report can be made of it"),
    (CALIBRATION, lambda d: cell(d, EXACT)["settings"].update(family="no"), "settings.family must be one of ["),
    (CURVES, lambda d: d["settings"].pop("longer"), "settings lacks the field 'longer'"),
    (CURVES, lambda d: d["cells"][0]["samples"].pop("reward"), "samples lacks the field 'reward'"),
    (CURVES, lambda d: d["cells"][0]["settings"].update(arm="other"), "damaged, no report can be made of it"),
]


@pytest.mark.parametrize(("name", "damage", "said"), CASES, ids=[said[:50] for _, _, said in CASES])
def test_a_damaged_field_is_one_line(
    name: str, damage: Damage, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = stored(name)
    damage(data)
    (tmp_path / "record.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit) as stopped:
        analysis.__main__.main(["report", str(tmp_path)])
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m analysis: error: {tmp_path / 'record.json'}: ")
    assert said in line
    assert len(line) < 1000


def test_a_damaged_record_of_times_is_named(tmp_path: Path) -> None:
    data = stored(STUDY)
    data["cells"] = []
    (tmp_path / "record.json").write_text(json.dumps(data))
    times = json.loads((REFERENCE / STUDY / "speed-photos-flux.json").read_text())
    times["settings"]["window"] = "five"
    (tmp_path / "speed-photos-flux.json").write_text(json.dumps(times))
    with pytest.raises(RecordError, match=r"speed-photos-flux\.json: settings\.window must be an integer, got 'five'"):
        write_report(tmp_path)


def test_every_stored_record_passes_and_is_unchanged() -> None:
    count = 0
    for path in RECORDS:
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "cells" in data:
            assert read_record(path) == Record.read(path)
            count += 1
    assert count >= 10


def test_fields_know_their_place() -> None:
    fields = Fields({"a": {"b": 1}}, "file: settings")
    assert fields["a"]["b"] == 1
    assert fields.get("c") is None
    with pytest.raises(RecordError, match=r"^file: settings\.a lacks the field 'c'; it has 'b'$"):
        fields["a"]["c"]


def test_passes_are_those_of_a_plan_or_of_all_plans_of_a_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for passes in (8, [8, 5]):
        Record("bench", [], "b", {}, {}, cells=[Cell("update/b", settings={"passes": passes})]).write(path)
        assert read_record(path).cells[0].settings["passes"] == passes
    Record("bench", [], "b", {}, {}, cells=[Cell("update/b", settings={"passes": [8, "5"]})]).write(path)
    with pytest.raises(RecordError, match="passes must be an integer or a list of them, got"):
        read_record(path)
