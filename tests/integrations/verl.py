"""verl-omni: an engine that is subclassed, whose loop over steps calls ``forward_step``. Written from its formulas.

Checked against verl-project/verl-omni a1139ba of 2026-08-22: `DiffusersFSDPEngine._run_forward_backward_batch`,
`PPODiffusersFSDPEngine.forward_step`, `diffusion_loss`, `FlowGRPOLoss.compute_loss`, and SD3's training adapter, whose
network is told 1000 sigma.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import FlowSDE
from tests.integrations.network import Names, common, draw, sample_steps, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step

KERNEL = FlowSDE(0.7)
WINDOW = 3


class Scheduler:
    def __init__(self) -> None:
        self.sigmas = sd3_schedule(8).float()
        self.timesteps = self.sigmas[:-1] * 1000

    def index_for_timestep(self, timestep: Tensor) -> int:
        return int((self.timesteps == timestep).nonzero().item())


def index_select(batch: Names, rows: Tensor) -> Names:
    return {key: value[rows] if isinstance(value, Tensor) else value for key, value in batch.items()}


def forward_and_sample_previous_step(
    module: Any, scheduler: Scheduler, config: Any, inputs: Names, negative: Names, batch: Names, step: int
) -> tuple[Tensor, Tensor]:
    """Log-probability ``[B]`` and mean of the step after ``step``, with guidance."""
    without = module(**negative)[0]
    v = without + config.pipeline.guidance_scale * (module(**inputs)[0] - without)
    places = torch.tensor([scheduler.index_for_timestep(t) for t in batch["all_timesteps"][:, step]])
    sigma, after = scheduler.sigmas[places], scheduler.sigmas[places + 1]
    mean, scale = kernel_step(FlowSDE(config.algo.noise_level), batch["all_latents"][:, step], v, sigma, after)
    return kernel_log_prob(KERNEL, batch["all_latents"][:, step + 1], mean, scale), mean


def diffusion_loss(config: Any, model_output: Names, data: Names, dp_group: None = None) -> tuple[Tensor, Names]:
    given = config.diffusion_loss
    advantages = torch.clamp(data["advantages"], -given.adv_clip_max, given.adv_clip_max)
    difference = model_output["log_probs"] - data["old_log_probs"]
    ratio = torch.exp(difference)
    clamped = torch.clamp(ratio, 1.0 - given.clip_ratio, 1.0 + given.clip_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * clamped).mean()
    metrics = {"actor/ratio_mean": float(ratio.detach().mean()), "actor/ppo_kl": float(-difference.detach().mean())}
    return loss / data["gradient_accumulation_steps"] * data["sp_size"], metrics | {"actor/loss": float(loss.detach())}


class PPODiffusersFSDPEngine:
    def __init__(self, names: Names) -> None:
        self.module, self.optimizer, self.scheduler = names["transformer"], names["optimizer"], Scheduler()
        pipeline = SimpleNamespace(guidance_scale=2.5)
        algo = SimpleNamespace(sde_type="sde", noise_level=KERNEL.eta)
        self.model_config = SimpleNamespace(pipeline=pipeline, algo=algo)

    def get_data_parallel_group(self) -> None:
        return None

    def prepare_model_inputs(self, micro_batch: Names, step: int) -> tuple[Names, Names]:
        def inputs(kind: str) -> Names:
            found = {"hidden_states": micro_batch["all_latents"][:, step]}
            found |= {"timestep": micro_batch["all_timesteps"][:, step].to(found["hidden_states"])}
            found |= {"encoder_hidden_states": micro_batch[f"{kind}prompt_embeds"]}
            return found | {"pooled_projections": micro_batch[f"{kind}pooled_prompt_embeds"]}

        return inputs(""), inputs("negative_")

    def forward_step(
        self, micro_batch: Names, loss_function: Any, forward_only: bool, step: int
    ) -> tuple[Tensor, Names]:
        inputs, negative = self.prepare_model_inputs(micro_batch, step)
        host = (self.module, self.scheduler, self.model_config)
        log_prob, mean = forward_and_sample_previous_step(*host, inputs, negative, micro_batch, step)
        output = {"log_probs": log_prob, "prev_sample_mean": mean}
        if loss_function is None:
            return torch.ones(()), {"model_output": output, "loss": 1.0, "metrics": {}}
        chosen = {key: micro_batch[key][:, step] for key in ("old_log_probs", "advantages")}
        shared = {key: micro_batch[key] for key in ("gradient_accumulation_steps", "sp_size")}
        loss, metrics = loss_function(model_output=output, data=chosen | shared)
        return loss, {"model_output": output, "loss": loss.item(), "metrics": metrics}

    def run(self, data: Names, loss_function: Any, forward_only: bool, micro_batches: int) -> list[list[Names]]:
        """What every step of every micro-batch gave."""
        steps, size = data["all_timesteps"].shape[1], len(data["all_timesteps"]) // micro_batches
        found = []
        for number in range(micro_batches):
            micro_batch = index_select(data, torch.arange(number * size, (number + 1) * size))
            micro_batch |= {"gradient_accumulation_steps": micro_batches * steps, "sp_size": 2}
            given = []
            for step in range(steps):
                with torch.set_grad_enabled(not forward_only):
                    loss, meta_info = self.forward_step(micro_batch, loss_function, forward_only, step)
                if not forward_only:
                    loss.backward()
                given.append(meta_info)
            found.append(given)
        return found


class EngineRegistry:
    @staticmethod
    def register(**key: Any) -> Callable[[type], type]:
        assert key == {
            "model_type": "diffusion_model",
            "backend": ["fsdp", "fsdp2"],
            "device": "cuda",
            "vendor": "nvidia",
        }
        return lambda engine: engine


def verl_modules() -> dict[str, ModuleType]:
    """What the page's block imports."""
    names = ["verl", "verl.utils", "verl.workers", "verl.workers.engine", "verl.workers.engine.base"]
    names += ["verl_omni", "verl_omni.pipelines", "verl_omni.pipelines.utils", "verl_omni.workers"]
    names += [
        "verl_omni.workers.engine",
        "verl_omni.workers.engine.fsdp",
        "verl_omni.workers.engine.fsdp.diffusers_impl",
    ]
    found = {name: ModuleType(name) for name in names}
    given: dict[str, Names] = {
        "verl.utils": {
            "tensordict_utils": SimpleNamespace(
                index_select_tensor_dict=index_select,
                get=lambda batch, key: batch[key],
                get_tensordict=lambda tensors, others: tensors | others,
            )
        },
        "verl.workers.engine.base": {"EngineRegistry": EngineRegistry},
        "verl_omni.pipelines.utils": {"forward_and_sample_previous_step": forward_and_sample_previous_step},
        "verl_omni.workers.engine.fsdp.diffusers_impl": {"PPODiffusersFSDPEngine": PPODiffusersFSDPEngine},
    }
    for name, values in given.items():
        found[name].__dict__.update(values)
    return found


def verl_config(**changes: Any) -> Any:
    """The actor's settings that the loss and a plan read."""
    given = SimpleNamespace(loss_mode="flow_grpo", clip_ratio=5e-4, adv_clip_max=1.0)
    settings = {"diffusion_loss": given, "use_kl_loss": False, "use_distill_loss": False}
    return SimpleNamespace(**settings | {"rollout_correction": SimpleNamespace(rollout_rs=None)} | changes)


def verl_train(
    engine: type | None, dtype: torch.dtype, steps_per_rollout: int, rollouts: int, config: Any = None, **extra: Tensor
) -> Names:
    """The host's names after rollouts of 8 samples, trained in micro-batches of 2; by its own engine if None."""
    names = common(dtype, time_unit=1000)
    trainer: Any = (engine or PPODiffusersFSDPEngine)(names)
    loss_function = partial(diffusion_loss, config=config or verl_config())
    names["metrics"] = []
    for seed in range(rollouts):
        data: Names = {"advantages": draw(seed, 8, dtype=dtype)[:, None].expand(-1, WINDOW)} | extra
        for number, kind in enumerate(("", "negative_")):
            text, pooled = text_of(10 * seed + number, 8, dtype)
            data |= {f"{kind}prompt_embeds": text, f"{kind}pooled_prompt_embeds": pooled}
        data |= _rollout(trainer, data, seed, dtype)
        outputs = [[given["model_output"] for given in steps] for steps in trainer.run(data, None, True, 4)]
        for key, name in (("old_log_probs", "log_probs"), ("old_prev_sample_mean", "prev_sample_mean")):
            data[key] = torch.cat([torch.stack([output[name] for output in steps], 1) for steps in outputs])
        size = 8 // steps_per_rollout
        for first in range(0, 8, size):
            names["optimizer"].zero_grad()
            mini_batch = index_select(data, torch.arange(first, first + size))
            for steps in trainer.run(mini_batch, loss_function, False, size // 2):
                names["metrics"] += [given["metrics"] | {"loss": given["loss"]} for given in steps]
            names["optimizer"].step()
    return names


def _rollout(trainer: Any, data: Names, seed: int, dtype: torch.dtype) -> Names:
    """A window of steps with noise for every sample: ``all_latents`` [B, S + 1, *D] and ``all_timesteps`` [B, S]."""
    scheduler = trainer.scheduler

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        batch = data | {"all_latents": latents[:, None], "all_timesteps": sigma[:, None] * 1000}
        inputs, negative = trainer.prepare_model_inputs(batch, 0)
        without: Tensor = trainer.module(**negative)[0]
        guided: Tensor = without + 2.5 * (trainer.module(**inputs)[0] - without)
        return guided

    start = torch.randint(0, 5, (8, 1), generator=torch.Generator().manual_seed(seed))
    steps = start + torch.arange(WINDOW)
    sde = torch.zeros(8, 7, dtype=torch.bool).scatter_(1, steps, True)
    stored = sample_steps(velocity, scheduler.sigmas, KERNEL, seed, 8, dtype, sde)
    rows = torch.arange(8)[:, None]
    states = torch.cat([stored["latents"][rows, steps], stored["next_latents"][rows, steps[:, -1:]]], 1)
    return {"all_latents": states, "all_timesteps": scheduler.timesteps[steps]}
