"""``python -m analysis``: see ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from analysis.measure.curve_settings import Curves
from analysis.measure.league_settings import League
from analysis.measure.study import Calibrate, Recipe, Reproduce, Study
from jagg_core.checks import require_device
from jagg_core.files import only_run_in, require_writable
from jagg_core.flags import add_flags, given
from jagg_core.grpo import PRESETS, preset
from jagg_core.grpo.settings import RolloutSettings
from jagg_core.records import Record
from jagg_core.strict_json import RecordError, write_json

CHECKOUT = Path(__file__).resolve().parent.parent
AS_IT_IS = argparse.RawDescriptionHelpFormatter
"""Examples are not broken at their dashes, so that they can be pasted."""

VERDICTS = ("FASTER", "SLOWER", "HIGHER", "LOWER", "UNDECIDED", "MISSING")
"""Of a comparison, other than SAME."""

COMPARE_EXAMPLE = (
    "example: python -m analysis compare results/reference/photos-flux-calibration "
    "results/reference/photos-qwen-calibration --fail-on LOWER"
)
LINES = 20
"""Of a printed table, unless all are asked for."""

REPORT_EXAMPLE = "example: python -m analysis report results/photos-flux"
MANIFEST_EXAMPLE = "example: python -m analysis manifest results/reference"
CURVES_EXAMPLE = (
    "example: python -m analysis curves --backbone digits-flux --reward classifier+10*ink --watched sharpness "
    "--calibration results/reference/digits-flux-calibration/calibration-eta0.7.json --out results/digits-curves"
)
LEAGUE_EXAMPLE = "example: python -m analysis league --backbone digits-flux --reward classifier+10*ink --steps 10 5"
QUICK_STUDY: dict[str, Any] = {
    "etas": (0.7,),
    "windows": (4,),
    "calibration_batches": (1,),
    "evaluation_batches": (2,),
    "predicted_passes": (5,),
}
QUICK: dict[type[Study], dict[str, Any]] = {
    Reproduce: {**QUICK_STUDY, "leak_batches": 3, "speed_rounds": 3, "speed_batch": 4},
    Calibrate: {
        **QUICK_STUDY,
        "signal_batches": 4,
        "signal_samples": 2,
        "signal_passes": (8, 5, 2),
        "signal_dimension": 4096,
        "centring_batches": 3,
        "pathwise_batches": 3,
        "timing_rounds": 2,
    },
}
"""Settings of ``--quick``: every part runs, no number means much."""

QUICK_LEAGUE = {"batches": 3, "prompts": 2, "samples": 3, "dimension": 4096}

OF_A_PRESET = ("steps", "schedule", "shift", "transition", "timestep_mode")
"""Settings of a trainer's rollouts that a calibration must share; so are ``eta`` and ``guidance``."""

COMMANDS: dict[str, tuple[type[Study], str, str]] = {
    "reproduce": (Reproduce, "", "compare every estimator with exact"),
    "calibrate": (Calibrate, "-calibration", "how much may be approximated, and which plan to run"),
    "collect": (Calibrate, "-calibration", "only the tables of a calibration, which it uses again"),
}
"""Settings, end of the run folder's name, and what it is for."""


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    top = argparse.ArgumentParser(
        prog="python -m analysis",
        description="What the approximations keep, by measurement.",
        epilog="example: python -m analysis calibrate --backbone digits-flux --reward ink",
        formatter_class=AS_IT_IS,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, (kind, ending, about) in COMMANDS.items():
        example = f"example: python -m analysis {name} --backbone photos-flux --etas 0.7 --out results/photos{ending}"
        command = commands.add_parser(name, help=about, epilog=example, formatter_class=AS_IT_IS)
        add_flags(command, kind, skip=["recipe"])
        add_flags(command, Recipe)
        command.add_argument("--weights", metavar="RUN", help="folder of a training run, whose weights are studied")
        command.add_argument("--out", type=Path, default=None, help=f"run folder, default results/BACKBONE{ending}")
    command = commands.add_parser(
        "curves", help="train by every estimator in lockstep", epilog=CURVES_EXAMPLE, formatter_class=AS_IT_IS
    )
    add_flags(command, Curves)
    command.add_argument("--out", type=Path, default=None, help="run folder, default results/BACKBONE-curves")
    command = commands.add_parser(
        "league",
        help="compare methods, each on its rollouts: signal, work, direction, leak",
        epilog=LEAGUE_EXAMPLE,
        formatter_class=AS_IT_IS,
    )
    add_flags(command, League)
    command.add_argument("--out", type=Path, default=None, help="run folder, default results/BACKBONE-league")
    listed = commands.add_parser(
        "manifest",
        help="list the records below a folder, their commands and inputs",
        epilog=MANIFEST_EXAMPLE,
        formatter_class=AS_IT_IS,
    )
    listed.add_argument(
        "root", type=Path, nargs="?", default=Path("results/reference"), help="folder of records, default %(default)s"
    )
    listed.add_argument("--rerun", action="store_true", help="first make every record again, which takes hours")
    compared = commands.add_parser(
        "compare",
        help="two results of one kind against each other",
        description="Every quantity that two records or run folders share. Times: FASTER or SLOWER where the interval "
        "of the ratio lies beyond the noise floor. Estimates: SAME within the margin, HIGHER or LOWER where the "
        "interval of the difference leaves out 0. Else UNDECIDED. Intervals are of 95 % each: of many quantities some "
        "leave out 0 by chance.",
        epilog=COMPARE_EXAMPLE,
        formatter_class=AS_IT_IS,
    )
    compared.add_argument("first", type=Path, help="run folder or record file of the run before")
    compared.add_argument("second", type=Path, help="likewise of the run after")
    compared.add_argument("--margin", type=float, default=0.01, help="share of the first value that counts as the same")
    compared.add_argument("--all", action="store_true", help="print every quantity, not the first 20 that changed")
    form = compared.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a table for a pull request")
    form.add_argument("--latex", action="store_true", help="print a table for a paper")
    compared.add_argument(
        "--fail-on", nargs="*", choices=VERDICTS, default=[], help="exit with 1 if a quantity has such a verdict"
    )
    report = commands.add_parser(
        "report", help="rebuild tables, figures and page of a run", epilog=REPORT_EXAMPLE, formatter_class=AS_IT_IS
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder; several: of training runs")
    report.add_argument("--out", type=Path, default=None, help="folder of the page, for several training runs")
    return top


def settings_from(arguments: argparse.Namespace) -> Study:
    """Reads settings from flags, then from ``--preset``, then from ``--quick``; the rest keep their defaults."""
    kind = COMMANDS[arguments.command][0]
    flags, recipe = given(arguments, kind), given(arguments, Recipe)
    if arguments.weights is not None:
        flags["backbone_options"] = (*flags.get("backbone_options", ()), f"weights={arguments.weights}")
    chosen = dict(QUICK[kind]) if flags.get("quick") else {}
    if flags.get("preset") in PRESETS:
        overrides = preset(flags["preset"], flags.get("backbone", kind.backbone))
        rollout = RolloutSettings(**overrides["rollout"])
        theirs = {name: getattr(rollout, name) for name in OF_A_PRESET}
        recipe = theirs | {"guidance": overrides.get("model", {}).get("guidance")} | recipe
        chosen["etas"] = (rollout.eta,)
    made = Recipe(**recipe)
    if flags.get("quick"):
        chosen["windows"] = tuple(min(window, made.steps - 1) for window in chosen["windows"])
    return kind(recipe=made, **{**chosen, **flags})


def show(run_folder: Path, trained: Sequence[Path] = ()) -> int:
    """Writes the report of a run folder, or of training runs, and prints its tables. Returns how many cells failed."""
    import pandas as pd

    from analysis.report.run import write_run_report
    from analysis.report.write import write_report

    page, shown, sentences = write_run_report(trained, run_folder) if trained else write_report(run_folder)
    with pd.option_context("display.width", 220, "display.max_columns", None, "display.max_colwidth", 60):
        for name, frame in shown.items():
            print(f"\n{name.replace('_', ' ')}\n{frame.to_string(index=False)}")
    print("\n" + "\n".join(sentences))
    print(f"\nreport: {page}")
    return len(shown.get("failures", ()))


def compare_runs(arguments: argparse.Namespace) -> int:
    """Prints a comparison. Returns how many quantities have a verdict to fail on."""
    from analysis.report.compare import compare, markdown, shown

    frame, warnings = compare(arguments.first, arguments.second, arguments.margin)
    table = shown(frame, every=arguments.all)
    if arguments.markdown or arguments.latex:
        print(markdown(table) if arguments.markdown else table.to_latex(index=False, escape=True))
    else:
        some = table if arguments.all else table.head(LINES)
        print(some.to_string(index=False, max_colwidth=40) if len(table) else "nothing changed for certain")
        if len(some) < len(table):
            print(f"... and {len(table) - len(some)} more: --all")
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in frame["verdict"].value_counts().items()))
    for warning in warnings:
        print(f"warning: {warning}")
    return int(frame["verdict"].isin(arguments.fail_on).sum())


def _work_of(command: str) -> Callable[[Any, Path], Record]:
    from analysis.measure import calibrate, reproduce

    work: dict[str, Callable[[Any, Path], Record]] = {
        "reproduce": reproduce.run,
        "calibrate": calibrate.run,
        "collect": calibrate.collect,
    }
    return work[command]


def main(argv: list[str] | None = None) -> None:
    """Runs a command."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        if arguments.command == "compare":
            if bad := compare_runs(arguments):
                top.exit(1, f"{top.prog}: {bad} quantities have a verdict to fail on\n")
            return
        if arguments.command == "manifest":
            from analysis.report import manifest

            if arguments.rerun:
                require_writable(arguments.root / manifest.NAME)
                try:
                    manifest.rerun(arguments.root, CHECKOUT)
                except CalledProcessError as error:
                    top.exit(1, f"{top.prog}: error: a command failed, its record is as it was: {error}\n")
            write_json(arguments.root / manifest.NAME, manifest.manifest(arguments.root, CHECKOUT))
            print(f"wrote {arguments.root / manifest.NAME}")
            return
        out = None
        trained: list[Path] = []
        if arguments.command == "report":
            out = arguments.out or arguments.runs[0]
            if len(arguments.runs) > 1 and arguments.out is None:
                raise ValueError(f"out must be the folder of the page for {len(arguments.runs)} runs, got none")
            if arguments.out is not None:
                require_writable(arguments.out / "report.html")
                trained = arguments.runs
        if arguments.command == "curves":
            from analysis.measure import reward_curves

            chosen = Curves(**given(arguments, Curves))
            out = arguments.out or Path("results") / f"{chosen.backbone.replace(':', '-')}-curves"
            with only_run_in(out):
                reward_curves.run(chosen, out)
        elif arguments.command == "league":
            from analysis.measure import league

            flags = given(arguments, League)
            compared = League(**(QUICK_LEAGUE if flags.get("quick") else {}) | flags)
            out = arguments.out or Path("results") / f"{compared.backbone.replace(':', '-')}-league"
            require_device(compared.device)
            with only_run_in(out):
                league.run(compared, out)
        elif out is None:
            settings = settings_from(arguments)
            _, ending, _ = COMMANDS[arguments.command]
            out = arguments.out or Path("results") / f"{settings.backbone.replace(':', '-')}{ending}"
            require_device(settings.device)
            with only_run_in(out):
                _work_of(arguments.command)(settings, out)
        failed = show(out, trained)
    except (ValueError, RecordError, OSError, MemoryError) as error:
        top.exit(2, f"{top.prog}: error: {error}\n")
    except KeyboardInterrupt:
        top.exit(130, f"\n{top.prog}: interrupted; what was written stays\n")
    if failed:
        top.exit(1, f"{top.prog}: {failed} cells failed; see the table of failures\n")


if __name__ == "__main__":
    main()
