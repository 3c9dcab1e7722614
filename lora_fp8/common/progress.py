"""Show on stderr how far counted work is: a bar on a terminal, a line every ten seconds in a log."""

import sys
import time
from typing import Any

from tqdm import tqdm

from ..errors import Message
from .messages import get_language, translate

LINE_EVERY = 10.0
"""Seconds between two lines in a log."""
QUIET = 1.0
"""Seconds for which nothing is shown: most work is done by then."""


class CountProgress:
    """Shows "title: 3 of 10".

    Args:
        title: what is counted.
    """

    def __init__(self, title: Message) -> None:
        self._title, self._began = translate(get_language(), title), time.monotonic()
        self._line = self._began
        self._bar: tqdm[Any] | None = None

    def show(self, done: int) -> None:
        """Show that this many are done, of an unknown number."""
        now = time.monotonic()
        if now - self._line >= LINE_EVERY:
            self._line = now
            line = Message("{title}: {done}", title=self._title, done=done)
            print(translate(get_language(), line), file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done; the last one ends the display."""
        now = time.monotonic()
        if self._bar is None and now - self._began < QUIET:
            return
        if not sys.stderr.isatty():
            if now - self._line >= LINE_EVERY:
                self._line = now
                line = Message("{title}: {done} of {total}", title=self._title, done=done, total=total)
                print(translate(get_language(), line), file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = tqdm(total=total, desc=self._title, leave=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
            self._bar, self._began = None, now


def show_images() -> CountProgress:
    """Return the progress of decoding images."""
    return CountProgress(Message("reading the images"))
