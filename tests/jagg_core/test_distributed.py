"""Where elements lie, for plain tensors and for pieces that other files make; several ranks are in test_fsdp.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from jagg_core.distributed import (
    FirstError,
    join,
    on_any_rank,
    on_first_rank,
    raise_together,
    require_device_each,
    texts_of_ranks,
)
from jagg_core.sharding import Piece, Sharding


class Part:
    """A sharded tensor as seen by one rank of a mesh: what `Sharding` reads of a DTensor."""

    def __init__(self, shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], *placements: Placement):
        self.whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        self.shape, self.ndim, self.placements = self.whole.shape, self.whole.ndim, placements
        self.device_mesh: Any = MESHES.setdefault((mesh, at), _mesh(mesh, at))

    def numel(self) -> int:
        return self.whole.numel()

    def to_local(self) -> Tensor:
        part = self.whole
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                parts = part.chunk(self.device_mesh.size(dim), placement.dim)
                here = self.device_mesh.get_local_rank(dim)
                part = parts[here] if here < len(parts) else part[:0]
        return part


def _mesh(sizes: tuple[int, ...], at: tuple[int, ...]) -> SimpleNamespace:
    def size(dim: int | None = None) -> int:
        return torch.Size(sizes).numel() if dim is None else sizes[dim]

    return SimpleNamespace(ndim=len(sizes), size=size, get_local_rank=lambda dim: at[dim])


MESHES: dict[Any, Any] = {}


def test_plain_tensors_are_whole_on_one_rank() -> None:
    sharding = Sharding([torch.ones(2, 3), torch.ones(()), torch.ones(0, 4), torch.ones(5)])
    assert sharding.mesh is None
    assert sharding.ranks == 1
    assert sharding.sizes == [6, 1, 0, 5]
    assert sharding.pieces == [Piece(0, size, True) for size in (6, 1, 0, 5)]


def test_one_rank_has_nobody_to_ask() -> None:
    sharding = Sharding([torch.ones(2)])
    tensor = torch.tensor([1.0, -2.0])
    assert sharding.sum(tensor) is tensor
    assert tensor.tolist() == [1, -2]
    for here in (True, False):
        assert sharding.any(here, torch.device("cpu")) is here
        assert on_any_rank(here, torch.device("cpu")) is here


def test_no_parameters_are_plain() -> None:
    sharding = Sharding([])
    assert (sharding.mesh, sharding.ranks, sharding.sizes, sharding.pieces) == (None, 1, [], [])


@pytest.mark.parametrize("shape", [(5,), (7, 3), (1,), (2, 2), (6, 1, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_pieces_are_where_torch_cuts(shape: tuple[int, ...], count: int) -> None:
    flat = torch.arange(torch.Size(shape).numel())
    found = []
    for rank in range(count):
        part: Any = Part(shape, (count,), (rank,), Shard(0))
        sharding = Sharding([part])
        piece = sharding.pieces[0]
        assert sharding.ranks == count
        assert sharding.sizes == [flat.numel()]
        assert piece.counted
        assert torch.equal(flat[piece.start : piece.start + piece.size], part.to_local().flatten())
        found.append(piece)
    assert sum(piece.size for piece in found) == flat.numel()


def test_one_replica_counts() -> None:
    found = {}
    for copy in range(2):
        for rank in range(3):
            part: Any = Part((5, 2), (2, 3), (copy, rank), Replicate(), Shard(0))
            sharding = Sharding([part])
            assert sharding.ranks == 6
            found[copy, rank] = sharding.pieces[0]
    assert [found[0, rank] for rank in range(3)] == [Piece(0, 4, True), Piece(4, 4, True), Piece(8, 2, True)]
    assert [found[1, rank] for rank in range(3)] == [Piece(0, 4, False), Piece(4, 4, False), Piece(8, 2, False)]


@pytest.mark.parametrize(
    "placements", [(Replicate(), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Partial())], ids=str
)
def test_other_layouts_are_refused(placements: tuple[Placement, ...]) -> None:
    part: Any = Part((4, 4), (2, 2), (0, 0), *placements)
    with pytest.raises(ValueError, match="sharded once, along dimension 0, or replicated; got"):
        Sharding([part])


def test_parameters_of_two_kinds_are_refused() -> None:
    part: Any = Part((4,), (2,), (0,), Shard(0))
    other: Any = Part((4,), (4,), (0,), Shard(0))
    for parameters in ([part, torch.ones(2)], [torch.ones(2), part], [part, other]):
        with pytest.raises(ValueError, match="over one device mesh, or all be plain tensors"):
            Sharding(parameters)
    assert Sharding([part, part]).ranks == 2


def test_of_errors_in_a_loop_the_first_is_kept_and_others_are_raised() -> None:
    broken, done = FirstError(), []
    for number in (1, 2, 3):
        with broken.keep(ArithmeticError):
            if number < 3:
                raise FloatingPointError(f"number {number}")
            done.append(number)
    assert (str(broken.error), done) == ("number 1", [3])
    with pytest.raises(KeyError), broken.keep(ZeroDivisionError):
        raise KeyError


def test_on_one_rank_errors_and_texts_are_as_they_are() -> None:
    device, error = torch.device("cpu"), OSError("disk full")
    assert [texts_of_ranks(text, device) for text in ("", "broken")] == ["", "broken"]
    raise_together(None, device)
    with pytest.raises(OSError, match="disk full") as caught:
        raise_together(error, device)
    assert caught.value is error
    assert on_first_rank(lambda: 3, device) == 3
    with pytest.raises(ZeroDivisionError):
        on_first_rank(lambda: 1 // 0, device)


# How ranks are started

LAUNCHED = {
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("changed", "device", "message"),
    [
        ({"RANK": None}, "cpu", "WORLD_SIZE is 2, and RANK must be set with it: start the ranks with torchrun"),
        ({"LOCAL_RANK": None, "MASTER_PORT": None}, "cpu", "LOCAL_RANK, MASTER_PORT must be set with it"),
        ({"WORLD_SIZE": "two"}, "cpu", "WORLD_SIZE must be a whole number of at least 1, .* got 'two'"),
        ({"WORLD_SIZE": ""}, "cpu", "WORLD_SIZE must be a whole number of at least 1, .* got ''"),
        ({"WORLD_SIZE": "0"}, "cpu", "WORLD_SIZE must be a whole number of at least 1, .* got '0'"),
        ({"RANK": "2"}, "cpu", "RANK must be a whole number from 0 to 1, .* got '2'"),
        ({"LOCAL_WORLD_SIZE": "x"}, "cpu", "LOCAL_WORLD_SIZE must be a whole number of at least 1, .* got 'x'"),
        ({}, "gpu", "device 'gpu' cannot be used here"),
        ({}, "cuda:4096", "device 'cuda:4096' cannot be used here"),
        (
            {"LOCAL_WORLD_SIZE": "4096"},
            "cuda",
            "device 'cuda' cannot be used here|ranks of this machine must be at most",
        ),
    ],
)
def test_a_launch_that_cannot_work_is_refused_before_ranks_wait(
    changed: dict[str, str | None], device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (LAUNCHED | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught:
        join(device, 1)
    assert len(str(caught.value).splitlines()) == 1


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagg_core.distributed.require_device", torch.device)
    monkeypatch.setattr("jagg_core.distributed.accelerators_like", lambda device: 2)
    require_device_each("cuda", 2)
    require_device_each("cpu", 64)
    with pytest.raises(ValueError, match="at most its 2 GPUs with device 'cuda', got 3"):
        require_device_each("cuda", 3)
    with pytest.raises(ValueError, match="one each, got 'cuda:1'"):
        require_device_each("cuda:1", 2)


def test_one_process_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join("cpu", 1) == torch.device("cpu")
    assert not torch.distributed.is_initialized()
