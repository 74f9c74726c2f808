"""Settings of reward curves, and the training runs that they amount to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from jagg_core.checks import require_at_least, require_one_of
from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.settings import (
    AdvantageSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
)


@dataclass(frozen=True)
class Curves:
    """Settings.

    Attributes:
        backbone: what is trained.
        backbone_options: of its loader.
        reward: what is trained on.
        watched: rewards that are evaluated as well: in those that are not trained on over-optimisation shows.
        updates: of exact, and those after which rewards are compared.
        longer: the other arms go on for so many times the updates, so that it shows when they reach exact's reward.
        seeds: runs per arm; equal seeds draw the same prompts and noise in every arm.
        prompts: per update.
        samples: per prompt.
        micro_batch: rows of a forward.
        steps: sampling steps.
        eta: noise of Dance-SDE.
        learning_rate: of AdamW.
        centring: whether advantages are normalised per prompt or over the batch.
        calibration: file whose causal plans are trained with.
        arms: which estimators: exact, paper-0.6, paper-1.0, endpoint-only, subsample-8, and with a calibration
            causal-8, causal-5 and causal-2; none is all of them.
        eval_every: updates between evaluations.
        eval_prompts: prompts of an evaluation.
        eval_samples: samples per prompt.
        seed: the first seed.
        workers: seeds that run at a time, each on one core.

    Raises:
        ValueError: a setting out of range.
    """

    backbone: str = "digits-flux"
    backbone_options: tuple[str, ...] = ()
    reward: str = "ink"
    watched: tuple[str, ...] = ("classifier",)
    updates: int = 30
    longer: float = 1.2
    seeds: int = 4
    prompts: int = 4
    samples: int = 8
    micro_batch: int = 32
    steps: int = 21
    eta: float = 0.7
    learning_rate: float = 1e-4
    centring: Literal["prompt", "batch"] = "prompt"
    calibration: str = ""
    arms: tuple[str, ...] = ()
    eval_every: int = 5
    eval_prompts: int = 10
    eval_samples: int = 8
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        from jagg_core.backbones import read_options

        read_options(self.backbone, self.backbone_options)
        require_at_least(self, updates=1, seeds=1, eval_every=1, workers=1)
        if not 1 <= self.longer < math.inf:
            raise ValueError(f"longer must be at least 1, got {self.longer}")
        require_one_of("centring", self.centring, ("prompt", "batch"))
        known = self.estimators()
        for name in self.arms:
            require_one_of("arms", name, tuple(known))
        if self.arms and "exact" not in self.arms:
            raise ValueError(f"arms must have 'exact', which the others are compared with, got {list(self.arms)}")
        self.config(known["exact"], self.seed)

    def estimators(self) -> dict[str, PlanSettings]:
        """Returns estimators by the name of their arm.

        Exact and the paper's scheme run as published: a forward of every step, a backward per step or group. The others
        take upstream gradients in closed form, on policy.
        """
        jagg = PlanSettings(estimator="jagg", window=4, upstream="autograd", backward="joint")
        arms = {
            "exact": PlanSettings(upstream="autograd", backward="sequential"),
            "paper-0.6": jagg,
            "paper-1.0": replace(jagg, jagg_frac=1.0),
            "endpoint-only": replace(jagg, estimator="endpoint", jagg_frac=1.0),
            "subsample-8": PlanSettings(estimator="subsample", passes=8),
        }
        for passes in (8, 5, 2) if self.calibration else ():
            arms[f"causal-{passes}"] = PlanSettings(
                estimator="causal", passes=passes, predict=True, calibration=self.calibration
            )
        return arms

    def last_update(self, arm: str) -> int:
        """Returns the update after which an arm ends."""
        return self.updates if arm == "exact" else round(self.updates * self.longer)

    def config(self, estimator: PlanSettings, seed: int) -> GRPOConfig:
        """Makes the settings of the training run of an arm."""
        return GRPOConfig(
            model=ModelSettings(self.backbone, self.backbone_options),
            rollout=RolloutSettings(
                prompts=self.prompts,
                samples=self.samples,
                micro_batch=self.micro_batch,
                steps=self.steps,
                eta=self.eta,
            ),
            reward=RewardSettings(self.reward),
            advantage=AdvantageSettings(centre=self.centring, scale=self.centring),
            plan=estimator,
            optimizer=OptimizerSettings(learning_rate=self.learning_rate),
            run=RunSettings(
                updates=self.last_update("exact"),
                seed=seed,
                eval_every=self.eval_every,
                eval_rewards=self.watched,
                eval_prompts=self.eval_prompts,
                eval_samples=self.eval_samples,
            ),
        )
