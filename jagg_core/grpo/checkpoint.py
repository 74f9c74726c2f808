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

from jagg_core.distributed import barrier, rank
from jagg_core.records import RecordError, read_json, write_json

STATE = "state.json"
"""Written last; names every other file of a checkpoint and its size."""


class DamagedCheckpoint(UserWarning):
    """A checkpoint is not whole; an older one is used."""


def save(folder: Path, update: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of ``update`` into ``folder``, and remove all but the newest ``keep``.

    Called on every rank; ``tensors`` may be sharded, ``state`` is the first rank's.
    """
    import torch.distributed.checkpoint as dcp  # here and below, as it takes a second

    final, partial = folder / _name(update), folder / f".partial-{_name(update)}"
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    with _quiet():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    barrier()
    if rank() == 0:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        write_json(partial / STATE, {**state, "update": update, "files": files})
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("update-*") if path.is_dir())


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
        ValueError: the checkpoint lacks one of them, or has it in another shape.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)  # of tensors alone
    for name, tensor in tensors.items():
        if name not in stored or stored[name].size != tensor.shape:
            found = f"shape {list(stored[name].size)}" if name in stored else "none"
            raise ValueError(f"{path.name}: {name} of shape {list(tensor.shape)} is needed, found {found}")
    with _quiet():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def _name(update: int) -> str:
    return f"update-{update:08d}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
