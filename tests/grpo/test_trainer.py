"""Updates of the trainer, held against a training loop written without it."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagg_core import DanceSDE, accumulate_gradients, initial_latents, rollout
from jagg_core.backbones import load_backbone
from jagg_core.grpo import GRPOTrainer, TrainingStopped, graphs
from jagg_core.grpo.graphs import graph_bytes
from jagg_core.grpo.learner import Learner, WithoutAdapter
from jagg_core.grpo.plans import jagg_frac_of, make_plan
from jagg_core.grpo.sampling import prompts_of
from jagg_core.grpo.settings import PlanSettings
from jagg_core.grpo.weights import MasterWeights
from jagg_core.objective import step_log_prob
from jagg_core.rewards import RewardFailed, load_reward, score
from jagg_core.schedule import dance_schedule
from jagg_core.seeding import derive_seed
from jagg_core.strict_json import RecordError
from tests.grpo.runs import SMALL, changed, weights

CALIBRATION = Path(__file__).parents[2] / "results/reference/digits-flux-calibration/calibration-eta0.7.json"
EXACT = changed(plan={"estimator": "exact", "knots": ()}, model={"ema_decay": 0.0})


def plain_update(config: Any, update: int, backbone: Any, optimizer: torch.optim.Optimizer) -> float:
    """One update of DanceGRPO's loss by autograd alone. Returns the norm of the gradient."""
    given = config.rollout
    chosen = prompts_of(backbone.prompts, given.prompts, config.run.seed, update)
    prompts = [prompt for prompt in chosen for _ in range(given.samples)]
    seed = derive_seed(config.run.seed, "update", update)
    policy = backbone.policy(prompts)
    latents = initial_latents(backbone.latent_shape, seed, range(len(prompts)))
    drawn = rollout(policy, dance_schedule(given.steps, given.shift), DanceSDE(given.eta), latents, seed)
    rewards = score(load_reward("ink", dataset="digits"), backbone.decode(drawn.final), prompts)
    by_prompt = rewards.reshape(given.prompts, given.samples)
    advantages = (by_prompt - by_prompt.mean(1, keepdim=True)) / (by_prompt.std(1, keepdim=True) + 1e-8)
    advantages = advantages.flatten().clamp(-5, 5)
    optimizer.zero_grad()
    loss = torch.zeros(())
    for step in range(drawn.steps):
        velocity = policy.velocity(drawn.latents[step], drawn.network_sigma(step), torch.arange(len(prompts)))
        ratio = (step_log_prob(drawn, step, velocity) - drawn.log_probs[step]).exp()
        clipped = ratio.clamp(1 - 1e-4, 1 + 1e-4)
        loss = loss + torch.maximum(-advantages * ratio, -advantages * clipped).mean() / drawn.steps
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
    optimizer.step()
    return float(norm)


def test_two_updates_are_those_of_a_plain_loop() -> None:
    config = changed(EXACT, optimizer={"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.02})
    trainer = GRPOTrainer(config)
    backbone = load_backbone("digits-flux")
    parameters = list(backbone.transformer.parameters())
    before = torch.cat([p.detach().flatten().clone() for p in parameters])
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    for update in range(2):
        found = trainer.step()
        norm = plain_update(config, update, backbone, optimizer)
        assert found.grad_norm == pytest.approx(norm, rel=1e-3)
        assert norm > 0.02  # so that clipping is at work
    expected = torch.cat([p.detach().flatten() for p in parameters])
    moved = (expected - before).norm()
    assert moved > 0.1
    # Adam divides by what it sums: rounding of small gradients shows
    assert (weights(trainer) - expected).norm() < 2e-2 * moved


def gradient_of(config: Any) -> Tensor:
    """The first update's gradient before clipping."""
    trainer = GRPOTrainer(config)
    seen: list[Tensor] = []
    trainer.learner.step = lambda: seen.append(_gradient(trainer.learner)) or 1.0  # type: ignore[func-returns-value,method-assign]
    trainer.step()
    return seen[0]


def _gradient(learner: Learner) -> Tensor:
    return torch.cat([t.grad.flatten() for t in learner.masters.tensors if t.grad is not None])


def test_the_gradient_does_not_depend_on_the_micro_batch() -> None:
    whole = gradient_of(changed(EXACT, rollout={"micro_batch": 4}))
    for size in (1, 3):
        parts = gradient_of(changed(EXACT, rollout={"micro_batch": size}))
        assert (parts - whole).norm() < 1e-4 * whole.norm()


@pytest.mark.parametrize("upstream", ["autograd", "closed_form"])
def test_window_two_is_exact(upstream: str) -> None:
    exact = gradient_of(EXACT)
    pairs = {"estimator": "jagg", "window": 2, "jagg_frac": 1.0, "upstream": upstream}
    assert (gradient_of(changed(EXACT, plan=pairs)) - exact).norm() < 1e-4 * exact.norm()
    apart = gradient_of(changed(EXACT, plan=pairs | {"window": 4}))
    assert (apart - exact).norm() > 1e-2 * exact.norm()


PLANS: dict[str, dict[str, Any]] = {
    "exact": {"estimator": "exact", "knots": ()},
    "jagg": {"estimator": "jagg", "knots": (), "window": 4, "jagg_frac": 1.0},
    "endpoint": {"estimator": "endpoint", "knots": (), "window": 4, "jagg_frac": 1.0},
    "subsample": {"estimator": "subsample", "knots": (), "passes": 2},
    "causal": {"estimator": "causal", "knots": (0, 2)},
    "predicted": {"estimator": "causal", "knots": (0, 2), "predict": True},
    "spline": {"estimator": "spline", "knots": (0, 3)},
}


@pytest.mark.parametrize("name", PLANS)
def test_every_estimator_steps_as_often_and_moves_the_same_parameters(name: str) -> None:
    # a wide clip range: off policy, samples that are partly clipped get passes of their own
    wide = {"clip_range": 1.0}
    once_more = {"steps_per_rollout": 2, "weight_decay": 0.0}
    trainer = GRPOTrainer(changed(plan=PLANS[name], optimizer=once_more, objective=wide))
    before = {n: t.clone() for n, t in trainer.learner.tensors().items()}
    found = trainer.step()
    assert trainer.learner.steps == 2
    assert (found.passes, found.micro_batches) == (4 if name == "exact" else 2, 2)
    after = trainer.learner.tensors()
    still = [n for n in after if n.startswith("weights/") and torch.equal(after[n], before[n])]
    assert still == []


def test_only_the_first_step_of_a_rollout_is_on_policy() -> None:
    trainer = GRPOTrainer(changed(plan=PLANS["jagg"], optimizer={"epochs": 2}, objective={"clip_range": 1.0}))
    found = trainer.step()
    assert trainer.learner.steps == 2
    # closed form first: a forward per knot of two micro-batches; then a forward of every step
    assert found.forwards == 2 * 2 + 2 * 4
    assert found.log_ratio_max is not None
    assert found.log_ratio_max > 1e-5


def test_interpolated_upstream_gradients_are_near_those_of_every_step() -> None:
    causal = {"calibration": str(CALIBRATION), "knots": (), "passes": 8}
    config = changed(plan=causal, rollout={"steps": 21, "micro_batch": 4}, objective={"clip_range": 1.0})
    trainer = GRPOTrainer(config)
    [(policy, trajectory, advantages)] = trainer.batches("test")
    trainer.step()
    plan = make_plan(trainer.plan, trajectory.sigmas, 0)
    found, forwards = {}, {}
    for mode in ("autograd", "interpolated"):
        report = accumulate_gradients(policy, trajectory, advantages, plan, trainer.objective, mode)  # type: ignore[arg-type]
        found[mode], forwards[mode] = _gradient(trainer.learner), report.forwards
        trainer.learner.masters.clear_gradients()
    assert forwards == {"autograd": 20, "interpolated": 8}
    error = (found["interpolated"] - found["autograd"]).norm() / found["autograd"].norm()
    assert 1e-6 < error < 1e-2


@pytest.mark.parametrize(
    ("settings", "steps"), [({"trained": "random", "fraction": 0.5}, 2), ({"trained": "window"}, 2)]
)
def test_only_some_steps_are_trained(settings: dict[str, Any], steps: int) -> None:
    config = changed(EXACT, rollout={**settings, "window_range": (0, 3)})
    trainer = GRPOTrainer(config)
    found = trainer.step()
    assert (found.passes, found.micro_batches) == (steps, 2)
    assert sum(found.seconds.values()) <= found.total_s


def test_equal_rewards_are_counted_and_give_no_gradient() -> None:
    found = GRPOTrainer(changed(reward={"name": "tests.grpo.runs:constant"})).step()
    assert (found.groups_without_signal, found.grad_norm) == (2, 0.0)


def test_a_reward_that_is_not_a_number_skips_the_update_and_in_a_row_ends_the_run() -> None:
    config = changed(reward={"name": "tests.grpo.runs:not_a_number"}, run={"max_skipped": 2})
    trainer = GRPOTrainer(config)
    before = weights(trainer)
    found = trainer.step()
    assert "nan for sample 0" in found.skipped
    assert (trainer.update, trainer.skipped, trainer.learner.steps) == (1, 1, 0)
    assert torch.equal(weights(trainer), before)
    with pytest.raises(TrainingStopped, match=r"2 updates in a row were skipped \(setting max_skipped\)") as caught:
        trainer.step()
    assert (caught.value.metrics.update, trainer.update) == (2, 2)
    assert "nan for sample 0" in caught.value.metrics.skipped


def test_a_reward_that_fails_is_an_error_and_never_a_zero() -> None:
    trainer = GRPOTrainer(changed(reward={"name": "tests.grpo.runs:failing"}))
    with pytest.raises(RewardFailed, match="no answer") as caught:
        trainer.step()
    told = "reward tests.grpo.runs:failing failed on update 1, prompts '.'(, '.')?: ConnectionError: no answer"
    assert re.fullmatch(told, str(caught.value))
    assert isinstance(caught.value.__cause__, ConnectionError)
    trainer.update = 3
    with pytest.raises(RewardFailed, match=r"failing failed on update 3, prompts '.'"):
        trainer.evaluate()


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = GRPOTrainer(SMALL)
    trainer.step()
    before = {name: tensor.clone() for name, tensor in trainer.learner.tensors().items()}
    for tensor in trainer.learner.masters.tensors:
        tensor.grad = torch.full_like(tensor, float("inf"))
    assert trainer.learner.step() is None
    assert trainer.learner.steps == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.learner.tensors().items())
    assert all(tensor.grad is None for tensor in trainer.learner.masters.tensors)


def test_a_velocity_that_is_not_finite_skips_the_update() -> None:
    trainer = GRPOTrainer(SMALL)
    with torch.no_grad():
        trainer.learner.masters.tensors[0].fill_(float("nan"))
    assert "not finite" in trainer.step().skipped


def test_a_calibration_of_another_schedule_is_refused_before_the_first_rollout() -> None:
    calibrated = {"calibration": str(CALIBRATION), "knots": (), "passes": 5}
    with pytest.raises(ValueError, match=r"is of 20 trained steps, 1 to 0\.\d+; this run has 4, 1 to 0\.6667"):
        GRPOTrainer(changed(plan=calibrated))
    fitting = {"steps": 21, "micro_batch": 4}
    for other, message in (
        ({"timestep_mode": "trunc_fp32"}, "timestep_mode: calibrated with float, this run has trunc_fp32"),
        ({"eta": 0.3}, r"transition: calibrated with DanceSDE\(eta=0.7\), this run has DanceSDE\(eta=0.3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            GRPOTrainer(changed(plan=calibrated, rollout=fitting | other))
    trainer = GRPOTrainer(changed(plan=calibrated, rollout=fitting))
    assert trainer.step().passes == 5


def test_jagg_frac_can_be_the_calibrated_one() -> None:
    path = Path(__file__).parents[2] / "results/reference/photos-flux-calibration/calibration-eta0.7.json"
    settings = PlanSettings("jagg", window=5, jagg_frac="calibrated", calibration=str(path))
    assert jagg_frac_of(settings) == 0.75
    with pytest.raises(RecordError, match="no jagg_frac for window 7; it has windows"):
        jagg_frac_of(replace(settings, window=7))


def test_the_learning_rate_warms_up() -> None:
    trainer = GRPOTrainer(changed(optimizer={"warmup": 3, "learning_rate": 4e-4}))
    assert [trainer.step().learning_rate for _ in range(4)] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])


def test_half_precision_sums_gradients_and_steps_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = MasterWeights([parameter])
    for value in (256.0, 1.0):
        (parameter * value).sum().backward()
    [master] = masters.tensors
    assert master.grad is not None
    assert master.grad.item() == 257
    assert parameter.grad is None
    with torch.no_grad():
        master += 1e-9
    masters.publish()
    assert parameter.item() == torch.tensor(1e-9).bfloat16().item()
    assert master.item() != parameter.item()


def test_bf16_trains_master_weights() -> None:
    trainer = GRPOTrainer(changed(model={"dtype": "bfloat16"}))
    before = weights(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.step()
    assert before.dtype == torch.float32
    assert not torch.equal(weights(trainer), before)
    network = torch.cat([p.detach().flatten() for p in trainer.learner.backbone.transformer.parameters()])
    assert network.dtype == torch.bfloat16
    assert torch.equal(network, weights(trainer).bfloat16())


def test_evaluation_uses_the_average_and_leaves_the_weights_alone() -> None:
    trainer = GRPOTrainer(changed(optimizer={"learning_rate": 1e-2}, run={"eval_prompts": 2, "eval_samples": 2}))
    first = trainer.evaluate()
    assert first == trainer.evaluate()
    trainer.step()
    before = weights(trainer)
    averaged = trainer.evaluate()["ink"]
    assert torch.equal(weights(trainer), before)
    trainer.learner.average = None
    assert trainer.evaluate()["ink"] != averaged


def test_other_rewards_are_watched() -> None:
    config = changed(run={"eval_prompts": 2, "eval_samples": 2, "eval_rewards": ("classifier", "sharpness")})
    assert list(GRPOTrainer(config).evaluate()) == ["ink", "classifier", "sharpness"]


class TestAdapters:
    """LoRA, and the KL to the policy without it."""

    LORA = changed(model={"options": ("lora_rank=2",), "ema_decay": 0.0}, optimizer={"learning_rate": 1e-2})

    def test_only_the_adapter_is_trained(self) -> None:
        trainer = GRPOTrainer(self.LORA)
        frozen = {n: p.clone() for n, p in trainer.learner.backbone.transformer.named_parameters() if "lora_" not in n}
        trainer.step()
        assert all("lora_" in name for name in trainer.learner.names)
        now = dict(trainer.learner.backbone.transformer.named_parameters())
        assert all(torch.equal(now[name], value) for name, value in frozen.items())

    @pytest.mark.parametrize("adapted", [True, False], ids=["adapter-off", "frozen-copy"])
    def test_the_kl_is_to_the_policy_as_it_was_loaded(self, adapted: bool) -> None:
        base = self.LORA if adapted else changed(optimizer={"learning_rate": 1e-3})
        norms = {}
        for beta in (0.0, 10.0):
            trainer = GRPOTrainer(changed(base, objective={"kl_beta": beta}))
            norms[beta] = [trainer.step().grad_norm for _ in range(2)]
        assert norms[0.0][0] == pytest.approx(norms[10.0][0], rel=1e-5)  # nothing has moved yet
        assert norms[0.0][1] != pytest.approx(norms[10.0][1], rel=1e-3)

    def test_the_adapter_is_on_again_after_an_error(self) -> None:
        learner = Learner(self.LORA)
        latents, sigma, rows = torch.randn(1, 16, 4), torch.full((1,), 0.5), torch.zeros(1, dtype=torch.long)
        with torch.no_grad():
            for name, parameter in learner.backbone.transformer.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        policy = learner.policy(["3"])
        with torch.no_grad():
            adapted = policy.velocity(latents, sigma, rows)
            plain = WithoutAdapter(policy, learner.backbone.transformer).velocity(latents, sigma, rows)
            assert not torch.allclose(adapted, plain)
            with pytest.raises(IndexError):
                WithoutAdapter(policy, learner.backbone.transformer).velocity(latents, sigma, rows + 5)
            assert torch.equal(policy.velocity(latents, sigma, rows), adapted)


class TestKeptGraphs:
    """The rollout's own graphs in the place of the update's forwards."""

    @pytest.mark.parametrize("name", ["causal", "jagg", "exact"])
    def test_they_give_the_same_gradient_without_a_forward(self, name: str) -> None:
        config = changed(plan=PLANS[name], model={"ema_decay": 0.0})
        kept = changed(config, plan={"keep_graphs": True})
        expected, found = gradient_of(config), gradient_of(kept)
        assert (found - expected).norm() < 1e-5 * expected.norm()
        assert GRPOTrainer(kept).step().forwards == 0

    def test_too_much_memory_is_refused_with_the_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = GRPOTrainer(changed(plan={"keep_graphs": True}))
        policy = trainer.learner.policy(["3"])
        needed = graph_bytes(policy, torch.randn(1, 16, 4)) * 2 * 4
        monkeypatch.setattr(graphs, "free_memory", lambda device: needed - 1)
        with pytest.raises(ValueError, match=rf"keep_graphs needs {needed / 2**30:.2f} GiB for 2 knots of 4 samples"):
            trainer.step()

    def test_what_is_saved_grows_with_the_rows_and_shrinks_under_checkpointing(self) -> None:
        backbone = load_backbone("digits-flux")
        policy = backbone.policy(["3"])
        plain_bytes = graph_bytes(policy, torch.randn(1, 16, 4))
        backbone.enable_gradient_checkpointing()
        assert 0 < graph_bytes(policy, torch.randn(1, 16, 4)) < 0.5 * plain_bytes

    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            ({"plan": {"predict": True}}, "predict must be False, got True"),
            ({"optimizer": {"epochs": 2}}, "epochs must be 1, got 2"),
            ({"rollout": {"trained": "random", "fraction": 0.9}}, "trained must be all or window, got random"),
        ],
        ids=["predict", "epochs", "random"],
    )
    def test_it_is_for_one_step_on_policy(self, sections: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            changed(changed(plan={"keep_graphs": True}), **sections)
