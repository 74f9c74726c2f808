"""flow_grpo: Accelerate, a context of ``accumulate()`` for every trained step of every micro-batch.

Order of calls and formulas are those of commit 9745241 (`main` and `compute_log_prob` of train_sd3.py, train_flux.py
and train_sd3_fast.py, `sde_step_with_logprob` of sd3_sde_with_logprob.py), in other words: a step's place in the
schedule is looked up from its timestep, sample by sample; ``std`` has no ``sqrt(-dt)``, and the KL divides by it; the
KL is a mean over samples of means over elements; SD3 is told sigma * 1000, Flux sigma, with ids of zeros for its text
and those of the first sample for its image; a fast script draws its window in the pipeline, which returns its
timesteps.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import CPS, FlowSDE
from tests.integrations.network import Inner, Names, Transformer, common, draw, sample_steps, surrogate, text_of

STARTS = (1, 0, 3, 2)
"""First step of a fast script's window, by rollout batch."""


class Section(SimpleNamespace):
    """A part of the configuration: an ``ml_collections.ConfigDict`` as far as the script uses it."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


class FluxTransformer(Transformer):
    """It holds the ids against those that the host gives."""

    config = SimpleNamespace(guidance_embeds=True)

    def forward(self, *, txt_ids: Tensor, img_ids: Tensor, **inputs: Any) -> tuple[Tensor]:  # type: ignore[override]
        assert txt_ids.shape == (inputs["encoder_hidden_states"].shape[1], 3) and not txt_ids.any()
        assert torch.equal(img_ids, image_ids(img_ids.dtype))
        return super().forward(**inputs)


class Scheduler:
    """diffusers' flow-matching scheduler, as far as the host uses it."""

    def __init__(self, sigmas: Tensor) -> None:
        self.sigmas = sigmas
        self.timesteps = sigmas[:-1] * 1000

    def index_for_timestep(self, timestep: Tensor) -> int:
        return int((self.timesteps == timestep).nonzero().item())


def image_ids(dtype: torch.dtype) -> Tensor:
    return torch.arange(6).reshape(2, 3).to(dtype)


def flow_names(
    dtype: torch.dtype,
    steps_per_rollout: int,
    *,
    flux: bool = False,
    beta: float = 0.0,
    cfg: bool = True,
    window: int = 0,
    sde_type: str | None = None,
) -> Names:
    """``window``: trained steps of a fast script; 0: the whole schedule but its last step."""
    sample = Section(num_steps=8, noise_level=0.7, guidance_scale=3.5 if flux else 4.5, sde_window_size=window)
    if sde_type is not None:
        sample.sde_type = sde_type
    train = Section(beta=beta, clip_range=1e-2, adv_clip_max=5.0, max_grad_norm=1.0, timestep_fraction=0.99, cfg=cfg)
    train.gradient_accumulation_steps = 4 // steps_per_rollout
    config = Section(sample=sample, train=train, mixed_precision="no")
    num_train_timesteps = window or int(sample.num_steps * train.timestep_fraction)
    network = FluxTransformer(dtype) if flux else Transformer(dtype, 1000)
    names = common(dtype, train.gradient_accumulation_steps * num_train_timesteps, network=network)
    negative, negative_pooled = text_of(99, 1, dtype)
    return names | {
        "config": config,
        "num_train_timesteps": num_train_timesteps,
        "transformer_trainable_parameters": [p for p in network.parameters() if p.requires_grad],
        "pipeline": SimpleNamespace(transformer=network, scheduler=Scheduler(sd3_schedule(sample.num_steps))),
        "train_neg_prompt_embeds": negative.repeat(2, 1, 1),
        "train_neg_pooled_prompt_embeds": negative_pooled.repeat(2, 1),
        "flux": flux,
        "logged": [],
    }


def predicted(names: Names, sample: Names, latents: Tensor, timestep: Tensor) -> Tensor:
    n = SimpleNamespace(**names)
    inputs = {"return_dict": False, "hidden_states": latents, "timestep": timestep}
    inputs |= {"encoder_hidden_states": sample["prompt_embeds"], "pooled_projections": sample["pooled_prompt_embeds"]}
    if n.flux:
        inputs["timestep"] = timestep / 1000
        inputs["guidance"] = torch.tensor([n.config.sample.guidance_scale], dtype=n.dtype).expand(len(latents))
        inputs["txt_ids"] = torch.zeros(sample["prompt_embeds"].shape[1], 3, dtype=n.dtype)
        inputs["img_ids"] = sample["image_ids"][0]
    elif n.config.train.cfg:
        rows = slice(len(latents))
        inputs["hidden_states"], inputs["timestep"] = torch.cat([latents] * 2), torch.cat([timestep] * 2)
        for key, negative in (
            ("encoder_hidden_states", n.train_neg_prompt_embeds),
            ("pooled_projections", n.train_neg_pooled_prompt_embeds),
        ):
            inputs[key] = torch.cat([negative[rows], inputs[key]])
    found: Tensor = n.transformer(**inputs)[0]
    if n.flux or not n.config.train.cfg:
        return found
    uncond, text = found.chunk(2)
    return uncond + n.config.sample.guidance_scale * (text - uncond)


def flow_epoch(names: Names, inner: Inner, seed: int) -> None:
    n = SimpleNamespace(**names)
    scheduler, given = n.pipeline.scheduler, n.config.sample
    kernel = CPS(given.noise_level) if given.get("sde_type") == "cps" else FlowSDE(given.noise_level)
    batches = []
    for number in range(4):
        embeds, pooled = text_of(seed * 10 + number, 2, n.dtype)
        sample = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        sample["image_ids"] = image_ids(n.dtype).expand(2, 2, 3)

        def velocity(latents: Tensor, sigma: Tensor, sample: Names = sample) -> Tensor:
            return predicted(names, sample, latents, sigma * 1000)

        start = STARTS[number] if given.sde_window_size else 0
        taken = slice(start, start + n.num_train_timesteps)
        sde = torch.zeros(2, given.num_steps - 1, dtype=torch.bool)
        sde[:, taken] = True
        stored = sample_steps(velocity, scheduler.sigmas, kernel, seed * 10 + number, 2, n.dtype, sde)
        sample |= {key: value[:, taken] for key, value in stored.items()}
        sample["timesteps"] = scheduler.timesteps[taken].expand(2, -1)
        sample["advantages"] = draw(seed * 10 + number, 2, 1).expand(2, n.num_train_timesteps)
        batches.append(sample)
    samples = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    names["samples"] = samples
    names["after_rollout"](names)
    perm = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    rebatched = {key: value[perm].reshape(4, 2, *value.shape[1:]) for key, value in samples.items()}
    names["info"] = {}
    for sample in (dict(zip(rebatched, x, strict=True)) for x in zip(*rebatched.values(), strict=True)):
        names["sample"] = sample
        for key in ("approx_kl", "clipfrac", "clipfrac_gt_one", "clipfrac_lt_one", "policy_loss", "kl_loss", "loss"):
            names["info"].setdefault(key, [])
        inner(names)
        if n.accelerator.sync_gradients:
            names["logged"].append({key: torch.stack(values).mean() for key, values in names["info"].items() if values})
            names["info"] = {}


def sde_step(names: Names, sample: Names, j: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability ``[B]``, mean of the next latents, and ``std``, without ``sqrt(-dt)`` under both kernels."""
    given, scheduler = names["config"].sample, names["pipeline"].scheduler
    z, after = sample["latents"][:, j], sample["next_latents"][:, j]
    index = torch.tensor([scheduler.index_for_timestep(t) for t in sample["timesteps"][:, j]])
    sigma, sigma_prev = (scheduler.sigmas.to(z)[i].view(-1, 1, 1) for i in (index, index + 1))
    if given.get("sde_type") == "cps":
        std = sigma_prev * math.sin(given.noise_level * math.pi / 2)
        x0, x1 = z - sigma * v, z + v * (1 - sigma)
        mean = x0 * (1 - sigma_prev) + x1 * torch.sqrt(sigma_prev**2 - std**2)
        return -((after - mean) ** 2).mean((1, 2)), mean, std
    dt = sigma_prev - sigma
    below_one = torch.where(sigma == 1, scheduler.sigmas.to(z)[1], sigma)
    std = torch.sqrt(sigma / (1 - below_one)) * given.noise_level
    mean = z * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    scale = std * torch.sqrt(-dt)
    log_prob = -((after - mean) ** 2) / (2 * scale**2) - torch.log(scale) - math.log(2 * math.pi) / 2
    return log_prob.mean((1, 2)), mean, std


def flow_own(names: Names) -> None:
    n, sample, info = SimpleNamespace(**names), names["sample"], names["info"]
    given = n.config.train
    for j in range(n.num_train_timesteps):
        with n.accelerator.accumulate(n.transformer):
            z, timestep = sample["latents"][:, j], sample["timesteps"][:, j].to(n.dtype)
            log_prob, mean, std = sde_step(names, sample, j, predicted(names, sample, z, timestep))
            old, advantages = sample["log_probs"][:, j], sample["advantages"][:, j]
            loss = policy_loss = surrogate(log_prob, old, advantages, given.clip_range, given.adv_clip_max)
            if given.beta > 0:
                with torch.no_grad(), n.accelerator.unwrap_model(n.transformer).disable_adapter():
                    _, mean_ref, _ = sde_step(names, sample, j, predicted(names, sample, z, timestep))
                kl = (((mean - mean_ref) ** 2).mean((1, 2), keepdim=True) / (2 * std**2)).mean()
                loss = policy_loss + given.beta * kl
                info["kl_loss"].append(kl.detach())
            ratio = torch.exp(log_prob - old).detach()
            info["approx_kl"].append(torch.mean((log_prob - old).detach() ** 2) / 2)
            info["clipfrac"].append((torch.abs(ratio - 1) > given.clip_range).double().mean())
            info["clipfrac_gt_one"].append((ratio - 1 > given.clip_range).double().mean())
            info["clipfrac_lt_one"].append((1 - ratio > given.clip_range).double().mean())
            info["policy_loss"].append(policy_loss.detach())
            info["loss"].append(loss.detach())
            n.accelerator.backward(loss)
            if n.accelerator.sync_gradients:
                n.accelerator.clip_grad_norm_(n.transformer.parameters(), given.max_grad_norm)
            n.optimizer.step()
            n.optimizer.zero_grad()
