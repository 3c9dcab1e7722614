"""The miniature of Sana."""

from __future__ import annotations

from typing import Any

from diffusers import DPMSolverMultistepScheduler

from lora_fp8.families.sana import get_text_before_prompt

from . import _gemma, _parts

CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 64,
    "caption_channels": 32,
    "sample_size": 32,
}
HW = (32, 64)


def make_parts() -> dict[str, Any]:
    tokenizer = _gemma.tokenizer(get_text_before_prompt())
    return {
        "tokenizer": tokenizer,
        "text_encoder": _gemma.text(tokenizer),
        "vae": _parts.deep_vae(scaling_factor=0.41407),
        "scheduler": DPMSolverMultistepScheduler(
            flow_shift=3.0,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            algorithm_type="dpmsolver++",
            solver_order=2,
            final_sigmas_type="zero",
        ),
    }
