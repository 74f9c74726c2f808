"""The calibration from end to end on a stub: what it writes, that it can be killed and resumed, and how it refuses."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.__main__ import QUICK, main, parser, settings_from
from analysis.measure import calibrate, job, pathwise, study
from analysis.measure.calibrate import collect, round_order, run
from analysis.measure.job import NotReproducible, fresh_lora_note
from analysis.measure.rollouts import Batch
from analysis.measure.study import Calibrate, Recipe
from analysis.report import figures
from analysis.report.fidelity.recommendation import calibration
from analysis.report.fidelity.signal_tables import signal
from analysis.report.write import write_report
from analysis.statistics.learning_signal import read_products
from jagg_core import Plan, causal_plan
from jagg_core.backbones import BackboneEntry, load_backbone, registry
from jagg_core.records import Cell, Record
from jagg_core.strict_json import plain, read_json, write_json
from tests.backbones.stub import STUB, StubBackbone
from tests.jagg_core.fields import MlpField

Capture = pytest.CaptureFixture[str]
CALIBRATION = "calibration-eta0.7.json"
SMALL = Calibrate(
    backbone="digits-flux",  # until the stub is registered
    reward="ink",
    windows=(3, 4),
    calibration_batches=(2,),
    evaluation_batches=(3,),
    predicted_passes=(5, 3),
    signal_batches=5,
    signal_prompts=2,
    signal_samples=2,
    signal_passes=(5, 3, 2),
    signal_dimension=64,
    contender_batches=4,
    centring_batches=3,
    pathwise_batches=4,
    timing_rounds=2,
    recipe=Recipe(steps=7, prompts=1, samples=3),
)
TABLES = SMALL.calibration_batches[0] + SMALL.evaluation_batches[0]


def small(**changes: Any) -> Calibrate:
    """The settings on the stub, which must be registered."""
    return replace(SMALL, **{"backbone": "stub", **changes})


def no_pictures(patch: pytest.MonkeyPatch) -> None:
    """Pictures take most of a report's time."""
    patch.setattr(figures, "rendered", lambda figure: {"png": b"", "svg": b""})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._REGISTRY, "stub", STUB)
        no_pictures(patch)
        run(small(), out)
        write_report(out)
    yield out


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    return Record.read(folder / "record.json")


@pytest.fixture
def calibrated(stub: str, tmp_path: Path) -> Callable[..., Record]:
    """Calibrate the stub into ``tmp_path / "run"``."""
    return lambda **changes: run(small(**changes), tmp_path / "run")


def calibration_file(record: Record, path: Path) -> bytes:
    """The file that a report writes, without the rest of it."""
    write_json(path, calibration(record, 0.7, {"signal": signal(record)}))
    return path.read_bytes()


def not_ok(record: Record) -> dict[str, str | None]:
    return {c.name: c.reason for c in record.cells if c.status != "ok"}


def numbers(record: Record) -> list[Any]:
    """All cells but those of wall times."""
    return [plain(vars(c)) for c in record.cells if not c.name.endswith("/times")]


class Counted:
    """A function that counts its calls, and is interrupted in one of them."""

    def __init__(self, function: Callable[..., Any], interrupted_in: int | None = None) -> None:
        self.function, self.interrupted_in, self.calls = function, interrupted_in, 0

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        self.calls += 1
        if self.calls == self.interrupted_in:
            raise KeyboardInterrupt
        return self.function(*arguments, **settings)


# What is written


def test_every_cell_is_there(record: Record) -> None:
    assert record.kind == "calibrate"
    assert not_ok(record) == {}
    parts = ("floor", "knots", "evaluation", "cross", "signal", "times")
    names = [c.name for c in record.cells]
    assert [name for name in names if name in {f"eta=0.7/{part}" for part in parts}] == [
        f"eta=0.7/{part}" for part in parts
    ]
    judged = {c.settings["estimator"] for c in record.cells if "headline" in c.settings}
    assert {"jagg-w3-f0.5", "jagg-w4-f1", "causal-4", "spline-6", "causal-predicted-5", "causal-predicted-3"} <= judged


def of_signal(record: Record, centring: str) -> dict[str, Cell]:
    return {c.settings["estimator"]: c for c in record.cells if c.settings.get("centring") == centring}


def test_the_signal_is_measured_on_as_many_batches_as_asked(record: Record) -> None:
    lead = ["exact", "jagg-w3-f0.5", "jagg-w3-f1", "jagg-w4-f1", "causal-5", "causal-3", "causal-2"]
    drawn = ["subsample-5", "subsample-2", "mixgrpo", "flow-grpo-fast", "high-noise-half", "low-noise-half"]
    side = ["spline-5", "causal-predicted-5", "per-sample-5"]
    per_prompt = of_signal(record, "per prompt")
    assert set(per_prompt) >= {*lead, *drawn, *side}
    for name, cell in per_prompt.items():
        count = 5 if name in (*lead, *drawn) else 4
        assert cell.values == {"batches": count}, name
        sizes = {"own": count * (count + 1) // 2, "cross": count * 5}
        # what equals exact has no products with it
        assert {key: len(values) for key, values in cell.samples.items()}.items() <= sizes.items(), name
        assert ("cross" in cell.samples) == (name != "exact"), name
    for centring in ("global", "none", "ones"):
        found = of_signal(record, centring)
        assert set(found) == {"exact", "jagg-w3-f0.5", "jagg-w3-f1", "jagg-w4-f1", "causal-5", "spline-5"}
        assert {cell.values["batches"] for cell in found.values()} == {3}


def test_products_of_equal_plans_are_equal(record: Record) -> None:
    """Subsampling is exact's own passes: a batch's product with exact is no smaller than Cauchy and Schwarz allow."""
    cells = of_signal(record, "per prompt")
    exact = read_products(cells["exact"].samples).own
    assert np.linalg.eigvalsh(exact).min() > -1e-6 * exact.max()
    for name, cell in cells.items():
        found = read_products(cell.samples, exact)
        own = np.diag(found.own)
        limits = np.sqrt(own * np.diag(exact)[: found.m])
        assert (np.abs(np.diag(found.cross)) <= limits * (1 + 1e-5)).all(), name


def test_seeds_of_every_purpose_are_stored_and_apart(folder: Path, record: Record) -> None:
    assert {purpose: len(set(seeds)) for purpose, seeds in record.seeds.items()} == {
        "calibration eta=0.7": 2,
        "evaluation eta=0.7": 3,
        "signal eta=0.7": 5,
        "pathwise eta=0.7": 4,
    }
    for one, other in combinations(record.seeds.values(), 2):
        assert not {*one} & {*other}
    assert read_json(folder / CALIBRATION)["seeds"] == record.seeds


def test_times_are_of_every_arm_and_round(record: Record) -> None:
    times = record.cell("eta=0.7/times")
    assert {"rollout_s", "reward_s", "exact_s", "causal-5_s", "causal-2_s", "jagg-w4-f1_s"} <= set(times.samples)
    assert {len(seconds) for seconds in times.samples.values()} == {2}
    assert all(s is not None and s > 0 for seconds in times.samples.values() for s in seconds)
    assert times.settings["batch"] == 4


def test_every_round_has_an_order_of_its_own() -> None:
    names = ["rollout", "reward", "exact", "causal-5", "causal-2", "jagg-w4-f1"]
    orders = [tuple(round_order(names, 0, number)) for number in range(4)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders[0] == tuple(round_order(names, 0, 0))


def test_files(folder: Path) -> None:
    expected = {"collected", "record.json", "report.html", "tables", "figures", CALIBRATION}
    assert {p.name for p in folder.iterdir()} == expected
    assert {"signal.csv", "by_batch.csv", "centring.csv", "noise.csv", "pareto.csv"} <= {
        p.name for p in (folder / "tables").iterdir()
    }
    kept = sorted(p.name.rsplit("-", 1)[0] for p in (folder / "collected").iterdir())
    assert kept == [
        *(f"calibration-{n}" for n in range(2)),
        *(f"evaluation-{n}" for n in range(3)),
        *(f"pathwise-{n}" for n in range(4)),
        *(f"signal-{n}" for n in range(5)),
    ]


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("passes", [2, 3, 6])
def test_plans_load(passes: int, predict: bool, folder: Path, record: Record) -> None:
    plan = Plan.from_calibration(folder / CALIBRATION, passes, predict=predict)
    knots = record.cell("eta=0.7/knots").values["causal"][str(passes)]["knots"]
    expected = causal_plan(torch.tensor(record.schedule, dtype=torch.float64), knots, predict=predict)
    assert plan.knots == expected.knots
    assert torch.equal(plan.weights, expected.weights)
    assert (plan.knot_sigmas is None) != predict
    assert not predict or torch.equal(plan.knot_sigmas, expected.knot_sigmas)  # type: ignore[arg-type]
    assert not plan.anticipating


def test_the_file_holds_what_was_measured(folder: Path, record: Record) -> None:
    data = read_json(folder / CALIBRATION)
    table = signal(record).set_index("estimator")
    causal = data["plans"]["causal"]
    assert set(causal) == {"1", "2", "3", "4", "5", "6"}
    for passes in ("5", "3", "2"):
        loss = table.loc[f"causal-{passes}"]
        expected = [None if pd.isna(loss[c]) else loss[c] for c in ("loss", "loss_low", "loss_high")]
        assert [causal[passes]["signal_loss"][key] for key in ("value", "low", "high")] == expected
    assert causal["4"]["signal_loss"] is None
    assert causal["4"]["held_out_cosine"]["n"] == 3
    assert causal["5"]["predicted"]["held_out_cosine"]["n"] == 3
    assert causal["5"]["predicted"]["signal_loss"] is not None
    for plan in (causal["4"], causal["5"]["predicted"]):
        assert plan["direction_lost"]["low"] < plan["direction_lost"]["value"] < plan["direction_lost"]["high"]
    assert causal["4"]["predicted"] == {"held_out_cosine": None, "signal_loss": None}
    assert set(data["windows"]) == {"3", "4"}
    assert [s["threshold"] for s in data["windows"]["3"]["sensitivity"]] == [0.8, 0.85, 0.9, 0.95, 0.97, 0.99]
    assert set(data["recommended"]) == {"cosine >= 0.99", "signal loss <= 0.05"}


# The same settings, the same file


@pytest.mark.parametrize("changes", [{}, {"workers": 2, "timing_rounds": 3}], ids=str)
def test_the_same_settings_are_the_same_file(
    changes: dict[str, Any], calibrated: Callable[..., Record], folder: Path, record: Record, tmp_path: Path
) -> None:
    again = calibrated(**changes)
    assert numbers(again) == numbers(record)
    assert calibration_file(again, tmp_path / "c.json") == (folder / CALIBRATION).read_bytes()


@pytest.mark.parametrize("half", [0, 1])
def test_the_same_file_from_half_of_the_tables(
    half: int,
    calibrated: Callable[..., Record],
    folder: Path,
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = sorted((folder / "collected").iterdir())[half::2]
    (tmp_path / "run" / "collected").mkdir(parents=True)
    for path in kept:
        shutil.copy(path, tmp_path / "run" / "collected")
    tables, banks = Counted(job.collect_table), Counted(calibrate.bank_rows)
    monkeypatch.setattr(job, "collect_table", tables)
    monkeypatch.setattr(calibrate, "bank_rows", banks)
    pathwise_banks = Counted(pathwise.pathwise_rows)
    monkeypatch.setattr(pathwise, "pathwise_rows", pathwise_banks)
    again = calibrated()
    assert tables.calls + banks.calls + pathwise_banks.calls == 14 - len(kept) == 7
    assert tables.calls and banks.calls and pathwise_banks.calls
    assert numbers(again) == numbers(record)
    assert again.seeds == record.seeds
    assert calibration_file(again, tmp_path / "c.json") == (folder / CALIBRATION).read_bytes()
    assert {p.name for p in (tmp_path / "run" / "collected").iterdir()} == {
        p.name for p in (folder / "collected").iterdir()
    }


def test_another_seed_is_another_file(calibrated: Callable[..., Record], record: Record) -> None:
    mine, other = (calibration(r, 0.7) for r in (calibrated(recipe=replace(SMALL.recipe, seed=1)), record))
    assert mine["windows"] != other["windows"]
    assert mine["plans"]["causal"]["3"]["calibration_cosine"] != other["plans"]["causal"]["3"]["calibration_cosine"]


@pytest.mark.parametrize(
    ("changes", "remade"),
    [
        ({"threshold": 0.95}, {"calibration": 0, "evaluation": 0, "signal": 0}),
        ({"reward": "tests.backbones.stub:first_pixel"}, {"calibration": 2, "evaluation": 3, "signal": 5}),
        ({"predicted_passes": (4,)}, {"calibration": 0, "evaluation": 3, "signal": 0}),
        ({"signal_dimension": 32}, {"calibration": 0, "evaluation": 0, "signal": 5}),
        ({"dimension": 32}, {"calibration": 2, "evaluation": 3, "signal": 0}),
        ({"contender_batches": 5}, {"calibration": 0, "evaluation": 0, "signal": 1}),
        ({"evaluation_batches": (4,)}, {"calibration": 0, "evaluation": 1, "signal": 0}),
        (
            {"recipe": replace(SMALL.recipe, timestep_mode="trunc_fp32")},
            {"calibration": 2, "evaluation": 3, "signal": 5},
        ),
        ({"recipe": replace(SMALL.recipe, transition="flow")}, {"calibration": 2, "evaluation": 3, "signal": 5}),
    ],
    ids=str,
)
def test_what_a_change_of_settings_makes_anew(
    changes: dict[str, Any], remade: dict[str, int], calibrated: Callable[..., Record], folder: Path, tmp_path: Path
) -> None:
    """Nothing that another setting made is taken for this one's."""
    shutil.copytree(folder / "collected", tmp_path / "run" / "collected")
    before = {p.name for p in (folder / "collected").iterdir()}
    calibrated(**changes)
    new = [p.name for p in (tmp_path / "run" / "collected").iterdir() if p.name not in before]
    assert {purpose: sum(name.startswith(purpose) for name in new) for purpose in remade} == remade


@pytest.mark.parametrize("changed", ["prompts", "reward"])
def test_a_table_is_not_read_after_its_prompts_or_the_code_of_its_reward_changed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of both stay the same."""
    monkeypatch.setitem(registry._REGISTRY, "stub", STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "def mine(images, prompts):\n    return images[:, 0, 0, 0]\n"
    paths = []
    for text in (source, source if changed == "prompts" else source.replace("0, 0]", "0, 1]")):
        (tmp_path / "edited_reward.py").write_text(text)
        sys.modules.pop("edited_reward", None)
        importlib.invalidate_caches()
        found = job.Job(small(reward="edited_reward:mine"), tmp_path / "run", "calibrate", tmp_path / "collected")
        paths.append(found.store.path("calibration-0", found.key(0.7, SMALL.recipe)))
        if changed == "prompts":
            monkeypatch.setattr(StubBackbone, "prompts", ("a", "b", "c", "d", "another"))
    assert paths[0] != paths[1]


# Interruptions


@pytest.mark.parametrize(
    ("where", "name", "number", "left"),
    [
        (job, "collect_table", 2, (TABLES - 1, 5)),
        (job, "collect_table", 4, (TABLES - 3, 5)),
        (calibrate, "bank_rows", 3, (0, 3)),
        (calibrate, "_update", 2, (0, 0)),
    ],
)
def test_a_killed_run_resumes(
    where: Any,
    name: str,
    number: int,
    left: tuple[int, int],
    calibrated: Callable[..., Record],
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, name, Counted(getattr(where, name), interrupted_in=number))
        with pytest.raises(KeyboardInterrupt):
            calibrated()
    assert [p.name for p in (tmp_path / "run" / "collected").glob(".*")] == []
    tables, banks = Counted(job.collect_table), Counted(calibrate.bank_rows)
    monkeypatch.setattr(job, "collect_table", tables)
    monkeypatch.setattr(calibrate, "bank_rows", banks)
    again = calibrated()
    assert (tables.calls, banks.calls) == left
    assert numbers(again) == numbers(record)
    assert again.seeds == record.seeds


def test_a_new_run_replaces_the_outputs_but_not_the_tables(
    stub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = ["record.json", "calibration-eta9.json", "report.html", "tables/x.csv", "figures/x.png", "figures/x.svg"]
    kept = ["collected/x.npz", "notes.txt", "samples.png"]
    for name in (*stale, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(job, "plan_gradients", Counted(job.plan_gradients, interrupted_in=1))
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path)
    assert [name for name in (*stale, *kept) if (tmp_path / name).exists()] == kept


def test_collecting_first_makes_the_tables_that_calibrating_uses(
    calibrated: Callable[..., Record], record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pictures(monkeypatch)
    collected = collect(small(), tmp_path / "run")
    assert not_ok(collected) == {}
    assert not [c.name for c in collected.cells if "signal" in c.name or "times" in c.name]
    page, shown, _ = write_report(tmp_path / "run")
    assert "Learning signal" not in page.read_text()
    assert "signal" not in shown
    assert read_json(tmp_path / "run" / CALIBRATION)["plans"]["causal"]["3"]["signal_loss"] is None
    tables = Counted(job.collect_table)
    monkeypatch.setattr(job, "collect_table", tables)
    assert numbers(calibrated()) == numbers(record)
    assert tables.calls == 0


# What goes wrong


def test_a_part_that_fails_is_recorded_and_the_rest_still_runs(
    calibrated: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise MemoryError("too much")

    monkeypatch.setattr(calibrate, "bank_rows", failing)
    found = calibrated()
    assert not_ok(found) == {"eta=0.7/signal": "MemoryError: too much"}
    assert found.cell("eta=0.7/times").status == "ok"
    assert not len(signal(found))
    assert calibration(found, 0.7)["plans"]["causal"]["3"]["calibration_cosine"] < 1


def test_times_that_fail_leave_costs_by_passes(
    calibrated: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "timer", lambda: 1 / 0)
    found = calibrated()
    assert set(not_ok(found)) == {"eta=0.7/times"}
    table = signal(found).set_index("estimator")
    assert table.loc["causal-3", "update_cost"] == 0.5
    assert table[["measured_update_cost", "measured_step_cost"]].isna().all(axis=None)


class Forgetful(StubBackbone):
    """With dropout that is active."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = MlpField(elements=4, samples=64, dtype=torch.float32, dropout=0.4)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> str:
    entry = BackboneEntry("stub", "with dropout", lambda device, dtype: Forgetful())
    monkeypatch.setitem(registry._REGISTRY, "stub", entry)
    return "stub"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_reference_that_differs_from_itself_is_refused(forgetful: str, workers: int, tmp_path: Path) -> None:
    with pytest.raises(
        NotReproducible, match=r"exact gradient of stub differs .* \(limit 1e-05\): is dropout active\?"
    ):
        run(small(workers=workers), tmp_path)
    assert [c.name for c in Record.read(tmp_path / "record.json").cells] == ["eta=0.7/floor"]
    assert not (tmp_path / "collected").exists()


class Still(StubBackbone):
    """Its velocity depends on no parameter, or overflows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        for parameter in self.transformer.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (0.0, "is zero, so there is nothing to compare with: the velocity depends on no"),
        (math.inf, "is not finite, so"),
    ],
)
def test_a_gradient_that_is_zero_or_not_finite_is_not_blamed_on_dropout(
    factor: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = BackboneEntry("stub", "without a gradient", lambda device, dtype: Still(factor))
    monkeypatch.setitem(registry._REGISTRY, "stub", entry)
    with pytest.raises(NotReproducible, match=f"exact gradient of stub {message}"):
        run(small(), tmp_path)


def test_a_fresh_lora_is_noted_until_it_was_trained(capsys: Capture) -> None:
    backbone = load_backbone("digits-flux", lora_rank=2)
    assert fresh_lora_note(load_backbone("digits-flux")) == ""
    assert "LoRA of digits-flux is fresh: its B is 0, so its A has no gradient yet" in fresh_lora_note(backbone)
    with torch.no_grad():
        next(p for name, p in backbone.transformer.named_parameters() if "lora_B" in name).fill_(0.01)
    assert fresh_lora_note(backbone) == ""


@pytest.mark.parametrize("command", ["calibrate", "collect"])
def test_the_command_line_says_that_dropout_is_active(
    command: str, forgetful: str, tmp_path: Path, capsys: Capture
) -> None:
    arguments = ["--backbone", forgetful, "--reward", "ink", "--quick", "--steps", "7", "--windows", "3"]
    with pytest.raises(SystemExit) as caught:
        main([command, *arguments, "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    assert "is dropout active?" in capsys.readouterr().err


def test_dropout_that_is_off_is_no_reason(forgetful: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluating() -> StubBackbone:
        backbone = Forgetful()
        backbone.transformer.eval()
        return backbone

    monkeypatch.setattr(job, "load_backbone", lambda *_: evaluating())
    assert not_ok(collect(small(), tmp_path)) == {}


def test_batches_without_advantage_are_counted(
    calibrated: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_batch = job.make_batch
    flat = {("calibration", 0), ("evaluation", 1), ("signal", 2)}

    def some_flat(*arguments: Any) -> Batch:
        batch = make_batch(*arguments)
        return replace(batch, advantages=torch.zeros_like(batch.advantages)) if arguments[4:] in flat else batch

    monkeypatch.setattr(job, "make_batch", some_flat)
    for _ in range(2):  # the second time from the store
        found = calibrated()
        assert not_ok(found) == {}
        assert found.cell("eta=0.7/knots").values["batches"] == 1
        evaluation = found.cell("eta=0.7/evaluation").values
        assert (evaluation["batches"], evaluation["without_advantage"]) == (2, 1)
        assert len(found.cell("eta=0.7/causal-4").samples["cosine"]) == 2
        table = signal(found)
        assert set(table["undefined"]) == {1}


def test_rewards_that_never_vary_are_said(calibrated: Callable[..., Record]) -> None:
    found = calibrated(reward="tests.backbones.stub:constant")
    message = "ValueError: none of the 2 calibration batches has any advantage: the reward does not vary"
    assert not_ok(found) == {"eta=0.7/knots": message}
    assert found.cell("eta=0.7/floor").status == "ok"


@pytest.mark.parametrize(("steps", "passes"), [(3, (2, 1)), (4, (8, 3, 2)), (6, (8,))])
def test_the_shortest_schedules_run(steps: int, passes: tuple[int, ...], calibrated: Callable[..., Record]) -> None:
    recipe = Recipe(steps=steps, prompts=1, samples=2)
    found = calibrated(windows=study.WINDOWS, signal_passes=passes, recipe=recipe)
    assert not_ok(found) == {}
    assert calibration(found, 0.7, {"signal": signal(found)})["recommended"]


# Settings

NAN = float("nan")
BAD: list[tuple[str, Any]] = [
    ("backbone", "digit-flux"),
    ("etas", ()),
    ("windows", ()),
    ("windows", (1,)),
    ("windows", (4, 21)),
    ("calibration_batches", (0,)),
    ("evaluation_batches", (1,)),
    ("predicted_passes", (0,)),
    ("workers", -1),
    ("space", "small"),
    ("dimension", 0),
    ("dtype", "int8"),
    ("signal_batches", 2),
    ("signal_prompts", 0),
    ("signal_samples", 1),
    ("signal_passes", ()),
    ("signal_passes", (5, 0)),
    ("signal_dimension", 0),
    ("contender_batches", 2),
    ("centring_batches", 2),
    ("pathwise_batches", 2),
    ("update_samples", 0),
    ("max_signal_loss", 0.0),
    ("max_signal_loss", 1.0),
    ("max_signal_loss", NAN),
    ("min_cosine", 0.0),
    ("min_cosine", 1.0),
    ("min_cosine", NAN),
    ("timing_rounds", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_a_bad_setting_names_itself(name: str, value: Any) -> None:
    found = list(value) if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=rf"^{name} must ") as caught:
        Calibrate(**{name: value})
    assert "got" in str(caught.value)
    assert (
        str(found) in str(caught.value) or str(max(value)) in str(caught.value) or str(min(value)) in str(caught.value)
    )


@pytest.mark.parametrize("command", ["calibrate", "collect"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "photo-flux"], "did you mean 'photos-flux'"),
        (["--signal-batches", "2"], "signal_batches must be at least 3, got 2"),
        (["--quick", "--max-signal-loss", "5"], "max_signal_loss must be between 0 and 1, got 5.0"),
        (["--windows", "30"], "windows must lie between 2 and 20, got 30"),
        (["--signal-passes"], "signal_passes must be at least 1, one of them needed, got []"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_says_which_setting(
    command: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("loaded before the refusal")

    monkeypatch.setattr(job, "load_backbone", start)
    with pytest.raises(SystemExit) as caught:
        main([command, *arguments, "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signal_prompts": 6}, "prompts must be at most 5 for stub, got 6"),
        ({"recipe": Recipe(steps=7, prompts=6)}, "prompts must be at most 5 for stub, got 6"),
        ({"reward": "inkk"}, "unknown reward 'inkk', nearest is 'ink'"),
    ],
    ids=str,
)
def test_what_only_the_backbone_can_tell_is_refused_before_anything_is_deleted(
    change: dict[str, Any], message: str, stub: str, tmp_path: Path
) -> None:
    (tmp_path / "record.json").write_text("old")
    with pytest.raises(ValueError, match=message):
        run(small(**change), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    ("steps", "expected"), [(21, (4, 5, 8, 10, 20)), (20, (4, 5, 8, 10)), (7, (4, 5)), (5, (4,)), (4, (3,)), (3, (2,))]
)
def test_default_windows_are_those_that_fit(steps: int, expected: tuple[int, ...]) -> None:
    recipe = Recipe(steps=steps)
    assert Calibrate(recipe=recipe).windows == expected
    # those that were asked for must fit
    if steps < 21:
        with pytest.raises(ValueError, match=f"windows must lie between 2 and {steps - 1}, got 20"):
            Calibrate(windows=(4, 20) if steps > 4 else (20,), recipe=recipe)


def test_the_signal_has_batches_of_its_own_size() -> None:
    assert SMALL.signal_recipe == replace(SMALL.recipe, prompts=2, samples=2)
    assert SMALL.signal_recipe.batch == 4


def settings(*arguments: str) -> Any:
    return settings_from(parser().parse_args(["calibrate", *arguments]))


def test_flags_are_settings() -> None:
    assert settings() == Calibrate()
    found = settings("--signal-passes", "5", "2", "--max-signal-loss", "0.1", "--steps", "9", "--space", "projected")
    expected = Calibrate(signal_passes=(5, 2), max_signal_loss=0.1, space="projected", recipe=Recipe(steps=9))
    assert found == expected
    quick = settings("--quick", "--signal-batches", "7")
    assert quick == replace(Calibrate(**QUICK[Calibrate]), signal_batches=7, quick=True)


# The command line


def outputs(run_folder: Path) -> dict[str, bytes]:
    patterns = ("tables/*.csv", "figures/*", "calibration-*.json", "report.html")
    return {str(p.relative_to(run_folder)): p.read_bytes() for pattern in patterns for p in run_folder.glob(pattern)}


def test_a_quick_calibration_and_its_report_again(
    stub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda *a, dpi, **settings: save(*a, dpi=20, **settings))
    out = tmp_path / "run"
    main(["calibrate", "--quick", "--backbone", stub, "--reward", "ink", "--steps", "9", "--out", str(out)])
    shown = capsys.readouterr()
    assert "of the learning signal lost in an update of 64 samples (reward ink): " in shown.out
    assert "eta 0.7, cosine of at least 0.99: no claim, n = " in shown.out
    assert f"report: {out / 'report.html'}" in shown.out
    assert "learning signal, eta 0.7: 100%" in shown.err
    first = outputs(out)
    drawn = {"cosine_per_group_w4", "pareto", "cross", "knots", "signal_batch"}
    if "cannot be told from zero" not in shown.out:  # too few rollouts to draw a signal from
        drawn.add("signal_cost")
    assert {name for name in first if name.startswith("figures")} == {
        f"figures/{name}.{kind}" for name in drawn for kind in ("png", "svg")
    }
    page = first["report.html"].decode()
    for heading in (
        "Learning signal",
        "Signal kept per cost",
        "Bias under other centrings",
        "How exact the reference is",
    ):
        assert f"<h2>{heading}" in page
    assert "Cells that failed" not in page
    for name in first:
        (out / name).unlink()
    shutil.rmtree(out / "collected")
    main(["report", str(out)])
    assert outputs(out) == first
    assert capsys.readouterr().out == shown.out
