"""The folder is the registry: one file = one architecture. `README.md` beside this file says how to add one.

Nothing here imports torch, so that a settings form or `--help` can list the families in a blink.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING

from lora_fp8.config import UserError

if TYPE_CHECKING:
    from .base import ModelFamily


def available() -> list[str]:
    """Names of the families, read from the folder without importing any of them."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base" and not m.name.startswith("_"))


def get(name: str) -> type[ModelFamily]:
    """The class `Family` of the file `name`.py; imports that one file.

    Raises:
        UserError: there is no such file.
    """
    names = available()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"model.family = {name!r} is not known{hint}; available: {', '.join(names)}")
    return importlib.import_module(f"{__name__}.{name}").Family
