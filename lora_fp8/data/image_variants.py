"""Image variants: other crops, angles and colours of an image, cached beside the image as it is.

The VAE encodes each image once, so an image cannot be changed anew in every step. Instead the cache holds
`dataset.image_variants` versions of each image, and the loader draws one of them for each sample. Version 0 is the
image as it is. A version depends on the image's content and its number alone, so that jobs with other seeds share it.

A version stays inside the image: a turned one is enlarged until the crop has no empty corner. Its mask, and control
images of the same shape, are changed alike. Held-out images are never changed.
"""

import math
from random import Random

from .. import settings
from . import derive_seed
from .buckets import Box, Change, Placed, Placement, Size, find_subject, keep_inside

MARGIN = 2
"""Pixels between the corners of a turned crop and the image's edge, for the interpolation."""


def list_variants(placed: Placed, section: settings.Dataset) -> list[Placed]:
    """Return the versions of an image or a clip that are cached; the first is the image as it is.

    Args:
        placed: the image in its bucket.
        section: `[dataset]`: image_variants, random_crop, zoom, rotate, color_jitter, upscale and follow_mask are read.
    """
    if not section.varies_images:
        return [placed]
    return [placed, *(draw_variant(placed, section, number) for number in range(1, section.image_variants))]


def disable_image_variants(section: settings.Dataset) -> settings.Dataset:
    """Return the section without mirrored images and variants of images, for validation."""
    off = {"flip": False, "random_crop": False, "zoom": 0.0, "rotate": 0.0, "color_jitter": 0.0}
    return section.model_copy(update=off)


def draw_variant(placed: Placed, section: settings.Dataset, number: int) -> Placed:
    """Return a version of an image, numbered from 1."""
    draw = Random(derive_seed("image_variant", number, placed.example.image_sha256))
    # Each is drawn whether it is used or not, so that one setting does not change what the others give.
    zoom, angle, across, down = draw.random(), draw.uniform(-1, 1), draw.random(), draw.random()
    factors = tuple(1 + draw.uniform(-1, 1) * section.color_jitter for _ in range(3))
    change = Change(angle * section.rotate, factors if section.color_jitter else ())
    where = (across, down) if section.random_crop else None
    usual = placed.placement
    enlarged = 1 + zoom * section.zoom
    if not section.upscale:
        enlarged = max(1.0, min(enlarged, usual.original_wh[0] / usual.resized_wh[0]))
    subject = find_subject(placed.example.mask, section.follow_mask)
    return Placed(placed.example, move_crop(usual, enlarged, change.angle, where, subject), change, usual)


def move_crop(
    usual: Placement, enlarged: float, angle: float, where: tuple[float, float] | None, subject: Box | None = None
) -> Placement:
    """Return the placement of a crop in an image that is enlarged, and turned about the middle of the crop.

    Args:
        usual: the placement of the image as it is.
        enlarged: factor of the size to which the image is resized, at least 1; more where the angle needs it.
        angle: in degrees.
        where: position of the crop in the room that it has, (across, down), each from 0 to 1; None: in the middle.
        subject: part of the image that the crop shows, as far as it has room for it; None: none.
    """
    needed = _measure_turned(usual.bucket_wh, angle)
    if angle:
        room = (need + 2 * MARGIN for need in needed)
        enlarged = max(enlarged, *(need / side for need, side in zip(room, usual.resized_wh, strict=True)))
    resized_wh = math.ceil(usual.resized_wh[0] * enlarged), math.ceil(usual.resized_wh[1] * enlarged)
    corners = []
    for axis in (0, 1):
        size, side = usual.bucket_wh[axis], resized_wh[axis]
        least = math.ceil((needed[axis] - size) / 2)
        most = max(least, math.floor(side - (needed[axis] + size) / 2))
        first, last = least, most
        if subject:
            first, last = keep_inside((least, most), side, size, (subject[axis], subject[axis + 2]))
        middle = min(max((least + most) // 2, first), last)
        corners.append(middle if where is None else first + round(where[axis] * (last - first)))
    return Placement(usual.original_wh, usual.bucket_wh, resized_wh, (corners[0], corners[1]))


def _measure_turned(size: Size, angle: float) -> tuple[float, float]:
    """Return the width and height of the upright rectangle around one of this size that is turned."""
    sine, cosine = abs(math.sin(math.radians(angle))), math.cos(math.radians(angle))
    width, height = size
    return width * cosine + height * sine, width * sine + height * cosine
