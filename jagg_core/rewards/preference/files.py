"""The files of a published network, local or from the hub, read without running any code."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from jagg_core.hub import find_files, read_object

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
TOKENIZER = "tokenizer.json"
VOCABULARY = ("vocab.json", "merges.txt")
PROCESSOR_FILES = (CONFIG, PREPROCESSOR, TOKENIZER, *VOCABULARY, "tokenizer_config.json", "special_tokens_map.json")
"""Files of tokenizer, preprocessing and configuration."""


@dataclass(frozen=True)
class Source:
    """A folder of files.

    Attributes:
        folder: path of the folder.
        name: the hub id, or the name of the folder.
        commit: commit of the hub; empty for a local folder.
    """

    folder: Path
    name: str
    commit: str = ""

    @property
    def title(self) -> str:
        """Returns ``name@commit``, or the name alone."""
        return f"{self.name}@{self.commit}" if self.commit else self.name

    def require(self, setting: str, *names: str) -> Path:
        """Returns the first of ``names`` that exists.

        Raises:
            ValueError: none exists; names them, and the remedy.
        """
        for name in names:
            if (self.folder / name).is_file():
                return self.folder / name
        present = sorted(p.name for p in self.folder.iterdir())
        remedy = "connect once to fetch it" if self.commit else f"put it there, or give {setting}=FOLDER or a hub id"
        raise ValueError(f"{setting}: {self.folder} has no {' or '.join(names)}, got {present[:12]}; {remedy}")


def find_source(setting: str, name: str, patterns: Sequence[str], revision: str | None = None) -> Source:
    """Finds the local folder ``name``, or else fetches the hub's files, by `jagg_core.hub.find_files`.

    Raises:
        ValueError: as that function.
    """
    folder, commit = find_files(setting, name, patterns, revision)
    return Source(folder, name if commit else folder.name, commit)


def weight_files(source: Source, *names: str) -> list[Path]:
    """Returns the first of ``names`` that exists; for an index, the shards that it names.

    Raises:
        ValueError: none exists, or a shard is missing.
    """
    file = source.require("path", *names)
    if not file.name.endswith(".index.json"):
        return [file]
    shards = read_object(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{file} has no weight_map: fetch it again")
    return [source.require("path", shard) for shard in sorted(set(shards.values()))]


def read_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Reads the tensors in safetensors files, or in checkpoints of ``torch.save`` that hold only tensors.

    A checkpoint may hold them under ``state_dict``, and their names may start with ``module.``.

    Raises:
        ValueError: a file is damaged, or holds something else. Nothing is unpickled that could run code.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        read: Any = None
        try:
            if file.suffix == ".safetensors":
                read = load_file(file)
            else:
                read = torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"path: {file} is damaged or holds more than tensors, which is never unpickled: fetch it again, or "
                f"give a safetensors file of the same tensors ({type(error).__name__}: {first})"
            ) from error
        state = read.get("state_dict", read) if isinstance(read, dict) else read
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"path: {file} must hold tensors by name, alone or under state_dict, got {_kind(state)}")
        tensors |= {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
    return tensors


def _kind(state: object) -> str:
    if not isinstance(state, dict):
        return type(state).__name__
    return ", ".join(f"{name}: {type(value).__name__}" for name, value in list(state.items())[:4])
