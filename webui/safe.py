"""What a browser may name and what it is shown: paths below the roots, names of new files, text as HTML.

Everything typed into the page, or sent in an address, that means a file goes through `inside`; everything that a
person or a file has written and that becomes HTML goes through `shown`.
"""

import html
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from lora_fp8.config import UserError

LONGEST_PATH, LONGEST_NAME = 4096, 255  # what Linux takes, in bytes
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?\Z", re.IGNORECASE)  # names that Windows cannot hold
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of what follows: "gnp.exe" is shown as "exe.png"."""


def inside(text: str, roots: Iterable[Path], private: Path | None = None) -> Path:
    """The path that the text names, resolved, if it lies below one of the roots.

    Args:
        text: an absolute path, or one that begins with ~/.
        roots: resolved folders.
        private: a resolved folder that is refused although a root encloses it, but for roots that lie in it.

    Raises:
        UserError: it is no such path, or it (or what its links lead to) lies outside, or is hidden there.
    """
    path = resolved(text)
    holding = [root for root in roots if path.is_relative_to(root)]
    if private is not None and path.is_relative_to(private):
        holding = [root for root in holding if root.is_relative_to(private) and root != private]
    if not holding:
        raise UserError(f"{shorter(text)}: not below a folder that the page may use; Settings lists and adds them")
    if not any(_open_way(path, root) for root in holding):
        raise UserError(f"{shorter(text)}: hidden files and folders are not shown or written")
    return path


def resolved(text: str) -> Path:
    """The path that the text names, its links followed, wherever it is.

    Raises:
        UserError: it is not written as a path of this computer.
    """
    given = _plain(text, "path")
    if given.startswith("~/"):
        given = str(Path.home()) + given[1:]
    if given.startswith("//") or not given.startswith("/") or "\\" in given:
        raise UserError(f"{shorter(text)}: not a path of this computer; write it whole, from / or ~/ on")
    if ".." in given.split("/"):
        raise UserError(f"{shorter(text)}: write the path without ..")
    try:
        return Path(given).resolve()
    except (OSError, RuntimeError):  # links in a circle
        raise UserError(f"{shorter(text)}: cannot be followed to a file or folder") from None


def name(text: str) -> str:
    """The name of a new file or folder, without its place.

    Raises:
        UserError: it would not be one name on every system.
    """
    given = _plain(text, "name")
    if re.search(r'[/\\:*?"<>|]', given) or given[0] in ".-~" or given[-1] == "." or RESERVED.match(given):
        raise UserError(f"{shorter(text)}: not a name for a file; use letters, digits, spaces, _ and -")
    if len(given.encode()) > 120:  # suffixes such as -step-000500.safetensors come behind
        raise UserError(f"{shorter(text)}: too long for a name; 120 bytes are enough")
    return given


def shown(text: object) -> str:
    """Text as HTML: nothing in it is markup, and no character in it is invisible or turns the line around."""
    return html.escape(plain(text), quote=True)


def plain(text: object) -> str:
    """Text in one direction, without control characters but line ends and tabs; what is no UTF-8 shows as U+FFFD."""
    whole = re.sub("[\ud800-\udfff]", "\ufffd", str(text))
    return "".join(c for c in whole if c in "\n\t" or not _unseen(c))


def shorter(text: object, longest: int = 120) -> str:
    """What was given, as it stands in a message: plain and in one short line."""
    line = " ".join(plain(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _plain(text: str, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"no {what} given")
    given = text.strip()
    if any(_unseen(c) or c in "\n\t" for c in given):
        raise UserError(f"{shorter(text)}: has characters that are not seen; write the {what} without them")
    encoded = given.encode(errors="replace")
    if len(encoded) > LONGEST_PATH or any(len(part) > LONGEST_NAME for part in encoded.split(b"/")):
        raise UserError(f"{shorter(text)}: too long for a {what}")
    return given


def _unseen(character: str) -> bool:
    return character in BIDI or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _open_way(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)
