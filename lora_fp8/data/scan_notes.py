"""The warnings of a scan: kinds of oddities, each with the files that it applies to."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Message, Plural, first_few

_NOTES = {
    "shorter": Plural(
        "{count} clip too short for the longest of dataset.frames, trained at a shorter length: {files}",
        "{count} clips too short for the longest of dataset.frames, trained at a shorter length: {files}",
    ),
    "slower": Plural(
        "{count} clip with fewer frames a second than dataset.fps, some of whose frames are shown twice: {files}",
        "{count} clips with fewer frames a second than dataset.fps, some of whose frames are shown twice: {files}",
    ),
    "extension": Plural(
        "{count} image named as another format than it is (read all the same): {files}",
        "{count} images named as another format than they are (read all the same): {files}",
    ),
    "profile": Plural(
        "{count} image with a colour profile that cannot be used, read without it: {files}",
        "{count} images with a colour profile that cannot be used, read without it: {files}",
    ),
    "animated": Plural(
        "{count} file with several frames or pages, of which the first is used: {files}",
        "{count} files with several frames or pages, of which the first is used: {files}",
    ),
    "tiny": Plural(
        "{count} image with less than a quarter of the pixels of the training resolution: {files}",
        "{count} images with less than a quarter of the pixels of the training resolution: {files}",
    ),
    "upscaled": Plural(
        "{count} image smaller than the training resolution, enlarged (upscale = false keeps its size): {files}",
        "{count} images smaller than the training resolution, enlarged (upscale = false keeps their size): {files}",
    ),
    "small": Plural(
        "{count} image smaller than the training resolution, trained in a smaller bucket (upscale = false): {files}",
        "{count} images smaller than the training resolution, trained in smaller buckets (upscale = false): {files}",
    ),
    "wide": Plural(
        "{count} image with a wider aspect ratio than dataset.max_aspect, cropped to it: {files}",
        "{count} images with a wider aspect ratio than dataset.max_aspect, cropped to it: {files}",
    ),
    "copies": Plural(
        "{count} image that is a copy of another: {files}", "{count} images that are copies of others: {files}"
    ),
    "unmasked": Plural(
        "{count} image without a mask, trained whole: {files}",
        "{count} images without a mask, trained whole: {files}",
    ),
    "black": Plural("{count} mask that is black all over: {files}", "{count} masks that are black all over: {files}"),
    "outside": Plural(
        "{count} image whose mask is white only where the crop cuts it off: {files}",
        "{count} images whose masks are white only where the crop cuts them off: {files}",
    ),
    "strange": Plural("{count} mask belongs to no image: {files}", "{count} masks belong to no image: {files}"),
    "choices": Plural(
        "{count} caption with a choice of words, trained as it is written while dataset.wildcards is off: {files}",
        "{count} captions with a choice of words, trained as they are written while dataset.wildcards is off: {files}",
    ),
    "shapes": Plural(
        "{count} control picture of another shape than its picture, shown whole: {files}",
        "{count} control pictures of another shape than their pictures, shown whole: {files}",
    ),
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
