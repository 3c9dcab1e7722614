"""Messages for people, and the errors that end a command with one of them."""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self


class Message(str):
    """An English sentence that remembers its template and its values, so that it can be translated.

        Message("folder {path} does not exist", path=path)

    It is used like any text. Values may be messages themselves. `lora_fp8.common.messages` translates; what is built
    from a message by concatenation or an f-string is plain text and stays English.

    Args:
        template: as for `str.format`, with named values. It is also the key in the catalogue, which is filled from
            the source, so it is written out in the call.
        values: what the template names. Errors and paths are kept as their text.
    """

    template: str
    values: dict[str, Any]

    def __new__(cls, template: str, /, **values: Any) -> Self:
        """Fill in the English template."""
        kept = {name: str(value) if isinstance(value, Exception | Path) else value for name, value in values.items()}
        message = super().__new__(cls, template.format(**kept))
        message.template, message.values = template, kept
        return message

    def __str__(self) -> str:
        return self  # str(error) is the message that the error was raised with, and not a plain copy

    def __reduce__(self) -> Any:
        return partial(Message, **self.values), (self.template,)

    def with_values(self, **values: Any) -> "Message":
        """Return the same message with some of its values replaced."""
        return Message(self.template, **self.values | values)

    def map(self, change: Callable[[str], str]) -> "Message":
        """Return the same message with its texts changed: values, and texts in messages among them."""
        changed = {name: value for name, value in self.values.items() if not isinstance(value, str)}
        texts = {name: value for name, value in self.values.items() if isinstance(value, str)}
        changed |= {
            name: text.map(change) if isinstance(text, Message) else change(text) for name, text in texts.items()
        }
        return Message(self.template, **changed)


class Joined(Message):
    """Several messages in one, each translated by itself: Joined("; ", remarks). Its template is the separator."""

    parts: tuple[str, ...]

    def __new__(cls, separator: str, parts: Iterable[str]) -> Self:
        """Join the English texts."""
        parts = tuple(parts)
        message = str.__new__(cls, separator.join(parts))
        message.template, message.values, message.parts = separator, {}, parts
        return message

    def __reduce__(self) -> Any:
        return Joined, (self.template, self.parts)

    def map(self, change: Callable[[str], str]) -> "Joined":
        """Return the same parts, changed."""
        parts = (part.map(change) if isinstance(part, Message) else change(part) for part in self.parts)
        return Joined(self.template, parts)


class Phrase(Message):
    """A text without values from a declaration or a data file, such as the description of a setting.

    Its English text is its key in the catalogue; scripts/messages.py knows the places where such texts stand.
    """

    def __new__(cls, text: str) -> Self:
        """Take the text as it is: braces in it are no places of values."""
        message = str.__new__(cls, text)
        message.template, message.values = text, {}
        return message

    def __reduce__(self) -> Any:
        return Phrase, (self.template,)

    def map(self, change: Callable[[str], str]) -> "Phrase":
        """Return the phrase itself: it holds no values to change."""
        return self


class Translated(Message):
    """A message that another process wrote down, with its translations by language."""

    translations: dict[str, str]

    def __new__(cls, text: str, translations: dict[str, str]) -> Self:
        """Keep the English text and what it is in other languages."""
        message = str.__new__(cls, text)
        message.template, message.values, message.translations = text, {}, translations
        return message

    def __reduce__(self) -> Any:
        return Translated, (self.template, self.translations)

    def map(self, change: Callable[[str], str]) -> "Translated":
        """Return the same message with its text changed in every language."""
        return Translated(change(self.template), {name: change(text) for name, text in self.translations.items()})


class Template(str):
    """A template that waits in a table for its values: Template("{count} images")(count=3) is a Message."""

    def __call__(self, **values: Any) -> Message:
        """Fill in the values."""
        return Message(self, **values)


class Plural:
    """A template with a count, in its two English forms: Plural("{count} image", "{count} images")(count=3)."""

    def __init__(self, singular: str, plural: str):
        self.singular, self.plural = singular, plural

    def __call__(self, **values: Any) -> Message:
        """Fill in the values, `count` among them, which chooses the form."""
        template = self.singular if values["count"] == 1 else self.plural
        return Message(template, **values)


SYSTEM_ERRORS = {
    errno.EACCES: Message("Permission denied"),
    errno.ECONNREFUSED: Message("Connection refused"),
    errno.ECONNRESET: Message("Connection reset by peer"),
    errno.EDQUOT: Message("Disk quota exceeded"),
    errno.EEXIST: Message("File exists"),
    errno.EFBIG: Message("File too large"),
    errno.EHOSTUNREACH: Message("No route to host"),
    errno.EIO: Message("Input/output error"),
    errno.EISDIR: Message("Is a directory"),
    errno.EMFILE: Message("Too many open files"),
    errno.ENAMETOOLONG: Message("File name too long"),
    errno.ENETUNREACH: Message("Network is unreachable"),
    errno.ENOLCK: Message(
        "this file system has no locks, without which two programs may write the same file; choose a folder on another "
        "disk"
    ),
    errno.ENOENT: Message("No such file or directory"),
    errno.ENOMEM: Message("Cannot allocate memory"),
    errno.ENOSPC: Message("No space left on device"),
    errno.ENOTDIR: Message("Not a directory"),
    errno.EPERM: Message("Operation not permitted"),
    errno.EROFS: Message("Read-only file system"),
    errno.ESTALE: Message("Stale file handle"),
    errno.ETIMEDOUT: Message("Connection timed out"),
}
"""What Linux says of the errors that files and connections cause, by number. Other systems have other words."""


def reason(error: Exception) -> str:
    """Return what an error says: of those of the system without number and path. "" if it says nothing."""
    text: str = getattr(error, "strerror", None) or str(error)
    if isinstance(error, OSError) and error.strerror and not isinstance(text, Message):
        return SYSTEM_ERRORS.get(error.errno or 0, text)
    return text


def first_few(names: Sequence[str], most: int = 3) -> Message:
    """Return the first few names, and the number of the others."""
    first = Joined(", ", names[:most])
    return Message("{names} and {count} more", names=first, count=len(names) - most) if len(names) > most else first


def about(path: Path | str, line: str | Exception) -> Message:
    """Return a message with the file that it is about in front: "a.txt: the file is empty"."""
    return Message("{path}: {line}", path=path, line=reason(line) if isinstance(line, Exception) else line)


class UserError(Exception):
    """Something the user gave is wrong: one clear line, exit code 2, no traceback."""

    @property
    def problems(self) -> list[str]:
        """Return what is wrong, one line each."""
        return [str(self)]


def cannot_read(path: Path | str, error: Exception) -> UserError:
    """Return the error for a file of the user's that could not be read."""
    return UserError(Message("{path}: the file cannot be read ({why})", path=path, why=reason(error)))


def missing_file(path: Path | str) -> UserError:
    """Return the error for a file that does not exist."""
    return UserError(Message("{path}: there is no such file", path=path))


def not_utf8(path: Path | str, error: UnicodeDecodeError) -> UserError:
    """Return the error for a text file in another encoding."""
    return UserError(
        Message("{path}: the text is not UTF-8 (byte {byte}); save the file as UTF-8", path=path, byte=error.start)
    )


def needs_repair(path: Path, why: str) -> UserError:
    """Return the error for a file of ours that somebody has changed so that it cannot be used."""
    return UserError(Message("{path}: {why}; repair it or remove it", path=path, why=why))


def missing_folder(path: Path) -> UserError:
    """Return the error for an image folder that does not exist."""
    return UserError(looked_for(path, Message("folder {path} does not exist", path=path)))


def looked_for(path: Path | str, line: Message) -> Message:
    """Return a message about a path that does not exist, with the folder in which a relative path was looked for."""
    if os.path.isabs(os.path.expanduser(path)):
        return line
    return Message("{line} (looked in {where})", line=line, where=Path.cwd())


def lacks_weights(path: Path, kind: str, count: int, names: str) -> UserError:
    """Return the error for a model's file or folder in which weights are missing."""
    return UserError(
        Message(
            "{path} lacks {count} weights of a {kind}: {names}; it belongs to another model, or is incomplete",
            path=path,
            kind=kind,
            count=count,
            names=names,
        )
    )


def cannot_write(path: Path | str, error: OSError) -> UserError:
    """Return the error for a file or folder that could not be written."""
    return UserError(Message("{path}: the file cannot be written ({why})", path=path, why=reason(error)))


def exists_already(path: Path) -> UserError:
    """Return the error for an output file that would replace another one."""
    return UserError(Message("{path}: the file exists already; choose another name with --output", path=path))


class UserErrors(UserError):
    """Several things are wrong; all are reported at once.

    Args:
        problems: one line each.
        where: the file (or other source) that they were found in.
    """

    def __init__(self, problems: Sequence[str], where: str = ""):
        self._problems, self.where = list(problems), where
        super().__init__(
            Joined("\n", [self._format_heading(), *(Message("  {line}", line=problem) for problem in problems)])
        )

    @property
    def problems(self) -> list[str]:
        """Return what is wrong, one line each."""
        return self._problems

    def _format_heading(self) -> Message:
        count = len(self._problems)
        if self.where:
            return Plural("{where}: {count} problem", "{where}: {count} problems")(where=self.where, count=count)
        return Plural("{count} problem", "{count} problems")(count=count)


def combine(problems: Sequence[str], where: str = "") -> UserError:
    """Return the error for these problems. A single one needs no heading with their number and `where`."""
    return UserErrors(problems, where) if len(problems) > 1 else UserError(problems[0])


class RunFailure(Exception):
    """The run failed while running, through no typing mistake of the user: exit code 3."""


class Stopped(Exception):
    """The run was asked to stop, has saved, and can be resumed: exit code 75 (EX_TEMPFAIL)."""
