"""Format names, paths and values for messages."""

import difflib
from typing import Any

from ..errors import Message


def is_utf8(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8; paths may contain bytes that cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quote(value: Any) -> str:
    """Return a value's repr, on one line of limited length."""
    text = repr(value)
    return text if len(text) <= 80 else Message("{text} ... ({count} characters)", text=text[:60], count=len(text))


def find_similar(given: str, names: list[str]) -> str | None:
    """Return the most similar name; None if none is similar."""
    near = difflib.get_close_matches(str(given)[:80].lower(), names, n=1, cutoff=0.5)
    return near[0] if near else None
