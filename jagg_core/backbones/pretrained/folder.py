"""A model folder in diffusers' layout, local or from the hub, checked before any weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from jagg_core.backbones.repairs import dtype_argument
from jagg_core.hub import find_files, fingerprint, read_object

PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files to fetch from the hub: no pickled weights, no code."""

LOCAL: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
"""Arguments with which every part is read from the folder alone, without pickle."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with ``transformer/``, ``vae/``, ``scheduler/`` and text encoders, as ``save_pretrained`` writes it."""

    path: Path

    def config(self, part: str) -> dict[str, Any]:
        """Reads the configuration of a part (transformer, vae, scheduler).

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        file = self.path / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
        if not file.is_file():
            names = sorted(p.name for p in self.path.iterdir())
            raise ValueError(
                f"path: {self.path} has no {file.relative_to(self.path)}; it must be a folder in diffusers' layout "
                f"(model_index.json, transformer/, vae/, ...), got {names[:12]}"
            )
        return read_object(file)

    def require_class(self, part: str, expected: str) -> None:
        """Checks that a part's configuration is of the class ``expected``.

        Raises:
            ValueError: it is of another class.
        """
        name = self.config(part).get("_class_name")
        if name != expected:
            raise ValueError(f"path: {self.path / part} must hold a {expected}, got {name}: another model's folder?")

    def index(self) -> dict[str, Any]:
        """Reads the pipeline's ``model_index.json``.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        return read_object(self.path / "model_index.json")

    def require_pipeline(self, expected: str) -> None:
        """Checks that the folder is of the pipeline ``expected``, and that every part it names is there.

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
        """Checks that all networks have weights and all shards, each file as long as its header says.

        Raises:
            ValueError: names the first file that is missing or damaged.
        """
        for index in sorted(self.path.glob("*/*.safetensors.index.json")):
            shards = read_object(index).get("weight_map")
            if not isinstance(shards, dict):
                raise ValueError(f"path: {index} has no weight_map: {_AGAIN}")
            for shard in sorted(set(shards.values())):
                if not (index.parent / shard).is_file():
                    raise ValueError(f"path: {index.parent / shard} is missing, which {index.name} names: {_AGAIN}")
        for file in sorted(self.path.glob("*/*.safetensors")):
            expected, size = _safetensors_size(file), file.stat().st_size
            if expected != size:
                header = f"{expected:,} bytes by its header" if expected >= 0 else "no header"
                raise ValueError(f"path: {file} is damaged: {header}, got {size:,} bytes: {_AGAIN}")
        for part in sorted(self.path.iterdir()):
            if part.name.startswith(("transformer", "vae", "text_encoder")) and not list(part.glob("*.safetensors")):
                raise ValueError(
                    f"path: {part} has no safetensors weights, got {sorted(p.name for p in part.iterdir())}"
                )

    def load(self, part: str, class_name: str, dtype: torch.dtype) -> Any:
        """Loads a network by its diffusers class, on the CPU.

        Raises:
            ValueError: names a parameter that the files lack.
        """
        import diffusers

        load = getattr(diffusers, class_name).from_pretrained
        network = load(self.path, subfolder=part, **dtype_argument(dtype), **LOCAL)
        missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
        if missing:
            raise ValueError(f"path: {self.path / part} lacks {len(missing)} tensors, such as {missing[0]}: {_AGAIN}")
        return network

    @cached_property
    def text_fingerprint(self) -> str:
        """Identifies text encoders and tokenizers by sizes and both ends of their files."""
        return self._fingerprint("text_encoder", "tokenizer", "processor")

    @cached_property
    def vae_fingerprint(self) -> str:
        """Identifies the VAE by sizes and both ends of its files."""
        return self._fingerprint("vae")

    def _fingerprint(self, *names: str) -> str:
        parts = [part for part in sorted(self.path.iterdir()) if part.name.startswith(names)]
        files = [file for part in parts for file in sorted(part.rglob("*")) if file.is_file()]
        return fingerprint(files, self.path, digest_size=12)


_AGAIN = "fetch it again"


def _safetensors_size(file: Path) -> int:
    """Computes the size of a safetensors file in bytes from its header; -1 if that cannot be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:  # the limit of the format
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
    """Finds the folder ``path``, or else fetches the hub's ``path`` or ``hub_id`` at ``revision``.

    A local folder needs no hub. From the hub come safetensors, configurations and tokenizers only.

    Raises:
        ValueError: no such folder or repository, no access to a gated one, or no connection; says what to do.
    """
    wanted = hub_id if path is None else path
    return ModelFolder(find_files("path", wanted, PATTERNS, revision, "a folder in diffusers' layout")[0])
