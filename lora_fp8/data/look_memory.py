"""Remember what decoding found of image files, so that each file is decoded once and not at every start.

A photo of 12 megapixels takes 0.2 seconds to decode, and 10,000 of them half an hour. What was found of a file is kept
in the program's own cache until its size, its times or its inode change: one file per folder of images, with a line of
JSON and the SHA-256 of that line.

    {"schema": 1, "files": {name: {what was measured: [stamp, what was found]}}}

Errors are not kept. A file that cannot be read today may be readable tomorrow, without having changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from .. import settings
from ..common.messages import add_translations, get_language, restore, translate
from ..common.stamps import FileStamp, is_settled, read_stamp
from ..common.system import find_cache_folder
from ..common.writing import atomic_write
from ..errors import Message, reason
from . import clips, decoding
from .decoding import Light, Looked
from .image_edits import NOTHING, ImageEdit

SCHEMA = 1
"""Increase it when `decoding.inspect_all` finds something else of the same file."""
SAVE_EVERY = 30.0
"""Seconds after which what was found is written, so that an interruption does not lose it."""
UNUSED_DAYS = 90
"""Days without use after which what is known of a folder is deleted."""
USE_NOTED_EVERY = 86400
"""Minimum seconds between two updates of a file's time of last use."""


@dataclass(frozen=True)
class Measure:
    """What is measured of the decoded pixels of a file.

    Attributes:
        name: names it in the memory.
        version: is increased when `function` returns something else of the same image.
        function: see `decoding.inspect_all`; returns None, a `decoding.Light`, or a JSON object with them as values.
    """

    name: str
    version: int
    function: Callable[[Image.Image, Image.Image], Any]


OPACITY = Measure("opacity", 1, decoding.measure_opacity)
GREYS = Measure("greys", 1, decoding.measure_greys)


class LookMemory:
    """Decodes files, and remembers what was found.

    Args:
        section: `[dataset]`: max_pixels, background and frames are read.
        folder: where it is kept; None keeps nothing.
        progress: called with (files done, files in all): at first with those that are remembered.
    """

    def __init__(
        self,
        section: settings.Dataset,
        folder: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.section, self.folder, self.progress = section, folder, progress

    def inspect_all(
        self,
        paths: Sequence[Path],
        measure: Measure | None = None,
        edits: Mapping[Path, ImageEdit] | None = None,
    ) -> list[Looked]:
        """Return what each file is, in order; decode those that are not remembered.

        Args:
            paths: the files.
            measure: what becomes `measured`.
            edits: how images are turned and cropped.
        """
        edits = edits or {}
        function = measure.function if measure else None
        if self.folder is None:
            return list(self._count(decoding.inspect_all(paths, self.section, function, edits), 0, len(paths)))
        books = {folder: _Book(self.folder, folder) for folder in dict.fromkeys(path.parent for path in paths)}
        entry = self._name_entry(measure)
        stamps = [_make_stamp(path, edits.get(path, NOTHING)) for path in paths]
        looks = [
            books[path.parent].find(path.name, entry, stamp) if stamp else None
            for path, stamp in zip(paths, stamps, strict=True)
        ]
        missing = [number for number, look in enumerate(looks) if look is None]
        new = decoding.inspect_all([paths[number] for number in missing], self.section, function, edits)
        saved = time.monotonic()
        try:
            for number, look in zip(missing, self._count(new, len(paths) - len(missing), len(paths)), strict=True):
                looks[number] = look
                path, stamp = paths[number], stamps[number]
                if stamp and stamp.is_settled and not look.error and _is_unchanged(path, stamp):
                    books[path.parent].add(path.name, entry, stamp, look)
                if time.monotonic() - saved > SAVE_EVERY:
                    _save(books.values())
                    saved = time.monotonic()
        finally:
            _save(books.values())
        return [look for look in looks if look is not None]

    def _name_entry(self, measure: Measure | None) -> str:
        """Name everything besides the file that a look depends on."""
        limits = [self.section.max_pixels, bool(self.section.frames)]
        about = [measure.name, measure.version, self.section.background.lower()] if measure else []
        return json.dumps([*limits, *about])

    def _count(self, looks: Iterator[Looked], done: int, total: int) -> Iterator[Looked]:
        show = self.progress or (lambda done, total: None)
        show(done, total)
        for number, look in enumerate(looks, start=done + 1):
            show(number, total)
            yield look


def find_default_folder() -> Path:
    """Return the folder in the program's own cache that commands and the page remember in."""
    return find_cache_folder() / "images"


@dataclass(frozen=True)
class _Stamp:
    """What a file was like before it was decoded, and whether that can be trusted to change when the file does."""

    file: FileStamp
    edit: str
    is_settled: bool

    def to_json(self) -> list[Any]:
        return [*self.file, self.edit]


def _make_stamp(path: Path, edit: ImageEdit) -> _Stamp | None:
    try:
        stamp = read_stamp(path)
    except OSError:
        return None
    return _Stamp(stamp, edit.identify(""), is_settled(stamp))


def _is_unchanged(path: Path, stamp: _Stamp) -> bool:
    try:
        return read_stamp(path) == stamp.file
    except OSError:
        return False


class _Book:
    """What is remembered of the files in one folder.

    Args:
        home: folder of all books.
        folder: the folder with the files.
    """

    def __init__(self, home: Path, folder: Path) -> None:
        self._folder = folder
        about = json.dumps(os.path.abspath(folder))
        self.path = home / f"{hashlib.sha256(about.encode()).hexdigest()[:40]}.json"
        self._files = _read(self.path)
        self._new: dict[str, dict[str, Any]] = defaultdict(dict)

    def find(self, name: str, entry: str, stamp: _Stamp) -> Looked | None:
        """Return what is remembered of a file that has this stamp; None if nothing is."""
        kept, content = self._files.get(name, {}).get(entry, (None, None))
        return _from_json(content) if kept == stamp.to_json() else None

    def add(self, name: str, entry: str, stamp: _Stamp, look: Looked) -> None:
        """Remember a file; `save` writes it."""
        self._new[name][entry] = [stamp.to_json(), _to_json(look)]

    def save(self) -> None:
        """Write what is new, and drop what is known of files that are gone. Raises OSError."""
        if not self._new:
            with contextlib.suppress(OSError):  # it may just have been deleted, or belong to somebody else
                if self._files and time.time() - self.path.stat().st_mtime > USE_NOTED_EVERY:
                    os.utime(self.path)
            return
        files = _read(self.path)  # another process may have written it meanwhile
        for name, entries in self._new.items():
            files[name] = files.get(name, {}) | entries
        files = {name: entries for name, entries in files.items() if os.path.lexists(self._folder / name)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"schema": SCHEMA, "files": files}, separators=(",", ":")).encode()
        atomic_write(self.path, line + b"\n" + hashlib.sha256(line).hexdigest().encode())
        self._files, self._new = files, defaultdict(dict)


def _read(path: Path) -> dict[str, Any]:
    """Read the files of a book; {} if it does not exist, is damaged or of another version."""
    try:
        line, _, promised = path.read_bytes().partition(b"\n")
    except OSError:
        return {}
    if hashlib.sha256(line).hexdigest().encode() != promised:
        return {}
    content = json.loads(line)
    return content["files"] if content["schema"] == SCHEMA else {}


def _save(books: Iterable[_Book]) -> None:
    """Write all books. A disk that cannot be written is logged once and does no harm."""
    book = None
    try:
        for book in books:
            book.save()
        if book is not None:
            _delete_unused(book.path.parent)
    except OSError as error:
        warning = Message(
            "{path} cannot be written ({why}): the next command decodes the images again",
            path=book.path if book else "",
            why=reason(error),
        )
        logging.getLogger(__name__).warning("%s", translate(get_language(), warning))


def _delete_unused(home: Path) -> None:
    before = time.time() - UNUSED_DAYS * 86400
    with contextlib.suppress(OSError):
        for path in home.glob("*.json"):
            if path.stat().st_mtime < before:
                path.unlink(missing_ok=True)


def _to_json(look: Looked) -> dict[str, Any]:
    """Return the fields that differ from the defaults."""
    content = {name: value for name, value in vars(look).items() if value != getattr(_EMPTY, name)}
    if look.timeline is not None:
        content["timeline"] = [[*map(str, look.timeline.starts)], str(look.timeline.end)]
    if "measured" in content:
        content["measured"] = _light_to_json(look.measured)
    return add_translations(content)


def _from_json(content: dict[str, Any]) -> Looked:
    fields = dict(restore(content))
    if "timeline" in fields:
        starts, end = fields["timeline"]
        fields["timeline"] = clips.Timeline(tuple(map(Fraction, starts)), Fraction(end))
    if "whole" in fields:
        width, height = fields["whole"]
        fields["whole"] = int(width), int(height)
    return replace(_EMPTY, **fields | {"measured": _light_from_json(fields.get("measured"))})


_EMPTY = Looked()


def _light_to_json(measured: Any) -> Any:
    if isinstance(measured, Light):
        return {"light": measured._asdict()}
    if isinstance(measured, dict):
        return {name: _light_to_json(value) for name, value in measured.items()}
    return measured


def _light_from_json(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    if content.keys() == {"light"}:
        least, most, (left, top, right, bottom) = (content["light"][name] for name in Light._fields)
        return Light(least, most, (left, top, right, bottom))
    return {name: _light_from_json(value) for name, value in content.items()}
