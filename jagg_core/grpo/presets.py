"""Recipes of the public trainers: what differs from this package's defaults, for every backbone and for some.

Source: the configurations in the repositories of DanceGRPO, flow_grpo and MixGRPO. The number of prompts, the reward
and the estimator are not part of a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Overrides = Mapping[str, Mapping[str, Any]]
"""Values by section of `jagg_core.grpo.GRPOConfig` and setting."""

ANY = "*"
"""Stands for every backbone."""

PRESETS: dict[str, Mapping[str, Overrides]] = {
    "dancegrpo": {
        ANY: {
            "rollout": {
                "steps": 16,
                "samples": 12,
                "shift": 3.0,
                "transition": "dance",
                "eta": 0.3,
                "timestep_mode": "trunc_fp32",
                "same_noise": True,
                "trained": "random",
                "fraction": 0.6,
            },
            "optimizer": {"learning_rate": 1e-5},
            "objective": {"clip_range": 1e-4},
        },
        "qwen-image": {"rollout": {"steps": 20}},
        "wan2.1": {"rollout": {"steps": 20}, "model": {"guidance": 5.0}},
    },
    "flow-grpo": {
        ANY: {
            "rollout": {"steps": 10, "samples": 24, "schedule": "own", "transition": "flow", "eta": 0.7},
            "advantage": {"std": "population", "eps": 1e-4},
            "optimizer": {"learning_rate": 3e-4, "steps_per_rollout": 2},
            "objective": {"clip_range": 1e-4},
        },
        "flux": {"rollout": {"steps": 6, "eta": 0.9}, "model": {"guidance": 3.5}},
        "qwen-image": {
            "rollout": {
                "samples": 16,
                "eta": 1.2,
                "trained": "window",
                "window_size": 2,
                "window_range": (0, 4),
            },
            "model": {"guidance": 4.0},
        },
        "sd3.5": {"model": {"guidance": 4.5}, "objective": {"kl_beta": 0.04, "kl_form": "std"}},
        "wan2.1": {
            "rollout": {"steps": 20, "samples": 4},
            "model": {"guidance": 4.5},
            "objective": {"clip_range": 1e-3, "kl_beta": 0.004},
        },
    },
    "flow-grpo-fast": {
        ANY: {
            "rollout": {
                "steps": 10,
                "samples": 24,
                "schedule": "own",
                "transition": "cps",
                "eta": 0.8,
                "trained": "window",
                "window_size": 2,
                "window_range": (0, 5),
            },
            "advantage": {"std": "population", "eps": 1e-4},
            "optimizer": {"learning_rate": 3e-4, "steps_per_rollout": 2},
            "objective": {"clip_range": 1e-5},
        },
        "flux": {
            "rollout": {"steps": 6, "window_size": 3, "window_range": (0, 2)},
            "model": {"guidance": 3.5},
        },
        "sd3.5": {"model": {"guidance": 4.5}},
    },
    "mixgrpo": {
        ANY: {
            "rollout": {
                "steps": 25,
                "samples": 12,
                "shift": 3.0,
                "transition": "flow",
                "eta": 0.7,
                "trained": "window",
                "window_size": 4,
                "window_range": (0, 20),
                "window_interval": 25,
            },
            "optimizer": {"learning_rate": 1e-5},
            "objective": {"clip_range": 1e-4},
        },
    },
}
"""Overrides by preset and backbone: `ANY` first, then the entry whose name the backbone's begins with."""


def preset(name: str, backbone: str) -> dict[str, dict[str, Any]]:
    """The overrides of a preset for a backbone.

    Raises:
        ValueError: unknown preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {sorted(PRESETS)}, got {name!r}")
    found: dict[str, dict[str, Any]] = {}
    for key, overrides in PRESETS[name].items():
        if key == ANY or backbone.startswith(key):
            for section, values in overrides.items():
                found[section] = found.get(section, {}) | dict(values)
    return found
