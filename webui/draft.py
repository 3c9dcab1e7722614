"""The training that is being set up: one text per home folder, on the server's disk.

A reload, a second window and the other language show the same draft. Each change is applied to the newest text and not
to what a window had seen, so that two windows can change different settings.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_fp8.common import system
from lora_fp8.common.writing import atomic_write, make_folder, sync_folder

from . import form

_writing = threading.RLock()
_unsaved: dict[Path, str] = {}
"""Texts that could not be written, for example on a full disk. They are kept while the page runs."""


class Draft:
    """The draft of a home folder."""

    def __init__(self, home: Path):
        self.home = home
        self.file = home / "drafts" / "new.toml"
        self.before = self.file.with_name("new.before.toml")
        self.leaving = self.file.with_name("new.leaving.toml")  # on its way from `file` to `before`

    def load_text(self) -> str:
        """Return the text, or that of an untouched form."""
        with _writing:
            if (kept := _unsaved.get(self.file)) is not None:
                return kept
            try:
                return self.file.read_text(encoding="utf-8")
            except FileNotFoundError:
                return form.START

    def save(self) -> None:
        """Write a text that could not be written before. Raises OSError."""
        with _writing:
            if (kept := _unsaved.get(self.file)) is not None:
                self._put(self.file, kept)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep others from changing a draft while this lasts."""
        with _writing:
            yield

    def write(self, text: str) -> str:
        """Replace the whole text."""
        return self.change(lambda _: text)

    def replace(self, text: str) -> str:
        """Start with another text. The present one can be restored, unless nothing was set in it."""
        with _writing:
            now = self.load_text()
            if now in (form.START, text):
                self._finish_exchange()
                return self._put(self.file, text)
            return self._exchange(now, text)

    def restore_earlier(self) -> str:
        """Restore the text from before `replace`. The present one takes its place, so that this can be undone."""
        with _writing:
            earlier = self.read_earlier()
            return self.load_text() if earlier is None else self._exchange(self.load_text(), earlier)

    def read_earlier(self) -> str | None:
        """Return the text that can be restored, or None."""
        with _writing:
            # After a crash between the two writes of `_exchange` the draft has changed, and its previous text is here.
            if self.leaving.exists() and (left := self.leaving.read_text(encoding="utf-8")) != self.load_text():
                return left
            return self.before.read_text(encoding="utf-8") if self.before.exists() else None

    def has_earlier(self) -> bool:
        """Return True if a text can be restored."""
        return self.read_earlier() is not None

    def _exchange(self, now: str, text: str) -> str:
        """Make `text` the draft, and `now` the text to restore. After a crash either both are so or neither."""
        self._finish_exchange()
        self._put(self.leaving, now)
        self._put(self.file, text)
        system.replace(self.leaving, self.before)
        sync_folder(self.before.parent)
        return text

    def _finish_exchange(self) -> None:
        """Finish an `_exchange` that a crash interrupted."""
        if self.leaving.exists():
            if self.leaving.read_text(encoding="utf-8") == self.load_text():
                self.leaving.unlink()
            else:
                system.replace(self.leaving, self.before)

    def put(self, key: str, value: object) -> str:
        """Set a setting and return the new text. Raises UserError if the text is not TOML."""
        return self.change(lambda text: form.put(text, key, value, self.home))

    def change(self, how: Callable[[str], str]) -> str:
        """Apply a change to the newest text and return the result. No other change comes between."""
        with _writing:
            before = self.load_text()
            after = how(before)
            if after != before:
                try:
                    self._finish_exchange()
                    self._put(self.file, after)
                except OSError:
                    _unsaved[self.file] = after
                    raise
            return after

    @staticmethod
    def _put(file: Path, text: str) -> str:
        make_folder(file.parent, 0o700)
        atomic_write(file, text.encode())
        _unsaved.pop(file, None)
        return text
