"""Change which images of a folder are excluded, and how they are turned and cropped; see `image_edits`.

A change is written into the folder's list as an edit of `captions`, which is undone like one of the captions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import Message, Plural, UserError, UserErrors, first_few
from . import captions, clips, image_edits
from .decoding import EXTENSIONS
from .image_edits import NOTHING, TURNS, WHOLE, Box, ImageEdit


@dataclass(frozen=True)
class ImageChange:
    """A change of images' edits. One of its attributes is set.

    Attributes:
        exclude: True leaves the images out of training, False takes them in again.
        turn: degrees clockwise, beyond those that they are turned already: 90, 180 or 270.
        crop: what is kept of the turned images; `image_edits.WHOLE` keeps all.
    """

    exclude: bool | None = None
    turn: int = 0
    crop: Box | None = None

    def __post_init__(self) -> None:
        if self.turn and self.turn not in TURNS:
            raise UserError(Message("turn is {given}; use 90, 180 or 270 (degrees clockwise)", given=repr(self.turn)))

    def apply_to(self, edit: ImageEdit) -> ImageEdit:
        """Return the changed edit of one image."""
        if self.exclude is not None:
            return replace(edit, exclude=self.exclude)
        return edit.turn(self.turn) if self.turn else replace(edit, crop=self.crop or WHOLE)

    def describe(self, names: Sequence[str]) -> Message:
        """Say what is done to these images."""
        if self.exclude:
            text = Plural(
                "{count} image excluded from training: {name}", "{count} images excluded from training: {names}"
            )
        elif self.exclude is False:
            text = Plural("{count} image included again: {name}", "{count} images included again: {names}")
        elif self.turn:
            text = Plural("{name} turned", "{count} images turned: {names}")
        else:
            text = Plural("{name} cropped", "{count} images cropped: {names}")
        return text(count=len(names), name=names[0] if names else "", names=first_few(names))


def list_excluded(folder: Path, edits: Mapping[str, ImageEdit]) -> list[str]:
    """List the images of a folder that its list excludes and that exist, sorted by name."""
    root = folder.resolve()
    return sorted(name for name, edit in edits.items() if edit.exclude and _is_image(root, name))


def list_images(folder: Path) -> list[str]:
    """List the images and videos of a folder by relative name, those that are excluded among them, sorted.

    Raises:
        UserError: the folder or its list of edits cannot be read, or it has no images.
    """
    excluded = list_excluded(folder, image_edits.read(folder))
    try:
        return sorted({*captions.list_caption_files(folder), *excluded})
    except UserErrors:
        if not excluded:
            raise
        return excluded  # all of them


def _is_image(root: Path, name: str) -> bool:
    # The list may come with a dataset: its names are not trusted.
    path = Path(os.path.realpath(root / name))
    return path.is_relative_to(root) and path.suffix.lower() in (*EXTENSIONS, *clips.VIDEOS) and path.is_file()


def change_images(folder: Path, names: Collection[str], change: ImageChange) -> captions.Edit:
    """Change the edits of images in the folder's list; nothing is written if they are so already.

    Args:
        folder: the dataset folder.
        names: relative names of its images.
        change: what is done to each.

    Raises:
        UserError: the list cannot be read or written.
    """
    edits = image_edits.read(folder)
    wanted = {name: change.apply_to(edits.get(name, NOTHING)) for name in names}
    edit = captions.assign_images(folder, wanted, change.describe(list(names)))
    if edit.changes:
        captions.apply(folder, edit)
    return edit
