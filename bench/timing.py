"""The loop that times arms: each is verified against a plain loop, then all are timed in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.compiling import compile_seconds, compiled_graphs, require_graphs, uncompiled
from jagg_core.records import Cell, recorded
from jagg_core.reference import TOLERANCE, plain_gradient, relative_error
from jagg_core.seeding import generator_for

if TYPE_CHECKING:
    from bench.group import ArmRun
    from bench.settings import GroupBench

Execute = Callable[[str], dict[str, float]]
"""Runs an arm by its name, and returns seconds by name of the sample."""


def clear(parameters: Sequence[Tensor]) -> None:
    """Frees all gradients."""
    for parameter in parameters:
        parameter.grad = None


def gradient(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns ``.grad`` of every parameter; zeros where there is none."""
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]


def verify(actual: Sequence[Tensor], expected: Sequence[Tensor], dtype: str) -> float:
    """Computes the relative error of a gradient.

    Raises:
        ArithmeticError: it is beyond the `TOLERANCE` of the network's ``dtype``.
    """
    error, limit = relative_error(actual, expected), TOLERANCE[getattr(torch, dtype)]
    if not error <= limit:
        raise ArithmeticError(f"gradient differs from the plain loop by {error:.2g} (limit {limit:g})")
    return error


def expected_gradient(run: ArmRun, backend: str | None) -> list[Tensor]:
    """Computes the gradient of an arm's plan by the plain loop, without what torch.compile made."""
    group = run.group
    with uncompiled(backend):
        return plain_gradient(group.policy, group.parameters, group.trajectory, group.upstream, run.plan)


def verify_arms(
    runs: Mapping[str, ArmRun],
    execute: Execute,
    settings: GroupBench,
    progress: Callable[[str], None] | None = None,
) -> list[Cell]:
    """Verifies every arm, and returns a cell for each; an arm that fails is recorded as failed.

    Its warm-up calls the network with and without a graph as the arm does, so that whatever is compiled or set up at a
    first call is so before the rounds; ``compile_s`` is what torch.compile took of it.
    """
    cells: list[Cell] = []
    graphs = compiled_graphs()
    for number, (name, run) in enumerate(runs.items(), 1):
        with recorded(cells, name, upstream=run.arm.upstream, backward=run.arm.backward) as cell:
            before = compile_seconds()
            expected = expected_gradient(run, settings.compile)
            for _ in range(settings.warmup):
                execute(name)
            require_graphs(settings.compile, graphs)
            error = verify(gradient(run.group.parameters), expected, settings.dtype)
            compiling = compile_seconds() - before
            cell.values = {"relative_error": error, "passes": run.plan.passes, "compile_s": compiling}
        if progress is not None:
            progress(f"verified {name}, {number} of {len(runs)} arms")
    return cells


def time_in_rounds(
    cells: Sequence[Cell],
    execute: Execute,
    rounds: int,
    seed: int,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Adds what ``execute`` measures to every cell that is ok, once per round.

    The order of the arms is drawn in every round, so that a machine that gets slower does so for all of them. An arm
    during which torch.compile made a graph timed that instead: it is failed after the rounds.
    """
    timed = [cell for cell in cells if cell.status == "ok"]
    compiled = dict.fromkeys(range(len(timed)), 0)
    order = generator_for(seed, "arm order")
    for number in range(rounds):
        for index in torch.randperm(len(timed), generator=order).tolist():
            before = compiled_graphs()
            for name, seconds in execute(timed[index].name).items():
                timed[index].samples.setdefault(name, []).append(seconds)
            compiled[index] += compiled_graphs() - before
        if progress is not None:
            progress(f"round {number + 1} of {rounds}")
    for index, graphs in compiled.items():
        if graphs:
            cell = timed[index]
            cell.status, cell.reason = "failed", f"torch.compile made graphs after the warm-up, {graphs} in all"
            cell.samples, cell.values = {}, {}
