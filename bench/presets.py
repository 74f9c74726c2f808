"""Presets: sets of cells to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench.settings import CollectiveBench, GroupBench, UpdateBench

Settings = GroupBench | CollectiveBench
Kind = Literal["group", "update", "memory", "collectives"]

CALIBRATION = "results/reference/{}-calibration/calibration-eta0.7.json"
"""Plans of a backbone whose updates are timed next to exact and the paper's, where this file exists."""


@dataclass(frozen=True)
class Planned:
    """One cell of a preset."""

    kind: Kind
    settings: Settings

    @property
    def name(self) -> str:
        """Readable and stable: ``group/digits-flux/W5/batch16/float32/checkpointing``."""
        s = self.settings
        ranks = [f"ranks{s.ranks}"] if isinstance(s, CollectiveBench) else []
        kept = ["checkpointing"] if s.checkpointing else []
        parts = [self.kind, s.backbone, f"W{s.window}", f"batch{s.batch}", s.dtype, s.device, *ranks, *kept]
        return "/".join(parts).replace(":", "-")

    @property
    def file(self) -> str:
        """Name of its record in the run folder."""
        return self.name.replace("/", "-") + ".json"


def _cells(backbone: str, batch: int, windows: Sequence[int], rounds: int, **more: Any) -> list[Planned]:
    """Lists time and memory of a backbone's groups, with gradient checkpointing and without."""
    cells = []
    for window in windows:
        for checkpointing in (False, True):
            settings = GroupBench(
                backbone=backbone, batch=batch, window=window, rounds=rounds, checkpointing=checkpointing, **more
            )
            cells += [Planned("group", settings), Planned("memory", settings)]
    return cells


def _update(backbone: str, batch: int, window: int, rounds: int) -> Planned:
    """Lists training steps of a small backbone, with its calibrated plans."""
    file = CALIBRATION.format(backbone)
    calibration = file if Path(file).is_file() else ""
    settings = UpdateBench(backbone=backbone, batch=batch, window=window, rounds=rounds, calibration=calibration)
    return Planned("update", settings)


def _full_size(backbone: str, options: Sequence[str]) -> dict[str, Any]:
    """Sets up a published model with random weights at 720x720 on a GPU, batch 1, checkpointed."""
    return {
        "backbone": backbone,
        "backbone_options": ("random_weights=true", "height=720", "width=720", *options),
        "batch": 1,
        "guidance": None if backbone.startswith("flux") else 1.0,
        "checkpointing": True,
        "device": "cuda",
        "dtype": "bfloat16",
    }


def _full_size_group(backbone: str, options: Sequence[str]) -> list[Planned]:
    """Lists time and memory of a group, W = 5.

    In the units of `_full_size_update` the arms of a round are 104 F, twice because phases take a separate call,
    as are those of the warm-up; verifying them is 96 F, after a rollout of 21 F. With 3 rounds that is about 950 F, and
    the arms of memory, run four times each, 250 F: 45 PFLOP for Flux, 42 for Qwen-Image. Both models, which ``h200``
    has, take 3.6 minutes at 400 TFLOP/s, 6 at 240, and each is loaded twice before.
    """
    settings = GroupBench(window=5, rounds=3, **_full_size(backbone, options))
    return [Planned("group", settings), Planned("memory", settings)]


def _full_size_update(backbone: str, options: Sequence[str]) -> Planned:
    """Lists training steps without decoding (random weights have no decoder), W = 4, too long for a preset with groups.

    A forward F is 37.3 TFLOP (Flux) or 34.9 (Qwen-Image); a LoRA's checkpointed backward is 2 F, as the weights get no
    gradients. The ways of a round are 3 x 60 F (exact), 48 F (paper) and 2 x 42 F (closed form), next to a rollout of
    21 F: 333 F. Verifying them once is 3 x 60 + 3 x 42 + 312 = 618 F. With 3 rounds that is about 1,640 F, 61 PFLOP for
    Flux: 2.5 minutes at 400 TFLOP/s, 5 at 200, and the model is loaded before.
    """
    return Planned("update", UpdateBench(window=4, rounds=3, **_full_size(backbone, options)))


def _counts(backbone: str, window: int, rounds: int = 3) -> list[Planned]:
    settings = CollectiveBench(backbone=backbone, window=window, rounds=rounds)
    return [Planned("collectives", replace(settings, checkpointing=kept)) for kept in (False, True)]


FLUX = ("flux-dev", ("lora_rank=32",))
QWEN = ("qwen-image", ("text_tokens=256", "lora_rank=32"))

PRESETS: dict[str, Callable[[], list[Planned]]] = {
    "smoke": lambda: [
        Planned("group", GroupBench(window=4, batch=2, rounds=5, steps=6)),
        Planned("update", UpdateBench(backbone="digits-flux", window=4, batch=2, rounds=5, steps=6)),
        Planned("memory", GroupBench(window=4, batch=2, rounds=2, steps=6)),
        Planned("collectives", CollectiveBench(window=4)),
    ],
    "digits": lambda: [
        *(c for c in _cells("digits-flux", 16, (5,), 5) if c.kind == "group" or not c.settings.checkpointing),
        _update("digits-flux", 4, 4, 3),
        _counts("digits-flux", 5, rounds=1)[1],
    ],
    "laptop": lambda: [
        *_cells("digits-flux", 16, (4, 5), 15),
        *_cells("photos-flux", 6, (4, 5), 15),
        *_cells("photos-qwen", 6, (4, 5), 15),
        *(_update(backbone, 6, 4, 7) for backbone in ("photos-flux", "photos-qwen")),
        *_counts("digits-flux", 5),
        *_counts("photos-qwen", 5),
    ],
    "flux-dev": lambda: _full_size_group(*FLUX),
    "qwen-image": lambda: _full_size_group(*QWEN),
    "flux-dev-update": lambda: [_full_size_update(*FLUX)],
    "qwen-image-update": lambda: [_full_size_update(*QWEN)],
    "h200": lambda: [*PRESETS["flux-dev"](), *PRESETS["qwen-image"]()],
}
"""Cells by the name of a preset. Full-size models train a LoRA, as one device holds no second copy of them."""
