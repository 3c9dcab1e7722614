"""Embedded ICC profiles: what a file's numbers mean as colours, brought to sRGB, which the base models know.

Phones write Display P3, cameras Adobe RGB, print shops CMYK; read as if they were sRGB, their colours come out pale or
wrong. LittleCMS (inside Pillow) converts: relative colorimetric, which keeps every colour that sRGB has, with black
point compensation, so that the deepest ink is black. Profiles of matrix and curves (nearly all RGB ones) give the same
with every intent.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms

MODES = {"RGB": ("RGB", "L"), "GRAY": ("L",), "CMYK": ("CMYK",), "Lab": ("LAB",)}
"""Colour space of a profile -> modes of pictures that it can belong to."""

_FLAGS = ImageCms.Flags.BLACKPOINTCOMPENSATION | ImageCms.Flags.HIGHRESPRECALC


class ProfileError(ValueError):
    """A profile that cannot be used; the message says why."""


def to_srgb(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, bool]:
    """An image in the colours of its profile as sRGB.

    Args:
        image: mode L, RGB, CMYK or LAB.
        profile: the ICC profile as embedded; None for one that Pillow could not put together.

    Returns:
        The image in mode RGB, and whether the profile made a difference. A profile that moves no channel by more than
        1 of 255 is sRGB by whatever name, and leaves the pixels as they are.

    Raises:
        ProfileError: the profile is damaged, or one for other pixels.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile or b""))
    except OSError:
        raise ProfileError("damaged") from None
    space = source.profile.xcolor_space.strip()
    if image.mode not in MODES.get(space, ()):
        raise ProfileError(f"for {space} pixels, not {image.mode}")
    if space == "Lab":  # these values are colours already
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
        raise ProfileError("damaged") from None
    if image.mode != "CMYK":
        samples = _samples(image.mode)
        moved = np.asarray(transform.apply(samples)).astype(int) - np.asarray(samples.convert("RGB"))
        if np.abs(moved).max() <= 1:
            return image.convert("RGB"), False
    return transform.apply(image), True


def _samples(mode: str) -> Image.Image:
    """One row of pixels from all over the colour space."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    levels = np.linspace(0, 255, 9).astype(np.uint8)
    return Image.fromarray(np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3))
