"""Exclude, turn and crop images as the workbench asks for it."""

from pathlib import Path
from typing import Any

from lora_fp8.data import image_edits
from lora_fp8.data.image_changes import ImageChange, change_images
from lora_fp8.data.image_edits import WHOLE
from lora_fp8.errors import UserError

from ..context import Ui


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
    return ui.translate(change_images(folder, names, _read_change(given)).title)


def _read_change(given: dict[str, Any]) -> ImageChange:
    exclude, degrees, crop = given.get("exclude"), given.get("turn"), given.get("crop")
    if isinstance(exclude, bool):
        return ImageChange(exclude=exclude)
    if type(degrees) is int:
        return ImageChange(turn=degrees)
    try:
        return ImageChange(crop=image_edits.read_edit({"crop": crop if crop is not None else list(WHOLE)}).crop)
    except ValueError as error:
        raise UserError(error.args[0]) from None
