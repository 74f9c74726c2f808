"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial-"
"""Begins the name of a file or folder while it is written; the next run removes what a killed one left of them."""


def temporary_beside(path: Path) -> Path:
    """Makes an empty file beside ``path``, with the permissions of any new file: 0644 under the usual umask."""
    temporary = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
    temporary.touch(exist_ok=False)
    return temporary


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Gives the body a temporary file, which takes the place of ``path`` if the body succeeds and is removed if not.

    Raises:
        OSError: it cannot be written, as on a full disk; names ``path``.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some writers put another file in its place
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: see `written_atomically`."""
    with written_atomically(path) as temporary:
        temporary.write_bytes(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file whole or not at all. Tensors may have any memory layout, and may share memory.

    Raises:
        OSError: it cannot be written, as on a full disk; names ``path``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        shared = own.untyped_storage().data_ptr() in seen
        separate[name] = own.clone() if shared else own
        seen.add(own.untyped_storage().data_ptr())
    with written_atomically(path) as temporary:
        try:
            save_file(separate, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def remove_partial(folder: Path) -> None:
    """Removes what a killed run left half written in ``folder``. The caller holds the folder: see `only_run_in`."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
