"""Images and captions: whatever can be wrong with a dataset is found, and reported at once, before a model loads.

`scan` walks the folders of a `[dataset]` section, decodes every image completely, reads every caption, and returns the
examples together with *problems* (training must not start) and *warnings* (it may). Nothing is guessed: a caption that
is neither UTF-8 nor UTF-16 with a byte-order mark is a problem that names the file and the offset of the byte. Nothing
is written into the user's folders.

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

Captions: `name.txt`, else `name.caption`, beside `name.png`. Lines are joined by spaces. An empty caption counts as
missing. If there is a trigger word (`Dataset.trigger_of`) and the caption lacks it as a word of its own
(case counts), it is put in front: "trigger, caption".

Control pictures, which editing models are shown beside the noise, lie in a folder of their own (`control`), under the
picture's name with any of the extensions: `name.jpg` for `name.png`, subfolders alike. Several of one picture are
`name_1`, `name_2` and so on. They are decoded as pictures are, and have no captions.

Masks (`mask`) say which part of a picture is trained: white in full, black outside, by their grey values as they are
stored, without a colour profile. One has its picture's shape, and a clip's counts for all of its frames. They lie in a
folder of their own, as control pictures do, or beside the pictures under a name such as `*_mask`, and are then no
pictures; or the picture's own transparency is its mask. What is transparent in a mask is outside.

With `dataset.frames` video files are examples as well, and animations (GIF, WebP, PNG) are clips instead of their first
frame: see `clips`. A piece of a clip is an example of its own, with the clip's caption.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import warnings as python_warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageOps

from lora_fp8 import config
from lora_fp8.data import clips
from lora_fp8.data.buckets import same_shape
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

CAPTIONS = (".txt", ".caption")
"""Caption files in the order of preference."""


_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""Byte-order marks and what follows them."""


class ImageError(ValueError):
    """An image that cannot be used; the message says why, without the file's name."""


@dataclass(frozen=True)
class Control:
    """One control picture: pixels of the upright image, and the hash of the file's bytes."""

    path: Path
    width: int
    height: int
    sha256: str


@dataclass(frozen=True)
class Mask:
    """What of a picture is trained: the file, the hash of its bytes, and whether its transparency is meant (`alpha`),
    of the picture itself, and not its greys."""

    path: Path
    sha256: str
    alpha: bool = False


@dataclass(frozen=True)
class Example:
    """One image and its caption.

    Attributes:
        path: the image file.
        caption: as trained: trigger put in front where needed.
        folder_index: which of `[[dataset.folders]]`, from 0.
        relative: path inside that folder, with forward slashes.
        repeats: how often an epoch shows it.
        width, height: pixels of the upright image.
        image_sha256: of the file's bytes.
        controls: its control pictures, in order.
        frames: of a clip, the numbers of the file's frames that are shown, in order; () for a picture.
        begins: second of the file at which the first of them is shown, if no other is; None is not known.
        mask: what of it is trained; None is all.
    """

    path: Path
    caption: str
    folder_index: int
    relative: str
    repeats: int
    width: int
    height: int
    image_sha256: str
    controls: tuple[Control, ...] = ()
    frames: tuple[int, ...] = ()
    begins: Fraction | None = None
    mask: Mask | None = None

    @property
    def file_uid(self) -> str:
        """Name of the file inside the dataset, which the pieces of a clip share."""
        return f"{self.folder_index}/{self.relative}"

    @property
    def uid(self) -> str:
        """Name of the example inside the dataset; stays when the dataset moves to another place or machine."""
        return f"{self.file_uid}@{self.frames[0]}" if self.frames else self.file_uid


@dataclass
class ScanReport:
    """What a scan found; `counts` has images, triggered, no_caption, skipped, upscaled, copies, controls, converted
    (to sRGB), clips (files), masked (images)."""

    examples: list[Example] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def require(self) -> list[Example]:
        """The examples; raises `config.UserErrors` with all problems if there are any."""
        if self.problems:
            raise config.UserErrors(self.problems, where="dataset")
        return self.examples


# -------------------------------------------------------------------------------------------------------------- pixels


@contextlib.contextmanager
def _no_bomb_check() -> Iterator[None]:
    """Lift Pillow's own pixel cap: `dataset.max_pixels`, checked before decoding, is the one that counts."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


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


def _mask_in(image: Image.Image, alpha: bool = False) -> Image.Image:
    seen, opacity = _eight_bits(image)
    if alpha:
        return Image.new("L", image.size, 255) if opacity is None else opacity
    grey = seen if seen.mode == "L" else seen.convert("RGB").convert("L")
    return grey if opacity is None else ImageChops.multiply(grey, opacity)


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


# ------------------------------------------------------------------------------------------------------------ captions


def decode_caption(raw: bytes) -> tuple[str, bytes, str]:
    """The text in a caption file's bytes, line ends and all; the byte-order mark before it; Python's codec of the rest.

    Raises:
        ValueError: as `read_caption`.
    """
    mark = next((mark for mark in _MARKS if raw.startswith(mark)), b"")
    codec = _MARKS.get(mark, "utf-8")
    try:
        text = raw[len(mark) :].decode(codec)
    except UnicodeDecodeError as error:
        at = error.start + len(mark)
        shown = f" (0x{raw[at]:02x})" if at < len(raw) else ""
        raise ValueError(f"is not {codec[:6].upper()} at byte {at}{shown}; save it as UTF-8") from None
    # UTF-16 without a mark, and UTF-32, are valid in the narrower encoding but full of NULs.
    if "\0" in text:
        raise ValueError(f"has a NUL character at byte {raw.index(0)}; save it as UTF-8")
    return text, mark, codec


def read_caption(path: Path) -> str:
    """A caption file's text on one line: UTF-8 (with or without mark), or UTF-16 with a byte-order mark.

    Raises:
        ValueError: the bytes are something else; the message has the offset of the first byte that does not fit.
    """
    text = decode_caption(path.read_bytes())[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


# Letters that make one word of what they touch. Thai, kana, ideographs and hangul stand beside a word without a space.
_LETTER = r"[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"


def with_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger word in front, unless it has it already as a word of its own."""
    trigger = trigger.strip()
    if not trigger or re.search(rf"(?<!{_LETTER}){re.escape(trigger)}(?!{_LETTER})", caption):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


# ---------------------------------------------------------------------------------------------------------------- scan


Measure = Callable[[Image.Image, Image.Image], Any]


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
        starts = f" (it starts with {raw[:12]!r})" if "not a readable" in str(error) else ""
        return Looked(f"{error}{starts}")
    known = hashlib.sha256(raw).hexdigest(), format, frames, converted, problem, measured, timeline
    return Looked("", *rgb.size, *known)


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


def look_all(paths: Sequence[Path], section: config.Dataset, measure: Measure | None = None) -> Iterator[Looked]:
    """Decode files, several at a time, and tell what each is, in order; the arguments are those of `_look`."""
    with _no_bomb_check(), python_warnings.catch_warnings():
        # Pillow's remarks about odd metadata; what matters is reported here.
        python_warnings.simplefilter("ignore")
        # Decoding leaves Python's lock, and map keeps the order. Few at a time: each holds a whole image in memory.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            yield from pool.map(lambda path: _look(path, section, measure), paths)


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """(folder, sorted file names) from the root down, in sorted order, hidden names left out.

    Links to folders are followed; a folder that was already visited, as in a loop of links, is not visited again.
    """
    visited = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        entries = sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
        folders = [folder / entry for entry in entries if (folder / entry).is_dir()]
        waiting.extend(reversed(folders))
        yield folder, [entry for entry in entries if not (folder / entry).is_dir()]


def scan(
    section: config.Dataset,
    num_controls: tuple[int, int] | None = None,
    previews: config.Preview | None = None,
    clip_rate: int | None = None,
    unmasked_weight: float = config.Objective().unmasked_weight,
) -> ScanReport:
    """Look at every image, caption, control picture and mask of the dataset.

    Args:
        section: the `[dataset]` section; folder paths are used as they are given. Where its resolution is "auto",
            `note_sizes` has to be called for warnings about small images.
        num_controls: fewest and most control pictures that the model takes with one picture; None does not judge.
        previews: the `[preview]` section, whose control pictures are looked at too.
        clip_rate: frames a second of the clips that the model draws, 0 if it draws none; None does not judge.
        unmasked_weight: the job's `objective.unmasked_weight`; at 0 a mask that is black all over is a problem.

    Returns:
        The report. It never raises for what it finds in files: all problems come together. Examples are in the order of
        the folders in the config, then sorted by path.
    """
    report = ScanReport()
    if not section.folders:
        report.problems.append("dataset.folders: no folder is given; add a [[dataset.folders]] table with path = '...'")
    warn_of_nested(section, report)
    found: list[tuple[int, Path, Path, Path | None]] = []
    for index in range(len(section.folders)):
        found += list_folder(index, section, report, clip_rate)
    transparent = any(folder.mask == "alpha" for folder in section.folders)
    looks = list(look_all([path for _, _, path, _ in found], section, opacities_of if transparent else None))
    controls = _controls(section, found, num_controls, report)
    masks = find_masks(section, unmasked_weight, found, [_seen(look) for look in looks], report)
    notes: dict[str, list[str]] = defaultdict(list)
    for (index, root, path, caption_path), look, shown, mask in zip(found, looks, controls, masks, strict=True):
        folder = section.folders[index]
        if look.error:
            report.problems.append(f"{path} {look.error}")
        caption = _caption(path, caption_path, section.trigger_of(index), section, report)
        if look.error or caption is None or shown is None:
            continue
        _note_oddities(path, look, notes)
        for control in shown:
            if not same_shape((look.width, look.height), (control.width, control.height)):
                notes["shapes"].append(f"{control.path} ({control.width} x {control.height})")
        report.counts["controls"] += len(shown)
        report.counts["masked"] += mask is not None
        report.counts["converted"] += look.converted
        report.examples += [
            Example(
                path=path,
                caption=caption,
                folder_index=index,
                relative=path.relative_to(root).as_posix(),
                repeats=folder.repeats,
                width=look.width,
                height=look.height,
                image_sha256=look.sha256,
                controls=shown,
                frames=frames,
                begins=look.timeline.only_at(frames[0]) if frames else None,
                mask=mask,
            )
            for frames in _pieces(path, look.timeline, section, clip_rate, report, notes)
        ]
    _note_copies(report, notes)
    report.counts["images"] = len(report.examples)
    report.counts["copies"] = len(notes["copies"])
    report.warnings += _warnings(notes)
    if isinstance(section.resolution, int):
        note_sizes(report, section, section.resolution)
    if previews is not None:
        report.problems += preview_controls(previews, section, num_controls)[1]
    if skipped := report.counts["skipped"]:
        report.warnings.append(f"{skipped} image(s) left out for having no caption (missing_caption = 'skip')")
        if not report.examples and not report.problems:
            report.problems.append("dataset: every image was left out for having no caption (missing_caption = 'skip')")
    return report


def _pieces(
    path: Path,
    timeline: clips.Timeline | None,
    section: config.Dataset,
    clip_rate: int | None,
    report: ScanReport,
    notes: dict[str, list[str]],
) -> list[tuple[int, ...]]:
    """What a file is shown as: a picture once, without numbers of frames; a clip as what is cut out of it."""
    if timeline is None:
        return [()]
    rate = clip_rate if section.fps == "auto" else section.fps
    if not rate:
        raise ValueError("dataset.fps = 'auto' needs clip_rate")
    numbers = clips.resampled(timeline, rate)
    found = clips.pieces(numbers, section.frames, section.clip)
    if not found:
        least = min(section.frames)
        report.problems.append(
            f"{path} has {len(numbers)} frames at {rate:g} a second, and the least of dataset.frames is {least}; add a "
            "smaller length, or take it out"
        )
        return []
    if len(found[0]) < max(section.frames):
        notes["shorter"].append(f"{path} ({len(found[0])} of {len(numbers)})")
    if len(set(numbers)) < len(numbers):
        notes["slower"].append(f"{path} ({len(timeline.starts)} for {len(numbers)})")
    report.counts["clips"] += 1
    report.counts["clip_frames"] += len(numbers)
    return found


_NOTES = {
    "shorter": "{n} clip(s) too short for the longest of dataset.frames, trained at a shorter length",
    "slower": "{n} clip(s) with fewer frames a second than dataset.fps, some of whose frames are shown twice",
    "extension": "{n} image(s) named as another format than they are (read all the same)",
    "profile": "{n} image(s) with a colour profile that cannot be used, read without it",
    "animated": "{n} file(s) with several frames or pages, of which the first is used",
    "tiny": "{n} image(s) with less than a quarter of the pixels of the training resolution",
    "upscaled": "{n} image(s) smaller than the training resolution, enlarged (upscale = false keeps their size)",
    "small": "{n} image(s) smaller than the training resolution, trained in smaller buckets (upscale = false)",
    "wide": "{n} image(s) with a wider aspect ratio than dataset.max_aspect, cropped to it",
    "copies": "{n} image(s) that are copies of others",
    "unmasked": "{n} image(s) without a mask, trained whole",
    "black": "{n} mask(s) that are black all over",
    "strange": "{n} mask(s) belong to no image",
    "shapes": "{n} control picture(s) of another shape than their picture, shown whole",
}


def _told(path: str | Path) -> str:
    """A path as text: a name may be any bytes, and those that are no UTF-8 could be neither logged nor sent."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _some(names: list[str], most: int = 8) -> str:
    """The names, or the first of them and how many more there are."""
    return ", ".join(map(_told, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _warnings(notes: dict[str, list[str]]) -> list[str]:
    return [f"{_NOTES[kind].format(n=len(names))}: {_some(names)}" for kind, names in notes.items() if names]


def note_sizes(report: ScanReport, section: config.Dataset, resolution: int) -> None:
    """Add warnings about images that are small or narrow for this resolution; `scan` does it where it knows one."""
    notes: dict[str, list[str]] = defaultdict(list)
    for example in {example.file_uid: example for example in report.examples}.values():
        width, height = example.width, example.height
        side = section.folders[example.folder_index].resolution or resolution
        if width * height < side**2:
            if 4 * width * height < side**2:
                notes["tiny"].append(f"{example.path} ({width} x {height})")
            notes["upscaled" if section.upscale else "small"].append(f"{example.path} ({width} x {height})")
        aspect = max(width, height) / min(width, height)
        if section.buckets and aspect > section.max_aspect:
            notes["wide"].append(f"{example.path} ({aspect:.2f})")
    report.counts["upscaled"] = len(notes["upscaled"])
    report.warnings += _warnings(notes)


def _note_oddities(path: Path, look: Looked, notes: dict[str, list[str]]) -> None:
    if look.format and look.format != EXTENSIONS[path.suffix.lower()]:
        notes["extension"].append(f"{path} ({look.format})")
    if look.profile_problem:
        notes["profile"].append(f"{path} ({look.profile_problem})")
    if look.frames > 1 and look.timeline is None:
        notes["animated"].append(f"{path} ({look.frames})")


def _note_copies(report: ScanReport, notes: dict[str, list[str]]) -> None:
    """Copies by content. The same file seen through two folder entries is not one: that has its own warning."""
    first: dict[str, Path] = {}
    for example in report.examples:
        original = first.setdefault(example.image_sha256, example.path)
        if original != example.path and os.path.realpath(original) != os.path.realpath(example.path):
            notes["copies"].append(f"{example.path} (of {original})")


def warn_of_nested(section: config.Dataset, report: ScanReport) -> None:
    """One folder named twice, or inside another: its images count for each."""
    real = [Path(os.path.realpath(os.path.expanduser(folder.path))) for folder in section.folders]
    for later, path in enumerate(real):
        for earlier, other in enumerate(real[:later]):
            if path == other:
                report.warnings.append(
                    f"folder {section.folders[later].path} is named twice, as dataset.folders {earlier + 1} and "
                    f"{later + 1}; its images count for each"
                )
            elif path in other.parents or other in path.parents:
                inner, outer = (other, path) if path in other.parents else (path, other)
                report.warnings.append(f"folder {inner} is inside folder {outer}; its images count for each")


def list_folder(
    index: int, section: config.Dataset, report: ScanReport, clip_rate: int | None = None, videos: bool = False
) -> list[tuple[int, Path, Path, Path | None]]:
    """(folder index, root, image, caption file or None) of every image file of one folder entry.

    Masks that lie beside them are left out. Videos are among them where the section takes clips and they can be read,
    or always where `videos` is true. `clip_rate` as in `scan`.
    """
    taken = videos or (section.frames and clips.can_read_videos())
    accepted = (*EXTENSIONS, *clips.VIDEOS) if taken else tuple(EXTENSIONS)
    root = Path(os.path.expanduser(section.folders[index].path))
    if not root.exists():
        report.problems.append(f"folder {root} does not exist (looked in {Path.cwd()})")
        return []
    if not root.is_dir():
        report.problems.append(f"folder {root} is a file, not a folder")
        return []
    found: list[tuple[int, Path, Path, Path | None]] = []
    others: list[str] = []
    try:
        for folder, names in _walk(root):
            by_stem: dict[tuple[str, str], str] = {}
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in CAPTIONS:
                    by_stem[stem, suffix.lower()] = name
            used: dict[str, str] = {}
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in CAPTIONS:
                    continue
                if masked_stem(section.folders[index].mask, name):
                    continue
                if suffix.lower() not in accepted:
                    others.append(name)
                    continue
                path = folder / name
                if not _is_text(str(path.relative_to(root))):
                    report.problems.append(f"{os.fsencode(path)!r} has a file name that is not UTF-8; rename it")
                    continue
                captions = [by_stem[stem, suffix] for suffix in CAPTIONS if (stem, suffix) in by_stem]
                if len(captions) > 1:
                    report.warnings.append(f"{path} has two captions; {captions[0]} is used, {captions[1]} is not")
                if captions and stem in used:
                    report.warnings.append(f"{path} shares its caption {captions[0]} with {used[stem]}")
                used[stem] = name
                found.append((index, root, path, folder / captions[0] if captions else None))
            lonely = sorted(name for (stem, _), name in by_stem.items() if stem not in used)
            if lonely:
                report.warnings.append(
                    f"{len(lonely)} caption file(s) in {_told(folder)} have no image: {_some(lonely)}"
                )
    except OSError as error:
        report.problems.append(f"folder {_told(error.filename)} cannot be read: {error.strerror}")
    left = [name for name in others if os.path.splitext(name)[1].lower() in clips.VIDEOS]
    if left and (section.frames or clip_rate is not None):
        if section.frames:
            told = "which PyAV reads; install it: pip install 'lora-fp8[video]'"
        elif clip_rate:
            told = "set dataset.frames to the lengths that they are to be trained at, or take them out"
        else:
            told = "and this model is trained on pictures; take them out"
        report.problems.append(f"folder {root} has {len(left)} video clip(s), {told}: {_some(sorted(left))}")
        others = [name for name in others if name not in left]
    elif not found:
        what = f"only {_some(sorted(others))}" if others else "no image files"
        report.problems.append(f"folder {root} has no images, {what}; accepted are {' '.join(accepted)}")
    if found and others:
        report.warnings.append(f"{len(others)} other file(s) in {root} are not read: {_some(sorted(others))}")
    return found


def _controls(
    section: config.Dataset,
    found: list[tuple[int, Path, Path, Path | None]],
    num_controls: tuple[int, int] | None,
    report: ScanReport,
) -> list[tuple[Control, ...] | None]:
    """The control pictures of each found image; None where something about them is wrong, which is in the report."""
    answers: list[tuple[Control, ...] | None] = []
    for index, folder in enumerate(section.folders):
        pictures = [(root, path) for number, root, path, _ in found if number == index]
        if not folder.control:
            answers += [()] * len(pictures)
            continue
        files = _list_beside("control", Path(os.path.expanduser(folder.control)), section, report)
        stems = {path.relative_to(root).with_suffix("").as_posix() for root, path in pictures}
        named = {stem: _controls_of(stem, stems, files) for stem in stems}
        used = sorted({path for members in named.values() for candidates in members for path in candidates})
        looks = dict(zip(used, look_all(used, section), strict=True))
        for path, look in looks.items():
            if look.error:
                report.problems.append(f"control picture {path} {look.error}")
        for root, path in pictures:
            members = named[path.relative_to(root).with_suffix("").as_posix()]
            if text := _wrong_controls(members, folder.control, path.stem, num_controls) if files is not None else "":
                report.problems.append(f"{path} {text}")
            if files is None or text or any(looks[member[0]].error for member in members):
                answers.append(None)
            else:
                paths = [member[0] for member in members]
                answers.append(tuple(Control(p, looks[p].width, looks[p].height, looks[p].sha256) for p in paths))
        if lonely := sorted(str(path) for members in (files or {}).values() for path in members if path not in used):
            report.warnings.append(f"{len(lonely)} control picture(s) belong to no picture: {_some(lonely)}")
    return answers


def _list_beside(kind: str, root: Path, section: config.Dataset, report: ScanReport) -> dict[str, list[Path]] | None:
    """{path inside this control or mask folder without extension: image files}; None if it cannot be used."""
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else f"does not exist (looked in {Path.cwd()})"
        report.problems.append(f"{kind} folder {root} {what}")
        return None
    for other in section.folders:
        trained = Path(os.path.realpath(os.path.expanduser(other.path)))
        if trained in (real := Path(os.path.realpath(root)), *real.parents):
            report.problems.append(
                f"{kind} folder {root} is in the picture folder {other.path}, all of which is trained on; "
                "move it beside that folder"
            )
            return None
    files: dict[str, list[Path]] = defaultdict(list)
    try:
        for folder, names in _walk(root):
            for name in names:
                if Path(name).suffix.lower() in EXTENSIONS:
                    files[(folder / name).relative_to(root).with_suffix("").as_posix()].append(folder / name)
    except OSError as error:
        report.problems.append(f"{kind} folder {_told(error.filename)} cannot be read: {error.strerror}")
        return None
    return files


def _controls_of(stem: str, stems: set[str], files: dict[str, list[Path]] | None) -> list[list[Path]]:
    """The candidates for each control picture of the picture with this name: `name`, else `name_1`, `name_2`, ..."""
    if not files:
        return []
    if stem in files:
        return [files[stem]]
    numbered = []
    # A picture called name_1 has a control picture of that name for itself.
    while (name := f"{stem}_{len(numbered) + 1}") in files and name not in stems:
        numbered.append(files[name])
    return numbered


def _wrong_controls(members: list[list[Path]], folder: str, stem: str, num_controls: tuple[int, int] | None) -> str:
    """What is wrong with a picture's control pictures, apart from what is in them; "" for nothing."""
    if not members:
        return f"has no control picture {stem}.png (or another extension) in {folder}"
    for candidates in members:
        if len(candidates) > 1:
            names = ", ".join(path.name for path in candidates)
            return f"has several candidates for one control picture, {names}; keep one of them"
    if num_controls is not None and len(members) > num_controls[1]:
        return f"has {len(members)} control pictures, and this model takes at most {num_controls[1]}"
    return ""


@dataclass(frozen=True)
class Seen:
    """Of a picture, what its mask is judged by: upright size, hash, and the least and most of its opacity, 0 to 255
    (None: it has none, or nobody asked)."""

    size: tuple[int, int]
    sha256: str
    clip: bool
    opacities: tuple[int, int] | None = None


def _seen(look: Looked) -> Seen | None:
    if look.error:
        return None
    return Seen((look.width, look.height), look.sha256, look.timeline is not None, look.measured)


def opacities_of(image: Image.Image, rgb: Image.Image) -> tuple[int, int] | None:
    """A measure for `look_all`: the least and most opacity of a picture, 0 to 255, if it has any."""
    opacity = _eight_bits(image)[1]
    return None if opacity is None else opacity.getextrema()


def _brightest(image: Image.Image, rgb: Image.Image) -> int:
    return _mask_in(image).getextrema()[1]


BLACK = 2
"""The brightest grey of a mask that is black all over: one that was saved as numbers, 0 and 1, is."""


def masked_stem(mask: str, name: str) -> str:
    """Name without extension of the image whose mask a file of this name is, where a folder's `mask` has a *; or ""."""
    stem, suffix = os.path.splitext(name)
    if "*" not in mask or suffix.lower() not in EXTENSIONS:
        return ""
    stem = name if os.path.splitext(mask)[1].lower() in EXTENSIONS else stem
    front, _, behind = mask.partition("*")
    fits = stem.startswith(front) and stem.endswith(behind) and len(stem) > len(front) + len(behind)
    return stem[len(front) : len(stem) - len(behind)] if fits else ""


def find_masks(
    section: config.Dataset,
    unmasked_weight: float,
    found: Sequence[tuple[int, Path, Path, Path | None]],
    seen: Sequence[Seen | None],
    report: ScanReport,
) -> list[Mask | None]:
    """The mask of each image; what is wrong with them is in the report.

    Args:
        unmasked_weight: as in `scan`.
        found: from `list_folder`, folder by folder.
        seen: what each of them is; None is one that cannot be used.
    """
    answers: list[Mask | None] = []
    notes: dict[str, list[str]] = defaultdict(list)
    for index, folder in enumerate(section.folders):
        images = [
            (root, path, one) for (number, root, path, _), one in zip(found, seen, strict=True) if number == index
        ]
        if not folder.mask:
            answers += [None] * len(images)
        elif folder.mask == "alpha":
            answers += _masks_by_opacity(images, folder.path, index, notes, report)
        else:
            answers += _masks_by_file(images, section, index, notes, report)
    if not unmasked_weight:
        report.problems += [
            f"{path} has a mask that is black all over, and with objective.unmasked_weight = 0 it teaches nothing; "
            "take it out, or draw what it is to teach in white"
            for path in notes.pop("black", [])
        ]
    report.warnings += _warnings(notes)
    return answers


def _masks_by_opacity(
    images: list[tuple[Path, Path, Seen | None]],
    folder: str,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
) -> list[Mask | None]:
    answers: list[Mask | None] = []
    if moving := [str(path) for _, path, one in images if one is not None and one.clip]:
        report.problems.append(
            f"folder {folder} has {len(moving)} clip(s), which have no transparency that could be their mask; set "
            f"dataset.folders.{index}.mask to a folder of masks: {_some(moving)}"
        )
    for _, path, one in images:
        answers.append(None)
        if one is None or one.clip:
            continue
        if one.opacities is None or one.opacities[0] == 255:
            notes["unmasked"].append(str(path))
            continue
        answers[-1] = Mask(path, one.sha256, alpha=True)
        if one.opacities[1] <= BLACK:
            notes["black"].append(str(path))
    return answers


def _masks_by_file(
    images: list[tuple[Path, Path, Seen | None]],
    section: config.Dataset,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
) -> list[Mask | None]:
    folder = section.folders[index]
    if folder.mask_folder:
        files = _list_beside("mask", Path(os.path.expanduser(folder.mask)), section, report)
    else:
        files = _list_among(Path(os.path.expanduser(folder.path)), folder.mask)
    if files is None:
        return [None] * len(images)
    stems = [path.relative_to(root).with_suffix("").as_posix() for root, path, _ in images]
    used = sorted({path for stem in stems for path in files.get(stem, [])})
    looks = dict(zip(used, look_all(used, section, _brightest), strict=True))
    report.problems += [f"mask {path} cannot be used: {look.error}" for path, look in looks.items() if look.error]
    answers: list[Mask | None] = []
    for stem, (_, path, one) in zip(stems, images, strict=True):
        candidates = files.get(stem, [])
        answers.append(None)
        if not candidates:
            notes["unmasked"].append(str(path))
        elif len(candidates) > 1:
            names = ", ".join(candidate.name for candidate in candidates)
            report.problems.append(f"{path} has several candidates for its mask, {names}; keep one of them")
        elif one is not None and not (look := looks[candidates[0]]).error:
            if not same_shape(one.size, (look.width, look.height)):
                report.problems.append(
                    f"mask {candidates[0]} has {look.width} x {look.height} pixels, another shape than its image's "
                    f"{one.size[0]} x {one.size[1]}; draw it on the image"
                )
            if look.measured <= BLACK:
                notes["black"].append(str(path))
            answers[-1] = Mask(candidates[0], look.sha256)
    notes["strange"] += sorted(str(path) for members in files.values() for path in members if path not in looks)
    return answers


def _list_among(root: Path, mask: str) -> dict[str, list[Path]]:
    """{path of an image inside its folder without extension: masks beside it}; what cannot be read has been told."""
    files: dict[str, list[Path]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for folder, names in _walk(root):
            for name in names:
                if stem := masked_stem(mask, name):
                    files[(folder / stem).relative_to(root).as_posix()].append(folder / name)
    return files


def preview_controls(
    section: config.Preview, dataset: config.Dataset, num_controls: tuple[int, int] | None
) -> tuple[list[tuple[Control, ...]], list[str]]:
    """The control pictures of each preview, and what is wrong with them.

    A file is one control picture; a folder stands for all pictures in it, in the order of their names.
    """
    found, problems = [], []
    for i, given in enumerate(section.controls):
        path = Path(os.path.expanduser(given))
        names = [path]
        if path.is_dir():
            seen = (name for name in path.iterdir() if not name.name.startswith("."))  # as `_walk` leaves them out
            names = sorted(name for name in seen if name.suffix.lower() in EXTENSIONS)
        controls = []
        for name, look in zip(names, look_all(names, dataset), strict=True):
            if look.error:
                problems.append(f"preview.controls.{i}: {_told(name)} {look.error}")
            controls.append(Control(name, look.width, look.height, look.sha256))
        if num_controls is not None and not num_controls[0] <= len(controls) <= num_controls[1]:
            between = " to ".join(str(number) for number in dict.fromkeys(num_controls))
            problems.append(f"preview.controls.{i}: {path} has {len(controls)} pictures; this model takes {between}")
        found.append(tuple(controls))
    return found, problems


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _caption(
    path: Path, caption_path: Path | None, trigger: str, section: config.Dataset, report: ScanReport
) -> str | None:
    """The caption to train with, or None if there is none (which is then in the report)."""
    text = ""
    if caption_path is not None:
        try:
            text = read_caption(caption_path)
        except OSError as error:
            report.problems.append(f"{caption_path} cannot be read: {error.strerror}")
            return None
        except ValueError as error:
            report.problems.append(f"{caption_path} {error}")
            return None
    if text:
        caption = with_trigger(text, trigger)
        report.counts["triggered"] += caption != text
        return caption
    what = f"an empty caption ({caption_path.name})" if caption_path else f"no caption ({path.stem}.txt)"
    if section.missing_caption == "skip":
        report.counts["skipped"] += 1
        return None
    if section.missing_caption == "trigger" and trigger.strip():
        report.counts["no_caption"] += 1
        return trigger.strip()
    if section.missing_caption == "trigger":
        report.problems.append(f"{path} has {what}; write one, as this folder has no trigger word to stand for it")
    else:
        report.problems.append(f"{path} has {what}; write one, or set dataset.missing_caption to 'trigger' or 'skip'")
    return None


def describe(report: ScanReport) -> list[str]:
    """Lines of figures about a scan, for a person; its warnings and problems are lines already."""
    counts, examples = report.counts, report.examples
    shown = sum(example.repeats for example in examples)
    lines = [f"{len(examples)} images, {shown} per epoch with repeats"]
    if examples:
        small = min(examples, key=lambda example: example.width * example.height)
        large = max(examples, key=lambda example: example.width * example.height)
        lines.append(f"sizes from {small.width} x {small.height} to {large.width} x {large.height}")
        lines.append(f"{len({example.caption for example in examples})} different captions")
    if counts["converted"]:
        lines.append(f"{counts['converted']} images converted from their colour profile to sRGB")
    if counts["controls"]:
        lines.append(f"{counts['controls']} control pictures")
    if counts["masked"]:
        lines.append(f"{counts['masked']} images with a mask")
    if counts["clips"]:
        lengths = Counter(len(example.frames) for example in examples if example.frames)
        cut = ", ".join(f"{number} of {length} frames" for length, number in sorted(lengths.items()))
        used = sum(length * number for length, number in lengths.items())
        lines.append(f"{counts['clips']} clips: {cut}, {used} of {counts['clip_frames']} frames at dataset.fps")
    if counts["triggered"]:
        lines.append(f"{counts['triggered']} captions had the trigger word put in front")
    if counts["no_caption"]:
        lines.append(f"{counts['no_caption']} images without a caption have the trigger word as theirs")
    return lines
