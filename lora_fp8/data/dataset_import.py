"""Take over a dataset of another form: its captions beside its images, or images and captions into a new folder.

A caption beside an image is an edit of the folder's journal, which `dataset undo` takes back. Into a new folder, an
image is written as its bytes are. Nothing is ever replaced: what is there already with the same content is left, so
that an interrupted import goes on, and anything else ends it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..common import system
from ..common.writing import sync_files, sync_folder
from ..errors import Message, UserError, about, cannot_write, reason
from . import captions
from .decoding import ImageError, find_format
from .foreign_datasets import Record, Source, list_columns

SUFFIXES = {
    "PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif", "GIF": ".gif",
    "AVIF": ".avif", "HEIF": ".heic",
}  # fmt: skip
LONGEST_NAME = 100
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)
"""Names that are devices on Windows, whatever the extension."""


@dataclass
class ImportReport:
    """What was taken over.

    Attributes:
        form: of the source, as in `foreign_datasets`.
        images: number of images with the records' captions, those included that were there already.
        uncaptioned: number of them whose record has no caption.
        kept: number of captions that were left as they are, because there was another one.
        problems: one line each for records that could not be used.
    """

    form: str
    images: int = 0
    uncaptioned: int = 0
    kept: int = 0
    problems: list[str] = field(default_factory=list)


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
    for record in source.records():
        if isinstance(record.image, bytes):
            raise UserError(
                Message("{path}: has the images in it; name a new folder to unpack it into", path=source.files[0])
            )
        listed = listed or captions.listed(source.root)
        name = record.image.relative_to(source.root).as_posix()
        if name not in listed:
            report.problems.append(Message("{path}: is no image of the folder", path=record.name))
            continue
        report.images += 1
        if not record.caption:
            report.uncaptioned += 1
            continue
        file = listed[name].relative_to(source.root).as_posix()
        there = captions.read(source.root, file)
        if there and there != record.caption and not overwrite:
            report.kept += 1
        else:
            wanted[file] = record.caption
    report.problems += source.problems
    _require_captions(source, report)
    edit = captions.assign(source.root, wanted, Message("captions from {name}", name=source.files[0].name))
    report.problems += edit.problems
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
        UserError: a file of the folder would have to be replaced, or cannot be written.
    """
    report, used, written = ImportReport(source.form), set[str](), list[Path]()
    root = folder.expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for record in source.records():
            try:
                raw = record.read()
                suffix = SUFFIXES[find_format(raw)]
            except (OSError, ImageError) as error:
                report.problems.append(about(record.name, reason(error) if isinstance(error, OSError) else str(error)))
                continue
            stem = _name(record, used)
            written += _place(root / f"{stem}{suffix}", raw)
            if record.caption:
                written += _place(root / f"{stem}.txt", record.caption.encode())
            report.images += 1
            report.uncaptioned += not record.caption
            if progress is not None:
                progress(report.images)
            if report.images == limit:
                break
        sync_files(written)
        sync_folder(root)
    except OSError as error:
        raise cannot_write(error.filename or root, error) from None
    report.problems += source.problems
    _require_captions(source, report)
    return report


def _require_captions(source: Source, report: ImportReport) -> None:
    """Raise UserError if no record had a caption, though there are columns that it could be in."""
    if report.images and report.uncaptioned == report.images and source.columns:
        if source.column in source.columns:
            raise UserError(Message("{path}: column {name} has no text", path=source.files[0], name=source.column))
        raise UserError(
            Message(
                "{path}: none of its columns is known to have captions: {names}; name one with --caption",
                path=source.files[0],
                names=list_columns(source),
            )
        )
    if not report.images:
        raise UserError(
            Message("{path}: no image could be taken: {line}", path=source.files[0], line=report.problems[0])
            if report.problems
            else Message("{path}: has no records", path=source.files[0])
        )


def _name(record: Record, used: set[str]) -> str:
    """Return a name without extension that every system can write, another one for each record."""
    stem = os.path.splitext(re.split(r"[/\\]", record.name)[-1])[0] if isinstance(record.image, bytes) else ""
    stem = stem or os.path.splitext(record.name.replace("\\", "/").replace("/", "_"))[0]
    stem = re.sub(r"[^\w\- .()]", "_", stem)[:LONGEST_NAME].strip(" .") or "image"
    if RESERVED.fullmatch(stem.split(".")[0]):
        stem = f"_{stem}"
    number, unique = 1, stem
    while unique.lower() in used:  # Windows and macOS know no case
        number += 1
        unique = f"{stem}_{number}"
    used.add(unique.lower())
    return unique


def _place(path: Path, raw: bytes) -> list[Path]:
    """Write a file that does not exist. Returns it; [] if it is there with the same content."""
    if os.path.lexists(path):
        if not path.is_symlink() and path.is_file() and path.read_bytes() == raw:
            return []
        raise UserError(
            Message("{path}: exists already with other content; name a new folder to import into", path=path)
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
        system.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return [path]
