"""Check the files that a call names: only uploads of the same window, and only where files are accepted.

Gradio looks for descriptions of files in every value of every call, copies the files that they name into its own
folder, and downloads addresses. So each call is checked here, before Gradio sees it (error_boundary.py); no handler can
forget it.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from lora_fp8.errors import Message, Template, UserError

from . import sanitize

HEADER = "x-lora-fp8-page"
"""Names the window that sends a request. static/ask.js makes a random name for each page that is opened."""
PAGE: ContextVar[str] = ContextVar("page", default="")
"""The window of the request that is being answered."""
NEVER = (".svg", ".svgz")
"""Kinds that Gradio would serve for display, with the scripts in them."""
META = {"_type": "gradio.FileData"}


class Uploads(set):
    """Paths of uploads, as Gradio keeps them, and the windows that sent each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, set[str]] = {}

    def update(self, *files: Iterable[Any]) -> None:
        """Add files that were just uploaded."""
        paths = [str(file) for given in files for file in given]
        super().update(paths)
        for path in paths:
            self._windows.setdefault(path, set()).add(PAGE.get())

    def check(self, parts: Sequence[Any], values: Sequence[Any], window: str) -> list[Any]:
        """Check the values of a call. Files among them must be uploads of this window.

        Args:
            parts: the components that take the values.
            values: one for each component; further ones are passed on.
            window: the name that was sent with the call.

        Raises:
            UserError: a value names any other file, or a component that accepts no files is given one.
        """
        checked = list(values)
        for number, (part, value) in enumerate(zip(parts, values, strict=False)):
            if isinstance(part, gr.File):
                checked[number] = self._check_files(part, value, window)
            elif _names_file(value):
                raise UserError(
                    Message("{text}: files are not accepted here", text=part.elem_id or part.get_block_name())
                )
        return checked

    def _check_files(self, part: gr.File, value: Any, window: str) -> Any:
        if value is None:
            return None
        is_single = part.file_count == "single"
        if isinstance(value, list) == is_single:
            template = (
                Template("{text}: only one file is accepted")
                if is_single
                else Template("{text}: a list of files is expected")
            )
            raise UserError(template(text=part.elem_id or part.get_block_name()))
        files = [self._check_file(part, given, window) for given in ([value] if is_single else value)]
        return files[0] if is_single else files

    def _check_file(self, part: gr.File, given: Any, window: str) -> dict[str, Any]:
        """Return a description of an upload that holds nothing but what was checked."""
        path = given.get("path") if isinstance(given, dict) else None
        if not isinstance(path, str) or given.get("meta") != META:
            raise UserError(Message("this is not the description of an uploaded file"))
        kinds = [kind for kind in part.file_types or () if kind.startswith(".")]
        suffix = Path(path).suffix.lower()
        if (kinds and suffix not in kinds) or suffix in NEVER:
            raise UserError(
                Message("{text}: files of this kind are not accepted here", text=sanitize.shorten(Path(path).name))
            )
        if path not in self or window not in self._windows.get(path, ()) or not _lies_in_uploads(path):
            raise UserError(
                Message("{text}: was not uploaded in this window; choose the file again", text=sanitize.shorten(path))
            )
        return {"path": path, "orig_name": Path(path).name, "size": os.path.getsize(path), "meta": META}


def _lies_in_uploads(path: str) -> bool:
    """Return True for a regular file in a folder of the upload folder, with no link on the way to it."""
    folder = Path(get_upload_folder()).resolve()
    wanted = folder / Path(path).parent.name / Path(path).name
    try:
        return Path(path).resolve(strict=True) == wanted and stat.S_ISREG(os.lstat(wanted).st_mode)
    except (OSError, RuntimeError, ValueError):  # deleted; a loop of links (RuntimeError before Python 3.13); a NUL
        return False


def _names_file(value: Any) -> bool:
    """Return True if nested data contains anything like a description of a file."""
    waiting = [value]
    while waiting:
        value_inside = waiting.pop()
        if isinstance(value_inside, dict):
            if "path" in value_inside or "meta" in value_inside:
                return True
            waiting += value_inside.values()
        elif isinstance(value_inside, list | tuple):
            waiting += value_inside
    return False
