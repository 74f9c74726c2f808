"""Reward curves: the same training by several estimators, in lockstep, so that all are timed on the same machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.measure.curve_settings import Curves
from jagg_core.environment import command_line
from jagg_core.grpo import GRPOTrainer
from jagg_core.grpo.settings import (
    PlanSettings,
)
from jagg_core.records import Cell, Record
from jagg_core.seeding import generator_for
from jagg_core.strict_json import plain

NOT_REACHED = "the run ended before this cell"


def run(settings: Curves, out: Path) -> Record:
    """Trains every arm with every seed; arms take turns at every update. Written after every seed.

    Seeds that ``out`` holds already, of the same settings but for ``seeds`` and ``workers``, are not run again.

    Raises:
        ValueError: ``out`` holds curves of other settings, or seeds that are not asked for.
    """
    chosen = {name: plan for name, plan in settings.estimators().items() if not settings.arms or name in settings.arms}
    seeds = range(settings.seed, settings.seed + settings.seeds)
    begun = _begun(settings, out)
    names = [_name(arm, seed) for seed in seeds for arm in chosen]
    if not begun.keys() <= set(names):
        raise ValueError(f"seeds: {out} holds {sorted(begun.keys() - set(names))} too: ask for them, or go elsewhere")
    record = Record(
        "curves",
        command_line(),
        settings.backbone,
        asdict(settings),
        seeds={"runs": list(seeds)},
        cells=[begun.get(name, Cell(name, "skipped", NOT_REACHED)) for name in names],
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
    """Yields cells of every seed, in the order in which they end."""
    if settings.workers == 1:
        yield from (_run_seed(settings, chosen, seed, bar.update) for seed in seeds)
        return
    context = get_context("spawn")
    done, ended_early = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(settings.workers, context, _begin_worker, (done, ended_early))
    try:
        left = {pool.submit(_run_seed, settings, chosen, seed, _count_update) for seed in seeds}
        while left:
            ended, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
            bar.update(done.value - bar.n)
            yield from (future.result() for future in ended)
    except BrokenProcessPool as error:
        raise MemoryError(
            f"a process that trained a seed was killed, perhaps for memory: try fewer than {settings.workers} workers"
        ) from error
    finally:
        ended_early.set()
        pool.shutdown(cancel_futures=True)


_SHARED: Any = None
"""In a worker: how many updates all workers have done, and whether nobody waits for more."""


def _begin_worker(done: Any, ended_early: Any) -> None:
    global _SHARED
    _SHARED = done, ended_early
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches workers too; none takes another seed
    torch.set_num_threads(1)


def _count_update() -> None:
    done, ended_early = _SHARED
    started_by = parent_process()
    if ended_early.is_set() or (started_by is not None and not started_by.is_alive()):
        os._exit(1)  # nobody would write the results
    with done.get_lock():
        done.value += 1


def _name(arm: str, seed: int) -> str:
    return f"{arm}/seed={seed}"


def _begun(settings: Curves, out: Path) -> dict[str, Cell]:
    """Returns cells that were run before, by name."""
    path = out / "record.json"
    if not path.exists():
        return {}
    stored, wanted = Record.read(path), plain(asdict(settings))
    free = ("seeds", "workers")
    other = [k for k in wanted if k not in free and (k not in stored.settings or stored.settings[k] != wanted[k])]
    if stored.kind != "curves" or other:
        what = f"curves with {other[0]} {stored.settings.get(other[0])!r}" if stored.kind == "curves" else stored.kind
        raise ValueError(f"out: {path} is a record of {what}; choose another folder")
    return {cell.name: cell for cell in stored.cells if cell.status != "skipped"}


def _run_seed(settings: Curves, chosen: dict[str, PlanSettings], seed: int, count: Callable[[], object]) -> list[Cell]:
    """Runs the cells of a seed. ``count`` is called after every update of an arm."""
    cells, trainers = {}, {}
    for arm, estimator in chosen.items():
        cells[arm] = Cell(_name(arm, seed), settings={"arm": arm, "seed": seed, "plan": plain(asdict(estimator))})
        with _recorded(cells[arm]):
            trainers[arm] = GRPOTrainer(settings.config(estimator, seed))
            _evaluate(cells[arm], trainers[arm])
    order = generator_for(seed, "arm order")
    for update in range(max(map(settings.last_update, chosen))):
        for place in torch.randperm(len(chosen), generator=order).tolist():
            arm = list(chosen)[place]
            if update < settings.last_update(arm):
                if cells[arm].status == "ok":
                    _advance(cells[arm], trainers[arm], settings)
                count()
    return list(cells.values())


def _advance(cell: Cell, trainer: GRPOTrainer, settings: Curves) -> None:
    with _recorded(cell):
        _step(cell, trainer)
        due = trainer.update % settings.eval_every == 0
        if due or trainer.update in (settings.updates, settings.last_update(cell.settings["arm"])):
            _evaluate(cell, trainer)


def _step(cell: Cell, trainer: GRPOTrainer) -> None:
    metrics = trainer.step()
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
        cell.values["passes"] = round(metrics.passes * metrics.micro_batches)
    cell.values["skipped"] = trainer.skipped


@contextmanager
def _recorded(cell: Cell) -> Iterator[None]:
    """Records in the cell what fails in the body; other arms and seeds go on."""
    try:
        yield
    except (ValueError, RuntimeError, ArithmeticError, OSError) as error:
        cell.status, cell.reason = "failed", f"{type(error).__name__}: {error}"


def _evaluate(cell: Cell, trainer: GRPOTrainer) -> None:
    """Adds held-out rewards, and after how many updates they are."""
    rewards = trainer.evaluate()
    cell.samples.setdefault("evaluated_after", []).append(float(trainer.update))
    for name, value in rewards.items():
        cell.samples.setdefault(f"held_out {name}", []).append(value)
