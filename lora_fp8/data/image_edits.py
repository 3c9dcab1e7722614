"""Which images of a folder are left out of training, and how images are turned and cropped before it.

A folder's edits are in `.lora_fp8_images.toml` in the folder itself, so that they move with it; the image files stay as
they are. The file is written by the page, and may be written by hand:

    ["IMG_1.jpg"]
    exclude = true

    ["flowers/IMG_2.png"]
    rotate = 90                         # degrees clockwise: 90, 180 or 270
    crop = [0.1, 0.0, 0.9, 1.0]         # left, top, right, bottom of the turned image, as shares of its sides

Edits are applied where images are decoded, after the EXIF orientation. Everything else sees the edited image: sizes,
buckets, masks and control images, which are edited along, and the identity of an image, which names its cache entries.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ..common.reading import load_text
from ..errors import Message, UserError, UserErrors, about, reason

FILE = ".lora_fp8_images.toml"
MOST_BYTES = 16 * 2**20
"""Largest file of edits that is read."""
HEAD = "# Images that are left out of training, turned or cropped (lora_fp8). The image files stay as they are.\n"
SIDES = ("left", "top", "right", "bottom")
TURNS = {
    90: Image.Transpose.ROTATE_270,  # Pillow turns counterclockwise
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_90,
}

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as fractions of the image's width and height."""
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class ImageEdit:
    """What is done to one image. False if its pixels stay as they are.

    Attributes:
        exclude: leave it out of training.
        rotate: degrees clockwise: 0, 90, 180 or 270.
        crop: what is kept of the turned image.
    """

    exclude: bool = False
    rotate: int = 0
    crop: Box = WHOLE

    def __bool__(self) -> bool:
        return bool(self.rotate) or self.crop != WHOLE

    def apply(self, image: Image.Image) -> Image.Image:
        """Turn and crop an upright image."""
        if self.rotate:
            image = image.transpose(TURNS[self.rotate])
        return image if self.crop == WHOLE else image.crop(self._find_box(image.size))

    def _find_box(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return the crop in pixels of the turned image; at least one pixel is kept."""
        width, height = size
        left, top = (min(round(self.crop[i] * size[i]), size[i] - 1) for i in (0, 1))
        return left, top, max(left + 1, round(self.crop[2] * width)), max(top + 1, round(self.crop[3] * height))

    def turn(self, degrees: int) -> ImageEdit:
        """Return this edit with the edited image turned clockwise by 90, 180 or 270 degrees more."""
        left, top, right, bottom = self.crop
        crop = {
            90: (1 - bottom, left, 1 - top, right),
            180: (1 - right, 1 - bottom, 1 - left, 1 - top),
            270: (top, 1 - right, bottom, 1 - left),
        }[degrees]
        return replace(self, rotate=(self.rotate + degrees) % 360, crop=crop)

    def identify(self, sha256: str) -> str:
        """Return the identity of an edited image, from the SHA-256 of its file: the same, if no pixel is edited."""
        if not self:
            return sha256
        return hashlib.sha256(f"{sha256} {self.rotate} {self.crop}".encode()).hexdigest()


NOTHING = ImageEdit()


def read(folder: Path) -> dict[str, ImageEdit]:
    """Read the edits of a folder by relative name; {} if it has none.

    Raises:
        UserError: the file cannot be read, is not TOML, or has something else in it; all of it is named.
    """
    path = folder / FILE
    try:
        return parse(load_text(path, MOST_BYTES))
    except FileNotFoundError:
        return {}
    except UserErrors as error:
        raise UserErrors(error.problems, str(path)) from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(Message("{path}: cannot be read: {why}", path=path, why=why)) from None


def parse(text: str) -> dict[str, ImageEdit]:
    """Read edits from TOML.

    Raises:
        ValueError: it is no TOML.
        UserErrors: it has something in it that is no edit.
    """
    problems: list[str] = []
    edits = {}
    for name, table in tomllib.loads(text).items():
        try:
            edits[name] = read_edit(table)
        except ValueError as error:
            problems.append(about(repr(name), error))
    if problems:
        raise UserErrors(problems)
    return edits


def read_edit(table: Any) -> ImageEdit:
    """Read the edit of one image from its table in the list. Raises ValueError if something else is in it."""
    if not isinstance(table, dict) or (unknown := sorted(set(table) - {"exclude", "rotate", "crop"})):
        given = ", ".join(unknown) if isinstance(table, dict) else table
        raise ValueError(Message("'{given}' is not one of exclude, rotate and crop", given=given))
    exclude, rotate, crop = table.get("exclude", False), table.get("rotate", 0), table.get("crop", list(WHOLE))
    if not isinstance(exclude, bool):
        raise ValueError(Message("exclude is {given}; use true or false", given=repr(exclude)))
    if type(rotate) is not int or rotate not in (0, *TURNS):
        raise ValueError(Message("rotate is {given}; use 90, 180 or 270 (degrees clockwise)", given=repr(rotate)))
    numbers = isinstance(crop, list) and len(crop) == 4 and all(type(side) in (int, float) for side in crop)
    if not numbers or not all(math.isfinite(side) and 0 <= side <= 1 for side in crop) or not _has_area(crop):
        raise ValueError(
            Message(
                "crop is {given}; give four fractions of the image's width and height: [left, top, right, bottom], "
                "such as [0.1, 0.0, 0.9, 1.0]",
                given=repr(crop),
            )
        )
    left, top, right, bottom = map(float, crop)
    return ImageEdit(exclude, rotate, (left, top, right, bottom))


def _has_area(crop: list[float]) -> bool:
    return crop[0] < crop[2] and crop[1] < crop[3]


def list_settings(edit: ImageEdit) -> list[str]:
    """List what an edit sets, as lines of the list: ["exclude = true", "rotate = 90"]."""
    lines = ["exclude = true"] if edit.exclude else []
    lines += [f"rotate = {edit.rotate}"] if edit.rotate else []
    return lines + ([f"crop = {list(edit.crop)}"] if edit.crop != WHOLE else [])


def format_edits(edits: Mapping[str, ImageEdit]) -> str:
    """Return edits as TOML, sorted by name; those that do nothing are left out."""
    parts = [HEAD]
    for name, edit in sorted(edits.items()):
        if lines := list_settings(edit):
            key = json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")  # a JSON string is one of TOML
            parts.append("\n".join([f"[{key}]", *lines, ""]))
    return "\n".join(parts)
