"""verl-omni: mini-batches of micro-batches, a window of its own for every sample, plain backward."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import CPS
from tests.integrations.network import Inner, Names, common, draw, sample_steps, surrogate, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step


def verl_names(dtype: torch.dtype, steps_per_rollout: int) -> Names:
    config = SimpleNamespace(noise_level=0.8, clip_ratio=1e-3, adv_clip_max=5.0, window=3, grad_clip=1.0)
    config.mini_batches, config.micro_batches = steps_per_rollout, 4 // steps_per_rollout
    return common(dtype) | {"config": config, "sigmas": sd3_schedule(8)}


def verl_velocity(names: Names, micro_batch: Names, latents: Tensor, sigma: Tensor) -> Tensor:
    found: Tensor = names["transformer"](
        hidden_states=latents,
        timestep=sigma,
        encoder_hidden_states=micro_batch["prompt_embeds"],
        pooled_projections=micro_batch["pooled_prompt_embeds"],
        return_dict=False,
    )[0]
    return found


def verl_epoch(names: Names, inner: Inner, seed: int) -> None:
    n = SimpleNamespace(**names)
    names["micro_batches"] = []
    for number in range(4):
        embeds, pooled = text_of(seed * 10 + number, 2, n.dtype)
        data = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "advantages": draw(seed + number, 2)}
        data["advantages"] = data["advantages"].to(n.dtype)

        def velocity(latents: Tensor, sigma: Tensor, data: Names = data) -> Tensor:
            return verl_velocity(names, data, latents, sigma)

        start = torch.randint(0, 5, (2, 1), generator=torch.Generator().manual_seed(seed * 10 + number))
        steps = start + torch.arange(n.config.window)
        sde = torch.zeros(2, 7, dtype=torch.bool).scatter_(1, steps, True)
        stored = sample_steps(velocity, n.sigmas, CPS(n.config.noise_level), seed * 10 + number, 2, n.dtype, sde)
        rows = torch.arange(2)[:, None]
        data |= {key: value[rows, steps] for key, value in stored.items()} | {"step_indices": steps}
        names["micro_batches"].append(data)
    names["after_rollout"](names)
    for place, micro_batch in enumerate(names["micro_batches"]):
        names["micro_batch"] = micro_batch
        inner(names)
        if (place + 1) % n.config.micro_batches == 0:
            nn.utils.clip_grad_norm_(n.transformer.parameters(), n.config.grad_clip)
            n.optimizer.step()
            n.optimizer.zero_grad()


def verl_own(names: Names) -> None:
    n = SimpleNamespace(**names)
    for place in range(n.config.window):
        data = n.micro_batch
        steps = data["step_indices"][:, place]
        z, after = data["latents"][:, place], data["next_latents"][:, place]
        v = verl_velocity(names, data, z, n.sigmas[steps].to(n.dtype))
        kernel = CPS(n.config.noise_level)
        mean, scale = kernel_step(kernel, z, v, n.sigmas[steps], n.sigmas[steps + 1])
        log_prob = kernel_log_prob(kernel, after, mean, scale)
        old, given = data["log_probs"][:, place], n.config
        loss = surrogate(log_prob, old, data["advantages"], given.clip_ratio, given.adv_clip_max)
        (loss / (given.micro_batches * given.window)).backward()
