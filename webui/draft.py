"""The training that is being set up: one text per home, on the server's disk.

A reload, a second tab and the page's other language show the same draft. Each change is applied to the newest text and
not to what a tab had seen, so that two tabs that set different settings both have their way.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from lora_fp8.run import atomic_write

from . import form

_writing = threading.Lock()


class Draft:
    """The draft of one home folder."""

    def __init__(self, home: Path):
        self.home = home
        self.file = home / "drafts" / "new.toml"

    def text(self) -> str:
        """As it stands; an untouched form's before anything was written."""
        try:
            return self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return form.START

    def write(self, text: str) -> str:
        """Replace the whole text."""
        return self.change(lambda _: text)

    def put(self, key: str, value: object) -> str:
        """Set one setting. Raises UserError where the text is not TOML."""
        return self.change(lambda text: form.put(text, key, value, self.home))

    def change(self, how: Callable[[str], str]) -> str:
        """The text after this change of it, which nobody else's comes between."""
        with _writing:
            before = self.text()
            after = how(before)
            if after != before:
                self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                atomic_write(self.file, after.encode())
            return after
