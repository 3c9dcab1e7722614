"""Find folders of images and videos for the form, count what is in them, and add uploads.

Uploads go into the page's own folder, or into the folder that is open on the Dataset page, byte for byte, after a child
process with limits has decoded each. An existing file is never overwritten.
"""

import codecs
import contextlib
import filecmp
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_fp8.common import system
from lora_fp8.common.reading import read_bytes
from lora_fp8.common.writing import make_folder, sync_folder, write_synced
from lora_fp8.data import clips, image_edits
from lora_fp8.data.caption_text import CAPTIONS
from lora_fp8.data.decoding import EXTENSIONS, HEIC_NEEDED
from lora_fp8.data.image_files import HEIC_IMAGES, OTHER_IMAGES, OTHER_VIDEOS, find_label_files, find_masked_stem
from lora_fp8.errors import Message, UserError

from . import sanitize
from .decoder import Decoders

MOST_UPLOADED = 5000
LONGEST_CAPTION = 1 << 20
DEEPEST = 5
"""How many names an uploaded file's path may have."""
TAKEN = (*EXTENSIONS, *clips.VIDEOS, *CAPTIONS)
"""Extensions of files that can be uploaded."""
DEEP = 2
"""How many levels below a root folders are offered. Any folder can be typed."""
FRESH_SECONDS = 4.0
_counted: dict[tuple[Path, str], tuple[float, "Count"]] = {}
_decoders = Decoders(1)


LABEL = "*-masklabel"
"""OneTrainer's name for masks beside their images. They are never images, whatever is set."""
MASKS = ("*_mask", "*-mask")
"""Names that such masks often have. They count as images until the setting says that they are masks."""


@dataclass(frozen=True)
class Count:
    """Contents of a folder by file name.

    `masks` of the files look like masks of others by the name pattern `mask`, and no setting says so.
    """

    pictures: int = 0
    without_caption: int = 0
    videos: int = 0
    masks: int = 0
    mask: str = ""

    @property
    def files(self) -> int:
        """Return images and videos."""
        return self.pictures + self.videos


def count_files(folder: Path, mask: str = "") -> Count:
    """Count the files of a folder and its subfolders, without hidden and excluded ones.

    The result is a few seconds old at most.

    Args:
        mask: the folder's mask setting: masks beside the images are not counted.
    """
    now = time.monotonic()
    known = _counted.get((folder, mask))
    if known is None or now - known[0] > FRESH_SECONDS:
        pictures = videos = labelled_masks = 0
        excluded: set[str] = set()
        seen: dict[str, bool] = {}  # whether each has a caption
        with contextlib.suppress(UserError):  # the check of the folder reports it
            edits = image_edits.read(folder)
            excluded = {os.path.join(folder, name) for name, edit in edits.items() if edit.exclude}
        for inner, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            captions = {
                Path(name).stem
                for name in names
                if Path(name).suffix.lower() in CAPTIONS and not _is_empty_text(os.path.join(inner, name))
            }
            labels = find_label_files(names)
            labelled_masks += sum(find_masked_stem(LABEL, name) != "" for name in labels)
            for name in names:
                suffix = Path(name).suffix.lower()
                if name.startswith(".") or name in labels or find_masked_stem(mask, name):
                    continue
                if os.path.join(inner, name) in excluded:
                    continue
                if suffix in (*EXTENSIONS, *clips.VIDEOS):
                    pictures += suffix in EXTENSIONS
                    videos += suffix in clips.VIDEOS
                    seen[os.path.join(inner, name)] = Path(name).stem in captions
        likely, masks = ("", 0)
        if not mask:
            likely, masks = (LABEL, labelled_masks) if labelled_masks else find_likely_masks(seen, seen.__getitem__)
        without = sum(not has for has in seen.values())
        known = _counted[folder, mask] = (now, Count(pictures, without, videos, masks, likely))
    return known[1]


def _is_empty_text(path: str) -> bool:
    """Return True if a text file has no letters; only files of a few bytes are read."""
    try:
        return os.path.getsize(path) <= 8 and not read_bytes(path).removeprefix(codecs.BOM_UTF8).strip()
    except OSError:
        return False


def find_likely_masks(names: Collection[str], captioned: Callable[[str], bool]) -> tuple[str, int]:
    """Return the pattern of MASKS by which files look like masks of their neighbours, and their number; or ("", 0).

    Args:
        names: relative names of all images and videos.
        captioned: returns whether the file has a caption. Masks have none.
    """
    stems = {os.path.splitext(name)[0] for name in names}
    for mask in MASKS:
        whose = {name: find_masked_stem(mask, os.path.basename(name)) for name in names if "mask" in name}
        fitting = [name for name, stem in whose.items() if stem]
        beside = (os.path.join(os.path.dirname(name), whose[name]) in stems for name in fitting)
        if fitting and all(beside) and not any(map(captioned, fitting)):
            return mask, len(fitting)
    return "", 0


def find_folders(roots: Iterable[Path]) -> list[Path]:
    """Find folders with images or videos near the roots."""
    folders: list[Path] = []
    for root in roots:
        waiting = [(root, 0)]
        while waiting and len(folders) < 200:
            folder, depth = waiting.pop(0)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue  # deleted or not readable: not offered
            if any(Path(entry.name).suffix.lower() in (*EXTENSIONS, *clips.VIDEOS) for entry in entries):
                folders.append(folder)
            if depth < DEEP:
                inner = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
                waiting += [(Path(entry.path), depth + 1) for entry in inner]
    return list(dict.fromkeys(folders))


def add_file(file: Path, folder: Path, name: str) -> Literal["taken", "captions", "there"]:
    """Copy one uploaded file into a folder, after checking it.

    Args:
        file: the upload.
        folder: made if it does not exist.
        name: the file's name there, "/" between subfolders.

    Returns:
        What it counts as: "taken" is a new image or video, "captions" a new caption, "there" one that is there already.

    Raises:
        UserError: the name or the file is refused, or another file has this name.
        OSError: the folder cannot be written.
    """
    parts = [sanitize.check_name(part, sanitize.LONGEST_IMAGE_NAME) for part in name.split("/")]
    if len(parts) > DEEPEST:
        raise UserError(Message("{name}: folders are nested too deeply", name=sanitize.shorten(name)))
    _check_upload(file)
    target = folder.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise UserError(Message("{name}: this link leads out of the folder", name=sanitize.shorten(name)))
    make_folder(folder, 0o700)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if not filecmp.cmp(target, file, shallow=False):
            raise UserError(Message("{name}: another file of this name exists already; rename it", name=name))
        return "there"
    _copy_whole(file, target)
    for known in [known for known in list(_counted) if known[0] == folder]:
        _counted.pop(known, None)
    return "captions" if target.suffix in CAPTIONS else "taken"


def _copy_whole(file: Path, target: Path) -> None:
    """Copy a file so that its name exists only when all of it is written."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(file, "rb") as source, write_synced(temporary) as copy:
            shutil.copyfileobj(source, copy)
        system.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _check_upload(file: Path) -> None:
    """Refuse files that are no caption and no image or video that can be decoded. Raises UserError."""
    suffix = file.suffix.lower()
    if suffix in EXTENSIONS or (suffix in clips.VIDEOS and clips.can_read_videos()):
        _decoders.decode_whole(file)
    elif suffix in clips.VIDEOS:
        raise UserError(Message("{file}: {line}", file=file.name, line=clips.NEEDED))
    elif suffix in HEIC_IMAGES:
        raise UserError(Message("{file}: {line}", file=file.name, line=HEIC_NEEDED))
    elif suffix in OTHER_IMAGES:
        kind = OTHER_IMAGES[suffix] or suffix
        raise UserError(Message("{file}: {kind} cannot be read; convert it to JPEG or PNG", file=file.name, kind=kind))
    elif suffix in OTHER_VIDEOS:
        raise UserError(Message("{file}: {kind} cannot be read; convert it to MP4", file=file.name, kind=suffix))
    elif file.suffix not in CAPTIONS or file.stat().st_size > LONGEST_CAPTION:
        raise UserError(
            Message(
                "{file}: this is not an image ({pictures}), a video ({videos}) or a caption ({captions})",
                file=file.name,
                pictures=" ".join(EXTENSIONS),
                videos=" ".join(clips.VIDEOS),
                captions=" ".join(CAPTIONS),
            )
        )
