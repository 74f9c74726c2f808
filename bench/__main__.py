"""``python -m bench``: see ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.compare import add_compare, compare_runs
from bench.cost import CostStudy, Machine, Update, run_cost_study
from bench.lines import LINES, count_lines, failure_lines, memory_lines, speed_lines, step_lines
from bench.presets import PRESETS
from bench.progress import Part, print_line
from bench.settings import CollectiveBench, Doctor, GroupBench, UpdateBench
from jagg_core.checks import require_device
from jagg_core.files import only_run_in, require_writable
from jagg_core.flags import add_flags, given
from jagg_core.records import Record

UPDATE_EXAMPLE = (
    "example: python -m bench update --backbone photos-flux --out results/update.json --passes 8 5 "
    "--calibration results/reference/photos-flux-calibration/calibration-eta0.7.json"
)
RUN_EXAMPLE = "example: python -m bench run --preset digits --out results/bench-digits"
COLLECTIVES_EXAMPLE = (
    "examples: python -m bench collectives --backbone digits-flux --ranks 2 --out results/collectives.json; "
    "torchrun --nproc-per-node 8 -m bench collectives --device cuda --layout hsdp --out results/collectives.json"
)
COST_EXAMPLE = (
    "example: python -m bench cost --backbone flux-dev --backbone-options height=720 width=720 "
    "--window 4 --ranks 8 64 --out results/cost-flux-dev"
)
CELLS_EXAMPLE = (
    f"{RUN_EXAMPLE}. Single arms and phases as cells of pytest-benchmark: python -m pytest bench --benchmark-enable "
    "--benchmark-json=cells.json --bench-window 5 --bench-batch 16 (python -m pytest bench --help has all options)"
)
GROUP_EXAMPLE = "example: python -m bench group --backbone digits-flux --batch 16 --window 5 --out results/speed.json"
DOCTOR_EXAMPLE = "example: python -m bench doctor --device cuda --out results/doctor"
MEMORY_EXAMPLE = "example: python -m bench memory --backbone photos-flux --batch 6 --out results/memory.json"


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    top = argparse.ArgumentParser(
        prog="python -m bench", description="Time the update of GRPO by estimator.", epilog=CELLS_EXAMPLE
    )
    commands = top.add_subparsers(dest="command", required=True)
    group = commands.add_parser(
        "group",
        help="forward, upstream and backward time of one group of steps, arms interleaved",
        description="Verify every arm's gradient against a plain loop, then time the arms by turns, in every round in "
        "another order.",
        epilog=GROUP_EXAMPLE,
    )
    add_flags(group, GroupBench)
    group.add_argument("--out", type=Path, required=True, help="record to write (JSON)")
    _add_doctor(commands)
    _add_collectives(commands)
    _add_run(commands)
    _add_update(commands)
    _add_memory(commands)
    add_compare(commands)
    _add_cost(commands)
    return top


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="is a device right, and what can it do? The first command on a new one",
        description="Bandwidths; the engine against the CPU and a plain loop; noise of log ratios; an update of a "
        "large model in five ways; a quick calibration. Each is written when it ends.",
        epilog=DOCTOR_EXAMPLE,
    )
    add_flags(doctor, Doctor)
    doctor.add_argument("--out", type=Path, default=Path("results/doctor"), help="run folder, default %(default)s")


def look_at_device(arguments: argparse.Namespace) -> Record:
    """Measures, and prints the outcome of every cell."""
    settings = Doctor(**given(arguments, Doctor))
    require_device(settings.device)
    from bench.doctor import doctor_lines, run_doctor

    with only_run_in(arguments.out):
        record = run_doctor(settings, arguments.out, print_line)
    print("\n".join([*doctor_lines(record), f"wrote {arguments.out / 'record.json'}"]))
    return record


def _add_collectives(commands: Any) -> None:
    counted = commands.add_parser(
        "collectives",
        help="count and time collectives of one group under FSDP2, HSDP or DDP, on ranks of this machine or torchrun's",
        description="Verify, count and time every arm on every rank.",
        epilog=COLLECTIVES_EXAMPLE,
    )
    add_flags(counted, CollectiveBench)
    counted.add_argument("--out", type=Path, required=True, help="record to write (JSON)")


def count_collectives(arguments: argparse.Namespace) -> Record:
    """Counts, writes the record and prints counts per sharded unit; only the first rank under torchrun does."""
    from bench.collectives import is_first, run_collective_bench, settings_of
    from jagg_core.distributed import ranks_here, require_device_each

    settings = settings_of(given(arguments, CollectiveBench))
    require_device_each(settings.device, 1 if settings.pretend else ranks_here(settings.ranks))
    require_writable(arguments.out)
    record = run_collective_bench(settings, Part(print_line).at)
    if is_first():
        record.write(arguments.out)
        print("\n".join([*count_lines(record), f"wrote {arguments.out}"]))
    return record


def _add_run(commands: Any) -> None:
    suite = commands.add_parser("run", help="measure every cell of a preset", epilog=RUN_EXAMPLE)
    suite.add_argument("--preset", choices=list(PRESETS), required=True, help="cells and their settings")
    suite.add_argument("--timeout", type=float, default=900, help="seconds that each cell may take, default 900")
    suite.add_argument("--out", type=Path, help="run folder, default results/bench-PRESET")


def run_preset(arguments: argparse.Namespace) -> Record:
    """Measures a preset; prints the status of its cells and the speed-ups of its groups and training steps."""
    from bench.suite import run_suite

    out = arguments.out or Path("results") / f"bench-{arguments.preset}"
    with only_run_in(out):
        record = run_suite(arguments.preset, out, arguments.timeout, print_line)
    for cell in record.cells:
        print(f"{cell.status:<8} {cell.name}" + (f": {cell.reason}" if cell.reason else ""))
        if cell.status == "ok" and cell.settings["kind"] in LINES:
            for line in LINES[cell.settings["kind"]](Record.read(out / cell.settings["file"])):
                print(f"         {line}")
    print(f"wrote {out / 'record.json'}; its page: python -m analysis report {out}")
    return record


def _add_update(commands: Any) -> None:
    update = commands.add_parser(
        "update",
        help="time training steps: rollout, reward, the update by estimator, optimizer",
        description="Verify the update of every arm against a plain loop over its plan, then time them and the "
        "other parts of a training step by turns.",
        epilog=UPDATE_EXAMPLE,
    )
    add_flags(update, UpdateBench, skip=("warmup",))
    update.add_argument("--out", type=Path, required=True, help="record to write (JSON)")


def time_update(arguments: argparse.Namespace) -> Record:
    """Times training steps, writes the record, and prints their speed-ups and those of their parts."""
    from bench.update import run_update_bench

    settings = UpdateBench(**given(arguments, UpdateBench))
    require_device(settings.device)
    require_writable(arguments.out)
    with tqdm(desc=f"time {settings.backbone}") as bar:
        record = run_update_bench(settings, progress=_shown_on(bar))
    record.write(arguments.out)
    print("\n".join([*step_lines(record), f"wrote {arguments.out}"]))
    return record


def _shown_on(bar: tqdm) -> Callable[[str], None]:
    """Shows on a bar where a run is, a step further each time."""

    def show(where: str) -> None:
        bar.set_postfix_str(where, refresh=False)
        bar.update()

    return show


def _add_memory(commands: Any) -> None:
    memory = commands.add_parser(
        "memory",
        help="peak memory of one group by arm",
        description="Measure what every arm needs beyond the loaded model, its rollout and its gradients: on a GPU by "
        "torch's allocator, elsewhere by the tensors that are alive.",
        epilog=MEMORY_EXAMPLE,
    )
    add_flags(memory, GroupBench, skip=("rounds", "warmup", "compile"))
    memory.add_argument("--out", type=Path, required=True, help="record to write (JSON)")


def measure_memory(arguments: argparse.Namespace) -> Record:
    """Measures, writes the record, and prints a line per arm."""
    from bench.memory import run_memory_bench

    settings = GroupBench(**given(arguments, GroupBench))
    require_device(settings.device)
    require_writable(arguments.out)
    record = run_memory_bench(settings, progress=Part(print_line).at)
    record.write(arguments.out)
    print("\n".join([*memory_lines(record), f"wrote {arguments.out}"]))
    return record


def _add_cost(commands: Any) -> None:
    cost = commands.add_parser(
        "cost",
        help="predict times of a group, an update and a step on 1 to 1024 devices, from counted operations",
        description="Count the operations of a pass, and predict what every arm takes.",
        epilog=COST_EXAMPLE,
    )
    for owner in (CostStudy, Update, Machine):
        add_flags(cost, owner, skip=("update", "machine", "checkpointing"))
    recompute = "activations are kept, not recomputed in the backward"
    cost.add_argument(
        "--no-checkpointing", dest="checkpointing", action="store_false", default=argparse.SUPPRESS, help=recompute
    )
    cost.add_argument("--out", type=Path, required=True, help="run folder; python -m analysis report makes its page")


def time_group(arguments: argparse.Namespace) -> Record:
    """Times a group, writes the record, and prints its speed-ups."""
    from bench.group import run_group_bench

    settings = GroupBench(**given(arguments, GroupBench))
    require_device(settings.device)
    require_writable(arguments.out)
    with tqdm(desc=f"time {settings.backbone}") as bar:
        record = run_group_bench(settings, progress=_shown_on(bar))
    record.write(arguments.out)
    print("\n".join([*speed_lines(record), f"wrote {arguments.out}"]))
    return record


def predict_cost(arguments: argparse.Namespace) -> Record:
    """Predicts, writes the record, and prints the whole step on every number of devices."""
    settings = CostStudy(
        update=Update(**given(arguments, Update)),
        machine=Machine(**given(arguments, Machine)),
        **given(arguments, CostStudy),
    )
    path = arguments.out / "record.json"
    require_writable(path)
    record = run_cost_study(settings)
    record.write(path)
    print(f"{'arm':<24}" + "".join(f"{f'{n} devices':>14}" for n in settings.ranks) + "   step, seconds")
    for arm in settings.update.arms():
        times = [record.cell(f"{arm.name}/ranks={n}").values["step_s"] for n in settings.ranks]
        print(f"{arm.name:<24}" + "".join(f"{t:>14.2f}" if t >= 1 else f"{t:>14.3g}" for t in times))
    print(f"\nwrote {path}; its page: python -m analysis report {arguments.out}")
    return record


COMMANDS = {
    "doctor": look_at_device,
    "run": run_preset,
    "group": time_group,
    "update": time_update,
    "memory": measure_memory,
    "collectives": count_collectives,
    "cost": predict_cost,
}
"""By name."""


def main(argv: list[str] | None = None) -> None:
    """Runs a command."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        if arguments.command == "compare":
            failed, title = compare_runs(arguments), "verdicts to fail on"
        else:
            record, title = COMMANDS[arguments.command](arguments), "failed cells"
            failed = failure_lines(record.cells)
    except ImportError as error:
        top.error(f"{error}: pip install 'jagg-core[bench]'")
    except (ValueError, OSError) as error:
        top.error(str(error))
    except KeyboardInterrupt:
        top.exit(130, f"\n{top.prog}: interrupted; what was written stays\n")
    if failed:
        top.exit(1, "\n".join([title, *failed, ""]))


if __name__ == "__main__":
    main()
