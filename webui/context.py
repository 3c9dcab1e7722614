"""What every page is given."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import words


@dataclass(frozen=True)
class Place:
    """Where the page may read and write, and where its queue is."""

    home: Path
    """queue.db, drafts, thumbnails, the page's own settings"""
    roots: tuple[Path, ...] = field(default=())
    """folders below which files may be looked at: pictures, models, runs; resolved"""


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
