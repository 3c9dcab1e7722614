"""The VAE of FLUX.2 and the sizes of its transformer, in miniature."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLFlux2

CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 3 * 16,  # three layers' hidden states side by side
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def vae() -> AutoencoderKLFlux2:
    """Return a VAE that halves the image sides, whose latent statistics differ from those of a new batch norm."""
    made: Any = AutoencoderKLFlux2(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    made.bn.running_mean.normal_()
    made.bn.running_var.uniform_(0.3, 3.0)
    made.bn.running_var[0] = 0.001  # so small that a wrong epsilon shows
    return made
