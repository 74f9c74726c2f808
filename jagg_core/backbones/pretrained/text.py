"""Encoded prompts: computed once by the model's encoders, kept on disk, batched by sample."""

from __future__ import annotations

import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from jagg_core.files import write_atomically
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
        """Pads to the longest text and stacks."""
        lengths = [len(text.tokens) for text in texts]
        longest = max(lengths)
        tokens = torch.stack([_padded(text.tokens, longest) for text in texts])
        mask = None
        if min(lengths) < longest:
            mask = torch.stack([torch.arange(longest, device=tokens.device) < length for length in lengths])
        pooled = [text.pooled for text in texts if text.pooled is not None]
        return TextBatch(tokens, mask, torch.stack(pooled) if pooled else None)

    def __getitem__(self, rows: Tensor) -> TextBatch:
        """Selects the prompts of ``rows`` [N], at the same length."""
        mask, pooled = (None if part is None else part[rows] for part in (self.mask, self.pooled))
        return TextBatch(self.tokens[rows], mask, pooled)

    def to(self, device: torch.device) -> TextBatch:
        """Moves to a device."""
        mask, pooled = (None if part is None else part.to(device) for part in (self.mask, self.pooled))
        return TextBatch(self.tokens.to(device), mask, pooled)

    def lengths(self) -> list[int]:
        """Counts the tokens of every sample. Waits for the device if some are padded."""
        if self.mask is None:
            return [self.tokens.shape[1]] * len(self.tokens)
        lengths: list[int] = self.mask.sum(dim=1).tolist()
        return lengths


def _padded(tokens: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, 0, 0, length - len(tokens)))


class PromptCut(UserWarning):
    """Prompts have more tokens than their text encoder takes; the rest of them is not read."""


def warn_of_cut(prompts: Sequence[str], tokenizer: Any, limit: int, encoder: str) -> bool:
    """Warns in one line if prompts have more tokens than ``limit``: how many, and which is the first.

    ``encoder`` names the text encoder in the warning. Returns whether any prompt is cut.
    """
    counts = [len(ids) for ids in tokenizer(list(prompts), truncation=False, verbose=False)["input_ids"]]
    cut = [prompt for prompt, count in zip(prompts, counts, strict=True) if count > limit]
    if cut:
        warnings.warn(
            f"{len(cut)} of {len(prompts)} prompts have more than the {limit} tokens that {encoder} reads, and are cut "
            f"there; the longest has {max(counts)}, the first is {cut[0][:60]!r}",
            PromptCut,
            stacklevel=2,
        )
    return bool(cut)


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes one prompt at a time, and has its limit of tokens.

    Attributes:
        encode: encodes a prompt.
        tokenizer: tokenizer of the encoder that reads most tokens.
        limit: number of tokens that it reads.
    """

    encode: Callable[[str], Text]
    tokenizer: Any
    limit: int

    def __call__(self, prompt: str) -> Text:
        """Encodes a prompt."""
        return self.encode(prompt)


def cache_folder() -> Path | None:
    """Returns the folder for encoded prompts: ``$JAGG_CACHE``, or ``jagg`` in the user's cache folder.

    None for a user without a home folder, as in a container that runs under a number alone.

    Raises:
        ValueError: ``$JAGG_CACHE`` is below the home folder of a user who does not exist.
    """
    if folder := os.environ.get("JAGG_CACHE"):
        try:
            return Path(folder).expanduser()
        except RuntimeError as error:
            raise ValueError(f"JAGG_CACHE must be a folder, got {folder!r}: {error}") from error
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jagg"
    except RuntimeError:
        return None


class TextStore:
    """Encoded prompts, on the CPU: from memory, from disk, or from the encoders, which load only when needed.

    ``key`` names everything that the encoding depends on besides the prompt. ``encoder`` loads the text encoders and
    gives the function that encodes a prompt; they are dropped after each use, because a trainer has no room for them.
    So the whole ``pool`` is encoded with the first prompt. Prompts are encoded one by one, so that no prompt changes
    another. A text that cannot be written to disk stays in memory.
    """

    def __init__(
        self, key: Sequence[str], encoder: Callable[[], Callable[[str], Text]], pool: Sequence[str], folder: Path | None
    ) -> None:
        self._key = tuple(key)
        self._encoder = encoder
        self._pool = tuple(pool)
        self._folder = None if folder is None else folder / "text"
        self._recent: OrderedDict[str, Text] = OrderedDict()
        self._unwritten: dict[str, Text] = {}

    def __call__(self, prompts: Sequence[str]) -> list[Text]:
        """Returns the encoded ``prompts``, in order."""
        wanted = dict.fromkeys(prompts)
        texts = {prompt: text for prompt in wanted if (text := self._find(prompt)) is not None}
        if len(texts) < len(wanted):
            texts |= self._encode([p for p in wanted if p not in texts], texts)
        for prompt in wanted:
            self._keep(prompt, texts[prompt])
        return [texts[prompt] for prompt in prompts]

    def _encode(self, missing: list[str], known: Mapping[str, Text]) -> dict[str, Text]:
        others = [p for p in dict.fromkeys(self._pool) if p not in missing and p not in known and not self._stored(p)]
        made: dict[str, Text] = {}
        with torch.no_grad():
            encode = self._encoder()
            if isinstance(encode, PromptEncoder):
                warn_of_cut([*missing, *others], encode.tokenizer, encode.limit, "the text encoder")
            for prompt in tqdm([*missing, *others], desc="encode prompts", disable=len(missing) + len(others) < 2):
                text = encode(prompt)
                text = Text(text.tokens.cpu(), None if text.pooled is None else text.pooled.cpu())
                self._write(prompt, text)
                if prompt in missing:
                    made[prompt] = text
        return made

    def _keep(self, prompt: str, text: Text) -> None:
        self._recent[prompt] = text
        self._recent.move_to_end(prompt)
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)

    def _file(self, prompt: str) -> Path | None:
        if self._folder is None:
            return None
        digest = blake2b(json.dumps([*self._key, prompt]).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}.safetensors"

    def _stored(self, prompt: str) -> bool:
        file = self._file(prompt)
        return prompt in self._unwritten or (file is not None and file.exists())

    def _find(self, prompt: str) -> Text | None:
        for kept in (self._recent, self._unwritten):
            if prompt in kept:
                return kept[prompt]
        file = self._file(prompt)
        if file is None:
            return None
        try:
            tensors = load_file(file)
            return Text(tensors["tokens"], tensors.get("pooled"))
        except (OSError, SafetensorError, KeyError):  # not there, or not whole: encoded again
            return None

    def _write(self, prompt: str, text: Text) -> None:
        tensors = {"tokens": text.tokens} | ({} if text.pooled is None else {"pooled": text.pooled})
        file = self._file(prompt)
        try:
            if file is None:
                raise OSError("this user has no home folder; set JAGG_CACHE to a folder")
            write_atomically(file, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        except OSError as error:
            where = "on disk" if self._folder is None else f"in {self._folder}"
            warnings.warn(f"encoded prompts cannot be kept {where}: {error}", stacklevel=2)
            self._unwritten[prompt] = text


KEPT = 256
"""Encoded prompts that stay in memory: a few megabytes each."""


@dataclass(frozen=True)
class TextShape:
    """Shape of one encoded prompt; ``pooled`` None for models without."""

    tokens: int
    width: int
    pooled: int | None = None


class RandomTexts:
    """Random stand-ins for encoded prompts, the same for the same prompt; for timing."""

    def __init__(self, shape: TextShape, dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype

    def __call__(self, prompts: Sequence[str]) -> list[Text]:
        """Returns the stand-ins, in order."""
        return [self._draw(prompt) for prompt in prompts]

    def _draw(self, prompt: str) -> Text:
        generator = generator_for(0, "text", prompt)
        tokens = torch.randn(self._shape.tokens, self._shape.width, generator=generator)
        pooled = torch.randn(self._shape.pooled or 0, generator=generator)
        placed, other = (part.to(self._dtype) for part in (tokens, pooled))
        return Text(placed, None if self._shape.pooled is None else other)
