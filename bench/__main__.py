"""``python -m bench``: see ``--help``."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from bench.collectives import CollectiveBench, is_first, run_collective_bench, settings_of
from bench.compare import compare
from bench.cost import SCHEMES, Machine, Update
from bench.cost_study import CostStudy, run_cost_study
from bench.findings import count_lines
from bench.group import GroupBench, run_group_bench
from bench.memory import run_memory_bench
from bench.suite import PRESETS, run_suite
from bench.update import PARTS, UpdateBench, run_update_bench, speed_ups
from jagg_core.flags import add_flags, given
from jagg_core.records import Record, require_writable

UPDATE_EXAMPLE = (
    "example: python -m bench update --backbone photos-flux --out results/update.json --passes 8 5 "
    "--calibration results/reference/photos-flux-calibration/calibration-eta0.7.json"
)
RUN_EXAMPLE = "example: python -m bench run --preset digits --out results/bench-digits"
FAILING = ("slower", "ambiguous", "missing", "failed")
COMPARE_EXAMPLE = "example: python -m bench compare results/before.json results/after.json --fail-on slower missing"
COLLECTIVES_EXAMPLE = (
    "examples: python -m bench collectives --backbone digits-flux --ranks 2 --out results/collectives.json; "
    "torchrun --nproc-per-node 8 -m bench collectives --device cuda --layout hsdp --out results/collectives.json"
)
COST_EXAMPLE = (
    "example: python -m bench cost --backbone flux-dev --backbone-options height=720 width=720 "
    "--window 4 --ranks 8 64 --out results/cost-flux-dev"
)
CELLS_EXAMPLE = (
    "Single arms and phases as cells of pytest-benchmark: python -m pytest bench --benchmark-enable "
    "--benchmark-json=cells.json --bench-window 5 --bench-batch 16 (python -m pytest bench --help has all options)"
)
GROUP_EXAMPLE = "example: python -m bench group --backbone digits-flux --batch 16 --window 5 --out results/speed.json"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m bench", description="Time the update of GRPO by estimator.", epilog=CELLS_EXAMPLE
    )
    commands = top.add_subparsers(dest="command", required=True)
    group = commands.add_parser(
        "group",
        help="forward, upstream and backward time of one group of steps, arms interleaved",
        epilog=GROUP_EXAMPLE,
    )
    add_flags(group, GroupBench)
    _add_collectives(commands)
    _add_run(commands)
    _add_update(commands)
    _add_memory(commands)
    _add_compare(commands)
    _add_cost(commands)
    group.add_argument("--out", type=Path, required=True, help="record to write (JSON)")
    return top


def _add_collectives(commands: Any) -> None:
    counted = commands.add_parser(
        "collectives",
        help="count and time collectives of one group under FSDP2, HSDP or DDP, on ranks of this machine or torchrun's",
        epilog=COLLECTIVES_EXAMPLE,
    )
    add_flags(counted, CollectiveBench)
    counted.add_argument("--out", type=Path, required=True, help="record to write (JSON)")


def count_collectives(arguments: argparse.Namespace) -> Record:
    """Count, write the record, and print counts per sharded unit, and findings. Under torchrun, rank 0 does so."""
    settings = settings_of(given(arguments, CollectiveBench))
    require_writable(arguments.out)
    record = run_collective_bench(settings)
    if is_first():
        record.write(arguments.out)
        print("\n".join([*count_lines(record), f"wrote {arguments.out}"]))
    return record


def _add_run(commands: Any) -> None:
    suite = commands.add_parser("run", help="measure every cell of a preset", epilog=RUN_EXAMPLE)
    suite.add_argument("--preset", choices=list(PRESETS), required=True)
    suite.add_argument(
        "--timeout", type=float, default=900, help="seconds that each process of a cell may take, default 900"
    )
    suite.add_argument("--out", type=Path, help="run folder, default results/bench-PRESET")


def run_preset(arguments: argparse.Namespace) -> Record:
    """Measure a preset and print what became of its cells, and the speed-ups of its groups and training steps."""
    out = arguments.out or Path("results") / f"bench-{arguments.preset}"
    require_writable(out / "record.json")
    with tqdm(total=len(PRESETS[arguments.preset]()), desc=arguments.preset, unit="cell") as bar:
        record = run_suite(arguments.preset, out, arguments.timeout, lambda _: bar.update())
    for cell in record.cells:
        print(f"{cell.status:<8} {cell.name}" + (f": {cell.reason}" if cell.reason else ""))
        if cell.status == "ok" and cell.settings["kind"] in LINES:
            for line in LINES[cell.settings["kind"]](Record.read(out / cell.settings["file"])):
                print(f"         {line}")
    print(f"wrote {out / 'record.json'}; its page: python -m analysis report {out}")
    return record


def speed_lines(record: Record) -> list[str]:
    """Median seconds and speed-up over exact of every arm of a group."""
    times = {cell.name: median(t for t in cell.samples["total_s"] if t is not None) for cell in record.cells}
    return [f"{name:<24}{time * 1000:>10.1f} ms{times['exact'] / time:>8.2f}x" for name, time in times.items()]


def _add_update(commands: Any) -> None:
    update = commands.add_parser(
        "update",
        help="time training steps: rollout, reward, the update by estimator, optimizer",
        epilog=UPDATE_EXAMPLE,
    )
    add_flags(update, UpdateBench, skip=("warmup",))
    update.add_argument("--out", type=Path, required=True, help="record to write (JSON)")


def time_update(arguments: argparse.Namespace) -> Record:
    """Time training steps, write the record, and print their speed-ups and those of their parts."""
    settings = UpdateBench(**given(arguments, UpdateBench))
    require_writable(arguments.out)
    with tqdm(desc=f"time {settings.backbone}") as bar:
        record = run_update_bench(settings, progress=lambda _: bar.update())
    record.write(arguments.out)
    print("\n".join([*step_lines(record), f"wrote {arguments.out}"]))
    return record


def step_lines(record: Record) -> list[str]:
    """Median seconds of every way's update, its speed-ups over exact, and seconds of the step's other parts."""
    lines = [f"{'way':<30}{'passes':>7}{'seconds':>9}{'backward':>10}{'update':>9}{'whole step':>12}"]
    for one in speed_ups(record):
        step = "-" if one["step"] is None else f"{one['step']:.2f}x"
        ratios = f"{one['backward']:>9.2f}x{one['update']:>8.2f}x{step:>12}"
        lines.append(f"{one['way']:<30}{one['passes']:>7}{one['seconds']:>9.2f}{ratios}")
    times = {name: record.cell(name).samples.get("total_s", []) for name in PARTS}
    others = [f"{name} {median(t for t in found if t is not None):.4f} s" for name, found in times.items() if found]
    return [*lines, f"beside the update: {', '.join(others)}"]


def _add_memory(commands: Any) -> None:
    memory = commands.add_parser("memory", help="peak memory of one group by arm")
    add_flags(memory, GroupBench, skip=("rounds", "warmup"))
    memory.add_argument("--out", type=Path, required=True, help="record to write (JSON)")


def measure_memory(arguments: argparse.Namespace) -> Record:
    """Measure, write the record, and print a line per arm."""
    settings = GroupBench(**given(arguments, GroupBench))
    require_writable(arguments.out)
    record = run_memory_bench(settings)
    record.write(arguments.out)
    for cell in record.cells:
        if cell.status == "ok":
            peak = median(peak for peak in cell.samples["peak_bytes"] if peak is not None)
            print(f"{cell.name:<24}{peak / 2**20:>10.1f} MiB beyond model and gradients")
    print(f"wrote {arguments.out}")
    return record


def _add_compare(commands: Any) -> None:
    compared = commands.add_parser(
        "compare", help="is a run of bench group faster than another?", epilog=COMPARE_EXAMPLE
    )
    compared.add_argument("first", type=Path, help="record of the run before")
    compared.add_argument("second", type=Path, help="record of the run after")
    compared.add_argument("--across-machines", action="store_true", help="compare runs of different machines")
    compared.add_argument(
        "--fail-on",
        nargs="*",
        choices=FAILING,
        default=[],
        help="exit with 1 if an arm has such a verdict",
    )


def compare_runs(arguments: argparse.Namespace) -> list[str]:
    """Print a line per arm. Returns what the caller asked to fail on."""
    first, second = (Record.read(path) for path in (arguments.first, arguments.second))
    floor, found = compare(first, second, arguments.across_machines)
    print(f"noise floor {floor:.1%}; ratios of median times, second run over first, with 95 % intervals")
    for one in found:
        numbers = "" if one.ratio is None else f"{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}]"
        print(f"{one.verdict:<10} {one.arm:<24} {numbers}".rstrip())
    return [f"{one.arm}: {one.verdict}" for one in found if one.verdict in arguments.fail_on]


def _add_cost(commands: Any) -> None:
    cost = commands.add_parser(
        "cost",
        help="predict times of a group, an update and a step on 1 to 1024 devices, from counted operations",
        epilog=COST_EXAMPLE,
    )
    for owner in (CostStudy, Update, Machine):
        add_flags(cost, owner, skip=("update", "machine"))
    cost.add_argument("--out", type=Path, required=True, help="run folder; python -m analysis report makes its page")


def time_group(arguments: argparse.Namespace) -> Record:
    """Time a group and write the record."""
    settings = GroupBench(**given(arguments, GroupBench))
    require_writable(arguments.out)
    with tqdm(desc=f"time {settings.backbone}") as bar:
        record = run_group_bench(settings, progress=lambda _: bar.update())
    record.write(arguments.out)
    print(f"wrote {arguments.out}")
    return record


def predict_cost(arguments: argparse.Namespace) -> Record:
    """Predict, write the record, and print the whole step on every number of devices."""
    settings = CostStudy(
        update=Update(**given(arguments, Update)),
        machine=Machine(**given(arguments, Machine)),
        **given(arguments, CostStudy),
    )
    path = arguments.out / "record.json"
    require_writable(path)
    record = run_cost_study(settings)
    record.write(path)
    print(f"{'scheme':<20}" + "".join(f"{f'{n} devices':>14}" for n in settings.ranks) + "   step, seconds")
    for name in SCHEMES:
        times = [record.cell(f"{name}/ranks={n}").values["step_s"] for n in settings.ranks]
        print(f"{name:<20}" + "".join(f"{t:>14.2f}" for t in times))
    print(f"\nwrote {path}; its page: python -m analysis report {arguments.out}")
    return record


LINES = {"group": speed_lines, "update": step_lines}
"""What is said of a cell of a preset, by its kind."""

COMMANDS = {
    "run": run_preset,
    "group": time_group,
    "update": time_update,
    "memory": measure_memory,
    "collectives": count_collectives,
    "cost": predict_cost,
}
"""By name."""


def main(argv: list[str] | None = None) -> None:
    """Run a command."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        if arguments.command == "compare":
            failed, title = compare_runs(arguments), "verdicts to fail on"
        else:
            record, title = COMMANDS[arguments.command](arguments), "failed cells"
            failed = [f"{cell.name}: {cell.reason}" for cell in record.cells if cell.status == "failed"]
    except (ValueError, OSError) as error:
        top.error(str(error))
    if failed:
        top.exit(1, "\n".join([title, *failed, ""]))


if __name__ == "__main__":
    main()
