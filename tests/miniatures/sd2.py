"""The miniature of Stable Diffusion 2."""

from __future__ import annotations

from typing import Any

from . import _ldm, _parts

CONFIG: dict[str, Any] = {
    **_ldm.CONFIG,
    "cross_attention_dim": 48,
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "upcast_attention": True,
}


def make_parts() -> dict[str, Any]:
    tokenizer = _parts.clip_tokenizer()
    return {
        "vae": _parts.vae(scaling_factor=0.18215, channels=_parts.QUARTER),
        "text_encoder": _parts.clip_text(tokenizer, width=48),
        "tokenizer": tokenizer,
        "scheduler": _parts.ddim(set_alpha_to_one=False, prediction_type="v_prediction"),
        **_ldm.UNCHECKED,
    }
