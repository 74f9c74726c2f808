"""Qwen-Image folders with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jagg_core.backbones.pretrained.qwen_image import QwenImage
from tests.backbones.pretrained.parts import louder, seeded

SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
"""As published."""


SPECIAL = ("<|im_start|>", "<|im_end|>")
WORDS = (
    *("system", "Describe", "user", "assistant"),
    *(" the", " image", " by", " detailing", " color", " shape", " size", " texture", " quantity", " text", " spatial"),
    *(" relationships", " of", " objects", " and", " background"),
)
"""Of the pipeline's template: the pipeline cuts its head off by the number of tokens, so each must be one."""


def tokenizer() -> Any:
    """A token per byte, and per word of the template."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=2048)
    made.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return made


def encoder(tokens: int, width: int = 16) -> Any:
    """A Qwen2.5-VL that knows this many tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": tokens,
            "hidden_size": width,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": width,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        image_token_id=1,
        video_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    return seeded(Qwen2_5_VLForConditionalGeneration, config)


def autoencoder() -> Any:
    """A Qwen-Image VAE that halves the image once."""
    from diffusers import AutoencoderKLQwenImage

    return seeded(
        AutoencoderKLQwenImage,
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.8, 2.0, 1.0],
    )


def write(folder: Path, name: str = "qwen-image") -> None:
    """A whole pipeline, with the published scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

    words = tokenizer()
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=autoencoder(),
        text_encoder=encoder(len(words)),
        tokenizer=words,
        transformer=louder(
            seeded(QwenImageTransformer2DModel, **QwenImage.tiny), "transformer_blocks.0.attn.add_v_proj", 16.0
        ),
    ).save_pretrained(folder)
