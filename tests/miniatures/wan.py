"""The miniature of Wan 2.1."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLWan

from . import _parts

CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 128,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
HW = (32, 48)


def make_parts() -> dict[str, Any]:
    tokenizer = _parts.t5_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": _parts.umt5_text(tokenizer),
        "vae": AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1),
        "scheduler": _parts.flow_unipc(),
    }
