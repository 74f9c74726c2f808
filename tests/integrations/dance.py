"""DanceGRPO and MixGRPO: a sample at a time, plain backward, an optimizer step every few samples."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from jagg_core.schedule import dance_schedule
from jagg_core.transitions import DanceSDE, FlowSDE, Transition
from tests.integrations.network import Inner, Names, common, draw, sample_steps, surrogate, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step


def dance_names(dtype: torch.dtype, steps_per_rollout: int) -> Names:
    args = SimpleNamespace(eta=0.3, clip_range=1e-2, adv_clip_max=5.0, timestep_fraction=0.6, sampling_steps=8)
    args.gradient_accumulation_steps = 4 // steps_per_rollout
    sigma_schedule = dance_schedule(args.sampling_steps, 3.0, precision=torch.float32).float()
    return common(dtype) | {"args": args, "sigma_schedule": sigma_schedule, "max_grad_norm": 1.0, "kernel": "dance"}


def mix_names(dtype: torch.dtype, steps_per_rollout: int) -> Names:
    names = dance_names(dtype, steps_per_rollout)
    names["args"].eta = 0.7
    return names | {"kernel": "flow", "window_starts": [0, 2, 1, 3]}


def dance_velocity(names: Names, latents: Tensor, timesteps: Tensor, rows: slice) -> Tensor:
    n = SimpleNamespace(**names)
    found: Tensor = n.transformer(
        hidden_states=latents,
        encoder_hidden_states=n.encoder_hidden_states[rows],
        timestep=timesteps / 1000,
        guidance=torch.full((1,), 3.5, dtype=n.dtype),
        pooled_projections=n.pooled_prompt_embeds[rows],
        return_dict=False,
    )[0]
    return found


def dance_log_prob(names: Names, latents: Tensor, after: Tensor, v: Tensor, index: Tensor) -> Tensor:
    """DanceGRPO's, whose normalising term is never added; MixGRPO's has it."""
    schedule, eta = names["sigma_schedule"].double(), names["args"].eta
    kernel: Transition = DanceSDE(eta) if names["kernel"] == "dance" else FlowSDE(eta)
    mean, scale = kernel_step(kernel, latents, v, schedule[index], schedule[index + 1])
    if names["kernel"] == "flow":
        return kernel_log_prob(kernel, after, mean, scale)
    return (-((after - mean) ** 2) / (2 * scale**2)).flatten(1).mean(1)


def dance_epoch(names: Names, inner: Inner, seed: int) -> None:
    args, schedule, dtype = names["args"], names["sigma_schedule"], names["dtype"]
    batch, trainable = 4, args.sampling_steps - 1
    names["encoder_hidden_states"], names["pooled_prompt_embeds"] = text_of(seed, batch, dtype)
    ids = {"text_ids": torch.zeros(batch, 3), "image_ids": torch.zeros(batch, 6, 3)}
    mixed = names["kernel"] == "flow"
    start = names["window_starts"][seed % 4] if mixed else 0
    window = range(start, start + 4) if mixed else range(trainable)
    sde = torch.tensor([[step in window for step in range(trainable)]] * batch)
    kernel: Transition = FlowSDE(args.eta) if mixed else DanceSDE(args.eta)

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        return dance_velocity(names, latents, (sigma.float() * 1000).long(), slice(None))

    samples = sample_steps(velocity, schedule.double(), kernel, seed, batch, dtype, sde)
    for step in range(trainable):
        z, after, v = (samples[key][:, step] for key in ("latents", "next_latents", "velocities"))
        samples["log_probs"][:, step] = dance_log_prob(names, z, after, v, torch.tensor([step]))
    samples["timesteps"] = (schedule[:trainable] * 1000).long().expand(batch, -1)
    samples["advantages"] = draw(seed + 7, batch, dtype=dtype)
    samples["encoder_hidden_states"] = names["encoder_hidden_states"]
    samples["pooled_prompt_embeds"] = names["pooled_prompt_embeds"]
    samples |= ids
    if mixed:
        names["train_timesteps"] = list(window)
    else:
        generator = torch.Generator().manual_seed(seed)
        perms = torch.stack([torch.randperm(trainable, generator=generator) for _ in range(batch)])
        for key in ("timesteps", "latents", "next_latents", "log_probs", "velocities"):
            samples[key] = samples[key][torch.arange(batch)[:, None], perms]
        names |= {"perms": perms, "train_timesteps": int(trainable * args.timestep_fraction)}
    batched = {key: value.unsqueeze(1) for key, value in samples.items()}
    names["samples_batched_list"] = [dict(zip(batched, x, strict=True)) for x in zip(*batched.values(), strict=True)]
    names["after_rollout"](names)
    for i, sample in enumerate(names["samples_batched_list"]):
        names |= {"i": i, "sample": sample}
        inner(names)
        if (i + 1) % args.gradient_accumulation_steps == 0:
            nn.utils.clip_grad_norm_(names["transformer"].parameters(), names["max_grad_norm"])
            names["optimizer"].step()
            names["optimizer"].zero_grad()


def dance_own(names: Names) -> None:
    n = SimpleNamespace(**names)
    mixed = n.kernel == "flow"
    places = n.train_timesteps if mixed else range(n.train_timesteps)
    for place in places:
        z, after = n.sample["latents"][:, place], n.sample["next_latents"][:, place]
        v = dance_velocity(names, z, n.sample["timesteps"][:, place], slice(n.i, n.i + 1))
        index = torch.tensor([place]) if mixed else n.perms[n.i][place : place + 1]
        log_prob = dance_log_prob(names, z, after, v, index)
        old = n.sample["log_probs"][:, place]
        loss = surrogate(log_prob, old, n.sample["advantages"], n.args.clip_range, n.args.adv_clip_max)
        (loss / (n.args.gradient_accumulation_steps * len(places))).backward()
