"""Check what a browser may name, and escape what it is shown: paths below the allowed folders, file names, HTML.

Every path that is typed or sent in an address goes through `resolve_inside`. Everything that a person or a file has
written and that becomes HTML goes through `escape`, which is in `lora_fp8.common.markup`.
"""

import errno
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lora_fp8.common import system
from lora_fp8.common.markup import escape as escape
from lora_fp8.common.markup import is_unseen, strip_unseen
from lora_fp8.errors import Message, Template, UserError

LONGEST_PATH, LONGEST_NAME = 4096, 255  # what Linux takes, in bytes
CANNOT_RESOLVE = 1921
"""Windows' ERROR_CANT_RESOLVE_FILENAME."""
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?\Z", re.IGNORECASE)  # names that Windows cannot hold


def resolve_inside(text: str, roots: Iterable[Path], private: Path | None = None) -> Path:
    """Resolve a path that must lie below one of the roots.

    Args:
        text: an absolute path, or one that begins with ~/.
        roots: resolved folders.
        private: a resolved folder that is refused although a root contains it, except for roots inside it.

    Raises:
        UserError: it is not such a path, or it (or the target of its links) lies outside, or is hidden there.
    """
    path = resolve_path(text)
    holding = [root for root in roots if path.is_relative_to(root)]
    if private is not None and path.is_relative_to(private):
        holding = [root for root in holding if root.is_relative_to(private) and root != private]
    if not holding:
        raise UserError(
            Message(
                "{text}: the page may not use this path; Settings lists its folders and adds others", text=shorten(text)
            )
        )
    if not any(_is_visible(path, root) for root in holding):
        raise UserError(Message("{text}: hidden files and folders are not shown or written", text=shorten(text)))
    return path


def make_missing_file_error(text: str) -> UserError:
    """Return the error for a file that does not exist, by the path that was typed or sent."""
    return UserError(Message("{text}: there is no such file", text=shorten(text)))


def resolve_path(text: str) -> Path:
    """Resolve a path and its links, wherever it leads.

    Raises:
        UserError: it is not written as a path of this computer.
    """
    given = _check_text(text, PATH)
    whole = write_windows_path(given) if system.WINDOWS else _write_posix_path(given)
    if whole is None:
        raise UserError(
            Message(
                "{text}: this is not a path of this computer; write the full path, beginning with / or ~/",
                text=shorten(text),
            )
            if not system.WINDOWS
            else Message(
                "{text}: this is not a path of this computer; write the full path, beginning with C:\\ or ~\\",
                text=shorten(text),
            )
        )
    if ".." in re.split(r"[/\\]" if system.WINDOWS else "/", whole):
        raise UserError(Message("{text}: write the path without ..", text=shorten(text)))
    nowhere = UserError(Message("{text}: the path does not lead to a file or folder", text=shorten(text)))
    try:
        path = Path(whole).resolve()
    except (OSError, RuntimeError):  # a loop of links, before Python 3.13
        raise nowhere from None
    if _leads_in_a_circle(path):
        raise nowhere
    return path


def _leads_in_a_circle(path: Path) -> bool:
    """Return True for a resolved path with links that lead to each other: since Python 3.13 `resolve` keeps them."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP or getattr(error, "winerror", 0) == CANNOT_RESOLVE
    return False


def require_choice(value: Any, accepted: tuple[str, ...]) -> str:
    """Return a value that must be one of the accepted texts; "" among them is not listed. Raises UserError."""
    if value not in accepted:
        names = ", ".join(filter(None, accepted))
        raise UserError(
            Message("{text}: this kind of file is not accepted; accepted: {names}", text=shorten(value), names=names)
        )
    return str(value)


def require_folder(path: Path, text: object) -> None:
    """Check that a folder exists. Raises UserError, which names it by what was typed."""
    if not path.is_dir():
        raise UserError(Message("{text}: there is no such folder", text=shorten(text)))


def _write_posix_path(given: str) -> str | None:
    if given.startswith("~/"):
        given = str(Path.home()) + given[1:]
    return None if given.startswith("//") or not given.startswith("/") or "\\" in given else given


def write_windows_path(given: str) -> str | None:
    """Return a Windows path from its drive on, or None if it is not one of a local disk.

    Refused are shares (which would send the user's password hash to a server), devices, alternate streams, and names
    that Windows changes or cannot hold: a folder could not be told from another.
    """
    path = given.replace("/", "\\")
    if path.startswith("~\\"):
        path = str(Path.home()).replace("/", "\\") + path[1:]
    if not re.match(r"[A-Za-z]:\\", path):
        return None
    parts = [part for part in path[3:].split("\\") if part]
    for part in parts:
        if part != ".." and (re.search(r'[:*?"<>|]', part) or part[-1] in ". " or RESERVED.match(part)):
            return None
    return path[:3] + "\\".join(parts)


LONGEST_IMAGE_NAME = 200
"""Bytes of an image's name: prompts become names, and a Chinese character takes three bytes. Systems allow 255."""


def check_name(text: str, longest: int = 120) -> str:
    """Check the name of a new file or folder, without its location.

    Args:
        text: the name.
        longest: most bytes; suffixes such as -step-000500.safetensors are added to the usual one.

    Raises:
        UserError: it would not be a single valid name on every system.
    """
    given = _check_text(text, NAME)
    if re.search(r'[/\\:*?"<>|]', given) or given[0] in ".-~" or given[-1] == "." or RESERVED.match(given):
        raise UserError(
            Message("{text}: this is not a valid file name; use letters, digits, spaces, _ and -", text=shorten(text))
        )
    if len(given.encode()) > longest:
        raise UserError(
            Message("{text}: the name is too long; the limit is {most} bytes", text=shorten(text), most=longest)
        )
    return given


def shorten(text: object, longest: int = 120) -> str:
    """Return text as it stands in a message: plain, on one short line."""
    line = " ".join(strip_unseen(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


PATH = (
    Message("no path is given"),
    Template("{text}: the path contains invisible characters; write it without them"),
    Template("{text}: the path is too long"),
)
NAME = (
    Message("no name is given"),
    Template("{text}: the name contains invisible characters; write it without them"),
    Template("{text}: the name is too long"),
)
"""What is said where a path or name is missing, has invisible characters, or is too long."""


def _check_text(text: str, sentences: tuple[Message, Template, Template]) -> str:
    missing, has_unseen, too_long = sentences
    if not isinstance(text, str) or not text.strip():
        raise UserError(missing)
    given = text.strip()
    if any(is_unseen(c) or c in "\n\t" for c in given):
        raise UserError(has_unseen(text=shorten(text)))
    encoded = given.encode(errors="replace")
    if len(encoded) > LONGEST_PATH or any(len(part) > LONGEST_NAME for part in encoded.split(b"/")):
        raise UserError(too_long(text=shorten(text)))
    return given


def _is_visible(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)
