"""HPSv2.1's tensors against open_clip's own module, and files that are not them.

``fixtures/open_clip.safetensors`` was made once, with open_clip_torch 3.3.0:

    torch.manual_seed(0)
    model = open_clip.model.CLIP(
        embed_dim=12,
        vision_cfg=dict(image_size=28, layers=2, width=24, head_width=12, patch_size=14),
        text_cfg=dict(context_length=16, vocab_size=58, width=16, heads=2, layers=2),
    ).eval()
    for name, parameter in model.named_parameters():
        if name != "logit_scale":
            parameter.data.normal_(0, 0.3).add_("ln" in name and name.endswith("weight"))
    images = torch.randint(0, 256, (3, 3, 28, 28)).byte()
    pixels = (images / 255 - mean) / std    # OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    tokens = ...    # PROMPTS as its tokenizer pads and cuts them: start 56, an id per letter (28 more for the last one
                    # of a word), end 57, then 0; 16 in all, of which the last is 57 where a prompt is cut
    save_file({f"state.{name}": tensor for name, tensor in model.state_dict().items()}
        | {"images": images, "pixels": pixels, "tokens": tokens}
        | {"image_features": model.encode_image(pixels), "text_features": model.encode_text(tokens)}, ...)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from jagg_core.rewards import PreferenceReward, load_reward
from jagg_core.rewards.preference.conversion import convert_open_clip
from jagg_core.rewards.preference.files import read_tensors
from jagg_core.rewards.preference.network import build_model, projected
from tests.rewards.tiny_clip import write_clip

FIXTURE = load_file(Path(__file__).parent / "fixtures" / "open_clip.safetensors")
STATE = {name.removeprefix("state."): tensor for name, tensor in FIXTURE.items() if name.startswith("state.")}
PROMPTS = ["a cat", "two red rockets, at night.", "z"]
FILE = "HPS_v2.1_compressed.pt"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, preprocessing and configuration of the fixture's network."""
    folder = tmp_path_factory.mktemp("processor")
    write_clip(folder, act="gelu")
    return folder


def config(processor: Path, act: str = "gelu") -> Any:
    from transformers import CLIPConfig

    found = CLIPConfig.from_pretrained(processor)
    found.text_config.hidden_act = found.vision_config.hidden_act = act
    return found


def load(folder: Path, processor: Path) -> PreferenceReward:
    found = load_reward("hpsv2.1", options=[f"hpsv2.1.path={folder}", f"hpsv2.1.processor={processor}"])
    assert isinstance(found, PreferenceReward)
    return found


def features(model: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        image = projected(model.eval().get_image_features(FIXTURE["pixels"]))
        return image, projected(model.get_text_features(FIXTURE["tokens"]))


def test_converted_features_are_open_clips(processor: Path) -> None:
    settings = config(processor)
    model = build_model(settings, convert_open_clip(STATE, settings, "fixture"), Path("fixture"))
    image, text = features(model)
    torch.testing.assert_close(image, FIXTURE["image_features"], rtol=0, atol=1e-5)
    torch.testing.assert_close(text, FIXTURE["text_features"], rtol=0, atol=1e-5)
    assert model.logit_scale == STATE["logit_scale"]


def test_the_other_gelu_would_be_noticed(processor: Path, tmp_path: Path) -> None:
    settings = config(processor, "quick_gelu")
    model = build_model(settings, convert_open_clip(STATE, settings, "fixture"), Path("fixture"))
    assert (features(model)[0] - FIXTURE["image_features"]).abs().max() > 1e-3
    write_clip(tmp_path)
    torch.save(STATE, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"hidden_act in .*config.json must be gelu .*got \['quick_gelu'\]"):
        load(tmp_path, tmp_path)


def test_the_reward_is_open_clips_cosine(processor: Path, tmp_path: Path) -> None:
    """From a nested checkpoint and from prompts: cut, and padded with the end token instead of with 0."""
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": t for name, t in STATE.items()}}, tmp_path / FILE)
    reward = load(tmp_path, processor)
    image, text = (F.normalize(FIXTURE[f"{side}_features"], dim=-1) for side in ("image", "text"))
    images = FIXTURE["images"] / 255
    expected = image @ text.T
    torch.testing.assert_close(reward(images, PROMPTS), expected.diagonal(), rtol=0, atol=1e-5)
    every = reward(images.repeat_interleave(3, dim=0), PROMPTS * 3).reshape(3, 3)
    torch.testing.assert_close(every, expected, rtol=0, atol=1e-5)
    assert reward.name == "hpsv2.1"
    assert reward.version.startswith(f"{tmp_path.name} + {processor.name} ")


def test_the_whole_image_is_seen(processor: Path, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / FILE)
    reward, wide = load(tmp_path, processor), FIXTURE["images"][:, :, :14] / 255
    values = reward(wide, PROMPTS)
    torch.testing.assert_close(reward(F.pad(wide, (0, 0, 7, 7)), PROMPTS), values, rtol=0, atol=1e-6)
    assert (reward(wide[..., 7:21], PROMPTS) - values).abs().min() > 1e-3  # its centre alone


def test_every_form_of_the_file_is_read_alike(processor: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    torch.save({"state_dict": STATE}, tmp_path / "a" / FILE)
    save_file(STATE, tmp_path / "b" / "HPS_v2.1_compressed.safetensors")
    images = torch.rand(3, 3, 40, 30, generator=torch.Generator().manual_seed(0))
    first, second = (load(tmp_path / name, processor)(images, PROMPTS) for name in ("a", "b"))
    assert torch.equal(first, second)


@pytest.mark.parametrize("key", ["visual.proj", "transformer.resblocks.1.attn.in_proj_bias", "ln_final.weight"])
def test_a_missing_tensor_is_named(processor: Path, tmp_path: Path, key: str) -> None:
    torch.save({name: tensor for name, tensor in STATE.items() if name != key}, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"{FILE} holds another network: 1 tensors are missing, such as {key}$"):
        load(tmp_path, processor)


def test_unknown_tensors_are_named(processor: Path, tmp_path: Path) -> None:
    more = {"score_predictor.weight": torch.zeros(2), "transformer.resblocks.2.ln_1.bias": torch.zeros(16)}
    torch.save(STATE | more, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"2 tensors are unknown, such as score_predictor.weight, transformer.resbl"):
        load(tmp_path, processor)


@pytest.mark.parametrize(
    ("key", "shape", "named"),
    [
        ("visual.transformer.resblocks.0.attn.in_proj_weight", (48, 24), "layers.0.self_attn.[qkv]_proj.weight"),
        ("text_projection", (12, 16), "text_projection.weight"),
        ("visual.conv1.weight", (24, 3, 7, 7), "patch_embedding.weight"),
    ],
)
def test_another_shape_is_refused(
    processor: Path, tmp_path: Path, key: str, shape: tuple[int, ...], named: str
) -> None:
    torch.save(STATE | {key: torch.zeros(shape)}, tmp_path / FILE)
    with pytest.raises(ValueError, match=rf"path: \S*{named} in .*{FILE} must be of shape .*another network's"):
        load(tmp_path, processor)


class Touch:
    """Unpickled unsafely, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def test_nothing_is_unpickled_that_could_run_code(processor: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "hook": Touch(tmp_path / "ran")}, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"path: .*{FILE} is damaged or holds more than tensors, .*never unpickled"):
        load(tmp_path, processor)
    assert not (tmp_path / "ran").exists()


def test_other_content_and_damaged_files_are_refused(processor: Path, tmp_path: Path) -> None:
    file = tmp_path / FILE
    torch.save({"state_dict": {"visual.proj": 3}}, file)
    with pytest.raises(ValueError, match=r"must hold tensors by name, .*got visual.proj: int"):
        load(tmp_path, processor)
    torch.save([torch.zeros(2)], file)
    with pytest.raises(ValueError, match=r"must hold tensors by name, .*got list"):
        load(tmp_path, processor)
    torch.save(STATE, file)
    for content in (file.read_bytes()[:-200], b"", b"not found"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{FILE} is damaged or holds more than tensors"):
            load(tmp_path, processor)


def test_only_version_2_1_is_loaded(processor: Path, tmp_path: Path) -> None:
    """Version 2.0 has the same tensors, so its name is all that tells it apart."""
    file = tmp_path / "HPS_v2_compressed.pt"
    torch.save(STATE, file)
    with pytest.raises(ValueError, match=rf"path: {tmp_path} has no {FILE} or .*got \['{file.name}'\]; put it there"):
        load(tmp_path, processor)
    with pytest.raises(ValueError, match=f"path: there is no folder {file}; allowed: a folder, or a hub id"):
        load(file, processor)


def test_half_precision_files_are_read_exactly(processor: Path, tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in STATE.items()}
    torch.save(half, tmp_path / FILE)
    assert all(torch.equal(tensor, half[name]) for name, tensor in read_tensors([tmp_path / FILE]).items())
    model = load(tmp_path, processor).network.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.visual_projection.weight, half["visual.proj"].t().float())
