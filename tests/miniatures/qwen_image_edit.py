"""The miniature of Qwen-Image-Edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import _qwen, _qwen_edit
from ._qwen_edit import make_parts, wake_

__all__ = ["CONFIG", "make_parts", "save", "wake_"]

CONFIG: dict[str, Any] = _qwen.CONFIG


def save(parts: dict[str, Any], folder: Path) -> None:
    _qwen_edit.save("qwen_image_edit", parts, folder)
