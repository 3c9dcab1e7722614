"""Edit captions: operations over selected images that are previewed first and can be undone byte for byte.

    edit = preview(folder, [RenameTag("girl", "woman")])      only reads; `edit.changes` has the changes
    apply(folder, edit)                                       writes, if no file has changed since the preview
    undo(folder); redo(folder)                                byte for byte, if no file has changed since

    repair(folder)                                            reverts an edit that a crash interrupted

A caption keeps its encoding, byte-order mark, line ends and final newline. Only `.txt` and `.caption` files beside
images, and the list of the folder's image edits (`data.image_edits`), are ever written, each completely or not at all,
and never outside the folder, wherever links lead. Tags are the
parts of one line between separators; a line that an operation does not change keeps its exact bytes, spaces included.

An edit, an undo and a redo take the same steps: the bytes before and after are logged in the journal
(`data.caption_journal`); all new files are staged and synced (`data.caption_files`); they are renamed; the end is
logged; and only then is the edit acknowledged. An operation that a crash interrupted stays open in the journal: `undo`
and `redo` complete or revert it, `repair` and the next edit revert it. Until then, the bytes in the journal tell damage
by the crash (files that are empty, filled with NULs, or cut off) from changes by somebody else.

This module does not import torch: the web page edits captions with these functions.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import settings
from ..common import system
from ..common.locks import try_lock
from ..common.shell import quote_path
from ..errors import Joined, Message, UserError, UserErrors, about, reason
from . import caption_files, caption_text, image_edits, image_files
from .caption_files import find_target, read_bytes
from .caption_journal import JOURNAL, Change, Entry, Journal, Open, pack
from .caption_operations import (
    MAX_CAPTION,
    Operation,
    Recode,
    ReplacePattern,
    SetText,
    check,
    require_caption,
    split_tags,
)
from .examples import ScanReport

__all__ = ["JOURNAL", "Change", "Entry", "Journal"]

LOCK = ".lora_fp8_captions.lock"
"""Empty file that is locked on Windows, where a folder cannot be. It is left there: deleting it could free it twice."""


def list_caption_files(folder: Path, mask: str = "") -> dict[str, Path]:
    """Map each image and video of a folder to its caption file: the existing one, or the .txt that it would get.

    Args:
        folder: the dataset folder.
        mask: as in dataset.folders; masks that lie beside the images are left out.

    Returns:
        {relative name of the image: path of the caption file}.

    Raises:
        UserError: the folder does not exist or cannot be read.
    """
    report = ScanReport()
    section = settings.Dataset(folders=[settings.Folder(path=str(folder), mask=mask)])
    images = image_files.list_folder(0, section, report, videos=True)
    unreadable = [line for line in report.problems if "file name" not in line]
    if unreadable and not images:
        raise UserErrors(unreadable, "dataset")
    return {
        image_files.make_relative_name(path, root): caption or path.with_suffix(".txt")
        for _, root, path, caption in images
    }


def select(
    folder: Path,
    *,
    glob: str = "",
    having: Sequence[str] = (),
    lacking: Sequence[str] = (),
    separator: str = ",",
    mask: str = "",
) -> list[str]:
    """Select images by a glob for their name and by the tags of their captions.

    Captions that cannot be read have no tags.

    Args:
        folder: the dataset folder.
        glob: pattern for the relative name; "" matches all.
        having: tags that a caption must all have.
        lacking: tags of which it must have none.
        separator: between tags.
        mask: as in `list_caption_files`.

    Returns:
        The relative names of the images.
    """
    chosen = []
    for name, path in list_caption_files(folder, mask).items():
        if glob and not fnmatch.fnmatchcase(name, glob):
            continue
        try:
            text = caption_text.read_caption(path)
        except (OSError, ValueError):
            text = ""
        tags = set(split_tags(text, separator))
        if tags.issuperset(having) and tags.isdisjoint(lacking):
            chosen.append(name)
    return chosen


class NoText(UserError):
    """A caption file is not text in UTF-8, nor in UTF-16 with a mark."""


@dataclass(frozen=True)
class Edit:
    """The changes that operations would make, and the captions that cannot be edited."""

    title: str
    changes: list[Change] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def preview(folder: Path, operations: Sequence[Operation], only: Collection[str] | None = None, mask: str = "") -> Edit:
    """Compute what the operations, one after another, change in the captions; nothing is written.

    Args:
        folder: the dataset folder.
        operations: see above.
        only: relative names of images, as `list_caption_files` has them; None selects all.
        mask: as in `list_caption_files`.

    Raises:
        UserError: an operation is invalid, a name is not an image of the folder, or a pattern never finishes.
    """
    check(operations)
    pictures = list_caption_files(folder, mask)
    if unknown := sorted(set(only or ()) - pictures.keys()):
        raise UserError(
            Message(
                "{path}: the images {name} and {count} more are not in this folder; look at the folder again",
                path=folder,
                name=repr(unknown[0]),
                count=len(unknown) - 1,
            )
        )
    edit = Edit(Joined("; ", [operation.make_title() for operation in operations]))
    recodings = [operation.encoding for operation in operations if isinstance(operation, Recode)]
    creates = any(operation.creates for operation in operations)
    texts: dict[str, _Text] = {}
    # Two images may share a caption file: it is edited once.
    files = dict.fromkeys(pictures[name] for name in (pictures if only is None else only))
    for path in files:
        name = path.relative_to(Path(os.path.expanduser(folder))).as_posix()
        try:
            raw = read_bytes(find_target(folder, name))
            if raw is not None or creates:
                texts[name] = _Text.from_bytes(raw, recodings)
        except (OSError, ValueError, UserError) as error:
            edit.problems.append(about(name, error))
    for operation in operations:
        bodies = [text.body for text in texts.values()]
        changed = (
            operation.replace_all(bodies) if isinstance(operation, ReplacePattern) else list(map(operation, bodies))
        )
        for text, body in zip(texts.values(), changed, strict=True):
            text.body = body
    _add_changes(edit, texts)
    return edit


def assign(folder: Path, wanted: Mapping[str, str], title: str) -> Edit:
    """Return an edit that sets captions one by one, from relative names of caption files and their new texts."""
    edit, texts = Edit(title), {}
    for name, wish in wanted.items():
        try:
            texts[name] = _Text.from_bytes(read_bytes(find_target(folder, name)), [])
            texts[name].body = SetText(wish)(texts[name].body)
        except (OSError, ValueError, UserError) as error:
            edit.problems.append(about(name, error))
    _add_changes(edit, texts)
    return edit


def assign_images(folder: Path, wanted: Mapping[str, image_edits.ImageEdit], title: str) -> Edit:
    """Return an edit that excludes, turns or crops images: it changes the folder's list, and no image file.

    Args:
        folder: the dataset folder.
        wanted: what is done to each image, by its relative name; those that are not named stay as they are.
        title: of the edit.

    Raises:
        UserError: the list cannot be read.
    """
    path = find_target(folder, image_edits.FILE)
    try:
        before = read_bytes(path)
    except OSError as error:
        raise UserError(about(path, error)) from None
    after = image_edits.format_edits(image_edits.read(path.parent) | dict(wanted)).encode()
    edit = Edit(title)
    if after != (before or image_edits.HEAD.encode()):
        edit.changes.append(Change(image_edits.FILE, before, after))
    return edit


def _add_changes(edit: Edit, texts: dict[str, _Text]) -> None:
    for name, text in texts.items():
        try:
            after = text.encode_text()
        except ValueError as error:
            edit.problems.append(about(name, error))
            continue
        if after != (text.raw or b""):
            edit.changes.append(Change(name, text.raw, after))


@dataclass
class _Text:
    """A caption file being edited: `body` is its text without the final newlines, `tail` is these newlines."""

    raw: bytes | None
    body: str
    tail: str
    mark: bytes
    codec: str

    @classmethod
    def from_bytes(cls, raw: bytes | None, recodings: list[str]) -> _Text:
        """Decode a caption file; if it is not UTF-8 or UTF-16, try the first of `recodings`.

        Raises:
            ValueError: the bytes cannot be decoded, or are too many.
        """
        if raw is not None and len(raw) > 8 * MAX_CAPTION:
            raise ValueError(Message("the file has {count} bytes, too many for a caption", count=f"{len(raw):,}"))
        try:
            text, mark, codec = caption_text.decode_caption(raw or b"")
        except ValueError:
            if not recodings:
                raise
            try:
                text, mark, codec = (raw or b"").decode(recodings[0]), b"", "utf-8"
            except UnicodeDecodeError as error:
                raise ValueError(
                    Message("the text is not {codec} at byte {byte}", codec=recodings[0], byte=error.start)
                ) from None
        body = text.rstrip("\r\n")
        return cls(raw, body, text[len(body) :], mark, codec)

    def encode_text(self) -> bytes:
        """Encode the text as the file was encoded.

        Raises:
            ValueError: the text is too long, or has a NUL character or half of a surrogate pair.
        """
        require_caption(self.body)
        try:
            return self.mark + (self.body + self.tail).encode(self.codec)
        except UnicodeEncodeError:
            raise ValueError(
                Message("the caption would contain invalid characters (half of a surrogate pair)")
            ) from None


def read(folder: Path, name: str) -> str:
    """Read the text of a caption file, given its relative name, without the final newlines; "" if there is none.

    Raises:
        NoText: the file is in another encoding, or is too large for a caption.
        UserError: it cannot be read, or is a link that leads out of the folder.
    """
    try:
        return _Text.from_bytes(read_bytes(find_target(folder, name)), []).body
    except ValueError as error:
        raise NoText(about(name, error)) from None
    except OSError as error:
        raise UserError(about(name, error)) from None


def apply(
    folder: Path,
    edit: Edit,
    group: str = "",
    progress: Callable[[int, int], object] | None = None,
    journal: Journal | None = None,
) -> Entry:
    """Write all changes of a preview, or none of them. They are on the disk when this returns.

    Consecutive edits of one group are undone and redone together, such as those of one run of the captioner.

    Args:
        folder: the dataset folder.
        edit: from `preview` or `assign`.
        group: key of the group; "" for none.
        progress: called now and then with the number of staged captions and the number of all.
        journal: from `open_journal`, to make many edits in a row.

    Raises:
        UserError: a caption has changed since the preview, or cannot be written; nothing has been changed.
    """
    if not edit.changes:
        raise UserError(Message("{key}: this edit changes no caption", key=edit.title))
    with _editing(folder, journal) as journal:
        if journal.open:
            _take_back(folder, journal, journal.open)
        changes = _with_real_names(folder, edit.changes)
        files = _read_files(folder, changes, "before", Message("since the preview; preview the edit again"))
        number = journal.last + 1
        line: dict[str, Any] = {"edit": number, "open": True, "t": round(time.time(), 3), "title": edit.title}
        line |= {"files": len(changes)}
        line |= {"group": group, "names": [change.file for change in changes]} if group else {}
        wanted = {path: (now, change.after) for path, (change, now) in files.items()}
        _carry_out(journal, {**line, "changes": pack(changes)}, wanted, progress)
        return Entry(number, line["t"], edit.title, len(changes), True)


def undo(folder: Path, progress: Callable[[int, int], object] | None = None) -> Entry:
    """Restore the captions as they were before the last edit, or complete an undo that a crash interrupted.

    Raises:
        UserError: there is nothing to undo, or captions have changed since; these are listed, and nothing is written.
    """
    return _undo_or_redo(folder, "undo", progress)


def redo(folder: Path, progress: Callable[[int, int], object] | None = None) -> Entry:
    """Redo the edit that was undone last, or complete an edit that a crash interrupted. Raises as `undo` does."""
    return _undo_or_redo(folder, "redo", progress)


def read_history(folder: Path) -> list[Entry]:
    """Return the edits of the journal, oldest first; those that were undone and can be redone are at the end."""
    journal = Journal.read(folder)
    if journal.open and _is_locked(folder):
        journal.open = None  # it is still running
    done = [journal.make_entry(numbers, True) for numbers in journal.group_stack(journal.done)]
    return done[::-1] + [journal.make_entry(numbers, False) for numbers in journal.group_stack(journal.undone)]


def find_unchanged_files(folder: Path, group: str) -> set[str]:
    """Return the caption files that an edit of this group wrote and that have not changed since."""
    journal = Journal.read(folder)
    last: dict[str, bytes | None] = {}
    for number in journal.done:
        if journal.find_group(number) == group:
            last |= {change.file: change.after for change in journal.unpack_changes([number])}
    unchanged = set()
    for file, after in last.items():
        with contextlib.suppress(OSError, UserError):  # not a file of this folder any more
            if read_bytes(find_target(folder, file)) == after:
                unchanged.add(file)
    return unchanged


@contextlib.contextmanager
def open_journal(folder: Path) -> Iterator[Journal]:
    """Hold the journal of a folder open for many edits: each reads only what others have added since.

    An operation that a crash interrupted is reverted first.
    """
    journal = Journal(folder)
    try:
        with _editing(folder, journal):
            caption_files.sweep(_find_leftovers(folder))
            if journal.open:
                _take_back(folder, journal, journal.open)
        yield journal
    finally:
        journal.close()


def _undo_or_redo(folder: Path, what: str, progress: Callable[[int, int], object] | None) -> Entry:
    side = "before" if what == "undo" else "after"
    with _editing(folder) as journal:
        line: dict[str, Any] = {}
        if journal.open and journal.open.side == side:
            numbers = list(journal.open.numbers)
        else:
            stack = journal.done if what == "undo" else journal.undone
            if not stack:
                if what == "undo":
                    raise UserError(Message("{folder}: there is no caption edit to undo", folder=folder))
                raise UserError(Message("{folder}: there is no caption edit to redo", folder=folder))
            numbers = journal.group_stack(stack)[0]
            line = {what: numbers, "open": True}
        since = Message("since edit {number} ({title})", number=numbers[0], title=journal.records[numbers[0]].title)
        if journal.open:
            command = f"lora-fp8 dataset repair {quote_path(folder)}"
            since = Message("{line}; `{command}` undoes the others", line=since, command=command)
        files = _read_files(folder, journal.unpack_changes(numbers), "", since, torn=journal.open is not None)
        wanted = {path: (now, getattr(change, side)) for path, (change, now) in files.items()}
        _carry_out(journal, line, wanted, progress)
        return journal.make_entry(numbers, what == "redo")


def _take_back(folder: Path, journal: Journal, begun: Open) -> list[str]:
    """Revert the operation that a crash interrupted.

    Returns:
        The files that somebody else has changed since; they stay as they are.
    """
    wanted, others = _find_half_done(folder, journal, begun)
    what = "undo" if begun.side == "after" else "redo"
    _carry_out(journal, {what: list(begun.numbers), "open": True}, wanted)
    return others


def _find_half_done(folder: Path, journal: Journal, begun: Open) -> tuple[dict[Path, _Sides], list[str]]:
    """Find the files of an interrupted operation and what reverting it would make of them.

    A truncated file counts as half written only if the operation is known to have been interrupted.

    Returns:
        {file: (its bytes now, its bytes when reverted)}, and the files that somebody else has changed.
    """
    there = "before" if begun.side == "after" else "after"
    try:
        changes = journal.unpack_changes(begun.numbers)
    except UserError as error:  # only in a journal from elsewhere: nothing in it can be restored
        return {}, [str(error)]
    wanted, others = {}, []
    for change in changes:
        try:
            path = find_target(folder, change.file)
            now = read_bytes(path)
        except (OSError, UserError):
            others.append(change.file)
            continue
        if _classify_file(now, change, torn=begun == journal.open):
            wanted[path] = now, getattr(change, there)
        else:
            others.append(change.file)
    return wanted, others


def _find_unended(folder: Path, journal: Journal) -> Open | None:
    """Return the operation of an earlier version that was interrupted; None if there is none.

    Earlier versions logged an edit before it was made, an undo and a redo afterwards, and no end of any of them. The
    edit that would be undone or redone next was interrupted if some of its files are as before it and others as after
    it.
    """
    for stack in (journal.undone, journal.done):
        if not stack or journal.records[stack[-1]].logged:
            continue
        begun = Open((stack[-1],), "after")
        sides = set()
        with contextlib.suppress(UserError):  # the record is damaged; `undo` reports it
            for change in journal.unpack_changes(begun.numbers):
                with contextlib.suppress(OSError, UserError):
                    now = read_bytes(find_target(folder, change.file))
                    # A missing file means nothing: those versions did not sync, so a new file's name could be lost.
                    sides |= {side for side in ("before", "after") if now is not None and now == getattr(change, side)}
        if len(sides) == 2:
            return begun
    return None


_Sides = tuple[bytes | None, bytes | None]


def _with_real_names(folder: Path, changes: list[Change]) -> list[Change]:
    """Replace names that are links by those of the files they lead to, so that each file is changed once.

    Raises:
        UserErrors: two names of one file would get different contents, or a name is not a caption inside the folder.
    """
    root = os.path.realpath(os.path.expanduser(folder))
    real: dict[str, Change] = {}
    problems = []
    for change in changes:
        try:
            name = find_target(folder, change.file).relative_to(root).as_posix()
        except UserError as error:
            problems.append(about(change.file, error))
            continue
        if real.setdefault(name, change).after != change.after:
            problems.append(
                Message(
                    "{path} and {other} are the same file, but would get different captions",
                    path=change.file,
                    other=real[name].file,
                )
            )
    if problems:
        raise UserErrors(problems, str(folder))
    return [replace(change, file=name) for name, change in real.items()]


def _read_files(
    folder: Path, changes: list[Change], side: str, since: str, torn: bool = False
) -> dict[Path, tuple[Change, bytes | None]]:
    """Read the files of changes.

    Args:
        folder: the dataset folder.
        changes: the changes; each file may occur once.
        side: side of the change ("before" or "after") that all files must be on; "" accepts both sides, and damage by a
            crash.
        since: end of the message about files that are not.
        torn: as in `_classify_file`.

    Returns:
        {path: (its change, its bytes now)}.

    Raises:
        UserErrors: files were changed by somebody else, or cannot be read.
    """
    files, problems = {}, []
    for change in changes:
        try:
            path = find_target(folder, change.file)
            now = read_bytes(path)
        except (OSError, UserError) as error:
            problems.append(about(change.file, error))
            continue
        if path in files:
            problems.append(Message("{path} occurs twice in one edit", path=change.file))
        elif now == getattr(change, side) if side else _classify_file(now, change, torn):
            files[path] = change, now
        else:
            problems.append(Message("{path} was changed by another program {when}", path=change.file, when=since))
    if problems:
        raise UserErrors(problems, str(folder))
    return files


def _classify_file(now: bytes | None, change: Change, torn: bool) -> str:
    """Classify the bytes of a file: on one "side" of a change, "damaged" by a crash, or "" (changed by somebody else).

    Args:
        now: the file's bytes; None if there is no file.
        change: the bytes before and after.
        torn: the operation was never acknowledged, so a truncated file is a half-written one. Otherwise somebody may
            have shortened the caption.
    """
    if now in (change.before, change.after):
        return "side"
    sides = [side for side in (change.before, change.after) if side]
    return "damaged" if now is not None and any(_is_damaged(now, side, torn) for side in sides) else ""


def _is_damaged(now: bytes, whole: bytes, torn: bool) -> bool:
    """Return True if `now` is what a crash makes of `whole`: nothing, its beginning, or its beginning and then NULs."""
    if whole.startswith(now):
        return now != whole and (torn or not now)
    try:
        caption_text.decode_caption(now)
        return False
    except ValueError:  # NULs are not text in UTF-8; in UTF-16 they can be
        return now.endswith(b"\0") and len(now) <= len(whole) and whole.startswith(now.rstrip(b"\0"))


def _carry_out(
    journal: Journal,
    line: dict[str, Any],
    files: dict[Path, _Sides],
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Log an operation, write its files, and log its end. If a step fails, the operation is reverted.

    Args:
        journal: the journal of the folder.
        line: the line for the journal; {} continues the open operation.
        files: bytes now and wanted.
        progress: as in `apply`.

    Raises:
        UserError: the files or the journal cannot be written.
    """
    if line:
        try:
            journal.begin(line, keep=line.get("undo") or line.get("redo") or ())
        except OSError as error:
            raise UserError(
                Message(
                    "{path}: the journal cannot be written ({why}), and without it no caption is changed",
                    path=journal.path,
                    why=reason(error),
                )
            ) from None
    opposite = {"after": "undo", "before": "redo"}[journal.open.side] if journal.open else "repair"
    swap = caption_files.Swap(files)
    try:
        swap.stage(progress)
        swap.place()
        journal.end()
    except BaseException as error:
        # If the end may be in the journal, files that were restored would contradict it.
        stuck = len(files) if swap.done and journal.in_doubt else swap.take_back()
        if line and not stuck:
            journal.cancel()
        if not isinstance(error, OSError):
            raise
        where, why = error.filename or journal.folder, reason(error)
        if stuck:
            raise UserError(
                Message(
                    "{key}: the caption cannot be written ({why}); {count} of {total} captions are changed, and "
                    "{command} restores them",
                    key=where,
                    why=why,
                    count=stuck,
                    total=len(files),
                    command=f"`lora-fp8 dataset {opposite} {quote_path(journal.folder)}`",
                )
            ) from None
        raise UserError(
            Message("{key}: the caption cannot be written ({why}); no caption was changed", key=where, why=why)
        ) from None
    finally:
        swap.discard()


@dataclass
class Repair:
    """What `repair` did, or would do.

    Attributes:
        title: the interrupted edit that was reverted; "" if there was none.
        taken_back: its captions that had to be restored.
        restored: captions that a crash had damaged.
        swept: temporary files of killed edits.
        others: captions of the interrupted edit that somebody else has changed since; they stay.
    """

    title: str = ""
    taken_back: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def needed(self) -> bool:
        """Return True if there is anything to repair."""
        return bool(self.title or self.restored or self.swept)


def repair(folder: Path, dry_run: bool = False) -> Repair:
    """Revert an edit that a crash interrupted, restore damaged captions, and delete temporary files of killed edits.

    Args:
        folder: the dataset folder.
        dry_run: only report what would be done.

    Raises:
        UserError: the folder or its files cannot be read or written.
    """
    root = Path(os.path.realpath(os.path.expanduser(folder)))

    def list_relative(paths: Collection[Path]) -> list[str]:
        return [path.relative_to(root).as_posix() for path in paths]

    repair = Repair()
    with _editing(folder, sweeping=False) as journal:
        if begun := journal.open or _find_unended(folder, journal):
            number = begun.numbers[0]
            repair.title = journal.records[number].title or Message("edit {number}", number=number)
            half, repair.others = _find_half_done(folder, journal, begun)
            repair.taken_back = list_relative([path for path, (now, wanted) in half.items() if now != wanted])
            if not dry_run and journal.open:
                _take_back(folder, journal, journal.open)
            elif not dry_run:
                _carry_out(journal, {"undo": [number], "open": True} if number in journal.done else {}, half)
        damaged = _find_damaged(folder, journal, begun if dry_run else None)
        if damaged and not dry_run:
            _restore(journal, damaged)
        repair.restored = list_relative(damaged)
        leftovers = _find_leftovers(folder)
        repair.swept = list_relative(leftovers if dry_run else caption_files.sweep(leftovers))
    return repair


def _find_leftovers(folder: Path) -> list[Path]:
    return caption_files.find_leftovers(folder, (JOURNAL, image_edits.FILE))


def _restore(journal: Journal, files: dict[Path, _Sides]) -> None:
    """Write files back to the contents that the journal already has, so that there is nothing to log."""
    _carry_out(journal, {}, files)


def _find_damaged(folder: Path, journal: Journal, begun: Open | None) -> dict[Path, _Sides]:
    """Find captions that a crash damaged after they were written: their bytes now, and those in the journal.

    A missing file counts only if its edit was made by a version that did not log ends, and its image still exists.
    Otherwise somebody has deleted it.

    Args:
        folder: the dataset folder.
        journal: its journal.
        begun: an operation that is still to be reverted; its files are left out.
    """
    unfinished = set(begun.numbers) if begun else set()
    wanted: dict[str, tuple[bytes | None, bool]] = {}
    for numbers, side in ((journal.done, "after"), (journal.undone, "before")):
        for number in numbers:
            with contextlib.suppress(UserError):  # the record is damaged; `undo` reports it
                for change in journal.unpack_changes([number]):
                    wanted[change.file] = getattr(change, side), journal.records[number].logged
                    if number in unfinished:
                        del wanted[change.file]
    pictures: set[str] | None = None
    damaged: dict[Path, _Sides] = {}
    for name, (raw, logged) in wanted.items():
        if not raw:
            continue
        try:
            path = find_target(folder, name)
            now = read_bytes(path)
        except (OSError, UserError):
            continue
        if now is None and not logged:
            pictures = pictures or {os.path.splitext(picture)[0] for picture in list_caption_files(folder)}
            if os.path.splitext(name)[0] in pictures:
                damaged[path] = now, raw
        elif now is not None and _is_damaged(now, raw, torn=False):
            damaged[path] = now, raw
    return damaged


@contextlib.contextmanager
def _editing(folder: Path, journal: Journal | None = None, sweeping: bool = True) -> Iterator[Journal]:
    """Lock the folder and yield its journal, up to date.

    Temporary files of killed edits are deleted, unless the journal is held open: then `open_journal` has done so.

    Args:
        folder: the dataset folder.
        journal: a journal that is held open; None reads it anew.
        sweeping: False keeps the temporary files.
    """
    with _locked(folder):
        held = journal or Journal(folder)
        try:
            if journal is None and sweeping:
                caption_files.sweep(_find_leftovers(folder))
            held.refresh()
            yield held
        finally:
            if journal is None or system.WINDOWS:  # Windows lets nobody replace a file that is held open
                held.close()


def _is_locked(folder: Path) -> bool:
    """Return True if captions of this folder are being edited now."""
    try:
        descriptor = _open_to_lock(folder, create=False)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock_folder(descriptor, folder, shared=True)
    finally:
        os.close(descriptor)


def _try_lock_folder(descriptor: int, folder: Path, *, shared: bool = False) -> bool:
    try:
        return try_lock(descriptor, shared=shared)
    except OSError as error:
        error.filename = os.fspath(folder)
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against all other edits, of this and of other processes."""
    try:
        descriptor = _open_to_lock(folder)
    except OSError as error:
        raise UserError(Message("{path}: cannot be opened ({why})", path=folder, why=reason(error))) from None
    try:
        deadline = time.monotonic() + 10
        while not _try_lock_folder(descriptor, folder):
            if time.monotonic() > deadline:
                raise UserError(
                    Message("{path}: another edit of these captions is in progress; try again", path=folder)
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _open_to_lock(folder: Path, create: bool = True) -> int:
    """Open what is locked for a folder: the folder itself, or a file in it on Windows, which cannot lock folders."""
    root = os.path.expanduser(folder)
    if system.CAN_LOCK_FOLDERS:
        return os.open(root, system.combine_flags("O_RDONLY", "O_DIRECTORY"))
    return os.open(
        os.path.join(root, LOCK), system.combine_flags(*(("O_RDWR", "O_CREAT") if create else ("O_RDONLY",))), 0o666
    )
