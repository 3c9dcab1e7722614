"""The warnings of a scan: kinds of oddities, each with the files that it applies to."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Message, Plural, first_few

_NOTES = {
    "shorter": Plural(
        "{count} clip is shorter than the largest of dataset.frames and is trained at a smaller length: {files}",
        "{count} clips are shorter than the largest of dataset.frames and are trained at a smaller length: {files}",
    ),
    "slower": Plural(
        "{count} clip has fewer frames per second than dataset.fps, so some of its frames are repeated: {files}",
        "{count} clips have fewer frames per second than dataset.fps, so some of their frames are repeated: {files}",
    ),
    "extension": Plural(
        "{count} image has an extension that does not match its format; it is read by its content: {files}",
        "{count} images have an extension that does not match their format; they are read by their content: {files}",
    ),
    "profile": Plural(
        "{count} image has a colour profile that cannot be used and is read as sRGB: {files}",
        "{count} images have a colour profile that cannot be used and are read as sRGB: {files}",
    ),
    "animated": Plural(
        "{count} file has several frames or pages; only the first is used: {files}",
        "{count} files have several frames or pages; only the first is used: {files}",
    ),
    "tiny": Plural(
        "{count} image has less than a quarter of the pixels of the training resolution: {files}",
        "{count} images have less than a quarter of the pixels of the training resolution: {files}",
    ),
    "upscaled": Plural(
        "{count} image is smaller than the training resolution and is enlarged (upscale = false keeps its size): "
        "{files}",
        "{count} images are smaller than the training resolution and are enlarged (upscale = false keeps their "
        "size): {files}",
    ),
    "small": Plural(
        "{count} image is smaller than the training resolution and is trained in a smaller bucket (upscale = "
        "false): {files}",
        "{count} images are smaller than the training resolution and are trained in smaller buckets (upscale = "
        "false): {files}",
    ),
    "wide": Plural(
        "{count} image exceeds dataset.max_aspect and is cropped to it: {files}",
        "{count} images exceed dataset.max_aspect and are cropped to it: {files}",
    ),
    "copies": Plural("{count} image is a copy of another: {files}", "{count} images are copies of others: {files}"),
    "unmasked": Plural(
        "{count} image has no mask and is trained whole: {files}",
        "{count} images have no mask and are trained whole: {files}",
    ),
    "black": Plural("{count} mask is black all over: {files}", "{count} masks are black all over: {files}"),
    "outside": Plural(
        "{count} image has a mask whose white part lies outside the crop: {files}",
        "{count} images have masks whose white parts lie outside the crop: {files}",
    ),
    "strange": Plural("{count} mask has no matching image: {files}", "{count} masks have no matching image: {files}"),
    "choices": Plural(
        "{count} caption has a wildcard and is trained as written, because dataset.wildcards is off: {files}",
        "{count} captions have wildcards and are trained as written, because dataset.wildcards is off: {files}",
    ),
    "shapes": Plural(
        "{count} control image has another aspect ratio than its image and is used whole: {files}",
        "{count} control images have another aspect ratio than their images and are used whole: {files}",
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
