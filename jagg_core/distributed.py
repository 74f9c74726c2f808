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
from jagg_core.devices import accelerators_like, backend_for, is_accelerator, make_current
from jagg_core.policy import VelocityPolicy

T = TypeVar("T")

AROUND: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("around collectives", default=nullcontext)
"""Makes the context of a collective in `on_any_rank`, `texts_of_ranks` and `gathered`, such as a stopwatch."""


class RankFailed(RuntimeError):
    """An error on some ranks; raised on every rank, with the ranks and their errors."""


def on_any_rank(here: bool, device: torch.device) -> bool:
    """Tells whether ``here`` is true on any rank of the default process group."""
    if ranks() == 1:
        return here
    flag = torch.tensor(int(here), device=device)
    with AROUND.get()():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def texts_of_ranks(text: str, device: torch.device) -> str:
    """Joins the texts of all ranks, with their numbers if there are several ranks; empty if all texts are.

    Called on every rank. Costs one `on_any_rank` while all texts are empty.
    """
    if ranks() == 1 or not on_any_rank(bool(text), device):
        return text
    texts = [""] * ranks()
    with AROUND.get()():
        dist.all_gather_object(texts, text)
    return "; ".join(f"rank {number}: {text}" for number, text in enumerate(texts) if text)


class FirstError:
    """The first error of this rank in a loop that goes on because other ranks wait for it in collectives.

    Attributes:
        error: None until there is one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def keep(self, kind: type[Exception]) -> Iterator[None]:
        """Ends the body at an error of that kind, and keeps it."""
        try:
            yield
        except kind as error:
            self.error = self.error or error


def raise_together(error: Exception | None, device: torch.device) -> None:
    """Raises on every rank if any rank has an error. Called on every rank, so not after an error inside collectives.

    Raises:
        RankFailed: a rank has an error; on a single rank that error itself is raised.
    """
    if error is not None and ranks() == 1:
        raise error
    errors = texts_of_ranks("" if error is None else f"{type(error).__name__}: {error}", device)
    if errors:
        raise RankFailed(errors) from error


def on_first_rank(work: Callable[[], T], device: torch.device) -> T | None:
    """Returns the result of ``work`` on the first rank and None on the others, which wait. ``work`` has no collectives.

    Raises:
        RankFailed: ``work`` failed; on a single rank its error itself is raised.
    """
    result, broken = None, FirstError()
    with broken.keep(Exception):
        result = work() if rank() == 0 else None
    raise_together(broken.error, device)
    return result


def ranks() -> int:
    """Counts the ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathered(values: Tensor) -> Tensor:
    """Gathers ``values`` [N, ...] of all ranks, in their order, ``[ranks * N, ...]``; shapes must be equal."""
    if ranks() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(ranks())]
    with AROUND.get()():
        dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def join(device: str, timeout: int) -> torch.device:
    """Joins the process group that ``torchrun`` set up, if any. Returns this rank's device.

    ``timeout``: seconds that a rank waits for the others.

    Raises:
        ValueError: a variable of ``torchrun`` is missing or out of range, or the device fails `require_device_each`.
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
"""Variables that ``torchrun`` sets together with ``WORLD_SIZE``, and that ranks need."""


def ranks_here(otherwise: int) -> int:
    """Counts the ranks on this machine by ``torchrun``'s variable; ``otherwise`` without it."""
    return _launched("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else otherwise


def _launched(name: str, low: int, end: int | None = None) -> int:
    """Reads a variable of the launcher, a whole number of at least ``low`` and below ``end``."""
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()) or int(text) < low or (end is not None and int(text) >= end):
        wanted = f"of at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ValueError(f"{name} must be a whole number {wanted}, as torchrun sets it, got {text!r}")
    return int(text)


def require_device_each(device: str, here: int) -> None:
    """Checks that each of the ``here`` ranks of this machine has a device.

    Raises:
        ValueError: no such device, a GPU by its number, or more ranks than GPUs.
    """
    made = require_device(device)
    if not is_accelerator(made):
        return
    if made.index is not None:
        raise ValueError(f"device must be {made.type} or cpu on several ranks, one each, got {device!r}")
    backend_for(made)
    if here > (there := accelerators_like(made)):
        raise ValueError(f"ranks of this machine must be at most its {there} GPUs with device {device!r}, got {here}")


def join_as(
    rank: int, local_rank: int, world: int, device: str, timeout: int, rendezvous: str = "env://"
) -> torch.device:
    """Joins a process group of ``world`` ranks, by `backend_for` the device. Returns this rank's device."""
    place = torch.device(device)
    if is_accelerator(place):
        place = torch.device(place.type, local_rank)
        make_current(place)
    dist.init_process_group(
        backend_for(place),
        init_method=rendezvous,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        device_id=place if is_accelerator(place) else None,
    )
    return place


class FixedParameters:
    """A policy that always shows the same parameters: a sharded module shows gathered ones during a forward.

    Attributes:
        calls: number of calls of `velocity`.
    """

    def __init__(self, policy: VelocityPolicy, parameters: Sequence[Tensor]) -> None:
        self._policy = policy
        self._parameters = list(parameters)
        self.calls = 0

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Computes the policy's velocity, and counts the call."""
        self.calls += 1
        return self._policy.velocity(latents, sigma, rows)

    def parameters(self) -> list[Tensor]:
        """Returns the given parameters."""
        return self._parameters

    def signature(self) -> dict[str, str]:
        """Returns the policy's signature; empty if it has none."""
        signature: dict[str, str] = getattr(self._policy, "signature", dict)()
        return signature


@contextmanager
def in_step(policy: VelocityPolicy, latents: Tensor, calls: int) -> Iterator[None]:
    """Completes the policy's ``calls`` where sampling in the body stops at a velocity that is not finite.

    Other ranks gather weights in every call. ``latents`` are pure noise ``[N, ...]`` for the remaining calls.
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
