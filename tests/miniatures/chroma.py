"""The miniature of Chroma1."""

from __future__ import annotations

from typing import Any

from . import _flux, _parts

CONFIG: dict[str, Any] = {
    **_flux.CONFIG,
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 128,
    "approximator_layers": 2,
}


def make_parts() -> dict[str, Any]:
    t5 = _parts.t5_tokenizer()
    return {
        "scheduler": _parts.flow_euler(use_dynamic_shifting=True, shift=3.0),
        "vae": _parts.flux_vae(),
        "text_encoder": _parts.t5_text(t5, width=48),
        "tokenizer": t5,
    }
