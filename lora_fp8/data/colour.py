"""Embedded ICC profiles: convert the colours of an image file to sRGB, which the base models were trained on.

Phones write Display P3, cameras Adobe RGB, print shops CMYK; read as if they were sRGB, their colours are pale or
wrong. LittleCMS (inside Pillow) converts with the relative colorimetric intent, which keeps every colour that sRGB has,
and with black point compensation, which maps the darkest ink to black. Matrix profiles (nearly all RGB profiles) give
the same result with every intent.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms

from ..errors import Message

MODES = {"RGB": ("RGB", "L"), "GRAY": ("L",), "CMYK": ("CMYK",), "Lab": ("LAB",)}
"""Colour space of a profile -> image modes that it can belong to."""

_FLAGS = ImageCms.Flags.BLACKPOINTCOMPENSATION | ImageCms.Flags.HIGHRESPRECALC


DAMAGED = Message("damaged")


class ProfileError(ValueError):
    """A profile that cannot be used; the message says why."""


def to_srgb(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, bool]:
    """Convert an image from the colours of its profile to sRGB.

    Args:
        image: mode L, RGB, CMYK or LAB.
        profile: the embedded ICC profile; None if Pillow could not assemble it.

    Returns:
        The image in mode RGB, and whether the profile made a difference. A profile that moves no channel by more than
        1 of 255 is sRGB under another name, and the pixels stay as they are.

    Raises:
        ProfileError: the profile is damaged, or is for another kind of pixels.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile or b""))
    except OSError:
        raise ProfileError(DAMAGED) from None
    space = source.profile.xcolor_space.strip()
    if image.mode not in MODES.get(space, ()):
        raise ProfileError(Message("it is for {space} pixels, but the image is {mode}", space=space, mode=image.mode))
    if space == "Lab":  # Lab values are colours already
        return image.convert("RGB"), False
    if space == "RGB":
        image = image.convert("RGB")
    try:
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            image.mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            _FLAGS,
        )
    except ImageCms.PyCMSError:
        raise ProfileError(DAMAGED) from None
    if image.mode != "CMYK":
        samples = _make_samples(image.mode)
        moved = np.asarray(transform.apply(samples)).astype(int) - np.asarray(samples.convert("RGB"))
        if np.abs(moved).max() <= 1:
            return image.convert("RGB"), False
    return transform.apply(image), True


def _make_samples(mode: str) -> Image.Image:
    """Return one row of pixels spread over the whole colour space of `mode`."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    levels = np.linspace(0, 255, 9).astype(np.uint8)
    return Image.fromarray(np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3))
