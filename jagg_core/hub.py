"""Files of the Hugging Face hub, or of a local folder in their place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

_EDGE = 1 << 16


def find_files(
    setting: str, name: str, patterns: Sequence[str], revision: str | None = None, layout: str = "a folder"
) -> tuple[Path, str]:
    """Finds the local folder ``name``, or else fetches the files of the hub's ``name`` that match ``patterns``.

    Errors name the option ``setting`` and the ``layout`` of a folder. Returns the folder and the hub's commit, which is
    empty for a local folder.

    Raises:
        ValueError: no such folder or repository, no access to a gated one, or no connection; says what to do.
    """
    nowhere = f"{setting}: there is no folder {name}; allowed: {layout}, or a hub id"
    try:
        folder = Path(name).expanduser().resolve()
    except RuntimeError as error:  # the home of a user who does not exist
        raise ValueError(nowhere) from error
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for the local folder {name}, got {revision!r}")
        return folder, ""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local = f"or give a local folder: {setting}=FOLDER"
    if name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise ValueError(nowhere)
    try:
        fetched = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ValueError(
            f"{name} is gated: accept its licence at https://huggingface.co/{name}, then log in with `hf auth login`, "
            f"{local}"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"revision: {name} has no {revision!r} (a branch, tag or commit)") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"{setting}: no folder and no repository of the hub is called {name!r}; a private one needs a login"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{name} is not on this machine and the hub cannot be reached ({type(error).__name__}): "
            f"connect once, {local}"
        ) from error
    return fetched, fetched.name


def fingerprint(files: Sequence[Path], root: Path | None = None, digest_size: int = 8) -> str:
    """Computes a digest of files: names (below ``root``, where given), sizes and both ends of each."""
    digest = blake2b(digest_size=digest_size)
    for file in files:
        size = file.stat().st_size
        name = file.name if root is None else file.relative_to(root).as_posix()
        digest.update(f"{name} {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            digest.update(stream.read())
    return digest.hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """Reads the JSON object in ``file``.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"path: {file} cannot be read as JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"path: {file} must hold a JSON object, got {type(read).__name__}")
    return read
