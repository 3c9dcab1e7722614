"""What is measured of an image or video file, and where it is kept until the file changes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .. import settings
from ..common.messages import add_translations, restore
from ..common.writing import atomic_write
from ..errors import cannot_write
from . import decoding
from .image_edits import NOTHING, ImageEdit

FACTS_VERSION = 6
"""Increase it when `measure_pixels` or `decoding.light_of` changes: facts of other versions are measured again."""


@dataclass(frozen=True)
class Facts:
    """The facts about one image or video file. If `error` is not empty, nothing else is valid.

    Attributes:
        mode: Pillow's mode of the file.
        opacity: see `decoding.opacity_of`; for a mask, see `decoding.light_of`.
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
        "opacity": decoding.opacity_of(image, rgb),
        "orientation": int(image.getexif().get(0x0112, 1) or 1),
        "look": np.packbits(cells[:, 1:] < cells[:, :-1]).tobytes().hex(),
        "detail": round(detail, 2),
        "grey": round(float(cells.mean()), 2),
    }


def _facts(looked: decoding.Looked) -> Facts:
    if looked.error:
        return Facts(error=looked.error)
    known = {name: getattr(looked, name) for name in ("width", "height", "whole", "sha256", "format", "frames")}
    timeline = looked.timeline
    seconds = "" if timeline is None else str(timeline.end - timeline.starts[0])
    return Facts(**known, profile_problem=looked.profile_problem, seconds=seconds, **looked.measured)


def is_remembered(file: Path) -> bool:
    """Return True if the file is empty or begins as the `remember` files of `examine` do."""
    try:
        with open(file, "rb") as read:
            return read.read(len(_REMEMBERED)) in (_REMEMBERED, b"")
    except OSError:
        return False


_REMEMBERED = b'{"version": '


class Memory:
    """The measured facts of images and masks, which are kept until a file's size or modification time changes.

    Args:
        file: where the facts are kept between runs; None keeps nothing.
        section: max_pixels, background and frames are read.
        edits: how the images are turned and cropped.
    """

    def __init__(self, file: Path | None, section: settings.Dataset, edits: dict[Path, ImageEdit]) -> None:
        self.file, self.section, self.edits = file, section, edits
        self.kept: dict[str, Any] = {"version": FACTS_VERSION, "limits": [section.max_pixels, bool(section.frames)]}
        if file is not None:
            # A file that is missing, damaged or something else remembers nothing: all is measured again.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stored = json.loads(file.read_text(encoding="utf-8"))
                self.kept = stored if all(stored[key] == value for key, value in self.kept.items()) else self.kept

    def facts(
        self,
        kind: str,
        paths: Sequence[Path],
        measure: Callable[[Image.Image, Image.Image], Any],
        progress: Callable[[int, int], None] | None = None,
        edits: Mapping[Path, ImageEdit] | None = None,
    ) -> list[Facts]:
        """Return the facts of all files of one kind, in order; measure those that are not remembered.

        Args:
            kind: "pictures" or "masks"; a call replaces what is remembered of its kind.
            paths: all files of this kind.
            measure: see `decoding.look_all`; returns the fields of `Facts` that need pixels.
            progress: called with (files done, files in all).
            edits: of the files, if they are not the images.
        """
        edits = self.edits if edits is None else edits
        known = self.kept.get(kind, {})
        stamps = []
        for path in paths:
            try:
                status = path.stat()
                stamps.append([status.st_size, status.st_mtime_ns, edits.get(path, NOTHING).identify("")])
            except OSError:
                stamps.append([])
        facts: dict[int, Facts] = {}
        for index, (path, stamp) in enumerate(zip(paths, stamps, strict=True)):
            entry = known.get(str(path))
            if entry is not None and entry[0] == stamp:
                with contextlib.suppress(TypeError):
                    facts[index] = _recalled(restore(entry[1]))
        missing = [index for index in range(len(paths)) if index not in facts]
        done = len(facts)
        looks = decoding.look_all([paths[i] for i in missing], self.section, measure, edits)
        for index, looked in zip(missing, looks, strict=True):
            facts[index] = _facts(looked)
            done += 1
            if progress is not None:
                progress(done, len(paths))
        if missing:
            self.kept[kind] = {
                str(path): [stamps[i], add_translations(asdict(facts[i]))] for i, path in enumerate(paths)
            }
            self._save()
        return [facts[index] for index in range(len(paths))]

    def _save(self) -> None:
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.file, json.dumps(self.kept).encode())
        except OSError as error:
            raise cannot_write(self.file, error) from None

    def masks(
        self, paths: Sequence[Path], section: settings.Dataset, edits: Mapping[Path, ImageEdit]
    ) -> list[decoding.Looked]:
        """Decode masks as `mask_files.look_at_masks` does, with what is remembered of them."""
        facts = self.facts("masks", paths, lambda image, rgb: {"opacity": decoding.light_of(image, rgb)}, edits=edits)
        return [
            decoding.Looked(fact.error, fact.width, fact.height, fact.whole, fact.sha256, measured=fact.opacity)
            for fact in facts
        ]


def _recalled(kept: dict[str, Any]) -> Facts:
    width, height = kept["whole"]
    kept = kept | {"whole": (width, height)}
    if kept["opacity"] is None:
        return Facts(**kept)
    least, most, white = kept["opacity"]
    return Facts(**kept | {"opacity": decoding.Light(least, most, tuple(white))})
