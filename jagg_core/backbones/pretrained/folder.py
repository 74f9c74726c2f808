"""A model folder in diffusers' layout, local or from the hub: found, looked through, and read before any weight is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jagg_core.hub import find_files, fingerprint, read_object

PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is fetched from the hub: no pickled weights, no code."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with ``transformer/``, ``vae/``, ``scheduler/`` and text encoders, as ``save_pretrained`` writes it."""

    path: Path

    def config(self, part: str) -> dict[str, Any]:
        """The configuration of a part (transformer, vae, scheduler).

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        file = self.path / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
        if not file.is_file():
            found = sorted(p.name for p in self.path.iterdir())
            raise ValueError(
                f"path: {self.path} has no {file.relative_to(self.path)}; it must be a folder in diffusers' layout "
                f"(model_index.json beside transformer/, vae/, ...), got {found[:12]}"
            )
        return read_object(file)

    def require_class(self, part: str, expected: str) -> None:
        """Check that a part's configuration is of the class ``expected``.

        Raises:
            ValueError: it is of another: another model's folder.
        """
        found = self.config(part).get("_class_name")
        if found != expected:
            raise ValueError(f"path: {self.path / part} must hold a {expected}, got {found}: another model's folder?")

    def index(self) -> dict[str, Any]:
        """The pipeline's ``model_index.json``.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        return read_object(self.path / "model_index.json")

    def require_pipeline(self, expected: str) -> None:
        """Check that the folder is of the pipeline ``expected``, and that every part it names is there.

        Raises:
            ValueError: another pipeline (editing, filling, control), or a part is missing.
        """
        index = self.index()
        if index.get("_class_name") != expected:
            raise ValueError(
                f"path: {self.path} must hold a {expected}, got {index.get('_class_name')}: another model's folder?"
            )
        for part, kind in index.items():
            if isinstance(kind, list) and any(kind) and not (self.path / part).is_dir():
                raise ValueError(f"path: {self.path} has no {part}/, which its model_index.json names: {_AGAIN}")

    def check_weights(self) -> None:
        """Check that networks have weights, that every safetensors file is as long as its header says, and all shards.

        Raises:
            ValueError: names the first file that is not.
        """
        for index in sorted(self.path.glob("*/*.safetensors.index.json")):
            shards = read_object(index).get("weight_map")
            if not isinstance(shards, dict):
                raise ValueError(f"path: {index} has no weight_map: {_AGAIN}")
            for shard in sorted(set(shards.values())):
                if not (index.parent / shard).is_file():
                    raise ValueError(f"path: {index.parent / shard} is missing, which {index.name} names: {_AGAIN}")
        for file in sorted(self.path.glob("*/*.safetensors")):
            expected, found = _safetensors_size(file), file.stat().st_size
            if expected != found:
                said = f"{expected:,} bytes by its header" if expected >= 0 else "no header"
                raise ValueError(f"path: {file} is damaged: {said}, got {found:,} bytes: {_AGAIN}")
        for part in sorted(self.path.iterdir()):
            if part.name.startswith(("transformer", "vae", "text_encoder")) and not list(part.glob("*.safetensors")):
                raise ValueError(
                    f"path: {part} has no safetensors weights, got {sorted(p.name for p in part.iterdir())}"
                )

    @cached_property
    def text_fingerprint(self) -> str:
        """What tells text encoders and tokenizers of one folder from another's: sizes and both ends of their files."""
        return self._fingerprint("text_encoder", "tokenizer", "processor")

    @cached_property
    def vae_fingerprint(self) -> str:
        """What tells the VAE of one folder from another's, likewise."""
        return self._fingerprint("vae")

    def _fingerprint(self, *names: str) -> str:
        parts = [part for part in sorted(self.path.iterdir()) if part.name.startswith(names)]
        files = [file for part in parts for file in sorted(part.rglob("*")) if file.is_file()]
        return fingerprint(files, self.path, digest_size=12)


_AGAIN = "fetch it again"


def require_whole(network: Any, folder: ModelFolder, part: str) -> Any:
    """``network``, once every parameter of it was in the files of ``part``.

    Raises:
        ValueError: names parameters that were not.
    """
    missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"path: {folder.path / part} lacks {len(missing)} tensors, such as {missing[0]}: {_AGAIN}")
    return network


def _safetensors_size(file: Path) -> int:
    """How long a safetensors file is by its own header; -1 if that cannot be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:  # the format's own limit
            return -1
        try:
            header = json.loads(stream.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError):
            return -1
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (AttributeError, KeyError, TypeError):
        return -1
    return 8 + length + int(max(ends, default=0))


def find_folder(hub_id: str, path: str | None = None, revision: str | None = None) -> ModelFolder:
    """The folder ``path`` if it is one; else the hub's ``path`` or ``hub_id`` at ``revision``, fetched or in the cache.

    A local folder needs no hub. From the hub come safetensors, configurations and tokenizers only.

    Raises:
        ValueError: no such folder or repository, no access to a gated one, or no connection; says what to do.
    """
    found, _ = find_files("path", hub_id if path is None else path, PATTERNS, revision, "a folder in diffusers' layout")
    return ModelFolder(found)
