"""An accelerator that is pretended: tensors on ``accel:0`` that CPU tensors hold, with real numbers.

As on a GPU, what mixes them with CPU tensors raises, numpy takes none, and random numbers come from a generator that
``torch.manual_seed`` reaches and CPU generators are refused. ``register`` cannot be undone: call it in a process of its
own, as `tests.spawning.run_ranks` starts them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "accel"
BYTES = 2**30

COPIES = {"aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::set_.source_Tensor"}
"""Operators that may see two devices."""

_CPU = torch.device("cpu")
_lock = threading.RLock()


class OnDevice(Tensor):
    """A tensor on the device. ``held``: its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls: type, held: Tensor, requires_grad: bool = False) -> Any:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.held = held
        module().count(held)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *arguments: Any, **others: Any) -> Any:
        return self.numpy()

    def __repr__(self, **others: Any) -> str:
        return f"{self.held!r} on {NAME}:0"

    def __format__(self, spec: str) -> str:
        return self.held.__format__(spec)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _indices(index: Any) -> Any:
    """Lists among indices as tensors, which torch itself would make on the device without an operator."""
    if isinstance(index, tuple):
        return tuple(_indices(one) for one in index)
    return torch.tensor(index) if isinstance(index, (list, range)) else index


class Module:
    """What torch asks of the module of a device, and ours of `torch.get_device_module`.

    Attributes:
        synchronized: how often somebody waited for the device.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.synchronized = 0
        self._known: set[int] = set()
        self._alive = self._peak = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        if torch.device(device if not isinstance(device, int) else f"{NAME}:{device}").index not in (None, 0):
            raise RuntimeError(f"invalid device ordinal: {device}")

    def device(self, index: Any) -> Any:
        return nullcontext()

    def get_device_name(self, device: Any = None) -> str:
        return "pretended accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1

    def current_stream(self, device: Any = None) -> Any:
        return self

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    # random numbers

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.generator.set_state(state)

    # memory

    def count(self, held: Tensor) -> None:
        """Counts a storage until it is gone."""
        storage = held.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with _lock:
            if key not in self._known:
                self._known.add(key)
                self._alive += size
                self._peak = max(self._peak, self._alive)
                weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        with _lock:
            self._known.discard(key)
            self._alive -= size

    def memory_allocated(self, device: Any = None) -> int:
        return self._alive

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._peak = self._alive

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return BYTES - self.memory_allocated(), BYTES

    def memory_stats(self, device: Any = None) -> OrderedDict[str, int]:
        return OrderedDict()


def module() -> Module:
    """The device's module."""
    found: Module = torch.get_device_module(NAME)
    return found


@dataclass(frozen=True)
class Operator:
    """What is asked of an operator at every call."""

    name: str
    copies: bool
    indexes: bool
    writes: bool
    draws: bool


@cache
def _operator(func: Any) -> Operator:
    name = func._schema.name
    return Operator(
        name,
        name in COPIES,
        name.startswith("aten::index"),
        func._schema.is_mutable,
        torch.Tag.nondeterministic_seeded in func.tags,
    )


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the tensors that are held, and puts what it gives on the device."""
    operator = _operator(func)
    tensors: list[Tensor] = []
    held_args = tuple(_held(x, tensors) for x in args)
    given = {k: _held(x, tensors) for k, x in kwargs.items() if k != "pin_memory"}
    on = any(isinstance(t, OnDevice) for t in tensors)
    if on and not operator.copies:
        _require_one_device(operator, tensors)
    here, device = on, kwargs.get("device")
    if device is not None:
        wanted = torch.device(device)
        here, given["device"] = wanted.type == NAME, _CPU
        if here and wanted.index not in (None, 0):
            raise RuntimeError(f"invalid device ordinal: {wanted}")
    if here and getattr(kwargs.get("generator"), "device", None) == _CPU:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' in {operator.name}")
    with _drawing() if here and operator.draws else nullcontext():
        out = func(*held_args, **given)
    if operator.writes:
        if "out" in kwargs:
            return kwargs["out"]
        if args and isinstance(args[0], Tensor) and out is held_args[0]:
            return args[0]
    return _put(out) if here and operator.name != "aten::_local_scalar_dense" else out


def _held(value: Any, tensors: list[Tensor]) -> Any:
    """An argument as the CPU takes it; its tensors are added to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.held if isinstance(value, OnDevice) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_held(x, tensors) for x in value)
    return _CPU if isinstance(value, torch.device) and value.type == NAME else value


def _put(value: Any) -> Any:
    """What an operator gave, on the device."""
    if isinstance(value, Tensor):
        return OnDevice(value)
    return type(value)(_put(x) for x in value) if isinstance(value, (list, tuple)) else value


def _require_one_device(operator: Operator, tensors: list[Tensor]) -> None:
    """Raises where CUDA does: it takes numbers of the CPU, and indices."""
    indices = operator.indexes and isinstance(tensors[0], OnDevice)
    for tensor in tensors:
        if isinstance(tensor, OnDevice) or tensor.ndim == 0 or tensor.device != _CPU:
            continue
        if not (indices and tensor.dtype in (torch.long, torch.bool)):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                f"({operator.name})"
            )


@contextmanager
def _drawing() -> Any:
    """Random numbers in the body are the device's."""
    with _lock:
        before = torch.random.get_rng_state()
        torch.random.set_rng_state(module().generator.get_state())
        try:
            yield
        finally:
            module().generator.set_state(torch.random.get_rng_state())
            torch.random.set_rng_state(before)


_LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Makes torch know the device, in this process for good."""
    if _LIBRARY:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    _LIBRARY.append(library)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # these never reach the operators, and Python cannot answer what they ask of a device
    torch.tensor, torch.as_tensor = _made(torch.tensor), _made(torch.as_tensor)
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.accelerator, name, getattr(module(), name))


def _made(make: Any) -> Any:
    """A factory that makes its tensor on the CPU, and moves it to where it was asked for."""

    def factory(data: Any, *arguments: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, Tensor):
            return data.to(data.device if device is None else device, **options)
        where = torch.empty(0).device if device is None else torch.device(device)
        made: Tensor = make(data, *arguments, device=_CPU if where.type == NAME else where, **options)
        return made.to(where)

    return factory
