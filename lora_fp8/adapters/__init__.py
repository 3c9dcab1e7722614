"""Adapters (LoRA, DoRA, LoKr, LoHa, OFT) that are trained beside frozen layers.

What needs peft is imported when it is first used: importing peft takes two seconds, and neither checking a job nor
reading a LoRA file needs it.
"""

from typing import TYPE_CHECKING, Any

from .shapes import plan_tensors
from .targets import ranks

if TYPE_CHECKING:
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
    "plan_tensors",
    "ranks",
    "scalings",
    "state",
    "tensors",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import injection

    return getattr(injection, name)
