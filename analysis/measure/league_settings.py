"""Settings of the league. They import no heavy library, for the help of the command."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from analysis.measure.study import LEAST_SAMPLES, Recipe, Study
from jagg_core.checks import require_at_least


@dataclass(frozen=True)
class League:
    """Which methods are compared, on which rollouts.

    Attributes:
        backbone: registered, or yours as module:function.
        backbone_options: option=value of its loader.
        reward: differentiable, for its pathwise gradient is the reference.
        eta: noise level of the kernel.
        batches: rollout batches of every method.
        prompts: of a batch.
        samples: per prompt.
        guidance: scale; None is the backbone's usual one.
        seed: of prompts, latents and noise.
        methods: names of those to run, none is all; yours as module:object.
        steps: numbers of sampling steps that are tried too, by exact and by causal plans.
        passes: of those causal plans.
        calibration: file whose causal knots are taken; without it the one that ships for the backbone at this eta.
        dimension: of the random projections of gradients.
        device: such as cpu, cuda or cuda:1.
        dtype: the network computes in.
        workers: passes that are differentiated at a time; 0 is automatic.
        quick: a smoke run of few batches; no number of it is for use.

    Raises:
        ValueError: a setting out of range; raised before any model is loaded.
    """

    backbone: str = "digits-flux"
    backbone_options: tuple[str, ...] = ()
    reward: str = "classifier"
    eta: float = 0.7
    batches: int = 12
    prompts: int = 4
    samples: int = 8
    guidance: float | None = None
    seed: int = 0
    methods: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    passes: tuple[int, ...] = (8, 5, 3, 2)
    calibration: str = ""
    dimension: int = 2**16
    device: str = "cpu"
    dtype: str = "float32"
    workers: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, batches=3, dimension=1, workers=0)
        if not 0 < self.eta < math.inf:
            raise ValueError(f"eta must be positive, got {self.eta}")
        for name in ("steps", "passes"):
            if any(value < 2 for value in getattr(self, name)):
                raise ValueError(f"{name} must be at least 2, got {list(getattr(self, name))}")
        if self.recipe.samples < LEAST_SAMPLES:
            raise ValueError(
                f"samples must be at least {LEAST_SAMPLES} for pathwise gradients, got {self.recipe.samples}"
            )
        if not self.calibration_file.is_file():
            raise ValueError(
                f"calibration must be a file of analysis calibrate for {self.backbone}, got {self.calibration_file}"
            )
        _ = self.study

    @property
    def recipe(self) -> Recipe:
        """Returns how rollouts of the full sampler are made."""
        return Recipe(prompts=self.prompts, samples=self.samples, guidance=self.guidance, seed=self.seed)

    @property
    def calibration_file(self) -> Path:
        """Returns the file of the causal knots."""
        shipped = Path(__file__).parents[2] / "results" / "reference" / f"{self.backbone}-calibration"
        return Path(self.calibration) if self.calibration else shipped / f"calibration-eta{self.eta:g}.json"

    @property
    def study(self) -> Study:
        """Returns how backbone, reward and rollouts are loaded and made."""
        return Study(
            backbone=self.backbone,
            backbone_options=self.backbone_options,
            etas=(self.eta,),
            reward=self.reward,
            device=self.device,
            dtype=self.dtype,
            workers=self.workers,
            quick=self.quick,
            recipe=self.recipe,
        )
