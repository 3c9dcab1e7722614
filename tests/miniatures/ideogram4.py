"""The miniature of Ideogram 4."""

from __future__ import annotations

from typing import Any

from diffusers import Ideogram4Transformer2DModel

from . import _flux2, _parts, _qwen

CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "adaln_dim": 32,
    "llm_features_dim": 13 * 32,
    "mrope_section": (4, 2, 2),
}


def make_parts() -> dict[str, Any]:
    tokenizer = _qwen.tokenizer()
    return {
        "unconditional_transformer": Ideogram4Transformer2DModel(**CONFIG),
        "scheduler": _parts.flow_euler(),
        "vae": _flux2.vae(),
        "text_encoder": _qwen.qwen3_vl(tokenizer, layers=36),
        "tokenizer": tokenizer,
    }
