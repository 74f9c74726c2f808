"""The list of reference records, and making them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.report.manifest import digest, manifest, rerun
from jagg_core.backbones.pixel import weights_path
from jagg_core.records import Cell, Record
from jagg_core.strict_json import read_json, write_json

CHECKOUT = Path(__file__).parents[2]


def write(path: Path, kind: str, command: list[str], backbone: str = "digits-flux", **settings: object) -> None:
    environment = {"commit": "abc", "dirty": False}
    Record(kind, command, backbone, settings, {}, environment=environment, cells=[Cell("a")]).write(path)


def test_an_entry_has_command_and_inputs(tmp_path: Path) -> None:
    calibration = "results/reference/digits-flux-calibration/calibration-eta0.7.json"
    write(tmp_path / "run/record.json", "curves", ["python", "-m", "x", "--reward", "a+10*b"], calibration=calibration)
    write_json(tmp_path / "run/other.json", {"kind": "calibration"})
    weights = weights_path("digits-flux")
    assert manifest(tmp_path, CHECKOUT) == [
        {
            "file": "run/record.json",
            "sha256": digest(tmp_path / "run/record.json"),
            "kind": "curves",
            "command": "python -m x --reward 'a+10*b'",
            "commit": "abc",
            "dirty": False,
            "inputs": {
                weights.relative_to(CHECKOUT).as_posix(): digest(weights),
                calibration: digest(CHECKOUT / calibration),
            },
        }
    ]
    main(["manifest", str(tmp_path)])
    assert read_json(tmp_path / "manifest.json") == manifest(tmp_path, CHECKOUT)


@pytest.mark.parametrize("relative", [False, True])
def test_a_calibration_outside_the_checkout_stands_by_its_name(relative: bool, tmp_path: Path) -> None:
    checkout, calibration = tmp_path / "checkout", tmp_path / "elsewhere" / "calibration-eta0.7.json"
    write_json(calibration, {"kind": "calibration"})
    given = "../elsewhere/calibration-eta0.7.json" if relative else str(calibration)
    write(
        checkout / "results/record.json",
        "curves",
        ["python", "-m", "analysis", "curves", "--calibration", given, "--seed=1"],
        calibration=given,
        backbone="own:model",
    )
    [entry] = manifest(checkout / "results", checkout)
    assert entry["inputs"] == {"calibration-eta0.7.json": digest(calibration)}
    assert entry["command"] == "python -m analysis curves --calibration calibration-eta0.7.json --seed=1"
    assert "elsewhere" not in str(entry)


def test_one_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "record.json", "curves", ["python"], calibration=str(tmp_path / "gone.json"))
    with pytest.raises(SystemExit) as caught:
        main(["manifest", str(tmp_path)])
    assert caught.value.code == 2
    assert f"{tmp_path / 'record.json'}: its calibration gone.json is not there" in capsys.readouterr().err
    assert not (tmp_path / "manifest.json").exists()


def test_a_folder_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["manifest", str(tmp_path / "mistyped")])
    assert caught.value.code == 2
    assert "mistyped holds no records" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_made_anew_with_its_calibration_wherever_that_is(tmp_path: Path) -> None:
    calibration, path = tmp_path / "calibration.json", tmp_path / "runs" / "record.json"
    write_json(calibration, {"kind": "calibration"})
    code = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_bytes(pathlib.Path(sys.argv[1]).read_bytes())"
    write(path, "curves", ["python", "-c", code, str(calibration), str(path)], calibration=str(calibration))
    rerun(tmp_path / "runs", CHECKOUT)
    assert read_json(path) == {"kind": "calibration"}


def test_records_are_made_anew_by_their_own_commands_calibrations_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind in (("a", "curves"), ("b", "calibrate")):
        path = tmp_path / f"{name}.json"
        copy = tmp_path / f"{name}.copy"
        write(path, kind, ["python", "-c", f"import shutil; shutil.copy({str(copy)!r}, {str(path)!r})"])
        write(copy, kind, ["new"])
    rerun(tmp_path, CHECKOUT)
    assert [line.rsplit("/", 1)[-1][0] for line in capsys.readouterr().out.splitlines()] == ["b", "a"]
    assert Record.read(tmp_path / "a.json").command == Record.read(tmp_path / "b.json").command == ["new"]


def test_a_record_outlives_a_command_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    write(path, "curves", ["python", "-c", "raise SystemExit(3)"])
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        main(["manifest", str(tmp_path), "--rerun"])
    assert "a command failed, its record is as it was" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
