"""Take over a dataset of another form: its captions beside its images, or images and captions into a new folder.

A caption beside an image is an edit of the folder's journal, which `dataset undo` takes back. Into a new folder, an
image is written as its bytes are. Nothing is ever replaced: a folder with files in it is refused before anything is
written, unless this import would write every one of them with the same bytes, as an interrupted one has.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..common import system
from ..common.shell import quote_path
from ..common.writing import make_folder, sync_files, sync_folder
from ..errors import Message, UserError, about, cannot_write, first_few, reason
from . import captions
from .decoding import ImageError, find_format
from .foreign_datasets import Record, Source, list_columns

SUFFIXES = {
    "PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif", "GIF": ".gif",
    "AVIF": ".avif", "HEIF": ".heic",
}  # fmt: skip
LONGEST_NAME = 200
"""Bytes of a name; file systems take 255, and a number, an ending and `.PID.tmp` come to it."""
TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
"""Names of files that are being written, see `_NewFiles`."""
PAGE = 4096
"""Bytes that a disk writes together: those that a power loss leaves unwritten are zeros."""
AT_ONCE = 100
"""Number of files that are synced together: a disk writes many in not much more time than one."""
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)
"""Names that are devices on Windows, whatever the extension."""
OF_SYSTEMS = {".DS_Store", "Thumbs.db", "desktop.ini"}
"""Files that systems add to folders; a folder with nothing else is empty."""


@dataclass
class ImportReport:
    """What was taken over.

    Attributes:
        form: of the source, as in `foreign_datasets`.
        images: number of images with the records' captions, those included that were there already.
        uncaptioned: number of them whose record has no caption.
        kept: number of captions that were left as they are, because there was another one.
        problems: one line each for records that were left out, and for files that could not be read.
        caption_problems: one line each for captions that could not be used; their images are there.
    """

    form: str
    images: int = 0
    uncaptioned: int = 0
    kept: int = 0
    problems: list[str] = field(default_factory=list)
    caption_problems: list[str] = field(default_factory=list)


def import_captions(source: Source, *, overwrite: bool = False) -> ImportReport:
    """Write the captions beside the images of the source's folder, as one edit.

    Args:
        source: whose records name files.
        overwrite: also replace captions that are there.

    Raises:
        UserError: the records have the images themselves, or no captions; or a caption cannot be written.
    """
    report = ImportReport(source.form)
    wanted: dict[str, str] = {}
    listed: dict[str, Path] = {}
    for record in source.read_records():
        if isinstance(record.image, bytes):
            raise UserError(
                Message(
                    "{path}: the file contains the images; name a new folder to unpack them into", path=source.files[0]
                )
            )
        listed = listed or captions.list_caption_files(source.root)
        name = record.image.relative_to(source.root).as_posix()
        if name not in listed:
            report.problems.append(Message("{path}: this is not an image of the folder", path=record.name))
            continue
        report.images += 1
        if not record.caption:
            report.uncaptioned += 1
            continue
        file = listed[name].relative_to(source.root).as_posix()
        try:
            there = captions.read(source.root, file)
        except UserError as error:
            report.caption_problems.append(_describe_unreadable(source.root, error))
            continue
        if wanted.get(file, record.caption) != record.caption:
            report.caption_problems.append(
                Message("{path}: another image has the same caption file; its caption is used", path=record.name)
            )
        elif there and there != record.caption and not overwrite:
            report.kept += 1
        else:
            wanted[file] = record.caption
    _copy_problems(source, report)
    _require_captions(source, report)
    edit = captions.assign(source.root, wanted, Message("captions from {name}", name=source.files[0].name))
    report.caption_problems += edit.problems
    if edit.changes:
        captions.apply(source.root, edit)
    return report


def import_images(
    source: Source, folder: Path, *, limit: int = 0, progress: Callable[[int], None] | None = None
) -> ImportReport:
    """Write images and captions into a folder.

    Args:
        source: where they come from.
        folder: a new or empty one, or one in which an import of the same source was interrupted.
        limit: number of images to take; 0 takes all.
        progress: called with the number of images that are written.

    Raises:
        UserError: the folder has other files, or cannot be written.
    """
    report, root = ImportReport(source.form), folder.expanduser()
    try:
        for path in _require_own(source, root):
            path.unlink(missing_ok=True)
        make_folder(root)
        with _NewFiles(root) as new_files:
            for record, files in _make_files(source, report.problems):
                for name, raw in files.items():
                    new_files.write(name, raw)
                report.images += 1
                report.uncaptioned += not record.caption
                if progress is not None:
                    progress(report.images)
                if report.images == limit:
                    break
    except OSError as error:
        raise cannot_write(error.filename or root, error) from None
    _copy_problems(source, report)
    _require_captions(source, report)
    return report


def _make_files(source: Source, problems: list[str]) -> Iterator[tuple[Record, dict[str, bytes]]]:
    """Yield each record with the names and bytes of its files in a new folder; note those without a usable image."""
    used: set[str] = set()
    for record in source.read_records():
        try:
            raw = record.read()
            suffix = SUFFIXES[find_format(raw)]
        except (OSError, ImageError) as error:
            problems.append(about(record.name, reason(error) if isinstance(error, OSError) else str(error)))
            continue
        stem = _choose_name(record, used)
        files = {f"{stem}{suffix}": raw}
        if record.caption:
            files[f"{stem}.txt"] = record.caption.encode()
        yield record, files


def require_empty(folder: Path) -> None:
    """Raise UserError if a folder has files, or is none; one that does not exist is as good as an empty one."""
    root = folder.expanduser()
    try:
        names = {path.name for path in root.iterdir()} - OF_SYSTEMS
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(root, error) from None
    if names:
        raise UserError(
            Message("{path}: the folder already contains files; name a new or empty folder to import into", path=folder)
        )


def _require_own(source: Source, root: Path) -> list[Path]:
    """Return what an import of this source that was killed left half written in a folder.

    Raises:
        OSError: the folder cannot be read.
        UserError: it has other files than those that this import writes.
    """
    if not root.exists():
        return []
    left = {path.name for path in root.iterdir()} - OF_SYSTEMS
    half: dict[str, list[str]] = {}
    for name in left:
        if match := TEMPORARY.fullmatch(name):
            half.setdefault(match[1], []).append(name)
    torn: list[Path] = []
    # Every record is looked at, whatever the limit, as an earlier import may have taken more.
    for _, files in _make_files(replace(source, problems=[], caption_problems=[], columns=Counter()), []):
        if not left:
            break
        for name, raw in files.items():
            if name in left and not _has_bytes(root / name, raw):
                raise _make_replace_error(root / name)
            begun = [other for other in half.get(name, ()) if _is_begun(root / other, raw)]
            torn += [root / other for other in begun]
            left -= {name, *begun}
    if left:
        raise UserError(
            Message(
                "{path}: the folder contains files that this import does not write: {names}; name a new or empty "
                "folder",
                path=root,
                names=first_few(sorted(left)),
            )
        )
    return torn


def _has_bytes(path: Path, raw: bytes) -> bool:
    """Return True if a regular file, no link, has these bytes."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size == len(raw) and path.read_bytes() == raw


def _is_begun(path: Path, raw: bytes) -> bool:
    """Return True if a regular file was to get these bytes: it has their first, and zeros where power was lost."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > len(raw):
        return False
    there = path.read_bytes()
    pages = ((there[begin : begin + PAGE], raw[begin : begin + PAGE]) for begin in range(0, len(there), PAGE))
    return all(ours.startswith(page) or not any(page) for page, ours in pages)


def _make_replace_error(path: Path) -> UserError:
    return UserError(
        Message("{path}: the file exists already with other content; name a new folder to import into", path=path)
    )


def _copy_problems(source: Source, report: ImportReport) -> None:
    report.problems += source.problems
    report.caption_problems += source.caption_problems


def _describe_unreadable(root: Path, error: UserError) -> Message:
    """Return the line about a caption that cannot be read and stays, with the command that converts it if one can."""
    line = Message("{path}: {line}", path=root, line=str(error))
    if not isinstance(error, captions.NoText):
        return line
    command = f"lora-fp8 dataset edit {quote_path(root)} --recode ENCODING"
    return Message("{line}, or convert it: `{command}`", line=line, command=command)


def _require_captions(source: Source, report: ImportReport) -> None:
    """Raise UserError if no record had a caption, though there are columns that it could be in."""
    if report.images and source.column and source.column not in source.columns:
        if not source.columns:
            raise UserError(
                Message("{path}: there is no column {name}", path=source.files[0], name=repr(source.column))
            )
        raise UserError(
            Message(
                "{path}: there is no column {name}; the columns are {names}",
                path=source.files[0],
                name=repr(source.column),
                names=list_columns(source),
            )
        )
    if report.images and report.uncaptioned == report.images and source.columns:
        if source.column:
            raise UserError(Message("{path}: column {name} contains no text", path=source.files[0], name=source.column))
        raise UserError(
            Message(
                "{path}: no column has a known name for captions: {names}; name one with --caption",
                path=source.files[0],
                names=list_columns(source),
            )
        )
    if not report.images:
        raise UserError(
            Message("{path}: no image could be imported: {line}", path=source.files[0], line=report.problems[0])
            if report.problems
            else Message("{path}: the file has no records", path=source.files[0])
        )


def _choose_name(record: Record, used: set[str]) -> str:
    """Return a name without extension that every system can write, another one for each record."""
    stem = os.path.splitext(re.split(r"[/\\]", record.name)[-1])[0] if isinstance(record.image, bytes) else ""
    stem = stem or os.path.splitext(record.name.replace("\\", "/").replace("/", "_"))[0]
    plain = re.sub(r"[^\w\- .()]", "_", stem).encode()[:LONGEST_NAME].decode(errors="ignore")
    stem = plain.strip(" .") or "image"
    if RESERVED.fullmatch(stem.split(".")[0]):
        stem = f"_{stem}"
    number, unique = 1, stem
    while unique.lower() in used:  # Windows and macOS know no case
        number += 1
        unique = f"{stem}_{number}"
    used.add(unique.lower())
    return unique


class _NewFiles:
    """Writes files into a folder, many at a time: a file has its name only when its bytes are on the disk.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._waiting: dict[Path, Path] = {}

    def __enter__(self) -> _NewFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._place()
        finally:
            for temporary in self._waiting:
                temporary.unlink(missing_ok=True)

    def write(self, name: str, raw: bytes) -> None:
        """Write a file that does not exist, or is there with the same content."""
        path = self.root / name
        if os.path.lexists(path):
            if not _has_bytes(path, raw):
                raise _make_replace_error(path)
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._waiting[temporary] = path
        with open(temporary, "wb") as file:
            file.write(raw)
        if len(self._waiting) == AT_ONCE:
            self._place()

    def _place(self) -> None:
        sync_files([*self._waiting])
        for temporary, path in self._waiting.items():
            system.replace(temporary, path)
        self._waiting.clear()
        sync_folder(self.root)
