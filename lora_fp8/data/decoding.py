"""From an image file to upright RGB pixels, and what else a look at all of it tells.

`open_image` turns any supported file into upright RGB pixels. The rules, where a plain `convert("RGB")` would be wrong:

* EXIF orientation is applied (all eight). Sizes in an `Example` are those of the upright image.
* Transparency of every kind (RGBA, LA, palettes, a transparent colour) is composited on the background colour.
* 16-bit greys are scaled by 255/65535; Pillow itself clips at 255. The same for 32-bit integers that hold 16-bit
  values.
* Floating-point greys: 0..1 is the full range if nothing exceeds 1; else 0..255 up to 255, else 0..65535. Values
  between 1 and 2 only would be ambiguous (overexposed, or nearly black), and values outside are no picture: both are
  refused.
* An embedded colour profile is applied, so that Display P3, Adobe RGB and CMYK become the sRGB that they look like
  (`colour`). One that cannot be used is a warning, and the image is read without it.
* Other CMYK, YCbCr, LAB and 1-bit images are converted by Pillow (which undoes Adobe's inverted CMYK).

`look_all` decodes files completely and tells what each is; what goes wrong is said in words that follow a file's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import warnings as python_warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageOps

from lora_fp8 import config
from lora_fp8.data import clips
from lora_fp8.data.colour import ProfileError, to_srgb

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
EXTENSIONS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".gif": "GIF",
    ".avif": "AVIF",
}
ANIMATIONS = ("GIF", "WEBP", "PNG")
"""Formats whose several frames are a clip and not pages."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of a picture's sides."""

Measure = Callable[[Image.Image, Image.Image], Any]

BLACK = 2
"""The brightest grey of a mask that is black all over: one that was saved as numbers, 0 and 1, is."""


class ImageError(ValueError):
    """An image that cannot be used; the message says why, without the file's name."""


@dataclass(frozen=True)
class Looked:
    """One image file as decoded: `error` is empty when it can be used, the rest is valid only then."""

    error: str = ""
    width: int = 0
    height: int = 0
    sha256: str = ""
    format: str = ""
    frames: int = 1
    converted: bool = False
    profile_problem: str = ""
    measured: Any = None
    timeline: clips.Timeline | None = None
    """of a clip"""


class Light(NamedTuple):
    """Of a mask's greys, or a picture's opacity: the least and most, 0 to 255, and the box of all but the black."""

    least: int
    most: int
    white: Box


def look_all(paths: Sequence[Path], section: config.Dataset, measure: Measure | None = None) -> Iterator[Looked]:
    """Decode files, several at a time, and tell what each is, in order; the arguments are those of `_look`."""
    with _no_bomb_check(), python_warnings.catch_warnings():
        # Pillow's remarks about odd metadata; what matters is reported here.
        python_warnings.simplefilter("ignore")
        # Decoding leaves Python's lock, and map keeps the order. Few at a time: each holds a whole image in memory.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            yield from pool.map(lambda path: _look(path, section, measure), paths)


def _look(path: Path, section: config.Dataset, measure: Measure | None = None) -> Looked:
    """Decode one file completely (a truncated file shows only then) and hash its bytes.

    Args:
        path: the file.
        section: max_pixels, background and frames are read.
        measure: is given the image as it is in the file and as upright RGB; its answer is `measured`.
    """
    if path.suffix.lower() in clips.VIDEOS:
        return _look_at_video(path, section, measure)
    try:
        raw = path.read_bytes()
    except OSError as error:
        return Looked(f"cannot be read: {error.strerror}")
    if not raw:
        return Looked("is empty (0 bytes)")
    try:
        with _opened(io.BytesIO(raw)) as image:
            if image.width * image.height > section.max_pixels:
                return Looked(
                    f"has {image.width} x {image.height} = {image.width * image.height:,} pixels, "
                    f"more than dataset.max_pixels = {section.max_pixels:,}"
                )
            # Phones write JPEGs with a second picture inside (MPO): a preview or depth map, no animation.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            format = "JPEG" if image.format == "MPO" else image.format or ""
            rgb, converted, problem = _upright_rgb(image, section.background)
            measured = measure(image, rgb) if measure else None
            timeline = _timeline(image) if section.frames and frames > 1 and format in ANIMATIONS else None
    except ImageError as error:
        return Looked(f"{error} ({_beginning(raw)})" if "not a readable" in str(error) else str(error))
    known = hashlib.sha256(raw).hexdigest(), format, frames, converted, problem, measured, timeline
    return Looked("", *rgb.size, *known)


def _beginning(raw: bytes) -> str:
    """What a file that is no image begins with, often a page of HTML that was saved in its place."""
    text = raw[:12].decode("ascii", "replace").strip()
    if text.isprintable() and text and "\ufffd" not in text:
        return f'it begins with "{text}"'
    return f"its first bytes are {raw[:8].hex(' ')}"


def _look_at_video(path: Path, section: config.Dataset, measure: Measure | None) -> Looked:
    try:
        timeline, first = clips.look(path, section.max_pixels)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return Looked(f"cannot be read: {error.strerror}")
    except clips.ClipError as error:
        return Looked(f"{error} (dataset.max_pixels)" if isinstance(error, clips.TooLarge) else str(error))
    measured = measure(first, first) if measure else None
    return Looked("", *first.size, sha256, "", len(timeline.starts), measured=measured, timeline=timeline)


def open_image(source: str | Path | BinaryIO, background: str = "#ffffff") -> Image.Image:
    """Decode an image file into upright RGB (the first frame if there are several).

    Args:
        source: a path or a binary file object.
        background: colour under transparent pixels, "#rrggbb".

    Raises:
        ImageError: not an image of a supported format, damaged, or with values that have no agreed meaning.
    """
    with _no_bomb_check(), _opened(source) as image:
        return _upright_rgb(image, background).rgb


def open_mask(source: str | Path | BinaryIO, alpha: bool = False) -> Image.Image:
    """Decode a mask into upright greys (mode L): 255 is trained in full, 0 is outside.

    Args:
        source: as of `open_image`.
        alpha: the transparency is the mask, and not what is seen.

    Raises:
        ImageError: as `open_image`.
    """
    with _no_bomb_check(), _opened(source) as image:
        image.load()
        return _mask_in(ImageOps.exif_transpose(image), alpha)


def opacity_of(image: Image.Image, rgb: Image.Image) -> Light | None:
    """A measure for `look_all`: the opacity of the upright picture, if it has any."""
    opacity = _eight_bits(ImageOps.exif_transpose(image))[1]
    return None if opacity is None else _light(opacity)


def light_of(image: Image.Image, rgb: Image.Image) -> Light:
    """A measure for `look_all`: the greys of the upright mask."""
    return _light(_mask_in(ImageOps.exif_transpose(image)))


def read_clip(path: Path, numbers: Sequence[int], background: str) -> list[Image.Image]:
    """The frames of a clip with these numbers (not decreasing) as upright RGB pictures.

    Raises:
        ImageError, clips.ClipError: it cannot be decoded, or has fewer frames.
    """
    if path.suffix.lower() in clips.VIDEOS:
        return clips.read(path, numbers)
    found: dict[int, Image.Image] = {}
    with _no_bomb_check(), _opened(path) as image:
        for number in numbers:
            if number not in found:
                image.seek(number)
                found[number] = _upright_rgb(image, background).rgb
    return [found[number] for number in numbers]


def _light(greys: Image.Image) -> Light:
    least, most = greys.getextrema()
    box = greys.point([255 * (grey > BLACK) for grey in range(256)]).getbbox() or (0, 0, 0, 0)
    return Light(least, most, tuple(at / side for at, side in zip(box, greys.size * 2, strict=True)))


def _mask_in(image: Image.Image, alpha: bool = False) -> Image.Image:
    seen, opacity = _eight_bits(image)
    if alpha:
        return Image.new("L", image.size, 255) if opacity is None else opacity
    grey = seen if seen.mode == "L" else seen.convert("RGB").convert("L")
    return grey if opacity is None else ImageChops.multiply(grey, opacity)


def _timeline(image: Image.Image) -> clips.Timeline:
    """When the frames of an animation are shown, all of which are decoded."""
    starts, now = [], Fraction(0)
    for number in range(image.n_frames):
        image.seek(number)
        image.load()
        starts.append(now)
        now += Fraction(image.info.get("duration") or 0) / 1000
    if starts[-1] == now or len(set(starts)) < len(starts):
        raise ImageError("has frames that are shown for no time; save it with a duration for each")
    return clips.Timeline(tuple(starts), now)


@contextlib.contextmanager
def _no_bomb_check() -> Iterator[None]:
    """Lift Pillow's own pixel cap: `dataset.max_pixels`, checked before decoding, is the one that counts."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


class _Decoded(NamedTuple):
    """Upright RGB pixels, whether a colour profile changed them, and what is wrong with the profile, if anything."""

    rgb: Image.Image
    converted: bool
    profile_problem: str


@contextlib.contextmanager
def _opened(source: str | Path | BinaryIO) -> Iterator[Image.Image]:
    """The image with only its header read. Whatever goes wrong in the block becomes an ImageError in plain words."""
    try:
        with Image.open(source, formats=FORMATS) as image:
            yield image
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError("is not a readable image") from None
    except MemoryError:
        raise ImageError("does not fit into memory when decoded") from None
    # Decoders of damaged files raise OSError, SyntaxError, ValueError, struct.error, EOFError and more.
    except Exception as error:
        raise ImageError(f"cannot be decoded: {str(error) or type(error).__name__}") from error


def _upright_rgb(image: Image.Image, background: str) -> _Decoded:
    image.load()
    embedded = "icc_profile" in image.info
    profile = image.info.get("icc_profile")
    image, alpha = _eight_bits(ImageOps.exif_transpose(image))
    rgb, converted, problem = None, False, ""
    if embedded:
        try:
            rgb, converted = to_srgb(image, profile)
        except ProfileError as error:
            problem = str(error)
    if rgb is None:
        rgb = image.convert("RGB")
    if alpha is not None:
        rgb.putalpha(alpha)
        rgb = Image.alpha_composite(Image.new("RGBA", rgb.size, background), rgb).convert("RGB")
    return _Decoded(rgb, converted, problem)


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """The picture with 8 bits per channel, in mode L, RGB, CMYK or LAB, and its transparency (L) if it has any."""
    mode = image.mode
    if mode.startswith("I;16"):
        return _grey(image, np.asarray(image).astype(np.float64) * (255 / 65535))
    if mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(f"has 32-bit values {values.min()}..{values.max()}; save it with 8 or 16 bits per channel")
        return _grey(image, values * (255 / 65535))
    if mode == "F":
        return _grey(image, np.asarray(image).astype(np.float64) * _float_scale(image))
    if mode == "La":
        image = image.convert("LA")
    if mode in ("RGBA", "LA", "La", "RGBa", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        grey = mode in ("L", "LA", "La", "1")
        return image.getchannel("R") if grey else image.convert("RGB"), image.getchannel("A")
    if mode in ("L", "1"):
        return image.convert("L"), None
    return image if mode in ("CMYK", "LAB") else image.convert("RGB"), None


def _float_scale(image: Image.Image) -> float:
    """Factor from the values of a floating-point image to 0..255; see the module's docstring."""
    values = np.asarray(image)
    if not np.isfinite(values).all():
        raise ImageError("has floating-point values that are not finite")
    low, high = float(values.min()), float(values.max())
    if low < 0 or 1 < high <= 2 or high > 65535:
        raise ImageError(f"has floating-point values {low:g}..{high:g}; save it with 8 or 16 bits per channel")
    return 255.0 if high <= 1 else 1.0 if high <= 255 else 255 / 65535


def _grey(image: Image.Image, grey_HW: np.ndarray) -> tuple[Image.Image, Image.Image | None]:
    """Grey values 0..255 as mode L; of a transparent grey (PNG's tRNS, in the file's own units) the transparency."""
    transparent = image.info.get("transparency")
    alpha = None
    if isinstance(transparent, int):
        alpha = Image.fromarray(np.where(np.asarray(image) == transparent, 0, 255).astype(np.uint8))
    return Image.fromarray(np.rint(grey_HW).astype(np.uint8)), alpha
