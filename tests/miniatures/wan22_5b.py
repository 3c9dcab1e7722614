"""The miniature of Wan 2.2 TI2V-5B."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLWan

from lora_fp8.families.wan22_5b import VAE_MARKS

from . import wan

CONFIG: dict[str, Any] = {**wan.CONFIG, "in_channels": 48, "out_channels": 48}
HW = (64, 96)


def make_parts() -> dict[str, Any]:
    sizes = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 48, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
    folded = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
    scales = {"scale_factor_temporal": 4, "scale_factor_spatial": 16}
    return {**wan.make_parts(), "vae": AutoencoderKLWan(**sizes, **folded, **scales, **VAE_MARKS)}
