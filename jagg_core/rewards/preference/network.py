"""A CLIP network: cosines between images and their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jagg_core.backbones.pretrained.text import warn_of_cut
from jagg_core.hub import read_object
from jagg_core.rewards.preference.conversion import require_names
from jagg_core.rewards.preference.files import CONFIG, TOKENIZER, VOCABULARY, Source
from jagg_core.rewards.preference.preprocessing import Preprocessing


class ClipNetwork:
    """transformers' CLIPModel with its tokenizer and preprocessing, in eval mode and without gradients.

    Prompts of more tokens than the network takes are cut, as the published code does; one warning gives their number.
    All are padded to the full length, without a mask: attention is causal and the features come from the end token,
    which the padding follows, so the padding changes nothing.

    Attributes:
        logit_scale: factor of the cosines in the published logits; in full precision for weights of any dtype.
        max_tokens: most tokens of a prompt.
    """

    def __init__(self, model: Any, tokenizer: Any, preprocess: Preprocessing, batch_size: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.logit_scale = float(model.logit_scale.double().exp())
        self.max_tokens: int = model.config.text_config.max_position_embeddings
        self._warned_of_cut = False

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ClipNetwork:
        """Moves the weights."""
        self.model.to(device=device, dtype=dtype)
        return self

    def cosines(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Computes the cosine of image n and prompt n from ``[N, 3, H, W]`` in [0, 1] and N prompts; fp32 ``[N]``.

        The weights follow the images' device. A prompt is encoded once however often it comes.
        """
        if self.model.device != images.device:
            self.to(images.device)
        distinct = list(dict.fromkeys(prompts))
        if not self._warned_of_cut:
            self._warned_of_cut = warn_of_cut(distinct, self.tokenizer, self.max_tokens, "the reward's text encoder")
        with torch.autocast(images.device.type, enabled=False):
            image = torch.cat([self._image_features(batch) for batch in images.split(self.batch_size)])
            texts = [distinct[i : i + self.batch_size] for i in range(0, len(distinct), self.batch_size)]
            text = torch.cat([self._text_features(batch) for batch in texts])
        return (image * text[[distinct.index(prompt) for prompt in prompts]]).sum(-1)

    def _image_features(self, images: Tensor) -> Tensor:
        pixels = self.preprocess(images).to(self.model.dtype)
        return _normalised(self.model.get_image_features(pixels))

    def _text_features(self, prompts: Sequence[str]) -> Tensor:
        settings = {"padding": "max_length", "truncation": True, "max_length": self.max_tokens}
        ids = self.tokenizer(list(prompts), **settings)["input_ids"]
        return _normalised(self.model.get_text_features(torch.tensor(ids, device=self.model.device)))


def _normalised(features: object) -> Tensor:
    vectors = projected(features).float()
    # features of length 0 become NaN, which is an error, and not a cosine of 0
    return vectors / vectors.norm(dim=-1, keepdim=True)


def projected(output: object) -> Tensor:
    """Extracts the features from a CLIPModel getter's output: a tensor, or since transformers 5 an object.

    The object's ``pooler_output`` is projected already; projecting it again would go unnoticed where widths agree.

    Raises:
        TypeError: neither.
    """
    features = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
    if not isinstance(features, Tensor):
        raise TypeError(f"CLIP features must be a tensor or have one as pooler_output, got {type(output).__name__}")
    return features


def load_tokenizer(source: Source) -> Any:
    """Loads the CLIP tokenizer in a folder.

    Raises:
        ValueError: its vocabulary is missing; names the file.
    """
    from transformers import CLIPTokenizerFast

    # transformers makes an empty vocabulary of none
    if source.require("processor", TOKENIZER, VOCABULARY[0]).name != TOKENIZER:
        source.require("processor", VOCABULARY[1])
    return CLIPTokenizerFast.from_pretrained(source.folder, local_files_only=True)


def read_config(source: Source, setting: str, tokenizer: Any) -> Any:
    """Reads the CLIPConfig in a folder. The end token is the one of ``tokenizer``; old configurations name another.

    Raises:
        ValueError: it is missing or another network's, or its vocabulary is smaller than the tokenizer's.
    """
    from transformers import CLIPConfig

    file = source.require(setting, CONFIG)
    read = read_object(file)
    if read.get("model_type") != "clip":
        raise ValueError(f"{setting}: {file} must be of model_type 'clip', got {read.get('model_type')!r}")
    config = CLIPConfig.from_dict(read)
    if len(tokenizer) > config.text_config.vocab_size:
        raise ValueError(
            f"processor: {source.folder} has {len(tokenizer)} tokens, and the network of {file} takes "
            f"{config.text_config.vocab_size}: another network's?"
        )
    config.text_config.eos_token_id = tokenizer.eos_token_id
    return config


def build_model(config: Any, state: Mapping[str, Tensor], where: Path) -> Any:
    """Builds the CLIPModel of ``config`` with the tensors of ``state``; errors name their source ``where``.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape; names it.
    """
    from transformers import CLIPModel

    with torch.device("meta"):
        model = CLIPModel(config)
    expected = model.state_dict()
    # older files hold these, which are 0, 1, 2, ...
    state = {name: tensor for name, tensor in state.items() if not name.endswith(".position_ids")}
    require_names(state, expected, str(where))
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"path: {name} in {where} must be of shape {list(expected[name].shape)}, got {list(tensor.shape)}: "
                "another network's?"
            )
    model.load_state_dict(state, assign=True)
    for tower in (model.text_model, model.vision_model):
        tower.embeddings.position_ids = torch.arange(tower.embeddings.position_ids.shape[-1])[None]
    return model
