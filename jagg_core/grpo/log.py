"""What a run tells while it goes: a CSV always, event files and Weights & Biases if asked for."""

from __future__ import annotations

import csv
import io
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch import Tensor

from jagg_core.files import write_atomically
from jagg_core.grpo.settings import RunSettings
from jagg_core.images import png_bytes
from jagg_core.strict_json import write_json


class Logger(Protocol):
    """Takes figures by update: event files, or Weights & Biases."""

    def add(self, row: Mapping[str, float]) -> None:
        """Takes figures by name; one of them is ``update``."""

    def add_picture(self, name: str, path: Path, update: int) -> None:
        """Takes a picture that lies in a file."""

    def close(self) -> None:
        """Ends what was begun."""


def open_loggers(folder: Path, settings: RunSettings, done: int) -> list[Logger]:
    """Opens the loggers that a run asks for beside its CSV files; it goes on after the update ``done``."""
    loggers: list[Logger] = []
    if settings.tensorboard:
        loggers.append(_Events(folder / "events", done))
    if settings.wandb:
        loggers.append(_Wandb(settings.wandb, folder))
    return loggers


class Log:
    """Rows of figures by update, in a CSV and on loggers.

    The CSV has a column for every figure of any row. On resume, rows after the checkpoint are dropped. Loggers get the
    numbers, under ``prefix`` and the column's name.
    """

    def __init__(self, path: Path, done: int, loggers: Sequence[Logger] = (), prefix: str = "") -> None:
        self.path = path
        self._rows = [row for row in read_rows(self.path) if int(row["update"]) <= done]
        self._write()
        self._loggers, self._prefix = loggers, prefix

    def add(self, row: Mapping[str, float | int | str | None]) -> None:
        """Add a row; it has an ``update``."""
        self._rows.append({key: "" if value is None else str(value) for key, value in row.items()})
        if len(self._rows) == 1 or list(self._rows[0]) != list(row):
            self._write()
        else:
            with self.path.open("a", newline="") as file:
                _writer(file).writerow(self._rows[-1].values())
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        for logger in self._loggers:
            logger.add({key if key == "update" else self._prefix + key: value for key, value in numbers.items()})

    def _write(self) -> None:
        columns = list(dict.fromkeys(key for row in self._rows for key in row))
        text = io.StringIO(newline="")
        if columns:
            _writer(text).writerows([columns, *([row.get(key, "") for key in columns] for row in self._rows)])
        write_atomically(self.path, text.getvalue().encode())


class Pictures:
    """Pictures by update, in ``folder/update-NUMBER.png`` and on loggers.

    On resume, those after the checkpoint ``done`` are dropped.

    Attributes:
        folder: gets the pictures, and in ``prompts.json`` what their rows show.
    """

    def __init__(self, folder: Path, done: int, loggers: Sequence[Logger] = (), rows: Sequence[str] = ()) -> None:
        self.folder, self._loggers = folder, loggers
        write_json(folder / "prompts.json", list(rows))
        for update, path in pictures_in(folder).items():
            if update > done:
                path.unlink()

    def add(self, update: int, picture: Tensor) -> None:
        """Adds an RGB picture ``[3, height, width]`` in [0, 1]."""
        path = self.folder / f"update-{update:08d}.png"
        write_atomically(path, png_bytes(picture))
        for logger in self._loggers:
            logger.add_picture(self.folder.name, path, update)


def pictures_in(folder: Path) -> dict[int, Path]:
    """Lists the pictures in a folder by update, in order."""
    return {int(path.stem.removeprefix("update-")): path for path in sorted(folder.glob("update-*.png"))}


def _writer(file: TextIO) -> Any:
    return csv.writer(file, lineterminator="\n")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Reads the rows of a log, also of one that a spreadsheet stored: with another separator or decimal commas.

    A last line that a kill cut off is left out; no other row ever is.

    Raises:
        ValueError: not such a table; names the file and the line.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    utf16 = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a table in UTF-8, got {error}") from error
    whole, _, last = text.rpartition("\n")
    if "\0" in last:  # a file system that was cut off may keep the length of a file without its content
        text = whole + "\n"
    elif "\0" in text:
        raise ValueError(f"{path} must be a table, got a NUL in line {text[: text.index(chr(0))].count(chr(10)) + 1}")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    numbered = [(lines.line_num, fields) for fields in lines if any(fields)]
    if not numbered:
        return []
    columns = numbered[0][1]
    while not columns[-1]:
        columns.pop()
    if "update" not in columns or len(set(columns)) < len(columns):
        raise ValueError(f"{path} must begin with different names of columns, one of them update, got {columns}")
    if (last or "\n" in numbered[-1][1][-1]) and len(numbered[-1][1]) < len(columns):
        numbered.pop()
    return [_row(path, line, columns, fields, separator) for line, fields in numbered[1:]]


_COMMA = re.compile(r"([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)")


def _row(path: Path, line: int, columns: list[str], fields: list[str], separator: str) -> dict[str, str]:
    """A line as figures by name; numbers get the point that a spreadsheet took from them."""
    if len(fields) < len(columns) or any(fields[len(columns) :]):
        raise ValueError(f"{path}, line {line}: must have {len(columns)} fields, got {len(fields)}")
    values = [_COMMA.sub(r"\1.\2", text) if _COMMA.fullmatch(text) and separator != "," else text for text in fields]
    row = dict(zip(columns, values, strict=False))
    if not re.fullmatch(r"\d+(\.0*)?", row["update"]):
        raise ValueError(f"{path}, line {line}: update must be a whole number, got {row['update']!r}")
    return row | {"update": row["update"].partition(".")[0]}


class _Events:
    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=done + 1)

    def add(self, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            if key != "update":
                self.writer.add_scalar(key, value, int(row["update"]))
        self.writer.flush()

    def add_picture(self, name: str, path: Path, update: int) -> None:
        import numpy as np
        from PIL import Image

        self.writer.add_image(name, np.asarray(Image.open(path)), update, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, project: str, folder: Path) -> None:
        import wandb

        # the same folder is the same run when it resumes; folders of the same name elsewhere are others
        own = blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()
        self.run = wandb.init(project=project, dir=str(folder), name=folder.name, id=own, resume="allow")

    def add(self, row: Mapping[str, float]) -> None:
        self.run.log({k: v for k, v in row.items() if k != "update"}, step=int(row["update"]))

    def add_picture(self, name: str, path: Path, update: int) -> None:
        import wandb

        self.run.log({name: wandb.Image(str(path))}, step=update)

    def close(self) -> None:
        self.run.finish()
