"""Random streams: named by what they are for, independent of each other and of torch's global state."""

from __future__ import annotations

import itertools

import pytest
import torch

from jagg_core.seeding import derive_seed, generator_for, initial_latents

PURPOSES = [
    *((seed, "latents", i) for seed in (0, 1, 12) for i in range(4)),
    *((seed, "sde", i) for seed in (0, 1, 12) for i in range(4)),
    (1, 23),
    (12, 3),
    (1, 2, 3),
    (123,),
]


def test_different_purposes_have_different_seeds() -> None:
    seeds = [derive_seed(*purpose) for purpose in PURPOSES]
    assert len(set(seeds)) == len(PURPOSES)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "latents", 0) == 8298849948460870582
    assert derive_seed(7, "sde", 3) == 8168223694474684530


def test_streams_are_independent() -> None:
    count = 4096
    draws = torch.stack(
        [torch.randn(count, generator=generator_for(*p), dtype=torch.float64) for p in PURPOSES]  # type: ignore[arg-type]
    )
    correlation = draws @ draws.T / count
    off_diagonal = correlation[~torch.eye(len(PURPOSES), dtype=torch.bool)]
    assert off_diagonal.abs().max() < 6 / count**0.5
    assert (correlation.diagonal() - 1).abs().max() < 0.2


def test_equal_ids_get_equal_noise() -> None:
    shared = initial_latents((2, 3), seed=5, sample_ids=[4, 4, 1])
    assert shared.shape == (3, 2, 3)
    assert shared.dtype == torch.float32
    assert torch.equal(shared[0], shared[1])
    assert not torch.equal(shared[0], shared[2])


def test_latents_do_not_depend_on_the_batch() -> None:
    whole = initial_latents((5,), seed=5, sample_ids=range(4))
    parts = [initial_latents((5,), seed=5, sample_ids=[i]) for i in range(4)]
    assert torch.equal(whole, torch.cat(parts))


def test_another_seed_gives_other_latents() -> None:
    draws = [initial_latents((5,), seed=seed, sample_ids=[0]) for seed in range(3)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))


@pytest.mark.parametrize("seed", [0, 1])
def test_global_state_is_left_alone(seed: int) -> None:
    before = torch.get_rng_state()
    initial_latents((5,), seed=seed, sample_ids=range(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_samples_have_no_latents() -> None:
    with pytest.raises(ValueError, match="sample_ids must have at least one, got none"):
        initial_latents((5,), seed=0, sample_ids=[])
