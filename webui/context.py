"""What every page works on: `Place` (allowed folders, settings) and `Ui` (language, links)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import tomlkit

from lora_fp8.common import reading
from lora_fp8.common.writing import atomic_write, make_folder
from lora_fp8.config import read_toml
from lora_fp8.data.image_edits import NOTHING, WHOLE, ImageEdit
from lora_fp8.errors import Message, UserError, needs_repair

from . import sanitize, translations

OWN_FOLDERS = ("datasets", "runs", "presets", "cache", "tools", "drawings")
"""Folders below the page's home that belong to the user and may be named like allowed folders."""
SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/boot") + tuple(
    os.environ[name]
    for name in ("SystemRoot", "ProgramFiles", "ProgramFiles(x86)", "ProgramData")
    if name in os.environ
)
"""Folders that are never allowed, nor anything in them, except folders in IN_MEMORY."""
IN_MEMORY = Path("/dev/shm")
"""Linux's file system in memory, where people put images that are read often."""


class Place:
    """Where the page may read and write, and where its queue is.

    Args:
        home: holds queue.db, drafts, thumbnails and the page's own settings.
        roots: folders below which files may be named: images, models, runs. Those of the settings are added.
        fixed: the page may not add folders. This is so where it listens to other machines.
    """

    def __init__(self, home: Path, roots: Iterable[Path] = (), fixed: bool = False):
        self.home = home.resolve()
        self.given = tuple(root.resolve() for root in roots)
        self.fixed = fixed
        self._settings: tuple[tuple[int, ...], dict[str, Any]] = ((), {})

    @property
    def settings_file(self) -> Path:
        """Return the page's own settings: allowed folders and folders for models."""
        return self.home / "settings.toml"

    def read_settings(self) -> dict[str, Any]:
        """Return the content of the settings file, which is read again if it has changed.

        Raises:
            UserError: it is not TOML.
        """
        try:
            status = self.settings_file.stat()
        except FileNotFoundError:
            return {}
        # The time alone is not enough: two writes may fall into one tick of the file system's clock.
        version = (status.st_mtime_ns, status.st_ino, status.st_size)
        if version != self._settings[0]:
            try:
                content = read_toml(reading.load_text(self.settings_file))
            except ValueError as error:
                raise needs_repair(self.settings_file, str(error)) from None
            self._settings = (version, content)
        return self._settings[1]

    def write_settings(self, **values: Any) -> None:
        """Write these settings; others stay."""
        make_folder(self.home, 0o700)
        atomic_write(self.settings_file, tomlkit.dumps({**self.read_settings(), **values}).encode())

    @property
    def added(self) -> tuple[Path, ...]:
        """Return the allowed folders that were added on the Settings page."""
        return tuple(Path(text) for text in self.read_settings().get("roots", ()))

    @property
    def models(self) -> tuple[Path, ...]:
        """Return the folders for base models that were added on the Settings page."""
        return tuple(Path(text) for text in self.read_settings().get("models", ()))

    @property
    def roots(self) -> tuple[Path, ...]:
        """Return the folders below which files may be read and written, resolved."""
        own = (self.home / part for part in OWN_FOLDERS)
        return tuple(dict.fromkeys([*self.given, *self.added, *self.models, *own]))

    def resolve(self, text: str | os.PathLike[str]) -> Path:
        """Resolve a path that must lie below an allowed folder. Raises UserError."""
        return sanitize.resolve_inside(os.fspath(text), self.roots, private=self.home)

    def add_root(self, text: str) -> Path:
        """Allow the page to use this folder.

        Raises:
            UserError: it does not exist, it belongs to the system, or this page may not add folders.
        """
        return self._add_to_list("roots", self.added, self._check_new_root(text))

    def may_add_root(self, text: str) -> bool:
        """Return True for a folder that the page may not use yet, and that `add_root` accepts."""
        try:
            path = self._check_new_root(text)
        except UserError:
            return False
        return not any(path.is_relative_to(root) for root in self.roots)

    def remove_root(self, text: str) -> None:
        """Remove an allowed folder from the settings. Nothing in it is touched."""
        self._remove_from_list("roots", self.added, text)

    def add_models(self, text: str) -> Path:
        """Look for base models in this folder, which becomes an allowed folder.

        Raises:
            UserError: as `add_root`. A folder below an allowed folder may always be added.
        """
        path = sanitize.resolve_path(text)
        if not (path.is_dir() and any(path.is_relative_to(root) for root in self.roots)):
            path = self._check_new_root(text)
        return self._add_to_list("models", self.models, path)

    def remove_models(self, text: str) -> None:
        """Stop looking for base models in this folder. Nothing in it is touched."""
        self._remove_from_list("models", self.models, text)

    def _add_to_list(self, name: str, held: Iterable[Path], path: Path) -> Path:
        self.write_settings(**{name: [str(folder) for folder in dict.fromkeys([*held, path])]})
        return path

    def _remove_from_list(self, name: str, held: Iterable[Path], text: str) -> None:
        self.write_settings(**{name: [str(folder) for folder in held if str(folder) != text]})

    def _check_new_root(self, text: str) -> Path:
        if self.fixed:
            raise UserError(
                Message(
                    "this page is open to other machines, so folders can only be named when it is started, with --root"
                )
            )
        path = sanitize.resolve_path(text)
        sanitize.require_folder(path, text)
        if path == Path(path.anchor) or path.name == ".ssh" or _is_system_folder(path):
            raise UserError(
                Message(
                    "{text}: this is the whole disk or a system folder; name the folder that you work in",
                    text=sanitize.shorten(text),
                )
            )
        if path.is_relative_to(self.home):
            raise UserError(
                Message(
                    "{text}: this is the program's data folder, which the page can already use",
                    text=sanitize.shorten(text),
                )
            )
        return path


def _is_system_folder(path: Path) -> bool:
    return IN_MEMORY not in path.parents and any(path.is_relative_to(folder) for folder in SYSTEM)


@dataclass(frozen=True)
class Ui:
    """A language and the place that pages work on. One per language, made when the site is built."""

    language: str
    place: Place

    def say(self, key: str, **values: Any) -> str:
        """Return the text of this key in the page's language."""
        return translations.say(self.language, key, **values)

    def translate(self, line: str) -> str:
        """Translate a message of the engine to the page's language. Plain text, such as a name, stays as it is."""
        return translations.translate(self.language, line)

    def resolve_path(self, text: str | os.PathLike[str]) -> Path:
        """Resolve a path that somebody typed. Raises UserError if the page may not use it."""
        return self.place.resolve(text)

    def make_link(self, page: str, **query: str) -> str:
        """Return the address of a page in this language: link("run", run="cat")."""
        return f"/{self.language}/{page}" + (f"?{_encode_query(query)}" if query else "")

    def make_picture_link(self, path: Path, width: int = 0, moving: bool = False, edit: ImageEdit = NOTHING) -> str:
        """Return the address of an image as WebP, at most `width` pixels wide and high; 0 is its size, within limits.

        A video gives its first frame. An animation with `moving` gives all frames. A still image is turned and cropped
        as `edit` says.
        """
        query = {"path": str(path), **({"width": str(width)} if width else {}), **({"moving": "1"} if moving else {})}
        query |= {"rotate": str(edit.rotate)} if edit.rotate else {}
        query |= {"crop": ",".join(map(repr, edit.crop))} if edit.crop != WHOLE else {}
        return f"/picture?{_encode_query(query)}"

    def make_download_link(self, path: Path) -> str:
        """Return the address that sends a file as a download. Its suffix must be in `file_routes.SENT`."""
        return f"/download?{_encode_query({'path': str(path)})}"

    def make_report_link(self, folder: Path) -> str:
        """Return the address that sends the report of a run as a download."""
        return f"/report?{_encode_query({'run': str(folder), 'language': self.language})}"


def _encode_query(query: dict[str, str]) -> str:
    # A folder's name may hold bytes that are not UTF-8: they are kept.
    return urlencode(query, errors="surrogateescape")
