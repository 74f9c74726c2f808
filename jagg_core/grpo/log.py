"""What a run tells while it goes: a CSV always, event files and Weights & Biases if asked for."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from jagg_core.files import write_atomically
from jagg_core.grpo.settings import RunSettings


class Log:
    """Rows of numbers by update.

    The CSV has a column for every figure of any row. On resume, rows after the checkpoint are dropped.
    """

    def __init__(self, folder: Path, settings: RunSettings, name: str, done: int) -> None:
        self.path = folder / f"{name}.csv"
        self._rows = [row for row in read_rows(self.path) if int(row["update"]) <= done]
        self._write()
        self._loggers: list[Any] = []
        if settings.tensorboard:
            self._loggers.append(_Events(folder / "events", done))
        if settings.wandb:
            self._loggers.append(_Wandb(settings.wandb, folder))

    def add(self, row: Mapping[str, float | int | str | None]) -> None:
        """Add a row; it has an ``update``."""
        self._rows.append({key: "" if value is None else str(value) for key, value in row.items()})
        if len(self._rows) == 1 or list(self._rows[0]) != list(row):
            self._write()
        else:
            with self.path.open("a", newline="") as file:
                _writer(file).writerow(self._rows[-1].values())
        for logger in self._loggers:
            logger.add({key: value for key, value in row.items() if isinstance(value, (int, float))})

    def _write(self) -> None:
        columns = list(dict.fromkeys(key for row in self._rows for key in row))
        text = io.StringIO(newline="")
        if columns:
            _writer(text).writerows([columns, *([row.get(key, "") for key in columns] for row in self._rows)])
        write_atomically(self.path, text.getvalue().encode())

    def close(self) -> None:
        """End what was begun."""
        for logger in self._loggers:
            logger.close()


def _writer(file: TextIO) -> Any:
    return csv.writer(file, lineterminator="\n")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a log; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
    return [row for row in rows if None not in row.values()]


class _Events:
    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=done + 1)

    def add(self, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            if key != "update":
                self.writer.add_scalar(key, value, int(row["update"]))
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

    def close(self) -> None:
        self.run.finish()
