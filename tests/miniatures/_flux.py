"""Sizes that the miniatures of FLUX.1 and Chroma1 share."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 6, 6),
}
