"""The miniature of HunyuanVideo."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLHunyuanVideo

from lora_fp8.families.hunyuan_video import get_text_before_prompt

from . import _llama, _parts

CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": (4, 6, 6),
}
HW = (32, 48)


def make_parts() -> dict[str, Any]:
    # The template's longer words become one token each, so that it has about as many tokens as with Llama 3.
    known = [word for word in get_text_before_prompt().split() if len(word) > 3]
    llama, clip = _llama.tokenizer(known), _parts.clip_tokenizer()
    return {
        "text_encoder": _llama.text(llama, layers=3).model,
        "tokenizer": llama,
        "vae": AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(4, 4, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
        "scheduler": _parts.flow_euler(shift=7.0),
        "text_encoder_2": _parts.clip_text(clip),
        "tokenizer_2": clip,
    }
