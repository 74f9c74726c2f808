"""What each rank does in test_fsdp.py. A module of its own, since spawned processes import it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analysis.measure import cross_table
from analysis.measure.cross_table import CrossTable, collect_table, plan_gradients
from jagg_core import ClippedSurrogate, Plan, Trajectory, causal_plan, dance_schedule, jagg_plan
from jagg_core.rollouts import rollout
from jagg_core.seeding import initial_latents
from jagg_core.transitions import DanceSDE
from tests.jagg_core.fields import noise_like
from tests.spawning import grouped

RANKS = 3
SAMPLES, ELEMENTS, STEPS, DIMENSION = 6, 6, 3, 40
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, -1.0, 0.9, -0.2], dtype=torch.float64)
OBJECTIVE = ClippedSurrogate()
LAYOUTS: dict[str, tuple[int, ...]] = {"1": (1,), "2": (2,), "3": (3,), "2x1": (2, 1)}
"""Shapes of device meshes; the one of two dimensions replicates along the first."""


def ranks_of(layout: str) -> int:
    """Ranks of a layout."""
    return math.prod(LAYOUTS[layout])


class Layer(nn.Linear):
    """A tanh layer in fp64, recomputed in the backward."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float64)
        with torch.no_grad():
            self.weight.copy_(noise_like(outputs, inputs, seed=seed) / inputs**0.5)
            self.bias.copy_(noise_like(outputs, seed=seed + 1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(super(Layer, self).forward(x)), x, use_reentrant=False)


class Network(nn.Module):
    """Rows of layers: 5, 7, 1, 6; parameters of the root: of size 1, 2 and 6, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (ELEMENTS + 4, 5, 7, 1, ELEMENTS)
        self.layers = nn.ModuleList(Layer(sizes[n], sizes[n + 1], seed=10 * n) for n in range(4))
        self.gain = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))
        self.slopes = nn.Parameter(torch.tensor([0.3, -0.8], dtype=torch.float64))
        self.squares = nn.Parameter(torch.linspace(0.2, 1.2, ELEMENTS, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, latents: Tensor, sigma: Tensor, prompts: Tensor) -> Tensor:
        x = torch.cat([latents, sigma[:, None], prompts], dim=1)
        for layer in self.layers:
            x = layer(x)
        straight = self.slopes[0] * latents + self.slopes[1] * sigma[:, None]
        return self.gain * x + straight + self.squares.sqrt()


class Field:
    """The network as a policy for samples ``ids``."""

    def __init__(self, ids: Sequence[int], network: Network | None = None) -> None:
        self.network = network or Network()
        self.ids = torch.tensor(ids)
        self.prompts = noise_like(SAMPLES, 3, seed=7)
        # FSDP2 leaves the root gathered after a forward: its parameters would then be others in the module
        self.named = dict(self.network.named_parameters())

    def velocity(self, latents: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """See `jagg_core.policy.VelocityPolicy`."""
        return self.network(latents, sigma, self.prompts[self.ids[rows]])

    def parameters(self) -> list[Tensor]:
        """All of the network's."""
        return list(self.named.values())

    @property
    def blocks(self) -> dict[Tensor, str]:
        """Weights, biases, and those of the root without a label."""
        return {p: name.rpartition(".")[2] for name, p in self.named.items() if name.startswith("layers")}


def sampled(field: Field) -> Trajectory:
    """Trained steps of the field's own samples, which are the same in any batch."""
    ids = field.ids.tolist()
    latents = initial_latents((ELEMENTS,), 3, ids).double()
    return rollout(field, dance_schedule(STEPS + 1), DanceSDE(0.7), latents, 3, sample_ids=ids)


def plans(sigmas: Tensor) -> dict[str, Plan]:
    """Two plans, one of them with predicted knots."""
    return {"jagg": jagg_plan(sigmas, 3, 1.0), "predicted": causal_plan(sigmas, [0, 1], predict=True)}


def table_of(field: Field, trajectory: Trajectory, **settings: Any) -> CrossTable:
    """The table with blocks and a predicted plan."""
    predicted = [plans(trajectory.sigmas)["predicted"]]
    settings = {"blocks": field.blocks, "predicted": predicted, "dimension": DIMENSION, **settings}
    return collect_table(field, trajectory, ADVANTAGES[field.ids], OBJECTIVE, **settings)


def projected_plans(field: Field, trajectory: Trajectory) -> dict[str, Tensor]:
    """Projected gradients of `plans`."""
    every = plans(trajectory.sigmas)
    return plan_gradients(field, trajectory, ADVANTAGES[field.ids], OBJECTIVE, every, dimension=DIMENSION)


def results_of(field: Field) -> dict[str, Any]:
    """Tables and projected gradients of the field's samples, as JSON takes them."""
    trajectory = sampled(field)
    tables = {name: table_of(field, trajectory, space=name) for name in ("auto", "projected")}
    return {
        "dimensions": {name: table.dimension for name, table in tables.items()},
        **{name: {k: gram.tolist() for k, gram in table.grams.items()} for name, table in tables.items()},
        "plans": {name: found.tolist() for name, found in projected_plans(field, trajectory).items()},
    }


def refusal(action: Callable[[], object]) -> str:
    """What an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_grads(field: Field) -> dict[str, Any]:
    """The same beside gradients of every other parameter, and whether every ``.grad`` stays, object and bits."""
    parameters = field.parameters()
    for p in parameters[::2]:
        p.grad = torch.full_like(p, 0.1)
    grads = [p.grad for p in parameters]
    results = results_of(field)
    same = [p.grad is grad for p, grad in zip(parameters, grads, strict=True)]
    equal = [local(grad).eq(0.1).all().item() for grad in grads[::2]]
    return {**results, "stay": all(same) and all(equal)}


def local(tensor: Any) -> Tensor:
    """What this rank holds."""
    return tensor.to_local()


def sharded(ids: Sequence[int], shape: tuple[int, ...]) -> Field:
    """The field with its layers and its root under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    network = Network()
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return Field(ids, network)


def gathered(ids: Sequence[int], shape: tuple[int, ...]) -> Field:
    """A field that shows what its module has at the time: after a forward, FSDP2's root is gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = Network()
    fully_shard(network, mesh=init_device_mesh("cpu", shape))
    field = Field(ids, network)
    field.parameters = lambda: list(network.parameters())  # type: ignore[method-assign]
    return field


def measure(rank: int, name: str) -> dict[str, Any]:
    """Everything that test_fsdp.py looks at in one layout."""
    shape = LAYOUTS[name]
    ids = torch.arange(SAMPLES).tensor_split(dist.get_world_size())[rank].tolist()
    field = sharded(ids, shape)
    results = {**with_grads(field), "held": [local(p).numel() for p in field.parameters()]}
    trajectory = sampled(field)

    enough = cross_table.free_memory
    if rank == 0:
        cross_table.free_memory = lambda _: 3000  # type: ignore[assignment]
    results["chosen"] = table_of(field, trajectory, space="auto", dimension=4).dimension
    results["little memory"] = refusal(lambda: table_of(field, trajectory, space="exact"))
    cross_table.free_memory = enough

    first = field.named["layers.0.weight"]
    with torch.no_grad():
        if rank == 0:
            local(first)[0] += 1e-6
    results["changed"] = [
        refusal(lambda: table_of(field, trajectory)),
        refusal(lambda: projected_plans(field, trajectory)),
    ]

    squares = field.named["squares"]
    with torch.no_grad():
        if rank == 0:
            local(squares)[0] = 0  # its root has an infinite derivative there
    trajectory = sampled(field)
    spaces = ("exact", "projected")
    results["infinite"] = [refusal(lambda s=s: table_of(field, trajectory, past=0, space=s)) for s in spaces]
    results["stay after an error"] = all((p.grad is None) == bool(n % 2) for n, p in enumerate(field.parameters()))

    if name == "2":
        careless = gathered(ids, shape)
        trajectory = sampled(careless)
        results["gathered"] = refusal(lambda: table_of(careless, trajectory))
    return results


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Measure all layouts, those of fewer ranks after those of more."""
    warnings.simplefilter("ignore")
    found = {}
    for world in range(RANKS, rank, -1):
        with grouped(folder / f"rendezvous{world}", rank, world):
            found |= {name: measure(rank, name) for name in LAYOUTS if ranks_of(name) == world}
    return found
