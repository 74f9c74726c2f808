"""Settings of what is timed, measured and counted.

Checks import what they need themselves: the help of a command shows these classes and must not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jagg_core.checks import require_at_least, require_one_of
from jagg_core.choices import DTYPES, ScheduleName

Layout = Literal["fsdp", "fsdp-no-reshard", "hsdp", "ddp"]
"""FSDP2 over all ranks, with parameters let go after a forward or kept until the backward; FSDP2 over groups of ranks
that hold copies of each other; DistributedDataParallel."""

BACKENDS = ("inductor", "aot_eager", "eager")
"""Of torch.compile. The first makes kernels; the others only trace, which tells what compiles and how often."""

PASSES = (8, 5)
"""Of the calibrated plans that are timed where none are asked for."""


@dataclass(frozen=True)
class GroupBench:
    """Settings of a run.

    Attributes:
        backbone: registered, or yours as module:function.
        backbone_options: option=value of its loader, such as height=512 lora_rank=32.
        window: steps W of the group.
        batch: samples of the rollout.
        rounds: times that every arm is timed, each round in another order.
        warmup: rounds before those that count.
        eta: noise of Dance-SDE.
        steps: sampling steps of the rollout.
        shift: time shift of the schedule "dance".
        schedule: sigmas; "own" are those of the backbone's sampler.
        guidance: scale; None is the backbone's usual one.
        checkpointing: recompute activations in the backward.
        compile: backend of torch.compile for the transformer's blocks: inductor, aot_eager or eager; None runs them
            as they are.
        device: such as cpu, cuda or cuda:1.
        dtype: the network computes in: float32, bfloat16, float16 or float64.
        seed: of rollout and order of arms.

    Raises:
        ValueError: a setting out of range.
    """

    backbone: str = "digits-flux"
    backbone_options: tuple[str, ...] = ()
    window: int = 5
    batch: int = 16
    rounds: int = 15
    warmup: int = 1
    eta: float = 0.7
    steps: int = 21
    shift: float = 3.0
    schedule: ScheduleName = "dance"
    guidance: float | None = None
    checkpointing: bool = False
    compile: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        from jagg_core.backbones import check_schedule, read_options
        from jagg_core.transitions import DanceSDE

        read_options(self.backbone, self.backbone_options)
        require_at_least(self, window=2, batch=1, rounds=2, warmup=1, steps=3)
        if self.window > self.steps - 1:
            raise ValueError(f"window must be at most the {self.steps - 1} trained steps, got {self.window}")
        DanceSDE(self.eta)
        check_schedule(self.schedule, self.steps, self.shift)
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("compile", self.compile, (None, *BACKENDS))


@dataclass(frozen=True)
class UpdateBench(GroupBench):
    """Settings: those of a group, and what a whole training step needs besides.

    Attributes:
        jagg_frac: share of the groups, from the first, that the paper's recipe approximates.
        calibration: file of ``python -m analysis calibrate`` whose causal plans are timed too.
        passes: of those plans; 8 and 5 by default.
        reward: scored and timed as a part of the step; none leaves it out.

    Raises:
        ValueError: a setting out of range, passes that were not calibrated, or passes without a calibration.
    """

    backbone: str = "photos-flux"
    window: int = 4
    batch: int = 6
    rounds: int = 7
    jagg_frac: float = 0.6
    calibration: str = ""
    passes: tuple[int, ...] = ()
    reward: str = ""

    def __post_init__(self) -> None:
        from jagg_core.plans import Plan, routed_groups

        super().__post_init__()
        routed_groups(1, self.jagg_frac)
        trained = self.steps - 1
        if self.passes and not self.calibration:
            raise ValueError(f"calibration must be given with passes, got passes {[*self.passes]}")
        if len(set(self.passes)) < len(self.passes) or not all(1 <= passes <= trained for passes in self.passes):
            raise ValueError(
                f"passes must be different numbers from 1 to the {trained} trained steps, got {[*self.passes]}"
            )
        if self.calibration:
            object.__setattr__(self, "passes", self.passes or PASSES)
            for passes in self.passes:
                Plan.from_calibration(self.calibration, passes, predict=True)


@dataclass(frozen=True)
class CollectiveBench:
    """Settings.

    Attributes:
        backbone: registered, or yours as module:function.
        backbone_options: option=value of its loader, such as height=512 lora_rank=32.
        window: steps W of the group.
        batch: samples of the rollout, on every rank.
        rounds: times that every arm is timed, each round in another order.
        ranks: processes on this machine, with gloo on the CPU and NCCL on GPUs; or those that torchrun started.
        pretend: one process takes itself for one of so many (torch's fake process group): counts are the same,
            values and times mean nothing and are left out.
        checkpointing: recompute activations in the backward.
        layout: of the transformer over ranks; see `Layout`.
        shards: ranks that share a copy of the parameters under "hsdp", half of all by default.
        device: cpu or cuda, one device per rank.
        dtype: the network computes in: float32, bfloat16, float16 or float64.
        seed: of rollout and order of arms.
        timeout: seconds; a rank that is not done then ends the run.

    Raises:
        ValueError: a setting out of range, or settings that do not go together.
    """

    backbone: str = "digits-flux"
    backbone_options: tuple[str, ...] = ()
    window: int = 5
    batch: int = 2
    rounds: int = 3
    ranks: int = 2
    pretend: bool = False
    checkpointing: bool = False
    layout: Layout = "fsdp"
    shards: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    timeout: int = 300

    def __post_init__(self) -> None:
        from jagg_core.backbones import read_options

        read_options(self.backbone, self.backbone_options)
        require_at_least(self, window=2, batch=1, rounds=1, ranks=1, timeout=1)
        require_one_of("layout", self.layout, Layout)
        if self.shards is not None and self.layout != "hsdp":
            raise ValueError(f"layout must be hsdp where shards are given, got {self.layout!r}")
        if self.shards is not None and not (self.shards >= 1 and self.ranks % self.shards == 0):
            raise ValueError(f"shards must be a divisor of the {self.ranks} ranks, got {self.shards}")
        if self.layout == "hsdp" and self.shards is None and self.ranks % 2:
            raise ValueError(f"ranks must be even under hsdp unless shards are given, got {self.ranks}")
        require_one_of("dtype", self.dtype, DTYPES)

    @property
    def shards_per_copy(self) -> int:
        """Ranks that share a copy of the parameters, under ``hsdp``."""
        return self.shards or max(1, self.ranks // 2)


@dataclass(frozen=True)
class Doctor:
    """Settings of a first look at a device.

    Attributes:
        device: such as cpu, cuda or cuda:1.
        model: whose update is timed, a LoRA in bfloat16; by default flux-dev with random weights at 720x720 on an
            accelerator, digits-flux on the CPU.
        model_options: option=value of its loader, such as height=512 lora_rank=32.
        batch: samples of that update.
        steps: sampling steps of that update, one more than a multiple of 5.
        seconds: no cell begins after so many.
        seed: of rollouts.

    Raises:
        ValueError: a setting out of range.
    """

    device: str = "cpu"
    model: str = ""
    model_options: tuple[str, ...] = ()
    batch: int = 1
    steps: int = 11
    seconds: float = 420.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, batch=1, steps=11)
        if self.steps % 5 != 1:
            raise ValueError(f"steps must be one more than a multiple of 5, got {self.steps}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if self.model_options and not self.model:
            raise ValueError(f"model must be given with model_options, got {[*self.model_options]}")

    @property
    def model_name(self) -> str:
        """The model, by default that of the device."""
        return self.model or ("digits-flux" if self.device == "cpu" else "flux-dev")

    @property
    def large(self) -> GroupBench:
        """Its update, as a group of all trained steps."""
        options, checkpointing = self.model_options, self.device != "cpu"
        if not self.model and self.device != "cpu":
            options = ("random_weights=true", "height=720", "width=720", "lora_rank=32")
        return GroupBench(
            backbone=self.model_name,
            backbone_options=options,
            window=self.steps - 1,
            batch=self.batch,
            steps=self.steps,
            checkpointing=checkpointing,
            device=self.device,
            dtype="bfloat16",
            seed=self.seed,
        )
