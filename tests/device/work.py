"""What runs on the pretended device and on the CPU, in a process of its own; returns how far the two differ."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from analysis.__main__ import main as analysis
from bench.__main__ import main as bench
from bench.memory import measure
from bench.settings import GroupBench
from jagg_core import (
    ClippedSurrogate,
    DanceSDE,
    Trajectory,
    VelocityPolicy,
    accumulate_gradients,
    causal_plan,
    dance_schedule,
    jagg_plan,
    rollout,
)
from jagg_core.__main__ import main as core
from jagg_core.backbones import load_backbone
from jagg_core.backbones.lora import add_lora
from jagg_core.backbones.pixel import PixelBackbone
from jagg_core.rewards import load_reward, score
from jagg_core.seeding import initial_latents
from tests.backbones.conftest import TINY
from tests.device import pretend

DEVICES = ("cpu", pretend.NAME)
BACKBONE = "tests.device.work:load"
SPEC = replace(TINY, prompts=("3", "7"))

MODES = [
    (upstream, backward) for upstream in ("autograd", "closed_form") for backward in ("joint", "batched", "sequential")
] + [("interpolated", "sequential")]


def load(device: torch.device | str, dtype: torch.dtype, *, lora_rank: int = 0) -> PixelBackbone:
    """A network of two blocks; its weights are the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = SPEC.build().to(dtype).eval()
    module = module.to(device)
    if lora_rank > 0:
        add_lora(module.transformer, module.lora_targets, lora_rank, None)
    return PixelBackbone(SPEC, module)


def difference(one: Any, other: Any) -> float:
    """Norm of the difference of two vectors over that of the first."""
    a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (one, other))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))


def drawn(device: str, lora_rank: int = 0) -> tuple[VelocityPolicy, Trajectory]:
    backbone = load_backbone(BACKBONE, device, torch.float32, **({"lora_rank": lora_rank} if lora_rank else {}))
    policy = backbone.policy(["3", "7"])
    latents = initial_latents(backbone.latent_shape, 0, range(2)).to(backbone.device)
    return policy, rollout(policy, dance_schedule(6), DanceSDE(0.7), latents, 0)


def gradient(device: str, upstream: Any, backward: Any, lora_rank: int = 0) -> Tensor:
    policy, trajectory = drawn(device, lora_rank)
    plan = jagg_plan(trajectory.sigmas, 5, 1.0) if backward == "joint" else causal_plan(trajectory.sigmas, [0, 3])
    advantages = torch.tensor([1.0, -1.0], device=trajectory.latents.device)
    accumulate_gradients(policy, trajectory, advantages, plan, ClippedSurrogate(), upstream, backward)
    return torch.cat([p.grad.flatten().cpu() for p in policy.parameters() if p.grad is not None])


def engine(rank: int, folder: Path) -> dict[str, float]:
    """Rollouts, and gradients in every mode."""
    pretend.register()
    noise = [drawn(device)[1].latents.cpu() for device in DEVICES]
    found = {"rollout": difference(*noise)}
    for upstream, backward in MODES:
        found[f"{upstream} {backward}"] = difference(*(gradient(device, upstream, backward) for device in DEVICES))
    found["lora"] = difference(*(gradient(device, "closed_form", "sequential", 2) for device in DEVICES))
    return found


def numbers(path: Path, left_out: tuple[str, ...]) -> list[float]:
    """Numbers of a CSV or JSON file, in order, without those below names that contain a word."""

    def inside(value: Any, name: str = "") -> Iterator[float]:
        if any(word in name for word in left_out):
            return
        if isinstance(value, dict):
            for key, one in value.items():
                yield from inside(one, str(key))
        elif isinstance(value, list):
            for one in value:
                yield from inside(one, name)
        elif isinstance(value, (int, float)):
            yield float(value)

    if path.suffix == ".json":
        return list(inside(json.loads(path.read_text())["cells"]))
    with path.open() as file:
        return [float(v) for row in csv.DictReader(file) for k, v in row.items() if k[-2:] != "_s" and _is_number(v)]


def _is_number(text: str) -> bool:
    try:
        return bool(float(text)) or True
    except ValueError:
        return False


TRAIN = (
    f"train --model.backbone {BACKBONE} --rollout.prompts 2 --rollout.samples 3 --rollout.steps 5 "
    "--rollout.micro_batch 3 --reward.name classifier+ink --run.checkpoint_every 1 --model.ema_decay 0.9"
)
CAUSAL = "--plan.estimator causal --plan.knots [0,2]"
RUNS = {
    "causal": CAUSAL,
    "kept graphs": f"{CAUSAL} --plan.keep_graphs true",
    "reference": f"{CAUSAL} --objective.kl_beta 0.1 --optimizer.epochs 2",
    "random steps": "--rollout.trained random --rollout.fraction 0.5",
}


def training(rank: int, folder: Path) -> dict[str, float]:
    """Two updates by command in several ways, and a run that resumes."""
    pretend.register()
    found = {}
    for name, flags in RUNS.items():
        for device in DEVICES:
            given = [*TRAIN.split(), *flags.split(), *on(device, "model."), *out(folder, name, device)]
            core([*given, "--run.updates", "2"])
        tables = [numbers(folder / name / device / "metrics.csv", ()) for device in DEVICES]
        found[name] = difference(*tables)
        weights = [load_file(folder / name / device / "weights.safetensors") for device in DEVICES]
        found[f"{name}: weights"] = difference(*(np.concatenate([t.flatten() for t in w.values()]) for w in weights))
    again = [*TRAIN.split(), *CAUSAL.split(), *on(pretend.NAME, "model."), *out(folder, "resumed", pretend.NAME)]
    core([*again, "--run.updates", "1"])
    core([*again, "--run.updates", "2", "--resume"])
    whole, resumed = (load_file(folder / n / pretend.NAME / "weights.safetensors") for n in ("causal", "resumed"))
    found["resumed"] = float(sum(not torch.equal(whole[key], resumed[key]) for key in whole))
    return found


def on(device: str, prefix: str = "") -> list[str]:
    return [f"--{prefix}device", device]


def out(folder: Path, name: str, device: str, ending: str = "") -> list[str]:
    path = folder / name / f"{device}{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return ["--out", str(path)]


def commands(rank: int, folder: Path) -> dict[str, float]:
    """Samples, the check of a backbone, times and memory."""
    pretend.register()
    for device in DEVICES:
        sample = f"sample --backbone {BACKBONE} --count 2 --steps 4 --eta 0.7"
        core([*sample.split(), *on(device), *out(folder, "sample", device, ".png")])
    core(["backbones", "check", BACKBONE, *on(pretend.NAME)])  # exits where a check fails
    common = f"--backbone {BACKBONE} --batch 3 --window 2 --steps 4 --rounds 2"
    bench(["group", *common.split(), *on(pretend.NAME), *out(folder, "group", pretend.NAME, ".json")])
    bench(["update", *common.split(), *on(pretend.NAME), *out(folder, "update", pretend.NAME, ".json")])
    small = GroupBench(backbone=BACKBONE, batch=3, window=3, steps=5)
    peaks = []
    for device in DEVICES:
        (folder / device).mkdir()
        measure(0, replace(small, device=device), ["exact", "paper-joint"], str(folder / device))
        peaks.append([json.loads((folder / device / f"{n}.json").read_text())[0] for n in ("exact", "paper-joint")])
    pixels = [np.asarray(Image.open(folder / "sample" / f"{d}.png"), dtype=np.int64) for d in DEVICES]
    waited = pretend.module().synchronized
    return {
        "pixels": float(abs(pixels[0] - pixels[1]).max()),
        "memory": float(min(peaks[1])),
        "joint over exact": peaks[1][1] / peaks[1][0],
        "waited": waited,
    }


def rewards(rank: int, folder: Path) -> dict[str, float]:
    """Published classes of rewards on tiny networks."""
    pretend.register()
    from tests.rewards.test_preference_rewards import PROMPTS, pictures
    from tests.rewards.tiny_clip import write_clip

    write_clip(folder / "clip")
    found = {}
    for name in ("clipscore", "pickscore"):
        options = [f"{name}.path={folder / 'clip'}"]
        loaded = [load_reward(name, device=device, options=options) for device in DEVICES]
        values = [score(r, pictures().to(d), PROMPTS).cpu() for r, d in zip(loaded, DEVICES, strict=True)]
        found[name] = difference(*values)
    return found


TIMES = ("_s", "seconds", "speed", "time")

STUDIES: dict[str, Callable[[], str]] = {
    "reproduce": lambda: "--steps 6 --windows 2 --samples 2 --predicted-passes 2",
    "collect": lambda: "--steps 6 --windows 2 --samples 2",
    "calibrate": lambda: "--steps 6 --windows 2 --samples 2 --signal-passes 3 2",
}


def studies(rank: int, folder: Path) -> dict[str, float]:
    """Records of the studies, with worker threads."""
    pretend.register()
    found = {}
    for name, flags in STUDIES.items():
        records = []
        for device in DEVICES:
            given = f"{name} --quick --backbone {BACKBONE} --reward ink --workers 2 {flags()}"
            # reproduce times groups in a process of its own, which does not know the pretended device
            with suppress(SystemExit) if name == "reproduce" else nullcontext():
                analysis([*given.split(), *on(device), *out(folder, name, device)])
            records.append(numbers(folder / name / device / "record.json", TIMES))
        found[name] = difference(*records) if len(records[0]) == len(records[1]) else float("inf")
    return found
