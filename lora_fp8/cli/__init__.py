"""The command line: `lora-fp8 <command>`."""

from .commands import app, main

__all__ = [
    "app",
    "main",
]
