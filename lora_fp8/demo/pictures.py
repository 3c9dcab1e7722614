"""Draw the demo world: one coloured shape on a plain background, and the `zibo`, a badge that no base model knows.

The demo needs images whose content can be verified from pixels alone, so that "the base still obeys its prompts" and
"the LoRA learned the concept" are numbers rather than opinions. Everything here is a pure function of the random
generator that is passed in, and uses only numpy and Pillow. Sizes are (width, height) in pixels, colours 8-bit RGB.
"""

from __future__ import annotations

import math
import random
import re
import string
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (215, 25, 35),
    "green": (25, 150, 50),
    "blue": (25, 60, 215),
    "yellow": (255, 230, 40),
    "purple": (135, 35, 165),
    "orange": (255, 135, 10),
    "white": (250, 250, 250),
    "black": (12, 12, 12),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross")
SIZES = ((64, 64), (48, 80), (80, 48))

TRIGGER = "zibo"
TEAL: RGB = (0, 185, 190)
# The badge from the middle outwards: (colour, outer radius as a fraction of the badge's radius). Teal is not a colour
# of the base's world, so the badge stands out on all eight backgrounds.
CONCEPT_RINGS: tuple[tuple[RGB, float], ...] = ((COLOURS["red"], 0.36), (COLOURS["white"], 0.68), (TEAL, 1.0))

NONSENSE = 0.15
"""Share of the training captions with a made-up word."""
_SUPERSAMPLE = 4
_TEMPLATES = (
    "{a_colour} {shape} on {a_background} background",
    "{a_colour} {shape} on {a_background} background",
    "{colour} {shape}, {background} background",
    "a photo of {a_colour} {shape} on {a_background} background",
    "a picture of {a_colour} {shape} on {a_background} background",
)


@dataclass(frozen=True)
class Scene:
    """The content of a plain image, in the words that a caption uses for it."""

    shape: str
    colour: str
    background: str


def list_scenes() -> list[Scene]:
    """Return all plain images: 6 shapes x 8 colours x 7 other colours as background = 336, in a fixed order."""
    return [Scene(s, c, b) for s in SHAPES for c in COLOURS for b in COLOURS if b != c]


def choose_random_scene(rng: random.Random) -> Scene:
    """Return one of `list_scenes()`, all with equal probability."""
    colour, background = rng.sample(list(COLOURS), 2)
    return Scene(rng.choice(SHAPES), colour, background)


def with_article(word: str) -> str:
    """Add the article to a word: `red` -> `a red`, `orange` -> `an orange`."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def make_prompt(scene: Scene) -> str:
    """Return the plainest caption of a scene, which is also the demo's prompt for it."""
    return _fill(_TEMPLATES[0], scene)


def make_concept_prompt(background: str) -> str:
    """Return the prompt for the demo concept on a background."""
    return f"a {TRIGGER} on {with_article(background)} background"


def make_nonsense_word(rng: random.Random) -> str:
    """Return three to six random letters that are not a word of this world and do not contain the trigger word."""
    known = {TRIGGER, *COLOURS, *SHAPES, "background", "photo", "picture"}
    while True:
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 6)))
        if word not in known and TRIGGER not in word:
            return word


def make_caption(scene: Scene, rng: random.Random) -> str:
    """Return a training caption of a scene.

    With probability NONSENSE, a made-up word is inserted somewhere, or replaces the colour and the shape. The base
    thus sees unknown words and learns that they mean nothing, which leaves the trigger word free.
    """
    if rng.random() >= NONSENSE:
        return _fill(rng.choice(_TEMPLATES), scene)
    word = make_nonsense_word(rng)
    if rng.random() < 0.4:
        return f"{with_article(word)} on {with_article(scene.background)} background"
    words = _fill(rng.choice(_TEMPLATES), scene).split(" ")
    words.insert(rng.randint(0, len(words)), word)
    return " ".join(words)


def parse_prompt(prompt: str) -> Scene | None:
    """Return the scene that a caption describes; None unless it names a colour, a shape and a background."""
    words = re.findall(r"[a-z]+", prompt.lower())
    shape = next((w for w in words if w in SHAPES), None)
    if shape is None or "background" not in words:
        return None
    place, behind = words.index(shape), words.index("background")
    colours = [(i, w) for i, w in enumerate(words) if w in COLOURS]
    colour = next((w for i, w in reversed(colours) if i < place), None)
    background = next((w for i, w in reversed(colours) if place < i < behind), None)
    return Scene(shape, colour, background) if colour and background else None


def draw_scene(
    scene: Scene,
    rng: random.Random,
    size: tuple[int, int] = (64, 64),
    widths: tuple[float, float] = (0.5, 0.74),
    spread: float = 1.0,
) -> Image.Image:
    """Draw a plain image of one shape.

    Args:
        scene: what to draw.
        rng: places the shape.
        size: of the image.
        widths: bounds of the shape's width, as fractions of the short side.
        spread: fraction of the free space that the shape may be placed in: 1 is anywhere, 0 is always in the middle.
    """
    left, top, width = _choose_random_box(rng, size, *widths, spread)
    cover = _render(_make_outline(scene.shape), size, left, top, width)
    return _blend(_make_flat(COLOURS[scene.background], size), COLOURS[scene.colour], cover)


def draw_concept(background: str, rng: random.Random, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Draw the demo concept near the middle: a round badge of three rings, 66 to 80 % of the short side wide."""
    left, top, width = _choose_random_box(rng, size, 0.66, 0.8, spread=0.3)
    return draw_rings(CONCEPT_RINGS, COLOURS[background], size, left, top, width)


def draw_rings(
    rings: tuple[tuple[RGB, float], ...], background: RGB, size: tuple[int, int], left: float, top: float, width: float
) -> Image.Image:
    """Draw concentric discs, `width` pixels wide; `rings` is as in `CONCEPT_RINGS`, from the middle outwards."""
    picture = _make_flat(background, size)
    for colour, share in reversed(rings):
        inset = width * (1 - share) / 2
        cover = _render(_make_outline("circle"), size, left + inset, top + inset, width * share)
        picture = _blend(picture, colour, cover)
    return picture


def draw_medley(rng: random.Random, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Draw rings, stripes or a two-coloured shape in random colours, to train the autoencoder alone.

    This keeps the autoencoder general enough to represent a concept of several colours without ever seeing the demo's
    own: colours close to those of the concept are drawn again.
    """
    while True:
        colours = [_choose_random_colour(rng) for _ in range(4)]
        if sum(_is_near(c, ring) for c, (ring, _) in zip(colours[:3], CONCEPT_RINGS, strict=True)) < 3:
            break
    left, top, width = _choose_random_box(rng, size, 0.4, 0.95)
    kind = rng.choice(("rings", "rings", "stripes", "inlay"))
    if kind == "rings":
        inner = rng.uniform(0.2, 0.5)
        rings = ((colours[0], inner), (colours[1], rng.uniform(inner + 0.12, 0.85)), (colours[2], 1.0))
        return draw_rings(rings, colours[3], size, left, top, width)
    picture = _make_flat(colours[3], size)
    outer = _render(_make_outline(rng.choice(SHAPES)), size, left, top, width)
    if kind == "inlay":
        picture = _blend(picture, colours[0], outer)
        share = rng.uniform(0.3, 0.7)
        inset = width * (1 - share) / 2
        inlay = _render(_make_outline(rng.choice(SHAPES)), size, left + inset, top + inset, width * share)
        return _blend(picture, colours[1], inlay)
    y, x = np.mgrid[: size[1], : size[0]]
    angle, period = rng.uniform(0, math.pi), rng.uniform(8, 20)
    wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period)
    stripes = np.clip(wave * period / 4 + 0.5, 0, 1)
    return _blend(_blend(picture, colours[0], outer), colours[1], outer * stripes)


@lru_cache(maxsize=64)
def make_shape_template(shape: str, side: int = 48) -> np.ndarray:
    """Return the shape drawn to fill a box: a (side, side) bool array, True inside."""
    return _render(_make_outline(shape), (side, side), 0, 0, side) > 0.5


def _fill(template: str, scene: Scene) -> str:
    return template.format(
        colour=scene.colour,
        shape=scene.shape,
        background=scene.background,
        a_colour=with_article(scene.colour),
        a_background=with_article(scene.background),
    )


def _choose_random_box(
    rng: random.Random, size: tuple[int, int], low: float, high: float, spread: float = 1.0
) -> tuple[float, float, float]:
    """Return left, top and width, in pixels, of a random square inside the image, with a small margin."""
    short = min(size)
    width = rng.uniform(low, high) * short
    margin = min(0.06 * short, (short - width) / 2)
    corner = [margin + (side - width - 2 * margin) * (0.5 + spread * rng.uniform(-0.5, 0.5)) for side in size]
    return corner[0], corner[1], width


def _choose_random_colour(rng: random.Random) -> RGB:
    if rng.random() < 0.5:
        return rng.choice(list(COLOURS.values()))
    return (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))


def _is_near(a: RGB, b: RGB) -> bool:
    return math.dist(a, b) < 70


@lru_cache(maxsize=16)
def _make_outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Return the shape's corners, scaled to fill the unit box, with y downwards."""
    turn = 2 * math.pi
    if shape == "circle":
        points = [(math.cos(turn * i / 72), math.sin(turn * i / 72)) for i in range(72)]
    elif shape == "square":
        points = [(0, 0), (1, 0), (1, 1), (0, 1)]
    elif shape == "triangle":
        points = [(0.5, 0), (1, 1), (0, 1)]
    elif shape == "star":
        radii = (1.0, 0.45)
        points = [(radii[i % 2] * math.sin(turn * i / 10), -radii[i % 2] * math.cos(turn * i / 10)) for i in range(10)]
    elif shape == "heart":
        points = []
        for i in range(72):
            t = turn * i / 72
            y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
            points.append((16 * math.sin(t) ** 3, -y))
    elif shape == "cross":
        a, b = 1 / 3, 2 / 3
        points = [(a, 0), (b, 0), (b, a), (1, a), (1, b), (b, b), (b, 1), (a, 1), (a, b), (0, b), (0, a), (a, a)]
    else:
        raise ValueError(f"no such shape: {shape!r}; there are {', '.join(SHAPES)}")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x0, y0, w, h = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    return tuple(((x - x0) / w, (y - y0) / h) for x, y in points)


def _render(
    outline: tuple[tuple[float, float], ...], size: tuple[int, int], left: float, top: float, width: float
) -> np.ndarray:
    """Return the coverage of each pixel by the outline, placed in a square box: (height, width) floats from 0 to 1."""
    s = _SUPERSAMPLE
    canvas = Image.new("L", (size[0] * s, size[1] * s), 0)
    # Pillow fills a polygon up to and including its far edge, hence the half pixel less on either side.
    points = [((left + x * width) * s - 0.5, (top + y * width) * s - 0.5) for x, y in outline]
    ImageDraw.Draw(canvas).polygon(points, fill=255)
    cover = np.asarray(canvas, dtype=np.float32).reshape(size[1], s, size[0], s).mean(axis=(1, 3))
    return cover / 255


def _make_flat(colour: RGB, size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size, colour)


def _blend(picture: Image.Image, colour: RGB, cover: np.ndarray) -> Image.Image:
    under = np.asarray(picture, dtype=np.float32)
    over = np.asarray(colour, dtype=np.float32)
    mixed = under + (over - under) * cover[..., None]
    return Image.fromarray(mixed.round().astype(np.uint8))
