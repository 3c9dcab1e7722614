"""The miniature of LTX-Video."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLLTXVideo

from . import _parts

CONFIG: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "caption_channels": 32,
    "num_layers": 2,
}
HW = (64, 96)


def make_parts() -> dict[str, Any]:
    tokenizer = _parts.t5_tokenizer()
    vae: Any = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        scaling_factor=0.8,
    )
    vae.latents_mean.normal_()
    vae.latents_std.uniform_(0.5, 2.0)
    return {
        "tokenizer": tokenizer,
        "text_encoder": _parts.t5_text(tokenizer),
        "vae": vae,
        "scheduler": _parts.flow_euler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    }
