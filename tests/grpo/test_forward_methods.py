"""Training by AWM and DiffusionNFT, held against their losses by plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagg_core.grpo import GRPOTrainer
from jagg_core.grpo.dry_run import estimate
from jagg_core.grpo.metrics import Metrics
from tests.grpo.ranks import SMALL
from tests.grpo.runs import changed
from tests.grpo.test_trainer import gradient_of

BARE: dict[str, Any] = {"estimator": "exact", "knots": (), "states": 3}
AWM = changed(SMALL, plan=BARE | {"upstream": "awm"})
NFT = changed(SMALL, plan=BARE | {"upstream": "nft"})


def by_autograd(trainer: GRPOTrainer, nft: bool) -> Tensor:
    """Gradient of the mean over samples and noise levels of the published loss."""
    batches, broken = trainer._collect(Metrics(1))
    assert broken is None
    advantages = trainer._advantages(batches, Metrics(1))
    parameters = [p for p in trainer.learner.masters.tensors if p.requires_grad]
    total, count = torch.zeros(()), 0
    for batch, values in zip(batches, advantages, strict=True):
        states = batch.rollout
        for step in range(states.steps):
            velocity = batch.policy.velocity(*states.site(step), states.rows)
            t = states.sigma(step).to(velocity).reshape(-1, *[1] * (velocity.ndim - 1))
            if not nft:
                loss = values * (velocity - (states.noise[step] - states.final)).square().flatten(1).mean(1)
            else:
                old, share, loss = velocity.detach(), (values / 5).clamp(-1, 1) / 2 + 0.5, torch.zeros(len(values))
                for weight, sign in ((share, 1), (1 - share, -1)):
                    error = states.latents[step] - t * (old + sign * (velocity - old)) - states.final
                    scale = error.detach().abs().flatten(1).mean(1)
                    loss = loss + 5 * weight * error.square().flatten(1).mean(1) / scale
            total, count = total + loss.sum(), count + len(values)
    gradients = torch.autograd.grad(total / count, parameters, allow_unused=True)
    return torch.cat([(p * 0 if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)])


@pytest.mark.parametrize("config", [AWM, NFT], ids=["awm", "nft"])
def test_an_update_is_the_gradient_of_the_loss(config: Any) -> None:
    expected = by_autograd(GRPOTrainer(config), config is NFT).detach()
    assert expected.norm() > 0
    assert (gradient_of(config) - expected).norm() < 1e-4 * expected.norm()
    whole = changed(config, rollout={"micro_batch": config.rollout.batch})
    assert (gradient_of(whole) - expected).norm() < 1e-4 * expected.norm()


def test_a_second_optimizer_step_contrasts_with_the_policy_of_the_rollout() -> None:
    config = changed(NFT, optimizer={"steps_per_rollout": 2})
    trainer = GRPOTrainer(config)
    metrics = trainer.step()
    assert not metrics.skipped and metrics.passes == 3
    [batch, *_], _ = GRPOTrainer(config)._collect(Metrics(1))
    assert batch.old is not None and batch.old.shape == batch.rollout.latents.shape


@pytest.mark.parametrize("upstream", ["awm", "nft"])
def test_evaluations_are_counted(upstream: str, tmp_path: Any) -> None:
    config = changed(SMALL, plan=BARE | {"upstream": upstream})
    result = estimate(config, tmp_path / "run")
    batch, steps = config.rollout.batch, config.rollout.steps
    assert result.rollout_evaluations == batch * (steps + 3 * (upstream == "nft"))
    assert (result.passes, result.update_forwards, result.update_backwards) == (3, 3 * batch, 3 * batch)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("plan", {"estimator": "jagg"}, "upstream awm is for the estimator exact, got jagg"),
        ("plan", {"keep_graphs": True}, "keep_graphs must be false"),
        ("plan", {"states": 0}, "states must be at least 1, got 0"),
        ("plan", {"upstream": "nft", "nft_beta": 0.0}, "nft_beta"),
        ("rollout", {"trained": "random", "fraction": 0.5}, "upstream awm: trained must be all, got random"),
        ("objective", {"kl_beta": 0.1}, "upstream awm: kl_beta must be 0, got 0.1"),
        ("optimizer", {"epochs": 2}, "upstream awm: epochs must be 1, got 2"),
        ("run", {"audit_every": 1}, "upstream must not be awm"),
    ],
)
def test_what_has_no_meaning_is_refused(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(AWM, **{section: values})
