"""Pictures with their captions and masks, mutated."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import numpy as np
from PIL import Image

from lora_fp8 import settings
from lora_fp8.data import decoding, doctor, images
from lora_fp8.errors import UserError

FORMATS = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "GIF": ".gif",
    "AVIF": ".avif",
}
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F")


def drawn(draw: random.Random) -> Image.Image:
    """A picture of noise, rarely a large one."""
    large = draw.random() < 0.005
    width, height = (draw.randrange(1500, 4000) if large else draw.choice((1, 2, 7, 33, 64, 90)) for _ in range(2))
    mode = draw.choice(MODES)
    values = np.random.default_rng(draw.getrandbits(32)).integers(0, 65536, (height, width), dtype=np.uint16)
    if mode == "I;16":
        return Image.fromarray(values)
    if mode in ("I", "F"):
        return Image.fromarray(values.astype(np.int32 if mode == "I" else np.float32))
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    return Image.merge("LAB", [grey] * 3) if mode == "LAB" else grey.convert("RGB").convert(mode)


def saved(draw: random.Random, image: Image.Image) -> tuple[bytes, str]:
    """The file in some format that takes it, and the extension of it, or, at times, of another."""
    options: dict[str, Any] = {}
    if draw.random() < 0.2:
        options["icc_profile"] = draw.choice((b"", b"nonsense", draw.randbytes(200)))
    if draw.random() < 0.2:
        exif = Image.Exif()
        exif[0x0112] = draw.randrange(10)
        options["exif"] = exif
    if draw.random() < 0.15:
        options |= {"save_all": True, "append_images": [image] * draw.choice((1, 5)), "duration": draw.choice((0, 40))}
    fast = ["PNG", "TIFF", "BMP"] if image.width > 1000 else list(FORMATS)  # the others take seconds to write
    for format in draw.sample(fast, len(fast)):
        out = io.BytesIO()
        try:
            # Pillow's AVIF encoder crashes on some of these options.
            image.save(out, format, **(options if format != "AVIF" else {}))
        except (OSError, ValueError, TypeError, KeyError):  # this format has no such mode
            continue
        if out.getvalue():
            suffix = FORMATS[format] if draw.random() < 0.9 else draw.choice((*FORMATS.values(), ".jfif", ".heic"))
            return out.getvalue(), suffix
    image.convert("RGB").save(out := io.BytesIO(), "PNG")
    return out.getvalue(), ".png"


class Cases:
    """A case is a folder with one to three pictures, captions, and sometimes masks beside them."""

    def __init__(self, work: Path) -> None:
        pass

    def make(self, draw: random.Random, folder: Path) -> None:
        for number in range(draw.choice((1, 1, 2, 3))):
            data, suffix = saved(draw, drawn(draw))
            if draw.random() < 0.8:
                data = mutations.bytes_of(draw, data)
            (folder / f"{number}{suffix}").write_bytes(data)
            caption = draw.choice((b"a cat", b"", b"\xff\xfea\0", b"\xff", b"a\0b", "{中|文}".encode(), b"x, " * 3000))
            (folder / f"{number}{draw.choice(('.txt', '.caption'))}").write_bytes(caption)
            if draw.random() < 0.2:
                (folder / f"{number}_mask.png").write_bytes(mutations.bytes_of(draw, saved(draw, drawn(draw))[0]))

    def use(self, folder: Path, allowed: Callable[[Callable[[], Any]], Any]) -> None:
        one = settings.Folder(path=str(folder), mask="*_mask" if any(folder.glob("*_mask.png")) else "alpha")
        section = settings.Dataset(folders=[one], resolution=64, frames=[1, 5], fps=8)
        found = allowed(lambda: images.scan(section, clip_rate=8))
        for example in found.examples:
            if example.frames:
                allowed(lambda one=example: _read_clip(one.path, one.frames))
            else:
                assert decoding.open_image(example.path).size == (example.width, example.height)
        images.describe(found)
        allowed(found.require)
        allowed(lambda: doctor.examine(section, doctor.Target(64, 64, clip_rate=8))).format_lines()


def _read_clip(path: Path, frames: tuple[int, ...]) -> Any:
    try:
        return decoding.read_clip(path, frames, "#ffffff")
    except decoding.ImageError as error:
        raise UserError(str(error)) from None
