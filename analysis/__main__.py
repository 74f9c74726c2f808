"""``python -m analysis``: see ``--help``."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.report import write_report
from analysis.reproduce import Reproduce, run
from analysis.workload import Recipe
from jagg_core.records import RecordError, require_writable

REPRODUCE_EXAMPLE = (
    "example: python -m analysis reproduce --backbone photos-flux --etas 0.7 0.3 --out results/photos-flux"
)
REPORT_EXAMPLE = "example: python -m analysis report results/photos-flux"
QUICK: dict[str, Any] = {
    "etas": (0.7,),
    "windows": (4,),
    "calibration_batches": (1,),
    "evaluation_batches": (2,),
    "leak_batches": 3,
    "speed_rounds": 3,
    "speed_batch": 4,
}
"""Settings of ``--quick``: every part runs, no number means much."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m analysis", description="What the approximations keep, by measurement."
    )
    commands = top.add_subparsers(dest="command", required=True)
    main_job = commands.add_parser("reproduce", help="compare every estimator with exact", epilog=REPRODUCE_EXAMPLE)
    for owner in (Reproduce, Recipe):
        for field in fields(owner):
            if field.name == "recipe":
                continue
            default: Any = getattr(owner, field.name)
            flag = "--" + field.name.replace("_", "-")
            kind = type(default[0]) if isinstance(default, tuple) else type(default)
            many: dict[str, Any] = {"nargs": "*"} if isinstance(default, tuple) else {}
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            main_job.add_argument(flag, type=kind, default=None, help=f"default {shown}", **many)
    main_job.add_argument("--quick", action="store_true", help="a smoke run: every part, few rollouts")
    main_job.add_argument("--out", type=Path, default=None, help="run folder, default results/BACKBONE")
    report = commands.add_parser("report", help="rebuild tables, figures and page of a run", epilog=REPORT_EXAMPLE)
    report.add_argument("run", type=Path, help="run folder")
    return top


def settings_from(arguments: argparse.Namespace) -> Reproduce:
    """Settings from flags; flags that were not given keep their defaults, or those of ``--quick``."""
    given: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in vars(arguments).items() if v is not None
    }
    recipe = Recipe(**{f.name: given[f.name] for f in fields(Recipe) if f.name in given})
    chosen = QUICK if arguments.quick else {}
    own = {f.name: given[f.name] for f in fields(Reproduce) if f.name in given}
    return replace(Reproduce(), recipe=recipe, **{**chosen, **own})


def show(run_folder: Path) -> int:
    """Write the report of a run folder and print its tables. Returns how many cells failed."""
    page, shown, said = write_report(run_folder)
    with pd.option_context("display.width", 220, "display.max_columns", None, "display.max_colwidth", 60):
        for name, frame in shown.items():
            print(f"\n{name.replace('_', ' ')}\n{frame.to_string(index=False)}")
    print("\n" + "\n".join(said))
    print(f"\nreport: {page}")
    return len(shown.get("failures", ()))


def main(argv: list[str] | None = None) -> None:
    """Run a command."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        out = arguments.run if arguments.command == "report" else None
        if out is None:
            settings = settings_from(arguments)
            out = arguments.out or Path("results") / settings.backbone
            require_writable(out / "record.json")
            run(settings, out)
        failed = show(out)
    except (ValueError, RecordError, OSError, MemoryError) as error:
        top.exit(2, f"{top.prog}: error: {error}\n")
    if failed:
        top.exit(1, f"{top.prog}: {failed} cells failed; see the table of failures\n")


if __name__ == "__main__":
    main()
