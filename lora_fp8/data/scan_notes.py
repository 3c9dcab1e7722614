"""The warnings of a scan: kinds of oddities, each with the files that it applies to."""

from __future__ import annotations

import os
from pathlib import Path

_NOTES = {
    "shorter": "{n} clip(s) too short for the longest of dataset.frames, trained at a shorter length",
    "slower": "{n} clip(s) with fewer frames a second than dataset.fps, some of whose frames are shown twice",
    "extension": "{n} image(s) named as another format than they are (read all the same)",
    "profile": "{n} image(s) with a colour profile that cannot be used, read without it",
    "animated": "{n} file(s) with several frames or pages, of which the first is used",
    "tiny": "{n} image(s) with less than a quarter of the pixels of the training resolution",
    "upscaled": "{n} image(s) smaller than the training resolution, enlarged (upscale = false keeps their size)",
    "small": "{n} image(s) smaller than the training resolution, trained in smaller buckets (upscale = false)",
    "wide": "{n} image(s) with a wider aspect ratio than dataset.max_aspect, cropped to it",
    "copies": "{n} image(s) that are copies of others",
    "unmasked": "{n} image(s) without a mask, trained whole",
    "black": "{n} mask(s) that are black all over",
    "outside": "{n} image(s) whose mask is white only where the crop cuts it off",
    "strange": "{n} mask(s) belong to no image",
    "choices": "{n} caption(s) with a choice of words, trained as it is written while dataset.wildcards is off",
    "shapes": "{n} control picture(s) of another shape than their picture, shown whole",
}


def as_text(path: str | Path) -> str:
    """Return a path as printable text, as names that are not valid UTF-8 could be neither logged nor sent."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def list_names(names: list[str], most: int = 8) -> str:
    """Join the names with commas; of more than `most` names, list the first ones and count the rest."""
    return ", ".join(map(as_text, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def to_warnings(notes: dict[str, list[str]]) -> list[str]:
    """Return one warning for each kind of oddity that some file has."""
    return [f"{_NOTES[kind].format(n=len(names))}: {list_names(names)}" for kind, names in notes.items() if names]
