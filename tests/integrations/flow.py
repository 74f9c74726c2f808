"""flow_grpo: Accelerate, a context of ``accumulate()`` for every trained step of every micro-batch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import FlowSDE
from tests.integrations.network import Inner, Names, common, draw, sample_steps, surrogate, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step


def flow_names(dtype: torch.dtype, steps_per_rollout: int, *, flux: bool = False, beta: float = 0.0) -> Names:
    config = SimpleNamespace(
        sample=SimpleNamespace(num_steps=8, noise_level=0.7, guidance_scale=3.5 if flux else 4.5),
        train=SimpleNamespace(beta=beta, clip_range=1e-2, adv_clip_max=5.0, max_grad_norm=1.0, timestep_fraction=0.99),
    )
    config.train.gradient_accumulation_steps = 4 // steps_per_rollout
    num_train_timesteps = int(config.sample.num_steps * config.train.timestep_fraction)
    names = common(dtype, config.train.gradient_accumulation_steps * num_train_timesteps, 1 if flux else 1000)
    scheduler = SimpleNamespace(sigmas=sd3_schedule(config.sample.num_steps))
    negative, negative_pooled = text_of(99, 1, dtype)
    return names | {
        "config": config,
        "num_train_timesteps": num_train_timesteps,
        "pipeline": SimpleNamespace(transformer=names["transformer"], scheduler=scheduler),
        "train_neg_prompt_embeds": negative.repeat(2, 1, 1),
        "train_neg_pooled_prompt_embeds": negative_pooled.repeat(2, 1),
        "flux": flux,
    }


def flow_velocity(names: Names, sample: Names, latents: Tensor, timestep: Tensor) -> Tensor:
    n = SimpleNamespace(**names)
    if n.flux:
        guidance = torch.tensor([n.config.sample.guidance_scale], dtype=n.dtype).expand(len(latents))
        found: Tensor = n.transformer(
            hidden_states=latents,
            timestep=timestep / 1000,
            guidance=guidance,
            pooled_projections=sample["pooled_prompt_embeds"],
            encoder_hidden_states=sample["prompt_embeds"],
            return_dict=False,
        )[0]
        return found
    uncond, text = n.transformer(
        hidden_states=torch.cat([latents] * 2),
        timestep=torch.cat([timestep] * 2),
        encoder_hidden_states=torch.cat([n.train_neg_prompt_embeds[: len(latents)], sample["prompt_embeds"]]),
        pooled_projections=torch.cat(
            [n.train_neg_pooled_prompt_embeds[: len(latents)], sample["pooled_prompt_embeds"]]
        ),
        return_dict=False,
    )[0].chunk(2)
    guided: Tensor = uncond + n.config.sample.guidance_scale * (text - uncond)
    return guided


def flow_epoch(names: Names, inner: Inner, seed: int) -> None:
    n = SimpleNamespace(**names)
    schedule, kernel = n.pipeline.scheduler.sigmas, FlowSDE(n.config.sample.noise_level)
    batches = []
    for number in range(4):
        embeds, pooled = text_of(seed * 10 + number, 2, n.dtype)
        sample = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

        def velocity(latents: Tensor, sigma: Tensor, sample: Names = sample) -> Tensor:
            return flow_velocity(names, sample, latents, sigma * 1000)

        sample |= sample_steps(velocity, schedule, kernel, seed * 10 + number, 2, n.dtype)
        sample["timesteps"] = (schedule[:-2] * 1000).to(n.dtype).expand(2, -1)
        sample["advantages"] = draw(seed * 10 + number, 2, 1, dtype=n.dtype).expand(2, n.num_train_timesteps)
        batches.append(sample)
    samples = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    perm = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    names["samples"] = samples
    rebatched = {key: value[perm].reshape(4, 2, *value.shape[1:]) for key, value in samples.items()}
    names["samples_batched"] = [dict(zip(rebatched, x, strict=True)) for x in zip(*rebatched.values(), strict=True)]
    names["after_rollout"](names)
    for sample in names["samples_batched"]:
        names["sample"] = sample
        inner(names)


def flow_own(names: Names) -> None:
    n = SimpleNamespace(**names)
    schedule, kernel, sample = n.pipeline.scheduler.sigmas, FlowSDE(n.config.sample.noise_level), n.sample
    for j in range(n.num_train_timesteps):
        with n.accelerator.accumulate(n.transformer):
            z, after = sample["latents"][:, j], sample["next_latents"][:, j]
            v = flow_velocity(names, sample, z, sample["timesteps"][:, j])
            mean, scale = kernel_step(kernel, z, v, schedule[j], schedule[j + 1])
            log_prob = kernel_log_prob(kernel, after, mean, scale)
            given, advantages = n.config.train, sample["advantages"][:, j]
            loss = surrogate(log_prob, sample["log_probs"][:, j], advantages, given.clip_range, given.adv_clip_max)
            if given.beta > 0:
                with torch.no_grad(), n.accelerator.unwrap_model(n.transformer).disable_adapter():
                    v_ref = flow_velocity(names, sample, z, sample["timesteps"][:, j])
                mean_ref, _ = kernel_step(kernel, z, v_ref, schedule[j], schedule[j + 1])
                std = scale / torch.sqrt(schedule[j] - schedule[j + 1])  # its std_dev_t has no sqrt(-dt)
                loss = loss + given.beta * (((mean - mean_ref) ** 2).flatten(1).mean(1) / (2 * std**2)).mean()
            n.accelerator.backward(loss)
            if n.accelerator.sync_gradients:
                n.accelerator.clip_grad_norm_(n.transformer.parameters(), given.max_grad_norm)
            n.optimizer.step()
            n.optimizer.zero_grad()
