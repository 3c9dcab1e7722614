"""Images and captions: whatever can be wrong with a dataset is found, and reported at once, before a model loads.

`scan` walks the folders of a `[dataset]` section, decodes every image completely, reads every caption, and returns the
examples together with *problems* (training must not start) and *warnings* (it may). Nothing is guessed: a caption that
is neither UTF-8 nor UTF-16 with a byte-order mark is a problem that names the file and the offset of the byte. Nothing
is written into the user's folders.

Captions: `name.txt`, else `name.caption`, beside `name.png`. Lines are joined by spaces. An empty caption counts as
missing. If there is a trigger word (`Dataset.trigger_of`) and the caption lacks it as a word of its own
(case counts), it is put in front: "trigger, caption".

Control pictures, which editing models are shown beside the noise, lie in a folder of their own (`control`), under the
picture's name with any of the extensions: `name.jpg` for `name.png`, subfolders alike. Several of one picture are
`name_1`, `name_2` and so on. They are decoded as pictures are, and have no captions.

Masks (`mask`) say which part of a picture is trained: white in full, black outside, by their grey values as they are
stored, without a colour profile. One has its picture's shape, and a clip's counts for all of its frames. They lie in a
folder of their own, as control pictures do, or beside the pictures under a name such as `*_mask`, and are then no
pictures; or the picture's own transparency is its mask. What is transparent in a mask is outside. What OneTrainer has
beside its pictures, `name-masklabel.png` and `name-condlabel.png`, is no picture wherever it lies beside one.

With `dataset.frames` video files are examples as well, and animations (GIF, WebP, PNG) are clips instead of their first
frame: see `clips`. A piece of a clip is an example of its own, with the clip's caption.
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

from lora_fp8 import config
from lora_fp8.data import clips
from lora_fp8.data.buckets import Placed, same_shape
from lora_fp8.data.decoding import BLACK, EXTENSIONS, Box, Light, Looked, light_of, look_all, opacity_of

CAPTIONS = (".txt", ".caption")
"""Caption files in the order of preference."""


_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""Byte-order marks and what follows them."""


@dataclass(frozen=True)
class Control:
    """One control picture: pixels of the upright image, and the hash of the file's bytes."""

    path: Path
    width: int
    height: int
    sha256: str


@dataclass(frozen=True)
class Mask:
    """What of a picture is trained: the file, the hash of its bytes, and whether its transparency is meant (`alpha`),
    of the picture itself, and not its greys. `white` is the box of all that is not black, as of `Light`."""

    path: Path
    sha256: str
    alpha: bool = False
    white: Box | None = None


@dataclass(frozen=True)
class Example:
    """One image and its caption.

    Attributes:
        path: the image file.
        caption: as trained: trigger put in front where needed.
        folder_index: which of `[[dataset.folders]]`, from 0.
        relative: path inside that folder, with forward slashes.
        repeats: how often an epoch shows it.
        width, height: pixels of the upright image.
        image_sha256: of the file's bytes.
        controls: its control pictures, in order.
        frames: of a clip, the numbers of the file's frames that are shown, in order; () for a picture.
        begins: second of the file at which the first of them is shown, if no other is; None is not known.
        mask: what of it is trained; None is all.
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
        """Name of the file inside the dataset, which the pieces of a clip share."""
        return f"{self.folder_index}/{self.relative}"

    @property
    def uid(self) -> str:
        """Name of the example inside the dataset; stays when the dataset moves to another place or machine."""
        return f"{self.file_uid}@{self.frames[0]}" if self.frames else self.file_uid


@dataclass
class ScanReport:
    """What a scan found; `counts` has images, triggered, no_caption, skipped, upscaled, copies, controls, converted
    (to sRGB), clips (files), masked (images)."""

    examples: list[Example] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def require(self) -> list[Example]:
        """The examples; raises `config.UserErrors` with all problems if there are any."""
        if self.problems:
            raise config.UserErrors(self.problems, where="dataset")
        return self.examples


# ------------------------------------------------------------------------------------------------------------ captions


def decode_caption(raw: bytes) -> tuple[str, bytes, str]:
    """The text in a caption file's bytes, line ends and all; the byte-order mark before it; Python's codec of the rest.

    Raises:
        ValueError: as `read_caption`.
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
    """A caption file's text on one line: UTF-8 (with or without mark), or UTF-16 with a byte-order mark.

    Raises:
        ValueError: the bytes are something else; the message has the offset of the first byte that does not fit.
    """
    text = decode_caption(path.read_bytes())[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


CHOICE = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")
"""`{red|blue}` in a caption: with dataset.wildcards one of its words is drawn."""


def choice_in(caption: str) -> str:
    """The first `{a|b}` of a caption that has words in it, as signs and faces have none; "" where there is none."""
    return next((found[0] for found in CHOICE.finditer(caption) if re.search(r"\w", found[1])), "")


# Letters that make one word of what they touch. Thai, kana, ideographs and hangul stand beside a word without a space.
_LETTER = r"[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"


def with_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger word in front, unless it has it already as a word of its own."""
    trigger = trigger.strip()
    if not trigger or re.search(rf"(?<!{_LETTER}){re.escape(trigger)}(?!{_LETTER})", caption):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


# ---------------------------------------------------------------------------------------------------------------- scan


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """(folder, sorted file names) from the root down, in sorted order, hidden names left out.

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
    section: config.Dataset,
    num_controls: tuple[int, int] | None = None,
    previews: config.Preview | None = None,
    clip_rate: int | None = None,
    unmasked_weight: float = config.Objective().unmasked_weight,
) -> ScanReport:
    """Look at every image, caption, control picture and mask of the dataset.

    Args:
        section: the `[dataset]` section; folder paths are used as they are given. Where its resolution is "auto",
            `note_sizes` has to be called for warnings about small images.
        num_controls: fewest and most control pictures that the model takes with one picture; None does not judge.
        previews: the `[preview]` section, whose control pictures are looked at too.
        clip_rate: frames a second of the clips that the model draws, 0 if it draws none; None does not judge.
        unmasked_weight: the job's `objective.unmasked_weight`; at 0 a mask that is black all over is a problem.

    Returns:
        The report. It never raises for what it finds in files: all problems come together. Examples are in the order of
        the folders in the config, then sorted by path.
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
        _note_oddities(path, look, notes)
        if not section.wildcards and (choice := choice_in(caption)):
            notes["choices"].append(f"{path} ({choice})")
        for control in shown:
            if not same_shape((look.width, look.height), (control.width, control.height)):
                notes["shapes"].append(f"{control.path} ({control.width} x {control.height})")
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
                begins=look.timeline.only_at(frames[0]) if frames else None,
                mask=mask,
            )
            for frames in _pieces(path, look.timeline, section, clip_rate, report, notes)
        ]
    _note_copies(report, notes)
    report.counts["images"] = len(report.examples)
    report.counts["copies"] = len(notes["copies"])
    report.warnings += _warnings(notes)
    if isinstance(section.resolution, int):
        note_sizes(report, section, section.resolution)
    if previews is not None:
        report.problems += preview_controls(previews, section, num_controls)[1]
    if skipped := report.counts["skipped"]:
        report.warnings.append(f"{skipped} image(s) left out for having no caption (missing_caption = 'skip')")
        if not report.examples and not report.problems:
            report.problems.append("dataset: every image was left out for having no caption (missing_caption = 'skip')")
    return report


def _pieces(
    path: Path,
    timeline: clips.Timeline | None,
    section: config.Dataset,
    clip_rate: int | None,
    report: ScanReport,
    notes: dict[str, list[str]],
) -> list[tuple[int, ...]]:
    """What a file is shown as: a picture once, without numbers of frames; a clip as what is cut out of it."""
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
    """A path as text: a name may be any bytes, and those that are no UTF-8 could be neither logged nor sent."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _some(names: list[str], most: int = 8) -> str:
    """The names, or the first of them and how many more there are."""
    return ", ".join(map(_told, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _warnings(notes: dict[str, list[str]]) -> list[str]:
    return [f"{_NOTES[kind].format(n=len(names))}: {_some(names)}" for kind, names in notes.items() if names]


def note_sizes(report: ScanReport, section: config.Dataset, resolution: int) -> None:
    """Add warnings about images that are small or narrow for this resolution; `scan` does it where it knows one."""
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
    """A warning about images of whose mask the crop leaves nothing but black; what is black all over has its own."""
    names = [
        str(one.example.path)
        for one in placed
        if (mask := one.example.mask) and mask.white and any(mask.white) and not one.placement.shows(mask.white)
    ]
    return _warnings({"outside": list(dict.fromkeys(names))})


def _note_oddities(path: Path, look: Looked, notes: dict[str, list[str]]) -> None:
    if look.format and look.format != EXTENSIONS[path.suffix.lower()]:
        notes["extension"].append(f"{path} ({look.format})")
    if look.profile_problem:
        notes["profile"].append(f"{path} ({look.profile_problem})")
    if look.frames > 1 and look.timeline is None:
        notes["animated"].append(f"{path} ({look.frames})")


def _note_copies(report: ScanReport, notes: dict[str, list[str]]) -> None:
    """Copies by content. The same file seen through two folder entries is not one: that has its own warning."""
    first: dict[str, Path] = {}
    for example in report.examples:
        original = first.setdefault(example.image_sha256, example.path)
        if original != example.path and os.path.realpath(original) != os.path.realpath(example.path):
            notes["copies"].append(f"{example.path} (of {original})")


def warn_of_nested(section: config.Dataset, report: ScanReport) -> None:
    """One folder named twice, or inside another: its images count for each."""
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


def list_folder(
    index: int, section: config.Dataset, report: ScanReport, clip_rate: int | None = None, videos: bool = False
) -> list[tuple[int, Path, Path, Path | None]]:
    """(folder index, root, image, caption file or None) of every image file of one folder entry.

    Masks that lie beside them are left out. Videos are among them where the section takes clips and they can be read,
    or always where `videos` is true. `clip_rate` as in `scan`.
    """
    taken = videos or (section.frames and clips.can_read_videos())
    accepted = (*EXTENSIONS, *clips.VIDEOS) if taken else tuple(EXTENSIONS)
    root = Path(os.path.expanduser(section.folders[index].path))
    if not root.exists():
        report.problems.append(f"folder {root} does not exist (looked in {Path.cwd()})")
        return []
    if not root.is_dir():
        report.problems.append(f"folder {root} is a file, not a folder")
        return []
    found: list[tuple[int, Path, Path, Path | None]] = []
    others: list[str] = []
    left_out: list[str] = []
    try:
        for folder, names in _walk(root):
            by_stem: dict[tuple[str, str], str] = {}
            labels = labelled(names)
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in CAPTIONS:
                    by_stem[stem, suffix.lower()] = name
            used: dict[str, str] = {}
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in CAPTIONS:
                    continue
                if masked_stem(section.folders[index].mask, name):
                    continue
                if name in labels:
                    left_out.append(str(folder / name))
                    continue
                if suffix.lower() not in accepted:
                    others.append(name)
                    continue
                path = folder / name
                if not _is_text(str(path.relative_to(root))):
                    report.problems.append(f"{os.fsencode(path)!r} has a file name that is not UTF-8; rename it")
                    continue
                captions = [by_stem[stem, suffix] for suffix in CAPTIONS if (stem, suffix) in by_stem]
                if len(captions) > 1:
                    report.warnings.append(f"{path} has two captions; {captions[0]} is used, {captions[1]} is not")
                if captions and stem in used:
                    report.warnings.append(f"{path} shares its caption {captions[0]} with {used[stem]}")
                used[stem] = name
                found.append((index, root, path, folder / captions[0] if captions else None))
            lonely = sorted(name for (stem, _), name in by_stem.items() if stem not in used)
            if lonely:
                report.warnings.append(
                    f"{len(lonely)} caption file(s) in {_told(folder)} have no image: {_some(lonely)}"
                )
    except OSError as error:
        report.problems.append(f"folder {_told(error.filename)} cannot be read: {error.strerror}")
    if left_out:
        report.warnings.append(
            f"{len(left_out)} file(s) named as OneTrainer's masks and conditioning pictures are not trained on as "
            f"images; dataset.folders.{index}.mask = '*-masklabel' takes the masks: {_some(left_out)}"
        )
    left = [name for name in others if os.path.splitext(name)[1].lower() in clips.VIDEOS]
    if left and (section.frames or clip_rate is not None):
        if section.frames:
            told = "which PyAV reads; install it: pip install 'lora-fp8[video]'"
        elif clip_rate:
            told = "set dataset.frames to the lengths that they are to be trained at, or take them out"
        else:
            told = "and this model is trained on pictures; take them out"
        report.problems.append(f"folder {root} has {len(left)} video clip(s), {told}: {_some(sorted(left))}")
        others = [name for name in others if name not in left]
    elif not found:
        what = f"only {_some(sorted(others))}" if others else "no image files"
        report.problems.append(f"folder {root} has no images, {what}; accepted are {' '.join(accepted)}")
    if found and others:
        report.warnings.append(f"{len(others)} other file(s) in {root} are not read: {_some(sorted(others))}")
    return found


def _controls(
    section: config.Dataset,
    found: list[tuple[int, Path, Path, Path | None]],
    num_controls: tuple[int, int] | None,
    report: ScanReport,
) -> list[tuple[Control, ...] | None]:
    """The control pictures of each found image; None where something about them is wrong, which is in the report."""
    answers: list[tuple[Control, ...] | None] = []
    for index, folder in enumerate(section.folders):
        pictures = [(root, path) for number, root, path, _ in found if number == index]
        if not folder.control:
            answers += [()] * len(pictures)
            continue
        files = _list_beside("control", Path(os.path.expanduser(folder.control)), section, report)
        stems = {path.relative_to(root).with_suffix("").as_posix() for root, path in pictures}
        named = {stem: _controls_of(stem, stems, files) for stem in stems}
        used = sorted({path for members in named.values() for candidates in members for path in candidates})
        looks = dict(zip(used, look_all(used, section), strict=True))
        for path, look in looks.items():
            if look.error:
                report.problems.append(f"control picture {path} {look.error}")
        for root, path in pictures:
            members = named[path.relative_to(root).with_suffix("").as_posix()]
            if text := _wrong_controls(members, folder.control, path.stem, num_controls) if files is not None else "":
                report.problems.append(f"{path} {text}")
            if files is None or text or any(looks[member[0]].error for member in members):
                answers.append(None)
            else:
                paths = [member[0] for member in members]
                answers.append(tuple(Control(p, looks[p].width, looks[p].height, looks[p].sha256) for p in paths))
        if lonely := sorted(str(path) for members in (files or {}).values() for path in members if path not in used):
            report.warnings.append(f"{len(lonely)} control picture(s) belong to no picture: {_some(lonely)}")
    return answers


def _list_beside(kind: str, root: Path, section: config.Dataset, report: ScanReport) -> dict[str, list[Path]] | None:
    """{path inside this control or mask folder without extension: image files}; None if it cannot be used."""
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
    """The candidates for each control picture of the picture with this name: `name`, else `name_1`, `name_2`, ..."""
    if not files:
        return []
    if stem in files:
        return [files[stem]]
    numbered = []
    # A picture called name_1 has a control picture of that name for itself.
    while (name := f"{stem}_{len(numbered) + 1}") in files and name not in stems:
        numbered.append(files[name])
    return numbered


def _wrong_controls(members: list[list[Path]], folder: str, stem: str, num_controls: tuple[int, int] | None) -> str:
    """What is wrong with a picture's control pictures, apart from what is in them; "" for nothing."""
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
    """Of a picture, what its mask is judged by: upright size, hash, and its opacity (None: it has none, or nobody
    asked)."""

    size: tuple[int, int]
    sha256: str
    clip: bool
    opacity: Light | None = None


def _seen(look: Looked) -> Seen | None:
    if look.error:
        return None
    return Seen((look.width, look.height), look.sha256, look.timeline is not None, look.measured)


def masked_stem(mask: str, name: str) -> str:
    """Name without extension of the image whose mask a file of this name is, where a folder's `mask` has a *; or ""."""
    stem, suffix = os.path.splitext(name)
    if "*" not in mask or suffix.lower() not in EXTENSIONS:
        return ""
    stem = name if os.path.splitext(mask)[1].lower() in EXTENSIONS else stem
    front, _, behind = mask.partition("*")
    fits = stem.startswith(front) and stem.endswith(behind) and len(stem) > len(front) + len(behind)
    return stem[len(front) : len(stem) - len(behind)] if fits else ""


def labelled(names: Iterable[str]) -> set[str]:
    """Those of a folder's names that are OneTrainer's masks and conditioning pictures: NAME-masklabel.png and
    NAME-condlabel.png beside the picture (or clip) NAME.*"""
    stems = {stem for stem, suffix in map(os.path.splitext, names) if suffix.lower() in (*EXTENSIONS, *clips.VIDEOS)}
    ends = ("-masklabel", "-condlabel")
    return {f"{stem}{end}.png" for end in ends for stem in stems if f"{stem}{end}" in stems}


def look_at_masks(paths: Sequence[Path], section: config.Dataset) -> list[Looked]:
    """What each mask is; `measured` is a `Light`."""
    return list(look_all(paths, section, light_of))


def find_masks(
    section: config.Dataset,
    unmasked_weight: float,
    found: Sequence[tuple[int, Path, Path, Path | None]],
    seen: Sequence[Seen | None],
    report: ScanReport,
    look: Callable[[Sequence[Path], config.Dataset], Sequence[Looked]] = look_at_masks,
) -> list[Mask | None]:
    """The mask of each image; what is wrong with them is in the report.

    Args:
        unmasked_weight: as in `scan`.
        found: from `list_folder`, folder by folder.
        seen: what each of them is; None is one that cannot be used.
        look: tells what each of the mask files is.
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
    section: config.Dataset,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
    look_at: Callable[[Sequence[Path], config.Dataset], Sequence[Looked]],
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
    """{path of an image inside its folder without extension: masks beside it}; what cannot be read has been told."""
    files: dict[str, list[Path]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for folder, names in _walk(root):
            for name in names:
                if stem := masked_stem(mask, name):
                    files[(folder / stem).relative_to(root).as_posix()].append(folder / name)
    return files


def preview_controls(
    section: config.Preview, dataset: config.Dataset, num_controls: tuple[int, int] | None
) -> tuple[list[tuple[Control, ...]], list[str]]:
    """The control pictures of each preview, and what is wrong with them.

    A file is one control picture; a folder stands for all pictures in it, in the order of their names.
    """
    found, problems = [], []
    for i, given in enumerate(section.controls):
        path = Path(os.path.expanduser(given))
        names = [path]
        if path.is_dir():
            seen = (name for name in path.iterdir() if not name.name.startswith("."))  # as `_walk` leaves them out
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
    path: Path, caption_path: Path | None, trigger: str, section: config.Dataset, report: ScanReport
) -> str | None:
    """The caption to train with, or None if there is none (which is then in the report)."""
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
    """Lines of figures about a scan, for a person; its warnings and problems are lines already."""
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
