"""What every page is given."""

import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import tomlkit

from lora_fp8.config import UserError
from lora_fp8.run import atomic_write

from . import safe, words

OWN_FOLDERS = ("datasets", "runs", "presets", "cache", "tools")
"""Folders below the page's home that belong to the person, and may be named as those below a root."""
SYSTEM = ("/etc", "/proc", "/sys", "/dev", "/boot")
"""Folders that are never roots, nor is anything in them."""


class Place:
    """Where the page may read and write, and where its queue is.

    Args:
        home: queue.db, drafts, thumbnails, the page's own settings.
        roots: folders below which files may be named: pictures, models, runs. Those of the settings come on top.
        fixed: the page may not add roots; so where it listens to other machines.
    """

    def __init__(self, home: Path, roots: Iterable[Path] = (), fixed: bool = False):
        self.home = home.resolve()
        self.given = tuple(root.resolve() for root in roots)
        self.fixed = fixed
        self._settings: tuple[int, dict[str, Any]] = (-1, {})

    @property
    def settings_file(self) -> Path:
        """The page's own settings: roots, folders for models."""
        return self.home / "settings.toml"

    def settings(self) -> dict[str, Any]:
        """What the settings file holds, read again when it has changed.

        Raises:
            UserError: it is not TOML.
        """
        try:
            changed = self.settings_file.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._settings[0]:
            try:
                found = tomllib.loads(self.settings_file.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{self.settings_file}: {error}; mend it or remove it") from None
            self._settings = (changed, found)
        return self._settings[1]

    def keep(self, **values: Any) -> None:
        """Write these settings; others stay."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(self.settings_file, tomlkit.dumps({**self.settings(), **values}).encode())

    @property
    def added(self) -> tuple[Path, ...]:
        """The roots that were added on the Settings page."""
        return tuple(Path(text) for text in self.settings().get("roots", ()))

    @property
    def models(self) -> tuple[Path, ...]:
        """The folders for base models that were added on the Settings page."""
        return tuple(Path(text) for text in self.settings().get("models", ()))

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders below which files may be read and written; resolved."""
        own = (self.home / part for part in OWN_FOLDERS)
        return tuple(dict.fromkeys([*self.given, *self.added, *self.models, *own]))

    def inside(self, text: str | os.PathLike[str]) -> Path:
        """The path that the text names, resolved, if it lies below a root. Raises UserError."""
        return safe.inside(os.fspath(text), self.roots, private=self.home)

    def add_root(self, text: str) -> Path:
        """Let the page use this folder, from now on.

        Raises:
            UserError: it is no folder that exists, it belongs to the system, or this page may not add any.
        """
        return self._keep_with("roots", self.added, self._new_root(text))

    def remove_root(self, text: str) -> None:
        """Take a folder that was added back; nothing in it is touched."""
        self._keep_without("roots", self.added, text)

    def add_models(self, text: str) -> Path:
        """Look for base models in this folder, from now on; the page may use it as a root.

        Raises:
            UserError: as `add_root`. A folder below a root that there is already may always be added.
        """
        path = safe.resolved(text)
        if not (path.is_dir() and any(path.is_relative_to(root) for root in self.roots)):
            path = self._new_root(text)
        return self._keep_with("models", self.models, path)

    def remove_models(self, text: str) -> None:
        """Look for base models there no longer; nothing in it is touched."""
        self._keep_without("models", self.models, text)

    def _keep_with(self, name: str, held: Iterable[Path], path: Path) -> Path:
        self.keep(**{name: [str(one) for one in dict.fromkeys([*held, path])]})
        return path

    def _keep_without(self, name: str, held: Iterable[Path], text: str) -> None:
        self.keep(**{name: [str(one) for one in held if str(one) != text]})

    def _new_root(self, text: str) -> Path:
        if self.fixed:
            raise UserError("this page answers other machines: folders are named when it is started, with --root")
        path = safe.resolved(text)
        if not path.is_dir():
            raise UserError(f"{safe.shorter(text)}: there is no such folder")
        if path == Path("/") or path.name == ".ssh" or any(path.is_relative_to(folder) for folder in SYSTEM):
            raise UserError(f"{safe.shorter(text)}: the whole disk or a folder of the system; name the one you work in")
        if path.is_relative_to(self.home):
            raise UserError(f"{safe.shorter(text)}: the page's own folder, which it uses already")
        return path


@dataclass(frozen=True)
class Ui:
    """The language of a page and what it works on. One per language, made when the site is built."""

    language: str
    place: Place

    def say(self, key: str, **values: Any) -> str:
        """The sentence of this key in the page's language."""
        return words.say(self.language, key, **values)

    def tell(self, line: str) -> str:
        """A line of the engine in the page's language, where it is known."""
        return words.tell(self.language, line)

    def path(self, text: str | os.PathLike[str]) -> Path:
        """The path that somebody typed, resolved, if the page may use it. Raises UserError."""
        return self.place.inside(text)

    def link(self, page: str, **query: str) -> str:
        """Address of a page in this language: link("run", run="cat")."""
        return f"/{self.language}/{page}" + (f"?{_encoded(query)}" if query else "")

    def picture(self, path: Path, width: int = 0, moving: bool = False) -> str:
        """Address of a picture as WebP, at most so wide and high; 0 is its own size, within limits.

        Of a video it is the first frame; an animation that is asked for as `moving` moves.
        """
        query = {"path": str(path), **({"width": str(width)} if width else {}), **({"moving": "1"} if moving else {})}
        return f"/picture?{_encoded(query)}"

    def download(self, path: Path) -> str:
        """Address that sends a file (its suffix one of `files.SENT`) to be saved."""
        return f"/download?{_encoded({'path': str(path)})}"


def _encoded(query: dict[str, str]) -> str:
    # A folder's name may hold bytes that are no UTF-8: they stay what they are.
    return urlencode(query, errors="surrogateescape")
