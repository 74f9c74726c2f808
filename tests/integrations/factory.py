"""Flow-Factory: a trainer that is subclassed; Accelerate, the optimizer stepped where gradients synchronise.

Order of calls and formulas are those of commit a0b2bc5 (`GRPOTrainer.sample` and `.optimize`, `SD3_5Adapter.inference`
and `.forward`, `FlowMatchEulerDiscreteSDEScheduler.step`, `BaseSample.stack`, `reduce_loss_info`), in other words: what
a rollout keeps lies close together, and index maps give its places; a batch is stacked where it is needed; the network
is told a timestep of 0..1000 in the dtype of the latents; limits are pairs of offsets; a ``v-based`` KL is a mean
squared difference of velocities, an ``x-based`` one of means, neither divided; figures are means, or four statistics.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import CPS, DanceSDE, FlowSDE
from tests.integrations.network import Names, common, draw, sample_steps, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step

KERNELS = {"Flow-SDE": FlowSDE, "Dance-SDE": DanceSDE, "CPS": CPS}
TRAINED = torch.tensor([5, 1, 4, 2])
"""Steps with noise, as they are drawn: in no order."""


class Arguments:
    """Settings that unpack as a mapping does, unknown ones among ``extra_kwargs``."""

    def __init__(self, **settings: Any) -> None:
        self.extra_kwargs: Names = {}
        vars(self).update(settings)

    def keys(self) -> list[str]:
        return [*(key for key in vars(self) if key != "extra_kwargs"), *self.extra_kwargs]

    def __getitem__(self, key: str) -> Any:
        return vars(self).get(key, self.extra_kwargs.get(key))


class Sample:
    shared = ("latent_index_map", "log_prob_index_map")

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to(self, device: torch.device) -> Sample:
        return self

    @classmethod
    def stack(cls, samples: list[Sample]) -> Names:
        first = samples[0].fields
        return {
            key: value if key in cls.shared else torch.stack([sample.fields[key] for sample in samples])
            for key, value in first.items()
        }


class Adapter:
    """One forward for every model, which gives what it is asked for."""

    def __init__(self, names: Names, dynamics_type: str) -> None:
        self.transformer, self.accelerator = names["transformer"], names["accelerator"]
        self.scheduler = SimpleNamespace(sigmas=sd3_schedule(8), train_timesteps=TRAINED, noise_level=0.7)
        self.scheduler.dynamics_type = dynamics_type
        self.trainable_components = [self.transformer]

    def get_trainable_parameters(self) -> list[Tensor]:
        return [p for p in self.transformer.parameters() if p.requires_grad]

    def train(self) -> None:
        self.transformer.train()

    @contextmanager
    def use_ref_parameters(self) -> Iterator[None]:
        with self.accelerator.unwrap_model(self.transformer).disable_adapter():
            yield

    def forward(
        self,
        t: Tensor,
        latents: Tensor,
        prompt_embeds: Tensor,
        pooled_prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
        guidance_scale: float = 7.5,
        t_next: Tensor | None = None,
        next_latents: Tensor | None = None,
        noise_level: float | None = None,
        compute_log_prob: bool = True,
        return_kwargs: list[str] = ["log_prob"],  # noqa: B006 - as there
    ) -> SimpleNamespace:
        assert t_next is not None and noise_level is not None
        assert negative_prompt_embeds is not None and negative_pooled_prompt_embeds is not None
        found = self.transformer(
            hidden_states=torch.cat([latents] * 2),
            timestep=t.expand(len(latents)).to(latents.dtype).repeat(2),
            encoder_hidden_states=torch.cat([negative_prompt_embeds, prompt_embeds]),
            pooled_projections=torch.cat([negative_pooled_prompt_embeds, pooled_prompt_embeds]),
        )[0]
        uncond, text = found.chunk(2)
        v = uncond + guidance_scale * (text - uncond)
        made = {"noise_pred": v}
        if return_kwargs != ["noise_pred"]:
            kernel = KERNELS[self.scheduler.dynamics_type](noise_level)
            sigma, after = (x.to(latents.dtype) / 1000 for x in (t, t_next))
            made["next_latents_mean"], scale = kernel_step(kernel, latents, v, sigma, after)
            if compute_log_prob:
                assert next_latents is not None
                made["log_prob"] = kernel_log_prob(kernel, next_latents, made["next_latents_mean"], scale)
        return SimpleNamespace(**{key: made[key] for key in return_kwargs})


class GRPOTrainer:
    def __init__(self, names: Names, training_args: Arguments, dynamics_type: str) -> None:
        self.adapter, self.training_args = Adapter(names, dynamics_type), training_args
        self.accelerator, self.optimizer = names["accelerator"], names["optimizer"]
        self.autocast, self.epoch, self.step = nullcontext, 0, 0
        self.log_data = lambda data, step: names["metrics"].append(
            {key: float(value) for key, value in data.items()} | {"step": step}
        )
        self.dtype = names["dtype"]

    @property
    def enable_kl_loss(self) -> bool:
        return bool(self.training_args.kl_beta > 0)

    def sample(self) -> list[Sample]:
        scheduler, given = self.adapter.scheduler, self.training_args
        chosen, kept = TRAINED.tolist(), sorted({*TRAINED.tolist(), *(TRAINED + 1).tolist()})
        kernel = KERNELS[scheduler.dynamics_type](scheduler.noise_level)
        callbacks = given.extra_kwargs.get("extra_call_back_kwargs", [])
        samples = []
        for number in range(4):
            text = {}
            for name, seed in (("", self.epoch * 10 + number), ("negative_", 99)):
                text[f"{name}prompt_embeds"], text[f"{name}pooled_prompt_embeds"] = text_of(seed, 2, self.dtype)

            def velocity(latents: Tensor, sigma: Tensor, text: Names = text) -> Tensor:
                inputs = {"t": sigma * 1000, "t_next": sigma, "noise_level": 0.7, "latents": latents, **text}
                scale = given.guidance_scale
                found: Tensor = self.adapter.forward(
                    **inputs, guidance_scale=scale, return_kwargs=["noise_pred"]
                ).noise_pred
                return found

            sde = torch.tensor([[step in chosen for step in range(7)]] * 2)
            seed = self.epoch * 10 + number
            stored = sample_steps(velocity, scheduler.sigmas, kernel, seed, 2, self.dtype, sde)
            every = torch.cat([stored["latents"], stored["next_latents"][:, -1:]], 1)
            for row in range(2):
                fields = {key: value[row] for key, value in text.items()}
                fields["timesteps"] = scheduler.sigmas[:-1] * 1000
                fields["all_latents"], fields["latent_index_map"] = every[row, kept], places(kept)
                fields["log_probs"] = stored["log_probs"][row, sorted(chosen)]
                fields["log_prob_index_map"] = places(sorted(chosen))
                fields["callback_index_map"] = places(kept)
                padded = torch.cat([stored["velocities"][row], stored["velocities"][row, -1:]])
                fields |= {key: padded[kept] for key in callbacks if key == "noise_pred"}
                fields["advantage"] = draw(seed, 2, dtype=self.dtype)[row]
                samples.append(Sample(**fields))
        return samples

    def optimize(self, samples: list[Sample]) -> None:
        given, adapter, scheduler = self.training_args, self.adapter, self.adapter.scheduler
        generator = create_generator(given.seed, self.epoch, 0)
        order = torch.randperm(len(samples), generator=generator).tolist()
        info: dict[str, list[Tensor]] = defaultdict(list)
        for start in range(0, len(order), given.per_device_batch_size):
            batch = Sample.stack([samples[i] for i in order[start : start + given.per_device_batch_size]])
            latent_map, log_prob_map = batch["latent_index_map"], batch["log_prob_index_map"]
            for step in scheduler.train_timesteps:
                with self.accelerator.accumulate(*adapter.trainable_components):
                    inputs = {**given, **batch, "noise_level": scheduler.noise_level, "compute_log_prob": True}
                    inputs |= {"t": batch["timesteps"][:, step], "t_next": batch["timesteps"][:, step + 1]}
                    inputs["latents"] = batch["all_latents"][:, latent_map[step]]
                    inputs["next_latents"] = batch["all_latents"][:, latent_map[step + 1]]
                    inputs = filter_kwargs(adapter.forward, **inputs)
                    compared = "noise_pred" if given.kl_type == "v-based" else "next_latents_mean"
                    output = adapter.forward(**inputs, return_kwargs=["log_prob", compared])
                    old, (low, high) = batch["log_probs"][:, log_prob_map[step]], given.clip_range
                    advantage = torch.clamp(batch["advantage"], *given.adv_clip_range)
                    ratio = torch.exp(output.log_prob - old)
                    unclipped, clipped = -advantage * ratio, -advantage * torch.clamp(ratio, 1 + low, 1 + high)
                    loss = torch.maximum(unclipped, clipped).mean()
                    info["unclipped_loss"].append(unclipped.detach())
                    info["clipped_loss"].append(clipped.detach())
                    info["policy_loss"].append(loss.detach())
                    if self.enable_kl_loss:
                        with torch.no_grad(), adapter.use_ref_parameters():
                            reference = adapter.forward(
                                **inputs | {"compute_log_prob": False}, return_kwargs=[compared]
                            )
                        kl = ((getattr(output, compared) - getattr(reference, compared)) ** 2).mean()
                        loss = loss + given.kl_beta * kl
                        info["kl_div"].append(kl.detach())
                        info["kl_loss"].append(given.kl_beta * kl.detach())
                    info["ratio"].append(ratio.detach())
                    info["loss"].append(loss.detach())
                    info["clip_frac_high"].append((ratio > 1 + high).to(ratio).mean())
                    info["clip_frac_low"].append((ratio < 1 + low).to(ratio).mean())
                    info["clip_frac_total"].append(info["clip_frac_high"][-1] + info["clip_frac_low"][-1])
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(adapter.get_trainable_parameters(), given.max_grad_norm)
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                        figures = reduce_loss_info(self.accelerator, info) | {"grad_norm": norm}
                        self.log_data({f"train/{key}": value for key, value in figures.items()}, step=self.step)
                        self.step += 1
                        info = defaultdict(list)


def places(steps: list[int]) -> Tensor:
    """Where each step of a schedule is kept, -1 where it is not."""
    found = torch.full((9,), -1)
    found[steps] = torch.arange(len(steps))
    return found


def create_generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seeds) % 2**31)


def filter_kwargs(function: Callable[..., Any], **inputs: Any) -> Names:
    return {key: value for key, value in inputs.items() if key in inspect.signature(function).parameters}


def reduce_loss_info(accelerator: Any, info: dict[str, list[Tensor]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key, values in info.items():
        if values[0].ndim:
            every = torch.cat(values)
            for name in ("min", "max", "mean", "std"):
                figures[f"{key}_{name}"] = getattr(every.double(), name)().item()
        else:
            figures[key] = torch.stack(values).mean().item()
    return figures


def factory_modules() -> dict[str, ModuleType]:
    """What the page's block imports of Flow-Factory."""
    contents: dict[str, Names] = {
        "flow_factory": {},
        "flow_factory.samples": {"BaseSample": Sample},
        "flow_factory.trainers": {},
        "flow_factory.trainers.grpo": {"GRPOTrainer": GRPOTrainer},
        "flow_factory.utils": {},
        "flow_factory.utils.base": {"create_generator": create_generator, "filter_kwargs": filter_kwargs},
        "flow_factory.utils.dist": {"reduce_loss_info": reduce_loss_info},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, content in contents.items():
        vars(modules[name]).update(content)
    return modules


def factory_train(
    trainer: type | None,
    dtype: torch.dtype,
    steps_per_rollout: int,
    rollouts: int,
    *,
    dynamics_type: str = "Flow-SDE",
    **settings: Any,
) -> Names:
    """The host's names after rollouts of 8 samples, trained in micro-batches of 2; by its own trainer if None."""
    names = common(dtype, 4 // steps_per_rollout * len(TRAINED), 1000)
    names["metrics"] = []
    given = {"clip_range": (-1e-3, 2e-3), "adv_clip_range": (-0.9, 5.0), "kl_beta": 0.0, "kl_type": "x-based"}
    given |= {"guidance_scale": 4.5, "per_device_batch_size": 2, "max_grad_norm": 1.0, "num_inner_epochs": 1, "seed": 0}
    made = (trainer or GRPOTrainer)(
        names=names, training_args=Arguments(**given | settings), dynamics_type=dynamics_type
    )
    for epoch in range(rollouts):
        made.epoch = epoch
        made.optimize(made.sample())
    return names
