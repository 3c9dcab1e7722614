"""The miniature of Qwen-Image."""

from __future__ import annotations

from typing import Any

from . import _qwen

CONFIG: dict[str, Any] = _qwen.CONFIG


def make_parts() -> dict[str, Any]:
    vocab = _qwen.tokenizer()
    return {
        "scheduler": _qwen.scheduler(),
        "vae": _qwen.vae(),
        "text_encoder": _qwen.qwen25_vl(vocab),
        "tokenizer": vocab,
    }
