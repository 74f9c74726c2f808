"""Flow-Factory: a trainer object with an adapter; Accelerate, the optimizer stepped where gradients synchronise."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import FlowSDE
from tests.integrations.network import Inner, Names, common, draw, sample_steps, surrogate, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step


class Adapter:
    """One forward for every model, which gives what it is asked for."""

    def __init__(self, names: Names) -> None:
        self.transformer = names["transformer"]
        self.scheduler = SimpleNamespace(sigmas=sd3_schedule(8), train_timesteps=[1, 2, 4, 5], noise_level=0.7)

    def forward(
        self, t: Tensor, latents: Tensor, prompt_embeds: Tensor, pooled_prompt_embeds: Tensor, return_kwargs: list[str]
    ) -> SimpleNamespace:
        assert return_kwargs == ["noise_pred"]
        (found,) = self.transformer(
            hidden_states=latents,
            timestep=t,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled_prompt_embeds,
        )
        return SimpleNamespace(noise_pred=found)


def factory_names(dtype: torch.dtype, steps_per_rollout: int) -> Names:
    accumulate = 4 // steps_per_rollout
    names = common(dtype, accumulate * 4, 1000)
    training_args = SimpleNamespace(clip_range=1e-2, adv_clip_max=5.0, max_grad_norm=1.0)
    trainer = SimpleNamespace(adapter=Adapter(names), training_args=training_args, autocast=names["autocast"])
    trainer.accelerator, trainer.optimizer = names["accelerator"], names["optimizer"]
    return names | {"self": trainer}


def factory_epoch(names: Names, inner: Inner, seed: int) -> None:
    adapter, dtype = names["self"].adapter, names["dtype"]
    schedule, chosen = adapter.scheduler.sigmas, adapter.scheduler.train_timesteps
    sde = torch.tensor([[step in chosen for step in range(7)]] * 2)
    names["batches"] = []
    for number in range(4):
        embeds, pooled = text_of(seed * 10 + number, 2, dtype)
        batch = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

        def velocity(latents: Tensor, sigma: Tensor, batch: Names = batch) -> Tensor:
            found: Tensor = adapter.forward(sigma * 1000, latents, **batch, return_kwargs=["noise_pred"]).noise_pred
            return found

        transition = FlowSDE(adapter.scheduler.noise_level)
        stored = sample_steps(velocity, schedule, transition, seed * 10 + number, 2, dtype, sde)
        advantage = draw(seed * 10 + number, 2, dtype=dtype)
        names["batches"].append(stored | batch | {"advantage": advantage})
    names["after_rollout"](names)
    for batch in names["batches"]:
        names["batch"] = batch
        inner(names)


def factory_own(names: Names) -> None:
    n, batch = names["self"], names["batch"]
    schedule, transition = n.adapter.scheduler.sigmas, FlowSDE(n.adapter.scheduler.noise_level)
    text = {key: batch[key] for key in ("prompt_embeds", "pooled_prompt_embeds")}
    for step in n.adapter.scheduler.train_timesteps:
        with n.accelerator.accumulate(n.adapter.transformer):
            z, after = batch["latents"][:, step], batch["next_latents"][:, step]
            told = (schedule[step] * 1000).to(z.dtype).expand(len(z))
            v = n.adapter.forward(told, z, **text, return_kwargs=["noise_pred"]).noise_pred
            mean, scale = kernel_step(transition, z, v, schedule[step], schedule[step + 1])
            log_prob = kernel_log_prob(transition, after, mean, scale)
            given = n.training_args
            old, advantage = batch["log_probs"][:, step], batch["advantage"]
            n.accelerator.backward(surrogate(log_prob, old, advantage, given.clip_range, given.adv_clip_max))
            if n.accelerator.sync_gradients:
                n.accelerator.clip_grad_norm_(n.adapter.transformer.parameters(), given.max_grad_norm)
                n.optimizer.step()
                n.optimizer.zero_grad()
