"""Arrays that are expensive to make, kept on disk by what they were made from: an interrupted run resumes there."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jagg_core.files import write_atomically
from jagg_core.strict_json import plain

Arrays = dict[str, np.ndarray]


class Store:
    """A folder of ``.npz`` files; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def path(self, name: str, key: dict[str, Any]) -> Path | None:
        """Returns where arrays with this name and key are kept. Any difference in ``key`` is another file."""
        if self.folder is None:
            return None
        text = json.dumps(plain(key), sort_keys=True)
        return self.folder / f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.npz"

    def get(self, name: str, key: dict[str, Any], make: Callable[[], Arrays]) -> Arrays:
        """Returns the kept arrays; without them, or from a damaged file, what ``make`` returns, which is then kept."""
        path = self.path(name, key)
        if path is None:
            return make()
        try:
            # from memory: numpy leaves a damaged archive open
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            pass
        made = make()
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **made)
        write_atomically(path, buffer.getvalue())
        return made
