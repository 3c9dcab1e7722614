"""The miniature of Stable Diffusion 1.5."""

from __future__ import annotations

from typing import Any

from . import _ldm, _parts

CONFIG: dict[str, Any] = {**_ldm.CONFIG, "cross_attention_dim": 32, "attention_head_dim": 2}


def make_parts() -> dict[str, Any]:
    tokenizer = _parts.clip_tokenizer()
    return {
        "vae": _parts.vae(scaling_factor=0.18215, channels=_parts.QUARTER),
        "text_encoder": _parts.clip_text(tokenizer),
        "tokenizer": tokenizer,
        "scheduler": _parts.ddim(),
        **_ldm.UNCHECKED,
    }
