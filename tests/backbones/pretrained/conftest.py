"""Tiny folders of every published model, written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.backbones.pretrained import tiny_flux

PROMPTS = ("a red fox", "three green apples, and a spoon", "a")


@dataclass(frozen=True)
class Tiny:
    """How to write a model's tiny folder, and how to load and run it.

    Attributes:
        write: writes the folder for a model's name.
        options: sizes that suit it, and what else loading needs.
        arguments: what its pipeline's call needs besides prompt, latents, steps, size and guidance.
        guidance_name: argument of the pipeline's call that takes the guidance; None for a model without.
    """

    write: Callable[[Path, str], None]
    options: dict[str, Any]
    arguments: dict[str, Any]
    guidance_name: str | None


FLUX_OPTIONS = {"height": 16, "width": 24, "text_tokens": 24}

TINY = {
    "flux-dev": Tiny(tiny_flux.write, FLUX_OPTIONS, {"max_sequence_length": 24}, "guidance_scale"),
    "flux-schnell": Tiny(tiny_flux.write, FLUX_OPTIONS, {"max_sequence_length": 24}, None),
}
"""By registered name."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny folder of a model, by name. Do not write into it."""
    root, written = tmp_path_factory.mktemp("models"), {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = root / name
            TINY[name].write(written[name], name)
        return written[name]

    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded prompts of tests stay in the tests, and nothing asks the hub."""
    monkeypatch.setenv("JAGG_CACHE", str(tmp_path_factory.getbasetemp() / "encoded"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
