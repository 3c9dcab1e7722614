"""Adapters (LoRA, DoRA, LoKr, LoHa, OFT) that are trained beside frozen layers.

What needs peft is imported when it is first used: importing peft takes two seconds, and neither checking a job nor
reading a LoRA file needs it.
"""

from typing import TYPE_CHECKING, Any

from .shapes import plan_tensors
from .targets import assign_ranks

if TYPE_CHECKING:
    from .injection import (
        DTYPES,
        FusedLora,
        InjectReport,
        copy_state,
        count_fused,
        disabled,
        find_adapted_layers,
        find_frozen_starts,
        inject,
        list_tensors,
        list_trained_parameters,
        load_frozen_starts_,
        load_state_,
        read_scalings,
    )

__all__ = [
    "DTYPES",
    "FusedLora",
    "InjectReport",
    "disabled",
    "find_frozen_starts",
    "inject",
    "load_frozen_starts_",
    "load_state_",
    "find_adapted_layers",
    "count_fused",
    "list_trained_parameters",
    "plan_tensors",
    "assign_ranks",
    "read_scalings",
    "copy_state",
    "list_tensors",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import injection

    return getattr(injection, name)
