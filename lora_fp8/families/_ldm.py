"""The layout of Stable Diffusion's original (LDM, SGM) checkpoints, shared by the UNet families."""

from __future__ import annotations

from typing import Any

from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

from ._files import Header
from .base import Conversion

PREFIX = "model.diffusion_model."


def unet_shapes(header: Header) -> Header:
    """The UNet's part of a checkpoint, names without the prefix. Also takes files that hold a bare UNet."""
    if "input_blocks.0.0.weight" in header:
        return header
    return {key.removeprefix(PREFIX): shape for key, shape in header.items() if key.startswith(PREFIX)}


def unet_conversion(header: Header, unet_config: dict[str, Any]) -> Conversion:
    """Names in diffusers -> names in the file, from diffusers' own converter.

    That converter only moves values from one dict into another, so it is given the names as the values: no tensor has
    to be in memory.
    """
    bare = "input_blocks.0.0.weight" in header
    names = {PREFIX + key: PREFIX + key for key in unet_shapes(header)}
    moved = convert_ldm_unet_checkpoint(names, unet_config)
    return {new: (old.removeprefix(PREFIX) if bare else old, None) for new, old in moved.items()}
