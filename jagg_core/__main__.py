"""``python -m jagg_core``: see ``--help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tqdm import tqdm

from jagg_core.choices import CLASSIFIED, DTYPES, SHIPPED, ScheduleName
from jagg_core.files import require_writable, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from jagg_core.backbones import Backbone
    from jagg_core.backbones.check import Finding
SAMPLE_EXAMPLE = (
    "example: python -m jagg_core sample --backbone photos-flux --prompts cat coffee --eta 0.7 --out cats.png"
)
CHECK_EXAMPLE = "example: python -m jagg_core backbones check my_module:load --device cuda --dtype bfloat16"
TRAIN_EXAMPLE = "example: python -m jagg_core backbones train digits-flux --seed 0"
REWARD_EXAMPLE = "example: python -m jagg_core rewards train digits --seed 0"


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m jagg_core", description="Training, backbones, samples and rewards.", epilog=SAMPLE_EXAMPLE
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train by GRPO with any plan; see train --help", add_help=False)
    backbones = commands.add_parser(
        "backbones", help="list backbones, check one, or retrain a shipped one", epilog=CHECK_EXAMPLE
    )
    actions = backbones.add_subparsers(dest="action")
    check = actions.add_parser("check", help="check that a backbone keeps its contract", epilog=CHECK_EXAMPLE)
    check.add_argument("name", help="a registered backbone, or yours as module:function")
    _add_loading(check)
    train = actions.add_parser("train", help="rebuild the weights of a shipped backbone", epilog=TRAIN_EXAMPLE)
    train.add_argument("name", choices=SHIPPED, help="a shipped backbone")
    train.add_argument("--steps", type=int, help="training steps, default those of the shipped weights")
    train.add_argument("--seed", type=int, default=0, help="of weights, batches and noise, default 0")
    train.add_argument("--out", type=Path, help="weights file, default: the package's")
    rewards = commands.add_parser(
        "rewards", help="list rewards, or retrain a shipped classifier", epilog=REWARD_EXAMPLE
    )
    reward_actions = rewards.add_subparsers(dest="action")
    classifier = reward_actions.add_parser(
        "train", help="rebuild the weights of a shipped classifier", epilog=REWARD_EXAMPLE
    )
    classifier.add_argument("name", choices=CLASSIFIED, help="the images that it classifies")
    classifier.add_argument("--steps", type=int, help="training steps, default those of the shipped weights")
    classifier.add_argument("--seed", type=int, default=0, help="of weights and batches, default 0")
    classifier.add_argument("--out", type=Path, help="weights file, default: the package's")
    sample = commands.add_parser("sample", help="write a contact sheet, a row per prompt", epilog=SAMPLE_EXAMPLE)
    sample.add_argument(
        "--backbone", default="photos-flux", help="registered, or yours as module:function; default photos-flux"
    )
    sample.add_argument("--prompts", nargs="+", help="of the rows, default all of the backbone's")
    sample.add_argument("--count", type=int, default=8, help="samples per prompt, default 8")
    sample.add_argument("--steps", type=int, default=21, help="sampling steps, default 21")
    sample.add_argument("--shift", type=float, default=3.0, help="time shift, default 3")
    sample.add_argument("--eta", type=float, default=0.0, help="noise of Dance-SDE; 0 (default) is the ODE")
    sample.add_argument("--schedule", choices=get_args(ScheduleName), default="dance", help="sigmas, default dance")
    sample.add_argument("--guidance", type=float, help="scale, default the backbone's usual one")
    _add_loading(sample)
    sample.add_argument("--seed", type=int, default=0, help="of latents and noise, default 0")
    sample.add_argument("--out", type=Path, default=Path("samples.png"), help="PNG file, default samples.png")
    return top


def _add_loading(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cpu", help="such as cuda or cuda:1, default cpu")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights, default float32")
    command.add_argument("--weights", metavar="RUN", help="folder of a training run, whose weights are used")
    text = "option=value of the backbone's loader, such as path=FOLDER height=512 prompts=FILE"
    command.add_argument(
        "--backbone-options", nargs="*", action="extend", default=[], metavar="OPTION=VALUE", help=text
    )


def _load(name: str, arguments: argparse.Namespace) -> Backbone:
    import torch

    from jagg_core.backbones import load_backbone, read_options

    weights = [] if arguments.weights is None else [f"weights={arguments.weights}"]
    options = read_options(name, [*arguments.backbone_options, *weights])
    return load_backbone(name, arguments.device, getattr(torch, arguments.dtype), **options)


def write_samples(arguments: argparse.Namespace) -> None:
    """Samples and writes the sheet.

    Raises:
        ValueError: a setting out of range, before the backbone is loaded where it does not need it.
    """
    import torch

    from jagg_core.backbones import check_schedule, schedule_of
    from jagg_core.images import image_grid, png_bytes
    from jagg_core.transitions import DanceSDE

    if arguments.count < 1:
        raise ValueError(f"count must be at least 1, got {arguments.count}")
    if not arguments.eta >= 0:
        raise ValueError(f"eta must be at least 0, got {arguments.eta}")
    if arguments.eta > 0:
        DanceSDE(arguments.eta)
        if arguments.steps < 2:
            raise ValueError(f"steps must be at least 2 with noise, got {arguments.steps}")
    check_schedule(arguments.schedule, arguments.steps, arguments.shift)
    require_writable(arguments.out)
    backbone = _load(arguments.backbone, arguments)
    sigmas = schedule_of(backbone, arguments.schedule, arguments.steps, arguments.shift)
    prompts = list(arguments.prompts or backbone.prompts)
    backbone.policy(prompts, arguments.guidance)  # encodes all of them while the text encoders are loaded
    images = [_row(backbone, prompt, place, sigmas, arguments) for place, prompt in enumerate(tqdm(prompts, "sample"))]
    write_atomically(arguments.out, png_bytes(image_grid(torch.cat(images), arguments.count)))
    print(f"wrote {arguments.out}: {len(prompts) * arguments.count} samples, a row per prompt")


def _row(backbone: Backbone, prompt: str, place: int, sigmas: Tensor, arguments: argparse.Namespace) -> Tensor:
    """Samples images of the prompt in this place, ``[count, ...]``."""
    from jagg_core import DanceSDE, initial_latents, rollout, sample_ode

    policy, seed = backbone.policy([prompt] * arguments.count, arguments.guidance), arguments.seed
    ids = range(place * arguments.count, (place + 1) * arguments.count)
    latents = initial_latents(backbone.latent_shape, seed, ids).to(backbone.device)
    if arguments.eta > 0:
        final = rollout(policy, sigmas, DanceSDE(arguments.eta), latents, seed, sample_ids=ids).final
    else:
        final = sample_ode(policy, sigmas, latents)
    return backbone.decode(final).cpu()


def print_findings(arguments: argparse.Namespace) -> int:
    """Prints a line per finding on a backbone. Returns the number of failed checks."""
    from jagg_core.backbones.check import check_backbone

    backbone = _load(arguments.name, arguments)

    def show(finding: Finding) -> None:
        value = "" if finding.value is None else f": {finding.value:.3g}"
        print(f"{'ok' if finding.ok else 'FAILED':<6}  {finding.name:<15}  {finding.text}{value}", flush=True)

    return sum(not finding.ok for finding in check_backbone(backbone, show))


def _run_training(name: str, steps: int, run: Callable[[Callable[[int, float], None]], float]) -> float:
    """Runs a training under a progress bar that shows the loss."""
    with tqdm(total=steps, desc=f"train {name}") as bar:

        def progress(step: int, loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")

        return run(progress)


def train_backbone(arguments: argparse.Namespace) -> None:
    """Retrains a shipped backbone."""
    from jagg_core.backbones.pixel import weights_path
    from jagg_core.backbones.registry import TRAINED
    from jagg_core.backbones.training import RECIPES, train_pixel_backbone

    name, path = arguments.name, arguments.out or weights_path(arguments.name)
    steps = RECIPES[name].steps if arguments.steps is None else arguments.steps
    require_writable(path)
    settings = replace(RECIPES[name], seed=arguments.seed, steps=steps)
    loss = _run_training(name, steps, lambda p: train_pixel_backbone(TRAINED[name], settings, path, progress=p))
    print(f"wrote {path}: mean loss of the last steps {loss:.4f}")


def train_reward(arguments: argparse.Namespace) -> None:
    """Retrains a shipped classifier."""
    from jagg_core.rewards.classifier import classifier_path
    from jagg_core.rewards.training import RECIPES, train_classifier

    name, path = arguments.name, arguments.out or classifier_path(arguments.name)
    steps = RECIPES[name].steps if arguments.steps is None else arguments.steps
    require_writable(path)
    accuracy = _run_training(name, steps, lambda p: train_classifier(name, path, steps, arguments.seed, p))
    print(f"wrote {path}: held-out accuracy {accuracy * 100:.1f} %")


def list_backbone_table() -> None:
    """Prints the registered backbones: size, memory of the weights by dtype, licence and place of the weights."""
    from jagg_core.backbones import list_backbones

    rows: list[tuple[str, ...]] = [("name", "parameters", "GiB bf16", "GiB fp32", "licence", "weights", "")]
    for entry in list_backbones():
        gib = [f"{entry.parameters * size / 2**30:.2f}" for size in (2, 4)] if entry.parameters else ["?", "?"]
        where = entry.hub_id or "in this package"
        rows.append((entry.name, _short(entry.parameters), *gib, entry.licence, where, entry.description))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            text.rjust(w) if 0 < k < 4 else text.ljust(w) for k, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print(
        "\nGiB: the transformer's weights alone. Full training adds gradients and optimizer state (AdamW in fp32: "
        "16 bytes per\nparameter in all), LoRA hardly any; text encoders are held only while prompts are encoded."
    )


def _short(parameters: int) -> str:
    """Formats a count as ``11.90 B``, ``1.31 M``, or ``?`` if not known."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return "?"


def list_reward_table() -> None:
    """Prints the registered rewards."""
    from jagg_core.rewards import list_rewards

    for name, description in list_rewards().items():
        print(f"{name:<16} {description}")


def main(argv: list[str] | None = None) -> None:
    """Runs a command."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["train"]:
        from jagg_core.grpo.command import main as train

        train(given[1:])
        return
    top = parser()
    arguments = top.parse_args(given)
    import torch

    failed = 0
    try:
        if arguments.command == "sample":
            write_samples(arguments)
        elif arguments.action == "check":
            failed = print_findings(arguments)
        elif arguments.action == "train":
            (train_backbone if arguments.command == "backbones" else train_reward)(arguments)
        else:
            (list_backbone_table if arguments.command == "backbones" else list_reward_table)()
    except ImportError as error:
        top.exit(2, f"{top.prog}: error: {error}: pip install 'jagg-core[pretrained,train,rewards]'\n")
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        top.exit(2, f"{top.prog}: error: {error}\n")
    except KeyboardInterrupt:
        top.exit(130, f"\n{top.prog}: interrupted\n")
    if failed:
        top.exit(1, f"{top.prog}: checks failed: {failed}\n")


if __name__ == "__main__":
    main()
