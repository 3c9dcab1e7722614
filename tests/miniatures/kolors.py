"""The miniature of Kolors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
from diffusers import EulerDiscreteScheduler
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer
from torch import nn

from . import _parts

CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "norm_num_groups": 16,
    "cross_attention_dim": 48,
    "use_linear_projection": True,
    "encoder_hid_dim": 32,
    "encoder_hid_dim_type": "text_proj",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 16,
    "projection_class_embeddings_input_dim": 32 + 6 * 16,
}


def make_parts() -> dict[str, Any]:
    tokenizer = _tokenizer()
    settings = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=-(-tokenizer.vocab_size // 16) * 16,
        hidden_size=32,
        ffn_hidden_size=64,
        kv_channels=16,
        num_attention_heads=2,
        seq_length=512,
        multi_query_attention=True,
        multi_query_group_num=1,
        add_qkv_bias=True,
        original_rope=True,
    )
    encoder = ChatGLMModel(settings)
    for name, parameter in encoder.named_parameters():  # its norms are allocated but not initialized
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return {
        "vae": _parts.vae(scaling_factor=0.13025),
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "scheduler": EulerDiscreteScheduler(
            num_train_timesteps=1100,
            beta_start=0.00085,
            beta_end=0.014,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
    }


def _tokenizer() -> ChatGLMTokenizer:
    """Return a SentencePiece tokenizer for a few words and printable ASCII, which is saved from its model file."""
    folder = tempfile.TemporaryDirectory()
    prefix = Path(folder.name) / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a photo of the red dog and the blue cat, seen from above"] * 20),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=120,
        hard_vocab_limit=False,
        required_chars="".join(map(chr, range(33, 127))),
        num_threads=1,
        minloglevel=2,
    )
    tokenizer = ChatGLMTokenizer(str(prefix.with_suffix(".model")))
    tokenizer.made_in = folder  # keeps the folder until the tokenizer is deleted
    return tokenizer
