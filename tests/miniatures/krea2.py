"""The miniature of Krea 2."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import _parts, _qwen

CONFIG: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "text_hidden_dim": 32,
    "num_text_layers": 2,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 48,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 6, 6),
}


def wake_(denoiser: Any) -> None:
    for name, parameter in denoiser.named_parameters():
        if name.endswith("scale_shift_table") or ".norm" in name:
            nn.init.normal_(parameter, std=0.1)


def make_parts() -> dict[str, Any]:
    vocab = _qwen.tokenizer()
    return {
        "scheduler": _parts.flow_euler(use_dynamic_shifting=True, max_image_seq_len=6400),
        "vae": _qwen.vae(),
        "text_encoder": _qwen.qwen3_vl(vocab),
        "tokenizer": vocab,
        "text_encoder_select_layers": (1, 2),
    }
