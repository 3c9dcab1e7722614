"""Decode image files into upright RGB pixels, and check every file of a dataset.

`open_image` turns any supported file into upright RGB pixels. Where a plain `convert("RGB")` would be wrong:

* EXIF orientation is applied (all eight). Sizes in an `Example` are those of the upright image.
* Transparency of every kind (RGBA, LA, palettes, a transparent colour) is composited on the background colour.
* 16-bit greys are scaled by 255/65535, as Pillow itself clips them at 255. So are 32-bit integers, which must hold
  16-bit values.
* Floating-point greys are scaled by their maximum: 0..1 is the full range if nothing exceeds 1; else 0..255 up to 255,
  else 0..65535. Two cases are refused: a maximum between 1 and 2, which is ambiguous (overexposed, or nearly black),
  and values outside these ranges.
* An embedded colour profile is applied, so that Display P3, Adobe RGB and CMYK become the sRGB that looks the same
  (`colour`). If the profile cannot be used, the image is read without it, with a warning.
* Other CMYK, YCbCr, LAB and 1-bit images are converted by Pillow (which undoes Adobe's inverted CMYK).

`inspect_all` decodes files completely and describes each. Its error messages are phrased to follow the file's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import threading
import warnings as python_warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from PIL import Image, ImageChops, ImageOps

from .. import settings
from ..common.reading import open_regular, read_rest
from ..errors import Message, reason
from . import clips
from .colour import ProfileError, to_srgb
from .image_edits import NOTHING, Box, ImageEdit

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
HEIC_EXTENSIONS = (".heic", ".heif", ".hif")
EMPTY = Message("the file is empty (0 bytes)")
NOT_READABLE = Message("this is not a readable image")
HEIC_NEEDED = Message(
    "this is a HEIC file, which needs pillow-heif; install it: pip install 'lora-fp8[heic]', or convert it to JPEG "
    "or PNG"
)


def can_read_heic() -> bool:
    """Return True if pillow-heif is installed, which reads the photos of iPhones and of some cameras."""
    return importlib.util.find_spec("pillow_heif") is not None


EXTENSIONS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jfif": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".gif": "GIF",
    ".avif": "AVIF",
    **(dict.fromkeys(HEIC_EXTENSIONS, "HEIF") if can_read_heic() else {}),
}
ANIMATIONS = ("GIF", "WEBP", "PNG")
"""Formats in which several frames are a clip, not pages."""

Measure = Callable[[Image.Image, Image.Image], Any]

BT709, UNNAMED, SMALL = 1, 2, (5, 6, 7)
"""Colour primaries (ITU-T H.273): those of sRGB, none, and those of old television, which are almost the same."""

BLACK = 2
"""Brightest grey of a mask that counts as black all over. It includes masks saved with the class numbers 0 and 1."""


class ImageError(ValueError):
    """An image that cannot be used; the message says why, without the file's name."""


class NoImage(ImageError):
    """A file that is no image of a supported format."""


@dataclass(frozen=True)
class Looked:
    """What decoding one image file found. `error` is empty if the file can be used; the rest is valid only then.

    Attributes:
        width, height: pixels of the upright image, turned and cropped by its edit.
        whole: width and height before the edit.
        sha256: identity of the image: the SHA-256 of the file's bytes; of an edited image, of its edit too.
    """

    error: str = ""
    width: int = 0
    height: int = 0
    whole: tuple[int, int] = (0, 0)
    sha256: str = ""
    format: str = ""
    frames: int = 1
    converted: bool = False
    profile_problem: str = ""
    measured: Any = None
    timeline: clips.Timeline | None = None
    """Times of the frames; None unless the file is a clip."""


class Light(NamedTuple):
    """Range of a mask's greys or an image's opacity, 0 to 255, and the box around everything that is not black."""

    least: int
    most: int
    white: Box


class _InFlight:
    """Limits how many pixels are decoded at once, and so the memory that decoding takes.

    An image with more pixels than the limit is decoded alone.
    """

    def __init__(self, most: int):
        self.most, self.now = most, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for this many pixels, and reserve it while the block runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self.now or self.now + pixels <= self.most)
            self.now += pixels
        try:
            yield
        finally:
            with self._changed:
                self.now -= pixels
                self._changed.notify_all()


PIXELS_IN_FLIGHT = 1 << 26
"""Pixels that all threads of a process decode at once; with transparency, a pixel takes about 20 bytes at the peak."""
MOST_IMAGE = 1 << 29
"""Largest image file, in bytes. `dataset.max_pixels` take less, even uncompressed with 16 bits per channel."""
_in_flight = _InFlight(PIXELS_IN_FLIGHT)


def inspect_all(
    paths: Sequence[Path],
    section: settings.Dataset,
    measure: Measure | None = None,
    edits: Mapping[Path, ImageEdit] | None = None,
) -> Iterator[Looked]:
    """Decode files, several at a time, and yield what each is, in order. The arguments are those of `_inspect_file`."""
    of_path = edits or {}
    with _no_bomb_check(), python_warnings.catch_warnings():
        # Pillow warns about odd metadata; what matters is reported here.
        python_warnings.simplefilter("ignore")
        # Decoding releases the GIL, and map keeps the order. Few at a time: each holds a whole image in memory.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            yield from pool.map(lambda path: _inspect_file(path, section, measure, of_path.get(path, NOTHING)), paths)


def _inspect_file(path: Path, section: settings.Dataset, measure: Measure | None, edit: ImageEdit) -> Looked:
    """Decode one file completely (a truncated file is noticed only then) and hash its bytes.

    Args:
        path: the file.
        section: max_pixels, background and frames are read.
        measure: called with the image as stored (upright if it is edited) and as upright RGB, both edited; the result
            becomes `measured`.
        edit: how the image is turned and cropped.
    """
    if path.suffix.lower() in clips.VIDEOS:
        return _inspect_video(path, section, measure, edit)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return Looked(EMPTY)
            beginning = file.read(12)
            file.seek(0)
            try:
                with _opened(file) as image:
                    width, height = image.size
            except ImageError as error:
                return Looked(_describe_beginning(beginning) if isinstance(error, NoImage) else str(error))
            if width * height > section.max_pixels:
                return Looked(clips.describe_too_large(width, height, section.max_pixels))
            # A file of few pixels may still be large, and its bytes are in memory too.
            with _in_flight.hold(width * height + size // 16):
                file.seek(0)
                return _inspect_image(read_rest(file, MOST_IMAGE), section, measure, edit)
    except OSError as error:
        return Looked(clips.CANNOT_BE_READ(why=reason(error)))


def _inspect_image(raw: bytes, section: settings.Dataset, measure: Measure | None, edit: ImageEdit) -> Looked:
    """Decode an image, as `_inspect_file` does, from the bytes of a file whose size in pixels was accepted."""
    try:
        with _opened(io.BytesIO(raw)) as image:
            # Phones write JPEGs with a second image inside (MPO): a preview or depth map, not an animation.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            format = "JPEG" if image.format == "MPO" else image.format or ""
            image.load()
            upright = ImageOps.exif_transpose(image) if edit else image
            edited = edit.apply(upright)
            rgb, converted, problem = _convert_to_rgb(edited, section.background)
            whole = upright.size if edit else rgb.size
            measured = measure(edited, rgb) if measure else None
            timeline = _read_timeline(image) if section.frames and frames > 1 and format in ANIMATIONS else None
    except ImageError as error:
        return Looked(str(error))
    sha256 = edit.identify(hashlib.sha256(raw).hexdigest())
    return Looked("", *rgb.size, whole, sha256, format, frames, converted, problem, measured, timeline)


HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""Brands of HEIF files. Of all HEIF files, Pillow itself reads only AVIF."""


def _describe_beginning(raw: bytes) -> str:
    """Describe the first bytes of a file that is not an image; often it is an HTML page saved in the image's place."""
    if raw[4:8] == b"ftyp" and raw[8:12] in HEIC and not can_read_heic():
        return HEIC_NEEDED
    text = raw[:12].decode("ascii", "replace").strip()
    if text.isprintable() and text and "\ufffd" not in text:
        return Message('this is not a readable image (it begins with "{text}")', text=text)
    return Message("this is not a readable image (its first bytes are {bytes})", bytes=raw[:8].hex(" "))


def _inspect_video(path: Path, section: settings.Dataset, measure: Measure | None, edit: ImageEdit) -> Looked:
    try:
        with open_regular(path) as file:
            timeline, first = clips.decode_video(path, section.max_pixels)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return Looked(clips.CANNOT_BE_READ(why=reason(error)))
    except clips.TooLarge as error:
        return Looked(clips.describe_too_large(*error.size, section.max_pixels))
    except clips.ClipError as error:
        return Looked(str(error))
    edited = edit.apply(first)
    measured = measure(edited, edited) if measure else None
    identity, frames = edit.identify(sha256), len(timeline.starts)
    return Looked("", *edited.size, first.size, identity, frames=frames, measured=measured, timeline=timeline)


def find_format(raw: bytes) -> str:
    """Return Pillow's name of an image's format from its header. Raises ImageError if it is no image that is read."""
    with _opened(io.BytesIO(raw)) as image:
        return image.format or ""


def open_image(source: str | Path | BinaryIO, background: str = "#ffffff", edit: ImageEdit = NOTHING) -> Image.Image:
    """Decode an image file into upright RGB (the first frame if it has several).

    Args:
        source: a path or a binary file object.
        background: colour under transparent pixels, "#rrggbb".
        edit: how the upright image is turned and cropped.

    Raises:
        ImageError: not an image of a supported format, damaged, or with values that have no agreed meaning.
    """
    with _no_bomb_check(), _opened(source) as image:
        image.load()
        return _convert_to_rgb(edit.apply(ImageOps.exif_transpose(image)) if edit else image, background).rgb


def open_mask(source: str | Path | BinaryIO, alpha: bool = False, edit: ImageEdit = NOTHING) -> Image.Image:
    """Decode a mask into upright greys (mode L): 255 is trained in full, 0 is outside the mask.

    Args:
        source: as in `open_image`.
        alpha: take the transparency as the mask instead of the visible pixels.
        edit: of the image that it is the mask of.

    Raises:
        ImageError: as in `open_image`.
    """
    with _no_bomb_check(), _opened(source) as image:
        image.load()
        return _extract_mask(edit.apply(ImageOps.exif_transpose(image)), alpha)


def measure_opacity(image: Image.Image, rgb: Image.Image) -> Light | None:
    """Measure the opacity of an upright image, for `inspect_all`; None if it has no transparency."""
    opacity = _convert_to_8_bits(ImageOps.exif_transpose(image))[1]
    return None if opacity is None else _measure_light(opacity)


def measure_greys(image: Image.Image, rgb: Image.Image) -> Light:
    """Measure the greys of an upright mask, for `inspect_all`."""
    return _measure_light(_extract_mask(ImageOps.exif_transpose(image)))


def read_clip(path: Path, numbers: Sequence[int], background: str) -> list[Image.Image]:
    """Decode these frames of a clip as upright RGB images; the frame numbers must not decrease.

    Raises:
        ImageError, clips.ClipError: the clip cannot be decoded, or has fewer frames.
    """
    if path.suffix.lower() in clips.VIDEOS:
        return clips.read(path, numbers)
    pictures: dict[int, Image.Image] = {}
    with _no_bomb_check(), _opened(path) as image:
        for number in numbers:
            if number not in pictures:
                image.seek(number)
                pictures[number] = _convert_to_rgb(image, background).rgb
    return [pictures[number] for number in numbers]


def _measure_light(greys: Image.Image) -> Light:
    least, most = cast(tuple[int, int], greys.getextrema())  # of one band with 8 bits
    box = greys.point([255 * (grey > BLACK) for grey in range(256)]).getbbox() or (0, 0, 0, 0)
    (left, top, right, bottom), (width, height) = box, greys.size
    return Light(least, most, (left / width, top / height, right / width, bottom / height))


def _extract_mask(image: Image.Image, alpha: bool = False) -> Image.Image:
    seen, opacity = _convert_to_8_bits(image)
    if alpha:
        return Image.new("L", image.size, 255) if opacity is None else opacity
    grey = seen if seen.mode == "L" else seen.convert("RGB").convert("L")
    return grey if opacity is None else ImageChops.multiply(grey, opacity)


def _read_timeline(image: Image.Image) -> clips.Timeline:
    """Decode all frames of an animation and return when each is shown."""
    starts, now = [], Fraction(0)
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        image.load()
        starts.append(now)
        now += Fraction(image.info.get("duration") or 0) / 1000
    if starts[-1] == now or len(set(starts)) < len(starts):
        raise ImageError(
            Message("the animation has frames with a duration of zero; save it with a duration for each frame")
        )
    return clips.Timeline(tuple(starts), now)


@lru_cache
def list_formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that are read."""
    if not can_read_heic():
        return FORMATS
    import pillow_heif

    # The images inside of a photo (thumbnails, depth maps, masks of people) are not needed.
    pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
    return (*FORMATS, "HEIF")


@contextlib.contextmanager
def _no_bomb_check() -> Iterator[None]:
    """Lift Pillow's own pixel limit: `dataset.max_pixels`, checked before decoding, replaces it."""
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
    """Open an image and read only its header. Any error inside the block becomes an ImageError in plain words."""
    try:
        with contextlib.ExitStack() as held:
            file = held.enter_context(open_regular(source)) if isinstance(source, str | Path) else source
            yield held.enter_context(Image.open(file, formats=list_formats()))
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise NoImage(NOT_READABLE) from None
    except MemoryError:
        raise ImageError(Message("the image does not fit into memory when decoded")) from None
    # Decoders raise OSError, SyntaxError, ValueError, struct.error, EOFError and more for damaged files.
    except Exception as error:
        why = str(error) or type(error).__name__
        if "truncated" in why.lower():  # Pillow counts bytes "not processed" here
            raise ImageError(Message("the file is truncated; copy or download it again")) from error
        raise ImageError(clips.CANNOT_BE_DECODED(why=why)) from error


def _convert_to_rgb(image: Image.Image, background: str) -> _Decoded:
    image.load()
    embedded = "icc_profile" in image.info
    profile = image.info.get("icc_profile")
    colours = image.info.get("nclx_profile") or {}  # HEIC's own way to name them
    if (transfer := colours.get("transfer_characteristics")) in clips.HDR:
        raise ImageError(clips.describe_hdr(transfer))
    image, alpha = _convert_to_8_bits(ImageOps.exif_transpose(image))
    rgb, converted, problem = None, False, ""
    if embedded:
        try:
            rgb, converted = to_srgb(image, profile)
        except ProfileError as error:
            problem = str(error)
    if rgb is None:
        rgb = image.convert("RGB")
    if not embedded and (number := colours.get("color_primaries", BT709)) not in (BT709, UNNAMED, *SMALL):
        problem = Message("it has the colour primaries {number} of ITU-T H.273, without an ICC profile", number=number)
    if alpha is not None:
        rgb.putalpha(alpha)
        rgb = Image.alpha_composite(Image.new("RGBA", rgb.size, background), rgb).convert("RGB")
    return _Decoded(rgb, converted, problem)


def _convert_to_8_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the image with 8 bits per channel (L, RGB, CMYK or LAB), and its transparency (mode L) if it has any."""
    mode = image.mode
    if mode.startswith("I;16"):
        return _convert_grey(image, np.asarray(image), 255 / 65535)
    if mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(
                Message(
                    "the image has 32-bit values {low}..{high}; save it with 8 or 16 bits per channel",
                    low=values.min(),
                    high=values.max(),
                )
            )
        return _convert_grey(image, values, 255 / 65535)
    if mode == "F":
        values = np.asarray(image)
        return _convert_grey(image, values, _choose_float_scale(values))
    if mode == "La":
        image = image.convert("LA")
    if mode in ("RGBA", "LA", "La", "RGBa", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        grey = mode in ("L", "LA", "La", "1")
        return image.getchannel("R") if grey else image.convert("RGB"), image.getchannel("A")
    if mode in ("L", "1"):
        return image.convert("L"), None
    return image if mode in ("CMYK", "LAB") else image.convert("RGB"), None


def _choose_float_scale(values: np.ndarray) -> float:
    """Return the factor that maps a floating-point image to 0..255; see the module's docstring."""
    if not np.isfinite(values).all():
        raise ImageError(Message("the image has floating-point values that are not finite"))
    low, high = float(values.min()), float(values.max())
    if low < 0 or 1 < high <= 2 or high > 65535:
        raise ImageError(
            Message(
                "the image has floating-point values {low}..{high}; save it with 8 or 16 bits per channel",
                low=f"{low:g}",
                high=f"{high:g}",
            )
        )
    return 255.0 if high <= 1 else 1.0 if high <= 255 else 255 / 65535


ROWS = 1 << 20
"""Values of a grey image that are converted at a time: in float64, all of them would take 16 bytes per pixel."""


def _convert_grey(image: Image.Image, values_HW: np.ndarray, scale: float) -> tuple[Image.Image, Image.Image | None]:
    """Convert the values of a grey image, times `scale`, to mode L.

    Returns:
        The grey image, and its transparency if the file declares one value, in the file's own units, transparent (PNG's
        tRNS).
    """
    grey_HW = np.empty(values_HW.shape, np.uint8)
    step = max(1, ROWS // values_HW.shape[1])
    for start in range(0, len(values_HW), step):
        rows = slice(start, start + step)
        grey_HW[rows] = np.rint(values_HW[rows].astype(np.float64) * scale)
    transparent = image.info.get("transparency")
    alpha = None
    if isinstance(transparent, int):
        alpha = Image.fromarray(np.where(values_HW == transparent, np.uint8(0), np.uint8(255)))
    return Image.fromarray(grey_HW), alpha
