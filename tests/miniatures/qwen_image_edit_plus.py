"""The miniature of Qwen-Image-Edit-Plus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import _qwen, _qwen_edit
from ._qwen_edit import make_parts, wake_

__all__ = ["CONFIG", "make_parts", "save", "wake_"]

CONFIG: dict[str, Any] = {**_qwen.CONFIG, "zero_cond_t": True}


def save(parts: dict[str, Any], folder: Path) -> None:
    _qwen_edit.save("qwen_image_edit_plus", parts, folder)
