"""``python -m jagg_core train``: see ``--help``."""

from __future__ import annotations

import sys
import traceback
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from jagg_core.grpo.config import GRPOConfig
from jagg_core.grpo.presets import PRESETS, preset
from jagg_core.grpo.reading import MODE, check_flags, load_yaml, require_values

if TYPE_CHECKING:
    from jagg_core.grpo.metrics import Metrics

EXAMPLE = (
    "example: python -m jagg_core train --preset dancegrpo --model.backbone digits-flux --reward.name classifier "
    "--plan.estimator causal --plan.knots '[0, 8, 13, 16, 18]' --run.updates 50 --out runs/digits"
)


def parser(overrides: dict[str, dict[str, Any]]) -> Any:
    """The command line: a flag for every setting, with the defaults of a preset."""
    try:
        from jsonargparse import ArgumentParser, set_loader
        from yaml import YAMLError
    except ImportError as error:
        raise ValueError("training needs jsonargparse: pip install 'jagg-core[grpo]'") from error
    set_loader(MODE, load_yaml, exceptions=(YAMLError,))
    top = ArgumentParser(
        prog="python -m jagg_core train",
        description="GRPO with any plan. Flags override the file, the file overrides the preset.",
        epilog=EXAMPLE,
        parser_mode=MODE,
        exit_on_error=False,
    )
    top.add_argument("--preset", choices=sorted(PRESETS), help="defaults of a public trainer")
    top.add_argument(
        "--config",
        action="config",
        help="YAML or JSON of the settings below, such as config.json of a run",
    )
    top.add_argument("--out", type=Path, required=True, help="run folder")
    top.add_argument("--resume", action="store_true", help="go on after the newest checkpoint in the run folder")
    top.add_argument("--dry-run", action="store_true", help="say what the run would take, from one timed micro-batch")
    top.add_argument("--warm-start", type=Path, help="checkpoint whose weights alone are taken over")
    for section, settings in get_type_hints(GRPOConfig).items():  # a default GRPOConfig would check itself: needs torch
        top.add_class_arguments(settings, section)
    top.set_defaults({f"{section}.{name}": v for section, values in overrides.items() for name, v in values.items()})
    return top


def configure(argv: Sequence[str]) -> tuple[Any, GRPOConfig]:
    """Arguments and configuration. Flags or a file name the preset, whose values depend on the backbone.

    Raises:
        ValueError: settings that cannot be read, have no value, or do not fit each other.
    """
    check_flags(argv)
    first = parser({})
    chosen = _parsed(first, argv)
    top = parser(preset(chosen.preset, chosen.model.backbone)) if chosen.preset else first
    arguments = _parsed(top, argv)
    made = top.instantiate(arguments)
    return arguments, GRPOConfig(**{name: made[name] for name in GRPOConfig.__dataclass_fields__})


def _parsed(top: Any, argv: Sequence[str]) -> Any:
    """The arguments. Raises ValueError, in one line, where they cannot be read."""
    try:
        arguments = top.parse_args(argv)
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    require_values(GRPOConfig, vars(arguments))
    return arguments


def main(argv: Sequence[str]) -> None:
    """Train. Exits with 2 for settings that cannot be used, with 1 for a run that stopped."""
    try:
        _train(*configure(argv))  # help ends in here, before torch loads
    except KeyboardInterrupt:
        print("\npython -m jagg_core train: interrupted; --resume goes on after the newest checkpoint", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        extras = "grpo,pretrained,rewards"
        print(f"python -m jagg_core train: error: {error}: pip install 'jagg-core[{extras}]'", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"python -m jagg_core train: error: {error}", file=sys.stderr)
        sys.exit(2)


def _train(arguments: Any, config: GRPOConfig) -> None:
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from jagg_core.distributed import RankFailed, join, rank
    from jagg_core.grpo.run import WriteFailed, train
    from jagg_core.grpo.trainer import TrainingStopped
    from jagg_core.rewards import RewardFailed

    try:
        join(config.model.device, config.run.timeout)
        first = rank() == 0
        if arguments.dry_run:
            from jagg_core.grpo.dry_run import estimate, lines

            found = estimate(config, arguments.out, arguments.resume)
            print("\n".join(lines(config, arguments.out, found)) if first else "", end="\n" if first else "")
            return
        with tqdm(total=config.run.updates, desc="train", unit="update", disable=not first) as bar:
            shown = Progress(bar, config.rollout.prompts)
            trainer = train(
                config, arguments.out, resume=arguments.resume, warm_start=arguments.warm_start, progress=shown
            )
    except RewardFailed as error:
        print(f"python -m jagg_core train: error: {error}", file=sys.stderr)
        traceback.print_exception(error.__cause__)
        sys.exit(1)
    except (TrainingStopped, RankFailed, WriteFailed) as error:
        sys.exit(f"python -m jagg_core train: stopped: {error}")
    except torch.OutOfMemoryError as error:
        print(f"python -m jagg_core train: error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if first:
        print(f"{trainer.update} updates, {trainer.skipped} skipped; wrote {arguments.out}")
    if shown.updates and shown.skipped == shown.updates:
        sys.exit(f"python -m jagg_core train: every update was skipped, the last one because: {shown.reason}")


class Progress:
    """Shows updates on a bar, and says once that one had no signal.

    Attributes:
        updates: that were made.
        skipped: those of them that were skipped.
        reason: why the last of these was.
    """

    def __init__(self, bar: Any, prompts: int) -> None:
        self.updates, self.skipped, self.reason = 0, 0, ""
        self._bar, self._prompts, self._noted = bar, prompts, False

    def __call__(self, metrics: Metrics) -> None:
        """Shows an update."""
        self.updates += 1
        self.skipped += bool(metrics.skipped)
        self.reason = metrics.skipped or self.reason
        self._bar.n = metrics.update
        self._bar.set_postfix_str(_told(metrics))
        if metrics.groups_without_signal == self._prompts and not (self._noted or self._bar.disable):
            self._noted = True
            self._bar.write(
                f"note: update {metrics.update} had no signal: the samples of each prompt have equal rewards, so all "
                "advantages are 0; groups_without_signal in metrics.csv counts such prompts",
                file=sys.stderr,
            )


def _told(metrics: Metrics) -> str:
    if metrics.skipped:
        return f"skipped: {metrics.skipped}"
    seconds = " ".join(f"{stage} {value:.2f}" for stage, value in metrics.seconds.items())
    return (
        f"reward {metrics.reward_mean:.4f} |log ratio| {metrics.log_ratio_max:.1e} clipped {metrics.clipped_share:.0%} "
        f"norm {metrics.grad_norm:.2g} s: {seconds}"
    )
