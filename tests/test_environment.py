"""Where a run happens: commit, versions, clocks; and the command without this machine's paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jagg_core import environment as environment_module
from jagg_core.devices import clock_mhz
from jagg_core.environment import command_line, environment, git_state
from jagg_core.strict_json import read_json, write_json


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    unknown = {"commit": None, "dirty": None}
    assert git_state(checkout) == unknown
    assert git_state(tmp_path / "missing") == unknown
    git(checkout, "init", "-q")
    assert git_state(checkout) == unknown  # nothing committed yet
    (checkout / "file").write_text("1")
    (checkout / "results").mkdir()
    (checkout / "results" / "record.json").write_text("{}")
    git(checkout, "add", "file", "results")
    git(checkout, "commit", "-q", "-m", "first")
    clean = git_state(checkout)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (checkout / "untracked").write_text("1")
    assert git_state(checkout) == clean
    (checkout / "results" / "record.json").unlink()  # as a run that is made anew does
    assert git_state(checkout) == clean
    (checkout / "file").write_text("2")
    assert git_state(checkout) == clean | {"dirty": True}
    # a package installed inside somebody else's repository has no commit of its own
    installed = checkout / "site-packages"
    installed.mkdir()
    assert git_state(installed) == unknown


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {"commit": None, "dirty": None}


def test_environment_is_strict_json(tmp_path: Path) -> None:
    found = environment()
    assert found["threads"] == torch.get_num_threads()
    assert found["packages"]["torch"] == torch.__version__
    assert {"python", "platform", "processor", "cores", "devices", "commit", "dirty"} <= found.keys()
    assert found["cpu_mhz"] is None or found["cpu_mhz"] > 0
    assert found["load_average"] is None or found["load_average"] >= 0
    assert len(found["devices"]) == len(found["device_bytes"]) == len(found["device_mhz"])
    write_json(tmp_path / "e.json", found)
    assert read_json(tmp_path / "e.json") == found


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"model name": ["some processor"], "cpu MHz": ["2000.0", "3000.0"]}
    monkeypatch.setattr(environment_module, "_cpuinfo", lambda name: lines[name])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some device")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**30))
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: 1980)
    found = environment()
    assert (found["processor"], found["cpu_mhz"]) == ("some processor", 2500.0)
    assert (found["devices"], found["device_bytes"], found["device_mhz"]) == (["some device"], [2**30], [1980.0])


def test_clocks_that_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(index: int) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", no_library)
    monkeypatch.setattr(environment_module, "_cpuinfo", lambda name: [])
    assert clock_mhz(torch.device("cuda", 0)) is None
    found = environment()
    assert found["cpu_mhz"] is None and found["processor"]


def test_command_line_has_no_path_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path("/", "somewhere", "analysis", "__main__.py")), "report", "results/a"])
    assert command_line() == ["python", "-m", "analysis", "report", "results/a"]
