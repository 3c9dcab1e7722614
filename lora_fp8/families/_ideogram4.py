"""Parts of Ideogram 4 that are classes of torch: its distribution of timesteps, and a stand-in in its pipeline."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..objectives import FlowMatching


class Flow(FlowMatching):
    """Draws t as the pipeline places its steps: logit-normal around half the log of the pixels over 512 x 512."""

    deviation = 1.5  # the pipeline's scale

    def compute_model_shift(self, seq_len: int) -> float:
        return math.sqrt(seq_len / 1024)  # 512 x 512 pixels are 1024 tokens


class Unguided:
    """Replaces the pipeline's second transformer; at guidance 1 the pipeline multiplies its output by 0."""

    dtype = torch.float32

    def __call__(self, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor]:
        return (torch.zeros_like(hidden_states),)
