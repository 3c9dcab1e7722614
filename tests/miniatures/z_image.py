"""The miniature of Z-Image."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import _parts, _qwen

CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6],
    "axes_lens": [256, 64, 64],
}


def wake_(denoiser: Any) -> None:
    for token in (denoiser.x_pad_token, denoiser.cap_pad_token):
        nn.init.normal_(token)


def make_parts() -> dict[str, Any]:
    vocab = _qwen.tokenizer()
    return {
        "scheduler": _parts.flow_euler(shift=6.0),
        "vae": _parts.flux_vae(),
        "text_encoder": _qwen.qwen3_text(vocab),
        "tokenizer": vocab,
    }
