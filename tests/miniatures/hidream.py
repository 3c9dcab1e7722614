"""The miniature of HiDream-I1."""

from __future__ import annotations

from typing import Any

from . import _llama, _parts

CONFIG: dict[str, Any] = {
    "patch_size": 8,  # the pipeline generates an area of 128 x 128 latents, whatever size it is given
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [32, 32],
    "text_emb_dim": 64,
    "axes_dims_rope": (4, 6, 6),
    "llama_layers": [0, 1, 1],
}
HW = (112, 144)


def make_parts() -> dict[str, Any]:
    clip, t5, llama = _parts.clip_tokenizer(), _parts.t5_tokenizer(), _llama.tokenizer()
    return {
        "scheduler": _parts.flow_unipc(),
        "vae": _parts.flux_vae(channels=(8,), attention=False),
        **_parts.clip_pair(clip, 32, 32),
        "text_encoder_3": _parts.t5_text(t5),
        "tokenizer_3": t5,
        "text_encoder_4": _llama.text(llama),
        "tokenizer_4": llama,
    }
