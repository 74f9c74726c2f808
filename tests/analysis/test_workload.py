"""Rollout batches: named by purpose and number, and reproducible from the name alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from analysis.measure.rollouts import Batch, make_batch, rollout_seed
from analysis.measure.study import Recipe
from jagg_core import dance_schedule
from jagg_core.rewards import load_reward
from jagg_core.rewards.base import FunctionReward
from jagg_core.schedule import TimestepMode, network_sigma
from tests.backbones.stub import StubBackbone

RECIPE = Recipe(steps=5, prompts=2, samples=3)
INK = load_reward("ink")


def draw(purpose: str = "evaluation", number: int = 0, eta: float = 0.7, **changes: int) -> Batch:
    return make_batch(StubBackbone(), INK, replace(RECIPE, **changes), eta, purpose, number)


def test_a_batch() -> None:
    batch = draw()
    assert batch.trajectory.steps == 4
    assert batch.trajectory.batch == RECIPE.batch == 6
    assert torch.equal(batch.trajectory.sigmas, dance_schedule(5)[:-2])
    assert repr(batch.trajectory.transition) == "DanceSDE(eta=0.7)"
    first, second = batch.prompts[:3], batch.prompts[3:]
    assert len(set(first)) == len(set(second)) == 1
    assert first != second
    assert batch.rewards.shape == batch.advantages.shape == (6,)
    assert batch.seed == rollout_seed(RECIPE, 0.7, "evaluation", 0)


def test_advantages_are_centred_per_prompt() -> None:
    batch = draw()
    for own in (slice(0, 3), slice(3, 6)):
        assert batch.advantages[own].sum().item() == pytest.approx(0, abs=1e-5)
        assert batch.advantages[own].std().item() == pytest.approx(1, abs=1e-3)
        order = batch.rewards[own].argsort()
        assert torch.equal(batch.advantages[own].argsort(), order)


def test_rewards_are_those_of_the_images_and_prompts() -> None:
    seen: list[tuple[Tensor, list[str]]] = []

    def reward(images: Tensor, prompts: list[str]) -> Tensor:
        seen.append((images, list(prompts)))
        return torch.arange(6.0)

    backbone = StubBackbone()
    batch = make_batch(backbone, FunctionReward(reward, "count"), RECIPE, 0.7, "leak", 3)  # type: ignore[arg-type]
    [(images, prompts)] = seen
    assert torch.equal(images, backbone.decode(batch.trajectory.final))
    assert prompts == batch.prompts == backbone.asked[0][0]
    assert torch.equal(batch.rewards, torch.arange(6.0))


def test_guidance_reaches_the_policy() -> None:
    backbone = StubBackbone()
    make_batch(backbone, INK, replace(RECIPE, guidance=3.5), 0.7, "leak", 0)
    assert [guidance for _, guidance in backbone.asked] == [3.5]


@pytest.mark.parametrize("mode", ["float", "trunc_fp32"])
def test_the_network_is_network_sigma_as_asked(mode: TimestepMode) -> None:
    recipe = replace(RECIPE, timestep_mode=mode)
    backbone = StubBackbone()
    told: list[float] = []
    velocity = backbone.transformer.velocity
    backbone.transformer.velocity = lambda z, sigma, rows: (told.append(sigma[0].item()), velocity(z, sigma, rows))[1]  # type: ignore[method-assign]
    batch = make_batch(backbone, INK, recipe, 0.7, "leak", 0)
    assert batch.trajectory.timestep_mode == mode
    assert told == pytest.approx(network_sigma(dance_schedule(5)[:-1], mode).tolist(), abs=1e-7)


@pytest.mark.parametrize(("name", "made"), [("dance", "DanceSDE"), ("flow", "FlowSDE"), ("cps", "CPS")])
def test_steps_are_those_of_the_kernel(name: str, made: str) -> None:
    batch = make_batch(StubBackbone(), INK, replace(RECIPE, transition=name), 0.7, "leak", 0)
    assert repr(batch.trajectory.transition) == f"{made}(eta=0.7)"


def test_the_key_of_a_table_names_what_is_not_usual() -> None:
    """Tables that were stored before there was a choice are found."""
    usual = {"steps": 5, "shift": 3.0, "schedule": "dance", "prompts": 2, "samples": 3, "guidance": None, "seed": 0}
    assert RECIPE.key() == usual
    assert replace(RECIPE, timestep_mode="round").key() == usual | {"timestep_mode": "round"}
    assert replace(RECIPE, transition="cps").key() == usual | {"transition": "cps"}


# Seeds


def test_a_name_is_a_batch() -> None:
    state = torch.get_rng_state()
    a = draw()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    b = draw()
    assert (a.seed, a.prompts) == (b.seed, b.prompts)
    for name in ("latents", "next_latents", "noise", "log_probs", "final"):
        assert torch.equal(getattr(a.trajectory, name), getattr(b.trajectory, name))
    assert torch.equal(a.rewards, b.rewards)
    assert torch.equal(a.advantages, b.advantages)


@pytest.mark.parametrize(
    "other", [{"purpose": "calibration"}, {"number": 1}, {"eta": 0.3}, {"seed": 1}], ids=lambda other: next(iter(other))
)
def test_any_other_name_is_another_batch(other: dict[str, object]) -> None:
    a, b = draw(), draw(**other)  # type: ignore[arg-type]
    assert a.seed != b.seed
    assert not torch.equal(a.trajectory.latents[0], b.trajectory.latents[0])
    assert not torch.equal(a.trajectory.noise, b.trajectory.noise)


def test_seeds_of_purposes_and_numbers_never_meet() -> None:
    seeds = [
        rollout_seed(replace(RECIPE, seed=seed), eta, purpose, number)
        for seed in (0, 1)
        for eta in (0.7, 0.3)
        for purpose in ("calibration", "evaluation", "leak")
        for number in range(20)
    ]
    assert len(set(seeds)) == len(seeds)


def test_samples_do_not_share_noise() -> None:
    trajectory = draw().trajectory
    starts = trajectory.latents[0]
    assert len({tuple(z.flatten().tolist()) for z in starts}) == 6
    assert not torch.isclose(trajectory.noise[0], starts).all(1).any(), "the first draw must not be the latents"


def test_prompts_vary_from_batch_to_batch() -> None:
    assert len({tuple(draw(number=n).prompts) for n in range(8)}) > 3


# Refusals


def test_more_prompts_than_there_are() -> None:
    backbone = StubBackbone()
    with pytest.raises(ValueError, match="prompts must be at most 5 for stub, got 6"):
        make_batch(backbone, INK, replace(RECIPE, prompts=6), 0.7, "leak", 0)
    assert backbone.asked == []
    assert len(set(draw(prompts=5, samples=2).prompts)) == 5


@pytest.mark.parametrize(("name", "value"), [("steps", 2), ("prompts", 0), ("samples", 1), ("shift", 0.0)])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {value}$"):
        Recipe(**{name: value})  # type: ignore[arg-type]
