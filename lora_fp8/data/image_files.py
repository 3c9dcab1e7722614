"""Lists the files of a dataset folder: images, clips and captions, and what else lies there."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .. import settings
from ..common.shell import quote_path
from ..common.text import is_utf8
from ..errors import Joined, Message, Plural, Template, UserError, UserErrors, about, looked_for, missing_folder, reason
from . import clips, image_edits
from .caption_text import CAPTIONS
from .decoding import EXTENSIONS, HEIC_EXTENSIONS
from .examples import ScanReport
from .scan_notes import as_text, list_names

OTHER_IMAGES = {
    ".jxl": "JPEG XL",
    **dict.fromkeys((".jp2", ".j2k", ".jpf", ".jpx"), "JPEG 2000"),
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"), Message("camera raw")),
    **dict.fromkeys((".psd", ".psb"), "Photoshop"),
    **dict.fromkeys((".tga", ".exr", ".svg"), ""),
}
"""Extensions of image formats that are not read -> the name that people know them by; "" shows the extension."""
HEIC_IMAGES = {} if set(HEIC_EXTENSIONS) <= EXTENSIONS.keys() else dict.fromkeys(HEIC_EXTENSIONS, "HEIC")
"""The same of HEIC, which is read if pillow-heif is installed."""
OTHER_VIDEOS = (".avi", ".m4v", ".mts", ".m2ts", ".wmv", ".flv", ".mpg", ".mpeg", ".3gp", ".ogv", ".vob")
METADATA = ("metadata.jsonl", "metadata.csv")
"""Files with captions of the images beside them, as datasets on Hugging Face have them."""
TARS = (".tar", ".tar.gz", ".tgz")
UNREADABLE = (*OTHER_IMAGES, *HEIC_IMAGES, *OTHER_VIDEOS)
"""Extensions of files that a person counts as images or videos and that are not read."""


def walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
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
        with os.scandir(folder) as scanned:  # knows what is a folder without asking for each file, but not of links
            entries = sorted(
                (entry.name, (folder / entry.name).is_dir() if entry.is_symlink() else entry.is_dir())
                for entry in scanned
                if not entry.name.startswith(".")
            )
        waiting.extend(folder / name for name, is_folder in reversed(entries) if is_folder)
        yield folder, [name for name, is_folder in entries if not is_folder]


def make_relative_name(path: Path, root: Path) -> str:
    """Return the path of a file inside `root`, with / between its parts: path.relative_to(root).as_posix(), faster."""
    start = os.path.join(root, "")
    text = str(path)
    return text[len(start) :].replace(os.sep, "/") if text.startswith(start) else path.relative_to(root).as_posix()


def warn_of_nested(section: settings.Dataset, report: ScanReport) -> None:
    """Warn about folders that are listed twice or are inside another one: their images count for each entry."""
    real = [Path(os.path.realpath(os.path.expanduser(folder.path))) for folder in section.folders]
    for later, path in enumerate(real):
        for earlier, other in enumerate(real[:later]):
            if path == other:
                report.warnings.append(
                    Message(
                        "folder {path} is listed twice, as dataset.folders {one} and {other}; its images are "
                        "trained for each entry",
                        path=section.folders[later].path,
                        one=earlier + 1,
                        other=later + 1,
                    )
                )
            elif path in other.parents or other in path.parents:
                inner, outer = (other, path) if path in other.parents else (path, other)
                report.warnings.append(
                    Message(
                        "folder {path} is inside folder {outer}; its images are trained for each of them",
                        path=inner,
                        outer=outer,
                    )
                )


@dataclass
class Listing:
    """The files of one folder entry.

    Attributes:
        root: the folder.
        mask: the entry's `mask`, see `find_masked_stem`.
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
        labels = find_label_files(names)
        users: dict[str, str] = {}  # stem of a caption -> the last file that has it
        inside = str(folder.relative_to(self.root))
        for name, (stem, suffix) in parts.items():
            suffix, path = suffix.lower(), folder / name
            if suffix in CAPTIONS or find_masked_stem(self.mask, name):
                continue
            if name in labels:
                self.labels.append(str(path))
            elif suffix not in self.accepted:
                self.others.append(name)
                if suffix in UNREADABLE:
                    users.setdefault(stem, name)  # its caption does not count as left over
            elif not is_utf8(inside + name):
                report.problems.append(
                    Message("{path} has a file name that is not UTF-8; rename it", path=repr(os.fsencode(path)))
                )
            else:
                own = [captions[stem, kind] for kind in CAPTIONS if (stem, kind) in captions]
                _warn_of_captions(path, own, users.get(stem), report)
                users[stem] = name
                self.images.append((path, folder / own[0] if own else None))
        lonely = sorted(name for (stem, _), name in captions.items() if stem not in users)
        if lonely:
            report.warnings.append(
                Plural(
                    "{count} caption file in {folder} has no image: {names}",
                    "{count} caption files in {folder} have no image: {names}",
                )(
                    count=len(lonely),
                    folder=as_text(folder),
                    names=list_names(lonely),
                )
            )


def _warn_of_captions(path: Path, captions: list[str], sharing: str | None, report: ScanReport) -> None:
    """Warn of an image with two captions, and of one that shares its caption with the image `sharing`."""
    if len(captions) > 1:
        report.warnings.append(
            Message(
                "{path} has two captions; {used} is used, {other} is ignored",
                path=path,
                used=captions[0],
                other=captions[1],
            )
        )
    if captions and sharing is not None:
        report.warnings.append(
            Message("{path} shares its caption {caption} with {other}", path=path, caption=captions[0], other=sharing)
        )


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
        report.problems.append(str(missing_folder(root)))
        return []
    if not root.is_dir():
        report.problems.append(Message("folder {path} is a file, not a folder", path=root))
        return []
    accepted = (*EXTENSIONS, *clips.VIDEOS) if taken else tuple(EXTENSIONS)
    listing = Listing(root, section.folders[index].mask, accepted)
    try:
        for folder, names in walk(root):
            listing.add(folder, names, report)
    except OSError as error:
        report.problems.append(
            Message("folder {path} cannot be read: {why}", path=as_text(error.filename), why=reason(error))
        )
    if left_out := listing.labels:
        report.warnings.append(
            Plural(
                "{count} file with a name of OneTrainer's masks and conditioning images is not trained on as an "
                "image; to use masks, set dataset.folders.{index}.mask = '*-masklabel': {files}",
                "{count} files with names of OneTrainer's masks and conditioning images are not trained on as "
                "images; to use masks, set dataset.folders.{index}.mask = '*-masklabel': {files}",
            )(
                count=len(left_out),
                index=index,
                files=list_names(left_out),
            )
        )
    _report_others(listing, section, clip_rate, report)
    apply_edits(listing, report)
    return [(index, root, path, caption) for path, caption in listing.images]


def apply_edits(listing: Listing, report: ScanReport) -> None:
    """Leave out the images that the folder's edits exclude, and note how the others are turned and cropped."""
    root = listing.root
    edits: dict[str, image_edits.ImageEdit] = {}
    try:
        edits = image_edits.read(root)
    except UserErrors as error:
        report.problems += [Message("{path}: {line}", path=error.where, line=line) for line in error.problems]
    except UserError as error:
        report.problems.append(str(error))
    names = {path: make_relative_name(path, root) for path, _ in listing.images}
    if strange := sorted(set(edits) - set(names.values())):
        report.warnings.append(
            Plural(
                "{path} names {count} image that is not in the folder: {names}",
                "{path} names {count} images that are not in the folder: {names}",
            )(
                path=root / image_edits.FILE,
                count=len(strange),
                names=list_names(strange),
            )
        )
    kept = [(path, caption) for path, caption in listing.images if not _get_edit(edits, names[path]).exclude]
    left = names.keys() - {path for path, _ in kept}
    report.excluded[root] = {Path(names[path]).with_suffix("").as_posix() for path in left}
    report.counts["excluded"] += len(left)
    for path, _ in kept:
        edit = _get_edit(edits, names[path])
        if report.edits.setdefault(path, edit) != edit:
            report.problems.append(
                Message(
                    "{path} is turned or cropped in two ways, by the edits of two nested folders; keep one of them",
                    path=path,
                )
            )
        report.counts["edited"] += bool(edit)
    if listing.images and not kept:
        report.problems.append(
            Message(
                "folder {path} has no images left: {count} are excluded by {file}; include some again",
                path=root,
                count=len(listing.images),
                file=image_edits.FILE,
            )
        )
    listing.images = kept


def _get_edit(edits: dict[str, image_edits.ImageEdit], name: str) -> image_edits.ImageEdit:
    return edits.get(name, image_edits.NOTHING)


def _report_others(listing: Listing, section: settings.Dataset, clip_rate: int | None, report: ScanReport) -> None:
    """Report the files of a folder that are not accepted, and a folder without images."""
    root, images = listing.root, [path for path, _ in listing.images]
    suffixes = {name: os.path.splitext(name)[1].lower() for name in listing.others}
    unreadable = _describe_unreadable(root, listing.others, images)
    report.problems += unreadable
    others = [name for name in listing.others if suffixes[name] not in UNREADABLE]
    left = [name for name in others if suffixes[name] in clips.VIDEOS]
    if left and (section.frames or clip_rate is not None):
        problem = _advise_on_videos(section, clip_rate)
        report.problems.append(problem(path=root, count=len(left), names=list_names(sorted(left))))
        others = [name for name in others if name not in left]
    elif not images and (tables := [name for name in others if name.lower().endswith((".parquet", *TARS))]):
        command = f"lora-fp8 dataset import {quote_path(root)} FOLDER"
        report.problems.append(
            Message(
                "folder {path} has its images inside {names}; `{command}` unpacks them with their captions",
                path=root,
                names=list_names(sorted(tables)),
                command=command,
            )
        )
    elif not images and not unreadable:
        given = {"path": root, "suffixes": " ".join(listing.accepted)}
        report.problems.append(
            Message(
                "folder {path} has no images, only {names}; accepted: {suffixes}",
                names=list_names(sorted(others)),
                **given,
            )
            if others
            else Message("folder {path} has no images; accepted: {suffixes}", **given)
        )
    if any(caption is None for _, caption in listing.images) and (named := set(others) & set(METADATA)):
        others = [name for name in others if name not in named]
        report.warnings.append(
            Message(
                "folder {path} has captions in {names}; `{command}` saves them beside the images",
                path=root,
                names=list_names(sorted(named)),
                command=f"lora-fp8 dataset import {quote_path(root)}",
            )
        )
    if images and others:
        report.warnings.append(
            Plural(
                "{count} other file in {folder} is ignored: {files}",
                "{count} other files in {folder} are ignored: {files}",
            )(
                count=len(others),
                folder=root,
                files=list_names(sorted(others)),
            )
        )


def _advise_on_videos(section: settings.Dataset, clip_rate: int | None) -> Plural:
    """Return what to say about video files that are not accepted."""
    if section.frames:
        return Plural(
            "folder {path} has {count} video, which needs PyAV; install it: pip install 'lora-fp8[video]': {names}",
            "folder {path} has {count} videos, which need PyAV; install it: pip install 'lora-fp8[video]': {names}",
        )
    if clip_rate:
        return Plural(
            "folder {path} has {count} video; set dataset.frames to the lengths to train, or remove it: {names}",
            "folder {path} has {count} videos; set dataset.frames to the lengths to train, or remove them: {names}",
        )
    return Plural(
        "folder {path} has {count} video, but this model trains on images only; remove it: {names}",
        "folder {path} has {count} videos, but this model trains on images only; remove them: {names}",
    )


UNREADABLE_IMAGES = Template(
    "folder {folder}: {number} of {count} images are {kind} and cannot be read; convert them to JPEG or PNG, or "
    "remove them: {files}"
)
UNREADABLE_HEIC = Template(
    "folder {folder}: {number} of {count} images are {kind}, which needs pillow-heif; install it: pip install "
    "'lora-fp8[heic]', or convert them to JPEG or PNG: {files}"
)
UNREADABLE_VIDEOS = Template(
    "folder {folder}: {number} of {count} videos are {kind} and cannot be read; convert them to MP4, or remove "
    "them: {files}"
)


def _describe_unreadable(root: Path, others: list[str], paths: list[Path]) -> list[str]:
    """Return a message for each kind of images and videos whose formats cannot be read.

    Args:
        root: the folder that the messages name.
        others: names of the files that are not accepted.
        paths: the files that are.
    """
    problems: list[str] = []
    suffixes = {name: os.path.splitext(name)[1].lower() for name in others}
    videos = sum(path.suffix.lower() in clips.VIDEOS for path in paths)
    videos += sum(suffix in (*clips.VIDEOS, *OTHER_VIDEOS) for suffix in suffixes.values())
    images = sum(path.suffix.lower() in EXTENSIONS for path in paths)
    images += sum(suffix in (*OTHER_IMAGES, *HEIC_IMAGES) for suffix in suffixes.values())
    for known, count, template in (
        (HEIC_IMAGES, images, UNREADABLE_HEIC),
        (OTHER_IMAGES, images, UNREADABLE_IMAGES),
        (dict.fromkeys(OTHER_VIDEOS, ""), videos, UNREADABLE_VIDEOS),
    ):
        names = sorted(name for name, suffix in suffixes.items() if suffix in known)
        if names:
            kinds = sorted({known[suffixes[name]] or suffixes[name] for name in names})
            kind = Joined(" and ", [Joined(", ", kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]
            problems.append(template(folder=root, number=len(names), count=count, kind=kind, files=list_names(names)))
    return problems


CONTROLS, MASKS = Template("control folder {path}"), Template("mask folder {path}")


def list_beside(
    kind: Template, root: Path, section: settings.Dataset, report: ScanReport
) -> dict[str, list[Path]] | None:
    """List the images of a control or mask folder by path inside it, without extension.

    Args:
        kind: CONTROLS or MASKS.
        root, section, report: the folder; the dataset, none of whose folders may contain it; takes the problems.

    Returns:
        None if the folder cannot be used; the reason is added to the report.
    """
    named = kind(path=root)
    if not root.is_dir():
        is_file = Message("this is a file, not a folder")
        line = is_file if root.exists() else looked_for(root, Message("the folder does not exist"))
        report.problems.append(about(named, line))
        return None
    for other in section.folders:
        trained = Path(os.path.realpath(os.path.expanduser(other.path)))
        if trained in (real := Path(os.path.realpath(root)), *real.parents):
            report.problems.append(
                Message(
                    "{path} is inside the image folder {folder}, whose images are all trained; move it out of that "
                    "folder",
                    path=named,
                    folder=other.path,
                )
            )
            return None
    files: dict[str, list[Path]] = defaultdict(list)
    try:
        for folder, names in walk(root):
            for name in names:
                if Path(name).suffix.lower() in EXTENSIONS:
                    files[(folder / name).relative_to(root).with_suffix("").as_posix()].append(folder / name)
    except OSError as error:
        report.problems.append(
            about(kind(path=as_text(error.filename)), Message("the folder cannot be read: {why}", why=reason(error)))
        )
        return None
    return files


def find_edits_beside(beside: Mapping[Path, Iterable[Path]], report: ScanReport) -> dict[Path, image_edits.ImageEdit]:
    """Return the edit of each mask or control image: that of the image that it belongs to.

    Args:
        beside: the masks or control images of each image.
        report: has the images' edits, and takes the problem of one that belongs to images with different edits.
    """
    edits: dict[Path, image_edits.ImageEdit] = {}
    for image, paths in beside.items():
        for path in paths:
            if edits.setdefault(path, report.edits[image]) != report.edits[image]:
                report.problems.append(
                    Message(
                        "{path} belongs to several images that are turned or cropped in different ways; give each "
                        "image a file of its own",
                        path=path,
                    )
                )
    return edits


def find_masked_stem(mask: str, name: str) -> str:
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


def find_label_files(names: Iterable[str]) -> set[str]:
    """Return those of a folder's file names that are OneTrainer's masks and conditioning images.

    These are NAME-masklabel.png and NAME-condlabel.png beside an image or clip NAME.*
    """
    stems = {stem for stem, suffix in map(os.path.splitext, names) if suffix.lower() in (*EXTENSIONS, *clips.VIDEOS)}
    ends = ("-masklabel", "-condlabel")
    return {f"{stem}{end}.png" for end in ends for stem in stems if f"{stem}{end}" in stems}
