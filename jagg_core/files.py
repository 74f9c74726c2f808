"""Writes files whole or not at all, and holds a folder for one run."""

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


def temporary_file(path: Path) -> Path:
    """Makes an empty file next to ``path``, with the permissions of any new file: 0644 under the usual umask."""
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
        temporary = temporary_file(path)
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
    """Writes a file whole or not at all, as `written_atomically` does."""
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
        values = tensor.detach().contiguous()
        shared = values.untyped_storage().data_ptr() in seen
        separate[name] = values.clone() if shared else values
        seen.add(values.untyped_storage().data_ptr())
    with written_atomically(path) as temporary:
        try:
            save_file(separate, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def remove_partial(folder: Path) -> None:
    """Removes what a killed run left half written in ``folder``. The caller holds the folder by `only_run_in`."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def require_writable(path: Path) -> None:
    """Makes the folder for a file and tries a write in it, before the work that leads to the file.

    Raises:
        ValueError: the path is a folder, lies below a file, or nothing can be written there.
    """
    _require_folder(path.parent)
    if os.path.isdir(path):  # unlike Path.is_dir, which raises for a name that is too long
        raise ValueError(f"out must be a file, got the folder {path}")
    try:
        temporary_file(path).unlink()
    except OSError as error:
        raise ValueError(f"out: {path} cannot be written: {error.strerror}") from error


def _require_folder(folder: Path) -> None:
    """Makes the folder if need be. Raises ValueError where it cannot, with the name of a file in the way."""
    for above in (folder, *folder.parents):
        if os.path.lexists(above) and not os.path.isdir(above):
            kind = "file" if os.path.exists(above) else "broken link"
            raise ValueError(f"out must be {'' if above == folder else 'below '}a folder, got the {kind} {above}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: the folder {folder} cannot be made: {error.strerror}") from error


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Holds a folder for one run, so that no second run writes into it at the same time.

    The folder is made if need be, and half-written files of a killed run are removed. The system releases the lock
    when the process ends, however it ends; the empty file ``.lock`` stays. File systems without locks are not guarded.

    Raises:
        ValueError: another run holds the folder, the path is a file or lies below one, or nothing can be written there.
    """
    path = folder / ".lock"
    require_writable(path)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out: another run is at work in {folder}: wait for its end or stop it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        else:
            remove_partial(folder)
        os.set_inheritable(file.fileno(), True)  # a child with close_fds=False holds it too, also after its parent
        yield
