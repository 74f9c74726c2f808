"""The shipped backbone whose prompts are made of words, so that unseen combinations of known words can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jagg_core.backbones.datasets import EMOJI, EMOJI_HELD_OUT
from jagg_core.backbones.pixel.flux import FluxSpec, PixelFlux


@dataclass(frozen=True)
class WordFluxSpec(FluxSpec):
    """A small ``FluxTransformer2DModel``: each word of a prompt is one text token, their sum the pooled projection.

    Words have no position, so their order does not matter. Shorter prompts are filled with the empty prompt's token.
    """

    text_tokens: int = 7

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Lists the words of the prompts, sorted; each has a row in the table of embeddings."""
        return tuple(sorted({word for prompt in self.prompts for word in prompt.split()}))

    def prompt_ids(self, prompts: Sequence[str]) -> Tensor:
        """Looks up the words of prompts in the table: rows ``[N, text_tokens]``.

        Raises:
            ValueError: a prompt without words, with more than ``text_tokens``, or with a word of no prompt in training.
        """
        rows = torch.full((len(prompts), self.text_tokens), len(self.words))
        for row, prompt in zip(rows, prompts, strict=True):
            words = prompt.split() if isinstance(prompt, str) else []
            if not 1 <= len(words) <= self.text_tokens:
                raise ValueError(f"prompts must have 1 to {self.text_tokens} words for {self.name}, got {prompt!r}")
            unknown = [word for word in words if word not in self.words]
            if unknown:
                raise ValueError(f"prompts must be made of {list(self.words)} for {self.name}, got {unknown}")
            row[: len(words)] = torch.tensor([self.words.index(word) for word in words])
        return rows

    def build(self) -> WordFlux:
        """Builds the module with random weights."""
        return WordFlux(self)


class WordFlux(PixelFlux):
    """diffusers' ``FluxTransformer2DModel`` on patches of pixels, with one text token per word."""

    def __init__(self, spec: WordFluxSpec) -> None:
        super().__init__(spec)
        self.register_buffer("text_ids", torch.zeros(spec.text_tokens, 3), persistent=False)

    def call(self, latents: Tensor, sigma: Tensor, prompts: Tensor) -> Tensor:
        """Computes velocities ``[N, tokens, channels]``; ``prompts`` are ``[N, text_tokens, width]``."""
        return self.predict(latents, sigma, prompts, prompts.sum(1))


EMOJI_FLUX = WordFluxSpec(
    name="emoji-flux",
    dataset="emoji",
    prompts=tuple(name for name in EMOJI if name not in EMOJI_HELD_OUT),
    image_channels=3,
    size=32,
    patch=4,
    mean=0.770,
    std=0.314,
    heads=4,
)
