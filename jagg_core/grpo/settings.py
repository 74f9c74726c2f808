"""Settings of a training run, a dataclass for each section of its configuration.

Checks import what they need themselves: the help of a command shows these classes and must not wait for torch, which
jsonargparse would load even for ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Literal, get_args

from jagg_core.checks import require_at_least, require_one_of, require_positive
from jagg_core.choices import BackwardMode, PartlyClipped, ScheduleName, Sweep, TimestepMode, UpstreamMode
from jagg_core.imports import import_object

TrainedSteps = Literal["all", "random", "window"]
DTYPES = ("float32", "bfloat16", "float64")
"""What a network may be trained in. In float16 upstream gradients would vanish: they have the size of 1 / (elements *
samples * steps), for a Flux latent of 512x512 in an update of 64 samples 1 / (65,536 * 64 * 20) = 1e-8, and float16's
smallest number is 6e-8."""


@dataclass(frozen=True)
class ModelSettings:
    """What is trained.

    Attributes:
        backbone: a registered name, or your own as module:function.
        options: option=value of its loader, such as path=FOLDER lora_rank=32.
        guidance: None is the backbone's usual one.
        device: where it runs; under torchrun "cuda" is this rank's own.
        dtype: the network computes in; half precision keeps master weights and gradients in fp32.
        checkpointing: recompute activations in the backward.
        ema_decay: of an average of the weights; 0 keeps none.
    """

    backbone: str = "digits-flux"
    options: tuple[str, ...] = ()
    guidance: float | None = None
    device: str = "cpu"
    dtype: str = "float32"
    checkpointing: bool = False
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        from jagg_core.backbones import read_options

        read_options(self.backbone, self.options)
        require_one_of("dtype", self.dtype, DTYPES)
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise ValueError(f"guidance must be finite, got {self.guidance}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {self.ema_decay}")


@dataclass(frozen=True)
class RolloutSettings:
    """How samples are drawn, and which of their steps are trained. The last step never is: it adds no noise.

    Attributes:
        prompts: prompts of an update, over all ranks.
        samples: samples of each prompt.
        micro_batch: rows of a forward, in rollout and update alike; on every rank.
        steps: sampling steps.
        schedule: sigmas; "own" are those of the backbone's sampler.
        shift: time shift of the schedule "dance".
        transition: kernel of the SDE steps.
        eta: its noise level.
        timestep_mode: what the network is told instead of sigma.
        same_noise: all samples of a prompt start from the same noise, as DanceGRPO's do.
        trained: "all" steps; a "random" subset, drawn for each sample; or a "window" outside of which the sampler
            adds no noise.
        fraction: share of the steps in a random subset.
        window_size: steps of the window.
        window_range: first step of the window is drawn from here, end excluded.
        window_interval: 0 draws the window's start anew for every update; else it moves on by ``window_size`` after
            so many updates, through the range and again (MixGRPO).
    """

    prompts: int = 4
    samples: int = 16
    micro_batch: int = 16
    steps: int = 21
    schedule: ScheduleName = "dance"
    shift: float = 3.0
    transition: Literal["dance", "flow", "cps"] = "dance"
    eta: float = 0.7
    timestep_mode: TimestepMode = "float"
    same_noise: bool = False
    trained: TrainedSteps = "all"
    fraction: float = 1.0
    window_size: int = 2
    window_range: tuple[int, int] = (0, 5)
    window_interval: int = 0

    def __post_init__(self) -> None:
        from jagg_core.backbones import check_schedule
        from jagg_core.transitions import TRANSITIONS

        require_at_least(self, prompts=1, samples=1, micro_batch=1, steps=2, window_size=1, window_interval=0)
        check_schedule(self.schedule, self.steps, self.shift)
        require_one_of("transition", self.transition, tuple(TRANSITIONS))
        require_one_of("timestep_mode", self.timestep_mode, TimestepMode)
        require_one_of("trained", self.trained, TrainedSteps)
        TRANSITIONS[self.transition](self.eta)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.trained == "window":
            low, high = self.window_range
            last = self.steps - 1 - self.window_size
            if not 0 <= low < high or high - 1 > last:
                raise ValueError(
                    f"window_range must lie in 0..{last + 1} for windows of {self.window_size} of the "
                    f"{self.steps - 1} steps that can be trained, got {list(self.window_range)}"
                )

    @property
    def batch(self) -> int:
        """Samples of an update, over all ranks."""
        return self.prompts * self.samples

    @property
    def trained_steps(self) -> int:
        """Steps of each sample that are trained."""
        if self.trained == "window":
            return self.window_size
        # the tolerance keeps 0.58 * 50 at 29, whatever its binary fraction
        return max(1, int(self.fraction * (self.steps - 1) + 1e-9)) if self.trained == "random" else self.steps - 1


@dataclass(frozen=True)
class RewardSettings:
    """What is rewarded.

    Attributes:
        name: a registered reward, module:function, or a weighted sum such as classifier+0.5*colourfulness.
        options: reward.option=value, such as pickscore.path=FOLDER.
    """

    name: str = "classifier"
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages; see `jagg_core.group_advantages`.

    Attributes:
        centre: whose mean is subtracted.
        scale: by whose standard deviation is divided ("batch" is flow_grpo's global_std).
        std: sample or population.
        eps: added to the standard deviation.
    """

    centre: Literal["prompt", "batch", "none"] = "prompt"
    scale: Literal["prompt", "batch", "none"] = "prompt"
    std: Literal["sample", "population"] = "sample"
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("centre", "scale"):
            require_one_of(name, getattr(self, name), ("prompt", "batch", "none"))
        require_one_of("std", self.std, ("sample", "population"))
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps must be at least 0, got {self.eps}")


@dataclass(frozen=True)
class PlanSettings:
    """Which estimator of the update gradient, and how the engine runs it.

    Attributes:
        estimator: a registered estimator, or your own as module:object (`jagg_core.plans.find_estimator`).
        window: steps per group, for jagg and endpoint.
        jagg_frac: share of the groups that is approximated, for jagg and endpoint; "calibrated" takes it from
            ``calibration`` for this window.
        weighting: of jagg.
        passes: for subsample, and for causal and spline from a calibration.
        knots: for causal and spline, instead of a calibration.
        predict: causal with shifted knots.
        calibration: a calibration-*.json that fits this run's rollouts.
        upstream: gradients of the loss in the velocity: by autograd from a forward of every step, in closed form on
            policy, or interpolated from the knots off policy; auto is the closed form on policy, else autograd.
            pathwise takes the reward's own gradient along the rollout (`jagg_core.pathwise`): the same expectation with
            far less noise, for differentiable rewards. awm and nft (DiffusionNFT) sample by the ODE, mix noise into
            the samples and train on those states (`jagg_core.forward`).
        states: of awm and nft: noise levels of each sample.
        nft_beta: of nft: how far its two implied policies lie from the old one, which is the rollout's.
        sweep: of pathwise: the network is differentiated at every step (full), at the knots of causal (knots), or not
            at all (frozen); the last two are biased.
        backward: one call for all graphs of a group (joint), knots in one pass (batched), or one after the other; auto
            batches knots while a pass is small.
        partly_clipped: under autograd, samples of which some steps of a group are clipped and some not are approximated
            all the same (keep), or made exact there, at a pass per step (exact).
        keep_graphs: the rollout keeps its graphs at the knots until the rewards are known, so that the update makes no
            forward. Memory for all micro-batches is estimated before the first one, and refused if it does not fit.
        recalibrate_every: updates after which the knots of causal are searched anew, for the policy as it is then;
            0: never.
        recalibrate: what searches them, as module:function of the trainer.
    """

    estimator: str = "exact"
    window: int = 4
    jagg_frac: float | Literal["calibrated"] = 0.6
    weighting: Literal["sigma", "index"] = "sigma"
    passes: int = 8
    knots: tuple[int, ...] = ()
    predict: bool = False
    calibration: str = ""
    upstream: UpstreamMode | Literal["pathwise", "awm", "nft"] = "auto"
    states: int = 5
    nft_beta: float = 1.0
    sweep: Sweep = "full"
    backward: BackwardMode = "auto"
    partly_clipped: PartlyClipped = "keep"
    keep_graphs: bool = False
    recalibrate_every: int = 0
    recalibrate: str = "analysis.measure.recalibrate:causal_knots"

    def __post_init__(self) -> None:
        from jagg_core.plans import Plan, check_knots, find_estimator, routed_groups

        kind = find_estimator(self.estimator).kind
        require_one_of("weighting", self.weighting, ("sigma", "index"))
        require_one_of("upstream", self.upstream, (*get_args(UpstreamMode), "pathwise", "awm", "nft"))
        require_one_of("sweep", self.sweep, Sweep)
        if self.upstream == "pathwise":
            self._check_pathwise()
        require_at_least(self, states=1)
        require_positive(self, "nft_beta")
        if self.upstream in ("awm", "nft"):
            self._check_forward()
        require_one_of("backward", self.backward, BackwardMode)
        require_one_of("partly_clipped", self.partly_clipped, PartlyClipped)
        require_at_least(self, window=1, passes=1, recalibrate_every=0)
        if self.recalibrate_every:
            if self.estimator != "causal":
                raise ValueError(f"recalibrate_every is for the estimator causal, got {self.estimator}")
            import_object(self.recalibrate, "recalibrate", "module:function")
        if self.jagg_frac == "calibrated":
            if not self.calibration:
                raise ValueError("jagg_frac 'calibrated' needs a calibration file, got none")
        else:
            routed_groups(1, self.jagg_frac)
        if kind == "knots":
            if bool(self.knots) == bool(self.calibration):
                raise ValueError(
                    f"estimator {self.estimator} needs either knots or a calibration, "
                    f"got knots {list(self.knots)} and calibration {self.calibration!r}"
                )
            if self.knots:
                check_knots(self.knots, max(0, *self.knots) + 1)
            if self.calibration:
                Plan.from_calibration(self.calibration, self.passes, family=self.estimator)
        if self.predict and self.estimator != "causal":
            raise ValueError(f"predict is for the estimator causal, got {self.estimator}")

    def _check_forward(self) -> None:
        """Refuses plans that share Jacobians: every noise level has fresh noise, so the states lie on no path."""
        if self.estimator != "exact":
            raise ValueError(f"upstream {self.upstream} is for the estimator exact, got {self.estimator}")
        if self.keep_graphs:
            raise ValueError(
                f"upstream {self.upstream} trains on states that no rollout visits: keep_graphs must be false"
            )

    def _check_pathwise(self) -> None:
        """Refuse what has another expectation: a plan that looks ahead has a term that the reward's gradient misses."""
        from jagg_core.plans import find_estimator

        estimator = find_estimator(self.estimator)
        if estimator.looks_ahead:
            raise ValueError(f"upstream pathwise needs an estimator that does not look ahead, got {self.estimator}")
        if self.knots and self.knots[0] != 0:
            raise ValueError(f"upstream pathwise needs knots that begin with 0, got {list(self.knots)}")
        if self.sweep == "knots" and estimator.kind != "knots":
            raise ValueError(f"sweep knots is for estimators with knots, got {self.estimator}")
        if self.keep_graphs:
            raise ValueError("upstream pathwise differentiates the network in the latents: keep_graphs must be false")


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss; see `jagg_core.ClippedSurrogate`.

    Attributes:
        clip_range: of the ratio.
        adv_clip: of advantages.
        kl_beta: weight of the KL to the policy as it was loaded; above 0, training without a LoRA keeps a frozen copy
            of the weights for it.
        kl_form: what that KL measures; "noise" divides by the noise scale, "std" by it without sqrt(-dt).
    """

    clip_range: float = 1e-4
    adv_clip: float = 5.0
    kl_beta: float = 0.0
    kl_form: Literal["noise", "std", "mean", "velocity"] = "noise"

    def __post_init__(self) -> None:
        from jagg_core.objective import ClippedSurrogate

        ClippedSurrogate(**asdict(self))


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, and how often it steps.

    Attributes:
        learning_rate: after the warm-up.
        warmup: optimizer steps over which it rises linearly.
        weight_decay: of AdamW.
        beta1: of AdamW.
        beta2: of AdamW.
        epsilon: of AdamW.
        max_grad_norm: gradients are scaled down to it.
        steps_per_rollout: optimizer steps in one pass over the samples of a rollout, each on an equal share of them.
        epochs: passes over the samples; all but the first step are off policy.
    """

    learning_rate: float = 1e-4
    warmup: int = 0
    weight_decay: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    steps_per_rollout: int = 1
    epochs: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "max_grad_norm", "epsilon")
        require_at_least(self, warmup=0, weight_decay=0, steps_per_rollout=1, epochs=1)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class RunSettings:
    """Length, seed, checkpoints and logs.

    Attributes:
        updates: rollouts, each followed by its optimizer steps.
        seed: of everything that is drawn.
        checkpoint_every: updates between checkpoints; the last update always has one. 0: only that.
        keep: newest checkpoints that are kept.
        eval_every: updates between evaluations on held-out noise; 0: none.
        eval_samples: samples per prompt of an evaluation, drawn without SDE noise.
        eval_prompts: prompts of an evaluation.
        eval_rewards: rewards that are evaluated besides the trained one; their options stand with its own.
        samples_every: updates between pictures of the samples that an evaluation scores, from before the first update
            to the last one; 0: none.
        max_skipped: the run stops once so many updates in a row were skipped for values that are not finite.
        audit_every: optimizer steps for one audit, which makes two more passes over a micro-batch and keeps a running
            cosine to the exact gradient (`jagg_core.engine.Meter`); for plans that do not look ahead. 0: none.
        audit_below: warn when the interval of that cosine lies below it; 0: never.
        timeout: seconds that a rank waits for the others.
        tensorboard: also write event files.
        wandb: also log to this Weights & Biases project.
    """

    updates: int = 100
    seed: int = 0
    checkpoint_every: int = 20
    keep: int = 2
    eval_every: int = 0
    eval_samples: int = 8
    eval_prompts: int = 8
    eval_rewards: tuple[str, ...] = ()
    samples_every: int = 0
    max_skipped: int = 3
    audit_every: int = 0
    audit_below: float = 0.0
    timeout: int = 600
    tensorboard: bool = False
    wandb: str = ""

    def __post_init__(self) -> None:
        require_at_least(self, updates=1, checkpoint_every=0, keep=1, eval_every=0, eval_samples=1, eval_prompts=1)
        require_at_least(self, samples_every=0, max_skipped=1, timeout=1, audit_every=0)
        if not 0 <= self.audit_below < 1:
            raise ValueError(f"audit_below must be at least 0 and below 1, got {self.audit_below}")
        for name, package in (("tensorboard", "'jagg-core[log]'"), ("wandb", "wandb")):
            if getattr(self, name) and find_spec(name) is None:
                raise ValueError(f"{name} is not installed: pip install {package}")


@dataclass(frozen=True)
class ParallelSettings:
    """How weights lie over the ranks of ``torchrun``.

    Attributes:
        shards: ranks that share one copy of the weights (FSDP2); 0 is all of them, fewer make copies (HSDP).
        defer_gradient_sync: reduce gradients once per optimizer step instead of after every backward. Each rank then
            keeps them whole, 4 bytes per trained parameter, which is refused where it does not fit.
    """

    shards: int = 0
    defer_gradient_sync: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, shards=0)
