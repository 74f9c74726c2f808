"""DanceGRPO and MixGRPO: a sample at a time, plain backward, an optimizer step every few samples.

Order of calls and formulas are those of XueZeyue/DanceGRPO at 15cc71d (`run_sample_step`, `flux_step`,
`grpo_one_step` and `train_one_step` of train_grpo_flux.py) and of Tencent-Hunyuan/MixGRPO at e5cdd6a (the same names,
`flow_grpo_step` and `dance_grpo_step` of sampling_utils.py), in other words: samples are drawn one by one in eval mode
and trained in train mode; the network is told ``int(sigma * 1000) / 1000``; DanceGRPO's log-probability has its
normalising term; MixGRPO's has it under Flow-SDE and lacks it under its Dance step; MixGRPO adds
``kl_coeff (new - old)^2 / 2`` and logs loss, KL and clip share apart. A plan's edits of the rollout (velocities kept
in fp32, a forward without a next latent) stand here as the pages give them.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from jagg_core.schedule import time_shift
from jagg_core.transitions import DanceSDE, FlowSDE, Transition
from tests.integrations.network import SHAPE, Inner, Names, common, draw, surrogate, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step

BATCH = 4
WINDOW_STARTS = (0, 2, 1, 3)
"""Of MixGRPO's window of 4 among 7 trainable steps, by epoch."""


class Collectives:
    """`torch.distributed` of a single process."""

    ReduceOp = SimpleNamespace(AVG="avg")

    @staticmethod
    def all_reduce(tensor: Tensor, op: str) -> None:
        assert isinstance(tensor, Tensor) and op == "avg"


def dance_names(dtype: torch.dtype, steps_per_rollout: int) -> Names:
    args = SimpleNamespace(eta=0.3, clip_range=1e-2, adv_clip_max=5.0, timestep_fraction=0.6, sampling_steps=8)
    args.gradient_accumulation_steps = BATCH // steps_per_rollout
    names = common(dtype) | {"args": args, "max_grad_norm": 1.0, "kernel": "dance"}
    names |= {"dist": Collectives, "device": torch.device("cpu"), "rollout_velocities": []}
    names["sigma_schedule"] = time_shift(torch.linspace(1, 0, args.sampling_steps + 1), 3.0)
    names["logged"] = dict.fromkeys(("total_loss", "policy_total_loss", "kl_total_loss", "total_clip_frac"), 0.0)
    names["grpo_one_step"] = grpo_one_step
    return names


def mix_names(dtype: torch.dtype, steps_per_rollout: int, flow_grpo_sampling: bool = True) -> Names:
    names = dance_names(dtype, steps_per_rollout)
    given = {"eta": 0.7, "kl_coeff": 0.0, "training_strategy": "part", "dpm_apply_strategy": "post"}
    names["args"].__dict__.update(given, flow_grpo_sampling=flow_grpo_sampling)
    return names | {"kernel": "mix"}


def forward(
    latents: Tensor,
    text: Tensor,
    pooled: Tensor,
    text_ids: Tensor,
    image_ids: Tensor,
    transformer: nn.Module,
    t: Tensor,
) -> Tensor:
    """What both hosts call in rollout and update."""
    found: Tensor = transformer(
        hidden_states=latents,
        encoder_hidden_states=text,
        timestep=t / 1000,
        guidance=torch.tensor([3.5], dtype=text.dtype),
        txt_ids=text_ids.repeat(text.shape[1], 1),
        pooled_projections=pooled,
        img_ids=image_ids.squeeze(0),
        joint_attention_kwargs=None,
        return_dict=False,
    )[0]
    return found


def step_log_prob(args: SimpleNamespace, z: Tensor, v: Tensor, after: Tensor, i: Tensor, schedule: Tensor) -> Tensor:
    """Mean log-probability ``[B]`` of ``after``."""
    kernel, mixed = kernel_of(args)
    mean, scale = kernel_step(kernel, z, v, schedule.double()[i], schedule.double()[i + 1])
    if mixed and isinstance(kernel, DanceSDE):  # the constants stand in an expression of their own, which is dropped
        return (-((after - mean) ** 2) / (2 * scale**2)).flatten(1).mean(1)
    return kernel_log_prob(kernel, after, mean, scale)


def kernel_of(args: SimpleNamespace) -> tuple[Transition, bool]:
    """The kernel, and whether the host is MixGRPO."""
    mixed = hasattr(args, "flow_grpo_sampling")
    return (FlowSDE if mixed and args.flow_grpo_sampling else DanceSDE)(args.eta), mixed


def grpo_one_step(
    args: SimpleNamespace,
    latents: Tensor,
    pre_latents: Tensor | None,
    encoder_hidden_states: Tensor,
    pooled_prompt_embeds: Tensor,
    text_ids: Tensor,
    image_ids: Tensor,
    transformer: nn.Module,
    timesteps: Tensor,
    i: Tensor,
    sigma_schedule: Tensor,
) -> Tensor:
    """Log-probability of ``pre_latents``, the next ones; without them the velocity."""
    assert timesteps.dtype == torch.long
    transformer.train()
    text = (encoder_hidden_states, pooled_prompt_embeds)
    pred = forward(latents, *text, text_ids, image_ids, transformer, timesteps)
    if pre_latents is None:
        return pred
    return step_log_prob(args, latents, pred.to(latents.dtype), pre_latents, i, sigma_schedule)


@torch.no_grad()
def run_sample_step(names: Names, row: int, seed: int) -> tuple[Tensor, Tensor]:
    """Latents ``[1, N + 1, *D]`` and log-probabilities ``[1, N]`` of one sample."""
    args, schedule, transformer = names["args"], names["sigma_schedule"], names["transformer"]
    kernel, mixed = kernel_of(args)
    z = draw(seed, 1, *SHAPE, dtype=names["dtype"])
    latents, log_probs = [z], []
    transformer.eval()
    text = (names["encoder_hidden_states"][[row]], names["pooled_prompt_embeds"][[row]])
    for i in range(args.sampling_steps):
        t = torch.full([1], int(schedule[i] * 1000), dtype=torch.long)
        pred = forward(z, *text, torch.zeros(1, 3), torch.zeros(6, 3), transformer, t).to(z.dtype)
        names["rollout_velocities"].append(pred)
        sigma, below = schedule[i].double(), schedule[i + 1].double()
        mean, scale = kernel_step(kernel, z, pred, sigma, below)
        if mixed and i not in names["train_timesteps"]:
            after = z + (below - sigma).to(z.dtype) * pred
        else:
            after = mean + scale * draw(1000 * seed + 10 * row + i, 1, *SHAPE, dtype=z.dtype)
        log_probs.append(step_log_prob(args, z, pred, after, torch.tensor([i]), schedule))
        latents.append(after)
        z = after
    return torch.stack(latents, 1), torch.stack(log_probs, 1)


def dance_epoch(names: Names, inner: Inner, seed: int) -> None:
    """`train_one_step`, with ``inner`` in the place of its loop over timesteps."""
    args, schedule, mixed = names["args"], names["sigma_schedule"], names["kernel"] == "mix"
    names["encoder_hidden_states"], names["pooled_prompt_embeds"] = text_of(seed, BATCH, names["dtype"])
    if mixed:
        names["train_timesteps"] = list(range(WINDOW_STARTS[seed % 4], WINDOW_STARTS[seed % 4] + 4))
    rollouts = [run_sample_step(names, row, seed) for row in range(BATCH)]
    all_latents, all_log_probs = (torch.cat(x) for x in zip(*rollouts, strict=True))
    timesteps = [int(sigma * 1000) for sigma in schedule][: args.sampling_steps]
    samples = {
        "timesteps": torch.tensor([timesteps] * BATCH)[:, :-1],
        "latents": all_latents[:, :-1][:, :-1],
        "next_latents": all_latents[:, 1:][:, :-1],
        "log_probs": all_log_probs[:, :-1],
        "image_ids": torch.zeros(BATCH, 6, 3),
        "text_ids": torch.zeros(BATCH, 3),
        "encoder_hidden_states": names["encoder_hidden_states"],
        "pooled_prompt_embeds": names["pooled_prompt_embeds"],
        "advantages": draw(seed + 7, BATCH, dtype=names["dtype"]),
    }
    names |= {"samples": samples, "batch_size": BATCH}
    names["after_rollout"](names)
    if not mixed:
        generator = torch.Generator().manual_seed(seed)
        trainable = samples["timesteps"].shape[1]
        perms = torch.stack([torch.randperm(trainable, generator=generator) for _ in range(BATCH)])
        for key in ("timesteps", "latents", "next_latents", "log_probs", "velocities"):
            if key in samples:
                samples[key] = samples[key][torch.arange(BATCH)[:, None], perms]
        names |= {"perms": perms, "train_timesteps": int(trainable * args.timestep_fraction)}
    names["rollout_velocities"].clear()
    batched = {key: value.unsqueeze(1) for key, value in samples.items()}
    names |= names["logged"]
    for i, values in enumerate(zip(*batched.values(), strict=True)):
        names |= {"i": i, "sample": dict(zip(batched, values, strict=True))}
        inner(names)
        if (i + 1) % args.gradient_accumulation_steps == 0:
            nn.utils.clip_grad_norm_(names["transformer"].parameters(), names["max_grad_norm"])
            names["optimizer"].step()
            names["optimizer"].zero_grad()
        assert names["ratio"].shape[0] == 1 and names["loss"].ndim == 0, "the lines after the loop print them"
    names["logged"] = {key: names[key] for key in names["logged"]}


def dance_own(names: Names) -> None:
    """The loop over timesteps."""
    n = SimpleNamespace(**names)
    mixed = n.kernel == "mix"
    places = n.train_timesteps if mixed else range(n.train_timesteps)
    share = n.args.gradient_accumulation_steps * len(places)
    for place in places:
        new = n.grpo_one_step(
            n.args,
            n.sample["latents"][:, place],
            n.sample["next_latents"][:, place],
            n.sample["encoder_hidden_states"],
            n.sample["pooled_prompt_embeds"],
            n.sample["text_ids"],
            n.sample["image_ids"],
            n.transformer,
            n.sample["timesteps"][:, place],
            torch.tensor([place]) if mixed else n.perms[n.i][place : place + 1],
            n.sigma_schedule,
        )
        old = n.sample["log_probs"][:, place]
        policy_loss = surrogate(new, old, n.sample["advantages"], n.args.clip_range, n.args.adv_clip_max) / share
        kl_loss = 0.5 * torch.mean((new - old) ** 2) / share
        loss = policy_loss + getattr(n.args, "kl_coeff", 0.0) * kl_loss
        loss.backward()
        ratio = torch.exp(new - old)
        clip_frac = torch.mean((torch.abs(ratio - 1.0) > n.args.clip_range).float())
        names |= {"ratio": ratio, "loss": loss}
        figures = {"total_loss": loss, "policy_total_loss": policy_loss, "kl_total_loss": kl_loss}
        for key, value in (figures | {"total_clip_frac": clip_frac}).items():
            names[key] += value.item()
