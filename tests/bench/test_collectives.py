"""Collectives per group: what two real ranks make by layout, what many pretended ones make, and what the model says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.__main__ import main
from bench.arms import arms_of
from bench.collective_ranks import measure, work
from bench.collectives import record_of, settings_of
from bench.counting import Counter
from bench.layouts import lay_out, without_reduction
from bench.lines import count_sentences
from bench.settings import CollectiveBench
from jagg_core.records import Cell, Record
from tests.bench.wide import Deep

DEEP = "tests.bench.wide:deep"
UNITS = 3
"""Two blocks of `Deep`, and the rest."""

EXPECTED = {
    "exact": (10, 5),
    "exact-deferred": (10, 1),
    "exact-batched": (2, 1),
    "paper-joint": (7, 1),
    "closed-form-sequential": (4, 2),
    "closed-form-batched": (2, 1),
    "endpoint-only": (4, 2),
}
"""All-gathers and reduce-scatters per unit and group, W = 5. The joint backward gathers for each of its two graphs and
scatters once; only one pass gathers once."""

FSDP = {"exact": (6, 3, 0), "exact-deferred": (6, 1, 0), "paper-joint": (5, 1, 0), "closed-form-batched": (2, 1, 0)}
NO_RESHARD = {"exact": (3, 3, 0), "exact-deferred": (3, 1, 0), "exact-batched": (1, 1, 0)}
REPLICATED = {"exact": (0, 0, 3), "exact-deferred": (0, 0, 1), "paper-joint": (0, 0, 1), "endpoint-only": (0, 0, 2)}
"""All-gathers, reduce-scatters and all-reduces of gradients per unit, W = 3."""

REFERENCE = Path(__file__).parents[2] / "results/reference/bench/collectives-digits-flux.json"

LAYOUTS = {
    "fsdp": CollectiveBench(backbone=DEEP, window=3, rounds=1),
    "fsdp-no-reshard": CollectiveBench(backbone=DEEP, window=3, rounds=1, layout="fsdp-no-reshard"),
    "hsdp": CollectiveBench(backbone=DEEP, window=3, rounds=1, layout="hsdp"),
    "ddp": CollectiveBench(backbone=DEEP, window=3, rounds=2, layout="ddp"),
}
"""What the two ranks of `on_two_ranks` measure, one after the other."""


def on_two_ranks(folder: Path) -> None:
    """What torchrun starts: the command, with activations recomputed; every layout; and orders of two passes.

    They share processes because importing what FSDP2 needs takes longer than all of them.
    """
    flags = ["--backbone", DEEP, "--window", "3", "--rounds", "1", "--checkpointing"]
    main(["collectives", *flags, "--out", str(folder / "record.json")])
    rank = int(os.environ["RANK"])
    for name, settings in LAYOUTS.items():
        work(rank, settings, str(folder / name))
    dist.init_process_group("gloo", init_method=f"file://{folder}/orders", rank=rank, world_size=2)
    (folder / f"orders-{rank}.json").write_text(json.dumps(orders()))
    dist.destroy_process_group()


def orders() -> dict[str, Any]:
    """Collectives and gradients of two passes: backwards at once, at the end, in one call, and reduced at the end."""
    torch.manual_seed(0)
    net = Deep()
    inputs = torch.randn(2, 3, 17)
    plain = _taken(net, net(inputs[0]).square().sum() + net(inputs[1]).square().sum())
    lay_out(list(net.blocks), net, "fsdp", torch.float32)
    found: dict[str, Any] = {}
    for name in ("F1 B1 F2 B2", "F1 F2 B1 B2", "F1 F2 B12", "F1 B1 F2 B2 deferred"):
        with Counter() as counter:
            if name.startswith("F1 F2"):
                first, second = (net(x).square().sum() for x in inputs)
                if name.endswith("B12"):
                    torch.autograd.backward([first, second])
                else:
                    first.backward()
                    second.backward()
            elif name.endswith("deferred"):
                with without_reduction(net):
                    net(inputs[0]).square().sum().backward()
                net(inputs[1]).square().sum().backward()
            else:
                for x in inputs:
                    net(x).square().sum().backward()
        gradients = _taken(net)
        error = max(float((a - b).abs().max()) for a, b in zip(gradients, plain, strict=True))
        found[name] = {"counts": counter.counts, "error": error}
    return found


def _taken(net: nn.Module, loss: Tensor | None = None) -> list[Tensor]:
    if loss is not None:
        loss.backward()
    found = []
    for parameter in net.parameters():
        gradient: Any = parameter.grad
        found.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
        parameter.grad = None
    return found


def launch(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a module on two ranks that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", module]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What two gloo ranks left, and what they printed."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in LAYOUTS:
        (folder / name).mkdir()
    done = launch("tests.bench.test_collectives", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def by_layout(ran: tuple[Path, str]) -> dict[str, Record]:
    return {
        name: record_of(settings, [json.loads((ran[0] / name / f"{rank}.json").read_text()) for rank in range(2)])
        for name, settings in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def command(ran: tuple[Path, str]) -> Record:
    """The record of the command."""
    return Record.read(ran[0] / "record.json")


def pretended(**settings: Any) -> Record:
    """A record of pretended ranks, made in this process."""
    chosen = CollectiveBench(pretend=True, **settings)
    try:
        return record_of(chosen, [measure(0, 0, chosen, "")])
    finally:
        dist.destroy_process_group()


def per_unit(record: Record, arm: str) -> tuple[float, float]:
    units = record.cell("sharding").values["units"]
    counts = record.cell(arm).values["counts"]
    return counts["all_gather"] / units, counts["reduce_scatter"] / units


def totals(record: Record, arm: str) -> tuple[int, int, int]:
    counts = record.cell(arm).values["counts"]
    return counts["all_gather"], counts["reduce_scatter"], counts["all_reduce"]


def in_units(counts: dict[str, tuple[int, int, int]], units: int) -> dict[str, tuple[int, ...]]:
    return {arm: tuple(units * count for count in one) for arm, one in counts.items()}


def test_counts_under_torchrun_and_with_recomputation(command: Record, ran: tuple[Path, str]) -> None:
    record, printed = command, ran[1]
    assert record.cell("sharding").values["units"] == UNITS
    assert {arm: totals(record, arm) for arm in FSDP} == in_units(FSDP, UNITS)
    assert record.settings["ranks"] == 2
    assert set(record.cell("exact").samples) == set(samples_of(2))
    assert printed.count("wrote ") == 1  # rank 0 alone speaks
    assert all(line in printed for line in record.cell("sharding").values["findings"])


def samples_of(ranks: int) -> list[str]:
    kinds = ("total_s", "all_gather_s", "reduce_scatter_s", "all_reduce_s")
    return [f"rank{rank}_{kind}" for rank in range(ranks) for kind in kinds]


def test_the_cost_model_assumes_what_is_counted(command: Record) -> None:
    for arm in arms_of("collectives"):
        assert arm.tally is not None
        tally = arm.tally(3)
        assert per_unit(command, arm.name) == (tally.gathers, 1 if arm.deferred else tally.scatters)


def test_the_reference_of_a_shipped_backbone_has_the_same_counts() -> None:
    record = Record.read(REFERENCE)
    assert record.cell("sharding").values["units"] == 7  # six blocks, and the rest
    assert {arm: per_unit(record, arm) for arm in EXPECTED} == EXPECTED
    assert all(cell.values["relative_error"] < 1e-5 for cell in record.cells[1:])
    assert record.cell("sharding").values["findings"] == count_sentences(record)


@pytest.mark.parametrize(
    ("layout", "units", "expected"),
    [
        ("fsdp", UNITS, FSDP),
        ("fsdp-no-reshard", UNITS, NO_RESHARD),
        ("hsdp", UNITS, REPLICATED),  # two copies of one shard
        ("ddp", 1, REPLICATED),
    ],
)
def test_counts_of_a_layout(
    by_layout: dict[str, Record], layout: str, units: int, expected: dict[str, tuple[int, int, int]]
) -> None:
    record = by_layout[layout]
    assert record.cell("sharding").values["units"] == units
    assert {arm: totals(record, arm) for arm in expected} == in_units(expected, units)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_and_samples(by_layout: dict[str, Record], layout: str) -> None:
    record = by_layout[layout]
    assert [cell.status for cell in record.cells] == ["ok"] * len(record.cells)
    for cell in record.cells[1:]:
        assert cell.values["relative_error"] < 1e-5
        assert set(cell.samples) == set(samples_of(2))
        assert all(len(taken) == record.settings["rounds"] for taken in cell.samples.values())
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            taken = [t for rank in range(2) for t in cell.samples[f"rank{rank}_{kind}_s"] if t is not None]
            assert all((t > 0) == (cell.values["counts"][kind] > 0) for t in taken)


def test_bytes(by_layout: dict[str, Record], command: Record) -> None:
    parameters = command.cell("sharding").values["parameters"]
    for arm in EXPECTED:
        moved = command.cell(arm).values["bytes"]
        gathers, scatters = per_unit(command, arm)
        # fp32; the parameters divide by two ranks
        assert moved["all_gather"] == 4 * gathers * parameters
        assert moved["reduce_scatter"] == 4 * scatters * parameters
        assert moved["all_reduce"] == 0
    assert by_layout["ddp"].cell("exact").values["bytes"]["all_reduce"] == 3 * 4 * parameters


@pytest.mark.parametrize(("layout", "shards"), [("fsdp", 2), ("fsdp-no-reshard", 2), ("hsdp", 1), ("ddp", 1)])
def test_deferral_keeps_whole_gradients(by_layout: dict[str, Record], layout: str, shards: int) -> None:
    """Measured. Where every rank has all parameters, it has all gradients anyway."""
    record = by_layout[layout]
    whole = 4 * record.cell("sharding").values["parameters"]
    for cell in record.cells[1:]:
        assert cell.settings["deferred"] == (cell.name == "exact-deferred")
        kept = whole if cell.settings["deferred"] else whole // shards
        assert cell.values["retained_gradient_bytes"] == kept


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_many_ranks_are_pretended(ranks: int) -> None:
    """And without recomputation, which changes no count; nor does deferral what is gathered, or ranks what it keeps."""
    record = pretended(backbone=DEEP, ranks=ranks)
    assert {arm: per_unit(record, arm) for arm in EXPECTED} == EXPECTED
    parameters = record.cell("sharding").values["parameters"]
    assert record.cell("exact-deferred").values["retained_gradient_bytes"] == 4 * parameters
    assert "relative_error" not in record.cell("exact").values and not record.cell("exact").samples


def test_half_precision_waits_in_fp32() -> None:
    record = pretended(backbone=DEEP, window=3, ranks=8, dtype="bfloat16")
    parameters = record.cell("sharding").values["parameters"]
    assert record.cell("exact-deferred").values["retained_gradient_bytes"] == 4 * parameters
    assert record.cell("exact").values["retained_gradient_bytes"] == 2 * parameters // 8


@pytest.mark.parametrize(("layout", "expected"), [("hsdp", (6 * UNITS, 3 * UNITS, 3 * UNITS)), ("ddp", (0, 0, 3))])
def test_other_layouts_of_many_ranks(layout: Any, expected: tuple[int, int, int]) -> None:
    """Shards and copies, four by two."""
    assert totals(pretended(backbone=DEEP, window=3, ranks=8, layout=layout), "exact") == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_the_order_of_two_passes(ran: tuple[Path, str], rank: int) -> None:
    """All orders give the gradient of the whole model. A unit is gathered in each forward and backward. Two backward
    calls scatter twice, one call or deferral once; the one call gathers blocks for each of its two graphs."""
    found = json.loads((ran[0] / f"orders-{rank}.json").read_text())
    assert all(one["error"] <= 1e-6 for one in found.values())
    counts = {name: (one["counts"]["all_gather"], one["counts"]["reduce_scatter"]) for name, one in found.items()}
    assert counts == {
        "F1 B1 F2 B2": (4 * UNITS, 2 * UNITS),
        "F1 F2 B1 B2": (4 * UNITS, 2 * UNITS),
        # no input of the whole needs a gradient here, so that its own unit stays gathered between the graphs
        "F1 F2 B12": (4 * UNITS - 1, UNITS),
        "F1 B1 F2 B2 deferred": (4 * UNITS, UNITS),
    }


def test_findings_say_what_is_counted(command: Record, by_layout: dict[str, Record]) -> None:
    lines = command.cell("sharding").values["findings"]
    assert [line for line in lines if line.startswith("paper-joint: ")] == [
        "paper-joint: 5 all-gathers per unit with W = 3, 3 in forwards and 2 in 1 backward call; one backward call "
        "gathers every unit 2 times, one graph after the other: the paper's one all-gather per module does not hold"
    ]
    once = "2 all-gathers per unit with W = 3, 1 in forwards and 1 in 1 backward call: one all-gather per module"
    assert any(line.startswith("exact-batched, closed-form-batched: " + once) for line in lines)
    assert any(
        f"{UNITS} reductions of gradients instead of {3 * UNITS}, all-gathers: as many" in line for line in lines
    )
    assert "no arm gathers parameters: every rank has all of them" in count_sentences(by_layout["ddp"])


def test_findings_follow_the_counts() -> None:
    """A joint backward that gathered once would be said to."""
    counts = {"all_gather": 8, "reduce_scatter": 4, "all_reduce": 0}
    values = {"counts": counts, "backward_counts": counts | {"all_gather": 4}, "backwards": 1}
    cells = [
        Cell("sharding", values={"units": 4}),
        Cell("paper-joint", settings={"deferred": False}, values=values),
        Cell("exact", "failed", "ranks made different numbers of collectives", values=values),
    ]
    assert count_sentences(Record("collectives", [], "x", {"window": 5}, {}, cells=cells)) == [
        "paper-joint: 2 all-gathers per unit with W = 5, 1 in forwards and 1 in 1 backward call: "
        "one all-gather per module and direction holds",
        "reduce-scatters per unit: paper-joint 1",
    ]


def test_ranks_that_disagree() -> None:
    ours, theirs = (
        {"units": 4, "parameters": 1, "cells": [vars(Cell("exact", values={"counts": {"all_gather": n}}))]}
        for n in (8, 7)
    )
    cell = record_of(CollectiveBench(), [ours, theirs]).cell("exact")
    assert cell.status == "failed" and "different numbers of collectives" in (cell.reason or "")


def test_a_rank_that_dies_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    flags = ["--backbone", "tests.bench.wide:dies_on_rank_1", "--timeout", "200"]
    done = launch("bench", "collectives", *flags, "--out", str(out))
    assert done.returncode == 1
    assert "MemoryError: no room on this rank" in done.stderr
    assert not out.exists() or Record.read(out).cell("ranks").status == "failed"


def test_ranks_that_hang_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    with pytest.raises(SystemExit) as caught:
        main(["collectives", "--timeout", "1", "--out", str(out)])
    assert caught.value.code == 1
    assert "not done after 1 s (setting timeout)" in capsys.readouterr().err
    [cell] = json.loads(out.read_text())["cells"]
    assert (cell["name"], cell["status"]) == ("ranks", "failed")


def test_ranks_come_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of({}).ranks == 2
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert settings_of({}).ranks == settings_of({"ranks": 4}).ranks == 4
    with pytest.raises(ValueError, match="ranks must be the 4 that torchrun started or be left out, got 2"):
        settings_of({"ranks": 2})
    with pytest.raises(ValueError, match="pretend is for one process: run it without torchrun"):
        settings_of({"pretend": True})


def test_ranks_that_share_a_copy() -> None:
    assert CollectiveBench(layout="hsdp", ranks=8).shards_per_copy == 4
    assert CollectiveBench(layout="hsdp", ranks=8, shards=2).shards_per_copy == 2
    assert CollectiveBench(layout="hsdp", ranks=3, shards=3).shards_per_copy == 3


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--ranks", "0"], "ranks must be at least 1, got 0"),
        (["--window", "1"], "window must be at least 2, got 1"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--backbone", "digit-flux"], "did you mean 'digits-flux'"),
        (["--layout", "zero"], "invalid choice: 'zero'"),
        (["--shards", "2"], "layout must be hsdp where shards are given, got 'fsdp'"),
        (["--layout", "hsdp", "--ranks", "3"], "ranks must be even under hsdp unless shards are given, got 3"),
        (["--layout", "hsdp", "--ranks", "4", "--shards", "3"], "shards must be a divisor of the 4 ranks, got 3"),
    ],
)
def test_what_is_refused(flags: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["collectives", *flags, "--out", str(tmp_path / "r.json")])
    assert caught.value.code == 2 and match in capsys.readouterr().err


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # a dozen process groups leave threads of gloo, which abort the interpreter now and then as it ends
