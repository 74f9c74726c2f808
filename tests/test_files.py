"""Files that are written whole or not at all, with the permissions of any new file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jagg_core import files
from jagg_core.files import PARTIAL, only_run_in, remove_partial, require_writable, write_atomically, write_tensors


@pytest.mark.parametrize("call", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    write_atomically(path, b"old")

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, fail)
        with pytest.raises(type(error)):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_any_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "deep" / "r.json", b"x")
        write_tensors(tmp_path / "w.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    for path in (tmp_path / "deep" / "r.json", tmp_path / "w.safetensors"):
        assert path.stat().st_mode & 0o777 == mode


def test_tensors_of_any_layout_are_written_even_where_they_share_memory(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    tensors = {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base[0, :, 0].t(),
        "expanded": torch.ones(1).expand(3),
        "tied": base,
        "part": base[1],
        "again": base[1],
    }
    write_tensors(tmp_path / "w.safetensors", tensors, {"told": "x"})
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for text in (
        "write_atomically(path, bytes(100_000))",
        "write_tensors(path, {'a': torch.ones(100_000)})",
    ):
        code = (
            "import resource, sys, pathlib, torch\nfrom jagg_core.files import write_atomically, write_tensors\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\npath = pathlib.Path(sys.argv[1])\n"
            f"try:\n    {text}\nexcept OSError as error:\n    print(error)"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "w")]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert str(tmp_path / "w") in found and "File too large" in found and found.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / f"{PARTIAL}update-00000001").mkdir()
    (tmp_path / f"{PARTIAL}update-00000001" / "a").write_text("x")
    (tmp_path / f"{PARTIAL}1a2b-weights.safetensors").write_text("x")
    (tmp_path / "kept").write_text("x")
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


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
        "import sys, pathlib\nfrom jagg_core.files import only_run_in\n"
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
