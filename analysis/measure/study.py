"""Settings that every study of a backbone has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from analysis.measure.cross_table import SpaceName
from analysis.measure.rollouts import Recipe
from analysis.measure.spaces import DIMENSION
from analysis.statistics.intervals import CLAIM_BATCHES
from jagg_core.backbones import read_options
from jagg_core.checks import require_at_least, require_one_of
from jagg_core.grpo import PRESETS
from jagg_core.plans import find_estimator, groups_of, routed_groups
from jagg_core.rewards import check_reward


@dataclass(frozen=True)
class Study:
    """What is compared with exact, on which rollouts.

    Attributes:
        backbone: registered, or your own as module:function.
        backbone_options: option=value of its loader, such as height=512 lora_rank=32.
        etas: noise levels of the kernel, each studied apart.
        windows: group sizes W of the paper's rule.
        jagg_frac: share of the groups, from the first, that the paper's recipe approximates.
        threshold: the mean cosine that groups must keep to be routed, for the recommended jagg_frac.
        reward: by name, a weighted sum such as classifier+10*ink, or your own as module:function.
        reward_options: option=value of its loader.
        calibration_batches: rollout batches on which knots are searched, eta by eta, the last number for all further.
        evaluation_batches: other batches, on which plans are judged, likewise; below 8 nothing is claimed.
        predicted_passes: of the causal plans that are tried on predicted knots too.
        estimators: your own, as module:object, a constructor of (sigmas, knots); searched, judged and drawn as ours.
        device: such as cpu, cuda or cuda:1.
        dtype: the network computes in: float32, bfloat16, float16 or float64.
        workers: passes that are differentiated at a time, each with its share of the cores; 0 is up to 4 on the CPU
            and 1 on a GPU. Numbers depend on it in rounding only.
        space: whole gradients ("exact") or random projections of them ("projected"); "auto" takes what fits memory.
        dimension: of the projections.
        quick: a smoke run: every part, few rollouts; no number of it is for use.
        preset: of the trainer whose rollouts these are (dancegrpo, flow-grpo, flow-grpo-fast, mixgrpo); flags given
            beside it come first. None: those of the other flags.

    Raises:
        ValueError: a setting out of range; raised before any model is loaded.
    """

    backbone: str = "photos-flux"
    backbone_options: tuple[str, ...] = ()
    etas: tuple[float, ...] = (0.7,)
    windows: tuple[int, ...] = (4, 5)
    jagg_frac: float = 0.6
    threshold: float = 0.9
    reward: str = "classifier"
    reward_options: tuple[str, ...] = ()
    calibration_batches: tuple[int, ...] = (4,)
    evaluation_batches: tuple[int, ...] = (CLAIM_BATCHES,)
    predicted_passes: tuple[int, ...] = (8, 5)
    estimators: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    workers: int = 0
    space: SpaceName = "auto"
    dimension: int = DIMENSION
    quick: bool = False
    preset: str = ""
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        read_options(self.backbone, self.backbone_options)
        check_reward(self.reward, options=self.reward_options)
        for name in self.estimators:
            find_estimator(name)
        for name, low in (("calibration_batches", 1), ("evaluation_batches", 2)):
            counts = getattr(self, name)
            if not counts or min(counts) < low:
                raise ValueError(f"{name} must be numbers of at least {low}, found {list(counts)}")
        require_at_least(self, workers=0, dimension=1)
        require_one_of("preset", self.preset, ("", *sorted(PRESETS)))
        told = {f"{eta:g}" for eta in self.etas}  # as cells are named
        if not self.etas or any(not 0 < eta < math.inf for eta in self.etas) or len(told) != len(self.etas):
            raise ValueError(f"etas must be positive and different, at least one, found {list(self.etas)}")
        for eta in self.etas:
            self.recipe.kernel(eta)
        if not self.windows or len(set(self.windows)) != len(self.windows):
            raise ValueError(f"windows must be different, at least one, found {list(self.windows)}")
        for window in self.windows:
            if not 2 <= window <= self.steps:
                raise ValueError(f"windows must lie between 2 and {self.steps}, found {window}")
            groups_of(self.steps, window)
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be between 0 and 1, found {self.threshold}")
        routed_groups(1, self.jagg_frac)
        if any(passes < 1 for passes in self.predicted_passes):
            raise ValueError(f"predicted_passes must be at least 1, found {list(self.predicted_passes)}")
        if self.space not in ("auto", "exact", "projected"):
            raise ValueError(f"space must be auto, exact or projected, found {self.space!r}")
        if self.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float64, float32, bfloat16 or float16, found {self.dtype!r}")

    @property
    def loading(self) -> dict[str, object]:
        """``backbone_options`` (``option=value``) as arguments of `load_backbone`."""
        return read_options(self.backbone, self.backbone_options)

    @property
    def steps(self) -> int:
        """Trained steps T."""
        return self.recipe.steps - 1

    def made_with(self, eta: float) -> dict[str, str]:
        """What a calibration says of its rollouts beside their schedule; a trainer's must be the same."""
        return {"transition": repr(self.recipe.kernel(eta)), "timestep_mode": self.recipe.timestep_mode}

    def batches(self, purpose: str, eta: float) -> int:
        """How many batches of ``purpose`` (calibration, evaluation) are made at this ``eta``."""
        counts: tuple[int, ...] = getattr(self, f"{purpose}_batches")
        return counts[min(self.etas.index(eta), len(counts) - 1)]
