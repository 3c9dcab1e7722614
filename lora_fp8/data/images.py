"""Scan datasets: find the images, captions, control images and masks, and report every problem before a model loads.

`scan` walks the folders of a `[dataset]` section, decodes every image completely, reads every caption, and returns the
examples together with *problems* (training must not start) and *warnings* (it may). Nothing is guessed: a caption that
is neither UTF-8 nor UTF-16 with a byte-order mark is a problem that names the file and the byte offset. The scan never
writes into the user's folders.

Captions: the caption of `name.png` is `name.txt`, else `name.caption`, in the same folder. Lines are joined by spaces.
An empty caption counts as missing. If there is a trigger word (`Dataset.trigger_of`) and the caption does not contain
it as a separate word (case matters), it is prepended: "trigger, caption".

Control images, which editing models take beside the noise, are in a separate folder (`control`), under the image's name
with any of the extensions: `name.jpg` for `name.png`, with the same subfolders. Several control images of one image are
`name_1`, `name_2` and so on. They are decoded like images and have no captions.

Masks (`mask`) say which part of an image is trained: white in full, black with the weight objective.unmasked_weight.
The grey values count as stored, without a colour profile. A mask has the shape of its image; the mask of a clip applies
to all of its frames. Masks are in a separate folder, as control images are, or beside the images under a name such as
`*_mask` (such files are then not images), or the image's own transparency is its mask. Transparent parts of a mask
count as black. Files named as OneTrainer names masks and conditioning images (`name-masklabel.png` and
`name-condlabel.png`) are not images where they lie beside the image that they belong to.

With `dataset.frames`, video files are examples too, and animations (GIF, WebP, PNG) are clips, of which otherwise only
the first frame is used: see `clips`. Each piece of a clip is an example, with the clip's caption.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from .. import settings
from ..common.reading import MOST_TEXT, read_bytes
from ..errors import UserErrors
from . import clips
from .buckets import Placed, same_shape
from .caption_style import warn_of_sentences
from .decoding import BLACK, EXTENSIONS, Box, Light, Looked, light_of, look_all, opacity_of

OTHER_IMAGES = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIC"),
    ".jxl": "JPEG XL",
    **dict.fromkeys((".jp2", ".j2k", ".jpf", ".jpx"), "JPEG 2000"),
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"), "camera raw"),
    **dict.fromkeys((".psd", ".psb"), "Photoshop"),
    **dict.fromkeys((".tga", ".exr", ".svg"), ""),
}
"""Extensions of image formats that are not read -> the name that people know them by; "" shows the extension."""
OTHER_VIDEOS = (".avi", ".m4v", ".mts", ".m2ts", ".wmv", ".flv", ".mpg", ".mpeg", ".3gp", ".ogv", ".vob")

CAPTIONS = (".txt", ".caption")
"""Caption files in the order of preference."""


_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""Byte-order mark -> Python's name of the encoding that follows it."""


@dataclass(frozen=True)
class Control:
    """One control image: pixels of the upright image, and the SHA-256 of the file's bytes."""

    path: Path
    width: int
    height: int
    sha256: str


@dataclass(frozen=True)
class Mask:
    """The mask of an image: which part of it is trained.

    Attributes:
        path: the mask file, or the image itself if `alpha`.
        sha256: of that file's bytes.
        alpha: the mask is the image's own transparency, not the grey values of a file.
        white: box around everything that is not black, as in `Light`.
    """

    path: Path
    sha256: str
    alpha: bool = False
    white: Box | None = None


@dataclass(frozen=True)
class Example:
    """One image and its caption.

    Attributes:
        path: the image file.
        caption: as trained, with the trigger word prepended where needed.
        folder_index: which of `[[dataset.folders]]`, from 0.
        relative: path inside that folder, with forward slashes.
        repeats: how often it is trained in an epoch.
        width, height: pixels of the upright image.
        image_sha256: of the file's bytes.
        controls: its control images, in order.
        frames: for a clip, the numbers of the file's frames that it consists of, in order; () for an image.
        begins: second of the file at which the first of these frames is shown; None if unknown, or if another frame
            has the same time.
        mask: which part of it is trained; None means all of it.
    """

    path: Path
    caption: str
    folder_index: int
    relative: str
    repeats: int
    width: int
    height: int
    image_sha256: str
    controls: tuple[Control, ...] = ()
    frames: tuple[int, ...] = ()
    begins: Fraction | None = None
    mask: Mask | None = None

    @property
    def file_uid(self) -> str:
        """Key of the file inside the dataset, shared by all pieces of a clip."""
        return f"{self.folder_index}/{self.relative}"

    @property
    def uid(self) -> str:
        """Key of the example inside the dataset; stays the same when the dataset moves to another folder or machine."""
        return f"{self.file_uid}@{self.frames[0]}" if self.frames else self.file_uid


@dataclass
class ScanReport:
    """The result of a scan.

    `counts` has images, triggered, no_caption, skipped, upscaled, copies, controls, converted (to sRGB), clips (files),
    clip_frames (at the frame rate of training) and masked (images).
    """

    examples: list[Example] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def require(self) -> list[Example]:
        """Return the examples; raise `errors.UserErrors` with all problems if there are any."""
        if self.problems:
            raise UserErrors(self.problems, where="dataset")
        return self.examples


# ------------------------------------------------------------------------------------------------------------ captions


def decode_caption(raw: bytes) -> tuple[str, bytes, str]:
    """Decode the bytes of a caption file.

    Returns:
        The text with its line ends, the byte-order mark (b"" if there is none), and Python's name of the encoding.

    Raises:
        ValueError: as for `read_caption`.
    """
    mark = next((mark for mark in _MARKS if raw.startswith(mark)), b"")
    codec = _MARKS.get(mark, "utf-8")
    try:
        text = raw[len(mark) :].decode(codec)
    except UnicodeDecodeError as error:
        at = error.start + len(mark)
        shown = f" (0x{raw[at]:02x})" if at < len(raw) else ""
        raise ValueError(f"is not {codec[:6].upper()} at byte {at}{shown}; save it as UTF-8") from None
    # UTF-16 without a mark, and UTF-32, are valid in the narrower encoding but full of NULs.
    if "\0" in text:
        raise ValueError(f"has a NUL character at byte {raw.index(0)}; save it as UTF-8")
    return text, mark, codec


def read_caption(path: Path) -> str:
    """Read a caption file as one line: UTF-8 (with or without a mark), or UTF-16 with a byte-order mark.

    Raises:
        ValueError: the bytes are in another encoding; the message has the offset of the first invalid byte.
    """
    text = decode_caption(read_bytes(path, MOST_TEXT))[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


CHOICE = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")
"""A choice in a caption, such as `{red|blue}`: with dataset.wildcards one of the alternatives is drawn at random."""


def choice_in(caption: str) -> str:
    """Return the first `{a|b}` of a caption that contains a letter or digit (emoticons do not); "" if there is none."""
    return next((found[0] for found in CHOICE.finditer(caption) if re.search(r"\w", found[1])), "")


# Characters that join with their neighbours into one word. Thai, kana, ideographs and hangul are left out: they are
# written next to other words without a space.
_LETTER = r"[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"


def with_trigger(caption: str, trigger: str) -> str:
    """Prepend the trigger word to the caption, unless the caption already contains it as a separate word."""
    trigger = trigger.strip()
    if not trigger or re.search(rf"(?<!{_LETTER}){re.escape(trigger)}(?!{_LETTER})", caption):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


# ---------------------------------------------------------------------------------------------------------------- scan


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield (folder, sorted file names) for the root and all folders below it, in sorted order, without hidden names.

    Links to folders are followed; a folder that was already visited, as in a loop of links, is not visited again.
    """
    visited = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        entries = sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
        folders = [folder / entry for entry in entries if (folder / entry).is_dir()]
        waiting.extend(reversed(folders))
        yield folder, [entry for entry in entries if not (folder / entry).is_dir()]


def scan(
    section: settings.Dataset,
    num_controls: tuple[int, int] | None = None,
    previews: settings.Preview | None = None,
    clip_rate: int | None = None,
    unmasked_weight: float = settings.Objective().unmasked_weight,
) -> ScanReport:
    """Check every image, caption, control image and mask of the dataset.

    Args:
        section: the `[dataset]` section; folder paths are used as they are given. If its resolution is "auto", the
            caller has to call `note_sizes` to get the warnings about small images.
        num_controls: smallest and largest number of control images that the model takes for one image; None skips the
            check.
        previews: the `[preview]` section, whose control images are checked too.
        clip_rate: frames per second of the clips that the model draws, 0 if it draws none; None skips the check.
        unmasked_weight: the job's `objective.unmasked_weight`; if it is 0, a mask that is black all over is a problem.

    Returns:
        The report. Faulty files never raise: all problems are reported together. Examples are in the order of the
        folders in the config, then sorted by path.
    """
    report = ScanReport()
    if not section.folders:
        report.problems.append("dataset.folders: no folder is given; add a [[dataset.folders]] table with path = '...'")
    warn_of_nested(section, report)
    found: list[tuple[int, Path, Path, Path | None]] = []
    for index in range(len(section.folders)):
        found += list_folder(index, section, report, clip_rate)
    transparent = any(folder.mask == "alpha" for folder in section.folders)
    looks = list(look_all([path for _, _, path, _ in found], section, opacity_of if transparent else None))
    controls = _controls(section, found, num_controls, report)
    masks = find_masks(section, unmasked_weight, found, [_seen(look) for look in looks], report)
    notes: dict[str, list[str]] = defaultdict(list)
    for (index, root, path, caption_path), look, shown, mask in zip(found, looks, controls, masks, strict=True):
        folder = section.folders[index]
        if look.error:
            report.problems.append(f"{path} {look.error}")
        caption = _caption(path, caption_path, section.trigger_of(index), section, report)
        if look.error or caption is None or shown is None:
            continue
        _note_oddities(path, look, shown, notes)
        if not section.wildcards and (choice := choice_in(caption)):
            notes["choices"].append(f"{path} ({choice})")
        report.counts["controls"] += len(shown)
        report.counts["masked"] += mask is not None
        report.counts["converted"] += look.converted
        report.examples += [
            Example(
                path=path,
                caption=caption,
                folder_index=index,
                relative=path.relative_to(root).as_posix(),
                repeats=folder.repeats,
                width=look.width,
                height=look.height,
                image_sha256=look.sha256,
                controls=shown,
                frames=frames,
                begins=look.timeline.only_at(frames[0]) if frames and look.timeline else None,
                mask=mask,
            )
            for frames in _pieces(path, look.timeline, section, clip_rate, report, notes)
        ]
    _note_copies(report, notes)
    _sum_up(report, notes, section)
    if previews is not None:
        report.problems += preview_controls(previews, section, num_controls)[1]
    if skipped := report.counts["skipped"]:
        report.warnings.append(f"{skipped} image(s) left out for having no caption (missing_caption = 'skip')")
        if not report.examples and not report.problems:
            report.problems.append("dataset: every image was left out for having no caption (missing_caption = 'skip')")
    return report


def _sum_up(report: ScanReport, notes: dict[str, list[str]], section: settings.Dataset) -> None:
    """Count the examples, and turn the notes into warnings."""
    report.counts["images"] = len(report.examples)
    report.counts["copies"] = len(notes["copies"])
    report.warnings += _warnings(notes)
    report.warnings += warn_of_sentences(captions_of_files(report.examples), section)
    if isinstance(section.resolution, int):
        note_sizes(report, section, section.resolution)


def captions_of_files(examples: Sequence[Example]) -> list[str]:
    """Return the caption of each file once, however many pieces are cut out of it."""
    return [example.caption for example in {example.file_uid: example for example in examples}.values()]


def _pieces(
    path: Path,
    timeline: clips.Timeline | None,
    section: settings.Dataset,
    clip_rate: int | None,
    report: ScanReport,
    notes: dict[str, list[str]],
) -> list[tuple[int, ...]]:
    """Return the frame numbers of each example of a file: an empty tuple for an image, a tuple per piece of a clip."""
    if timeline is None:
        return [()]
    rate = clip_rate if section.fps == "auto" else section.fps
    if not rate:
        raise ValueError("dataset.fps = 'auto' needs clip_rate")
    numbers = clips.resampled(timeline, rate)
    found = clips.pieces(numbers, section.frames, section.clip)
    if not found:
        least = min(section.frames)
        report.problems.append(
            f"{path} has {len(numbers)} frames at {rate:g} a second, and the least of dataset.frames is {least}; add a "
            "smaller length, or take it out"
        )
        return []
    if len(found[0]) < max(section.frames):
        notes["shorter"].append(f"{path} ({len(found[0])} of {len(numbers)})")
    if len(set(numbers)) < len(numbers):
        notes["slower"].append(f"{path} ({len(timeline.starts)} for {len(numbers)})")
    report.counts["clips"] += 1
    report.counts["clip_frames"] += len(numbers)
    return found


_NOTES = {
    "shorter": "{n} clip(s) too short for the longest of dataset.frames, trained at a shorter length",
    "slower": "{n} clip(s) with fewer frames a second than dataset.fps, some of whose frames are shown twice",
    "extension": "{n} image(s) named as another format than they are (read all the same)",
    "profile": "{n} image(s) with a colour profile that cannot be used, read without it",
    "animated": "{n} file(s) with several frames or pages, of which the first is used",
    "tiny": "{n} image(s) with less than a quarter of the pixels of the training resolution",
    "upscaled": "{n} image(s) smaller than the training resolution, enlarged (upscale = false keeps their size)",
    "small": "{n} image(s) smaller than the training resolution, trained in smaller buckets (upscale = false)",
    "wide": "{n} image(s) with a wider aspect ratio than dataset.max_aspect, cropped to it",
    "copies": "{n} image(s) that are copies of others",
    "unmasked": "{n} image(s) without a mask, trained whole",
    "black": "{n} mask(s) that are black all over",
    "outside": "{n} image(s) whose mask is white only where the crop cuts it off",
    "strange": "{n} mask(s) belong to no image",
    "choices": "{n} caption(s) with a choice of words, trained as it is written while dataset.wildcards is off",
    "shapes": "{n} control picture(s) of another shape than their picture, shown whole",
}


def _told(path: str | Path) -> str:
    """Return a path as printable text, as names that are not valid UTF-8 could be neither logged nor sent."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _some(names: list[str], most: int = 8) -> str:
    """Join the names with commas; of more than `most` names, list the first ones and count the rest."""
    return ", ".join(map(_told, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _warnings(notes: dict[str, list[str]]) -> list[str]:
    return [f"{_NOTES[kind].format(n=len(names))}: {_some(names)}" for kind, names in notes.items() if names]


def note_sizes(report: ScanReport, section: settings.Dataset, resolution: int) -> None:
    """Add warnings about images that are small or narrow for this resolution.

    `scan` calls this itself unless the resolution is "auto".
    """
    notes: dict[str, list[str]] = defaultdict(list)
    for example in {example.file_uid: example for example in report.examples}.values():
        width, height = example.width, example.height
        side = section.folders[example.folder_index].resolution or resolution
        if width * height < side**2:
            if 4 * width * height < side**2:
                notes["tiny"].append(f"{example.path} ({width} x {height})")
            notes["upscaled" if section.upscale else "small"].append(f"{example.path} ({width} x {height})")
        aspect = max(width, height) / min(width, height)
        if section.buckets and aspect > section.max_aspect:
            notes["wide"].append(f"{example.path} ({aspect:.2f})")
    report.counts["upscaled"] = len(notes["upscaled"])
    report.warnings += _warnings(notes)


def outside_masks(placed: Sequence[Placed]) -> list[str]:
    """Return a warning about images whose mask has white only where the crop removes it; [] if there are none.

    Masks that are black all over are not counted: they have a warning of their own.
    """
    names = [
        str(one.example.path)
        for one in placed
        if (mask := one.example.mask) and mask.white and any(mask.white) and not one.placement.shows(mask.white)
    ]
    return _warnings({"outside": list(dict.fromkeys(names))})


def _note_oddities(path: Path, look: Looked, controls: Sequence[Control], notes: dict[str, list[str]]) -> None:
    """Note what is unusual about an image file and its control images, although they can be read."""
    if look.format and look.format != EXTENSIONS[path.suffix.lower()]:
        notes["extension"].append(f"{path} ({look.format})")
    if look.profile_problem:
        notes["profile"].append(f"{path} ({look.profile_problem})")
    if look.frames > 1 and look.timeline is None:
        notes["animated"].append(f"{path} ({look.frames})")
    for control in controls:
        if not same_shape((look.width, look.height), (control.width, control.height)):
            notes["shapes"].append(f"{control.path} ({control.width} x {control.height})")


def _note_copies(report: ScanReport, notes: dict[str, list[str]]) -> None:
    """Note images with equal bytes.

    A file that is reached through two folder entries is not a copy: `warn_of_nested` reports it.
    """
    first: dict[str, Path] = {}
    for example in report.examples:
        original = first.setdefault(example.image_sha256, example.path)
        if original != example.path and os.path.realpath(original) != os.path.realpath(example.path):
            notes["copies"].append(f"{example.path} (of {original})")


def warn_of_nested(section: settings.Dataset, report: ScanReport) -> None:
    """Warn about folders that are listed twice or are inside another one: their images count for each entry."""
    real = [Path(os.path.realpath(os.path.expanduser(folder.path))) for folder in section.folders]
    for later, path in enumerate(real):
        for earlier, other in enumerate(real[:later]):
            if path == other:
                report.warnings.append(
                    f"folder {section.folders[later].path} is named twice, as dataset.folders {earlier + 1} and "
                    f"{later + 1}; its images count for each"
                )
            elif path in other.parents or other in path.parents:
                inner, outer = (other, path) if path in other.parents else (path, other)
                report.warnings.append(f"folder {inner} is inside folder {outer}; its images count for each")


@dataclass
class _Listing:
    """The files of one folder entry.

    Attributes:
        root: the folder.
        mask: the entry's `mask`, see `masked_stem`.
        accepted: extensions of the files that are trained on.
        images: (image, its caption file or None).
        others: names of the files that are not accepted.
        labels: paths of the files that are left out for being named as OneTrainer's masks and conditioning images.
    """

    root: Path
    mask: str
    accepted: tuple[str, ...]
    images: list[tuple[Path, Path | None]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def add(self, folder: Path, names: list[str], report: ScanReport) -> None:
        """Add the files `names` of a folder inside the root, each image with its caption."""
        parts = {name: os.path.splitext(name) for name in names}
        captions = {(stem, kind.lower()): name for name, (stem, kind) in parts.items() if kind.lower() in CAPTIONS}
        labels = labelled(names)
        users: dict[str, str] = {}  # stem of a caption -> the last file that has it
        for name, (stem, suffix) in parts.items():
            suffix, path = suffix.lower(), folder / name
            if suffix in CAPTIONS or masked_stem(self.mask, name):
                continue
            if name in labels:
                self.labels.append(str(path))
            elif suffix not in self.accepted:
                self.others.append(name)
                if suffix in (*OTHER_IMAGES, *OTHER_VIDEOS):
                    users.setdefault(stem, name)  # its caption does not count as left over
            elif not _is_text(str(path.relative_to(self.root))):
                report.problems.append(f"{os.fsencode(path)!r} has a file name that is not UTF-8; rename it")
            else:
                own = [captions[stem, kind] for kind in CAPTIONS if (stem, kind) in captions]
                _warn_of_captions(path, own, users.get(stem), report)
                users[stem] = name
                self.images.append((path, folder / own[0] if own else None))
        lonely = sorted(name for (stem, _), name in captions.items() if stem not in users)
        if lonely:
            report.warnings.append(f"{len(lonely)} caption file(s) in {_told(folder)} have no image: {_some(lonely)}")


def _warn_of_captions(path: Path, captions: list[str], sharing: str | None, report: ScanReport) -> None:
    """Warn of an image with two captions, and of one that shares its caption with the image `sharing`."""
    if len(captions) > 1:
        report.warnings.append(f"{path} has two captions; {captions[0]} is used, {captions[1]} is not")
    if captions and sharing is not None:
        report.warnings.append(f"{path} shares its caption {captions[0]} with {sharing}")


def list_folder(
    index: int, section: settings.Dataset, report: ScanReport, clip_rate: int | None = None, videos: bool = False
) -> list[tuple[int, Path, Path, Path | None]]:
    """List the image files of one folder entry as (folder index, root, image, caption file or None).

    Masks beside the images are left out. Videos are included if the section takes clips and PyAV is installed, or
    always with `videos`. `clip_rate` is as in `scan`.
    """
    taken = videos or (section.frames and clips.can_read_videos())
    root = Path(os.path.expanduser(section.folders[index].path))
    if not root.exists():
        report.problems.append(f"folder {root} does not exist (looked in {Path.cwd()})")
        return []
    if not root.is_dir():
        report.problems.append(f"folder {root} is a file, not a folder")
        return []
    accepted = (*EXTENSIONS, *clips.VIDEOS) if taken else tuple(EXTENSIONS)
    listing = _Listing(root, section.folders[index].mask, accepted)
    try:
        for folder, names in _walk(root):
            listing.add(folder, names, report)
    except OSError as error:
        report.problems.append(f"folder {_told(error.filename)} cannot be read: {error.strerror}")
    if left_out := listing.labels:
        report.warnings.append(
            f"{len(left_out)} file(s) named as OneTrainer's masks and conditioning pictures are not trained on as "
            f"images; dataset.folders.{index}.mask = '*-masklabel' takes the masks: {_some(left_out)}"
        )
    _report_others(listing, section, clip_rate, report)
    return [(index, root, path, caption) for path, caption in listing.images]


def _report_others(listing: _Listing, section: settings.Dataset, clip_rate: int | None, report: ScanReport) -> None:
    """Report the files of a folder that are not accepted, and a folder without images."""
    root, images = listing.root, [path for path, _ in listing.images]
    suffixes = {name: os.path.splitext(name)[1].lower() for name in listing.others}
    unreadable = _told_of_unreadable(root, listing.others, images)
    report.problems += unreadable
    others = [name for name in listing.others if suffixes[name] not in (*OTHER_IMAGES, *OTHER_VIDEOS)]
    left = [name for name in others if suffixes[name] in clips.VIDEOS]
    if left and (section.frames or clip_rate is not None):
        told = _advise_on_videos(section, clip_rate)
        report.problems.append(f"folder {root} has {len(left)} video clip(s), {told}: {_some(sorted(left))}")
        others = [name for name in others if name not in left]
    elif not images and not unreadable:
        what = f"only {_some(sorted(others))}" if others else "no image files"
        accepted = " ".join(listing.accepted)
        report.problems.append(f"folder {root} has no images, {what}; accepted are {accepted}")
    if images and others:
        report.warnings.append(f"{len(others)} other file(s) in {root} are not read: {_some(sorted(others))}")


def _advise_on_videos(section: settings.Dataset, clip_rate: int | None) -> str:
    """Return what to do about video files that are not accepted."""
    if section.frames:
        return "which PyAV reads; install it: pip install 'lora-fp8[video]'"
    if clip_rate:
        return "set dataset.frames to the lengths that they are to be trained at, or take them out"
    return "and this model is trained on pictures; take them out"


def _told_of_unreadable(root: Path, others: list[str], found: list[Path]) -> list[str]:
    """Return one message about the images, and one about the videos, whose formats cannot be read.

    Args:
        root: the folder that the messages name.
        others: names of the files that are not accepted.
        found: the files that are.
    """
    told = []
    suffixes = {name: os.path.splitext(name)[1].lower() for name in others}
    videos = sum(path.suffix.lower() in clips.VIDEOS for path in found)
    videos += sum(suffix in clips.VIDEOS for suffix in suffixes.values())
    for what, known, there, into in (
        ("images", OTHER_IMAGES, sum(path.suffix.lower() in EXTENSIONS for path in found), "JPEG or PNG"),
        ("videos", dict.fromkeys(OTHER_VIDEOS, ""), videos, "MP4"),
    ):
        names = sorted(name for name, suffix in suffixes.items() if suffix in known)
        if names:
            kinds = sorted({known[suffixes[name]] or suffixes[name] for name in names})
            kind = ", ".join(kinds[:-1]) + (" and " if kinds[1:] else "") + kinds[-1]
            told.append(
                f"folder {root}: {len(names)} of {there + len(names)} {what} are {kind} and cannot be read; convert "
                f"them to {into}, or take them out: {_some(names)}"
            )
    return told


def _controls(
    section: settings.Dataset,
    found: list[tuple[int, Path, Path, Path | None]],
    num_controls: tuple[int, int] | None,
    report: ScanReport,
) -> list[tuple[Control, ...] | None]:
    """Return the control images of each found image; None where they have a problem, which is added to the report."""
    answers: list[tuple[Control, ...] | None] = []
    for index, folder in enumerate(section.folders):
        pictures = {
            path: path.relative_to(root).with_suffix("").as_posix()
            for number, root, path, _ in found
            if number == index
        }
        answers += _controls_in(folder.control, pictures, section, num_controls, report)
    return answers


def _controls_in(
    control: str,
    pictures: dict[Path, str],
    section: settings.Dataset,
    num_controls: tuple[int, int] | None,
    report: ScanReport,
) -> Iterable[tuple[Control, ...] | None]:
    """Return the control images of each image of one folder entry, as `_controls` does.

    Args:
        control: the entry's folder of control images; "" if there is none.
        pictures: the entry's images, and their paths in its folder without extension.
        section, num_controls: as in `scan`.
        report: takes the problems and warnings.
    """
    if not control:
        return [()] * len(pictures)
    files = _list_beside("control", Path(os.path.expanduser(control)), section, report)
    stems = set(pictures.values())
    named = {stem: _controls_of(stem, stems, files) for stem in stems}
    used = sorted({path for members in named.values() for candidates in members for path in candidates})
    looks = dict(zip(used, look_all(used, section), strict=True))
    for path, look in looks.items():
        if look.error:
            report.problems.append(f"control picture {path} {look.error}")
    if files is None:
        return [None] * len(pictures)
    answers: list[tuple[Control, ...] | None] = []
    for path, stem in pictures.items():
        members = named[stem]
        if text := _wrong_controls(members, control, path.stem, num_controls):
            report.problems.append(f"{path} {text}")
        if text or any(looks[member[0]].error for member in members):
            answers.append(None)
        else:
            paths = [member[0] for member in members]
            answers.append(tuple(Control(p, looks[p].width, looks[p].height, looks[p].sha256) for p in paths))
    if lonely := sorted(str(path) for members in files.values() for path in members if path not in looks):
        report.warnings.append(f"{len(lonely)} control picture(s) belong to no picture: {_some(lonely)}")
    return answers


def _list_beside(kind: str, root: Path, section: settings.Dataset, report: ScanReport) -> dict[str, list[Path]] | None:
    """List the images of a control or mask folder by path inside it, without extension.

    Returns:
        None if the folder cannot be used; the reason is added to the report.
    """
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else f"does not exist (looked in {Path.cwd()})"
        report.problems.append(f"{kind} folder {root} {what}")
        return None
    for other in section.folders:
        trained = Path(os.path.realpath(os.path.expanduser(other.path)))
        if trained in (real := Path(os.path.realpath(root)), *real.parents):
            report.problems.append(
                f"{kind} folder {root} is in the picture folder {other.path}, all of which is trained on; "
                "move it beside that folder"
            )
            return None
    files: dict[str, list[Path]] = defaultdict(list)
    try:
        for folder, names in _walk(root):
            for name in names:
                if Path(name).suffix.lower() in EXTENSIONS:
                    files[(folder / name).relative_to(root).with_suffix("").as_posix()].append(folder / name)
    except OSError as error:
        report.problems.append(f"{kind} folder {_told(error.filename)} cannot be read: {error.strerror}")
        return None
    return files


def _controls_of(stem: str, stems: set[str], files: dict[str, list[Path]] | None) -> list[list[Path]]:
    """Return the candidate files for each control image of the image `stem`: `name`, else `name_1`, `name_2`, ..."""
    if not files:
        return []
    if stem in files:
        return [files[stem]]
    numbered: list[list[Path]] = []
    # An image called name_1 takes the control image of that name for itself.
    while (name := f"{stem}_{len(numbered) + 1}") in files and name not in stems:
        numbered.append(files[name])
    return numbered


def _wrong_controls(members: list[list[Path]], folder: str, stem: str, num_controls: tuple[int, int] | None) -> str:
    """Return what is wrong with the names or the number of an image's control images; "" if nothing is."""
    if not members:
        return f"has no control picture {stem}.png (or another extension) in {folder}"
    for candidates in members:
        if len(candidates) > 1:
            names = ", ".join(path.name for path in candidates)
            return f"has several candidates for one control picture, {names}; keep one of them"
    if num_controls is not None and len(members) > num_controls[1]:
        return f"has {len(members)} control pictures, and this model takes at most {num_controls[1]}"
    return ""


@dataclass(frozen=True)
class Seen:
    """The properties of an image that its mask is checked against.

    Attributes:
        size: width and height of the upright image.
        sha256: of the file's bytes.
        clip: the file is a clip.
        opacity: range of its opacity; None if it has no transparency, or if transparency was not asked for.
    """

    size: tuple[int, int]
    sha256: str
    clip: bool
    opacity: Light | None = None


def _seen(look: Looked) -> Seen | None:
    if look.error:
        return None
    return Seen((look.width, look.height), look.sha256, look.timeline is not None, look.measured)


def masked_stem(mask: str, name: str) -> str:
    """Return the stem of the image that a file is the mask of, or "" if it is no mask.

    Args:
        mask: the folder's `mask`, a pattern such as `*_mask`; without a * no file matches.
        name: the file's name.
    """
    stem, suffix = os.path.splitext(name)
    if "*" not in mask or suffix.lower() not in EXTENSIONS:
        return ""
    stem = name if os.path.splitext(mask)[1].lower() in EXTENSIONS else stem
    front, _, behind = mask.partition("*")
    fits = stem.startswith(front) and stem.endswith(behind) and len(stem) > len(front) + len(behind)
    return stem[len(front) : len(stem) - len(behind)] if fits else ""


def labelled(names: Iterable[str]) -> set[str]:
    """Return those of a folder's file names that are OneTrainer's masks and conditioning images.

    These are NAME-masklabel.png and NAME-condlabel.png beside an image or clip NAME.*
    """
    stems = {stem for stem, suffix in map(os.path.splitext, names) if suffix.lower() in (*EXTENSIONS, *clips.VIDEOS)}
    ends = ("-masklabel", "-condlabel")
    return {f"{stem}{end}.png" for end in ends for stem in stems if f"{stem}{end}" in stems}


def look_at_masks(paths: Sequence[Path], section: settings.Dataset) -> list[Looked]:
    """Decode the masks; `measured` of each is a `Light`."""
    return list(look_all(paths, section, light_of))


def find_masks(
    section: settings.Dataset,
    unmasked_weight: float,
    found: Sequence[tuple[int, Path, Path, Path | None]],
    seen: Sequence[Seen | None],
    report: ScanReport,
    look: Callable[[Sequence[Path], settings.Dataset], Sequence[Looked]] = look_at_masks,
) -> list[Mask | None]:
    """Find the mask of each image; problems and warnings are added to the report.

    Args:
        section: the `[dataset]` section.
        unmasked_weight: as in `scan`.
        found: from `list_folder`, folder by folder.
        seen: properties of each found image; None for one that cannot be used.
        report: takes the problems and warnings.
        look: decodes the mask files.

    Returns:
        One entry per found image; None if it has no mask.
    """
    answers: list[Mask | None] = []
    notes: dict[str, list[str]] = defaultdict(list)
    for index, folder in enumerate(section.folders):
        images = [
            (root, path, one) for (number, root, path, _), one in zip(found, seen, strict=True) if number == index
        ]
        if not folder.mask:
            answers += [None] * len(images)
        elif folder.mask == "alpha":
            answers += _masks_by_opacity(images, folder.path, index, notes, report)
        else:
            answers += _masks_by_file(images, section, index, notes, report, look)
    if not unmasked_weight:
        report.problems += [
            f"{path} has a mask that is black all over, and with objective.unmasked_weight = 0 it teaches nothing; "
            "take it out, or draw what it is to teach in white"
            for path in notes.pop("black", [])
        ]
    report.warnings += _warnings(notes)
    return answers


def _masks_by_opacity(
    images: list[tuple[Path, Path, Seen | None]],
    folder: str,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
) -> list[Mask | None]:
    answers: list[Mask | None] = []
    if moving := [str(path) for _, path, one in images if one is not None and one.clip]:
        report.problems.append(
            f"folder {folder} has {len(moving)} clip(s), which have no transparency that could be their mask; set "
            f"dataset.folders.{index}.mask to a folder of masks: {_some(moving)}"
        )
    for _, path, one in images:
        answers.append(None)
        if one is None or one.clip:
            continue
        if one.opacity is None or one.opacity.least == 255:
            notes["unmasked"].append(str(path))
            continue
        answers[-1] = Mask(path, one.sha256, alpha=True, white=one.opacity.white)
        if one.opacity.most <= BLACK:
            notes["black"].append(str(path))
    return answers


def _masks_by_file(
    images: list[tuple[Path, Path, Seen | None]],
    section: settings.Dataset,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
    look_at: Callable[[Sequence[Path], settings.Dataset], Sequence[Looked]],
) -> list[Mask | None]:
    folder = section.folders[index]
    if folder.mask_folder:
        files = _list_beside("mask", Path(os.path.expanduser(folder.mask)), section, report)
    else:
        files = _list_among(Path(os.path.expanduser(folder.path)), folder.mask)
    if files is None:
        return [None] * len(images)
    stems = [path.relative_to(root).with_suffix("").as_posix() for root, path, _ in images]
    used = sorted({path for stem in stems for path in files.get(stem, [])})
    looks = dict(zip(used, look_at(used, section), strict=True))
    report.problems += [f"mask {path} cannot be used: {look.error}" for path, look in looks.items() if look.error]
    answers: list[Mask | None] = []
    for stem, (_, path, one) in zip(stems, images, strict=True):
        candidates = files.get(stem, [])
        answers.append(None)
        if not candidates:
            notes["unmasked"].append(str(path))
        elif len(candidates) > 1:
            names = ", ".join(candidate.name for candidate in candidates)
            report.problems.append(f"{path} has several candidates for its mask, {names}; keep one of them")
        elif one is not None and not (look := looks[candidates[0]]).error:
            if not same_shape(one.size, (look.width, look.height)):
                report.problems.append(
                    f"mask {candidates[0]} has {look.width} x {look.height} pixels, another shape than its image's "
                    f"{one.size[0]} x {one.size[1]}; draw it on the image"
                )
            if look.measured.most <= BLACK:
                notes["black"].append(str(path))
            answers[-1] = Mask(candidates[0], look.sha256, white=look.measured.white)
    notes["strange"] += sorted(str(path) for members in files.values() for path in members if path not in looks)
    return answers


def _list_among(root: Path, mask: str) -> dict[str, list[Path]]:
    """List the masks that lie beside the images, by the image's path inside the folder without extension.

    A folder that cannot be read is skipped: `list_folder` has already reported it.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for folder, names in _walk(root):
            for name in names:
                if stem := masked_stem(mask, name):
                    files[(folder / stem).relative_to(root).as_posix()].append(folder / name)
    return files


def preview_controls(
    section: settings.Preview, dataset: settings.Dataset, num_controls: tuple[int, int] | None
) -> tuple[list[tuple[Control, ...]], list[str]]:
    """Find the control images of each preview.

    Each entry of `preview.controls` is a file (one control image) or a folder (all images in it, sorted by name).

    Returns:
        The control images of each preview, and the problems with them.
    """
    found, problems = [], []
    for i, given in enumerate(section.controls):
        path = Path(os.path.expanduser(given))
        names = [path]
        if path.is_dir():
            seen = (name for name in path.iterdir() if not name.name.startswith("."))  # as `_walk` does
            names = sorted(name for name in seen if name.suffix.lower() in EXTENSIONS)
        controls = []
        for name, look in zip(names, look_all(names, dataset), strict=True):
            if look.error:
                problems.append(f"preview.controls.{i}: {_told(name)} {look.error}")
            controls.append(Control(name, look.width, look.height, look.sha256))
        if num_controls is not None and not num_controls[0] <= len(controls) <= num_controls[1]:
            between = " to ".join(str(number) for number in dict.fromkeys(num_controls))
            problems.append(f"preview.controls.{i}: {path} has {len(controls)} pictures; this model takes {between}")
        found.append(tuple(controls))
    return found, problems


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _caption(
    path: Path, caption_path: Path | None, trigger: str, section: settings.Dataset, report: ScanReport
) -> str | None:
    """Return the caption to train with; None if there is none, and the report then says why."""
    text = ""
    if caption_path is not None:
        try:
            text = read_caption(caption_path)
        except OSError as error:
            report.problems.append(f"{caption_path} cannot be read: {error.strerror}")
            return None
        except ValueError as error:
            report.problems.append(f"{caption_path} {error}")
            return None
    if text:
        caption = with_trigger(text, trigger)
        report.counts["triggered"] += caption != text
        return caption
    what = f"an empty caption ({caption_path.name})" if caption_path else f"no caption ({path.stem}.txt)"
    if section.missing_caption == "skip":
        report.counts["skipped"] += 1
        return None
    if section.missing_caption == "trigger" and trigger.strip():
        report.counts["no_caption"] += 1
        return trigger.strip()
    if section.missing_caption == "trigger":
        report.problems.append(f"{path} has {what}; write one, as this folder has no trigger word to stand for it")
    else:
        report.problems.append(f"{path} has {what}; write one, or set dataset.missing_caption to 'trigger' or 'skip'")
    return None


def describe(report: ScanReport) -> list[str]:
    """Return lines of figures about a scan, for people to read; warnings and problems are not among them."""
    counts, examples = report.counts, report.examples
    shown = sum(example.repeats for example in examples)
    lines = [f"{len(examples)} images, {shown} per epoch with repeats"]
    if examples:
        small = min(examples, key=lambda example: example.width * example.height)
        large = max(examples, key=lambda example: example.width * example.height)
        lines.append(f"sizes from {small.width} x {small.height} to {large.width} x {large.height}")
        lines.append(f"{len({example.caption for example in examples})} different captions")
    if counts["converted"]:
        lines.append(f"{counts['converted']} images converted from their colour profile to sRGB")
    if counts["controls"]:
        lines.append(f"{counts['controls']} control pictures")
    if counts["masked"]:
        lines.append(f"{counts['masked']} images with a mask")
    if counts["clips"]:
        lengths = Counter(len(example.frames) for example in examples if example.frames)
        cut = ", ".join(f"{number} of {length} frames" for length, number in sorted(lengths.items()))
        used = sum(length * number for length, number in lengths.items())
        lines.append(f"{counts['clips']} clips: {cut}, {used} of {counts['clip_frames']} frames at dataset.fps")
    if counts["triggered"]:
        lines.append(f"{counts['triggered']} captions had the trigger word put in front")
    if counts["no_caption"]:
        lines.append(f"{counts['no_caption']} images without a caption have the trigger word as theirs")
    return lines
