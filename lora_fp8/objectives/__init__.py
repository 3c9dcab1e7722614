"""Noise, targets and the loss of training: diffusion and flow matching."""

from .objective import PREDICTION_TYPES, Diffusion, FlowMatching, Objective

__all__ = [
    "Diffusion",
    "FlowMatching",
    "Objective",
    "PREDICTION_TYPES",
]
