"""The layout of Stable Diffusion's original (LDM, SGM) checkpoints, shared by the UNet families."""

from __future__ import annotations

from typing import Any

from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

from ._files import Header, checkpoint_prefix, native_header
from .base import Conversion

PREFIX = "model.diffusion_model."


def unet_conversion(header: Header, unet_config: dict[str, Any]) -> Conversion:
    """Names in diffusers -> names in the file, from diffusers' own converter.

    That converter only moves values from one dict into another, so it is given the names as the values: no tensor has
    to be in memory.
    """
    prefix = checkpoint_prefix(header)
    names = {PREFIX + key: prefix + key for key in native_header(header)}
    moved = convert_ldm_unet_checkpoint(names, unet_config)
    return {new: (old, None) for new, old in moved.items()}
