"""Training by pathwise gradients, held against autograd through the whole rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.grpo import GRPOTrainer
from jagg_core.grpo.metrics import Metrics
from jagg_core.transitions import expand
from tests.grpo.ranks import PATHWISE
from tests.grpo.runs import changed
from tests.grpo.test_trainer import gradient_of

RAW = changed(PATHWISE, plan={"estimator": "exact", "knots": ()}, advantage={"centre": "none", "scale": "none"})
"""Advantages are the rewards: the pathwise gradient is then that of the mean reward."""


class FixedWeights(torch.autograd.Function):
    """A velocity as a function of its latents alone: the untrained last step moves with the state, not the weights."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, policy: Any, sigma: Tensor, rows: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.at = state.detach().requires_grad_(True)
            ctx.velocity = policy.velocity(ctx.at, sigma, rows)
        return ctx.velocity.detach().clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor) -> Any:
        return torch.autograd.grad(ctx.velocity, ctx.at, vectors[0])[0], None, None, None


def reward_gradient(trainer: GRPOTrainer) -> Tensor:
    """Gradient of minus the mean reward through all trained steps, per latent element and step."""
    [batch], broken = trainer._collect(Metrics(1))
    assert broken is None
    path, policy, rows = batch.rollout, batch.policy, torch.arange(batch.rollout.batch)
    parameters = [p for p in policy.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    state = path.latents[0]
    for step in range(path.steps):
        a, b, scale = path.transition.coefficients(path.sigma(step), path.next_sigma(step))
        velocity = policy.velocity(state, path.network_sigma(step), rows)
        state = expand(a, state) * state + expand(b, state) * velocity + expand(scale, state) * path.noise[step]
    sigma = path.next_sigma(path.steps - 1)
    last = FixedWeights.apply(state, policy, sigma.expand(path.batch).to(state), rows)  # type: ignore[no-untyped-call]
    images = trainer.learner.backbone.decode(state - expand(sigma, state) * last)
    mean = trainer.reward(images, batch.samples.prompts).mean()
    gradients = torch.autograd.grad(-mean / path.elements / path.steps, parameters, allow_unused=True)
    return torch.cat([(p * 0 if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)])


@pytest.mark.parametrize("options", [(), ("lora_rank=2",)], ids=["all weights", "LoRA"])
def test_the_exact_plan_is_autograd_through_the_rollout(options: tuple[str, ...]) -> None:
    config = changed(RAW, model={"options": options}, rollout={"micro_batch": 6})
    expected = reward_gradient(GRPOTrainer(config)).detach()
    assert expected.norm() > 0
    assert (gradient_of(config) - expected).norm() < 1e-4 * expected.norm()
    parts = gradient_of(changed(config, rollout={"micro_batch": 2}))
    assert (parts - expected).norm() < 1e-4 * expected.norm()


def test_a_group_of_samples_scales_it_by_its_slope() -> None:
    """Advantages centred per prompt of three samples: 1 - 1/3."""
    raw = gradient_of(RAW)
    centred = gradient_of(changed(RAW, advantage={"centre": "prompt"}))
    assert (centred - raw * 2 / 3).norm() < 1e-5 * raw.norm()


@pytest.mark.parametrize(
    ("rollout", "sweep"),
    [({"trained": "random", "fraction": 0.5}, "full"), ({"trained": "window", "window_range": (1, 3)}, "frozen")],
)
def test_steps_that_are_not_trained_are_swept_through(rollout: dict[str, Any], sweep: str) -> None:
    metrics = GRPOTrainer(
        changed(PATHWISE, plan={"estimator": "exact", "knots": (), "sweep": sweep}, rollout=rollout)
    ).step()
    assert metrics.skipped == ""
    assert metrics.grad_norm is not None
    assert metrics.grad_norm > 0


def test_the_reward_rises() -> None:
    trainer = GRPOTrainer(changed(PATHWISE, optimizer={"learning_rate": 1e-3}))
    rewards = [trainer.step().reward_mean for _ in range(4)]
    assert rewards == sorted(rewards)  # type: ignore[type-var]
    assert rewards[-1] > 1.3 * rewards[0]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"plan": {"estimator": "jagg", "knots": ()}}, "does not look ahead"),
        ({"plan": {"knots": (1, 3)}}, r"knots that begin with 0, got \[1, 3\]"),
        ({"plan": {"estimator": "exact", "knots": (), "sweep": "knots"}}, "sweep knots is for estimators with knots"),
        ({"plan": {"keep_graphs": True}}, "keep_graphs must be false"),
        ({"plan": {"sweep": "half"}}, "sweep must be one of"),
        ({"optimizer": {"epochs": 2}}, "epochs must be 1, got 2"),
        ({"optimizer": {"steps_per_rollout": 2}}, "steps_per_rollout must be 1, got 2"),
        ({"objective": {"kl_beta": 0.1}}, "kl_beta must be 0, got 0.1"),
        ({"rollout": {"samples": 2}}, "samples of at least 3"),
    ],
)
def test_what_it_does_not_cover_is_refused(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(PATHWISE, **sections)


def test_a_reward_without_gradient_is_one_line() -> None:
    trainer = GRPOTrainer(changed(PATHWISE, reward={"name": "tests.grpo.runs:constant"}))
    with pytest.raises(ValueError, match="has no gradient in the images"):
        trainer.step()
