"""The journal of caption edits: `.lora_fp8_captions.jsonl` in the dataset folder, so that it moves with the folder.

It has one JSON object per line. An operation is logged before it changes a file, and its end is logged when all of it
is on the disk:

    {"edit": 3, "open": true, "t": ..., "title": ..., "files": 12, "changes": bytes before and after, packed}
    {"undo": [3], "open": true}                          {"redo": [3], "open": true}
    {"end": 3}

An operation without an end is open: a crash or a full disk interrupted it, and it was never acknowledged. Lines without
"open" come from earlier versions, which logged an undo after it was done and logged no ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import stat
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import system
from ..common.messages import add_translations, restore
from ..common.numbers import is_finite_number
from ..common.writing import atomic_write, sync_folder
from ..errors import Message, UserError, cannot_read
from . import caption_text
from .caption_files import write_all

JOURNAL = ".lora_fp8_captions.jsonl"
JOURNAL_BYTES = 64 * 2**20
"""Size from which the oldest edits are dropped, down to half of it."""
END_BYTES = 32
"""Bytes kept free for the line that ends an operation."""
LARGEST = 2**30
"""Largest journal that is read, in bytes; this program writes none as large."""
LARGEST_EDIT = 2**29
"""Largest edit, in bytes of its captions, unpacked."""


@dataclass(frozen=True)
class Change:
    """One caption file: its relative name, and its bytes before and after (None: there is no file)."""

    file: str
    before: bytes | None
    after: bytes | None

    def decode_texts(self) -> tuple[str, str]:
        """Return the texts before and after for display; invalid bytes are replaced."""
        return _decode_for_display(self.before), _decode_for_display(self.after)


def _decode_for_display(raw: bytes | None) -> str:
    try:
        return caption_text.decode_caption(raw or b"")[0]
    except ValueError:
        return (raw or b"").decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Entry:
    """An edit in the journal. `done` is False while it is undone; `half_done` is True if a crash interrupted it."""

    id: int
    t: float
    title: str
    files: int
    done: bool
    half_done: bool = False


@dataclass(frozen=True)
class Open:
    """An operation without an end: its edits, and the side ("before" or "after") that it was bringing the files to."""

    numbers: tuple[int, ...]
    side: str


@dataclass(frozen=True)
class Record:
    """An edit as stored in the journal.

    Attributes:
        number: the edit's number.
        t: when it was made, in seconds since 1970.
        title: what it does.
        files: number of caption files.
        group: key of the group that it belongs to; "" for none.
        names: its files, if it has a group.
        logged: it was written by a version that logs ends; see the top of this file.
        changes: packed; see `pack`.
    """

    number: int
    t: float
    title: str
    files: int
    group: str = ""
    names: tuple[str, ...] = ()
    logged: bool = True
    changes: str = ""

    @classmethod
    def read(cls, number: int, line: dict[str, Any]) -> Record:
        """Read a line of a journal. As a journal may come with a dataset from anywhere, invalid values become empty."""
        t, files, given = line.get("t"), line.get("files"), line.get("names")
        names: list[str] = []
        if isinstance(given, list) and all(isinstance(name, str) for name in given):
            names = given
        return cls(
            number=number,
            t=float(t) if is_finite_number(t) and 0 <= t < 2**32 else 0.0,
            title=_read_text(line, "title"),
            files=files if type(files) is int and 0 <= files < 2**32 else 0,
            group=_read_text(line, "group"),
            names=tuple(names),
            logged=line.get("open") is True,
            changes=_read_text(line, "changes"),
        )

    def to_line(self) -> dict[str, Any]:
        """Return the object to store in the journal."""
        line: dict[str, Any] = {"edit": self.number}
        line |= {"open": True} if self.logged else {}
        line |= {"t": self.t, "title": self.title, "files": self.files}
        line |= {"group": self.group, "names": list(self.names)} if self.group else {}
        return line | {"changes": self.changes}


def _read_text(line: dict[str, Any], key: str) -> str:
    """Return the text of a key in a line of a journal; "" if it is something else."""
    value = line.get(key)
    return value if isinstance(value, str) else ""


def _to_text(raw: bytes | None) -> str | None:
    """Convert bytes for JSON, each to one character."""
    return None if raw is None else raw.decode("latin-1")


def _to_bytes(text: str | None) -> bytes | None:
    """Convert what `_to_text` returned back to bytes."""
    return None if text is None else text.encode("latin-1")


def pack(changes: Sequence[Change]) -> str:
    """Pack the bytes before and after into text for the journal."""
    rows = [(change.file, _to_text(change.before), _to_text(change.after)) for change in changes]
    raw = json.dumps(rows).encode()
    if len(raw) > LARGEST_EDIT:
        raise UserError(
            Message("{count} captions have too much text for one edit; edit fewer at once", count=len(changes))
        )
    return base64.b64encode(zlib.compress(raw)).decode()


def unpack(packed: str) -> list[Change]:
    """Return the changes that `pack` packed.

    Raises:
        ValueError: the text is damaged, or was not written by `pack`.
    """
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(base64.b64decode(packed), LARGEST_EDIT)
        if not unpacking.eof:
            raise ValueError("not whole, or too long")
        changes = [Change(name, _to_bytes(before), _to_bytes(after)) for name, before, after in json.loads(raw)]
        if any("\0" in change.file or not os.fsencode(change.file) for change in changes):
            raise ValueError("no file name")
    except (TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise ValueError(str(error)) from None
    return changes


class Journal:
    """The journal of a folder, as far as it was read.

    Attributes:
        records: edits by number.
        done, undone: numbers of the edits that can be undone and redone, the next one last.
        last: the highest number.
        open: the operation that has begun and has no end.
        in_doubt: the last line could not be written, nor taken out again: it may be in the file after a crash.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, Path(os.path.expanduser(folder)) / JOURNAL
        self._descriptor: int | None = None
        self.in_doubt = False
        self._forget()

    def _forget(self) -> None:
        self.close()
        self.records: dict[int, Record] = {}
        self.done: list[int] = []
        self.undone: list[int] = []
        self.last = 0
        self.open: Open | None = None
        self._size = 0  # bytes that were read
        self._began = 0  # where the line of the open operation begins

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def half_done(self) -> tuple[int, ...]:
        """Return the numbers of the edits of the open operation."""
        return self.open.numbers if self.open else ()

    # -- reading

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """Read the journal of a folder once. Raises UserError as `refresh` does."""
        journal = cls(folder)
        journal.refresh()
        journal.close()
        return journal

    def refresh(self) -> None:
        """Read what was added since the last call; read everything if the file was replaced.

        Raises:
            UserError: the journal cannot be read.
        """
        if self.path.is_symlink():
            raise UserError(
                Message("{path}: the file is a link, so edits cannot be recorded; remove it", path=self.path)
            )
        try:
            opened = os.open(self.path, system.combine_flags("O_RDONLY", "O_NONBLOCK"))
        except FileNotFoundError:
            return self._forget()
        except OSError as error:
            raise cannot_read(self.path, error) from None
        status = os.fstat(opened)
        descriptor = self._descriptor
        same = descriptor is not None and os.path.samestat(os.fstat(descriptor), status)
        if descriptor is not None and same and status.st_size >= self._size:
            os.close(opened)
        else:
            self._forget()
            descriptor = self._descriptor = opened
            # It is kept open, so that its inode number is not reused and `samestat` can be trusted.
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            self.close()
            raise UserError(Message("{path}: this is not a journal of caption edits; remove it", path=self.path))
        self._apply_lines(system.read_at(descriptor, status.st_size - self._size, self._size))

    def _apply_lines(self, raw: bytes) -> None:
        *lines, last = raw.split(b"\n")
        for line in lines:
            if (record := _parse(line)) is not None:
                self._apply_line(record)
        self._size += len(raw) - len(last)
        # The last line may have no newline. It is complete, or is half of an edit that never began or is being written
        # now.
        if (record := _parse(last)) is not None:
            self._apply_line(record)
            self._size += len(last)

    def _apply_line(self, line: dict[str, Any]) -> None:
        if "end" in line:
            self.open = None
            return
        kind = next((kind for kind in ("edit", "undo", "redo") if kind in line), "")
        numbers = line.get(kind)
        numbers = numbers if isinstance(numbers, list) else [numbers]
        if not numbers or not all(type(number) is int for number in numbers):
            return
        if kind == "edit":
            for number in numbers:
                self.records[number] = Record.read(number, line)
                self.done.append(number)
                self.last = max(self.last, number)
            self.undone.clear()  # an edit that was undone before a new edit cannot be redone
        else:
            here, there = (self.done, self.undone) if kind == "undo" else (self.undone, self.done)
            if numbers != here[: -len(numbers) - 1 : -1]:
                return
            for _ in numbers:
                there.append(here.pop())
        self.open = Open(tuple(numbers), "before" if kind == "undo" else "after") if line.get("open") is True else None

    def unpack_changes(self, numbers: Sequence[int]) -> list[Change]:
        """Return the changes of these edits.

        Raises:
            UserError: one of them is damaged.
        """
        changes = []
        for number in numbers:
            try:
                changes += unpack(self.records[number].changes)
            except ValueError:
                raise UserError(
                    Message(
                        "{path}: edit {number} is damaged and cannot be undone or redone", path=self.path, number=number
                    )
                ) from None
        return changes

    def find_group(self, number: int) -> str:
        """Return the key of the edits that are undone together: the group, or one of the edit's own."""
        return self.records[number].group or f"edit {number}"

    def group_stack(self, stack: list[int]) -> list[list[int]]:
        """Group the edits of a stack as they are undone or redone, the next first. No file is in one group twice."""
        groups: list[list[int]] = []
        names: set[str] = set()
        for number in reversed(stack):
            these = set(self.records[number].names)
            if not groups or self.find_group(groups[-1][0]) != self.find_group(number) or names & these:
                groups.append([])
                names = set()
            groups[-1].append(number)
            names |= these
        return groups

    def make_entry(self, numbers: Sequence[int], done: bool) -> Entry:
        """Return edits of one group as one entry of the history."""
        records = [self.records[number] for number in numbers]
        files, half_done = sum(record.files for record in records), not {*numbers}.isdisjoint(self.half_done)
        return Entry(max(numbers), records[0].t, records[0].title, files, done, half_done)

    # -- writing; the caller holds the folder's lock and has called refresh

    def begin(self, line: dict[str, Any], keep: Collection[int] = ()) -> None:
        """Log an operation, durably, before any file is changed.

        Args:
            line: see the top of this file.
            keep: numbers of edits that stay when the journal is shortened.

        Raises:
            OSError: the line cannot be written, and is not in the journal.
        """
        raw = _dump(line)
        room = JOURNAL_BYTES - len(raw) - END_BYTES
        if self.open is None and self._size > room:
            self._shorten(room, keep)
        self._began = self._append(raw)
        self._apply_line(line)

    def end(self) -> None:
        """Log that the open operation is on the disk, durably. Raises OSError as `begin` does."""
        if self.open is not None:
            line = {"end": self.open.numbers[0]}
            self._append(_dump(line))
            self._apply_line(line)

    def cancel(self) -> None:
        """Remove the operation that `begin` logged. This needs no free disk space.

        If even this fails, the operation stays open, and the next edit reverts it.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, system.combine_flags("O_WRONLY"))
            try:
                os.ftruncate(descriptor, self._began)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._forget()
        with contextlib.suppress(UserError):
            self.refresh()

    def _append(self, raw: bytes) -> int:
        """Append a line, durably. Return the size of the file before."""
        self.in_doubt = False
        descriptor = os.open(self.path, system.combine_flags("O_RDWR", "O_APPEND", "O_CREAT", "O_NOFOLLOW"), 0o666)
        try:
            size = os.fstat(descriptor).st_size
            ragged = size and system.read_at(descriptor, 1, size - 1) != b"\n"
            raw = b"\n" + raw if ragged else raw
            try:
                write_all(descriptor, raw)
                os.fsync(descriptor)
                if not size:
                    sync_folder(self.path.parent)
            except BaseException:
                try:
                    os.ftruncate(descriptor, size)
                    os.fsync(descriptor)
                except OSError:  # on some file systems even this needs free space
                    self.in_doubt = True
                raise
            if self._descriptor is None:
                self._descriptor = os.dup(descriptor)
            self._size = size + len(raw)
            return size
        finally:
            os.close(descriptor)

    def _shorten(self, room: int, keep: Collection[int]) -> None:
        """Keep the newest edits that fit into half of the journal and leave room for the next line."""
        room = min(room, JOURNAL_BYTES // 2)
        kept: dict[int, bytes] = {}
        for stack in (self.undone, self.done):
            for number in reversed(stack):  # the next to be redone or undone first: a gap would cut off the older ones
                line = _dump(self.records[number].to_line())
                room -= len(line) + 32  # with its undo line
                if room < 0 and number not in keep:
                    break
                kept[number] = line
        lines = [kept[number] for number in (*self.done, *reversed(self.undone)) if number in kept]
        lines += [_dump({"undo": number}) for number in self.undone if number in kept]
        if system.WINDOWS:  # an open file cannot be replaced there
            self.close()
        atomic_write(self.path, b"".join([*lines, _dump({"end": 0})]))
        self._forget()
        self.refresh()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = restore(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _dump(line: dict[str, Any]) -> bytes:
    return json.dumps(add_translations(line), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
