"""Reward curves: the same training by several estimators, in lockstep, so that all are timed on the same machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from jagg_core.backbones import read_options
from jagg_core.checks import require_at_least, require_one_of
from jagg_core.grpo import GRPOConfig, GRPOTrainer
from jagg_core.grpo.settings import (
    AdvantageSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
)
from jagg_core.records import Cell, Record, command_line, plain
from jagg_core.seeding import generator_for

NOT_REACHED = "the run ended before this cell"


@dataclass(frozen=True)
class Curves:
    """Settings.

    Attributes:
        backbone: what is trained.
        backbone_options: of its loader.
        reward: what is trained on.
        watched: rewards that are evaluated beside: in those that are not trained on over-optimisation shows.
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
        arms: which estimators; see `arms`. Empty: all of them.
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
        read_options(self.backbone, self.backbone_options)
        require_at_least(self, updates=1, seeds=1, eval_every=1, workers=1)
        if not 1 <= self.longer < math.inf:
            raise ValueError(f"longer must be at least 1, found {self.longer}")
        require_one_of("centring", self.centring, ("prompt", "batch"))
        known = self.estimators()
        for name in self.arms:
            require_one_of("arms", name, tuple(known))
        if self.arms and "exact" not in self.arms:
            raise ValueError(f"arms must have 'exact', which the others are compared with, found {list(self.arms)}")
        self.config(known["exact"], self.seed)

    def estimators(self) -> dict[str, PlanSettings]:
        """Estimators by the name of their arm.

        Exact and the paper's scheme run as published: a forward of every step, a backward per step or group. The others
        take upstream gradients in closed form, on policy.
        """
        jagg = PlanSettings(estimator="jagg", window=4, upstream="autograd", backward="joint")
        found = {
            "exact": PlanSettings(upstream="autograd", backward="sequential"),
            "paper-0.6": jagg,
            "paper-1.0": replace(jagg, jagg_frac=1.0),
            "endpoint-only": replace(jagg, estimator="endpoint", jagg_frac=1.0),
            "subsample-8": PlanSettings(estimator="subsample", passes=8),
        }
        for passes in (8, 5, 2) if self.calibration else ():
            found[f"causal-{passes}"] = PlanSettings(
                estimator="causal", passes=passes, predict=True, calibration=self.calibration
            )
        return found

    def last_update(self, arm: str) -> int:
        """After which an arm ends."""
        return self.updates if arm == "exact" else round(self.updates * self.longer)

    def config(self, estimator: PlanSettings, seed: int) -> GRPOConfig:
        """The training run of an arm."""
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


def run(settings: Curves, out: Path) -> Record:
    """Train every arm with every seed; arms take turns at every update. Written after every seed.

    Seeds that ``out`` holds already, of the same settings, are not run again.
    """
    chosen = {name: plan for name, plan in settings.estimators().items() if not settings.arms or name in settings.arms}
    seeds = range(settings.seed, settings.seed + settings.seeds)
    record = _begun(settings, out) or Record(
        "curves",
        command_line(),
        settings.backbone,
        asdict(settings),
        seeds={"runs": list(seeds)},
        cells=[Cell(_name(arm, seed), "skipped", NOT_REACHED) for seed in seeds for arm in chosen],
    )
    left = [seed for seed in seeds if record.cell(_name("exact", seed)).status != "ok"]
    updates = len(left) * sum(map(settings.last_update, chosen))
    with tqdm(total=updates, desc="curves", unit="update", mininterval=1) as bar:
        for cells in _seeds(settings, chosen, left, bar):
            done = {cell.name: cell for cell in cells}
            record.cells = [done.get(cell.name, cell) for cell in record.cells]
            record.write(out / "record.json")
    return record


def _seeds(settings: Curves, chosen: dict[str, PlanSettings], seeds: Sequence[int], bar: Any) -> Iterator[list[Cell]]:
    """Cells of every seed, in the order in which they end."""
    if settings.workers == 1:
        yield from (_run_seed(settings, chosen, seed, bar.update) for seed in seeds)
        return
    context = get_context("spawn")
    done = context.Value("q", 0)
    with ProcessPoolExecutor(settings.workers, context, _begin_worker, (done,)) as pool:
        left = {pool.submit(_run_seed, settings, chosen, seed, _count_update) for seed in seeds}
        while left:
            ended, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
            bar.update(done.value - bar.n)
            yield from (future.result() for future in ended)


_DONE: Any = None
"""In a worker: how many updates all workers have done."""


def _begin_worker(done: Any) -> None:
    global _DONE
    _DONE = done
    torch.set_num_threads(1)


def _count_update() -> None:
    started_by = parent_process()
    if started_by is not None and not started_by.is_alive():
        os._exit(1)  # nobody would write what is found
    with _DONE.get_lock():
        _DONE.value += 1


def _name(arm: str, seed: int) -> str:
    return f"{arm}/seed={seed}"


def _begun(settings: Curves, out: Path) -> Record | None:
    path = out / "record.json"
    if not path.exists():
        return None
    found = Record.read(path)
    return found if found.kind == "curves" and found.settings == plain(asdict(settings)) else None


def _run_seed(settings: Curves, chosen: dict[str, PlanSettings], seed: int, count: Callable[[], object]) -> list[Cell]:
    """Cells of a seed. ``count`` is called after every update of an arm."""
    cells, trainers = {}, {}
    for arm, estimator in chosen.items():
        cells[arm] = Cell(_name(arm, seed), settings={"arm": arm, "seed": seed, "plan": plain(asdict(estimator))})
        trainers[arm] = GRPOTrainer(settings.config(estimator, seed))
    order = generator_for(seed, "arm order")
    for arm, trainer in trainers.items():
        _evaluate(cells[arm], trainer)
    for update in range(max(map(settings.last_update, chosen))):
        for place in torch.randperm(len(chosen), generator=order).tolist():
            arm = list(chosen)[place]
            if update < settings.last_update(arm):
                if cells[arm].status == "ok":
                    _advance(cells[arm], trainers[arm], settings)
                count()
    return list(cells.values())


def _advance(cell: Cell, trainer: GRPOTrainer, settings: Curves) -> None:
    try:
        metrics = trainer.step()
    except (ValueError, RuntimeError, ArithmeticError) as error:
        _fail(cell, error)
        return
    update = sum(metrics.seconds[stage] for stage in ("forward", "upstream", "backward", "optimizer"))
    seen = {
        "reward": metrics.reward_mean,
        "grad_norm": metrics.grad_norm,
        "update_s": update,
        "step_s": update + metrics.seconds["rollout"] + metrics.seconds["reward"],
    }
    for name, value in seen.items():
        cell.samples.setdefault(name, []).append(value)
    if not metrics.skipped:
        cell.values["passes"] = metrics.passes
    cell.values["skipped"] = trainer.skipped
    due = trainer.update % settings.eval_every == 0
    if due or trainer.update in (settings.updates, settings.last_update(cell.settings["arm"])):
        try:
            _evaluate(cell, trainer)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            _fail(cell, error)


def _fail(cell: Cell, error: Exception) -> None:
    cell.status, cell.reason = "failed", f"{type(error).__name__}: {error}"


def _evaluate(cell: Cell, trainer: GRPOTrainer) -> None:
    """Add held-out rewards, and after how many updates they are."""
    found = trainer.evaluate()
    cell.samples.setdefault("evaluated_after", []).append(float(trainer.update))
    for name, value in found.items():
        cell.samples.setdefault(f"held_out {name}", []).append(value)
