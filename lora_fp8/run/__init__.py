"""The run folder, the only interface between the trainer and everything that watches it."""

from .folder import REFUSED, Run, Unreadable
from .signals import StopSignal

__all__ = [
    "REFUSED",
    "Run",
    "StopSignal",
    "Unreadable",
]
