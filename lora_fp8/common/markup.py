"""Escape text for HTML. Everything that a person or a file has written and that becomes HTML goes through `escape`."""

import html
import re
import unicodedata

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of the text after them: "gnp.exe" would show as "exe.png"."""


def escape(text: object) -> str:
    """Escape text for HTML: no markup, no invisible characters, none that change the direction of the text."""
    return html.escape(strip_unseen(text), quote=True)


def strip_unseen(text: object) -> str:
    """Remove control characters, except line ends and tabs, and direction marks. Invalid Unicode becomes U+FFFD."""
    whole = re.sub("[\ud800-\udfff]", "\ufffd", str(text))
    return "".join(c for c in whole if c in "\n\t" or not is_unseen(c))


def is_unseen(character: str) -> bool:
    """Return True for a control character, a surrogate, a line separator or a direction mark."""
    return character in BIDI or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
