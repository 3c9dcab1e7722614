"""What the doctor measures of an image or video file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from . import decoding
from .look_memory import Measure


@dataclass(frozen=True)
class Facts:
    """The facts about one image or video file. If `error` is not empty, nothing else is valid.

    Attributes:
        mode: Pillow's mode of the file.
        opacity: see `decoding.measure_opacity`; for a mask, see `decoding.measure_greys`.
        orientation: EXIF orientation, 1 to 8.
        look: the difference hash, as 64 hex digits.
        detail: variance of the Laplacian.
        grey: mean of the greys, 0 to 255.
        seconds: length of a clip, as a fraction; "" for an image.

    The others are as in `decoding.Looked`.
    """

    error: str = ""
    width: int = 0
    height: int = 0
    whole: tuple[int, int] = (0, 0)
    sha256: str = ""
    format: str = ""
    frames: int = 1
    profile_problem: str = ""
    mode: str = ""
    opacity: decoding.Light | None = None
    orientation: int = 1
    look: str = ""
    detail: float = 0.0
    grey: float = 0.0
    seconds: str = ""


def measure_pixels(image: Image.Image, rgb: Image.Image) -> dict[str, Any]:
    """Measure what needs the pixels: `image` is as stored in the file, `rgb` as it is trained."""
    grey = rgb.convert("L")
    cells = np.asarray(grey.resize((17, 16), Image.Resampling.BOX), dtype=np.int16)
    small = grey
    if grey.width * grey.height > 512**2:
        scale = (512**2 / (grey.width * grey.height)) ** 0.5
        small = grey.resize((max(3, round(grey.width * scale)), max(3, round(grey.height * scale))), 3)
    values = np.asarray(small, dtype=np.float32)
    detail = 0.0
    if min(values.shape) >= 3:
        middle = values[1:-1, 1:-1]
        laplacian = 4 * middle - values[:-2, 1:-1] - values[2:, 1:-1] - values[1:-1, :-2] - values[1:-1, 2:]
        detail = float(laplacian.var())
    return {
        "mode": image.mode,
        "opacity": decoding.measure_opacity(image, rgb),
        "orientation": int(image.getexif().get(0x0112, 1) or 1),
        "look": np.packbits(cells[:, 1:] < cells[:, :-1]).tobytes().hex(),
        "detail": round(detail, 2),
        "grey": round(float(cells.mean()), 2),
    }


PIXELS = Measure("pixels", 6, measure_pixels)


def to_facts(looked: decoding.Looked) -> Facts:
    """Return the facts of a file that was decoded with `PIXELS`."""
    if looked.error:
        return Facts(error=looked.error)
    known = {name: getattr(looked, name) for name in ("width", "height", "whole", "sha256", "format", "frames")}
    timeline = looked.timeline
    seconds = "" if timeline is None else str(timeline.end - timeline.starts[0])
    return Facts(**known, profile_problem=looked.profile_problem, seconds=seconds, **looked.measured)
