"""Buckets: the size that each image is trained at, and which part of the image.

A batch holds images of one size, so images of similar shape share a size, called a *bucket*. The rules:

* The sides of a bucket are multiples of `step`. Its aspect ratio, or the inverse, is at most `max_aspect`. Its area is
  at most resolution^2 and close to it: adding a step to one side would exceed it. The largest square is always a
  bucket. If no such bucket reaches `max_aspect`, the largest bucket that comes nearer to it is added, provided that it
  has three quarters of the area (for 512 with steps of 64: 320 x 640, beside 384 x 640). Without buckets, the square is
  the only size.
* An image goes into the bucket with the nearest aspect ratio, in log space, so that 2:1 is as far from 1:1 as 1:2 is.
  Ties go to the larger area, then to the wider bucket. The comparison is exact (fractions, no logarithms), so that
  every machine decides alike.
* The image is resized (Lanczos), keeping its shape, until it just covers the bucket, and centre-cropped. With
  `follow_mask`, the crop moves as little as needed to show the white part of the mask, or as much of it as fits.
* With `upscale = false`, an image that would have to be enlarged goes instead into the bucket of the largest area that
  fits inside it, under the same limits (nearest aspect ratio among equals).
* Clips are assigned like images, by the size of their frames; clips of one length share a bucket.

All functions are pure functions of sizes. Sizes are (width, height) as in PIL; the model gets (height, width), and such
names end in `_hw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, isqrt
from typing import Any

from PIL import Image, ImageEnhance

from ..errors import Message, UserError, about
from .image_edits import Box

Size = tuple[int, int]
Bucket = tuple[int, ...]
"""(width, height) for images, (width, height, frames) for clips."""


@dataclass(frozen=True)
class Placement:
    """How an image is fitted into its bucket: resized to `resized_wh`, then cropped to the bucket at `crop_xy`.

    Attributes:
        original_wh: size of the upright image.
        bucket_wh, resized_wh: pixels.
        crop_xy: left and top edge of the crop inside the resized image.
    """

    original_wh: Size
    bucket_wh: Size
    resized_wh: Size
    crop_xy: Size

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Return the crop inside the resized image: left, top, right and bottom."""
        (left, top), (width, height) = self.crop_xy, self.bucket_wh
        return left, top, left + width, top + height

    @property
    def centre(self) -> tuple[float, float]:
        """Return the middle of the crop inside the resized image, (x, y)."""
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2

    @property
    def original_hw(self) -> Size:
        """Return the size of the image before resizing (SDXL's `original_size`)."""
        return self.original_wh[1], self.original_wh[0]

    @property
    def crop_top_left(self) -> Size:
        """Return the top and left edge of the crop (SDXL's `crops_coords_top_left`)."""
        return self.crop_xy[1], self.crop_xy[0]

    @property
    def flipped_crop_top_left(self) -> Size:
        """Return the top and left edge of the mirrored image's crop: what was cut off at the right is at the left."""
        return self.crop_xy[1], self.resized_wh[0] - self.bucket_wh[0] - self.crop_xy[0]

    @property
    def target_hw(self) -> Size:
        """Return the size that is trained, (height, width) (SDXL's `target_size`)."""
        return self.bucket_wh[1], self.bucket_wh[0]

    def shows(self, box: Box) -> bool:
        """Return True if the crop contains any part of this box.

        Args:
            box: left, top, right and bottom, as fractions of the image's width and height.
        """
        inside = (
            box[axis] * resized < begin + size and box[axis + 2] * resized > begin
            for axis, (resized, begin, size) in enumerate(
                zip(self.resized_wh, self.crop_xy, self.bucket_wh, strict=True)
            )
        )
        return all(inside)

    @property
    def upscaled(self) -> bool:
        """Return True if the image has to be enlarged."""
        return self.resized_wh[0] > self.original_wh[0] or self.resized_wh[1] > self.original_wh[1]


@dataclass(frozen=True)
class Change:
    """What a variant of an image changes beside its crop: see `image_variants`.

    Attributes:
        angle: degrees by which the image is turned counterclockwise, about the middle of the crop.
        colour: factors of brightness, contrast and saturation; () leaves the colours as they are.
    """

    angle: float = 0.0
    colour: tuple[float, ...] = ()

    @property
    def key_parts(self) -> dict[str, Any]:
        """Return what is added to the key of a cache entry; {} if nothing is changed."""
        return {
            **({"angle": self.angle} if self.angle else {}),
            **({"colour": self.colour} if self.colour else {}),
        }

    def turn(self, image: Image.Image, centre: tuple[float, float], resample: Image.Resampling) -> Image.Image:
        """Turn an image about a point; its size stays."""
        return image.rotate(self.angle, resample, center=centre) if self.angle else image

    def recolour(self, image: Image.Image) -> Image.Image:
        """Change the colours of an image."""
        for enhancer, factor in zip(ENHANCERS, self.colour, strict=False):
            image = enhancer(image).enhance(factor)
        return image


ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
"""In the order of `Change.colour`."""
UNCHANGED = Change()


@dataclass(frozen=True)
class Placed:
    """An `images.Example` and its placement in a bucket.

    Attributes:
        example: the image or clip.
        placement: how it is fitted into its bucket.
        change: what else a variant changes.
        usual: the placement of the image as it is, if this is another variant. Sizes of control images follow from it,
            as all variants of an image share their batches.
    """

    example: Any
    placement: Placement
    change: Change = UNCHANGED
    usual: Placement | None = None

    @property
    def uid(self) -> str:
        """Return the example's unique name in the dataset."""
        return self.example.uid

    @property
    def bucket(self) -> Bucket:
        """Return the size that all examples of a batch share: width, height, and for clips the number of frames."""
        num_frames = len(self.example.frames)
        return (*self.placement.bucket_wh, num_frames) if num_frames > 1 else self.placement.bucket_wh


@lru_cache
def list_bucket_sizes(resolution: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    """Return all buckets, (width, height), from the tallest to the widest.

    Raises:
        UserError: the step is larger than the resolution.
    """
    if step > resolution:
        raise UserError(
            Message(
                "dataset.resolution = {resolution} is smaller than the bucket step of {step} pixels; raise the "
                "former or lower the latter",
                resolution=resolution,
                step=step,
            )
        )
    area, limit = resolution**2, Fraction(max_aspect)
    square = resolution // step * step
    sizes, narrow = {(square, square)}, []
    for width in range(step, isqrt(int(area * limit)) + 1, step):
        height = area // width // step * step
        if height >= step and max(Fraction(width, height), Fraction(height, width)) <= limit:
            sizes |= {(width, height), (height, width)}
        elif height > width and 4 * width * (shorter := int(width * limit) // step * step) >= 3 * area:
            narrow.append((width, shorter))
    widest = max(Fraction(*size) for size in sizes)
    narrow = [(width, height) for width, height in narrow if Fraction(height, width) > widest]
    if narrow:
        width, height = max(narrow, key=lambda size: (size[0] * size[1], size))
        sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes, key=lambda size: (Fraction(*size), size)))


def _compute_distance(shape: Size, other: Size) -> Fraction:
    """Return how many times wider or taller one shape is than the other, at least 1; its log is the distance."""
    ratio = Fraction(shape[0] * other[1], shape[1] * other[0])
    return max(ratio, 1 / ratio)


@lru_cache(maxsize=4096)  # a large dataset has few sizes, and is placed more than once
def find_nearest_bucket(size: Size, sizes: tuple[Size, ...]) -> Size:
    """Return the bucket whose aspect ratio is nearest to that of an image of this size."""
    return min(sizes, key=lambda bucket: (_compute_distance(size, bucket), -bucket[0] * bucket[1], -bucket[0]))


def find_inner_bucket(size: Size, resolution: int, step: int, max_aspect: float) -> Size:
    """Return the bucket of the largest area that an image of this size covers without being enlarged.

    Raises:
        UserError: the image is smaller than one step.
    """
    if min(size) < step:
        raise UserError(
            Message(
                "the image has {width} x {height} pixels, less than one bucket step ({step}), and dataset.upscale "
                "is false; remove the image, or set upscale = true",
                width=size[0],
                height=size[1],
                step=step,
            )
        )
    area, limit = resolution**2, Fraction(max_aspect)
    candidates = []
    for width in range(step, min(size[0], area // step) + 1, step):
        # The tallest that the image, the area and the aspect ratio allow; any other would only have a smaller area.
        height = min(size[1], area // width, int(width * limit)) // step * step
        if height >= step and Fraction(width, height) <= limit:
            candidates.append((width, height))
    return min(candidates, key=lambda bucket: (-bucket[0] * bucket[1], _compute_distance(size, bucket), -bucket[0]))


def compute_crop(size: Size, bucket: Size) -> tuple[Size, Size]:
    """Return the resized size that just covers the bucket, and (left, top) of the centre crop."""
    (width, height), (bucket_width, bucket_height) = size, bucket
    if bucket_width * height >= bucket_height * width:
        resized = bucket_width, max(bucket_height, _divide_rounded(height * bucket_width, width))
    else:
        resized = max(bucket_width, _divide_rounded(width * bucket_height, height)), bucket_height
    return resized, ((resized[0] - bucket_width) // 2, (resized[1] - bucket_height) // 2)


def find_subject(mask: Any, follow_mask: bool) -> Box | None:
    """Return the box around the white part of an `examples.Mask`, as shares of the image's sides, if crops follow it.

    An image without a mask, or with one that is black all over, has none.
    """
    return mask.white if follow_mask and mask is not None and mask.white and any(mask.white) else None


def keep_inside(edges: tuple[int, int], resized: int, side: int, subject: tuple[float, float]) -> tuple[int, int]:
    """Narrow the range of a crop's edge along one axis to where the crop shows the subject.

    Args:
        edges: the least and the most left (or top) edge that the crop may have.
        resized, side: pixels of the resized image and of the crop along the axis.
        subject: where the subject begins and ends, as shares of the image. If it is longer than the crop, the crop
            shows nothing but the subject.
    """
    begin, end = floor(subject[0] * resized), ceil(subject[1] * resized)
    least, most = (min(max(edge, edges[0]), edges[1]) for edge in sorted((end - side, begin)))
    return least, most


def follow(placement: Placement, subject: Box | None) -> Placement:
    """Move a crop as little as needed to show the subject."""
    if subject is None:
        return placement
    corners = []
    for axis, usual in enumerate(placement.crop_xy):
        resized, side = placement.resized_wh[axis], placement.bucket_wh[axis]
        least, most = keep_inside((0, resized - side), resized, side, (subject[axis], subject[axis + 2]))
        corners.append(min(max(usual, least), most))
    return replace(placement, crop_xy=(corners[0], corners[1]))


def _divide_rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def place(
    size: Size, resolution: int, step: int, *, max_aspect: float = 2.0, buckets: bool = True, upscale: bool = True
) -> Placement:
    """Place an image of this size (width, height of the upright image) in a bucket."""
    if not buckets:
        max_aspect = 1.0
    return _place(size, list_bucket_sizes(resolution, step, max_aspect), resolution, step, max_aspect, upscale)


def _place(
    size: Size, sizes: tuple[Size, ...], resolution: int, step: int, max_aspect: float, upscale: bool
) -> Placement:
    bucket = find_nearest_bucket(size, sizes)
    if not upscale and (size[0] < bucket[0] or size[1] < bucket[1]):
        bucket = find_inner_bucket(size, resolution, step, max_aspect)
    resized, crop = compute_crop(size, bucket)
    return Placement(size, bucket, resized, crop)


def compute_control_box(placement: Placement, size: Size) -> tuple[int, int, int, int]:
    """Return the part of a control image of this size that is used: (left, top, right, bottom) in its pixels.

    A control image with the shape of its image is cropped as the image is, so that both stay aligned; any other is used
    whole.
    """
    if not has_same_shape(placement.original_wh, size):
        return 0, 0, *size
    edges = []
    for first, length, whole, side in zip(
        placement.crop_xy, placement.bucket_wh, placement.resized_wh, size, strict=True
    ):  # across, then down
        begin, end = _divide_rounded(first * side, whole), _divide_rounded((first + length) * side, whole)
        edges.append((begin, max(end, begin + 1)))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def assign(examples: Sequence[Any], section: Any, *, resolution: int, step: int) -> list[Placed]:
    """Place every example, in the same order.

    Args:
        examples: `images.Example`s.
        section: `settings.Dataset`; buckets, max_aspect, upscale, follow_mask and the folders' resolutions are read.
        resolution, step: resolved numbers, since the section may leave them to the family.

    Raises:
        UserError: an image cannot be placed; the message names it.
    """
    max_aspect = section.max_aspect if section.buckets else 1.0
    sides = [folder.resolution or resolution for folder in section.folders]
    sizes = {side: list_bucket_sizes(side, step, max_aspect) for side in dict.fromkeys(sides)}
    placed = []
    for example in examples:
        side = sides[example.folder_index]
        try:
            placement = _place((example.width, example.height), sizes[side], side, step, max_aspect, section.upscale)
        except UserError as error:
            raise UserError(about(example.path, error)) from None
        placed.append(Placed(example, follow(placement, find_subject(example.mask, section.follow_mask))))
    return placed


def format_bucket(bucket: Bucket) -> str:
    """Return a bucket as text: 640x448, or 640x448x17 for clips of 17 frames."""
    return "x".join(map(str, bucket))


def group(placed: Sequence[Placed]) -> dict[Bucket, list[Placed]]:
    """Group examples by bucket; buckets are sorted by size, and the order inside each is kept."""
    groups: dict[Bucket, list[Placed]] = {}
    for image in placed:
        groups.setdefault(image.bucket, []).append(image)
    return dict(sorted(groups.items()))


def has_same_shape(size: Size, other: Size) -> bool:
    """Return True if two images have the same aspect ratio within 1 %, which allows for rounding to whole pixels."""
    return _compute_distance(size, other) <= Fraction(101, 100)


def fit(image: Image.Image, placement: Placement, change: Change = UNCHANGED) -> Image.Image:
    """Resize an image, turn it, crop it to its bucket, and change its colours."""
    if image.size != placement.resized_wh:
        image = image.resize(placement.resized_wh, Image.Resampling.LANCZOS)
    image = change.turn(image, placement.centre, Image.Resampling.BICUBIC)
    return change.recolour(image.crop(placement.box))


def fit_mask(mask: Image.Image, placement: Placement, change: Change = UNCHANGED) -> Image.Image:
    """Resize, turn and crop a mask, which has its image's shape, as the image is."""
    if mask.size != placement.resized_wh:
        # Not Lanczos: it overshoots at edges, and areas that are black would no longer be.
        mask = mask.resize(placement.resized_wh, Image.Resampling.BILINEAR)
    return change.turn(mask, placement.centre, Image.Resampling.BILINEAR).crop(placement.box)
