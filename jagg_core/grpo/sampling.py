"""What an update draws: its prompts, its samples on this rank, and the steps that are trained. All from the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagg_core.grpo.settings import RolloutSettings
from jagg_core.seeding import generator_for


@dataclass(frozen=True)
class Samples:
    """Samples of an update, or some of them.

    Attributes:
        prompts: one per sample.
        groups: which of the update's prompts each sample belongs to.
        ids: the samples' places in the whole update, which name their random streams.
    """

    prompts: tuple[str, ...]
    groups: tuple[int, ...]
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, size: int) -> list[Samples]:
        """In parts of at most ``size``."""
        return [self[slice(start, start + size)] for start in range(0, len(self), size)]

    def __getitem__(self, cut: slice) -> Samples:
        return Samples(self.prompts[cut], self.groups[cut], self.ids[cut])


def prompts_of(pool: Sequence[str], count: int, seed: int, update: int) -> list[str]:
    """The prompts of an update: the pool is shuffled, used up, and shuffled anew."""
    chosen = []
    for place in range(update * count, (update + 1) * count):
        turn, position = divmod(place, len(pool))
        order = torch.randperm(len(pool), generator=generator_for(seed, "prompts", turn))
        chosen.append(pool[int(order[position])])
    return chosen


def samples_of(prompts: Sequence[str], count: int, rank: int, ranks: int) -> Samples:
    """This rank's share of ``count`` samples of every prompt: a contiguous part of them all."""
    every = [(prompt, group) for group, prompt in enumerate(prompts) for _ in range(count)]
    share = len(every) // ranks
    ids = range(rank * share, (rank + 1) * share)
    return Samples(tuple(every[i][0] for i in ids), tuple(every[i][1] for i in ids), tuple(ids))


def window_of(settings: RolloutSettings, seed: int, update: int) -> range | None:
    """The steps with noise of an update, where a window is trained."""
    if settings.trained != "window":
        return None
    low, high = settings.window_range
    if settings.window_interval:
        starts = range(low, high, settings.window_size)
        start = starts[update // settings.window_interval % len(starts)]
    else:
        start = low + int(torch.randint(high - low, (), generator=generator_for(seed, "window", update)))
    return range(start, start + settings.window_size)


def random_steps(settings: RolloutSettings, seed: int, ids: Sequence[int]) -> Tensor | None:
    """Steps of every sample, ``[B, S]``, where a random subset is trained."""
    if settings.trained != "random" or settings.trained_steps == settings.steps - 1:
        return None
    drawn = [torch.randperm(settings.steps - 1, generator=generator_for(seed, "trained", i)) for i in ids]
    return torch.stack([order[: settings.trained_steps].sort().values for order in drawn])
