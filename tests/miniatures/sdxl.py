"""The miniature of Stable Diffusion XL."""

from __future__ import annotations

from typing import Any

from diffusers import EulerDiscreteScheduler

from . import _parts

CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "norm_num_groups": 16,
    "cross_attention_dim": 32 + 48,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 16,
    "projection_class_embeddings_input_dim": 6 * 16 + 32,
}


def make_parts() -> dict[str, Any]:
    tokenizer = _parts.clip_tokenizer()
    return {
        "vae": _parts.vae(scaling_factor=0.13025, channels=_parts.QUARTER),
        "text_encoder": _parts.clip_text(tokenizer),
        "tokenizer": tokenizer,
        "text_encoder_2": _parts.clip_text(tokenizer, width=48, projection=32),
        "tokenizer_2": tokenizer,
        "scheduler": EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        "add_watermarker": False,
    }
