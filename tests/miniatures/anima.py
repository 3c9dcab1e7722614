"""The miniature of Anima."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AnimaAutoBlocks, AnimaTextConditioner

from . import _parts, _qwen

CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 32,
    "adaln_lora_dim": 16,
    "max_size": (1, 64, 64),
    "rope_scale": (1.0, 4.0, 4.0),
    "extra_pos_embed_type": None,
}


def make_parts() -> dict[str, Any]:
    vocab, t5_vocab = _qwen.tokenizer(), _parts.t5_tokenizer()
    conditioner = AnimaTextConditioner(
        source_dim=32,
        target_dim=32,
        model_dim=32,
        num_layers=1,
        num_attention_heads=2,
        target_vocab_size=len(t5_vocab),
        min_sequence_length=_parts.T5_TOKENS,
    )
    return {
        "scheduler": _parts.flow_euler(shift=3.0),
        "vae": _qwen.vae(),
        "text_encoder": _qwen.qwen3_text(vocab),
        "tokenizer": vocab,
        "t5_tokenizer": t5_vocab,
        "text_conditioner": conditioner,
    }


def save(parts: dict[str, Any], folder: Path) -> None:
    blocks: Any = AnimaAutoBlocks()  # diffusers has no types for modular pipelines
    pipeline = blocks.init_pipeline()
    pipeline.update_components(**parts)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
