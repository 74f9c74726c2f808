"""``python -m bench``: see ``--help``."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from bench.group import GroupBench, run_group_bench
from jagg_core.flags import add_flags, given
from jagg_core.records import require_writable

GROUP_EXAMPLE = "example: python -m bench group --backbone digits-flux --batch 16 --window 5 --out results/speed.json"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m bench", description="Time the update of GRPO by estimator.")
    commands = top.add_subparsers(dest="command", required=True)
    group = commands.add_parser(
        "group",
        help="forward, upstream and backward time of one group of steps, arms interleaved",
        epilog=GROUP_EXAMPLE,
    )
    add_flags(group, GroupBench)
    group.add_argument("--out", type=Path, required=True, help="record to write (JSON)")
    return top


def main(argv: list[str] | None = None) -> None:
    """Run a command."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        settings = GroupBench(**given(arguments, GroupBench))
        require_writable(arguments.out)
        with tqdm(total=settings.rounds + 8, desc=f"time {settings.backbone}") as bar:
            record = run_group_bench(settings, progress=lambda _: bar.update())
    except (ValueError, OSError) as error:
        top.error(str(error))
    record.write(arguments.out)
    print(f"wrote {arguments.out}")
    failed = [f"{cell.name}: {cell.reason}" for cell in record.cells if cell.status == "failed"]
    if failed:
        top.exit(1, "\n".join(["failed cells", *failed, ""]))


if __name__ == "__main__":
    main()
