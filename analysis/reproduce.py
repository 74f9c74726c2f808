"""The main job: how every estimator compares with the exact gradient on a trained model, and what it costs.

Computes and stores; `analysis.report` draws from what is stored.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from analysis import estimators
from analysis.collect import CrossTable, collect_table, gram_matrix, plan_gradients, reachable_pairs
from analysis.estimators import Estimator, mean_of_draws
from analysis.knots import PLANS, Knots, KnotSearch
from analysis.similarity import METRICS, similarity
from analysis.statistics import leak_test
from analysis.workload import Batch, Recipe, check_prompts, make_batch
from jagg_core import ClippedSurrogate, Plan, dance_schedule
from jagg_core.backbones import check_backbone_name, load_backbone
from jagg_core.checks import require_at_least
from jagg_core.images import image_grid, png_bytes
from jagg_core.plan import groups_of, routed_groups
from jagg_core.records import Cell, Record, command_line, recorded, write_atomically
from jagg_core.rewards import load_reward
from jagg_core.seeding import derive_seed

PAST, FUTURE = 10, 4
"""Pairs that the tables hold: a knot at most so many steps before, or after, the step it serves."""

PARETO_PASSES = range(4, 15)
PARETO_WINDOWS = range(3, FUTURE + 2)
OUTPUTS = (
    "record.json",
    "speed-*.json",
    "calibration-*.json",
    "report.html",
    "samples.png",
    "tables/*.csv",
    "figures/*.png",
    "figures/*.svg",
)
"""What a run folder holds."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reproduce:
    """Settings of the main job.

    Numbers of batches are given eta by eta, the last one for all further etas. The leak is tested at the first eta.
    ``workers`` rollout batches are differentiated at a time, each with its share of the cores (0: up to 4 on the CPU,
    1 on a GPU). The backbone is timed at the batch of its rollouts; ``speed_backbones`` at ``speed_batch``.

    Raises:
        ValueError: a setting out of range; raised before any model is loaded.
    """

    backbone: str = "photos-flux"
    etas: tuple[float, ...] = (0.7, 0.3)
    windows: tuple[int, ...] = (4, 5)
    jagg_frac: float = 0.6
    threshold: float = 0.9
    reward: str = "classifier"
    calibration_batches: tuple[int, ...] = (4, 2)
    evaluation_batches: tuple[int, ...] = (4, 2)
    leak_batches: int = 8
    speed_backbones: tuple[str, ...] = ("digits-flux",)
    speed_rounds: int = 7
    speed_batch: int = 16
    speed_window: int = 5
    device: str = "cpu"
    dtype: str = "float32"
    workers: int = 0
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        for name in (self.backbone, *self.speed_backbones):
            check_backbone_name(name)
        for name, low in (("calibration_batches", 1), ("evaluation_batches", 2)):
            counts = getattr(self, name)
            if not counts or min(counts) < low:
                raise ValueError(f"{name} must be numbers of at least {low}, found {list(counts)}")
        require_at_least(self, leak_batches=3, workers=0, speed_rounds=2, speed_batch=1, speed_window=2)
        if self.speed_window > self.recipe.steps - 1:
            raise ValueError(
                f"speed_window must be at most the {self.recipe.steps - 1} trained steps, found {self.speed_window}"
            )
        if not self.etas or any(not 0 < eta < math.inf for eta in self.etas) or len(set(self.etas)) != len(self.etas):
            raise ValueError(f"etas must be positive and different, at least one, found {list(self.etas)}")
        if not self.windows or len(set(self.windows)) != len(self.windows):
            raise ValueError(f"windows must be different, at least one, found {list(self.windows)}")
        for window in self.windows:
            if not 2 <= window <= FUTURE + 1:
                raise ValueError(f"windows must lie between 2 and {FUTURE + 1}, found {window}")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be between 0 and 1, found {self.threshold}")
        routed_groups(1, self.jagg_frac)
        for window in self.windows:
            groups_of(self.recipe.steps - 1, window)
        if self.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float64, float32, bfloat16 or float16, found {self.dtype!r}")

    def batches(self, purpose: str, eta: float) -> int:
        """How many batches of ``purpose`` (calibration, evaluation) are made at this ``eta``."""
        counts: tuple[int, ...] = getattr(self, f"{purpose}_batches")
        return counts[min(self.etas.index(eta), len(counts) - 1)]


def run(settings: Reproduce, out: Path) -> Record:
    """Run the job and write ``out/record.json`` and one ``out/speed-NAME.json`` per timed backbone.

    Every cell that fails is recorded as failed, the others still run. A run that ``out`` already holds is replaced: its
    files go before the first new one is written, so that a run that is killed leaves no mixture. Returns the record.
    """
    job = _Job(settings, out)
    for pattern in OUTPUTS:
        for old in out.glob(pattern):
            old.unlink()
    time_groups(settings, out)
    for eta in settings.etas:
        knots = job.search_knots(eta)
        if knots is not None:
            job.evaluate(eta, knots)
            if eta == settings.etas[0]:
                job.test_leak(eta, knots)
    job.contact_sheet()
    return job.record


def time_groups(settings: Reproduce, out: Path) -> None:
    """Time one group of steps, each backbone in a process of its own, so that nothing else disturbs it."""
    for name in dict.fromkeys((settings.backbone, *settings.speed_backbones)):
        target = out / f"speed-{name}.json"
        command = [sys.executable, "-m", "bench", "group", "--backbone", name, "--out", str(target)]
        for flag, value in (
            ("rounds", settings.speed_rounds),
            ("batch", settings.speed_batch if name in settings.speed_backbones else settings.recipe.batch),
            ("window", settings.speed_window),
            ("eta", settings.etas[0]),
            ("steps", settings.recipe.steps),
            ("shift", settings.recipe.shift),
            ("device", settings.device),
            ("dtype", settings.dtype),
            ("seed", settings.recipe.seed),
        ):
            command += [f"--{flag}", str(value)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if not target.exists():
            cells = [Cell("speed", "failed", f"python -m bench group ended with exit code {done.returncode}")]
            Record("group-speed", command_line(), name, {}, {}, cells=cells).write(target)


class _Job:
    """A loaded backbone, its reward, and the record that grows; written after every part."""

    def __init__(self, settings: Reproduce, out: Path) -> None:
        recipe = settings.recipe
        self.settings = settings
        self.out = out
        self.backbone = load_backbone(settings.backbone, settings.device, getattr(torch, settings.dtype))
        check_prompts(recipe, self.backbone)
        self.reward = load_reward(settings.reward, dataset=self.backbone.dataset, device=settings.device)
        self.sigmas = dance_schedule(recipe.steps, recipe.shift)[:-2]
        self.objective = ClippedSurrogate()
        self.threads = torch.get_num_threads()
        self.record = Record(
            kind="reproduce",
            command=command_line(),
            backbone=settings.backbone,
            settings=asdict(settings),
            seeds={},
            schedule=self.sigmas.tolist(),
        )

    def batch(self, eta: float, purpose: str, number: int) -> Batch:
        """A rollout batch; its seed goes into the record."""
        batch = make_batch(self.backbone, self.reward, self.settings.recipe, eta, purpose, number)
        seeds = self.record.seeds.setdefault(f"{purpose} eta={eta:g}", [])
        if batch.seed not in seeds:
            seeds.append(batch.seed)
        return batch

    def tables(self, eta: float, purpose: str, predicted: Sequence[Plan] = ()) -> list[CrossTable]:
        """Cross-gradient tables of the rollout batches of a purpose; those without any advantage are left out.

        Raises:
            ValueError: no batch had any advantage.
        """
        count = self.settings.batches(purpose, eta)
        pairs = len(reachable_pairs(len(self.sigmas), PAST, FUTURE)) + sum(plan.passes for plan in predicted)
        with tqdm(total=count * pairs, desc=f"{purpose} rollouts, eta {eta:g}", unit="pass") as bar:

            def collect(batch: Batch) -> CrossTable | None:
                if not batch.advantages.any():
                    bar.update(pairs)
                    return None
                return collect_table(
                    batch.policy,
                    batch.trajectory,
                    batch.advantages,
                    self.objective,
                    past=PAST,
                    future=FUTURE,
                    predicted=predicted,
                    at_once=self.workers(count),
                    progress=bar.update,
                )

            batches = [self.batch(eta, purpose, number) for number in range(count)]
            found = [table for table in self.side_by_side(collect, batches) if table is not None]
        if not found:
            raise ValueError(f"none of the {count} {purpose} batches has any advantage: the reward does not vary")
        return found

    def workers(self, batches: int) -> int:
        """How many of so many batches are differentiated at a time."""
        automatic = min(4, self.threads) if self.backbone.device.type == "cpu" else 1
        return min(self.settings.workers or automatic, batches)

    def side_by_side(self, work: Callable[[Batch], Result], batches: list[Batch]) -> list[Result]:
        """``work`` on every batch, several at a time: at these sizes threads serve batches better than matrices."""
        workers, threads = self.workers(len(batches)), self.threads
        torch.set_num_threads(max(1, threads // workers))
        try:
            with ThreadPoolExecutor(workers) as pool:
                return list(pool.map(work, batches))
        finally:
            torch.set_num_threads(threads)

    def search_knots(self, eta: float) -> Knots | None:
        """Best knots on calibration rollouts; None if that failed."""
        knots: Knots = {}
        with recorded(self.record.cells, f"eta={eta:g}/knots", eta=eta) as cell:
            tables = self.tables(eta, "calibration")
            trajectory = self.batch(eta, "calibration", 0).trajectory
            cell.values = {
                "transition": repr(trajectory.transition),
                "timestep_mode": trajectory.timestep_mode,
                "signature": {k: v for k, v in trajectory.signature.items() if k not in ("prompts", "dtype")},
            }
            for family, make in tqdm(PLANS.items(), desc=f"search knots, eta {eta:g}"):
                search = KnotSearch(tables, self.sigmas, make)
                knots[family] = search.search()
                cell.values[family] = {
                    str(k): {"knots": list(v), "cosine": search.score(v)} for k, v in knots[family].items()
                }
        self.save()
        return knots if len(knots) == len(PLANS) else None

    def evaluate(self, eta: float, knots: Knots) -> None:
        """A cell per estimator: similarity to exact on held-out rollouts, whole update and every group."""
        settings, tables = self.settings, []
        with recorded(self.record.cells, f"eta={eta:g}/evaluation", eta=eta) as cell:
            predicted = [e.plans[0] for e in estimators.predicted(self.sigmas, knots)]
            tables = self.tables(eta, "evaluation", predicted)
            cell.values = {
                "batches": len(tables),
                "without_advantage": settings.batches("evaluation", eta) - len(tables),
            }
        if tables:
            seed = derive_seed(settings.recipe.seed, "subsample")
            main = estimators.headline(self.sigmas, settings.windows, settings.jagg_frac, knots, seed)
            chosen = {e.name: e for e in estimators.pareto(self.sigmas, PARETO_WINDOWS, knots, PARETO_PASSES)}
            chosen |= {e.name: e for e in main}
            headline = {e.name for e in main}
            for estimator in chosen.values():
                name = f"eta={eta:g}/{estimator.name}"
                with recorded(self.record.cells, name, **estimator.describe(), eta=eta) as cell:
                    cell.settings["headline"] = estimator.name in headline
                    by_group = estimator.name in headline and "whole_update_only" not in estimator.settings
                    cell.samples = judge(tables, estimator, settings.windows if by_group else ())
        self.save()

    def test_leak(self, eta: float, knots: Knots) -> None:
        """Gradients with all advantages 1, of one estimator of every kind: is their mean zero within its noise?"""
        settings = self.settings
        seed = derive_seed(settings.recipe.seed, "leak", "subsample")
        suspects = estimators.leak_suspects(self.sigmas, settings.windows, settings.jagg_frac, knots, seed)
        plans = {e.name: e.plans[0] for e in suspects}
        gradients: dict[str, list[torch.Tensor]] = {e.name: [] for e in suspects}
        with recorded(self.record.cells, f"eta={eta:g}/leak", eta=eta):
            bar = tqdm(total=settings.leak_batches, desc=f"leak test, eta {eta:g}", unit="batch")

            def differentiate(batch: Batch) -> dict[str, torch.Tensor]:
                ones = torch.ones_like(batch.advantages)
                found = plan_gradients(batch.policy, batch.trajectory, ones, self.objective, plans)
                bar.update()
                return found

            with bar:
                batches = [self.batch(eta, "leak", number) for number in range(settings.leak_batches)]
                for found in self.side_by_side(differentiate, batches):
                    for name, gradient in found.items():
                        gradients[name].append(gradient)
        if self.record.cells[-1].status == "ok":
            for estimator in suspects:
                name = f"eta={eta:g}/leak/{estimator.name}"
                with recorded(self.record.cells, name, **estimator.describe(), eta=eta) as cell:
                    gram = gram_matrix(torch.stack(gradients[estimator.name]))
                    cell.samples = {"gram": gram.flatten().tolist()}
                    cell.values = asdict(leak_test(gram))
        self.save()

    def contact_sheet(self) -> None:
        """Write one SDE rollout batch as a picture, a row per prompt."""
        eta = self.settings.etas[0]
        with recorded(self.record.cells, "samples", eta=eta) as cell:
            batch = self.batch(eta, "evaluation", 0)
            images = self.backbone.decode(batch.trajectory.final)
            sheet = image_grid(images, columns=self.settings.recipe.samples)
            write_atomically(self.out / "samples.png", png_bytes(sheet))
            cell.values = {"prompts": batch.prompts, "rewards": batch.rewards.tolist(), "seed": batch.seed}
        self.save()

    def save(self) -> None:
        self.record.write(self.out / "record.json")


def judge(tables: list[CrossTable], estimator: Estimator, windows: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Raw samples, one per rollout batch: each metric of the whole update, and of each group of each window."""
    parts: dict[str, range | None] = {"": None}
    for window in windows:
        for number, group in enumerate(groups_of(tables[0].steps, window)):
            parts[f"w{window}.group{number}."] = group
    samples: dict[str, list[float | None]] = {}
    for prefix, steps in parts.items():
        for table in tables:
            found = [similarity(table, plan, steps) for plan in estimator.plans]
            for metric in METRICS:
                value = mean_of_draws([getattr(f, metric) for f in found])
                samples.setdefault(prefix + metric, []).append(value)
    return samples
