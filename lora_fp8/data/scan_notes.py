"""The warnings of a scan: kinds of oddities, each with the files that it applies to."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Message, Template, first_few

_NOTES = {
    "shorter": Template(
        "{count} clip(s) too short for the longest of dataset.frames, trained at a shorter length: {files}"
    ),
    "slower": Template(
        "{count} clip(s) with fewer frames a second than dataset.fps, some of whose frames are shown twice: {files}"
    ),
    "extension": Template("{count} image(s) named as another format than they are (read all the same): {files}"),
    "profile": Template("{count} image(s) with a colour profile that cannot be used, read without it: {files}"),
    "animated": Template("{count} file(s) with several frames or pages, of which the first is used: {files}"),
    "tiny": Template("{count} image(s) with less than a quarter of the pixels of the training resolution: {files}"),
    "upscaled": Template(
        "{count} image(s) smaller than the training resolution, enlarged (upscale = false keeps their size): {files}"
    ),
    "small": Template(
        "{count} image(s) smaller than the training resolution, trained in smaller buckets (upscale = false): {files}"
    ),
    "wide": Template("{count} image(s) with a wider aspect ratio than dataset.max_aspect, cropped to it: {files}"),
    "copies": Template("{count} image(s) that are copies of others: {files}"),
    "unmasked": Template("{count} image(s) without a mask, trained whole: {files}"),
    "black": Template("{count} mask(s) that are black all over: {files}"),
    "outside": Template("{count} image(s) whose mask is white only where the crop cuts it off: {files}"),
    "strange": Template("{count} mask(s) belong to no image: {files}"),
    "choices": Template(
        "{count} caption(s) with a choice of words, trained as it is written while dataset.wildcards is off: {files}"
    ),
    "shapes": Template("{count} control picture(s) of another shape than their picture, shown whole: {files}"),
}


def as_text(path: str | Path) -> str:
    """Return a path as printable text, as names that are not valid UTF-8 could be neither logged nor sent."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def list_names(names: list[str], most: int = 8) -> Message:
    """Join the names with commas; of more than `most` names, list the first ones and count the rest."""
    return first_few([name.map(as_text) if isinstance(name, Message) else as_text(name) for name in names], most)


def to_warnings(notes: dict[str, list[str]]) -> list[str]:
    """Return one warning for each kind of oddity that some file has."""
    return [_NOTES[kind](count=len(names), files=list_names(names)) for kind, names in notes.items() if names]
