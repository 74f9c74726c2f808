"""UniRL: a train stack, an algorithm that is subclassed, and a stage that replays. Written from its formulas.

Checked against Tencent-Hunyuan/UniRL 1a7b501 of 2026-06-13: `TrainStack.prepare_segment` and `train`,
`FlowGRPO.compute_loss_and_backward`, `FlowDPPO.prepare_segment`, `_grpo_clip_loss`, `SD3DiffusionStage.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from jagg_core.schedule import sd3_schedule
from jagg_core.transitions import DanceSDE
from tests.integrations.network import Names, common, draw, sample_steps, text_of
from tests.jagg_core.literal import kernel_log_prob, kernel_step

KERNEL = DanceSDE(0.7)
STEPS = [0, 1, 3, 4, 6]


@dataclass
class Batch:
    """Something whose tensors can be cut by rows."""

    def select(self, rows: Any) -> Any:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        cut = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor) and name not in SHARED}
        return replace(self, **cut)


SHARED = ("sigmas", "sde_indices")


@dataclass
class Conditions(Batch):
    text: Tensor
    pooled: Tensor


@dataclass
class Segment(Batch):
    latents: Tensor
    sigmas: Tensor
    sde_indices: Tensor
    sde_logp: Tensor
    sde_means: Tensor | None = None

    def latents_at(self, step: int) -> Tensor:
        return self.latents[:, step]


class Stage:
    strategy = SimpleNamespace(canonical_name="dance")
    autocast_dtype = torch.float32

    def __init__(self, names: Names) -> None:
        self.transformer, self.trajectory_dtype = names["transformer"], names["dtype"]

    def trainable_module(self) -> nn.Module:
        found: nn.Module = self.transformer
        return found

    def predict_noise_at_step(self, conditions: Conditions, *, sample: Tensor, sigma: Tensor, params: Any) -> Tensor:
        told = sigma.to(sample).expand(len(sample)) * 1000
        found: Tensor = self.transformer(sample, told, conditions.text, conditions.pooled)[0]
        return found

    def replay(self, conditions: Conditions, *, segment: Segment, params: Any, step_indices: list[int]) -> Any:
        log_probs, means = [], []
        for step in step_indices:
            z, sigma = segment.latents_at(step), segment.sigmas[step]
            v = self.predict_noise_at_step(conditions, sample=z, sigma=sigma, params=params)
            mean, scale = kernel_step(DanceSDE(params.eta), z, v, sigma, segment.sigmas[step + 1])
            log_probs.append(kernel_log_prob(KERNEL, segment.latents_at(step + 1), mean, scale))
            means.append(mean)
        means_stored = torch.stack(means, 1).to(self.trajectory_dtype)
        return SimpleNamespace(log_probs=torch.stack(log_probs, 1), prev_sample_means=means_stored)


def clip_range_of(clip_range: float, schedule: str, progress: float) -> float:
    return clip_range * (1.0 - 0.5 * progress) if schedule == "linear_decay" else clip_range


def clip_loss(*, new_logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Names]:
    difference = new_logp - old_logp
    ratio = difference.exp()
    clamped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(-advantages * ratio, -advantages * clamped)
    outside = ((ratio - 1.0).abs() > clip_range).double().mean()
    return loss, {"ratio_mean": ratio.mean(), "clip_fraction": outside, "approx_kl": (difference**2 / 2).mean()}


class FlowGRPO:
    anchor_fields: tuple[str, ...] = ("sde_logp",)

    def __init__(self, *, params: Any, stage: Stage, clip_range: float, old_logp_source: str) -> None:
        self.params, self.stage, self.old_logp_source = params, stage, old_logp_source
        self.clip_range, self.clip_schedule, self.conditions_cls = clip_range, "linear_decay", None

    def recomputes_anchor(self) -> bool:
        return self.old_logp_source == "replay"

    def _resolve_target_steps(self, segment: Segment) -> list[int]:
        return [int(step) for step in segment.sde_indices]

    def _replayed(self, conditions: Conditions, segment: Segment) -> Any:
        steps = self._resolve_target_steps(segment)
        return self.stage.replay(conditions, segment=segment, params=self.params, step_indices=steps)

    def prepare_segment(self, *, conditions: Conditions, segment: Segment) -> None:
        if self.old_logp_source == "replay":
            with torch.no_grad():
                segment.sde_logp = self._replayed(conditions, segment).log_probs

    def compute_loss_and_backward(
        self,
        *,
        conditions: Conditions,
        segment: Segment,
        advantages: Tensor,
        training_progress: float,
        loss_scale: float,
    ) -> Any:
        clip_range = clip_range_of(self.clip_range, self.clip_schedule, training_progress)
        new = self._replayed(conditions, segment).log_probs
        loss, figures = clip_loss(
            new_logp=new,
            old_logp=segment.sde_logp,
            advantages=advantages[:, None].expand_as(new),
            clip_range=clip_range,
        )
        (loss.mean() * loss_scale).backward()
        metrics = {"policy_loss": float(loss.detach().mean()), "clip_range": clip_range}
        metrics |= {name: float(value.detach()) for name, value in figures.items()}
        return result(metrics["policy_loss"], metrics, new.shape[1], True)


class FlowDPPO(FlowGRPO):
    def prepare_segment(self, *, conditions: Conditions, segment: Segment) -> None:
        with torch.no_grad():
            found = self._replayed(conditions, segment)
        segment.sde_logp, segment.sde_means = found.log_probs, found.prev_sample_means


def result(loss: float, metrics: dict[str, float], num_steps_or_tokens: int, has_backward: bool) -> SimpleNamespace:
    return SimpleNamespace(loss=loss, metrics=metrics, steps=num_steps_or_tokens, has_backward=has_backward)


def unirl_modules() -> dict[str, ModuleType]:
    """What the page's block imports."""
    base = ModuleType("unirl.algorithms.base")
    base._resolve_clip_range_from_schedule = clip_range_of  # type: ignore[attr-defined]
    base._grpo_clip_loss, base.AlgorithmStepResult = clip_loss, result  # type: ignore[attr-defined]
    base.typed_conditions = lambda conditions, conditions_cls: conditions  # type: ignore[attr-defined]
    algorithms, grpo, dppo = (ModuleType(f"unirl.algorithms{end}") for end in ("", ".flowgrpo", ".flowdppo"))
    algorithms.base, grpo.FlowGRPO, dppo.FlowDPPO = base, FlowGRPO, FlowDPPO  # type: ignore[attr-defined]
    modules = [ModuleType("unirl"), algorithms, base, grpo, dppo]
    return {module.__name__: module for module in modules}


def unirl_train(algorithm: type | None, dtype: torch.dtype, steps_per_rollout: int, rollouts: int) -> Names:
    """The host's names after rollouts of 8 samples, trained in micro-batches of 2; by its own algorithm if None."""
    names = common(dtype, time_unit=1000)
    stage, schedule = Stage(names), sd3_schedule(8)
    settings = {"params": SimpleNamespace(eta=KERNEL.eta), "stage": stage, "clip_range": 2e-3}
    algo: Any = (algorithm or FlowGRPO)(**settings, old_logp_source="replay")
    names["metrics"] = []
    for seed in range(rollouts):
        conditions = Conditions(*text_of(seed, 8, dtype))
        kept = sample_steps(
            lambda z, s, c=conditions: stage.predict_noise_at_step(c, sample=z, sigma=s, params=None),  # type: ignore[misc]
            schedule,
            KERNEL,
            seed,
            8,
            dtype,
        )
        states = torch.cat([kept["latents"], kept["next_latents"][:, -1:]], 1)
        segment = Segment(states, schedule, torch.tensor(STEPS), kept["log_probs"][:, STEPS])
        advantages = draw(seed, 8, dtype=dtype)
        slices = [slice(start, start + 2) for start in range(0, 8, 2)]
        anchors: dict[str, list[Tensor]] = {field: [] for field in algo.anchor_fields}
        for rows in slices:
            micro = segment.select(rows)
            algo.prepare_segment(conditions=conditions.select(rows), segment=micro)
            for field, found in anchors.items():
                found.append(getattr(micro, field))
        segment = replace(segment, **{field: torch.cat(found) for field, found in anchors.items()})
        per_step = 4 // steps_per_rollout
        for first in range(0, 4, per_step):
            names["optimizer"].zero_grad()
            for rows in slices[first : first + per_step]:
                done = algo.compute_loss_and_backward(
                    conditions=conditions.select(rows),
                    segment=segment.select(rows),
                    advantages=advantages[rows],
                    training_progress=0.5,
                    loss_scale=1 / per_step,
                )
                names["metrics"].append(done.metrics)
            names["optimizer"].step()
    return names
