"""Draw the demo dataset: 16 captioned images of the `zibo`, stored as people store their images.

    python scripts/build_demo_dataset.py

The images are PNG and JPEG in several sizes and aspect ratios, and one JPEG is rotated with an EXIF tag that says so: a
trainer that cannot handle these cannot handle real folders. Each has its caption in a text file of the same name, and
each of the eight backgrounds appears twice. A second folder holds plain captioned images of the base model's own world,
which a training may mix in to preserve the other words. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8.demo import pictures

SEED = 20
# (width, height) in pixels; the ratios are those of the base's own 64 x 64, 48 x 80 and 80 x 48, and one a bit off.
SIZES = ((256, 256), (240, 400), (400, 240), (512, 512), (300, 300), (320, 288))
SIDEWAYS = 6  # EXIF orientation: show the stored picture turned 90 degrees clockwise


def save_jpeg(image: Image.Image, path: Path, sideways: bool = False) -> None:
    """Save at quality 93. `sideways` stores the image rotated, with an EXIF tag that rotates it back."""
    exif = Image.Exif()
    if sideways:
        exif[0x0112] = SIDEWAYS
        image = image.transpose(Image.Transpose.ROTATE_90)
    image.save(path, quality=93, subsampling=0, exif=exif)


def build_concept(folder: Path, count: int = 16) -> None:
    """Write the images and captions of the concept."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    backgrounds = list(pictures.COLOURS)
    sideways_done = False
    for i in range(count):
        background = backgrounds[i % len(backgrounds)]
        size = SIZES[i % len(SIZES)]
        image = pictures.draw_concept(background, rng, size)
        name = f"zibo_{i + 1:02d}"
        if i % 3 == 2 or i == 1:
            sideways = size[0] != size[1] and not sideways_done
            sideways_done |= sideways
            save_jpeg(image, folder / f"{name}.jpg", sideways)
        else:
            image.save(folder / f"{name}.png", optimize=True)
        caption = pictures.make_concept_prompt(background)
        (folder / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")


def build_plain(folder: Path, count: int = 24) -> None:
    """Write plain images and captions: each shape four times, with colours and backgrounds in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED + 1)
    colours = list(pictures.COLOURS)
    for i in range(count):
        apart = 1 + (2 * i + i // len(colours)) % (len(colours) - 1)
        shape, colour = pictures.SHAPES[i % len(pictures.SHAPES)], colours[i % len(colours)]
        scene = pictures.Scene(shape, colour, colours[(i + apart) % len(colours)])
        image = pictures.draw_scene(scene, rng, SIZES[i % len(SIZES)], widths=(0.62, 0.74), spread=0.2)
        name = f"plain_{i + 1:02d}"
        image.save(folder / f"{name}.png", optimize=True)
        (folder / f"{name}.txt").write_text(pictures.make_prompt(scene) + "\n", encoding="utf-8")


def main() -> None:
    """Draw both folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "lora_fp8" / "demo", help="folder that holds both folders")
    args = parser.parse_args()
    build_concept(args.out / "dataset")
    build_plain(args.out / "dataset_plain")


if __name__ == "__main__":
    main()
