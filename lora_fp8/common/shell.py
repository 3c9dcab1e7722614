"""Writes commands that a person copies from a message."""

import shlex
from pathlib import Path


def quote_path(path: str | Path) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(str(path))
