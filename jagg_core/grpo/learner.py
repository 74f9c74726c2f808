"""The trained weights, and all that steps them: sharding, master weights, AdamW, average, and the reference of a KL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from jagg_core.backbones import Backbone, load_backbone, read_options
from jagg_core.distributed import FixedParameters, on_any_rank, ranks
from jagg_core.grpo.communication import CollectiveClock
from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.deferred import DeferredGradients
from jagg_core.grpo.settings import ModelSettings
from jagg_core.grpo.weights import AveragedWeights, MasterWeights
from jagg_core.policy import VelocityPolicy
from jagg_core.sharding import shard
from jagg_core.trajectory import bits_version

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def precision(dtype: str) -> torch.dtype:
    """The torch dtype of a name in `jagg_core.grpo.settings.DTYPES`."""
    found: torch.dtype = getattr(torch, dtype)
    return found


class Learner:
    """A backbone under training.

    Attributes:
        backbone: loaded and, on several ranks, sharded.
        names: of the trained parameters.
        masters: what the optimizer steps on.
        average: of the weights; None without.
        deferred: gradients that wait for the optimizer step; None where every backward reduces its own.
        collectives: what times them.
        steps: optimizer steps so far.
        frozen_version: fingerprint of the weights that stay as they were loaded; None without any.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.settings = config.model
        self.optimizer_settings = config.optimizer
        self.backbone, self.frozen_version = _load(config.model, config.parallel.shards)
        trained = [(name, p) for name, p in self.backbone.transformer.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError(f"model: {self.backbone.name} has no parameter that requires a gradient")
        self.names = [name for name, _ in trained]
        self.all_parameters = list(self.backbone.transformer.parameters())
        self.masters = MasterWeights([p for _, p in trained])
        self.deferred = None
        if config.parallel.defer_gradient_sync and ranks() > 1:
            self.deferred = DeferredGradients(self.backbone.transformer, self.masters.tensors)
        self.collectives = CollectiveClock(self.backbone.device)
        self.collectives.watch(self.backbone.transformer)
        given = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters.tensors,
            lr=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.epsilon,
            weight_decay=given.weight_decay,
        )
        decay = config.model.ema_decay
        self.average = AveragedWeights(self.masters.tensors, decay) if decay else None
        self.steps = 0
        self._frozen: Backbone | None = None
        self._adapted = any("lora_" in name for name in self.names)
        if config.objective.kl_beta > 0 and not self._adapted:
            self._frozen, self.frozen_version = _load(config.model, config.parallel.shards, trained=False)
            self.collectives.watch(self._frozen.transformer)

    def policy(self, prompts: Sequence[str]) -> VelocityPolicy:
        """The policy for these prompts, one per sample."""
        made = self.backbone.policy(prompts, self.settings.guidance)
        return FixedParameters(made, self.all_parameters) if ranks() > 1 else made

    def reference(self, prompts: Sequence[str]) -> VelocityPolicy:
        """The policy as it was loaded: without its adapter, or a frozen copy."""
        if self._frozen is not None:
            return self._frozen.policy(prompts, self.settings.guidance)
        return WithoutAdapter(self.policy(prompts), self.backbone.transformer)

    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        given = self.optimizer_settings
        return given.learning_rate * min(1.0, (self.steps + 1) / (given.warmup + 1))

    def step(self) -> float | None:
        """Clip, step and average. Returns the norm of the gradient before clipping; None if it is not finite.

        Gradients that are not finite change nothing. They are forgotten either way.
        """
        gradients = [t.grad for t in self.masters.tensors if t.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if on_any_rank(not bool(torch.isfinite(norm)), norm.device):
            self.masters.clear_gradients()
            return None
        nn.utils.clip_grads_with_norm_(self.masters.tensors, self.optimizer_settings.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.steps += 1
        self.masters.publish()
        self.masters.clear_gradients()
        if self.average is not None:
            self.average.update(self.masters.tensors, self.steps)
        return float(norm)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With the average in place of the weights, where there is one."""
        if self.average is None:
            yield
            return
        with self.average.in_place_of(self.masters):
            yield

    def tensors(self, optimizer: bool = True) -> dict[str, Tensor]:
        """What a checkpoint holds, by name: weights, their average, and with ``optimizer`` AdamW's moments.

        The tensors are the live ones: reading a checkpoint into them restores the learner.
        """
        found: dict[str, Tensor] = {}
        for place, (name, tensor) in enumerate(zip(self.names, self.masters.tensors, strict=True)):
            found[f"weights/{name}"] = tensor.detach()
            if self.average is not None:
                found[f"average/{name}"] = self.average.tensors[place]
            if optimizer:
                state = self._moments(tensor)
                found |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
        return found

    def weights(self) -> dict[str, Tensor]:
        """Of `tensors`, the weights alone."""
        return {name: tensor for name, tensor in self.tensors(optimizer=False).items() if name.startswith("weights/")}

    def _moments(self, tensor: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a parameter, made before its first step so that a checkpoint can be read into it."""
        state: dict[str, Tensor] = self.optimizer.state[tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {moment: torch.zeros_like(tensor) for moment in MOMENTS}
        return state

    def begin(self) -> None:
        """Begin anew from what was read into `weights`."""
        self.masters.publish()
        if self.average is not None:
            self.average = AveragedWeights(self.masters.tensors, self.average.decay)

    def restored(self, steps: int) -> None:
        """Take over what was read into `tensors`, made after ``steps`` optimizer steps."""
        self.steps = steps
        for tensor in self.masters.tensors:
            if tensor in self.optimizer.state:
                self.optimizer.state[tensor]["step"].fill_(float(steps))
        self.masters.publish()


class WithoutAdapter:
    """A policy with its LoRA switched off while it computes, also if that fails."""

    def __init__(self, policy: VelocityPolicy, transformer: Any) -> None:
        self.policy = policy
        self.transformer = transformer

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        self.transformer.disable_adapters()
        try:
            return self.policy.velocity(latents, sigma, rows)
        finally:
            self.transformer.enable_adapters()


def _load(settings: ModelSettings, shards: int, trained: bool = True) -> tuple[Backbone, int | None]:
    """The backbone, on several ranks sharded and gathered in the network's dtype; and its frozen weights' fingerprint.

    Of sharded weights, only those that are trained are then kept in fp32.
    """
    dtype = precision(settings.dtype)
    options = read_options(settings.backbone, settings.options)
    backbone = load_backbone(settings.backbone, settings.device, dtype, **options)
    if not trained:
        backbone.transformer.requires_grad_(False)
    # before sharding: on any number of ranks it is the same
    frozen = bits_version(p for p in backbone.transformer.parameters() if not p.requires_grad)
    if settings.checkpointing:
        backbone.enable_gradient_checkpointing()
    if ranks() == 1:
        return backbone, frozen
    blocks = getattr(backbone, "blocks", None)
    if not blocks:
        raise ValueError(f"model: {backbone.name} has no blocks to shard over {ranks()} ranks; train it on one")
    # before sharding: of a sharded parameter it would change the outer dtype alone
    for parameter in backbone.transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    shard(blocks, backbone.transformer, dtype, shards)
    return backbone, frozen
