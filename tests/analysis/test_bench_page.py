"""The page of a bench run: tables follow from its records, and nothing that is not measured goes untold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.report.cost import PUBLISHED
from analysis.report.write import write_report
from jagg_core.records import Cell, Record
from jagg_core.strict_json import read_json

ROOT = Path(__file__).parents[2]
SOURCE = "JAGG, arXiv 2607.17572 (July 2026)"
SECONDS = [[2.0, 4.0, 3.0], [1.0, 2.0, 1.5]]
"""Of exact, and of an arm twice as fast."""


def record_of(kind: str, cells: list[Cell], backbone: str = "stub", **settings: Any) -> Record:
    asked = {"window": 4, "batch": 2, "checkpointing": False} | settings
    return Record(kind, ["python", "-m", "bench"], backbone, asked, {}, environment={}, cells=cells)


def timed(name: str, seconds: list[float], passes: int | None = None, **phases: list[float]) -> Cell:
    values = {} if passes is None else {"passes": passes}
    return Cell(name, samples={f"{part}_s": list(v) for part, v in {"total": seconds, **phases}.items()}, values=values)


def group(exact: bool = True) -> Record:
    """Exact (twice, and bare), and the paper's scheme: twice as fast, four times in the backward."""
    phases = {"forward": [0.5, 1.0, 0.75], "upstream": [0.1, 0.2, 0.1]}
    cells = [
        timed("exact", SECONDS[0], 4, backward=[1.0, 2.0, 1.6], **phases),
        timed("exact-again", [2.5, 4.0, 3.0], 4, backward=[1.0, 2.0, 1.6], **phases),
        timed("exact-bare", [1.6, 3.2, 2.4], 4),
        timed("paper-joint", SECONDS[1], 2, backward=[0.25, 0.5, 0.4], **phases),
        Cell("closed-form-batched", "failed", "ArithmeticError: gradient differs"),
    ]
    return record_of("group-speed", cells if exact else cells[1:])


def memory() -> Record:
    peaks = {"exact": [4 * 2**20] * 3, "exact-batched": [12 * 2**20, 14 * 2**20, 12 * 2**20]}
    return record_of("memory", [Cell(name, samples={"peak_bytes": list(found)}) for name, found in peaks.items()])


def collectives() -> Record:
    def arm(name: str, gathers: int, scatters: int) -> Cell:
        counts = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": 3}
        moved = {"all_gather": gathers * 2**20, "reduce_scatter": scatters * 2**19, "all_reduce": 0}
        ranks: dict[str, list[float | None]] = {"rank0_total_s": [1.0, 5.0, 2.0], "rank1_total_s": [3.0, 1.0, 1.0]}
        ranks["rank0_all_gather_s"] = [0.25] * 3
        return Cell(name, samples=ranks, values={"counts": counts, "bytes": moved})

    sharding = {"units": 3, "parameters": 10, "findings": ["one all-gather per module <does> not hold"]}
    cells = [Cell("sharding", values=sharding), arm("exact", 24, 12), arm("paper-joint", 18, 3)]
    return record_of("collectives", cells, ranks=2, layout="fsdp")


def update(window: int = 4, backbone: str = "stub") -> Record:
    """The paper's scheme halves the update of 3 s; rollout, reward and optimizer take 3 s."""
    cells = [
        timed("exact", SECONDS[0], 20),
        timed("paper", SECONDS[1], 14),
        timed("rollout", [2.0, 2.0, 2.0]),
        timed("reward", [0.5, 0.5, 0.5]),
        timed("optimizer", [0.5, 0.5, 0.5]),
    ]
    return record_of("update-speed", cells, backbone, window=window, jagg_frac=0.6)


@dataclass
class Run:
    """A run folder that is filled by hand."""

    folder: Path
    cells: list[Cell]

    def add(self, name: str, record: Record | None = None, **values: Any) -> None:
        """A cell that is ok, and its record if there is one."""
        file = name.replace("/", "-") + ".json"
        self.cells.append(Cell(name, settings={"kind": name.split("/")[0], "file": file}, values=values))
        if record is not None:
            record.write(self.folder / file)

    def report(self) -> tuple[str, dict[str, pd.DataFrame], list[str]]:
        """Build the page. Returns its text, the short tables and the findings."""
        Record("bench", ["python", "-m", "bench"], "smoke", {}, {}, cells=self.cells).write(self.folder / "record.json")
        page, shown, said = write_report(self.folder)
        return page.read_text(), shown, said

    def table(self, name: str) -> pd.DataFrame:
        """A table of the last report."""
        return pd.read_csv(self.folder / "tables" / f"{name}.csv")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, [])


def test_a_group(run: Run) -> None:
    fit = {"arms": {"paper-joint": {"predicted_s": 1.2, "measured_s": 1.5, "error": -0.2}}}
    run.add("group/stub", group(), fit=fit)
    page, shown, said = run.report()
    arms = run.table("groups").set_index("arm")
    assert arms.loc["exact", "total_s"] == 3 and arms.loc["paper-joint", "total_s"] == 1.5
    assert arms.loc["paper-joint", "speed_up"] == pytest.approx(2)
    assert arms.loc["paper-joint", "speed_up_low"] == pytest.approx(2)  # twice as fast in every round
    assert arms.loc["exact", "backward_s"] == 1.6 and arms.loc["exact", "forward_s"] == 0.75
    assert arms.loc["paper-joint", "passes"] == 2 and arms.loc["paper-joint", "error"] == -0.2
    assert pd.isna(arms.loc["exact-again", "error"]) and pd.isna(arms.loc["exact-bare", "forward_s"])
    paper = shown["group/stub"].set_index("arm").loc["paper JAGG (joint backward)"]
    assert paper["speed-up"] == "2.00 [2.00, 2.00]"
    assert (paper["total, ms"], paper["model, ms"], paper["model's error"]) == ("1500.0", "1200.0", "-20.0%")
    [told, warned] = [sentence for sentence in said if sentence.startswith("group/stub: ")]
    assert "differences below 25.0% are within the noise" in warned
    assert "paper JAGG (joint backward) is 2.00 [2.00, 2.00] times as fast as exact" in told
    # exact again is between 0.8 and 1 times as fast
    assert "noise floor 25.0%" in told and "exact takes 1.250 [1.250, 1.250] times its bare model calls" in told
    assert "closed-form-batched: failed: ArithmeticError: gradient differs" in page


def test_without_a_fit_there_are_no_columns_of_the_model(run: Run) -> None:
    run.add("group/stub", group())
    _, shown, _ = run.report()
    assert not [column for column in shown["group/stub"] if "model" in column]


def test_memory(run: Run) -> None:
    run.add("memory/stub", memory())
    _, shown, _ = run.report()
    assert run.table("memory")["peak_mib"].tolist() == [4, 12]
    assert shown["memory/stub"]["over exact"].tolist() == ["1.00", "3.00"]


def test_collectives_are_per_unit_and_seconds_of_the_slowest_rank(run: Run) -> None:
    run.add("collectives/stub", collectives())
    page, shown, _ = run.report()
    arms = run.table("collectives").set_index("arm")
    assert arms.loc["paper-joint", ["all_gathers_per_unit", "reduce_scatters_per_unit"]].tolist() == [6, 1]
    assert arms["all_reduces_per_unit"].tolist() == [1, 1]
    assert arms["moved_mib"].tolist() == [30, 19.5]
    assert arms["total_s"].tolist() == [3, 3]  # of 3, 5 and 2
    assert arms["all_gather_s"].tolist() == [0.25, 0.25]
    assert shown["collectives/stub"]["all-gathers per unit"].tolist() == ["8", "6"]
    assert "one all-gather per module &lt;does&gt; not hold" in page


def test_samples_of_older_records_of_collectives(run: Run) -> None:
    record = collectives()
    for cell in record.cells:
        cell.values.pop("findings", None)
        cell.samples = {"rank0_s": [1.0], "rank1_s": [2.0]} if cell.samples else {}
    run.add("collectives/stub", record)
    run.report()
    assert run.table("collectives")["total_s"].tolist() == [2, 2]


def test_an_update_shows_backward_update_and_step_together(run: Run) -> None:
    run.add("update/stub", update())
    _, shown, said = run.report()
    paper = run.table("updates").set_index("arm").loc["paper-joint"]
    assert paper["backward_speed_up"] == pytest.approx(20 / 14, rel=1e-5)
    assert paper["update_speed_up"] == pytest.approx(2)
    assert paper["step_speed_up"] == pytest.approx((3 + 3) / (3 + 1.5), rel=1e-5)
    assert paper["step_speed_up_low"] <= paper["step_speed_up"] <= paper["step_speed_up_high"]
    assert paper[["rollout_s", "reward_s", "update_s", "optimizer_s"]].tolist() == [2, 0.5, 1.5, 0.5]
    row = shown["update/stub"].iloc[1]
    assert row["backward passes"] == "1.43x" and row["update speed-up"].startswith("2.00 [")
    assert row["step speed-up"].startswith("1.33 [")
    [told] = [sentence for sentence in said if sentence.startswith("update/stub: ")]
    assert "the paper's scheme is 1.43x in backward passes, 2.00 [2.00, 2.00] in the update, 1.33 [" in told
    assert told.endswith("a step is here rollout + reward + optimizer + update.")


def test_a_step_is_undefined_if_a_part_of_it_failed(run: Run) -> None:
    record = update()
    record.cells[3] = Cell("reward", "failed", "ValueError: no decoder")
    run.add("update/stub", record)
    page, shown, _ = run.report()
    assert shown["update/stub"]["step speed-up"].tolist() == ["undefined", "undefined"]
    assert "reward: failed: ValueError: no decoder" in page
    record.cells[3] = Cell("reward", "skipped", "random weights")
    run.cells.clear()
    run.add("update/stub", record)
    page, _, _ = run.report()
    assert run.table("updates")["step_speed_up"].tolist() == [1, pytest.approx(5.5 / 4)]
    assert "reward: skipped: random weights" in page


def test_published_figures_stand_beside_what_was_measured_with_the_nearest_recipe(run: Run) -> None:
    run.add("update/far", update(window=5, backbone="far"))
    run.add("update/near", update(backbone="near"))
    run.add("group/stub", group())
    page, shown, said = run.report()
    table = run.table("beside_the_paper")
    figures = read_json(PUBLISHED)["figures"]
    assert table["published"].tolist() == [figure["reduction"] for figure in figures if "reduction" in figure]
    assert (table["source"] == SOURCE).all()
    measured = table.set_index("what")["measured"]
    assert measured["training step"].tolist() == [pytest.approx(0.25)] * 2
    assert measured["update stage"] == pytest.approx(0.5) and measured["backward of a group"] == pytest.approx(0.75)
    assert table["measured_on"].tolist() == ["near, W = 4, jagg_frac 0.6, batch 2"] * 3 + ["stub, W = 4, batch 2"]
    assert shown["beside_the_paper"]["published, less"].tolist()[0] == "17.3% (835 to 691 s)"
    assert SOURCE in page and "another backbone and another machine" in page and "W = 4 with T = 20" in page
    assert "python -m bench cost --backbone qwen-image" in page  # there is no prediction
    assert said[-1] == "backward of a group: 50.0% less published; 75.0% measured on stub, W = 4, batch 2."


def test_predictions_come_from_cost_records_of_the_folder(run: Run) -> None:
    asked = {"update": {"window": 4, "jagg_frac": 0.6}}
    cells = []
    for scheme, seconds in (("exact", 10.0), ("paper", 8.0), ("closed-sequential", 5.0)):
        times = {"group_s": seconds, "update_s": seconds, "step_s": seconds + 10, "backwards": 4}
        cells.append(Cell(scheme, settings={"scheme": scheme, "label": scheme, "ranks": 1}, values=times))
    Record("cost", [], "flux-dev", asked, {}, cells=cells).write(run.folder / "cost-flux-dev" / "record.json")
    (run.folder / "cost-broken.json").write_text("{")
    run.add("update/stub", update())
    page, shown, said = run.report()
    table = run.table("beside_the_paper").set_index(["what", "backbone"])["predicted"]
    assert table["training step", "flux-dev"] == pytest.approx(0.1)
    assert pd.isna(table["training step", "qwen-image"])
    assert run.table("beside_the_paper").set_index("what").loc["update stage", "predicted"] == pytest.approx(0.2)
    assert "18.2% less published; 10.0% predicted for flux-dev, W = 4, jagg_frac 0.6; 25.0% [" in said[-3]
    assert "cost --backbone qwen-image" in page and "cost --backbone flux-dev" not in page
    status = shown["cells"].set_index("cell")["status"]
    assert status.to_dict() == {"update/stub": "ok", "cost-broken.json": "damaged", "cost-flux-dev/record.json": "ok"}
    assert said[0] == "1 of 1 cells were measured."


def test_nothing_is_silently_missing(run: Run) -> None:
    run.add("group/lost")
    run.add("memory/cut")
    (run.folder / "memory-cut.json").write_text('{"kind": "mem')
    run.add("memory/other", collectives())
    run.add("collectives/hollow", record_of("collectives", [Cell("sharding"), Cell("exact")]))
    run.add("group/inexact", group(exact=False))
    run.add("tea/cup", memory())
    memory().write(run.folder / "stale.json")
    asked = {"kind": "memory", "file": "stale.json"}
    run.cells += [
        Cell("memory/large", "skipped", "needs a CUDA device", asked),
        Cell("update/never", "skipped", "the run ended before this cell"),
        Cell("group/hung", "failed", "Traceback\n  lines <of> it\nTimeoutError: not done", {"kind": "group"}),
    ]
    page, shown, said = run.report()
    cells = shown["cells"].set_index("cell")
    told = {
        "group/lost": ("missing", "group-lost.json is not in the folder"),
        "memory/cut": ("damaged", "memory-cut.json: not JSON, perhaps truncated"),
        "memory/other": ("damaged", "memory-other.json: a record of kind 'memory' is needed, got 'collectives'"),
        "collectives/hollow": (
            "damaged",
            "of kind 'collectives' lacks what it should hold: KeyError('units')",
        ),
        "group/inexact": ("ok", ""),
        "tea/cup": ("damaged", "no table is made of a cell of kind 'tea'"),
        "memory/large": ("skipped", "needs a CUDA device"),
        "update/never": ("skipped", "the run ended before this cell"),
        "group/hung": ("failed", "TimeoutError: not done"),
    }
    for name, (status, reason) in told.items():
        assert cells.loc[name, "status"] == status and reason in cells.loc[name, "reason"]
        assert name in page
    assert str(run.folder) not in page
    assert len(cells) == len(told) and not any(name in shown for name in told)
    assert said[0] == "1 of 9 cells were measured; 1 missing, 4 damaged, 2 skipped, 1 failed."
    assert "lines &lt;of&gt; it" in page and "No table: ok, without times of exact" in page
    assert shown["failures"]["cell"].tolist() == [name for name, (s, _) in told.items() if s not in ("ok", "skipped")]


@pytest.mark.parametrize("status", ["failed", "skipped"])
def test_a_run_without_results(run: Run, status: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run.cells += [Cell(f"{kind}/stub", status, "why", {"kind": kind}) for kind in ("group", "memory", "update")]
    page, _, said = run.report()
    assert said[0] == f"0 of 3 cells were measured; 3 {status}."
    assert page.count('<p class="small">No table: ') == 3 and "<img" not in page
    if status == "failed":
        with pytest.raises(SystemExit, match="1"):
            main(["report", str(run.folder)])
        assert "3 cells failed" in capsys.readouterr().err
    else:
        main(["report", str(run.folder)])


def test_a_cell_that_failed_shows_what_its_other_arms_measured(run: Run) -> None:
    run.add("group/stub", group())
    run.cells[0].status, run.cells[0].reason = "failed", "closed-form-batched: gradient differs"
    _, shown, _ = run.report()
    assert shown["cells"]["status"].tolist() == ["failed"] and len(shown["group/stub"]) == 4


def test_a_rebuilt_page_is_the_same(run: Run) -> None:
    for name, record in (("group/a", group()), ("group/b", group()), ("update/stub", update()), ("memory/m", memory())):
        run.add(name, record)
    run.report()
    files = [path for path in sorted(run.folder.rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    write_report(run.folder)
    assert [path.read_bytes() for path in files] == before
    names = {path.name for path in files}
    assert {"speed_ups.png", "speed_ups.svg", "steps.png", "steps.svg", "groups.csv", "cells.csv"} <= names


def test_the_reference_records(run: Run) -> None:
    reference = ROOT / "results" / "reference"
    for kind, path in (
        ("group", "photos-flux/speed-photos-flux"),
        ("memory", "bench/memory-photos-flux"),
        ("collectives", "bench/collectives-digits-flux"),
        ("update", "bench/update-photos-flux"),
    ):
        run.add(f"{kind}/reference", Record.read(reference / f"{path}.json"))
    page, shown, said = run.report()
    assert said[0] == "4 of 4 cells were measured." and "failures" not in shown
    assert {f"{kind}/reference" for kind in ("group", "memory", "collectives", "update")} <= shown.keys()
    gathers = run.table("collectives").set_index("arm")["all_gathers_per_unit"]
    assert gathers["exact"] == 10 and gathers["closed-form-batched"] == 2
    assert run.table("beside_the_paper")["measured"].notna().all()
    assert page.count("<img") == 2
