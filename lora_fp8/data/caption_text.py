"""The text of a caption file: its encoding, its lines, its trigger word and its wildcards.

The caption of `name.png` is `name.txt`, else `name.caption`, in the same folder. Lines are joined by spaces, unless
`dataset.caption_lines` makes each a caption of its own. A caption is put between its folder's `prefix` and `suffix`,
with spaces. If there is a trigger word (`Dataset.find_trigger`) and the caption does not contain it as a separate word
(case matters), it is prepended: "trigger, caption".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..common.reading import MOST_TEXT, read_bytes
from ..errors import Message

CAPTIONS = (".txt", ".caption")
"""Caption files in the order of preference."""


_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""Byte-order mark -> Python's name of the encoding that follows it."""


def decode_caption(raw: bytes) -> tuple[str, bytes, str]:
    """Decode the bytes of a caption file.

    Returns:
        The text with its line ends, the byte-order mark (b"" if there is none), and Python's name of the encoding.

    Raises:
        ValueError: as for `read_caption`.
    """
    mark = next((mark for mark in _MARKS if raw.startswith(mark)), b"")
    codec = _MARKS.get(mark, "utf-8")
    try:
        text = raw[len(mark) :].decode(codec)
    except UnicodeDecodeError as error:
        at = error.start + len(mark)
        place = f"{at} (0x{raw[at]:02x})" if at < len(raw) else at
        raise ValueError(
            Message("the text is not {codec} at byte {byte}; save it as UTF-8", codec=codec[:6].upper(), byte=place)
        ) from None
    # UTF-16 without a mark, and UTF-32, are valid in the narrower encoding but full of NULs.
    if "\0" in text:
        raise ValueError(Message("the text has a NUL character at byte {byte}; save it as UTF-8", byte=raw.index(0)))
    return text, mark, codec


def read_caption(path: Path) -> str:
    """Read a caption file as one line; see `read_lines`."""
    return " ".join(read_lines(path))


def read_lines(path: Path, keep: str = "one") -> list[str]:
    """Read a caption file: UTF-8 (with or without a mark), or UTF-16 with a byte-order mark.

    Args:
        path: the caption file.
        keep: `dataset.caption_lines`.

    Returns:
        Its captions, stripped and not empty: all lines with "one", the first with "first", one text with "join".

    Raises:
        ValueError: the bytes are in another encoding; the message has the offset of the first invalid byte.
    """
    text = decode_caption(read_bytes(path, MOST_TEXT))[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if keep == "join":
        return [" ".join(lines)] if lines else []
    return lines[:1] if keep == "first" else lines


CHOICE = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")
"""A choice in a caption, such as `{red|blue}`: with dataset.wildcards one of the alternatives is drawn at random."""


def find_choice(caption: str) -> str:
    """Return the first `{a|b}` of a caption that contains a letter or digit (emoticons do not); "" if there is none."""
    return next((choice[0] for choice in CHOICE.finditer(caption) if re.search(r"\w", choice[1])), "")


# Characters that join with their neighbours into one word. Thai, kana, ideographs and hangul are left out: they are
# written next to other words without a space.
_LETTER = r"[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"


def with_trigger(caption: str, trigger: str) -> str:
    """Prepend the trigger word to the caption, unless the caption already contains it as a separate word."""
    trigger = trigger.strip()
    if not trigger or re.search(rf"(?<!{_LETTER}){re.escape(trigger)}(?!{_LETTER})", caption):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def with_class_word(caption: str, triggers: Sequence[str], class_word: str) -> str:
    """Replace each trigger word in a caption by the class word, together with a class word that follows it.

    "sks dog on grass", "sks, dog, on grass" and "sks on grass" become "dog on grass", "dog, on grass", "dog on grass".

    Args:
        caption: as trained.
        triggers: the dataset's trigger words.
        class_word: such as "dog"; "" leaves the caption as it is.
    """
    if not class_word:
        return caption
    for trigger in sorted(map(str.strip, triggers), key=len, reverse=True):  # "sks dog" before "sks"
        word = rf"(?<!{_LETTER}){re.escape(trigger)}(?!{_LETTER})"
        caption = re.sub(rf"{word}(?:[,\s]+{re.escape(class_word)}(?!{_LETTER}))?", lambda _: class_word, caption)
    return caption


def make_trained_caption(text: str, trigger: str, prefix: str = "", suffix: str = "") -> str:
    """Return the caption to train with: the text between a folder's prefix and suffix, and the trigger word in it."""
    return with_trigger(" ".join(part for part in (prefix.strip(), text, suffix.strip()) if part), trigger)
