"""Caption edits: operations over a selection of pictures, shown before they are done, and undone to the byte.

    edit = preview(folder, [RenameTag("girl", "woman")])      reads; `edit.changes` is what would change
    apply(folder, edit)                                       writes, if no file has changed since the preview
    undo(folder); redo(folder)                                to the byte, if no file has changed since

A caption keeps its encoding, its byte-order mark, its line ends and its last newline. Only `.txt` and `.caption` files
beside pictures are ever written, each whole or not at all, and none outside of the folder, whatever links say. Tags are
what the separator separates on one line; a line that an operation does not concern stays as it is, spaces and all.

The journal is `.lora_fp8_captions.jsonl` in the folder, so that it moves with the folder. An edit stands in it, bytes
before and after, before the first caption is written: what a crash leaves half done is undone, or done again, as a
whole. The newest edits are kept, `JOURNAL_BYTES` of them.

No torch here: the web page edits captions with these functions.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_fp8 import config, locks
from lora_fp8.config import UserError
from lora_fp8.data import images
from lora_fp8.run import atomic_write

JOURNAL = ".lora_fp8_captions.jsonl"
JOURNAL_BYTES = 64 * 2**20
"""When the journal is larger, its oldest edits are dropped, down to half of this."""
MAX_CAPTION = 65536
"""Characters; what is longer is no caption but a mistake."""
MAX_PATTERN = 300
REGEX_SECONDS = 10
TOLD_EVERY = 50


def split_tags(caption: str, separator: str = ",") -> list[str]:
    """The tags of a caption, stripped, empty ones left out."""
    return [tag.strip() for tag in caption.split(separator) if tag.strip()]


# ---------------------------------------------------------------------------------------------------------- operations


def _by_line(text: str, change: Callable[[str], str]) -> str:
    """The text with each of its lines changed; line ends stay."""
    return "".join(part if i % 2 else change(part) for i, part in enumerate(re.split(r"(\r\n|\r|\n)", text)))


def _glue(separator: str) -> str:
    return separator if separator[-1].isspace() else separator + " "


@dataclass(frozen=True)
class SetText:
    """Replace the whole caption. Line ends become those that the caption has."""

    text: str
    creates = True

    def __call__(self, text: str) -> str:
        ends = re.search(r"\r\n|\r|\n", text)
        wanted = re.sub(r"\r\n|\r", "\n", self.text).strip("\n")
        return text if re.sub(r"\r\n|\r", "\n", text) == wanted else wanted.replace("\n", ends[0] if ends else "\n")

    def title(self) -> str:
        return "set the caption"


@dataclass(frozen=True)
class Replace:
    """Replace a piece of text wherever it stands; case counts."""

    find: str
    by: str
    creates = False

    def __call__(self, text: str) -> str:
        return text.replace(self.find, self.by)

    def title(self) -> str:
        return f"replace {self.find!r} by {self.by!r}"


@dataclass(frozen=True)
class ReplacePattern:
    """Replace what a regular expression (Python's) matches; "\\1" in `by` is its first group.

    A pattern may be given by anybody who can open the page, and some never come to an end: it runs in a process of its
    own, for `REGEX_SECONDS` over all captions together.
    """

    find: str
    by: str
    creates = False

    def all(self, texts: list[str]) -> list[str]:
        """The texts, each replaced.

        Raises:
            UserError: no pattern, or one that takes too long.
        """
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(Path(__file__).with_name("pattern.py"))],
                input=json.dumps([self.find, self.by, MAX_CAPTION, texts]).encode(),
                capture_output=True,
                timeout=REGEX_SECONDS,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the pattern {self.find!r} takes longer than {REGEX_SECONDS} s; write it without a repetition in a "
                "repetition"
            ) from None
        answer = json.loads(done.stdout)
        if isinstance(answer, str):
            raise UserError(f"the pattern {self.find!r}: {answer}")
        return answer

    def title(self) -> str:
        return f"replace pattern {self.find!r} by {self.by!r}"


@dataclass(frozen=True)
class AddTag:
    """Put a tag first or last, where the caption lacks it."""

    tag: str
    first: bool = False
    separator: str = ","
    creates = True

    def __call__(self, text: str) -> str:
        if self.tag in (tag for line in text.splitlines() for tag in split_tags(line, self.separator)):
            return text
        if not text.strip():
            return self.tag
        glue = _glue(self.separator)
        if self.first:
            return self.tag + glue + text.lstrip()
        return text.rstrip().removesuffix(self.separator.strip() or self.separator).rstrip() + glue + self.tag

    def title(self) -> str:
        return f"add tag {self.tag!r} {'first' if self.first else 'last'}"


@dataclass(frozen=True)
class RemoveTag:
    """Take a tag out."""

    tag: str
    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        return _by_line(text, self._line)

    def _line(self, line: str) -> str:
        parts = line.split(self.separator)
        kept = [part for part in parts if part.strip() != self.tag]
        if len(kept) == len(parts):
            return line
        joined = self.separator.join(kept)
        return joined.lstrip() if parts[0].strip() == self.tag else joined

    def title(self) -> str:
        return f"remove tag {self.tag!r}"


@dataclass(frozen=True)
class RenameTag:
    """Give a tag another name; where a line has that tag already, only one of them stays."""

    old: str
    new: str
    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        return _by_line(text, self._line)

    def _line(self, line: str) -> str:
        parts = line.split(self.separator)
        there = any(part.strip() == self.new for part in parts)
        kept = []
        for part in parts:
            if part.strip() != self.old:
                kept.append(part)
            elif not there:
                there = True
                kept.append(part.replace(self.old, self.new))
        joined = self.separator.join(kept)
        return joined.lstrip() if kept and kept[0] is not parts[0] and not line[:1].isspace() else joined

    def title(self) -> str:
        return f"rename tag {self.old!r} to {self.new!r}"


@dataclass(frozen=True)
class Prepend:
    """Put a text in front, as it is."""

    text: str
    creates = True

    def __call__(self, text: str) -> str:
        return self.text + text

    def title(self) -> str:
        return f"prepend {self.text!r}"


@dataclass(frozen=True)
class Append:
    """Put a text behind, as it is."""

    text: str
    creates = True

    def __call__(self, text: str) -> str:
        return text + self.text

    def title(self) -> str:
        return f"append {self.text!r}"


@dataclass(frozen=True)
class Trigger:
    """Put a trigger word in front, unless the caption has it as a word of its own: what training does with it."""

    word: str
    creates = True

    def __call__(self, text: str) -> str:
        return images.with_trigger(text, self.word) if text.strip() else self.word.strip()

    def title(self) -> str:
        return f"trigger {self.word!r}"


@dataclass(frozen=True)
class SortTags:
    """Sort each line's tags by the alphabet, the first `keep` staying in place."""

    keep: int = 0
    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        return _by_line(text, self._line)

    def _line(self, line: str) -> str:
        tags = split_tags(line, self.separator)
        ordered = tags[: self.keep] + sorted(tags[self.keep :], key=lambda tag: (tag.casefold(), tag))
        return line if ordered == tags else _glue(self.separator).join(ordered)

    def title(self) -> str:
        return "sort tags"


@dataclass(frozen=True)
class DedupeTags:
    """Leave the first of equal tags."""

    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        seen: set[str] = set()

        def line(line: str) -> str:
            tags = split_tags(line, self.separator)
            kept = [tag for tag in tags if not (tag in seen or seen.add(tag))]
            return line if kept == tags else _glue(self.separator).join(kept)

        return _by_line(text, line)

    def title(self) -> str:
        return "remove repeated tags"


@dataclass(frozen=True)
class Recode:
    """Read captions that are no UTF-8 in the encoding that they are in (such as gb18030), and write them as UTF-8."""

    encoding: str
    creates = False

    def __call__(self, text: str) -> str:
        return text

    def title(self) -> str:
        return f"{self.encoding} to UTF-8"


Operation = (
    SetText
    | Replace
    | ReplacePattern
    | AddTag
    | RemoveTag
    | RenameTag
    | Prepend
    | Append
    | Trigger
    | SortTags
    | DedupeTags
    | Recode
)


def check(operations: Sequence[Operation]) -> None:
    """Raise UserError for operations that mean nothing, all of them at once."""
    problems = []
    for operation in operations:
        for name, value in vars(operation).items():
            if isinstance(value, str) and "\0" in value:
                problems.append(f"{operation.title()}: {name} has a NUL character")
            if name in ("find", "old", "separator") and value == "":
                problems.append(f"{type(operation).__name__}: {name} is empty; say what to look for")
            if name in ("tag", "new", "word"):
                separator = getattr(operation, "separator", "\n")
                if not value.strip() or "\n" in value or separator in value:
                    problems.append(f"{operation.title()}: {value!r} is not one tag; give one, without {separator!r}")
                elif value != value.strip() and not isinstance(operation, Trigger):
                    problems.append(f"{operation.title()}: {value!r} has spaces around it")
        if isinstance(operation, ReplacePattern) and len(operation.find) > MAX_PATTERN:
            problems.append(f"the pattern has {len(operation.find)} characters; at most {MAX_PATTERN}")
        if isinstance(operation, Recode):
            try:
                "a".encode(operation.encoding).decode(operation.encoding)
            except (LookupError, ValueError):
                problems.append(f"{operation.encoding!r} is no text encoding; such as gb18030, big5, shift_jis, cp1252")
    if not operations:
        problems.append("nothing to do is given")
    if problems:
        raise config.UserErrors(problems, "caption edit")


# ----------------------------------------------------------------------------------------------------------- selection


def listed(folder: Path, mask: str = "") -> dict[str, Path]:
    """Every picture and video of a folder by its relative name, and its caption file: the one it has, or the .txt it
    would get. `mask` as in dataset.folders: masks that lie beside the pictures are none.

    Raises:
        UserError: no folder, or one that cannot be read.
    """
    report = images.ScanReport()
    section = config.Dataset(folders=[config.Folder(path=str(folder), mask=mask)])
    found = images.list_folder(0, section, report, videos=True)
    unreadable = [line for line in report.problems if "file name" not in line]
    if unreadable and not found:
        raise config.UserErrors(unreadable, "dataset")
    return {path.relative_to(root).as_posix(): caption or path.with_suffix(".txt") for _, root, path, caption in found}


def select(
    folder: Path,
    *,
    glob: str = "",
    having: Sequence[str] = (),
    lacking: Sequence[str] = (),
    separator: str = ",",
    mask: str = "",
) -> list[str]:
    """Relative names of the pictures whose name fits the glob and whose caption has all of one and none of the others.

    Captions that cannot be read have no tags. `mask` as of `listed`.
    """
    chosen = []
    for name, path in listed(folder, mask).items():
        if glob and not fnmatch.fnmatchcase(name, glob):
            continue
        try:
            text = images.read_caption(path)
        except (OSError, ValueError):
            text = ""
        tags = set(split_tags(text, separator))
        if tags.issuperset(having) and tags.isdisjoint(lacking):
            chosen.append(name)
    return chosen


# ------------------------------------------------------------------------------------------------------------- preview


@dataclass(frozen=True)
class Change:
    """One caption file: its relative name, and its bytes before (None: there is none) and after."""

    file: str
    before: bytes | None
    after: bytes | None

    def texts(self) -> tuple[str, str]:
        """Before and after as text, to be shown; bytes that are no text are replaced."""
        return _shown(self.before), _shown(self.after)


@dataclass(frozen=True)
class Edit:
    """What operations would do, and the captions that they cannot be done to."""

    title: str
    changes: list[Change] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _shown(raw: bytes | None) -> str:
    try:
        return images.decode_caption(raw or b"")[0]
    except ValueError:
        return (raw or b"").decode("utf-8", errors="replace")


def preview(folder: Path, operations: Sequence[Operation], only: Collection[str] | None = None, mask: str = "") -> Edit:
    """What the operations, one after the other, make of the captions; nothing is written.

    Args:
        folder: the dataset's.
        operations: see above.
        only: relative names of pictures, as `listed` has them; None is all.
        mask: as of `listed`.

    Raises:
        UserError: operations that mean nothing, names that are no pictures of the folder, a pattern that never ends.
    """
    check(operations)
    pictures = listed(folder, mask)
    if unknown := sorted(set(only or ()) - pictures.keys()):
        raise UserError(
            f"{folder}: no picture {unknown[0]!r} here (and {len(unknown) - 1} more); look at the folder again"
        )
    edit = Edit("; ".join(operation.title() for operation in operations))
    recodings = [operation.encoding for operation in operations if isinstance(operation, Recode)]
    creates = any(operation.creates for operation in operations)
    texts: dict[str, _Text] = {}
    # Two pictures may share a caption: it is edited once.
    files = dict.fromkeys(pictures[name] for name in (pictures if only is None else only))
    for path in files:
        name = path.relative_to(Path(os.path.expanduser(folder))).as_posix()
        try:
            raw = _read(_target(folder, name))
            if raw is not None or creates:
                texts[name] = _Text.of(raw, recodings)
        except (OSError, ValueError, UserError) as error:
            edit.problems.append(f"{name} {getattr(error, 'strerror', None) or error}")
    for operation in operations:
        bodies = [text.body for text in texts.values()]
        changed = operation.all(bodies) if isinstance(operation, ReplacePattern) else list(map(operation, bodies))
        for text, body in zip(texts.values(), changed, strict=True):
            text.body = body
    _add_changes(edit, texts)
    return edit


def assign(folder: Path, wanted: Mapping[str, str], title: str) -> Edit:
    """An edit that sets captions one by one: relative names of caption files, as `listed` has them, and their texts."""
    edit, texts = Edit(title), {}
    for name, wish in wanted.items():
        try:
            texts[name] = _Text.of(_read(_target(folder, name)), [])
            texts[name].body = SetText(wish)(texts[name].body)
        except (OSError, ValueError, UserError) as error:
            edit.problems.append(f"{name} {getattr(error, 'strerror', None) or error}")
    _add_changes(edit, texts)
    return edit


def _add_changes(edit: Edit, texts: dict[str, _Text]) -> None:
    for name, text in texts.items():
        try:
            after = text.encoded()
        except ValueError as error:
            edit.problems.append(f"{name} {error}")
            continue
        if after != (text.raw or b""):
            edit.changes.append(Change(name, text.raw, after))


@dataclass
class _Text:
    """A caption file while it is edited: `body` is its text without the newlines at its end."""

    raw: bytes | None
    body: str
    tail: str
    mark: bytes
    codec: str

    @classmethod
    def of(cls, raw: bytes | None, recodings: list[str]) -> _Text:
        if raw is not None and len(raw) > 8 * MAX_CAPTION:
            raise ValueError(f"has {len(raw):,} bytes, which is no caption")
        try:
            text, mark, codec = images.decode_caption(raw or b"")
        except ValueError:
            if not recodings:
                raise
            try:
                text, mark, codec = (raw or b"").decode(recodings[0]), b"", "utf-8"
            except UnicodeDecodeError as error:
                raise ValueError(f"is not {recodings[0]} at byte {error.start}") from None
        body = text.rstrip("\r\n")
        return cls(raw, body, text[len(body) :], mark, codec)

    def encoded(self) -> bytes:
        if len(self.body) > MAX_CAPTION:
            raise ValueError(f"would get {len(self.body):,} characters; at most {MAX_CAPTION:,}")
        try:
            return self.mark + (self.body + self.tail).encode(self.codec)
        except UnicodeEncodeError:
            raise ValueError("would get characters that are none (half of a surrogate pair)") from None


def _target(folder: Path, name: str) -> Path:
    """The file to read and write for a relative name: links followed, and refused where they lead out of the folder.

    Raises:
        UserError: no name of a caption inside the folder. Journals are files that may come with a dataset, too.
    """
    root = os.path.realpath(os.path.expanduser(folder))
    real = Path(os.path.realpath(os.path.join(root, name)))
    if os.path.splitext(name)[1].lower() not in images.CAPTIONS or real.suffix.lower() not in images.CAPTIONS:
        raise UserError("is not named as a caption")
    if not real.is_relative_to(root):
        raise UserError("is a link to outside of the folder; edit what it points to")
    return real


def read(folder: Path, name: str) -> str:
    """The text of a caption file, by its relative name, as it stands but for the newlines at its end; "" for none.

    Raises:
        UserError: it is not to be read: no text, or a link that leads out of the folder.
    """
    try:
        return _Text.of(_read(_target(folder, name)), []).body
    except (OSError, ValueError) as error:
        raise UserError(f"{name} {getattr(error, 'strerror', None) or error}") from None


def _read(path: Path) -> bytes | None:
    """The bytes of a file, or None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------- apply, undo and redo


@dataclass(frozen=True)
class Entry:
    """An edit in the journal; `done` is false while it is undone."""

    id: int
    t: float
    title: str
    files: int
    done: bool


def apply(folder: Path, edit: Edit, group: str = "", told: Callable[[int, int], object] | None = None) -> Entry:
    """Write what a preview has shown: every caption of it, or none.

    Edits of one group that follow each other are undone and done again together, as are those of a captioning.

    Args:
        told: is told now and then how many captions of how many are written.

    Raises:
        UserError: a caption has changed since the preview, or cannot be written; nothing has been changed.
    """
    if not edit.changes:
        raise UserError(f"{edit.title}: changes no caption")
    with _locked(folder):
        _unchanged(folder, edit.changes, "before", "since the preview; look at it again")
        journal = _Journal.read(folder)
        number = journal.last + 1
        record = {"edit": number, "t": round(time.time(), 3), "title": edit.title, "files": len(edit.changes)}
        record |= {"group": group, "names": [change.file for change in edit.changes]} if group else {}
        journal.append({**record, "changes": _packed(edit.changes)})
        try:
            _write_all(folder, edit.changes, "before", "after", told)
        except UserError:
            journal.append({"undo": number})
            raise
        return Entry(number, record["t"], edit.title, len(edit.changes), True)


def undo(folder: Path, told: Callable[[int, int], object] | None = None) -> Entry:
    """Bring back the captions as they were before the last edit. `told` as of `apply`.

    Raises:
        UserError: nothing to undo; or captions have changed since, which are named, and nothing is written.
    """
    return _step(folder, "undo", told)


def redo(folder: Path, told: Callable[[int, int], object] | None = None) -> Entry:
    """Do the edit again that was undone last. `told` as of `apply`. Raises UserError as `undo`."""
    return _step(folder, "redo", told)


def history(folder: Path) -> list[Entry]:
    """The edits of the journal, oldest first; those that are undone and can be done again stand at the end."""
    journal = _Journal.read(folder)
    done = [journal.entry(numbers, True) for numbers in journal.together(journal.done)]
    return done[::-1] + [journal.entry(numbers, False) for numbers in journal.together(journal.undone)]


def standing(folder: Path, group: str) -> set[str]:
    """Caption files that an edit of this group has written and nobody has changed since."""
    journal = _Journal.read(folder)
    last = {}
    for number in journal.done:
        if journal.group(number) == group:
            last |= {change.file: change.after for change in _unpacked(folder, journal.records[number])}
    return {file for file, after in last.items() if _read(_target(folder, file)) == after}


def _step(folder: Path, what: str, told: Callable[[int, int], object] | None) -> Entry:
    with _locked(folder):
        journal = _Journal.read(folder)
        stack = journal.done if what == "undo" else journal.undone
        if not stack:
            raise UserError(f"{folder}: no caption edit to {what}")
        numbers = journal.together(stack)[0]
        changes = [change for number in numbers for change in _unpacked(folder, journal.records[number])]
        here, there = ("after", "before") if what == "undo" else ("before", "after")
        title = journal.records[numbers[0]].get("title", "")
        _unchanged(folder, changes, here, f"since edit {numbers[0]} ({title})", or_else=there)
        _write_all(folder, changes, here, there, told)
        for number in numbers:
            journal.append({what: number})
        return journal.entry(numbers, what == "redo")


def _unchanged(folder: Path, changes: list[Change], side: str, since: str, or_else: str = "") -> None:
    """Raise UserError if a file is neither as on this side nor (where a crash may have left it) as on the other."""
    problems = []
    for change in changes:
        try:
            now = _read(_target(folder, change.file))
        except (OSError, UserError) as error:
            problems.append(f"{change.file} {getattr(error, 'strerror', None) or error}")
            continue
        if now != getattr(change, side) and not (or_else and now == getattr(change, or_else)):
            problems.append(f"{change.file} was changed by somebody else {since}")
    if problems:
        raise config.UserErrors(problems, str(folder))


def _write_all(
    folder: Path, changes: list[Change], here: str, there: str, told: Callable[[int, int], object] | None
) -> None:
    """Bring all files to one side; where one fails, those written go back."""
    written: list[Change] = []
    try:
        for change in changes:
            _put(_target(folder, change.file), getattr(change, there))
            written.append(change)
            if told and len(written) % TOLD_EVERY == 0:
                told(len(written), len(changes))
    except OSError as error:
        for change in written:
            _put(_target(folder, change.file), getattr(change, here))
        failed = changes[len(written)].file
        raise UserError(f"{folder / failed}: cannot be written ({error.strerror}); no caption was changed") from None


def _put(path: Path, raw: bytes | None) -> None:
    if raw is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Not synced one by one, which takes a minute for 5,000: the journal is, and it has the bytes of both sides.
        temporary.write_bytes(raw)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One edit at a time, whoever makes it."""
    root = Path(os.path.expanduser(folder))
    if os.name == "nt":
        raise UserError("captions cannot be edited here on Windows: a folder cannot be locked there")
    try:
        # The folder itself is locked: a lock file would be one more file in it.
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder}: cannot be opened ({error.strerror})") from None
    try:
        deadline = time.monotonic() + 10
        while not locks.try_lock(descriptor):
            if time.monotonic() > deadline:
                raise UserError(f"{folder}: another edit of these captions is at work; try again")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------------------- journal


def _packed(changes: list[Change]) -> str:
    sides = [(change.file, *(None if raw is None else raw.decode("latin-1") for raw in (change.before, change.after)))
             for change in changes]  # fmt: skip
    return base64.b64encode(zlib.compress(json.dumps(sides).encode())).decode()


def _unpacked(folder: Path, record: dict[str, Any]) -> list[Change]:
    try:
        sides = json.loads(zlib.decompress(base64.b64decode(record["changes"])))
        return [
            Change(str(name), *(None if text is None else text.encode("latin-1") for text in (before, after)))
            for name, before, after in sides
        ]
    except (KeyError, ValueError, TypeError, AttributeError, zlib.error):
        raise UserError(
            f"{folder / JOURNAL}: edit {record['edit']} is damaged and cannot be undone or redone"
        ) from None


@dataclass
class _Journal:
    """The journal as read: records by number, and the numbers that can be undone and redone, the next one last."""

    path: Path
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    undone: list[int] = field(default_factory=list)
    last: int = 0

    @classmethod
    def read(cls, folder: Path) -> _Journal:
        journal = cls(Path(os.path.expanduser(folder)) / JOURNAL)
        if journal.path.is_symlink():
            raise UserError(f"{journal.path}: is a link; remove it, so that edits can be written down")
        raw = _read(journal.path) or b""
        for line in raw.split(b"\n"):
            with contextlib.suppress(ValueError):  # half a line, of an edit that never began
                journal._take(json.loads(line))
        return journal

    def _take(self, record: Any) -> None:
        kind = next((kind for kind in ("edit", "undo", "redo") if isinstance(record, dict) and kind in record), "")
        number = record.get(kind) if kind else None
        if not isinstance(number, int):
            return
        if kind == "edit":
            self.records[number] = record
            self.done.append(number)
            self.undone.clear()  # what was undone before a new edit cannot be done again
            self.last = max(self.last, number)
        else:
            here, there = (self.done, self.undone) if kind == "undo" else (self.undone, self.done)
            if here and here[-1] == number:
                there.append(here.pop())

    def append(self, record: dict[str, Any]) -> None:
        """Write one line down, durably."""
        old = _read(self.path) or b""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._take(record)
        try:
            if len(old) + len(line) > JOURNAL_BYTES:
                atomic_write(self.path, self._shortened())
                return
            with open(self.path, "ab") as file:
                file.write((b"\n" if old and not old.endswith(b"\n") else b"") + line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}), and captions are not changed without it"
            ) from None

    def _shortened(self) -> bytes:
        """The newest edits, as lines, up to half of the bytes; undone ones with their mark."""
        lines: list[bytes] = []
        size = 0
        for number in [*self.undone, *reversed(self.done)]:
            line = json.dumps(self.records[number], ensure_ascii=False).encode() + b"\n"
            size += len(line)
            if size > JOURNAL_BYTES // 2 and lines:
                break
            lines.append(line)
        kept = b"".join(reversed(lines))
        return kept + b"".join(json.dumps({"undo": number}).encode() + b"\n" for number in self.undone)

    def group(self, number: int) -> str:
        """What an edit is undone together with: its group, or itself."""
        return self.records[number].get("group") or f"edit {number}"

    def together(self, stack: list[int]) -> list[list[int]]:
        """The edits of a stack as they are undone or done again: the next first. No file comes twice in one of them."""
        found: list[list[int]] = []
        names: set[str] = set()
        for number in reversed(stack):
            these = set(self.records[number].get("names", ()))
            if not found or self.group(found[-1][0]) != self.group(number) or names & these:
                found.append([])
                names = set()
            found[-1].append(number)
            names |= these
        return found

    def entry(self, numbers: Sequence[int], done: bool) -> Entry:
        records = [self.records[number] for number in numbers]
        files = sum(int(record.get("files", 0)) for record in records)
        return Entry(max(numbers), records[0].get("t", 0.0), str(records[0].get("title", "")), files, done)
