"""Process groups: how ranks join one, and what they decide together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jagg_core.checks import require_device
from jagg_core.policy import VelocityPolicy

T = TypeVar("T")

AROUND: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("around collectives", default=nullcontext)
"""Makes what `on_any_rank`, `told_by_ranks` and `gathered` enter while a collective runs, such as a stopwatch."""


class RankFailed(RuntimeError):
    """Something failed on some ranks; raised on every one, and names them and their errors."""


def on_any_rank(here: bool, device: torch.device) -> bool:
    """Whether something is true on this or any other rank of the default process group."""
    if ranks() == 1:
        return here
    flag = torch.tensor(int(here), device=device)
    with AROUND.get()():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def told_by_ranks(text: str, device: torch.device) -> str:
    """What ranks have to say, with their numbers if there are several; empty if nobody says anything.

    Called on every rank. Costs an `on_any_rank` while nobody says anything.
    """
    if ranks() == 1 or not on_any_rank(bool(text), device):
        return text
    told = [""] * ranks()
    with AROUND.get()():
        dist.all_gather_object(told, text)
    return "; ".join(f"rank {number}: {said}" for number, said in enumerate(told) if said)


class FirstError:
    """The first error of this rank in a loop that goes on because other ranks wait for it in collectives.

    Attributes:
        error: None until there is one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def keep(self, kind: type[Exception]) -> Iterator[None]:
        """An error of that kind ends the body, and is kept."""
        try:
            yield
        except kind as error:
            self.error = self.error or error


def raise_together(error: Exception | None, device: torch.device) -> None:
    """Raise on every rank if there is an error on any. Called on every rank, so not after an error inside collectives.

    Raises:
        RankFailed: there is one; on a single rank it is raised as it is.
    """
    if error is not None and ranks() == 1:
        raise error
    told = told_by_ranks("" if error is None else f"{type(error).__name__}: {error}", device)
    if told:
        raise RankFailed(told) from error


def on_first_rank(work: Callable[[], T], device: torch.device) -> T | None:
    """What ``work`` returns on the first rank, None on the others, which wait for it. There are no collectives in it.

    Raises:
        RankFailed: it failed; on a single rank its error is raised as it is.
    """
    found, broken = None, FirstError()
    with broken.keep(Exception):
        found = work() if rank() == 0 else None
    raise_together(broken.error, device)
    return found


def ranks() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's place in it; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathered(values: Tensor) -> Tensor:
    """``values`` [N, ...] of all ranks, in their order, ``[ranks * N, ...]``; equal shapes everywhere."""
    if ranks() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(ranks())]
    with AROUND.get()():
        dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def join(device: str, timeout: int) -> torch.device:
    """Join the process group that ``torchrun`` set up, if it did. Returns this rank's device.

    ``timeout``: seconds that a rank waits for the others.

    Raises:
        ValueError: a variable of ``torchrun`` is missing or no such number, or see `require_device_each`.
    """
    world = _launched("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1
    if world == 1 or dist.is_initialized():
        return require_device(device)
    missing = [name for name in LAUNCH if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {world}, and {', '.join(missing)} must be set with it: start the ranks with torchrun, or "
            "unset WORLD_SIZE for one process"
        )
    place, local = _launched("RANK", 0, world), _launched("LOCAL_RANK", 0, world)
    require_device_each(device, ranks_here(local + 1))
    return join_as(place, local, world, device, timeout)


LAUNCH = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What ``torchrun`` sets beside ``WORLD_SIZE`` and ranks cannot do without."""


def ranks_here(otherwise: int) -> int:
    """Ranks on this machine as ``torchrun`` tells them, ``otherwise`` without it."""
    return _launched("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else otherwise


def _launched(name: str, low: int, end: int | None = None) -> int:
    """A variable of the launcher, a whole number of at least ``low`` and below ``end``."""
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()) or int(text) < low or (end is not None and int(text) >= end):
        wanted = f"of at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ValueError(f"{name} must be a whole number {wanted}, as torchrun sets it, got {text!r}")
    return int(text)


def require_device_each(device: str, here: int) -> None:
    """Check that each of the ``here`` ranks of this machine has a device.

    Raises:
        ValueError: no such device, a GPU by its number, or more ranks than GPUs.
    """
    made = require_device(device)
    if made.type != "cuda":
        return
    if made.index is not None:
        raise ValueError(f"device must be cuda or cpu on several ranks, of which each takes its own, got {device!r}")
    if here > torch.cuda.device_count():
        raise ValueError(
            f"ranks of this machine must be at most its {torch.cuda.device_count()} GPUs with device {device!r}, "
            f"got {here}"
        )


def join_as(
    rank: int, local_rank: int, world: int, device: str, timeout: int, rendezvous: str = "env://"
) -> torch.device:
    """Join a process group of ``world`` ranks, by NCCL on GPUs and gloo on the CPU. Returns this rank's device."""
    found = torch.device(device)
    if found.type == "cuda":
        found = torch.device("cuda", local_rank)
        torch.cuda.set_device(found)
    dist.init_process_group(
        "nccl" if found.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        device_id=found if found.type == "cuda" else None,
    )
    return found


class FixedParameters:
    """A policy that always shows the same parameters: a sharded module shows gathered ones during a forward.

    Attributes:
        calls: of `velocity` so far.
    """

    def __init__(self, policy: VelocityPolicy, parameters: Sequence[Tensor]) -> None:
        self._policy = policy
        self._parameters = list(parameters)
        self.calls = 0

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        self.calls += 1
        return self._policy.velocity(latents, sigma, rows)

    def parameters(self) -> list[Tensor]:
        """As they were given."""
        return self._parameters

    def signature(self) -> dict[str, str]:
        """The policy's own; empty if it has none."""
        found: dict[str, str] = getattr(self._policy, "signature", dict)()
        return found


@contextmanager
def in_step(policy: VelocityPolicy, latents: Tensor, calls: int) -> Iterator[None]:
    """Sampling in the body that breaks off at a velocity that is not finite still calls the policy ``calls`` times.

    In every call other ranks gather weights. ``latents``: pure noise ``[N, ...]`` that the calls may be made with.
    """
    try:
        yield
    except FloatingPointError:
        if isinstance(policy, FixedParameters):
            sigma, rows = latents.new_full((len(latents),), 0.5), torch.arange(len(latents), device=latents.device)
            with torch.no_grad():
                for _ in range(policy.calls, calls):
                    policy.velocity(latents, sigma, rows)
        raise
