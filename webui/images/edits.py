"""Exclude, turn and crop images by their folder's list (`data.image_edits`), and list those that are excluded."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_fp8.data import captions, clips, image_edits
from lora_fp8.data.decoding import EXTENSIONS
from lora_fp8.data.image_edits import NOTHING, WHOLE, ImageEdit
from lora_fp8.errors import Message, Plural, UserError, first_few

from ..context import Ui

TURNS = (90, 180, 270)


def list_excluded(folder: Path, edits: dict[str, ImageEdit]) -> list[str]:
    """List the images of a folder that its list excludes and that exist, sorted by name."""
    root = folder.resolve()
    return sorted(name for name, edit in edits.items() if edit.exclude and _is_image(root, name))


def _is_image(root: Path, name: str) -> bool:
    # The list may come with a dataset: its names are not trusted.
    path = Path(os.path.realpath(root / name))
    return path.is_relative_to(root) and path.suffix.lower() in (*EXTENSIONS, *clips.VIDEOS) and path.is_file()


def change(ui: Ui, folder: Path, known: set[str], names: tuple[str, ...], given: dict[str, Any]) -> str:
    """Exclude, include, turn or crop images, as an edit of the folder that can be undone.

    Args:
        ui: the language.
        folder: the dataset folder.
        known: its images, excluded ones among them.
        names: those to change.
        given: {"exclude": bool}, {"turn": degrees clockwise} or {"crop": [left, top, right, bottom]}, where the crop is
            of the turned image.

    Returns:
        A message.

    Raises:
        UserError: there is no such image, or the list cannot be read or written.
    """
    if strange := [name for name in names if name not in known]:
        raise UserError(ui.say("images.gone", file=strange[0]))
    edits = image_edits.read(folder)
    wanted = {name: _change_edit(edits.get(name, NOTHING), given) for name in names}
    edit = captions.assign_images(folder, wanted, _describe(given, names))
    if edit.changes:
        captions.apply(folder, edit)
    return ui.translate(edit.title)


def _change_edit(edit: ImageEdit, given: dict[str, Any]) -> ImageEdit:
    exclude, degrees, crop = given.get("exclude"), given.get("turn"), given.get("crop")
    if isinstance(exclude, bool):
        return replace(edit, exclude=exclude)
    if type(degrees) is int and degrees in TURNS:
        return edit.turn(degrees)
    try:
        box = image_edits.read_edit({"crop": crop if crop is not None else list(WHOLE)}).crop
    except ValueError as error:
        raise UserError(error.args[0]) from None
    return replace(edit, crop=box)


def _describe(given: dict[str, Any], names: tuple[str, ...]) -> Message:
    count, name = len(names), names[0] if names else ""
    if given.get("exclude") is True:
        return Plural("{count} image excluded from training: {name}", "{count} images excluded from training: {names}")(
            count=count, name=name, names=first_few(names)
        )
    if given.get("exclude") is False:
        return Plural("{count} image included again: {name}", "{count} images included again: {names}")(
            count=count, name=name, names=first_few(names)
        )
    if "turn" in given:
        return Message("{name} turned", name=name)
    return Message("{name} cropped", name=name)
