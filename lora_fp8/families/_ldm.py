"""What the UNet families share: the layout of the original (LDM, SGM) checkpoints, and the adapter targets."""

from __future__ import annotations

from ._files import Header, checkpoint_prefix, native_header
from .base import Conversion, ModelFamily

# All linears and projections inside the Transformer2DModels, as in kohya's sd-scripts.
ADAPTER_TARGETS = (
    *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
    *("ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
)
KEEP_PRECISE = ("time_embedding", "time_emb_proj", "conv_in", "conv_out", "conv_norm_out")
PREFIX = "model.diffusion_model."


def convert_checkpoint(family: ModelFamily, header: Header) -> Conversion:
    """Return the names in diffusers -> names in the file, by diffusers' own converter.

    That converter only moves values between dicts, so it is given names as values and no tensor has to be in memory.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    prefix = checkpoint_prefix(header)
    names = {PREFIX + key: prefix + key for key in native_header(header)}
    moved = convert_ldm_unet_checkpoint(names, {"layers_per_block": 2, **family.denoiser_config()})
    return {new: (old, None) for new, old in moved.items()}
