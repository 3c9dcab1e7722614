"""Folders of pictures and videos as the form needs them: which there are, what is in them, and taking in new ones.

Uploads go into the page's own folder, or into the one that somebody has opened on the Dataset page, byte for byte as
they came, after each was decoded by a child process with limits. No file that is there is ever written over.
"""

import filecmp
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_fp8.config import UserError
from lora_fp8.data import clips
from lora_fp8.data.decoding import EXTENSIONS
from lora_fp8.data.images import CAPTIONS, labelled, masked_stem

from . import safe
from .decoder import Decoders

MOST_UPLOADED = 5000
LONGEST_CAPTION = 1 << 20
TAKEN = (*EXTENSIONS, *clips.VIDEOS, *CAPTIONS)
"""Extensions of files that are taken in."""
DEEP = 2
"""How far below a root folders of pictures are offered; any can be typed."""
FRESH_SECONDS = 4.0
_counted: dict[tuple[Path, str], tuple[float, "Count"]] = {}
_decoders = Decoders(1)


LABEL = "*-masklabel"
"""OneTrainer's name for masks beside their pictures, which are no pictures whatever is set."""
MASKS = ("*_mask", "*-mask")
"""Names that such masks often have; they are pictures as long as nobody says so."""


@dataclass(frozen=True)
class Count:
    """What a folder holds, by the names of its files; `masks` of them look like masks of others, by a name `mask`, and
    nobody said so."""

    pictures: int = 0
    without_caption: int = 0
    videos: int = 0
    masks: int = 0
    mask: str = ""

    @property
    def files(self) -> int:
        """Pictures and videos."""
        return self.pictures + self.videos


def count(folder: Path, mask: str = "") -> Count:
    """What is in a folder and its subfolders, hidden ones left out; a few seconds old at most.

    Args:
        mask: the setting of the folder: masks that lie beside the pictures are none.
    """
    now = time.monotonic()
    known = _counted.get((folder, mask))
    if known is None or now - known[0] > FRESH_SECONDS:
        pictures = videos = labelled_masks = 0
        seen: dict[str, bool] = {}  # whether each has a caption
        for inner, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            captions = {Path(name).stem for name in names if Path(name).suffix in CAPTIONS}
            labels = labelled(names)
            labelled_masks += sum(masked_stem(LABEL, name) != "" for name in labels)
            for name in names:
                suffix = Path(name).suffix.lower()
                if name.startswith(".") or name in labels or masked_stem(mask, name):
                    continue
                if suffix in (*EXTENSIONS, *clips.VIDEOS):
                    pictures += suffix in EXTENSIONS
                    videos += suffix in clips.VIDEOS
                    seen[os.path.join(inner, name)] = Path(name).stem in captions
        likely, masks = ("", 0)
        if not mask:
            likely, masks = (LABEL, labelled_masks) if labelled_masks else likely_masks(seen, seen.__getitem__)
        without = sum(not has for has in seen.values())
        known = _counted[folder, mask] = (now, Count(pictures, without, videos, masks, likely))
    return known[1]


def likely_masks(names: Collection[str], captioned: Callable[[str], bool]) -> tuple[str, int]:
    """The one of MASKS by which files look like masks of pictures or videos beside them, and how many; ("", 0).

    Args:
        names: relative names of all pictures and videos.
        captioned: whether the file of this name has a caption, which no mask has.
    """
    stems = {os.path.splitext(name)[0] for name in names}
    for mask in MASKS:
        whose = {name: masked_stem(mask, os.path.basename(name)) for name in names if "mask" in name}
        fitting = [name for name, stem in whose.items() if stem]
        beside = (os.path.join(os.path.dirname(name), whose[name]) in stems for name in fitting)
        if fitting and all(beside) and not any(map(captioned, fitting)):
            return mask, len(fitting)
    return "", 0


def folders(roots: Iterable[Path]) -> list[Path]:
    """Folders with pictures or videos in them, near the roots."""
    found: list[Path] = []
    for root in roots:
        waiting = [(root, 0)]
        while waiting and len(found) < 200:
            folder, depth = waiting.pop(0)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue  # gone, or not for us to read: not offered
            if any(Path(entry.name).suffix.lower() in (*EXTENSIONS, *clips.VIDEOS) for entry in entries):
                found.append(folder)
            if depth < DEEP:
                inner = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
                waiting += [(Path(entry.path), depth + 1) for entry in inner]
    return list(dict.fromkeys(found))


def take_in(files: list[str], folder: Path) -> tuple[int, list[str]]:
    """Copy uploaded pictures, videos and captions into a folder, each after a look at it.

    Returns:
        How many pictures and videos are new, and a line for each file that was refused.

    Raises:
        UserError: there are too many, or the folder cannot be written.
    """
    if len(files) > MOST_UPLOADED:
        raise UserError(f"{len(files)} files at once; upload at most {MOST_UPLOADED}, or name a folder")
    taken, refused = 0, []
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in map(Path, files):
            try:
                name = safe.name(file.name)
                _look(file)
                target = folder / name
                if target.exists() and not filecmp.cmp(target, file, shallow=False):
                    raise UserError(f"{name}: another file of this name is there already; rename it")
                if not target.exists():
                    with open(file, "rb") as source, open(target, "xb") as copy:
                        shutil.copyfileobj(source, copy)
                    taken += target.suffix not in CAPTIONS
            except UserError as error:
                refused.append(str(error))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    for known in [known for known in list(_counted) if known[0] == folder]:
        _counted.pop(known, None)
    return taken, refused


def _look(file: Path) -> None:
    """Refuse what is neither a picture or video that can be decoded nor a caption. Raises UserError."""
    suffix = file.suffix.lower()
    if suffix in EXTENSIONS or (suffix in clips.VIDEOS and clips.can_read_videos()):
        _decoders.check(file)
    elif suffix in clips.VIDEOS:
        raise UserError(f"{file.name}: {clips.NEEDED}")
    elif file.suffix not in CAPTIONS or file.stat().st_size > LONGEST_CAPTION:
        raise UserError(
            f"{file.name}: neither a picture ({' '.join(EXTENSIONS)}), a video ({' '.join(clips.VIDEOS)}) nor a "
            f"caption ({' '.join(CAPTIONS)})"
        )
