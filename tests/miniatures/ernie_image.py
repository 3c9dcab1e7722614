"""The miniature of ERNIE-Image."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Mistral3Model

from . import _flux2, _mistral, _parts

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_layers": 3,
    "ffn_hidden_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_in_dim": 16,
    "rope_axes_dim": (4, 6, 6),
}


def wake_(denoiser: Any) -> None:
    for zeros in (denoiser.adaLN_modulation[-1], denoiser.final_linear):
        nn.init.normal_(zeros.weight, std=0.2)


def make_parts() -> dict[str, Any]:
    tokenizer = _mistral.tokenizer(64)
    return {
        "vae": _flux2.vae(),
        "text_encoder": Mistral3Model(_mistral.mistral3(tokenizer, num_layers=2)),
        "tokenizer": tokenizer,
        "scheduler": _parts.flow_euler(shift=4.0),
    }
