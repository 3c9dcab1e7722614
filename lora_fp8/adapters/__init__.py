"""Adapters (LoRA, DoRA, LoKr, LoHa) that are trained beside frozen layers."""

from .injection import (
    DTYPES,
    FusedLora,
    InjectReport,
    disabled,
    frozen_starts,
    inject,
    load_frozen_starts_,
    load_state_,
    modules,
    num_fused,
    parameters,
    ranks,
    scalings,
    state,
    tensors,
)

__all__ = [
    "DTYPES",
    "FusedLora",
    "InjectReport",
    "disabled",
    "frozen_starts",
    "inject",
    "load_frozen_starts_",
    "load_state_",
    "modules",
    "num_fused",
    "parameters",
    "ranks",
    "scalings",
    "state",
    "tensors",
]
