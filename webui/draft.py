"""The training that is being set up: one text per home, on the server's disk.

A reload, a second tab and the page's other language show the same draft. Each change is applied to the newest text and
not to what a tab had seen, so that two tabs that set different settings both have their way.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_fp8.run import atomic_write

from . import form

_writing = threading.RLock()


class Draft:
    """The draft of one home folder."""

    def __init__(self, home: Path):
        self.home = home
        self.file = home / "drafts" / "new.toml"
        self.before = self.file.with_name("new.before.toml")

    def text(self) -> str:
        """As it stands; an untouched form's before anything was written."""
        try:
            return self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return form.START

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this lasts, nobody else changes a draft."""
        with _writing:
            yield

    def write(self, text: str) -> str:
        """Replace the whole text."""
        return self.change(lambda _: text)

    def replace(self, text: str) -> str:
        """Begin with another text; the one until now can be brought back, unless nothing was set in it."""
        with _writing:
            now = self.text()
            if now not in (form.START, text):
                self._put(self.before, now)
            return self._put(self.file, text)

    def bring_back(self) -> str:
        """The text from before `replace`, and in its place the one until now, so that this can be taken back, too."""
        with _writing:
            now = self.text()
            if self.before.exists():
                self._put(self.file, self.before.read_text(encoding="utf-8"))
                self._put(self.before, now)
            return self.text()

    def replaced(self) -> bool:
        """Whether there is something to bring back."""
        return self.before.exists()

    def put(self, key: str, value: object) -> str:
        """Set one setting. Raises UserError where the text is not TOML."""
        return self.change(lambda text: form.put(text, key, value, self.home))

    def change(self, how: Callable[[str], str]) -> str:
        """The text after this change of it, which nobody else's comes between."""
        with _writing:
            before = self.text()
            after = how(before)
            return self._put(self.file, after) if after != before else after

    @staticmethod
    def _put(file: Path, text: str) -> str:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(file, text.encode())
        return text
