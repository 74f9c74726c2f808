"""Collectives per group under FSDP2: what two real ranks make, what 64 pretended ones make, and what the model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.collectives import CollectiveBench, run_collective_bench
from bench.cost import SCHEMES
from jagg_core.records import Record

ARMS = {
    "exact": "exact",
    "exact-deferred": "exact-deferred",
    "exact-batched": "exact-batched",
    "paper-joint": "paper",
    "closed-form-sequential": "closed-sequential",
    "closed-form-batched": "closed-batched",
}
"""Arms, and the scheme of the cost model that each is."""


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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Two gloo ranks, each checking its gradients against the unsharded ones; activations recomputed."""
    out = tmp_path_factory.mktemp("collectives") / "record.json"
    main(["collectives", "--backbone", "digits-flux", "--ranks", "2", "--checkpointing", "--out", str(out)])
    return Record.read(out)


def per_unit(record: Record, arm: str) -> tuple[float, float]:
    units = record.cell("sharding").values["units"]
    counts = record.cell(arm).values["counts"]
    return counts["all_gather"] / units, counts["reduce_scatter"] / units


def test_counts_on_two_ranks(two_ranks: Record) -> None:
    assert two_ranks.cell("sharding").values["units"] == 7  # six blocks, and the rest
    assert {arm: per_unit(two_ranks, arm) for arm in EXPECTED} == EXPECTED


def test_the_cost_model_assumes_what_is_counted(two_ranks: Record) -> None:
    for arm, scheme in ARMS.items():
        tally = SCHEMES[scheme].group(5)
        scatters = 1 if SCHEMES[scheme].scatters_once else tally.scatters
        assert per_unit(two_ranks, arm) == (tally.gathers, scatters)


def test_bytes_and_gradients(two_ranks: Record) -> None:
    parameters = two_ranks.cell("sharding").values["parameters"]
    for arm in ARMS:
        cell = two_ranks.cell(arm)
        gathers, scatters = per_unit(two_ranks, arm)
        # fp32; parameters are padded to a multiple of the ranks
        assert cell.values["bytes"]["all_gather"] == pytest.approx(4 * gathers * parameters, rel=1e-3)
        assert cell.values["bytes"]["reduce_scatter"] == pytest.approx(4 * scatters * parameters, rel=1e-3)
        assert cell.values["relative_error"] < 1e-5
        assert set(cell.samples) == {"rank0_s", "rank1_s"}
        kept = 4 * parameters if arm == "exact-deferred" else 0
        assert cell.values["retained_gradient_bytes"] == kept


def test_many_ranks_are_pretended() -> None:
    """And without checkpointing, which changes no count."""
    record = run_collective_bench(CollectiveBench(pretend=True, ranks=64))
    assert {arm: per_unit(record, arm) for arm in EXPECTED} == EXPECTED
    assert record.cell("exact").values["relative_error"] is None


def test_without_resharding_after_the_forward() -> None:
    """A backward finds its parameters gathered; they are let go after it."""
    record = run_collective_bench(CollectiveBench(pretend=True, ranks=8, reshard="never"))
    assert per_unit(record, "exact") == (5, 5)
    assert per_unit(record, "closed-form-batched") == (1, 1)


def test_ranks_that_hang_or_fail_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    with pytest.raises(SystemExit) as caught:
        main(["collectives", "--timeout", "1", "--out", str(out)])
    assert caught.value.code == 1
    assert "not done after 1 s (setting timeout)" in capsys.readouterr().err
    [cell] = json.loads(out.read_text())["cells"]
    assert (cell["name"], cell["status"]) == ("ranks", "failed")


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--ranks", "0"], "ranks must be at least 1, found 0"),
        (["--window", "1"], "window must be at least 2, found 1"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--backbone", "digit-flux"], "did you mean 'digits-flux'"),
        (["--reshard", "sometimes"], "invalid choice: 'sometimes'"),
    ],
)
def test_what_is_refused(flags: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["collectives", *flags, "--out", str(tmp_path / "r.json")])
    assert caught.value.code == 2 and match in capsys.readouterr().err
