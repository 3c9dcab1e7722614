"""The miniature of Lumina-Image 2.0."""

from __future__ import annotations

from typing import Any

from lora_fp8.families.lumina2 import BEFORE

from . import _gemma, _parts

CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 6,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "cap_feat_dim": 32,
}
HW = (32, 48)


def make_parts() -> dict[str, Any]:
    tokenizer = _gemma.tokenizer(BEFORE)
    return {
        "scheduler": _parts.flow_euler(shift=6.0),
        # The pipeline assumes eight pixels per latent, whatever the VAE's config says.
        "vae": _parts.flux_vae(channels=(8, 8, 16, 16)),
        "text_encoder": _gemma.text(tokenizer),
        "tokenizer": tokenizer,
    }
