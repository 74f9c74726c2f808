"""Settings of the studies of a backbone: of its rollouts, of every study, of a calibration and of the main job.

Checks import what they need themselves: the help of a command shows these classes and must not wait for torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from analysis.statistics.intervals import CLAIM_BATCHES
from jagg_core.checks import require_at_least, require_one_of
from jagg_core.choices import DTYPES, ScheduleName, TimestepMode
from jagg_core.grpo import PRESETS

if TYPE_CHECKING:
    from torch import Tensor

    from jagg_core import Transition
    from jagg_core.backbones import Backbone

SpaceName = Literal["auto", "exact", "projected"]

DIMENSION = 2**16
"""Dimension of the projection by default: inner products within 1.1 % of the product of norms, 95 % of the time."""

WINDOWS = (4, 5, 8, 10, 20)

LEAST_SAMPLES = 3
"""Per prompt: of two rewards the advantage divided by their standard deviation is a sign, without a derivative."""


@dataclass(frozen=True)
class Recipe:
    """How rollouts are made. The defaults are DanceGRPO's kernel and shift; steps and eta are ours.

    Attributes:
        steps: sampling steps.
        shift: time shift of the schedule "dance".
        schedule: sigmas; "own" are those of the backbone's sampler.
        transition: kernel of the SDE steps, as the trainer has it.
        timestep_mode: what the network receives for sigma, as the trainer has it.
        prompts: of a rollout batch.
        samples: per prompt.
        guidance: scale; None is the backbone's usual one.
        seed: of prompts, latents and noise.

    Raises:
        ValueError: a setting out of range.
    """

    steps: int = 21
    shift: float = 3.0
    schedule: ScheduleName = "dance"
    transition: Literal["dance", "flow", "cps"] = "dance"
    timestep_mode: TimestepMode = "float"
    prompts: int = 2
    samples: int = 3
    guidance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        from jagg_core.backbones import check_schedule
        from jagg_core.transitions import TRANSITIONS

        require_at_least(self, steps=3, prompts=1, samples=2)
        check_schedule(self.schedule, self.steps, self.shift)
        require_one_of("transition", self.transition, tuple(TRANSITIONS))
        require_one_of("timestep_mode", self.timestep_mode, TimestepMode)
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise ValueError(f"guidance must be finite, got {self.guidance}")

    @property
    def batch(self) -> int:
        """Samples per rollout batch."""
        return self.prompts * self.samples

    def sigmas(self, backbone: Backbone) -> Tensor:
        """Computes the schedule of a rollout, ``[steps + 1]``."""
        from jagg_core.backbones import schedule_of

        return schedule_of(backbone, self.schedule, self.steps, self.shift)

    def kernel(self, eta: float) -> Transition:
        """Makes the SDE steps' kernel.

        Raises:
            ValueError: ``eta`` out of range for it.
        """
        from jagg_core.transitions import TRANSITIONS

        return TRANSITIONS[self.transition](eta)

    def key(self) -> dict[str, Any]:
        """Returns the key of a stored table."""
        from analysis.statistics.names import USUAL

        return {name: v for name, v in asdict(self).items() if name not in USUAL or v != USUAL[name]}


@dataclass(frozen=True)
class Study:
    """What is compared with exact, on which rollouts.

    Attributes:
        backbone: registered, or yours as module:function.
        backbone_options: option=value of its loader, such as height=512 lora_rank=32.
        etas: noise levels of the kernel, each studied apart.
        windows: group sizes W of the paper's rule.
        jagg_frac: share of the groups, from the first, that the paper's recipe approximates.
        threshold: the mean cosine that groups must keep to be routed, for the recommended jagg_frac.
        reward: by name, a weighted sum such as classifier+10*ink, or yours as module:function.
        reward_options: option=value of its loader.
        calibration_batches: rollout batches on which knots are searched, eta by eta, the last number for all further.
        evaluation_batches: other batches, on which plans are judged, likewise; below 8 nothing is claimed.
        predicted_passes: of the causal plans that are tried on predicted knots too.
        estimators: yours, as module:object, a constructor of (sigmas, knots); searched, judged and drawn as ours.
        device: such as cpu, cuda or cuda:1.
        dtype: the network computes in: float32, bfloat16, float16 or float64.
        workers: passes that are differentiated at a time, each with its share of the cores; 0 is up to 4 on the CPU
            and 1 on a GPU. Numbers depend on it in rounding only.
        space: whole gradients ("exact") or random projections of them ("projected"); "auto" takes what fits memory.
        dimension: of the projections.
        quick: a smoke run: every part, few rollouts; no number of it is for use.
        preset: of the trainer whose rollouts these are (dancegrpo, flow-grpo, flow-grpo-fast, mixgrpo); flags given
            with it come first. None: those of the other flags.

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
        from jagg_core.backbones import read_options
        from jagg_core.plans import find_estimator, groups_of, routed_groups
        from jagg_core.rewards import check_reward

        read_options(self.backbone, self.backbone_options)
        check_reward(self.reward, options=self.reward_options)
        for name in self.estimators:
            find_estimator(name)
        for name, low in (("calibration_batches", 1), ("evaluation_batches", 2)):
            counts = getattr(self, name)
            if not counts or min(counts) < low:
                raise ValueError(f"{name} must be numbers of at least {low}, got {list(counts)}")
        require_at_least(self, workers=0, dimension=1)
        require_one_of("preset", self.preset, ("", *sorted(PRESETS)))
        names = {f"{eta:g}" for eta in self.etas}  # as cells are named
        if not self.etas or any(not 0 < eta < math.inf for eta in self.etas) or len(names) != len(self.etas):
            raise ValueError(f"etas must be positive and different, at least one, got {list(self.etas)}")
        for eta in self.etas:
            self.recipe.kernel(eta)
        if not self.windows or len(set(self.windows)) != len(self.windows):
            raise ValueError(f"windows must be different, at least one, got {list(self.windows)}")
        for window in self.windows:
            if not 2 <= window <= self.steps:
                raise ValueError(f"windows must lie between 2 and {self.steps}, got {window}")
            groups_of(self.steps, window)
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be between 0 and 1, got {self.threshold}")
        routed_groups(1, self.jagg_frac)
        if any(passes < 1 for passes in self.predicted_passes):
            raise ValueError(f"predicted_passes must be at least 1, got {list(self.predicted_passes)}")
        if self.space not in ("auto", "exact", "projected"):
            raise ValueError(f"space must be auto, exact or projected, got {self.space!r}")
        require_one_of("dtype", self.dtype, DTYPES)

    @property
    def loading(self) -> dict[str, object]:
        """Returns ``backbone_options`` (``option=value``) as arguments of `load_backbone`."""
        from jagg_core.backbones import read_options

        return read_options(self.backbone, self.backbone_options)

    @property
    def steps(self) -> int:
        """Counts the trained steps T."""
        return self.recipe.steps - 1

    def made_with(self, eta: float) -> dict[str, str]:
        """Returns what a calibration says of its rollouts, except their schedule; a trainer's must be the same."""
        return {"transition": repr(self.recipe.kernel(eta)), "timestep_mode": self.recipe.timestep_mode}

    def batches(self, purpose: str, eta: float) -> int:
        """Returns how many batches of ``purpose`` (calibration, evaluation) are made at this ``eta``."""
        counts: tuple[int, ...] = getattr(self, f"{purpose}_batches")
        return counts[min(self.etas.index(eta), len(counts) - 1)]


@dataclass(frozen=True)
class Calibrate(Study):
    """Settings of a calibration; see `Study`.

    Attributes:
        windows: group sizes W of the paper's rule; by default those of 4, 5, 8, 10 and 20 that fit the schedule.
        signal_batches: rollout batches on which the learning signal of plans is measured.
        signal_prompts: prompts of each of those.
        signal_samples: samples per prompt there.
        signal_passes: passes of the plans whose learning signal is measured.
        signal_dimension: of the random projections in which it is.
        contender_batches: of those batches, the first ones, for estimators that are there for comparison only.
        centring_batches: likewise, for the bias under other ways to centre advantages.
        pathwise_batches: rollout batches of the same size on which causal plans are compared with exact by pathwise
            gradients, where the reward is differentiable; 0: not at all.
        proxy_reward: a differentiable reward, by name, whose pathwise gradients are taken where the reward has none.
        update_samples: of an update in training, for which the loss of signal is computed.
        max_signal_loss: the plan to run has the fewest passes whose loss is below it with confidence.
        min_cosine: a second plan to run has the fewest passes whose 95 % lower bound is at least this cosine.
        timing_rounds: times that every update is timed, each round in another order.

    Raises:
        ValueError: a setting out of range; raised before any model is loaded.
    """

    windows: tuple[int, ...] = WINDOWS
    calibration_batches: tuple[int, ...] = (3,)
    predicted_passes: tuple[int, ...] = (8, 6, 5, 4)
    signal_batches: int = 24
    signal_prompts: int = 2
    signal_samples: int = 8
    signal_passes: tuple[int, ...] = (8, 5, 4, 3, 2)
    signal_dimension: int = 2**16
    contender_batches: int = 8
    centring_batches: int = 8
    pathwise_batches: int = 24
    proxy_reward: str = ""
    update_samples: int = 64
    max_signal_loss: float = 0.05
    min_cosine: float = 0.99
    timing_rounds: int = 3

    def __post_init__(self) -> None:
        if self.windows == WINDOWS:
            object.__setattr__(self, "windows", tuple(w for w in WINDOWS if w <= self.steps) or (self.steps,))
        super().__post_init__()
        require_at_least(
            self,
            signal_batches=3,
            signal_prompts=1,
            signal_samples=2,
            signal_dimension=1,
            contender_batches=3,
            centring_batches=3,
            update_samples=1,
            timing_rounds=2,
        )
        if self.pathwise_batches and self.pathwise_batches < 3:
            raise ValueError(f"pathwise_batches must be 0 or at least 3, got {self.pathwise_batches}")
        if self.proxy_reward:
            from jagg_core.rewards import check_reward

            check_reward(self.proxy_reward)
        for name in ("max_signal_loss", "min_cosine"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not self.signal_passes or min(self.signal_passes) < 1:
            raise ValueError(f"signal_passes must be at least 1, one of them needed, got {list(self.signal_passes)}")

    @property
    def signal_recipe(self) -> Recipe:
        """Returns how the batches of the learning signal are made."""
        return replace(self.recipe, prompts=self.signal_prompts, samples=self.signal_samples)

    @property
    def pathwise_recipe(self) -> Recipe:
        """Returns how the batches of pathwise gradients are made: as those of the signal, but see `LEAST_SAMPLES`."""
        return replace(self.signal_recipe, samples=max(self.signal_samples, LEAST_SAMPLES))


@dataclass(frozen=True)
class Reproduce(Study):
    """Settings of the main job; see `Study`.

    Attributes:
        leak_batches: on which the bias of anticipating plans is tested, at the first eta.
        speed_backbones: timed too; the backbone itself is, at the batch of its rollouts.
        speed_rounds: times that every arm is timed, each round in another order.
        speed_batch: samples at which speed_backbones are timed.
        speed_window: steps W of the timed group.

    Raises:
        ValueError: a setting out of range; raised before any model is loaded.
    """

    etas: tuple[float, ...] = (0.7, 0.3)
    calibration_batches: tuple[int, ...] = (3, 2)
    leak_batches: int = 8
    speed_backbones: tuple[str, ...] = ("digits-flux",)
    speed_rounds: int = 7
    speed_batch: int = 16
    speed_window: int = 5

    def __post_init__(self) -> None:
        from jagg_core.backbones import check_backbone_name

        for name in self.speed_backbones:
            check_backbone_name(name)
        require_at_least(self, leak_batches=3, speed_rounds=2, speed_batch=1, speed_window=2)
        if self.speed_window > self.steps:
            raise ValueError(f"speed_window must be at most the {self.steps} trained steps, got {self.speed_window}")
        super().__post_init__()
