"""What an update draws."""

from __future__ import annotations

from collections import Counter

import pytest

from jagg_core.grpo.sampling import prompts_of, random_steps, samples_of, window_of
from jagg_core.grpo.settings import RolloutSettings


def test_the_pool_of_prompts_is_used_up_before_it_is_shuffled_anew() -> None:
    drawn = [prompt for update in range(5) for prompt in prompts_of("abcd", 3, seed=1, update=update)]
    turns = [drawn[start : start + 4] for start in range(0, 12, 4)]
    assert all(sorted(turn) == list("abcd") for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1
    assert prompts_of("abcd", 3, seed=2, update=0) != drawn[:3] or prompts_of("abcd", 3, seed=3, update=0) != drawn[:3]


def test_ranks_share_the_samples_in_order() -> None:
    every = samples_of(["x", "y", "z"], 4, 0, 1)
    parts = [samples_of(["x", "y", "z"], 4, rank, 3) for rank in range(3)]
    assert sum((part.ids for part in parts), ()) == every.ids == tuple(range(12))
    assert sum((part.prompts for part in parts), ()) == every.prompts
    assert Counter(every.groups) == {0: 4, 1: 4, 2: 4}
    assert [len(part) for part in every.split(5)] == [5, 5, 2]


def test_a_window_moves_on_or_is_drawn() -> None:
    moving = RolloutSettings(trained="window", window_size=4, window_range=(0, 9), window_interval=2)
    starts = [window_of(moving, 0, update).start for update in range(8)]  # type: ignore[union-attr]
    assert starts == [0, 0, 4, 4, 8, 8, 0, 0]
    drawn = RolloutSettings(trained="window", window_size=2, window_range=(1, 4))
    found = {window_of(drawn, 0, update) for update in range(40)}
    assert found == {range(1, 3), range(2, 4), range(3, 5)}
    assert window_of(RolloutSettings(), 0, 0) is None


def test_every_sample_has_its_own_random_steps_and_they_increase() -> None:
    settings = RolloutSettings(steps=11, trained="random", fraction=0.6)
    steps = random_steps(settings, 0, range(5))
    assert steps is not None
    assert steps.shape == (5, 6)
    assert (steps.diff(dim=1) > 0).all()
    assert len({tuple(row) for row in steps.tolist()}) > 1
    assert steps.max() <= 9  # the last step is never trained
    again = random_steps(settings, 0, [3])
    assert again is not None
    assert again[0].tolist() == steps[3].tolist()


@pytest.mark.parametrize(("fraction", "steps", "count"), [(0.58, 51, 29), (0.6, 16, 9), (0.01, 11, 1), (1.0, 11, 10)])
def test_the_fraction_of_steps_is_not_lost_to_rounding(fraction: float, steps: int, count: int) -> None:
    settings = RolloutSettings(steps=steps, trained="random", fraction=fraction)
    assert settings.trained_steps == count
