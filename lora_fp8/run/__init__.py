"""The run folder, the only interface between the trainer and everything that watches it."""

from .folder import Run, Unreadable
from .signals import StopSignal

__all__ = [
    "Run",
    "StopSignal",
    "Unreadable",
]
