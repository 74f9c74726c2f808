"""A training run in a folder: its configuration, logs and checkpoints, begun or resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from jagg_core.distributed import barrier, rank, ranks
from jagg_core.grpo import checkpoint
from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.learner import Learner
from jagg_core.grpo.log import Log
from jagg_core.grpo.metrics import Metrics
from jagg_core.grpo.trainer import GRPOTrainer
from jagg_core.records import environment, plain, read_json, require_writable, write_json
from jagg_core.rewards import reward_versions

FREE = {"model": ("device",), "run": ("updates", "checkpoint_every", "keep", "timeout", "tensorboard", "wandb")}
"""Settings that a resumed run may change, beside those of ``parallel``; all others decide what is computed."""


def train(
    config: GRPOConfig,
    folder: Path,
    *,
    resume: bool = False,
    warm_start: Path | None = None,
    progress: Callable[[Metrics], None] | None = None,
) -> GRPOTrainer:
    """Train in a run folder. Called on every rank.

    The folder gets ``config.json``, ``environment.json``, ``metrics.csv``, ``checkpoints/``, where they are
    asked for ``evaluation.csv`` and ``recalibration.csv``, and at the end ``weights.safetensors``.

    Args:
        config: the run.
        folder: of the run.
        resume: go on after the newest whole checkpoint; begin, if there is none.
        warm_start: a checkpoint whose weights start a new run, without the optimizer's state.
        progress: called after every update.

    Raises:
        ValueError: the folder holds a run and ``resume`` is not set, a run with other settings is resumed, or a
            checkpoint does not fit.
        TrainingStopped: too many updates were skipped; what was logged and checkpointed stays.
    """
    checkpoints = folder / "checkpoints"
    _require_fresh_or_same(config, folder, resume)
    barrier()  # the first rank writes what the others look for
    trainer = GRPOTrainer(config)
    start = checkpoint.newest(checkpoints) if resume else None
    if start is not None:
        read(trainer, start)
    elif warm_start is not None:
        wanted = trainer.learner.tensors(optimizer=False)
        checkpoint.load_tensors(warm_start, wanted)
        trainer.learner.masters.publish()
    if rank() == 0:
        write_json(folder / "config.json", asdict(config))
        versions = {
            k: v for one in (trainer.reward, *trainer.watched.values()) for k, v in reward_versions(one).items()
        }
        deferred = trainer.learner.deferred
        parallel = {"ranks": ranks(), "unreduced_gradient_bytes": deferred.nbytes if deferred else 0}
        write_json(folder / "environment.json", environment() | parallel | {"rewards": versions})
    barrier()
    logs = _open_logs(folder, config, trainer.update) if rank() == 0 else {}
    try:
        while trainer.update < config.run.updates:
            every = config.plan.recalibrate_every
            if every and trainer.update and trainer.update % every == 0:
                found = trainer.recalibrate()
                if logs:
                    logs["recalibration"].add({"update": trainer.update, **found})
            metrics = trainer.step()
            if logs:
                logs["metrics"].add(metrics.row())
            if config.run.eval_every and trainer.update % config.run.eval_every == 0:
                evaluated = trainer.evaluate()
                if logs:
                    logs["evaluation"].add({"update": trainer.update, **evaluated})
            every = config.run.checkpoint_every
            if trainer.update == config.run.updates or (every and trainer.update % every == 0):
                write(trainer, checkpoints)
            if progress is not None:
                progress(metrics)
    finally:
        for log in logs.values():
            log.close()
    export(trainer.learner, folder / "weights.safetensors")
    return trainer


def write(trainer: GRPOTrainer, folder: Path) -> Path:
    """Write a checkpoint of the trainer."""
    state = trainer.state() | {"config": plain(asdict(trainer.config)), "ranks": ranks()}
    return checkpoint.save(folder, trainer.update, trainer.learner.tensors(), state, trainer.config.run.keep)


def read(trainer: GRPOTrainer, path: Path) -> None:
    """Restore a trainer of the same configuration from a checkpoint.

    Raises:
        ValueError: it lacks something, such as the optimizer's state.
    """
    state = checkpoint.read_state(path)
    try:
        checkpoint.load_tensors(path, trainer.learner.tensors())
    except ValueError as error:
        raise ValueError(f"{error}; to take over the weights alone, start a new run with warm_start") from error
    trainer.restore(int(state["update"]), state)


def export(learner: Learner, path: Path) -> None:
    """Write the trained weights, averaged where there is an average, in fp32 under the transformer's own names."""
    with learner.averaged():
        whole = {}
        for name, tensor in zip(learner.names, learner.masters.tensors, strict=True):
            found: Any = tensor.detach()
            whole[name] = (found.full_tensor() if hasattr(found, "full_tensor") else found.clone()).float().cpu()
    if rank() == 0:
        partial = path.with_name(f".{path.name}")
        save_file(whole, partial)
        partial.replace(path)


def _open_logs(folder: Path, config: GRPOConfig, done: int) -> dict[str, Log]:
    plain_csv = replace(config.run, tensorboard=False, wandb="")
    # knots are searched before an update, so a run that resumes after `done` searches those of `done` again
    kept = {"evaluation": (config.run.eval_every, done), "recalibration": (config.plan.recalibrate_every, done - 1)}
    others = {name: Log(folder, plain_csv, name, last) for name, (every, last) in kept.items() if every}
    return {"metrics": Log(folder, config.run, "metrics", done), **others}


def _require_fresh_or_same(config: GRPOConfig, folder: Path, resume: bool) -> None:
    require_writable(folder / "config.json")
    if not (folder / "config.json").exists():
        return
    if not resume:
        raise ValueError(f"out: {folder} holds a run already; resume it with --resume, or choose another folder")
    stored, wanted = read_json(folder / "config.json"), plain(asdict(config))
    if not isinstance(stored, dict) or not all(isinstance(section, dict) for section in stored.values()):
        raise ValueError(f"resume: {folder / 'config.json'} is not the configuration of a run")
    for section, values in wanted.items():
        for name, value in values.items():
            if section == "parallel" or name in FREE.get(section, ()):
                continue
            found = stored.get(section, {}).get(name)
            if found != value:
                raise ValueError(f"resume: the run was begun with {section}.{name} {found!r}, found {value!r}")
