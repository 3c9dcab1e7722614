"""What the miniatures of Stable Diffusion 1 and 2 share."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 16,
}
UNCHECKED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
"""Parts of a Stable Diffusion 1 or 2 pipeline without a safety checker."""
