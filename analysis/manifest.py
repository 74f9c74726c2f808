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
from jagg_core.records import Record, read_json

NAME = "manifest.json"


def manifest(root: Path, checkout: Path) -> list[dict[str, Any]]:
    """An entry per record below ``root``, by path: command, commit, and SHA-256 of the record and of its inputs.

    Inputs are the shipped weights of the backbone, and a calibration that plans were taken from. Hashes of inputs are
    those of today: a test that finds others than the stored ones says that a record should be made anew.
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
        if calibration:
            inputs.append(checkout / calibration)
        entries.append(
            {
                "file": path.relative_to(root).as_posix(),
                "sha256": digest(path),
                "kind": record.kind,
                "command": shlex.join(record.command),
                "commit": record.environment.get("commit"),
                "dirty": record.environment.get("dirty"),
                "inputs": {file.relative_to(checkout).as_posix(): digest(file) for file in inputs},
            }
        )
    return entries


def rerun(root: Path, checkout: Path) -> None:
    """Run the command of every record below ``root`` again, in the order of their dependence: calibrations first.

    Raises:
        subprocess.CalledProcessError: a command failed; records before it are new, those after it as they were.
    """
    entries = sorted(manifest(root, checkout), key=lambda entry: (entry["kind"] != "calibrate", entry["file"]))
    for entry in entries:
        print(entry["command"], flush=True)
        record = root / entry["file"]
        aside = record.replace(record.with_name(f".{record.name}"))  # a run may take a record for its own beginning
        try:
            subprocess.run([sys.executable, *shlex.split(entry["command"])[1:]], check=True, cwd=checkout)
        finally:
            if record.exists():
                aside.unlink()
            else:
                aside.replace(record)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
