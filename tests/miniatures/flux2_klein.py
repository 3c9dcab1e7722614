"""The miniature of FLUX.2 klein."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from . import _flux2, _parts, _qwen

CONFIG: dict[str, Any] = {**_flux2.CONFIG, "guidance_embeds": False}


def make_parts() -> dict[str, Any]:
    tokenizer = _qwen.tokenizer()
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=27,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.1,  # with the usual 0.02 and so few features, prompts would hardly differ
    )
    return {
        "scheduler": _parts.flow_euler(use_dynamic_shifting=True, shift=3.0),
        "vae": _flux2.vae(),
        "text_encoder": Qwen3ForCausalLM(text),
        "tokenizer": tokenizer,
    }
