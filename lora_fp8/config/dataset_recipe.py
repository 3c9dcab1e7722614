"""What a recipe takes from the images: number of steps, validation, previews, and whether captions are shuffled.

These values are written into the config by `lora-fp8 new`, because they depend on files that may change later.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import families
from ..common.numbers import format_digits
from ..data.caption_style import detect_style
from ..data.caption_text import read_caption
from ..data.clips import VIDEOS
from ..data.decoding import EXTENSIONS
from ..data.examples import ScanReport
from ..data.image_files import Listing, apply_edits, walk
from ..errors import Message, Plural, UserError, missing_folder, reason
from ..settings import has_options
from .recipes import GOAL_RULES, IMAGES_PER_STEP, Value, fit_card, has_dropout

TIMES = {"character": 80, "style": 40, "concept": 50, "object": 80, "edit": 60}
"""How often each image is trained."""
BOUNDS = {"character": (500, 3000), "style": (800, 5000), "concept": (600, 4000), "object": (400, 2500)}
BOUNDS |= {"edit": (600, 5000)}
"""Fewest and most steps: few images are learned before they are memorized, and many need not all be seen so often."""
ROUND = 50
HELD_OUT_FROM, HELD_OUT, MOST_HELD_OUT = 15, 0.1, 8
"""From so many images on, this share is held out, and at most so many: five noise levels each take time."""
PREVIEWS, MEASUREMENTS = 5, 10
"""How often previews are drawn and the held-out loss is measured, beside the start."""
CLIP_STEPS = (16, 8, 4)
"""Frames of a clip after its first: the usual number, and fewer for cards that are too small for it."""
MOST_PAIRS = 2
"""Previews that are proposed for an editing model."""
MOST_READ = 500
"""Captions that are read to tell tags from sentences."""
REPEATS = re.compile(r"([1-9]\d{0,2})_")
"""Begins the name of a folder in the layout of kohya's trainers: its repeats."""


@dataclass(frozen=True)
class Pictures:
    """The files of the image folders, by their names, with the style of their captions.

    Attributes:
        images: number of images, or of pairs for editing.
        samples: the same with each folder's repeats: the samples of an epoch.
        videos: number of videos.
        uncaptioned: number of images without a caption.
        style: "tags", "sentences", or "" if no caption tells.
        captions: the first captions.
    """

    images: int = 0
    samples: float = 0
    videos: int = 0
    uncaptioned: int = 0
    style: str = ""
    captions: list[str] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Return images and videos."""
        return self.images + self.videos


def expand_folder(folder: Path) -> list[tuple[Path, int]]:
    """Return an image folder with its repeats: for kohya's layout (`10_zibo` in it), each such folder with its number.

    Raises:
        UserError: the folder does not exist or cannot be read.
    """
    root = Path(os.path.expanduser(folder))
    try:
        inner = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and REPEATS.match(entry.name))
    except FileNotFoundError:
        raise missing_folder(folder) from None
    except OSError as error:
        raise UserError(Message("{path}: {why}", path=folder, why=reason(error))) from None
    if not inner:
        match = REPEATS.match(root.name)
        return [(folder, int(match[1]) if match else 1)]
    return [(folder / name, int(name.partition("_")[0])) for name in inner]


def scan_folders(folders: Sequence[tuple[Path, float]], masks: Mapping[Path, str] | None = None) -> Pictures:
    """Count the files of image folders with their repeats, and read captions. No image is opened.

    Args:
        folders: each with its repeats.
        masks: `dataset.folders.mask` of each folder that has it: masks beside the images are not counted.

    Raises:
        UserError: a folder cannot be read.
    """
    images = videos = uncaptioned = 0
    samples: float = 0
    captions: list[str] = []
    for folder, repeats in folders:
        listed = _list_images(folder, (masks or {}).get(folder, ""))
        videos += sum(path.suffix.lower() in VIDEOS for path, _ in listed)
        images += sum(path.suffix.lower() in EXTENSIONS for path, _ in listed)
        samples += repeats * len(listed)
        for _, file in listed:
            caption = _read(file) if file and len(captions) < MOST_READ else ""
            uncaptioned += file is None
            captions += [caption] if caption else []
    return Pictures(images, samples, videos, uncaptioned, detect_style(captions), captions)


def _list_images(folder: Path, mask: str = "") -> list[tuple[Path, Path | None]]:
    """List the images and videos of a folder as training does, each with its caption file."""
    listing = Listing(Path(os.path.expanduser(folder)), mask, (*EXTENSIONS, *VIDEOS))
    report = ScanReport()  # `check` shows what is in it
    try:
        for inner, names in walk(listing.root):
            listing.add(inner, names, report)
    except OSError as error:
        raise UserError(Message("{path}: {why}", path=folder, why=reason(error))) from None
    apply_edits(listing, report)
    return listing.images


def _read(file: Path) -> str:
    try:
        return read_caption(file)
    except (ValueError, OSError):  # `check` names the file
        return ""


def choose_values(goal: str, family: str, pictures: Pictures, trigger: str = "", card: int = 0) -> list[Value]:
    """Return what the images ask for: steps, validation, shuffling, frames, and what to do without captions.

    Args:
        goal: one of `recipes.GOALS`.
        family: a known family.
        pictures: what is in the image folders.
        trigger: the trigger word, or "".
        card: GB of GPU memory, one of `recipes.CARDS`, for the number of frames; 0 is any.
    """
    held_out = count_held_out(pictures.files)
    length = _choose_steps(goal, pictures, held_out)
    chosen = [length]
    if held_out:
        every = max(ROUND, round(length.value / MEASUREMENTS / ROUND) * ROUND)
        why = Message(
            "{held_out} of {count} images are held out for validation. Their loss rises when the LoRA memorizes the "
            "others.",
            held_out=held_out,
            count=pictures.files,
        )
        chosen += [Value("validation.pictures", held_out, why)]
        chosen += [Value("validation.every", every, Message("About ten measurements over the training."))]
    chosen += _choose_caption_values(family, pictures, trigger)
    if pictures.videos and any(families.get(family).clips):
        chosen.append(_choose_frames(goal, family, pictures.videos, card))
    return chosen


def _choose_frames(goal: str, family: str, videos: int, card: int) -> Value:
    """Choose the usual length of clips, or a shorter one if only that fits the card."""
    step, _ = families.get(family).clips
    lengths = [1 + most // step * step for most in CLIP_STEPS if most >= step]
    usual = lengths[0]
    dropout = has_dropout(goal)
    fitting = (frames for frames in lengths if not card or not fit_card(family, card, frames, dropout).problem)
    frames = next(fitting, usual)
    if frames == usual:
        why = Plural(
            "{count} video is trained as clips of this many frames. More frames need more GPU memory.",
            "{count} videos are trained as clips of this many frames. More frames need more GPU memory.",
        )(count=videos)
    else:
        why = Plural(
            "{count} video is trained as clips of this many frames, because {frames} frames do not fit a GPU of {gb} "
            "GB.",
            "{count} videos are trained as clips of this many frames, because {frames} frames do not fit a GPU of "
            "{gb} GB.",
        )(
            count=videos,
            frames=usual,
            gb=card,
        )
    return Value("dataset.frames", [frames], why)


def count_held_out(files: int) -> int:
    """Return how many of the images are held out for validation; 0 if there are too few."""
    return min(MOST_HELD_OUT, round(files * HELD_OUT)) if files >= HELD_OUT_FROM else 0


def _choose_steps(goal: str, pictures: Pictures, held_out: int) -> Value:
    times, (least, most) = TIMES[goal], BOUNDS[goal]
    trained = pictures.files - held_out
    if trained < 1:
        rule = next(rule for rule in GOAL_RULES[goal] if rule.key == "train.steps")
        return Value(rule.key, rule.value, rule.why)
    exact = trained * times / IMAGES_PER_STEP
    steps = max(least, min(most, round(exact / ROUND) * ROUND))
    samples = pictures.samples * trained / pictures.files
    numbers: dict[str, Any] = {
        "trained": trained,
        "times": times,
        "batch": IMAGES_PER_STEP,
        "exact": format_digits(exact),
        "epochs": format_digits(steps * IMAGES_PER_STEP / samples),
        "samples": format_digits(samples),
    }
    if steps in (least, most) and abs(steps - exact) > ROUND:
        why = Message(
            "{trained} images x {times} times / {batch} a step = {exact}, kept within {least} and {most}: {epochs} "
            "epochs of {samples} samples.",
            **numbers,
            least=least,
            most=most,
        )
    else:
        why = Message(
            "{trained} images x {times} times / {batch} a step = {exact}: {epochs} epochs of {samples} samples.",
            **numbers,
        )
    return Value("train.steps", steps, why)


def _choose_caption_values(family: str, pictures: Pictures, trigger: str) -> list[Value]:
    usual = families.get(family).captions
    chosen = []
    if pictures.style == "sentences" and usual == "tags":
        why = Message("Your captions are sentences, which are never shuffled.")
        chosen.append(Value("dataset.shuffle_tags", False, why))
    elif pictures.style == "tags" and usual == "sentences":
        why = Message("Your captions are tags, which are shuffled, so that the LoRA does not learn their order.")
        chosen.append(Value("dataset.shuffle_tags", True, why))
    if pictures.uncaptioned and trigger:
        why = Message(
            "{count} of {files} images have no caption and are trained with the trigger word. `lora-fp8 caption` "
            "writes better captions.",
            count=pictures.uncaptioned,
            files=pictures.files,
        )
        chosen.append(Value("dataset.missing_caption", "trigger", why))
    return chosen


PROMPTS = {
    "tags": {
        "character": ("{word}, portrait, smiling", "{word}, full body, walking, city, night"),
        "style": ("{word}, landscape, mountains, river", "{word}, portrait, woman, window light"),
        "concept": ("{word}, 1girl, standing, park", "{word}, 1boy, indoors"),
        "object": ("{word}, on a wooden table, close-up", "{word}, outdoors, on the beach"),
    },
    "sentences": {
        "character": ("A portrait of {word}, smiling.", "{word} walks through a city at night."),
        "style": ("A mountain landscape with a river, {word}.", "A portrait of a woman at a window, {word}."),
        "concept": ("A woman in a park, {word}.", "A man in a living room, {word}."),
        "object": ("A photo of {word} on a wooden table.", "A photo of {word} on a beach."),
    },
}
"""Prompts of the previews: two scenes that the images do not have, so that it shows what was learned."""


def propose_prompts(goal: str, family: str, pictures: Pictures, trigger: str) -> list[str]:
    """Return prompts for the previews: scenes with the trigger word; without one, or for edits, the first captions.

    What reads as an option of a preview, such as Midjourney's "--ar 16:9", is in none of them.
    """
    if trigger and goal != "edit":
        kind = pictures.style or families.get(family).captions
        prompts = [text.format(word=trigger) for text in PROMPTS["tags" if kind == "tags" else "sentences"][goal]]
        return [prompt for prompt in prompts if not has_options(prompt)]
    captions = dict.fromkeys(pictures.captions)
    return [caption for caption in captions if not has_options(caption)][:2]


def find_pairs(folder: Path, controls: Path) -> list[tuple[str, Path]]:
    """Return (caption, control image) of the first two images that have both; for the previews of edits."""
    pairs: list[tuple[str, Path]] = []
    root, other = Path(os.path.expanduser(folder)), Path(os.path.expanduser(controls))
    for path, file in _list_images(folder):
        if len(pairs) == MOST_PAIRS:
            break
        if path.suffix.lower() not in EXTENSIONS or file is None:
            continue
        beside = path.parent.relative_to(root)
        endings = (f"{path.stem}{part}{end}" for part in ("", "_1") for end in EXTENSIONS)
        control = next((controls / beside / end for end in endings if (other / beside / end).is_file()), None)
        if control is not None and (caption := _read(file)) and not has_options(caption):
            pairs.append((caption, control))
    return pairs
