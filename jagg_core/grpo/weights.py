"""fp32 master weights of half-precision networks, and moving averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class MasterWeights:
    """What the optimizer steps on: fp32 copies of half-precision parameters, and the others themselves.

    Gradients of half-precision parameters are added up in fp32, pass by pass: in bf16 a sum of many passes loses the
    small ones. Their own ``.grad`` stays None.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.tensors: list[Tensor] = []
        self._halves: list[tuple[Tensor, Tensor]] = []
        for parameter in parameters:
            if parameter.element_size() > 2:
                self.tensors.append(parameter)
                continue
            master = parameter.detach().float()
            self.tensors.append(master)
            self._halves.append((parameter, master))
            parameter.register_post_accumulate_grad_hook(_adder(master))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the network."""
        for parameter, master in self._halves:
            parameter.copy_(master)

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.tensors, *(parameter for parameter, _ in self._halves)):
            tensor.grad = None


def _adder(master: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
        parameter.grad = None

    return add


class AveragedWeights:
    """Exponential moving average of tensors, in fp32."""

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.tensors = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def update(self, tensors: Sequence[Tensor], steps: int) -> None:
        """Take in the weights after optimizer step ``steps``; a young average follows faster."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(self.tensors, [tensor.detach() for tensor in tensors], 1 - decay)

    @contextmanager
    def in_place_of(self, masters: MasterWeights) -> Iterator[None]:
        """The network computes with the average meanwhile."""
        kept = [tensor.detach().clone() for tensor in masters.tensors]
        try:
            _copy(masters, self.tensors)
            yield
        finally:
            _copy(masters, kept)


@torch.no_grad()
def _copy(masters: MasterWeights, values: Sequence[Tensor]) -> None:
    for tensor, value in zip(masters.tensors, values, strict=True):
        tensor.copy_(value)
    masters.publish()
