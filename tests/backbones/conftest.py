"""Networks this small are fastest on one thread, and repeat exactly there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from jagg_core.backbones.pixel import DIGITS_FLUX, FluxSpec, PixelBackbone, PixelSpec, build_pixel_backbone

TINY = FluxSpec(
    name="tiny-flux",
    dataset="digits",
    prompts=("a", "b", "c"),
    image_channels=1,
    size=8,
    patch=4,
    mean=0.3,
    std=0.4,
    heads=2,
    head_dim=8,
    double_blocks=1,
    single_blocks=1,
    rope_axes=(2, 2, 4),
    text_dim=8,
)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits() -> PixelBackbone:
    """The shipped digits, fp32. Leave its weights and ``.grad`` as they are."""
    return build_pixel_backbone(DIGITS_FLUX, "cpu", torch.float32)


@pytest.fixture(scope="session")
def tiny_spec() -> PixelSpec:
    """A specification with four tokens and two blocks."""
    return TINY


@pytest.fixture
def make_tiny(tiny_spec: PixelSpec) -> Callable[..., PixelBackbone]:
    """Backbones of that specification with random weights, the same every time."""

    def make(dtype: torch.dtype = torch.float32) -> PixelBackbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = tiny_spec.build()
        return PixelBackbone(tiny_spec, module.to(dtype).eval())

    return make
