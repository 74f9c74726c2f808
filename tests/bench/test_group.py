"""The timing of a group: every arm verified, then timed; what fails is recorded. No test asserts a time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.report.bench.figures import speed_up_intervals
from analysis.report.bench.tables import groups
from bench import arms, group, memory
from bench.__main__ import main
from bench.arms import PHASES, Arm, Tally, arms_of, find_arm
from bench.cost import Machine, Update, fit, predict
from bench.group import load_group, run_group_bench, run_of
from bench.settings import GroupBench
from bench.timing import clear, gradient
from bench.work import PassWork
from jagg_core import RatioNoise, dance_schedule
from jagg_core.records import Record
from jagg_core.reference import TOLERANCE, relative_error
from tests.jagg_core.fields import MlpField

ARMS = [
    "exact",
    "exact-again",
    "exact-bare",
    "exact-batched",
    "prototype",
    "paper-joint",
    "closed-form-sequential",
    "closed-form-batched",
    "endpoint-only",
    "subsample",
]
SMALL: dict[str, Any] = {"batch": 3, "rounds": 4, "warmup": 1, "window": 4, "steps": 8}


# The shipped digits, by the command


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "deep" / "speed.json"
    sizes = ["--batch", "2", "--rounds", "2", "--warmup", "1", "--window", "3", "--steps", "6"]
    main(["group", "--backbone", "digits-flux", *sizes, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def record(path: Path) -> Record:
    return Record.read(path)


def test_every_arm_is_verified(record: Record) -> None:
    assert [c.name for c in record.cells] == ARMS
    assert [(c.name, c.reason) for c in record.cells if c.status != "ok"] == []
    for cell in record.cells:
        assert 0 <= cell.values["relative_error"] < TOLERANCE[torch.float32]
    assert [c.values["passes"] for c in record.cells] == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]


def test_every_arm_has_a_sample_per_round(record: Record) -> None:
    for cell in record.cells:
        phases = {"total_s"} if cell.name == "exact-bare" else {"total_s", "forward_s", "upstream_s", "backward_s"}
        assert cell.samples.keys() == phases
        assert {len(samples) for samples in cell.samples.values()} == {2}
        assert all(seconds > 0 for samples in cell.samples.values() for seconds in samples)  # type: ignore[operator]
        if len(phases) > 1:
            for total, *parts in zip(*(cell.samples[f"{p}_s"] for p in ("total", *PHASES)), strict=True):
                assert sum(parts) <= total  # type: ignore[arg-type, operator]


def test_the_record_is_small_strict_and_complete(path: Path, record: Record) -> None:
    assert path.stat().st_size < 200_000

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert (data["kind"], data["backbone"]) == ("group-speed", "digits-flux")
    expected = {"window": 3, "steps": 6, "batch": 2, "rounds": 2, "dtype": "float32", "device": "cpu", "seed": 0}
    assert expected.items() <= data["settings"].items()
    assert data["environment"]["threads"] == torch.get_num_threads() == 1
    assert data["environment"]["packages"]["torch"] == torch.__version__
    assert data["environment"]["packages"]["diffusers"]
    assert data["schedule"] == dance_schedule(6)[:3].tolist()


# On a stub


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_recorded_and_left_alone(threads: int, stub: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = run_group_bench(GroupBench(stub, **SMALL))
        assert record.environment["threads"] == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_arms_take_turns_in_an_order_drawn_anew(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str, int]] = []
    accumulate = group.accumulate_gradients

    def logged(policy: Any, trajectory: Any, advantages: Any, plan: Any, *rest: Any, **settings: Any) -> Any:
        ran.append((*rest[1:3], plan.passes))
        return accumulate(policy, trajectory, advantages, plan, *rest, **settings)

    monkeypatch.setattr(group, "accumulate_gradients", logged)
    steps: list[str] = []
    run_group_bench(GroupBench(stub, **{**SMALL, "warmup": 2}), progress=steps.append)
    by_engine = len(ARMS) - 2
    assert len(ran) == by_engine * (2 + 4)
    rounds = [ran[start : start + by_engine] for start in range(2 * by_engine, len(ran), by_engine)]
    assert len(rounds) == 4
    for one in rounds:
        assert Counter(one) == Counter(ran[: 2 * by_engine : 2])
    assert len({tuple(one) for one in rounds}) > 1
    verified = [f"verified {name}, {n} of {len(ARMS)} arms" for n, name in enumerate(ARMS, 1)]
    assert steps == verified + [f"round {n} of 4" for n in (1, 2, 3, 4)]


def sabotage(monkeypatch: pytest.MonkeyPatch, backward: str, factor: float | None) -> None:
    """Scale the gradients of the arms with this backward mode, or let them fail."""
    accumulate = group.accumulate_gradients

    def sabotaged(policy: Any, trajectory: Any, advantages: Any, plan: Any, *rest: Any, **settings: Any) -> Any:
        report = accumulate(policy, trajectory, advantages, plan, *rest, **settings)
        if rest[2] == backward:
            if factor is None:
                raise MemoryError("out of it")
            for parameter in policy.parameters():
                parameter.grad.mul_(factor)
        return report

    monkeypatch.setattr(group, "accumulate_gradients", sabotaged)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (1.001, r"ArithmeticError: gradient differs from the plain loop by 0.001 (limit 0.0001)"),
        (float("nan"), r"ArithmeticError: gradient differs from the plain loop by nan (limit 0.0001)"),
        (None, "MemoryError: out of it"),
    ],
)
def test_an_arm_that_is_wrong_fails_and_the_others_are_timed(
    factor: float | None, reason: str, stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, "joint", factor)
    record = run_group_bench(GroupBench(stub, **SMALL))
    assert [c.name for c in record.cells] == ARMS
    for cell in record.cells:
        if cell.name == "paper-joint":
            assert (cell.status, cell.reason, cell.samples) == ("failed", reason, {})
        else:
            assert (cell.status, len(cell.samples["total_s"])) == ("ok", 4)


def test_the_command_says_what_failed_and_still_writes(
    stub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sabotage(monkeypatch, "batched", 2.0)
    arguments = ["--backbone", stub, "--batch", "2", "--rounds", "2", "--window", "3", "--steps", "6"]
    with pytest.raises(SystemExit) as caught:
        main(["group", *arguments, "--out", str(tmp_path / "s.json")])
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert "exact" in printed.out and "1.00x" in printed.out and "exact-batched" not in printed.out
    said = printed.err.split("failed cells")[1]  # behind the progress, of which more shows on a slow machine
    # one line for both, as they have one reason
    assert said.count("ArithmeticError") == 1
    assert "exact-batched, closed-form-batched: ArithmeticError: gradient differs from the plain loop by 1 " in said
    assert "paper-joint" not in said
    failed = [c.name for c in Record.read(tmp_path / "s.json").cells if c.status == "failed"]
    assert failed == ["exact-batched", "closed-form-batched"]


@pytest.mark.filterwarnings("ignore::jagg_core.RatioNoise")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions(dtype: str, stub: str) -> None:
    record = run_group_bench(GroupBench(stub, dtype=dtype, **SMALL))
    assert [(c.name, c.reason) for c in record.cells if c.status != "ok"] == []
    limit = {"float64": 1e-9, "bfloat16": 5e-2}[dtype]
    assert all(c.values["relative_error"] < limit for c in record.cells)
    assert issubclass(RatioNoise, UserWarning)


def test_with_checkpointing(stub: str) -> None:
    record = run_group_bench(GroupBench(stub, checkpointing=True, **SMALL))
    assert [(c.name, c.reason) for c in record.cells if c.status != "ok"] == []
    assert record.settings["checkpointing"] is True


@pytest.mark.parametrize("window", [2, 3, 5])
def test_arms_are_of_one_group(window: int) -> None:
    assert [arm.name for arm in arms_of("group")] == ARMS
    for arm in arms_of("group"):
        assert (arm.bare is not None) == (arm.name in ("exact-bare", "prototype"))
        plan = arm.plan(dance_schedule(21)[:window], window)
        assert plan.steps == window
        assert plan.passes == (window if arm.name.startswith("exact") else 2)


@pytest.mark.parametrize("arm", ARMS)
def test_forwards_of_an_arm(arm: str, stub: str) -> None:
    """Steps that run forward without a graph and with one, W = 5. The prototype runs its ends twice."""
    work = load_group(GroupBench(stub, batch=3, window=5))
    assert isinstance(work.policy, MlpField)
    work.policy.calls.clear()
    run_of(arms.ARMS[arm], work)()
    rows = {grad: sum(len(c.rows) for c in work.policy.calls if c.grad == grad) // 3 for grad in (False, True)}
    expected = {"prototype": (5, 2), "paper-joint": (3, 2)}
    few = {"closed-form-sequential", "closed-form-batched", "endpoint-only", "subsample"}
    assert (rows[False], rows[True]) == expected.get(arm, (0, 2) if arm in few else (0, 5))


def test_the_steps_of_subsample_are_drawn_by_the_seed() -> None:
    drawn = [arms.ARMS["subsample"].plan(dance_schedule(21)[:10], 10, seed=seed) for seed in (0, 0, 1, 2)]
    assert drawn[0].knots == drawn[1].knots
    assert len({plan.knots for plan in drawn}) > 1
    assert drawn[0].weights.sum() == 10


def test_gradients_agree_on_any_number_of_threads() -> None:
    """Sums are taken in another order."""
    work = load_group(GroupBench(batch=4, window=2))
    run = run_of(arms.ARMS["exact-batched"], work)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            clear(work.parameters)
            run()
            assert torch.get_num_threads() == threads
            found.append(gradient(work.parameters))
    finally:
        torch.set_num_threads(before)
    assert relative_error(*found) < 1e-5


# The registry


def test_an_arm_is_added_by_one_entry(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its row in a table, its label in a figure, and its prediction; by every command that it names."""
    arm = Arm("causal-first", "causal, first step", "causal", knots=(0,), tally=lambda w: Tally(1, 1, 2, 1))
    monkeypatch.setitem(arms.ARMS, arm.name, arm)
    record = run_group_bench(GroupBench(stub, **SMALL))
    cell = record.cell("causal-first")
    assert (cell.status, cell.values["passes"], len(cell.samples["total_s"])) == ("ok", 1, 4)
    table = groups(record, {"fit": fit(record)}).set_index("arm", drop=False)
    assert table.loc["causal-first", "speed_up"] > 0 and table.loc["causal-first", "predicted_s"] > 0
    [axes] = speed_up_intervals({"group": table}).axes
    assert "causal, first step" in [label.get_text() for label in axes.get_yticklabels()]
    assert "causal-first" in memory.arm_names()
    assert {p.arm.name: p.tally.backwards for p in predict(PassWork(1, 2, 1), Update(), Machine(), [1])}[
        "causal-first"
    ] == 5


def test_names_and_labels_differ() -> None:
    names = [name for arm in arms.ARMS.values() for name in (arm.name, *arm.former)]
    assert len(set(names)) == len(names)
    assert len({arm.label for arm in arms.ARMS.values()}) == len(arms.ARMS)


@pytest.mark.parametrize(
    ("name", "passes", "expected"),
    [
        ("paper", None, "paper-joint"),
        ("jagg-closed-form-batched", None, "closed-form-batched"),
        ("closed-sequential", None, "closed-form-sequential"),
        ("causal-8-batched", 8, "causal-8-batched"),
        ("causal-8-batched", 5, None),
        ("unknown", None, None),
    ],
)
def test_names_of_stored_records(name: str, passes: int | None, expected: str | None) -> None:
    arm = find_arm(name, passes)
    assert (arm and arm.name) == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "arm 'x' must have a tally to be in bench 'cost', got None"),
        ({"benches": ("grp",)}, "benches must be one of .*'group'.* 'grp'"),
    ],
)
def test_an_arm_that_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Arm("x", "x", "exact", **settings)


# Settings

BAD: list[tuple[str, Any, str]] = [
    ("backbone", "digit-flux", "backbone must be one of .*got 'digit-flux'; did you mean 'digits-flux'"),
    ("window", 1, "window must be at least 2, got 1"),
    ("window", 21, "window must be at most the 20 trained steps, got 21"),
    ("batch", 0, "batch must be at least 1, got 0"),
    ("rounds", 1, "rounds must be at least 2, got 1"),
    ("warmup", 0, "warmup must be at least 1, got 0"),
    ("steps", 2, "steps must be at least 3, got 2"),
    ("eta", 0.0, "eta of DanceSDE must be positive, got 0.0"),
    ("eta", float("nan"), "eta of DanceSDE must be positive, got nan"),
    ("shift", -1.0, "shift must be positive, got -1.0"),
    ("compile", "gcc", r"compile must be one of \[None, 'inductor', .*got 'gcc'"),
    ("dtype", "nonsense", "dtype must be one of .*'bfloat16'.*got 'nonsense'"),
    ("dtype", "int64", "dtype must be one of .*got 'int64'"),
    ("dtype", "nn", "dtype must be one of .*got 'nn'"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_a_bad_setting_names_itself(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(group, "load_backbone", lambda *_: pytest.fail("loaded before the refusal"))
    with pytest.raises(ValueError, match=message):
        GroupBench(**{name: value})
    with pytest.raises(SystemExit) as caught:
        main(["group", f"--{name}", str(value), "--out", str(tmp_path / "s.json")])
    assert caught.value.code == 2
    assert f"got {value!r}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["group", "--device", "nonsense", "--out", str(tmp_path / "s.json")])
    assert caught.value.code == 2
    assert "device 'nonsense' cannot be used here" in capsys.readouterr().err


def test_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jagg_core.backbones.pixel.base.weights_path", lambda name: tmp_path / name)
    with pytest.raises(SystemExit) as caught:
        main(["group", "--out", str(tmp_path / "s.json")])
    assert caught.value.code == 2
    assert "python -m jagg_core backbones train digits-flux" in capsys.readouterr().err
