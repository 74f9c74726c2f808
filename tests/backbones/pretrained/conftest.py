"""Tiny folders of every published model, written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.backbones.pretrained import tiny_flux, tiny_flux2, tiny_qwen_image, tiny_sd3, tiny_wan, tiny_z_image

PROMPTS = ("a red fox", "three green apples, and a spoon", "a")


@dataclass(frozen=True)
class Tiny:
    """How to write a model's tiny folder, and how to load and run it.

    Attributes:
        write: writes the folder for a model's name.
        options: sizes that suit it, and what else loading needs.
        arguments: what its pipeline's call needs besides prompt, latents, steps, size and guidance.
        guidance_name: argument of the pipeline's call that takes the guidance; None for a model without.
        to_pipeline: our latents as the pipeline's call takes them, where it packs them itself.
        from_pipeline: what its call returns as latents, as ours.
    """

    write: Callable[[Path, str], None]
    options: dict[str, Any]
    arguments: dict[str, Any]
    guidance_name: str | None
    to_pipeline: Callable[[Any, Tensor], Tensor] = lambda backbone, latents: latents
    from_pipeline: Callable[[Any, Tensor], Tensor] = lambda backbone, latents: latents


FLUX_OPTIONS = {"height": 16, "width": 24, "text_tokens": 24}
SD3_OPTIONS = {"height": 16, "width": 24, "text_tokens": 24}
QWEN_OPTIONS = {"height": 16, "width": 24, "text_tokens": 64}
FLUX2_OPTIONS = {"height": 16, "width": 24, "text_tokens": 40}
Z_IMAGE_OPTIONS = {"height": 16, "width": 24, "text_tokens": 40}
WAN_OPTIONS = {"height": 16, "width": 32, "frames": 5, "text_tokens": 24}

TINY = {
    "flux-dev": Tiny(tiny_flux.write, FLUX_OPTIONS, {"max_sequence_length": 24}, "guidance_scale"),
    "flux-schnell": Tiny(tiny_flux.write, FLUX_OPTIONS, {"max_sequence_length": 24}, None),
    "sd3.5-medium": Tiny(tiny_sd3.write, SD3_OPTIONS, {"max_sequence_length": 24}, "guidance_scale"),
    "sd3.5-large": Tiny(tiny_sd3.write, SD3_OPTIONS, {"max_sequence_length": 24}, "guidance_scale"),
    "qwen-image": Tiny(tiny_qwen_image.write, QWEN_OPTIONS, {"max_sequence_length": 64}, "true_cfg_scale"),
    **{
        name: Tiny(
            tiny_flux2.write,
            FLUX2_OPTIONS,
            {"max_sequence_length": 40},
            None if name == "flux2-klein-4b" else "guidance_scale",
            tiny_flux2.to_pipeline,
            tiny_flux2.from_pipeline,
        )
        for name in ("flux2-dev", "flux2-klein-4b", "flux2-klein-base-4b")
    },
    # the pipeline's guidance_scale: 0 is none, and 4 what others call 5
    "z-image-turbo": Tiny(
        tiny_z_image.write, Z_IMAGE_OPTIONS, {"max_sequence_length": 40, "guidance_scale": 0.0}, None
    ),
    "z-image": Tiny(tiny_z_image.write, Z_IMAGE_OPTIONS, {"max_sequence_length": 40, "guidance_scale": 4.0}, None),
    **{
        name: Tiny(tiny_wan.write, WAN_OPTIONS, {"max_sequence_length": 24}, "guidance_scale")
        for name in ("wan2.1-1.3b", "wan2.2-5b", "wan2.2-a14b")
    },
}
"""By registered name; of models that differ in size alone, one."""


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


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Encoded prompts of tests stay in the tests, and nothing asks the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAGG_CACHE", str(tmp_path_factory.getbasetemp() / "encoded"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tiny models read few tokens, and tokenizers of letters make many."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore::jagg_core.backbones.pretrained.text.PromptCut"))
