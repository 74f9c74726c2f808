"""Where collected gradients live until their inner products are taken: whole, or under a seeded random projection.

A space encodes a gradient, given parameter by parameter and as far as this rank holds it, into one row. Rows are linear
in the gradient; inner products of rows are those of the gradients (`ExactSpace`) or unbiased estimates
(`ProjectedSpace`), per block of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from analysis.measure.study import DIMENSION
from analysis.statistics.parameter_kinds import ordered_blocks
from jagg_core.seeding import generator_for
from jagg_core.sharding import Sharding

CHUNK = 2**11
"""Gradient elements per matrix product of a Gram matrix."""


SIGN_TABLE = 16
"""Length of the projection's table of random signs, in dimensions."""


class Space(Protocol):
    """Rows for gradients of parameters that `Sharding` lays out, in blocks named by ``labels``."""

    @property
    def dimension(self) -> int | None:
        """Counts numbers per block that a gradient is projected to; None if it is kept whole."""
        ...

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Returns the shape of one row on this rank."""
        ...

    def encode(self, gradients: Sequence[Tensor | None], rows: Tensor) -> None:
        """Writes gradients to ``rows`` [..., *row_shape].

        They come as one local tensor ``[..., size]`` for each parameter, None for zero.
        """
        ...

    def finish(self, rows: Tensor) -> Tensor:
        """Makes rows ready for inner products, after the last one was encoded. In place; a collective under FSDP2."""
        ...

    def grams(self, rows: Tensor) -> dict[str, np.ndarray]:
        """Computes inner products of finished rows, ``[n, n]`` in fp64 for each block; the same on all ranks."""
        ...


class ExactSpace:
    """Every element is kept, sorted by block; under FSDP2 every rank keeps its part."""

    dimension: int | None = None

    def __init__(self, sharding: Sharding, labels: Sequence[str]) -> None:
        self.sharding = sharding
        self.columns: dict[str, slice] = {}
        position = 0
        starts: dict[int, int] = {}
        for block in ordered_blocks(labels):
            first = position
            for n, piece in enumerate(sharding.pieces):
                if labels[n] == block:
                    starts[n] = position
                    position += piece.size if piece.counted else 0
            self.columns[block] = slice(first, position)
        self.starts: list[int] = [starts[n] for n in range(len(labels))]
        self.size = position

    @property
    def row_shape(self) -> tuple[int, ...]:
        """See `Space`."""
        return (self.size,)

    def encode(self, gradients: Sequence[Tensor | None], rows: Tensor) -> None:
        """See `Space`."""
        for gradient, start, piece in zip(gradients, self.starts, self.sharding.pieces, strict=True):
            if piece.counted:
                part = rows[..., start : start + piece.size]
                if gradient is None:
                    part.zero_()
                else:
                    part.copy_(gradient)

    def finish(self, rows: Tensor) -> Tensor:
        """See `Space`."""
        return rows

    def grams(self, rows: Tensor) -> dict[str, np.ndarray]:
        """See `Space`."""
        by_block = {}
        for block, columns in self.columns.items():
            gram = _gram(rows[:, columns], self.sharding)
            by_block[block] = self.sharding.sum(gram).cpu().numpy()
        return by_block


class ProjectedSpace:
    """A random projection to ``dimension`` numbers per block, at the price of reading the gradient once.

    The flat gradient is cut into stretches of ``dimension`` elements; stretch b is multiplied by random signs (a
    random part of one table), turned by a random offset and added to the row. That is a count sketch (Charikar, Chen
    and Farach-Colton, 2002) whose buckets need no table: ``E <row(x), row(y)> = <x, y>`` with standard error at most
    ``|x| |y| sqrt((1 + rho^2) / dimension)``, rho being their cosine; the error of rho itself is about
    ``(1 - rho^2) / sqrt(dimension)``, so that what is nearly parallel is known best. Signs and offsets depend on the
    seed and on an element's place in the whole gradient, never on ranks.

    Raises:
        ValueError: ``dimension`` below 1.
    """

    def __init__(self, sharding: Sharding, labels: Sequence[str], dimension: int = DIMENSION, seed: int = 0) -> None:
        if dimension < 1:
            raise ValueError(f"dimension must be at least 1, got {dimension}")
        self.sharding = sharding
        self.dimension = dimension
        self.blocks = ordered_blocks(labels)
        self.place = [self.blocks.index(label) for label in labels]
        self.offsets = np.cumsum([0, *sharding.sizes]).tolist()
        stretches = max(1, math.ceil(self.offsets[-1] / dimension))
        self.signs = _signs(SIGN_TABLE * dimension, seed, "elements")
        # with the same signs for all, stretches that look alike would collide sign by sign: twice the variance
        starts = (SIGN_TABLE - 1) * dimension + 1
        phases = torch.randint(starts, (stretches,), generator=generator_for(seed, "projection", "phases"))
        self.phases: list[int] = phases.tolist()
        self.flips = _signs(stretches, seed, "stretches").tolist()
        turns = torch.randint(dimension, (stretches,), generator=generator_for(seed, "projection", "turns"))
        self.turns: list[int] = turns.tolist()

    @property
    def row_shape(self) -> tuple[int, ...]:
        """See `Space`."""
        return (len(self.blocks), self.dimension)

    def encode(self, gradients: Sequence[Tensor | None], rows: Tensor) -> None:
        """See `Space`."""
        rows.zero_()
        if self.signs.device != rows.device or self.signs.dtype != rows.dtype:
            self.signs = self.signs.to(rows)
        for n, (gradient, piece) in enumerate(zip(gradients, self.sharding.pieces, strict=True)):
            if gradient is not None and piece.counted:
                self._add(gradient, self.offsets[n] + piece.start, rows[..., self.place[n], :])

    def _add(self, gradient: Tensor, start: int, total: Tensor) -> None:
        """Adds elements that begin at ``start`` of the whole gradient."""
        dimension, stop = self.dimension, start + gradient.shape[-1]
        at = start
        while at < stop:
            stretch, position = divmod(at, dimension)
            target = (position + self.turns[stretch]) % dimension
            # up to the end of the stretch, or to where its turn wraps around
            count = min(stop - at, dimension - position, dimension - target)
            sign = self.phases[stretch] + position
            signed = gradient[..., at - start : at - start + count] * self.signs[sign : sign + count]
            total[..., target : target + count].add_(signed, alpha=self.flips[stretch])
            at += count

    def finish(self, rows: Tensor) -> Tensor:
        """See `Space`."""
        return self.sharding.sum(rows)

    def grams(self, rows: Tensor) -> dict[str, np.ndarray]:
        """See `Space`."""
        return {block: gram_matrix(rows[:, n]) for n, block in enumerate(self.blocks)}


def inner_product_error(dimension: int) -> float:
    """Computes the bound that 95 % of projected inner products keep, as a share of the product of the two norms."""
    return 1.96 * math.sqrt(2 / dimension)


def gram_matrix(rows: Tensor) -> np.ndarray:
    """Computes inner products of ``rows`` [n, P], accumulated over chunks in fp64: ``[n, n]``.

    Raises:
        FloatingPointError: a row is not finite.
    """
    return _gram(rows, Sharding([])).cpu().numpy()


def _gram(rows: Tensor, sharding: Sharding) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    peak = torch.zeros(len(rows), dtype=dtype, device=rows.device)
    if rows.shape[1]:
        peak = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1).to(dtype)
    bad = ~torch.isfinite(peak)
    if sharding.any(bool(bad.any()), rows.device):
        where = f"gradient {int(bad.nonzero()[0])} of {len(rows)}" if bad.any() else "a gradient on another rank"
        raise FloatingPointError(f"{where} is not finite")
    peak = torch.where(peak > 0, peak, 1.0)[:, None]
    # rows of at most 1 where needed: squares of fp32 gradients would overflow above 1e19 and vanish below 1e-23
    scaled = bool(((peak > 1e9) | (peak < 1e-9)).any()) or rows.dtype != dtype
    if not scaled:
        peak = torch.ones_like(peak)
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    block = 128
    for start in range(0, rows.shape[1], CHUNK):
        part = rows[:, start : start + CHUNK]
        if scaled:
            part = part / peak
        for top in range(0, len(rows), block):
            # the lower triangle follows by symmetry
            total[top : top + block, top:] += (part[top : top + block] @ part[top:].T).double()
    upper = torch.triu(total * peak.double() * peak.double().T)
    return upper + torch.triu(upper, 1).T


def _signs(count: int, seed: int, purpose: str) -> Tensor:
    drawn = torch.randint(2, (count,), generator=generator_for(seed, "projection", purpose))
    return (2 * drawn - 1).to(torch.float32)
