"""NeMo-RL: a worker whose update replays all steps and masks those outside its window. Written from its formulas.

Checked against NVIDIA-NeMo/RL f9fdce4 of 2026-07-29 (pull request 3408): `DiffusionPolicyWorker.train_step`,
`QwenImagePipelineAdapter.compute_transition_logprob` and `DiffusionGRPOLossFn`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jagg_core.schedule import qwen_image_schedule
from jagg_core.transitions import FlowSDE
from tests.integrations.network import Names, common, draw, sample_steps
from tests.jagg_core.literal import kernel_log_prob, kernel_step

KERNEL = FlowSDE(0.7)
SAMPLED, WINDOW = 8, 2


class Adapter:
    """Forward, guidance and kernel of a step."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        self.transformer, self.scheduler = transformer, scheduler

    def velocity(self, latents: Tensor, timestep: Tensor, embeds: Names) -> Tensor:
        told = timestep.to(latents).expand(len(latents)) / 1000
        found = []
        for kind in ("", "negative_"):
            text = embeds[f"{kind}prompt_embeds"]
            found.append(self.transformer(latents, told, text, embeds[f"{kind}prompt_embeds_mask"])[0])
        guided: Tensor = found[1] + 2.5 * (found[0] - found[1])
        return guided

    def _denoise_step(
        self,
        *,
        latents: Tensor,
        timestep_value: Tensor,
        prev_sample: Tensor,
        stochastic: bool,
        generator: None,
        return_mean_std: bool,
        **embeds: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = (self.scheduler.timesteps == timestep_value[:, None]).long().argmax(1)
        sigma, after = self.scheduler.sigmas[places], self.scheduler.sigmas[places + 1]
        v = self.velocity(latents, timestep_value, embeds)
        mean, scale = kernel_step(KERNEL, latents, v, sigma, after)
        return prev_sample, kernel_log_prob(KERNEL, prev_sample, mean, scale), mean, scale


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


class Loss:
    def __init__(self, cfg: Names) -> None:
        self.cfg = cfg

    def __call__(
        self, new: Tensor, old: Tensor, advantages: Tensor, timestep_mask: Tensor, sample_mask: Tensor
    ) -> tuple[Tensor, Names]:
        advantages = advantages.clamp(-self.cfg["adv_clip_max"], self.cfg["adv_clip_max"])
        ratio = (new - old).exp()
        clamped = ratio.clamp(1.0 - self.cfg["ratio_clip_min"], 1.0 + self.cfg["ratio_clip_max"])
        mask = timestep_mask * sample_mask[:, None]
        loss = masked_mean(torch.maximum(-advantages * ratio, -advantages * clamped), mask)
        return loss, {"policy_loss": loss.detach(), "mean_ratio": masked_mean(ratio, mask).detach()}


def own_chunk(worker: Any, chunk: Names, weight: float) -> tuple[Tensor, Names]:
    """The host's lines: every step with a graph."""
    embeds = {name: value for name, value in chunk.items() if "embeds" in name}
    found = []
    for step in range(chunk["generation_logprobs"].shape[1]):
        now, after = chunk["latents"][:, step], chunk["latents"][:, step + 1]
        told = worker.scheduler.timesteps[step].expand(len(now))
        given: Names = {"latents": now, "timestep_value": told, "prev_sample": after} | embeds
        found.append(worker.adapter._denoise_step(**given, stochastic=True, generator=None, return_mean_std=True)[1])
    old = chunk["generation_logprobs"]
    loss, metrics = worker._loss_fn(
        torch.stack(found, 1), old, chunk["advantages"], chunk["timestep_mask"], chunk["sample_mask"]
    )
    (loss * weight).backward()
    return loss, metrics


def nemo_train(chunk_update: Any, dtype: torch.dtype, steps_per_rollout: int, rollouts: int, **given: Any) -> Names:
    """The host's names after rollouts of 8 samples, trained in chunks of 2; by its own lines if None."""
    names = common(dtype)
    sigmas = qwen_image_schedule(SAMPLED, 256)
    scheduler = SimpleNamespace(sigmas=sigmas, timesteps=sigmas[:-1] * 1000)
    settings: Names = {"ratio_clip_min": 5e-4, "ratio_clip_max": 2e-3, "adv_clip_max": 1.0, "beta": 0.0}
    loss_fn = Loss(settings | {"aggregate_logprobs_per_sample": False} | given)
    adapter, algo = Adapter(names["transformer"], scheduler), {"sde_type": "sde", "noise_level": KERNEL.eta}
    worker = SimpleNamespace(
        config={"algo": algo}, scheduler=scheduler, adapter=adapter, transformer=names["transformer"], _loss_fn=loss_fn
    )
    names["metrics"] = []
    for seed in range(rollouts):
        data: Names = {"advantages": draw(seed, 8, dtype=dtype)[:, None].expand(-1, SAMPLED - 1)}
        data["sample_mask"] = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=dtype)
        for number, kind in enumerate(("", "negative_")):
            data[f"{kind}prompt_embeds"] = draw(seed + 10 * number, 8, 2, 3, dtype=dtype)
            data[f"{kind}prompt_embeds_mask"] = draw(seed + 20 * number, 8, 2, dtype=dtype)
        start = torch.randint(0, 5, (8, 1), generator=torch.Generator().manual_seed(seed))
        mask = torch.zeros(8, SAMPLED - 1, dtype=torch.bool).scatter_(1, start + torch.arange(WINDOW), True)
        stored = sample_steps(
            lambda z, s, embeds=data: adapter.velocity(z, s * 1000, embeds),  # type: ignore[misc]
            sigmas,
            KERNEL,
            seed,
            8,
            dtype,
            mask,
        )
        data["latents"] = torch.cat([stored["latents"], stored["next_latents"][:, -1:]], 1)
        data |= {"generation_logprobs": stored["log_probs"], "timestep_mask": mask.to(dtype)}
        size = 8 // steps_per_rollout
        for first in range(0, 8, size):
            names["optimizer"].zero_grad()
            for start_of in range(first, first + size, 2):
                chunk = {name: value[start_of : start_of + 2] for name, value in data.items()}
                loss, metrics = (chunk_update or own_chunk)(worker, chunk, 2 / size)
                names["metrics"].append(
                    {name: float(value) for name, value in metrics.items()} | {"loss": float(loss.detach())}
                )
            names["optimizer"].step()
    return names
