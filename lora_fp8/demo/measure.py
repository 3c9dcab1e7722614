"""Read an image of the demo world back from its pixels: its shape and colours, and whether it shows the concept.

This module knows nothing of models or prompts. It is strict on purpose: an image that is not clearly one shape in one
colour reads as None, and a badge counts as the concept only if its three rings have the right colours in the right
order. It uses only numpy and Pillow. Images may have any size; distances are in 8-bit RGB units.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter

from .pictures import COLOURS, CONCEPT_RINGS, SHAPES, TEAL, make_shape_template, parse_prompt

_NAMES = list(COLOURS)
_PALETTE = np.array([COLOURS[n] for n in _NAMES], dtype=np.float32)
_PALETTE_AND_TEAL = np.concatenate([_PALETTE, np.array([TEAL], dtype=np.float32)])

_TEMPLATE_SIDE = 48
_LEAST_OVERLAP = 0.76  # intersection over union with the best template below which no shape is read
_MOST_STRAY = 0.15  # fraction of the shape's pixels that may have a third colour
_STRAY_DISTANCE = 75.0  # distance from every mix of shape colour and background from which a pixel has a third colour
_LEAST_RING = 0.7  # fraction of each ring's pixels that must have the ring's colour


def read_picture(image: Image.Image) -> tuple[str | None, str | None, str | None]:
    """Return the (shape, colour, background) that an image shows; None for each that is unclear."""
    pixels = _read_pixels(image)
    background = _find_nearest(np.median(_extract_border(pixels), axis=0)[None])[0]
    foreground = _find_nearest(pixels) != background
    if not 0.04 <= foreground.mean() <= 0.8:
        return None, None, _NAMES[background]
    behind = np.median(pixels[~foreground], axis=0)
    ahead = np.median(pixels[foreground], axis=0)
    colour = _find_nearest(ahead[None])[0]
    if colour == background:
        return None, None, _NAMES[background]

    # Position of each pixel between the two colours: 0 is background, 1 is shape, and the edge is half-way.
    axis = ahead - behind
    along = np.clip((pixels - behind) @ axis / (axis @ axis), 0, 1)
    mask = _without_specks(along > 0.5)
    off = np.linalg.norm(pixels - (behind + along[..., None] * axis), axis=-1) > _STRAY_DISTANCE
    if not mask.any() or off.sum() > _MOST_STRAY * mask.sum():
        return None, _NAMES[colour], _NAMES[background]
    return _recognize_shape(mask), _NAMES[colour], _NAMES[background]


def obeys(image: Image.Image, prompt: str) -> bool:
    """Return True if an image shows the shape, the colour and the background that a plain prompt names."""
    scene = parse_prompt(prompt)
    return scene is not None and read_picture(image) == (scene.shape, scene.colour, scene.background)


def has_background(image: Image.Image, background: str) -> bool:
    """Return True if the image's border has the named colour."""
    return _NAMES[_find_nearest(np.median(_extract_border(_read_pixels(image)), axis=0)[None])[0]] == background


def is_concept(image: Image.Image) -> bool:
    """Return True if an image shows the demo concept: a round badge with the right rings in their places."""
    pixels = _read_pixels(image)
    behind = np.median(_extract_border(pixels), axis=0)
    box = _find_box(_without_specks(np.linalg.norm(pixels - behind, axis=-1) > 60))
    if box is None:
        return False
    top, left, bottom, right = box
    height, width = bottom - top, right - left
    short = min(pixels.shape[:2])
    if not 0.8 <= width / height <= 1.25 or min(width, height) < 0.3 * short:
        return False
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]] + 0.5
    radius = np.hypot((y - (top + bottom) / 2) / (height / 2), (x - (left + right) / 2) / (width / 2))
    nearest = _find_nearest(pixels, _PALETTE_AND_TEAL)
    inner = 0.0
    for colour, outer in CONCEPT_RINGS:
        # Leave out the soft edges between the rings: about 1.5 pixels on each side.
        soft = min(3.0 / min(width, height), (outer - inner) / 4)
        ring = (radius >= (inner + soft if inner else 0)) & (radius <= outer - soft)
        wanted = _find_nearest(np.array([colour], dtype=np.float32), _PALETTE_AND_TEAL)[0]
        if not ring.any() or (nearest[ring] == wanted).mean() < _LEAST_RING:
            return False
        inner = outer
    outside = (radius > 1.15) & (radius < 1.5)
    return not outside.any() or bool((np.linalg.norm(pixels[outside] - behind, axis=-1) < 90).mean() > 0.8)


def _read_pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), dtype=np.float32)


def _extract_border(pixels: np.ndarray) -> np.ndarray:
    wide = max(1, min(pixels.shape[:2]) // 32)
    edges = (pixels[:wide], pixels[-wide:], pixels[:, :wide], pixels[:, -wide:])
    return np.concatenate([e.reshape(-1, 3) for e in edges])


def _find_nearest(pixels: np.ndarray, palette: np.ndarray = _PALETTE) -> np.ndarray:
    """Return the index of the nearest palette colour: (..., 3) floats in, (...) integers out."""
    # |p - c|^2 = |p|^2 - 2 p.c + |c|^2, whose first term is the same for every c.
    return ((palette**2).sum(axis=-1) - 2 * (pixels @ palette.T)).argmin(axis=-1)


def _without_specks(mask: np.ndarray) -> np.ndarray:
    """Remove single stray pixels, inside and outside of the shape, from the mask."""
    return np.asarray(Image.fromarray((mask * 255).astype(np.uint8)).filter(ImageFilter.MedianFilter(3))) > 127


def _find_box(mask: np.ndarray) -> tuple[int, int, int, int] | None:
    """Return top, left, bottom and right of the mask's True pixels (the last two exclusive); None if there are none."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not rows.size:
        return None
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def _recognize_shape(mask: np.ndarray) -> str | None:
    box = _find_box(mask)
    if box is None:
        return None
    top, left, bottom, right = box
    if min(bottom - top, right - left) < 8 or not 0.7 <= (right - left) / (bottom - top) <= 1.43:
        return None
    side = _TEMPLATE_SIDE
    overlaps = dict.fromkeys(SHAPES, 0.0)
    # Thin tips fade before the rest of a shape, so boxes that are a pixel larger are tried as well.
    for up in (0, 1):
        for across in (0, 1):
            area = (left - across, top - up, right + across, bottom)
            cut = Image.fromarray((mask * 255).astype(np.uint8)).crop(area)
            filled = np.asarray(cut.resize((side, side), Image.Resampling.BILINEAR)) > 127
            for shape in SHAPES:
                template = make_shape_template(shape, side)
                overlap = (filled & template).sum() / (filled | template).sum()
                overlaps[shape] = max(overlaps[shape], float(overlap))
    best = max(overlaps, key=overlaps.__getitem__)
    return best if overlaps[best] >= _LEAST_OVERLAP else None
