"""What every notebook starts with: the checkout, how to show a figure, and which stored results were read."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.report.figures import in_256_colours, style
from analysis.report.manifest import digest
from jagg_core.records import Record

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

RESULTS = ROOT / "results"

SMOKE = bool(os.environ.get("JAGG_SMOKE"))
"""The tests run all cells with the smallest settings."""

_opened: set[Path] = set()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Keep the names of files as they are opened, whoever reads them."""
    if event == "open" and isinstance(arguments[0], str):
        _opened.add(Path(os.path.abspath(arguments[0])))


sys.addaudithook(_note)


def sources() -> pd.DataFrame:
    """Folders of ``results`` from which files were read since this module was imported: how many, and their digest.

    A notebook ends with it: a test holds what is stored there against the files of today.
    """
    read: dict[str, list[Path]] = {}
    for path in sorted(p for p in _opened if p.is_relative_to(RESULTS) and p.is_file()):
        folder = Path(*path.relative_to(ROOT).parts[:-1][:3])
        read.setdefault(folder.as_posix(), []).append(path)
    rows = []
    for name, files in read.items():
        told = "".join(f"{path.relative_to(ROOT).as_posix()} {digest(path)}\n" for path in files)
        rows.append([name, len(files), hashlib.sha256(told.encode()).hexdigest()[:16]])
    return pd.DataFrame(rows, columns=["read from", "files", "digest"]).set_index("read from")


def read_run(name: str) -> tuple[Record, dict[str, pd.DataFrame]]:
    """Record and tables of a run in ``results/reference``; tables without rows are empty.

    Raises:
        RecordError: the record is damaged.
    """
    run = RESULTS / "reference" / name
    # conclusions are sentences made from the others
    paths = sorted(path for path in (run / "tables").glob("*.csv") if path.stem != "conclusions")
    frames = {p.stem: pd.read_csv(p) if p.read_text().strip() else pd.DataFrame() for p in paths}
    return Record.read(run / "record.json"), frames


class Picture:
    """A PNG that Jupyter shows."""

    def __init__(self, png: bytes) -> None:
        self.png = png

    def __repr__(self) -> str:
        return "picture"

    def _repr_png_(self) -> bytes:
        return self.png


def show(figure: Figure, dpi: int = 100) -> Picture:
    """The figure in 256 colours, so that the notebook stays small."""
    drawn = io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=dpi)
    return Picture(in_256_colours(drawn))
