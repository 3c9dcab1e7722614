"""Qwen's text encoders, their tokenizer, and the VAE and transformer of Qwen-Image, in miniature."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
)

from lora_fp8.families._qwen import VAE_MARKS

TOKENS = 64
"""Token limit of the miniature, far below the pipelines' 512 for speed; families take the tokenizer's limit."""

# The words of the chat templates are one token each, as in the real vocabulary: pipelines rely on their number.
_INNER = (
    "the image by detailing color shape size texture quantity text spatial relationships of objects and background "
    "photo cat dog red blue"
).split()
_FIRST = ("user", "system", "assistant", "Describe")
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer(more: Sequence[str] = (), marks: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer with a few merges, Qwen's chat markers and its chat template.

    Args:
        more: further words that become one token each, with and without a space before them.
        marks: further special tokens.
    """
    pieces = sorted(ByteLevel.alphabet())
    merges: list[Any] = []  # pairs, which transformers' annotation leaves out
    inner = *_INNER, *string.punctuation, *string.ascii_letters, *more
    for word in (*(f"Ġ{word}" for word in inner), *_FIRST, *more):
        whole = word[0]
        for letter in word[1:]:
            if (whole, letter) not in merges:
                merges.append((whole, letter))
            whole += letter
            if whole not in pieces:
                pieces.append(whole)
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]
    vocab = {piece: i for i, piece in enumerate(pieces + marks)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        model_max_length=TOKENS,
        extra_special_tokens=marks[1:],
        chat_template=_CHAT,
    )


def _text_config(vocab: Qwen2Tokenizer, width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(vocab),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "pad_token_id": vocab.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": vocab.eos_token_id,
    }


def qwen3_text(vocab: Qwen2Tokenizer, *, width: int = 32) -> Qwen3Model:
    """Return a Qwen3 of two layers."""
    return Qwen3Model(Qwen3Config(**_text_config(vocab, width, 2)))


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def qwen25_vl(vocab: Qwen2Tokenizer, *, width: int = 32) -> Qwen2_5_VLForConditionalGeneration:
    """Return a two-layer Qwen2.5-VL with the smallest vision tower; it is used if the vocabulary has its markers."""
    text = {**_text_config(vocab, width, 2), "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": width}
    marks = {"image": "<|image_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    known = vocab.get_vocab()
    ids: dict[str, Any] = {f"{name}_token_id": known[mark] for name, mark in marks.items() if mark in known}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=eyes, **ids))


def qwen3_vl(vocab: Qwen2Tokenizer, *, width: int = 32, layers: int = 3) -> Qwen3VLModel:
    """Return a Qwen3-VL of a few layers with the smallest vision tower."""
    rope = {**_ROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    eyes: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}
    eyes |= {"out_hidden_size": width, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text = {**_text_config(vocab, width, layers), "rope_parameters": rope}
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=eyes))


def vae() -> AutoencoderKLQwenImage:
    """Return a VAE that halves the image sides, with the real one's 16 channels and their normalization."""
    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False], **VAE_MARKS
    )


CONFIG: dict[str, Any] = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
"""Config of a two-block transformer of Qwen-Image's architecture."""


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the released models' scheduler."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
