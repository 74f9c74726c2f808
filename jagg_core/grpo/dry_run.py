"""What a training run would compute, need and write, from one micro-batch that is timed; nothing is written."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from jagg_core.devices import is_accelerator, peak_memory
from jagg_core.distributed import ranks
from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.metrics import Metrics
from jagg_core.grpo.run import require_fresh_or_same
from jagg_core.grpo.trainer import GRPOTrainer

FEWEST = 4
"""Samples that are timed at least, so that advantages have a spread."""


@dataclass(frozen=True)
class Estimate:
    """What a run would take, on one rank where not said otherwise.

    Attributes:
        passes: differentiated passes over a sample in a pass over the rollout.
        rollout_evaluations: velocities of single samples that the rollouts of an update evaluate, over all ranks.
        update_forwards: those of its gradient.
        update_backwards: backwards through single velocities.
        looks: evaluations and pictures of held-out samples in the whole run.
        held_out_evaluations: velocities of single samples in all of these.
        update_s: seconds of an update.
        look_s: seconds of a look.
        seconds: of the whole run.
        memory_bytes: the peak while a micro-batch was trained; on a CPU of the whole process; None where the device
            does not count.
        stored_bytes: rollouts of the update's other micro-batches, which wait for their advantages.
        checkpoint_bytes: of a checkpoint, over all ranks.
        weights_bytes: of the trained weights in fp32.
    """

    passes: float
    rollout_evaluations: int
    update_forwards: int
    update_backwards: int
    looks: int
    held_out_evaluations: int
    update_s: float
    look_s: float
    seconds: float
    memory_bytes: int | None
    stored_bytes: int
    checkpoint_bytes: int
    weights_bytes: int


def estimate(config: GRPOConfig, folder: Path, resume: bool = False) -> Estimate:
    """Loads the model, trains one micro-batch twice in memory, times the second, and scales it. Called on every rank.

    Micro-batches are taken to cost the same each; writing files is left out.

    Raises:
        ValueError: settings that cannot be used, a folder that holds another run, or a reward or gradient that is not
            finite.
    """
    require_fresh_or_same(config, folder, resume)
    given, run, optimizer = config.rollout, config.run, config.optimizer
    config.check_ranks(ranks())
    size = min(given.micro_batch, given.batch // ranks())
    samples = math.ceil(max(FEWEST, size * ranks()) / ranks()) * ranks()
    small = replace(
        config,
        rollout=replace(given, prompts=1, samples=samples),
        optimizer=replace(optimizer, steps_per_rollout=1, epochs=1),
    )
    trainer = GRPOTrainer(small)
    device = trainer.learner.backbone.device
    for _ in range(2):
        metrics = trainer.step()
        if metrics.skipped:
            raise ValueError(f"an update must be finite to be timed, got: {metrics.skipped}")
    memory = peak_memory(device) if is_accelerator(device) else _resident()
    tensors, weights = trainer.learner.tensors(), trainer.learner.weights()
    return _scaled(
        config,
        metrics,
        timed=math.ceil(samples / ranks() / given.micro_batch),
        memory_bytes=memory,
        latent_bytes=4 * math.prod(trainer.learner.backbone.latent_shape),
        checkpoint_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        weights_bytes=sum(4 * tensor.numel() for name, tensor in weights.items() if name.startswith("weights/")),
        looks=_looks(run.updates, run.eval_every, run.samples_every),
        rewards=1 + len(run.eval_rewards),
    )


def _scaled(
    config: GRPOConfig,
    metrics: Metrics,
    *,
    timed: int,
    memory_bytes: int | None,
    latent_bytes: int,
    checkpoint_bytes: int,
    weights_bytes: int,
    looks: int,
    rewards: int,
) -> Estimate:
    """From the figures of ``timed`` micro-batches to those of the run."""
    given, run, optimizer = config.rollout, config.run, config.optimizer
    share = given.batch // ranks()
    batches = math.ceil(share / given.micro_batch)
    optimizer_steps = optimizer.epochs * optimizer.steps_per_rollout
    spent = {name: value / timed for name, value in metrics.seconds.items()}
    gradient = spent["forward"] + spent["upstream"] + spent["backward"]
    forwards = metrics.forwards / metrics.micro_batches
    # off policy all trained steps have a forward for their ratio
    every = forwards if config.plan.upstream == "interpolated" else max(forwards, config.trained_steps)
    on_policy = 1 / optimizer_steps
    passed = optimizer.epochs * (on_policy * forwards + (1 - on_policy) * every)
    velocity_s = spent["rollout"] / config.rollout_evaluations
    per_batch = spent["rollout"] + spent["reward"] + optimizer.epochs * gradient
    per_batch += (passed - optimizer.epochs * forwards) * velocity_s
    update_s = batches * per_batch + optimizer_steps * metrics.seconds["optimizer"]
    held_out = run.eval_prompts * run.eval_samples
    look_batches = math.ceil(held_out / ranks() / given.micro_batch)
    look_s = look_batches * (spent["rollout"] + rewards * spent["reward"]) if looks else 0.0
    return Estimate(
        passes=metrics.passes,
        rollout_evaluations=given.batch * config.rollout_evaluations,
        update_forwards=round(given.batch * passed),
        update_backwards=round(given.batch * optimizer.epochs * metrics.passes),
        looks=looks,
        held_out_evaluations=looks * held_out * given.steps,
        update_s=update_s,
        look_s=look_s,
        seconds=run.updates * update_s + looks * look_s,
        memory_bytes=memory_bytes,
        stored_bytes=max(0, batches - timed) * given.micro_batch * (given.steps + 1) * latent_bytes,
        checkpoint_bytes=checkpoint_bytes,
        weights_bytes=weights_bytes,
    )


def _looks(updates: int, evaluated: int, drawn: int) -> int:
    """Counts the updates after which held-out samples are drawn, one before the first for a picture included."""
    at = set(range(evaluated, updates + 1, evaluated)) if evaluated else set()
    return len(at | ({*range(0, updates + 1, drawn), updates} if drawn else set()))


def _resident() -> int:
    """Peak resident bytes of this process, libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def lines(config: GRPOConfig, folder: Path, result: Estimate) -> list[str]:
    """Says what a run would take, for a terminal."""
    run = config.run
    files = ["config.json", "environment.json", "metrics.csv", "weights.safetensors"]
    files += ["evaluation.csv"] * bool(run.eval_every) + ["samples/"] * bool(run.samples_every)
    files += ["recalibration.csv"] * bool(config.plan.recalibrate_every) + ["events/"] * run.tensorboard
    kept = min(run.keep, 1 + (run.updates - 1) // run.checkpoint_every if run.checkpoint_every else 1)
    wide = 20
    peak = "unknown" if result.memory_bytes is None else f"{result.memory_bytes / 2**30:.2f} GiB"
    rows = {
        "passes": f"{result.passes:g} of {config.trained_steps} trained steps",
        "network, an update": f"{result.rollout_evaluations} evaluations in rollouts, {result.update_forwards} "
        f"forwards and {result.update_backwards} backwards in the gradient, of single samples over all ranks",
        "network, held out": f"{result.held_out_evaluations} evaluations in {result.looks} looks",
        "memory, this rank": f"{peak} at the peak of a micro-batch, and "
        f"{result.stored_bytes / 2**30:.2f} GiB of stored rollouts",
        "seconds": f"{result.update_s:.3g} an update, {result.look_s:.3g} a look at held-out samples",
        "minutes": f"{result.seconds / 60:.3g} for {run.updates} updates, from one timed update on a micro-batch",
        "would write": f"{', '.join(files)} in {folder}: weights of {result.weights_bytes / 2**20:.1f} MiB and {kept} "
        f"checkpoints of {result.checkpoint_bytes / 2**20:.1f} MiB",
    }
    notes = []
    if config.plan.recalibrate_every:
        notes.append("left out: searches of knots (recalibrate_every)")
    if config.plan.keep_graphs:
        notes.append("left out: memory of the graphs that are kept (keep_graphs)")
    return [f"{name:{wide}}{text}" for name, text in rows.items()] + notes
