"""The miniature of AuraFlow."""

from __future__ import annotations

from typing import Any

from . import _llama, _parts

CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "num_mmdit_layers": 1,
    "num_single_dit_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "caption_projection_dim": 32,
    "pos_embed_max_size": 1024,
}


def wake_(denoiser: Any) -> None:
    for name, parameter in denoiser.named_parameters():
        if ".norm1" in name:  # random gates are almost zero, so the prompt would have no effect
            parameter.data *= 8


def make_parts() -> dict[str, Any]:
    tokenizer = _llama.llama2_tokenizer(_parts.T5_TOKENS)
    return {
        "tokenizer": tokenizer,
        "text_encoder": _parts.umt5_text(tokenizer, width=48, feed_forward_proj="gated-gelu"),
        "vae": _parts.vae(scaling_factor=0.13025),
        "scheduler": _parts.flow_euler(shift=1.73),
    }
