"""The miniature of FLUX.2-dev."""

from __future__ import annotations

from typing import Any

from transformers import Mistral3ForConditionalGeneration

from . import _flux2, _mistral, _parts

CONFIG: dict[str, Any] = {**_flux2.CONFIG, "guidance_embeds": True}


def make_parts() -> dict[str, Any]:
    tokenizer = _mistral.tokenizer(128)  # the system message takes 42 of them
    text = _mistral.mistral3(tokenizer, num_layers=30)
    return {
        "scheduler": _parts.flow_euler(use_dynamic_shifting=True, shift=3.0),
        "vae": _flux2.vae(),
        "text_encoder": Mistral3ForConditionalGeneration(text),
        "tokenizer": tokenizer,
    }
