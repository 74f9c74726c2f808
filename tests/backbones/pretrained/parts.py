"""Small text encoders and tokenizers, built from configurations; of the classes that the published pipelines use."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


def seeded(build: Any, *arguments: Any, **settings: Any) -> Any:
    """What ``build`` makes, with weights drawn from seed 0, in eval mode if it is a module."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build(*arguments, **settings)
    return made.eval() if isinstance(made, torch.nn.Module) else made


def clip(width: int = 16, projection: bool = False) -> tuple[Any, Any]:
    """A CLIP text encoder and its tokenizer."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    alphabet = [*LETTERS.replace(" ", "")]
    vocabulary = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    tokens = {token: place for place, token in enumerate(vocabulary)}
    tokenizer = CLIPTokenizer(vocab=tokens, merges=[], model_max_length=16)
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=32,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=tokens["<|startoftext|>"],
        eos_token_id=tokens["<|endoftext|>"],
        pad_token_id=tokens["<|endoftext|>"],
    )
    return seeded(CLIPTextModelWithProjection if projection else CLIPTextModel, config), tokenizer


def t5(width: int = 16, multilingual: bool = False) -> tuple[Any, Any]:
    """A T5 (or UMT5) encoder and its tokenizer."""
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast, UMT5Config, UMT5EncoderModel

    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -1.0),
        *((letter, -2.0) for letter in LETTERS if letter != " "),
    ]
    tokenizer = T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=64)
    config_class, model_class = (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    config = config_class(
        vocab_size=len(vocabulary),
        d_model=width,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return seeded(model_class, config), tokenizer


def byte_level_tokenizer(*special: str) -> Tokenizer:
    """A byte-level BPE tokenizer without merges: one token per byte, and the ``special`` ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def autoencoder_kl(latent_channels: int) -> Any:
    """A VAE that halves the image once."""
    from diffusers import AutoencoderKL

    return seeded(
        AutoencoderKL,
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=0.4,
    )


def louder(transformer: Any, layer: str, factor: float = 4.0) -> Any:
    """``transformer`` with a layer scaled, so that a prompt moves velocities by more than bf16's rounding."""
    with torch.no_grad():
        transformer.get_submodule(layer).weight.mul_(factor)
    return transformer


CHAT = (
    "{% for message in messages %}{% if message.role == 'user' %}<|im_start|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}"
    "<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% if enable_thinking is false %}!{% endif %}{% endif %}"
)
"""A chat template that is shorter than the published ones, and says no system message."""


def qwen3(width: int = 16, layers: int = 2, head: bool = False) -> tuple[Any, Any]:
    """A Qwen3 text encoder, with its language head or without, and its tokenizer of bytes."""
    from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=2048, chat_template=CHAT)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return seeded(Qwen3ForCausalLM if head else Qwen3Model, config), tokenizer
