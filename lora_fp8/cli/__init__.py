"""The command line: `lora-fp8 <command>`."""

from .commands import app, main, run_program

__all__ = [
    "app",
    "main",
    "run_program",
]
