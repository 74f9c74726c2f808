"""A training run in a folder: its configuration, logs and checkpoints, begun or resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.benchmark.utils.timer import timer

from jagg_core.backbones.trained import is_adapter, weights_files
from jagg_core.checks import require_device
from jagg_core.distributed import RankFailed, on_first_rank, rank, ranks
from jagg_core.environment import environment
from jagg_core.files import only_run_in, remove_partial, write_tensors
from jagg_core.grpo import checkpoint
from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.held_out import held_out, held_out_prompts
from jagg_core.grpo.inputs import require_same
from jagg_core.grpo.learner import Learner
from jagg_core.grpo.log import Log, Pictures, open_loggers, read_rows
from jagg_core.grpo.metrics import Metrics
from jagg_core.grpo.trainer import GRPOTrainer, TrainingStopped
from jagg_core.images import image_grid
from jagg_core.launch import require_same_settings, require_shared
from jagg_core.rewards import reward_versions
from jagg_core.strict_json import plain, read_json, write_json

FREE = {
    "model": ("device",),
    "run": (
        *("updates", "checkpoint_every", "keep", "samples_every", "max_skipped", "audit_every", "audit_below"),
        *("timeout", "tensorboard", "wandb"),
    ),
}
"""Settings that a resumed run may change, beside those of ``parallel``; all others decide what is computed."""


class WriteFailed(OSError):
    """A file of a run could not be written; names the newest whole checkpoint."""


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
    asked for ``evaluation.csv``, ``recalibration.csv`` and ``samples/``, and at the end ``weights.safetensors``.

    Args:
        config: the run.
        folder: of the run.
        resume: go on after the newest whole checkpoint; begin, if there is none.
        warm_start: a checkpoint whose weights start a new run, without the optimizer's state.
        progress: called after every update.

    Raises:
        ValueError: another run is at work in the folder, it holds a run and ``resume`` is not set, a run with other
            settings is resumed, a checkpoint does not fit, or ranks have other settings or another folder.
        TrainingStopped: too many updates were skipped; what was logged and checkpointed stays.
        WriteFailed: a log, a checkpoint or the weights could not be written, as on a full disk.
        RankFailed: something else failed on one of several ranks, see there.
    """
    device = require_device(config.model.device)
    require_same_settings(asdict(config) | {"resume": resume, "warm_start": warm_start})
    with ExitStack() as held:
        on_first_rank(lambda: _hold(held, config, folder, resume), device)
        require_shared(folder, device)
        trainer = _begun(config, folder, resume, warm_start)
        with _writing(folder):
            logs = on_first_rank(lambda: _open_logs(held, folder, trainer), device) or Logs({}, None)
        _go_on(trainer, folder, logs, progress)
        with _writing(folder):
            export(trainer.learner, folder)
    return trainer


def _hold(held: ExitStack, config: GRPOConfig, folder: Path, resume: bool) -> None:
    held.enter_context(only_run_in(folder))
    remove_partial(folder / "checkpoints")
    require_fresh_or_same(config, folder, resume)
    for name in ("metrics", "evaluation", "recalibration"):
        read_rows(folder / f"{name}.csv")  # one that cannot be read is an error before anything is loaded


def _begun(config: GRPOConfig, folder: Path, resume: bool, warm_start: Path | None) -> GRPOTrainer:
    """The trainer where the run begins, or goes on."""
    start = checkpoint.newest(folder / "checkpoints") if resume else None
    if start is None and warm_start is not None:
        reason = checkpoint.why_damaged(warm_start)
        if reason is not None:
            raise ValueError(f"warm_start must be a checkpoint, such as RUN/checkpoints/update-00000020: {reason}")
    if resume and start is None and read_rows(folder / "metrics.csv") and rank() == 0:
        warnings.warn(f"resume: {folder} holds no checkpoint, so the run begins anew", stacklevel=3)
    trainer = GRPOTrainer(config)
    if start is not None:
        read(trainer, start)
    elif warm_start is not None:
        checkpoint.load_tensors(warm_start, trainer.learner.weights())
        trainer.learner.begin()
    return trainer


def _go_on(
    trainer: GRPOTrainer,
    folder: Path,
    logs: Logs,
    progress: Callable[[Metrics], None] | None,
) -> None:
    """Makes the updates that are left."""
    config, device = trainer.config, trainer.learner.backbone.device

    def add(name: str, row: Mapping[str, Any]) -> None:
        with _writing(folder):
            on_first_rank(lambda: logs.tables[name].add(row), device)

    def due(every: int) -> bool:
        return bool(every) and trainer.update % every == 0

    def look(*, score: bool, draw: bool) -> None:
        start = timer()
        result = held_out(trainer, score=score, draw=draw)
        if score:
            add("evaluation", {"update": trainer.update, **result.rewards, "evaluation_s": timer() - start})
        if result.images is not None:
            images = result.images
            with _writing(folder):
                on_first_rank(lambda: logs.draw(trainer.update, images, config.run.eval_samples), device)

    if trainer.update == 0 and config.run.samples_every:
        look(score=False, draw=True)
    while trainer.update < config.run.updates:
        if trainer.update and due(config.plan.recalibrate_every):
            add("recalibration", {"update": trainer.update, **trainer.recalibrate()})
        try:
            metrics = trainer.step()
        except TrainingStopped as stopped:
            add("metrics", stopped.metrics.row())
            raise
        add("metrics", metrics.row())
        last = trainer.update == config.run.updates
        score = due(config.run.eval_every)
        draw = due(config.run.samples_every) or (last and config.run.samples_every > 0)
        if score or draw:
            look(score=score, draw=draw)
        if last or due(config.run.checkpoint_every):
            with _writing(folder):
                write(trainer, folder / "checkpoints")
        if progress is not None:
            progress(metrics)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Ends the run on every rank if the body cannot write: one line, with the checkpoint that the run goes on from."""
    try:
        yield
    except (OSError, RankFailed) as error:
        whole = checkpoint.newest_whole(folder / "checkpoints")
        after = "no checkpoint yet" if whole is None else f"the newest whole checkpoint is {whole}"
        raise WriteFailed(f"{folder} cannot be written: {error}; {after}") from error


def write(trainer: GRPOTrainer, folder: Path) -> Path:
    """Write a checkpoint of the trainer."""
    state = trainer.state() | {"config": plain(asdict(trainer.config)), "ranks": ranks()}
    return checkpoint.save(folder, trainer.update, trainer.learner.tensors(), state, trainer.config.run.keep)


def read(trainer: GRPOTrainer, path: Path) -> None:
    """Restore a trainer of the same configuration from a checkpoint.

    Raises:
        ValueError: it lacks something, such as the optimizer's state, or was made with other prompts, frozen weights,
            rewards or another calibration.
    """
    state = checkpoint.read_state(path)
    require_same(state.get("inputs", {}), trainer.inputs)
    try:
        checkpoint.load_tensors(path, trainer.learner.tensors())
    except ValueError as error:
        raise ValueError(f"{error}; to take over the weights alone, start a new run with warm_start") from error
    trainer.restore(int(state["update"]), state)


def export(learner: Learner, folder: Path) -> None:
    """Writes the trained weights, averaged where there is an average, in fp32: see `jagg_core.backbones.trained`."""
    backbone = learner.backbone
    with learner.averaged():
        tensors: dict[str, Any] = dict(zip(learner.names, learner.masters.tensors, strict=True))
        if not is_adapter(backbone.transformer, tensors):
            tensors = backbone.transformer.state_dict() | tensors
        whole = {}
        for name, tensor in tensors.items():
            found = tensor.detach().float() if name in learner.names else tensor.detach()
            found = found.full_tensor() if hasattr(found, "full_tensor") else found.clone()
            if rank() == 0:  # whole weights on every rank may be more than the host has
                whole[name] = found.cpu()

    def write_all() -> None:
        for path, file in weights_files(backbone, whole).items():
            write_tensors(folder / path, file.tensors, file.metadata)

    on_first_rank(write_all, backbone.device)


@dataclass
class Logs:
    """What a run writes while it goes, on the first rank; ``pictures`` where they are asked for."""

    tables: dict[str, Log]
    pictures: Pictures | None

    def draw(self, update: int, images: Tensor, columns: int) -> None:
        """Adds a picture of images ``[N, C, H, W]``, ``columns`` in a row."""
        if self.pictures is not None:
            self.pictures.add(update, image_grid(images, columns))


def _open_logs(held: ExitStack, folder: Path, trainer: GRPOTrainer) -> Logs:
    """Store what the run is, and open its logs."""
    config, done, deferred = trainer.config, trainer.update, trainer.learner.deferred
    write_json(folder / "config.json", asdict(config))
    versions = {k: v for one in (trainer.reward, *trainer.watched.values()) for k, v in reward_versions(one).items()}
    parallel = {"ranks": ranks(), "unreduced_gradient_bytes": deferred.nbytes if deferred else 0}
    write_json(folder / "environment.json", environment() | parallel | {"rewards": versions})
    loggers = open_loggers(folder, config.run, done)
    for logger in loggers:
        held.callback(logger.close)
    # knots are searched before an update, so a run that resumes after `done` searches those of `done` again
    kept = {"evaluation": (config.run.eval_every, done), "recalibration": (config.plan.recalibrate_every, done - 1)}
    others = {
        name: Log(folder / f"{name}.csv", last, loggers, f"{name}/") for name, (every, last) in kept.items() if every
    }
    pictures = None
    if config.run.samples_every:
        pictures = Pictures(folder / "samples", done, loggers, held_out_prompts(trainer))
    return Logs({"metrics": Log(folder / "metrics.csv", done, loggers), **others}, pictures)


def require_fresh_or_same(config: GRPOConfig, folder: Path, resume: bool) -> None:
    """Refuses a folder that holds a run, unless it is resumed with the same settings.

    Raises:
        ValueError: it does; names the setting that differs.
    """
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
                raise ValueError(f"resume: the run was begun with {section}.{name} {found!r}, got {value!r}")
