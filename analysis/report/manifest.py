"""What the reference results are made of: every record with the command that made it, and the files that went in."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from jagg_core.backbones.pixel import weights_path
from jagg_core.backbones.registry import TRAINED
from jagg_core.records import Record
from jagg_core.strict_json import RecordError, read_json

NAME = "manifest.json"


def manifest(root: Path, checkout: Path) -> list[dict[str, Any]]:
    """An entry per record below ``root``, by path: command, commit, and SHA-256 of the record and of its inputs.

    Inputs are the shipped weights of the backbone, and a calibration that plans were taken from. One that lies outside
    the checkout stands by its name alone, in the command too: where it lies says nothing elsewhere. Hashes of inputs
    are those of today: a test that finds others than the stored ones says that a record should be made anew.

    Raises:
        RecordError: no record, or an input that is not there.
    """
    entries = []
    for path in sorted(root.rglob("*.json")):
        if path.name != "record.json" and (path.parent / "record.json").exists():
            continue  # what the run of that record made
        data = read_json(path)
        if not isinstance(data, dict) or "cells" not in data:
            continue
        record = Record.read(path)
        inputs = [weights_path(record.backbone)] if record.backbone in TRAINED else []
        calibration = record.settings.get("calibration")
        command = record.command
        if calibration:
            inputs.append(checkout / calibration)
            named = _named(inputs[-1], checkout)
            if not inputs[-1].is_file():
                raise RecordError(f"{path}: its calibration {named} is not there: {inputs[-1]}")
            command = [word.replace(calibration, named) for word in command]
        entries.append(
            {
                "file": path.relative_to(root).as_posix(),
                "sha256": digest(path),
                "kind": record.kind,
                "command": shlex.join(command),
                "commit": record.environment.get("commit"),
                "dirty": record.environment.get("dirty"),
                "inputs": {_named(file, checkout): digest(file) for file in inputs},
            }
        )
    if not entries:
        raise RecordError(f"{root} holds no records")
    return entries


def rerun(root: Path, checkout: Path) -> None:
    """Run the command of every record below ``root`` again, in the order of their dependence: calibrations first.

    Raises:
        subprocess.CalledProcessError: a command failed; records before it are new, those after it as they were.
    """
    entries = sorted(manifest(root, checkout), key=lambda entry: (entry["kind"] != "calibrate", entry["file"]))
    for entry in entries:
        record = root / entry["file"]
        command = Record.read(record).command
        print(shlex.join(command), flush=True)
        aside = record.replace(record.with_name(f".{record.name}"))  # a run may take a record for its own beginning
        try:
            subprocess.run([sys.executable, *command[1:]], check=True, cwd=checkout)
        finally:
            if record.exists():
                aside.unlink()
            else:
                aside.replace(record)


def _named(file: Path, checkout: Path) -> str:
    """An input by its path in the checkout; by its name where it lies elsewhere."""
    inside, file = checkout.resolve(), file.resolve()
    return file.relative_to(inside).as_posix() if file.is_relative_to(inside) else file.name


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
