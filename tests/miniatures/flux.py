"""The miniature of FLUX.1."""

from __future__ import annotations

from typing import Any

from . import _flux, _parts

CONFIG: dict[str, Any] = {**_flux.CONFIG, "pooled_projection_dim": 32, "guidance_embeds": True}


def make_parts() -> dict[str, Any]:
    clip, t5 = _parts.clip_tokenizer(), _parts.t5_tokenizer()
    return {
        "scheduler": _parts.flow_euler(use_dynamic_shifting=True, shift=3.0),
        "vae": _parts.flux_vae(channels=_parts.QUARTER),
        "text_encoder": _parts.clip_text(clip),
        "tokenizer": clip,
        "text_encoder_2": _parts.t5_text(t5, width=48),
        "tokenizer_2": t5,
    }
