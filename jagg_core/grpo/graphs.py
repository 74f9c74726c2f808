"""What it takes to keep a rollout's graphs until its rewards are known."""

from __future__ import annotations

import torch
from torch import Tensor

from jagg_core.devices import free_memory
from jagg_core.policy import VelocityPolicy


def graph_bytes(policy: VelocityPolicy, latents: Tensor) -> int:
    """Bytes that the graph of one velocity of ``latents`` [1, *D] saves for its backward, without the parameters."""
    parameters = {p.untyped_storage()._cdata for p in getattr(policy, "parameters", list)()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    sigma = latents.new_full((1,), 0.5)
    rows = torch.zeros(1, dtype=torch.long, device=latents.device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        velocity = policy.velocity(latents, sigma, rows)
    found = sum(saved.values())
    del velocity
    return found


def require_memory(policy: VelocityPolicy, latents: Tensor, knots: int, samples: int) -> int:
    """Bytes for the graphs of ``knots`` steps of ``samples`` samples, estimated from one of ``latents`` [1, *D].

    Raises:
        ValueError: more than can be had; says how much is needed.
    """
    needed, free = graph_bytes(policy, latents) * knots * samples, free_memory(latents.device)
    if free is not None and needed > free:
        raise ValueError(
            f"keep_graphs needs {needed / 2**30:.2f} GiB for {knots} knots of {samples} samples, got "
            f"{free / 2**30:.2f} GiB free: use checkpointing, fewer knots or samples, or leave it off"
        )
    return needed
