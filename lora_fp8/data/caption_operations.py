"""Operations that change the text of a caption, such as renaming a tag.

Tags are the parts of one line between separators; a line that an operation does not change keeps its exact bytes,
spaces included."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import Message, UserError, UserErrors
from . import caption_text

MAX_CAPTION = 65536
"""Characters; a longer text is a mistake, not a caption."""
MAX_PATTERN = 300
REGEX_SECONDS = 10


def require_caption(text: str) -> None:
    """Raise ValueError for a text that a caption file cannot have: one with a NUL character, or too long."""
    if "\0" in text:
        raise ValueError(Message("the caption has a NUL character, which captions cannot contain"))
    if len(text) > MAX_CAPTION:
        raise ValueError(
            Message(
                "the caption would have {count} characters; the limit is {most}",
                count=f"{len(text):,}",
                most=f"{MAX_CAPTION:,}",
            )
        )


def split_tags(caption: str, separator: str = ",") -> list[str]:
    """Split a caption into its tags, stripped, without empty ones."""
    return [tag.strip() for tag in caption.split(separator) if tag.strip()]


def _apply_by_line(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to each line of the text; line ends stay as they are."""
    return "".join(part if i % 2 else change(part) for i, part in enumerate(re.split(r"(\r\n|\r|\n)", text)))


def make_tag_glue(separator: str) -> str:
    """Return the text that joins tags: the separator, followed by a space unless it ends with one."""
    return separator if separator[-1].isspace() else separator + " "


@dataclass(frozen=True)
class SetText:
    """Replace the whole caption, with line ends converted to those of the old one."""

    text: str
    creates = True

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        ends = re.search(r"\r\n|\r|\n", text)
        wanted = re.sub(r"\r\n|\r", "\n", self.text).strip("\n")
        return text if re.sub(r"\r\n|\r", "\n", text) == wanted else wanted.replace("\n", ends[0] if ends else "\n")

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("set the caption")


@dataclass(frozen=True)
class Replace:
    """Replace every occurrence of a text; case matters."""

    find: str
    by: str
    creates = False

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return text.replace(self.find, self.by)

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("replace {find} by {by}", find=repr(self.find), by=repr(self.by))


@dataclass(frozen=True)
class ReplacePattern:
    """Replace all matches of a (Python) regular expression; "\\1" in `by` is its first group.

    Anybody who can open the page may give a pattern, and some patterns never finish. It therefore runs in a process of
    its own, for at most `REGEX_SECONDS` over all captions together.
    """

    find: str
    by: str
    creates = False

    def replace_all(self, texts: list[str]) -> list[str]:
        """Replace the pattern in all texts.

        Raises:
            UserError: the pattern is invalid, or takes too long.
        """
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(Path(__file__).with_name("pattern.py"))],
                input=json.dumps([self.find, self.by, texts]).encode(),
                capture_output=True,
                timeout=REGEX_SECONDS,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                Message(
                    "the pattern {pattern} did not finish within {seconds} s; write it without a repetition inside "
                    "a repetition",
                    pattern=repr(self.find),
                    seconds=REGEX_SECONDS,
                )
            ) from None
        answer = json.loads(done.stdout)
        if isinstance(answer, str):
            raise UserError(
                Message(
                    "the pattern {pattern} is not valid ({error}); write a regular expression of Python",
                    pattern=repr(self.find),
                    error=answer,
                )
            )
        longest = max(map(len, answer), default=0)
        if longest > MAX_CAPTION:
            raise UserError(
                Message(
                    "the pattern {pattern} would make a caption of {longest} characters; the limit is {most}",
                    pattern=repr(self.find),
                    longest=f"{longest:,}",
                    most=f"{MAX_CAPTION:,}",
                )
            )
        return answer

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("replace pattern {find} by {by}", find=repr(self.find), by=repr(self.by))


@dataclass(frozen=True)
class AddTag:
    """Add a tag as the first or last one, unless the caption has it."""

    tag: str
    first: bool = False
    separator: str = ","
    creates = True

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        if self.tag in (tag for line in text.splitlines() for tag in split_tags(line, self.separator)):
            return text
        if not text.strip():
            return self.tag
        glue = make_tag_glue(self.separator)
        if self.first:
            return self.tag + glue + text.lstrip()
        return text.rstrip().removesuffix(self.separator.strip() or self.separator).rstrip() + glue + self.tag

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        tag = repr(self.tag)
        return Message("add tag {tag} first", tag=tag) if self.first else Message("add tag {tag} last", tag=tag)


@dataclass(frozen=True)
class RemoveTag:
    """Remove a tag."""

    tag: str
    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return _apply_by_line(text, self._edit_line)

    def _edit_line(self, line: str) -> str:
        parts = line.split(self.separator)
        kept = [part for part in parts if part.strip() != self.tag]
        if len(kept) == len(parts):
            return line
        joined = self.separator.join(kept)
        return joined.lstrip() if parts[0].strip() == self.tag else joined

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("remove tag {tag}", tag=repr(self.tag))


@dataclass(frozen=True)
class RenameTag:
    """Rename a tag; if a line then has the new tag twice, only one of them stays."""

    old: str
    new: str
    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return _apply_by_line(text, self._edit_line)

    def _edit_line(self, line: str) -> str:
        parts = line.split(self.separator)
        there = self.new != self.old and any(part.strip() == self.new for part in parts)
        kept = []
        for part in parts:
            if part.strip() != self.old:
                kept.append(part)
            elif not there:
                there = True
                kept.append(part.replace(self.old, self.new))
        joined = self.separator.join(kept)
        return joined.lstrip() if kept and kept[0] is not parts[0] and not line[:1].isspace() else joined

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("rename tag {old} to {new}", old=repr(self.old), new=repr(self.new))


@dataclass(frozen=True)
class Prepend:
    """Prepend a text as it is."""

    text: str
    creates = True

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return self.text + text

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("prepend {text}", text=repr(self.text))


@dataclass(frozen=True)
class Append:
    """Append a text as it is."""

    text: str
    creates = True

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return text + self.text

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("append {text}", text=repr(self.text))


@dataclass(frozen=True)
class Trigger:
    """Prepend a trigger word, unless the caption contains it as a separate word, exactly as training does."""

    word: str
    creates = True

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return caption_text.with_trigger(text, self.word) if text.strip() else self.word.strip()

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("trigger {word}", word=repr(self.word))


@dataclass(frozen=True)
class SortTags:
    """Sort each line's tags alphabetically; the first `keep` tags stay in place."""

    keep: int = 0
    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return _apply_by_line(text, self._edit_line)

    def _edit_line(self, line: str) -> str:
        tags = split_tags(line, self.separator)
        ordered = tags[: self.keep] + sorted(tags[self.keep :], key=lambda tag: (tag.casefold(), tag))
        return line if ordered == tags else make_tag_glue(self.separator).join(ordered)

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("sort tags")


@dataclass(frozen=True)
class DedupeTags:
    """Remove repeated tags; the first of each stays."""

    separator: str = ","
    creates = False

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        seen: set[str] = set()

        def dedupe_line(line: str) -> str:
            tags = split_tags(line, self.separator)
            kept = []
            for tag in tags:
                if tag not in seen:
                    seen.add(tag)
                    kept.append(tag)
            return line if kept == tags else make_tag_glue(self.separator).join(kept)

        return _apply_by_line(text, dedupe_line)

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("remove repeated tags")


@dataclass(frozen=True)
class Recode:
    """Read captions that are not UTF-8 in a given encoding (such as gb18030), and write them as UTF-8."""

    encoding: str
    creates = False

    def __call__(self, text: str) -> str:
        """Return the changed caption."""
        return text

    def make_title(self) -> str:
        """Return the edit's title in the history."""
        return Message("{encoding} to UTF-8", encoding=self.encoding)


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


@dataclass(frozen=True, kw_only=True)
class EditOptions:
    """What an edit is to do; values left at their defaults do nothing.

    Attributes:
        recode: encoding to read captions in that are not UTF-8.
        text: the whole caption.
        replace, pattern: (text or regular expression to find, what replaces it).
        rename_tag: (old, new).
        remove_tag, add_tag: tags.
        first: put added tags first, not last.
        dedupe, sort: keep the first of equal tags; sort the tags.
        keep: number of tags that sorting leaves in front.
        prepend, append: texts to put in front and behind.
        trigger: trigger word to put in front where it is missing.
        separator: what separates tags.
    """

    recode: str = ""
    text: str | None = None
    replace: tuple[str, str] = ("", "")
    pattern: tuple[str, str] = ("", "")
    rename_tag: tuple[str, str] = ("", "")
    remove_tag: Sequence[str] = ()
    add_tag: Sequence[str] = ()
    first: bool = False
    dedupe: bool = False
    sort: bool = False
    keep: int = 0
    prepend: str = ""
    append: str = ""
    trigger: str = ""
    separator: str = ","

    def list_operations(self) -> list[Operation]:
        """Return the operations, in the order of the attributes.

        Raises:
            UserError: `first` without `add_tag`, or `keep` without `sort`.
        """
        if self.first and not self.add_tag or self.keep and not self.sort:
            raise UserError(Message("--first needs --add-tag, and --keep needs --sort"))

        def make_if_given(value: object, operation: Callable[..., Operation], *arguments: object) -> list[Operation]:
            return [operation(*arguments)] if value else []

        return [
            *make_if_given(self.recode, Recode, self.recode),
            *make_if_given(self.text is not None, SetText, self.text),
            *make_if_given(any(self.replace), Replace, *self.replace),
            *make_if_given(any(self.pattern), ReplacePattern, *self.pattern),
            *make_if_given(any(self.rename_tag), RenameTag, *self.rename_tag, self.separator),
            *(RemoveTag(tag, self.separator) for tag in self.remove_tag),
            *(AddTag(tag, self.first, self.separator) for tag in self.add_tag),
            *make_if_given(self.dedupe, DedupeTags, self.separator),
            *make_if_given(self.sort, SortTags, self.keep, self.separator),
            *make_if_given(self.prepend, Prepend, self.prepend),
            *make_if_given(self.append, Append, self.append),
            *make_if_given(self.trigger, Trigger, self.trigger),
        ]


def check(operations: Sequence[Operation]) -> None:
    """Raise UserErrors for all invalid operations at once."""
    problems: list[str] = []
    for operation in operations:
        for name, value in vars(operation).items():
            if isinstance(value, str) and "\0" in value:
                problems.append(Message("{title}: {name} has a NUL character", title=operation.make_title(), name=name))
            if name in ("find", "old", "separator") and value == "":
                problems.append(
                    Message(
                        "{name}: {field} is empty; give the text to search for",
                        name=type(operation).__name__,
                        field=name,
                    )
                )
            if name in ("tag", "new", "word"):
                separator = getattr(operation, "separator", "\n")
                if not value.strip() or "\n" in value or separator in value:
                    problems.append(
                        Message(
                            "{title}: {tag} is not a single tag; give one tag, without {separator}",
                            title=operation.make_title(),
                            tag=repr(value),
                            separator=repr(separator),
                        )
                    )
                elif value != value.strip() and not isinstance(operation, Trigger):
                    problems.append(
                        Message(
                            "{title}: {tag} begins or ends with spaces; remove them",
                            title=operation.make_title(),
                            tag=repr(value),
                        )
                    )
        if isinstance(operation, ReplacePattern) and len(operation.find) > MAX_PATTERN:
            problems.append(
                Message(
                    "the pattern has {count} characters; the limit is {most}",
                    count=len(operation.find),
                    most=MAX_PATTERN,
                )
            )
        if isinstance(operation, Recode):
            try:
                "a".encode(operation.encoding).decode(operation.encoding)
            except (LookupError, ValueError):
                problems.append(
                    Message(
                        "{encoding} is not a text encoding; give one such as gb18030, big5, shift_jis or cp1252",
                        encoding=repr(operation.encoding),
                    )
                )
    if not operations:
        problems.append(Message("no edit was given"))
    if problems:
        raise UserErrors(problems, Message("caption edit"))
