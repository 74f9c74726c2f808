"""Prompts as a model reads them: encoded once by the model's own encoders, kept on disk, batched by sample."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from jagg_core.records import write_atomically
from jagg_core.seeding import generator_for


@dataclass(frozen=True)
class Text:
    """One prompt, encoded: ``tokens`` [length, width], and ``pooled`` [width] for models that use it."""

    tokens: Tensor
    pooled: Tensor | None = None


@dataclass(frozen=True)
class TextBatch:
    """Prompts of N samples, padded with zeros to one length.

    Attributes:
        tokens: [N, length, width].
        mask: [N, length], True at tokens; None if no sample is padded.
        pooled: [N, width] or None.
    """

    tokens: Tensor
    mask: Tensor | None = None
    pooled: Tensor | None = None

    @staticmethod
    def stack(texts: Sequence[Text]) -> TextBatch:
        """Pad and stack."""
        lengths = [len(text.tokens) for text in texts]
        longest = max(lengths)
        tokens = torch.stack([_padded(text.tokens, longest) for text in texts])
        mask = None
        if min(lengths) < longest:
            mask = torch.stack([torch.arange(longest, device=tokens.device) < length for length in lengths])
        pooled = [text.pooled for text in texts if text.pooled is not None]
        return TextBatch(tokens, mask, torch.stack(pooled) if pooled else None)

    def __getitem__(self, rows: Tensor) -> TextBatch:
        """The prompts of ``rows`` [N], at the same length."""
        mask, pooled = (None if part is None else part[rows] for part in (self.mask, self.pooled))
        return TextBatch(self.tokens[rows], mask, pooled)

    def lengths(self) -> list[int]:
        """Tokens of every sample. Waits for the device if some are padded."""
        if self.mask is None:
            return [self.tokens.shape[1]] * len(self.tokens)
        lengths: list[int] = self.mask.sum(dim=1).tolist()
        return lengths


def _padded(tokens: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, 0, 0, length - len(tokens)))


def cache_folder() -> Path:
    """Where encoded prompts are kept: ``$JAGG_CACHE``, or ``jagg`` in the user's cache folder."""
    if "JAGG_CACHE" in os.environ:
        return Path(os.environ["JAGG_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jagg"


class TextStore:
    """Encoded prompts, on ``device``: from memory, from disk, or from the encoders, which load only when needed.

    ``key`` names everything that the encoding depends on besides the prompt. ``encoder`` loads the text encoders and
    gives the function that encodes a prompt; they are dropped again after each use, for a trainer has no room for them.
    Prompts are encoded one by one, so that what a prompt becomes does not depend on its company.
    """

    def __init__(
        self, key: Sequence[str], encoder: Callable[[], Callable[[str], Text]], device: torch.device, folder: Path
    ) -> None:
        self._key = tuple(key)
        self._encoder = encoder
        self._device = device
        self._folder = folder / "text"
        self._known: dict[str, Text] = {}

    def __call__(self, prompts: Sequence[str]) -> list[Text]:
        """The encoded ``prompts``, in order."""
        missing = [p for p in dict.fromkeys(prompts) if p not in self._known and not self._read(p)]
        if missing:
            with torch.no_grad():
                encode = self._encoder()
                for prompt in missing:
                    text = encode(prompt)
                    self._write(prompt, text)
                    self._keep(prompt, text)
        return [self._known[prompt] for prompt in prompts]

    def _keep(self, prompt: str, text: Text) -> None:
        pooled = None if text.pooled is None else text.pooled.to(self._device)
        self._known[prompt] = Text(text.tokens.to(self._device), pooled)

    def _file(self, prompt: str) -> Path:
        digest = blake2b(json.dumps([*self._key, prompt]).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}.safetensors"

    def _read(self, prompt: str) -> bool:
        try:
            found = load_file(self._file(prompt))
        except (OSError, SafetensorError):  # not there, or cut short: encoded again
            return False
        self._keep(prompt, Text(found["tokens"], found.get("pooled")))
        return True

    def _write(self, prompt: str, text: Text) -> None:
        tensors = {"tokens": text.tokens} | ({} if text.pooled is None else {"pooled": text.pooled})
        write_atomically(self._file(prompt), save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))


@dataclass(frozen=True)
class TextShape:
    """Shape of one encoded prompt; ``pooled`` None for models without."""

    tokens: int
    width: int
    pooled: int | None = None


class RandomTexts:
    """Normal stand-ins for encoded prompts, the same for the same prompt: for timing, where values mean nothing."""

    def __init__(self, shape: TextShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype

    def __call__(self, prompts: Sequence[str]) -> list[Text]:
        """The stand-ins, in order."""
        return [self._draw(prompt) for prompt in prompts]

    def _draw(self, prompt: str) -> Text:
        generator = generator_for(0, "text", prompt)
        tokens = torch.randn(self._shape.tokens, self._shape.width, generator=generator)
        pooled = torch.randn(self._shape.pooled or 0, generator=generator)
        placed, other = (part.to(self._device, self._dtype) for part in (tokens, pooled))
        return Text(placed, None if self._shape.pooled is None else other)
