"""Checkpoints: tensors in safetensors shards by torch.distributed.checkpoint, all else in JSON. Nothing is unpickled.

A checkpoint is a folder that appears whole or not at all. It is read on any number of ranks, whatever wrote it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from jagg_core.distributed import RankFailed, on_first_rank, rank, ranks
from jagg_core.files import PARTIAL
from jagg_core.strict_json import RecordError, read_json, write_json

STATE = "state.json"
"""Written last; names every other file of a checkpoint and its size."""


class DamagedCheckpoint(UserWarning):
    """A checkpoint is not whole; an older one is used."""


def save(folder: Path, update: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int) -> Path:
    """Writes the checkpoint of ``update`` into ``folder``, and removes all but the newest ``keep``.

    Called on every rank; ``tensors`` may be sharded and of any memory layout, ``state`` is the first rank's.

    Raises:
        OSError: it cannot be written, as on a full disk; nothing of it stays.
        RankFailed: in its place on several ranks.
    """
    import torch.distributed.checkpoint as dcp  # here and below, as it takes a second

    final, partial = folder / _name(update), folder / f"{PARTIAL}{_name(update)}"
    device = next(iter(tensors.values())).device
    try:
        on_first_rank(lambda: _make_empty(partial), device)
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        dense = {name: t if t.is_contiguous() else t.contiguous() for name, t in tensors.items()}
        with _quiet(), _failures_as(OSError):
            dcp.save(dense, storage_writer=writer, no_dist=not dist.is_initialized())
        on_first_rank(lambda: _finish(partial, final, {**state, "update": update}), device)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    on_first_rank(lambda: _keep_newest(folder, keep), device)
    return final


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _finish(partial: Path, final: Path, state: dict[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    write_json(partial / STATE, {**state, "files": files})
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _keep_newest(folder: Path, keep: int) -> None:
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("update-*") if path.is_dir())


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; None without any."""
    return next((path for path in reversed(checkpoints(folder)) if why_damaged(path) is None), None)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; warns of every damaged one that is newer. None without any.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    found = checkpoints(folder)
    reasons = []
    for path in reversed(found):
        reason = why_damaged(path)
        if reason is None:
            return path
        reasons.append(reason)
        warnings.warn(f"{reason}; the checkpoint before it is used", DamagedCheckpoint, stacklevel=2)
    if reasons:
        raise ValueError(f"resume: every checkpoint in {folder} is damaged: {'; '.join(reasons)}")
    return None


def why_damaged(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        files = read_state(path)["files"]
        sizes = {name: (path / name).stat().st_size for name in files}
    except (OSError, RecordError, KeyError, TypeError) as error:
        return f"{path.name}: {error}"
    wrong = [name for name, size in sizes.items() if size != files[name]]
    return f"{path.name}: {wrong[0]} has {sizes[wrong[0]]} bytes instead of {files[wrong[0]]}" if wrong else None


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    found: dict[str, Any] = read_json(path / STATE)
    return found


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read into ``tensors``, in place, on every rank.

    Raises:
        ValueError: the checkpoint lacks one of them, has it in another shape, or cannot be read.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)  # of tensors alone
    for name, tensor in tensors.items():
        if name not in stored or stored[name].size != tensor.shape:
            found = f"shape {list(stored[name].size)}" if name in stored else "none"
            raise ValueError(f"{path.name}: {name} of shape {list(tensor.shape)} is needed, got {found}")
    with _quiet(), _failures_as(ValueError):
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def _name(update: int) -> str:
    return f"update-{update:08d}"


@contextmanager
def _failures_as(kind: type[Exception]) -> Iterator[None]:
    """Raises torch's error, which holds a traceback for every rank, as one line of that kind."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = {number: cause for number, (cause, _) in error.failures.items()}
        for cause in causes.values():
            if not isinstance(cause, Exception):  # Ctrl-C
                raise cause from error
        if ranks() == 1:
            raise kind(str(causes[0])) from error
        raise RankFailed("; ".join(f"rank {number}: {cause}" for number, cause in causes.items())) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
