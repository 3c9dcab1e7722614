"""The folder of a drawing: images that `lora-fp8 draw` made of one prompt, for several strengths and LoRAs.

    <folder>/  .lora-fp8-drawing  drawing.json  000.png  001.png  ...  grid.png

* `.lora-fp8-drawing` marks the folder as one that we created.
* `drawing.json` says what is drawn, with what, and which images are finished; it is replaced with every image.

Standard library only: the web page reads drawings without torch.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from ..common.json_files import read_json, write_json
from ..common.writing import make_folder
from ..errors import Message, UserError, cannot_read, cannot_write
from . import ownership

MARKER = ".lora-fp8-drawing"
RECORD = "drawing.json"
GRID = "grid.png"
_OURS = re.compile(r"drawing\.json|\d{3,}\.(png|webp)|grid\.png|\..+\.\d+\.tmp")


def require_free(folder: Path) -> None:
    """Refuse a folder that is neither absent nor empty. Writes nothing.

    Raises:
        UserError: something is in it.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_read(folder, error) from None
    if names:
        raise UserError(
            Message(
                "{path}: drawing needs a new or empty folder, but this one contains {entries}",
                path=folder,
                entries=ownership.format_entries(names),
            )
        )


def create(folder: Path) -> None:
    """Create and mark the folder of a drawing.

    Raises:
        UserError: it is not free, or cannot be made.
    """
    require_free(folder)
    try:
        make_folder(folder)
        with open(folder / MARKER, "x", encoding="utf-8") as file:
            file.write('{"version": 1}\n')
    except OSError as error:
        raise cannot_write(error.filename or folder, error) from None


def write(folder: Path, record: dict[str, Any]) -> None:
    """Replace the record of a drawing."""
    write_json(folder / RECORD, record)


def is_drawing(folder: Path) -> bool:
    """Return True if a folder was made by `create`; a link to one is none."""
    return not folder.is_symlink() and (folder / MARKER).is_file() and not (folder / MARKER).is_symlink()


def read(folder: Path) -> dict[str, Any]:
    """Return the record of a drawing; {} before there is one, or if it is damaged."""
    try:
        record = read_json(folder / RECORD)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def remove(folder: Path) -> list[str]:
    """Delete a drawing. Return the names of what we did not write, which is left.

    Raises:
        UserError: the folder is no drawing.
    """
    if not is_drawing(folder):
        raise UserError(Message("{path}: this is not a drawing of this program; nothing was deleted", path=folder))
    with os.scandir(folder) as entries:
        names = sorted(entries, key=lambda entry: entry.name)
    left = [entry.name for entry in names if entry.name != MARKER and not _is_ours(entry)]
    for entry in names:
        if entry.name != MARKER and _is_ours(entry):
            Path(entry.path).unlink(missing_ok=True)
    (folder / MARKER).unlink(missing_ok=True)  # last, so that an interrupted removal can be repeated
    if not left:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return left


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    return bool(_OURS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
