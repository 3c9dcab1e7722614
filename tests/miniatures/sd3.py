"""The miniature of Stable Diffusion 3."""

from __future__ import annotations

from typing import Any

from . import _parts

CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 80,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 80,
    "pos_embed_max_size": 32,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}


def make_parts() -> dict[str, Any]:
    t5 = _parts.t5_tokenizer(tokens=112)  # more than the CLIPs read of a prompt, as in the released model
    return {
        "scheduler": _parts.flow_euler(shift=3.0),
        "vae": _parts.vae(scaling_factor=1.5305, shift_factor=0.0609, quant_conv=False),
        **_parts.clip_pair(_parts.clip_tokenizer(), 32, 48),
        "text_encoder_3": _parts.t5_text(t5, width=80),
        "tokenizer_3": t5,
    }
