"""Show on stderr how far counted work is: a bar on a terminal, a line every ten seconds in a log.

A job of the queue counts for the page as well, in the file that `COUNT` names: its run has no event log before all
images have been read.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import Message
from .json_files import write_json
from .messages import get_language, translate

LINE_EVERY = 10.0
"""Seconds between two lines in a log."""
COUNT = "LORA_FP8_COUNT"
"""Environment variable with the file that the count is written to."""
WRITE_EVERY = 2.0
"""Seconds between two counts in that file."""
QUIET = 1.0
"""Seconds for which nothing is shown: most work is done by then."""


class CountProgress:
    """Shows "title: 3 of 10".

    Args:
        title: what is counted.
        kind: its name in the file of `COUNT`; "" writes none.
    """

    def __init__(self, title: Message, kind: str = "") -> None:
        self._file = Path(place) if kind and (place := os.environ.get(COUNT)) else None
        self._kind, self._written = kind, 0.0
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
        self._write(now, done, total)
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

    def _write(self, now: float, done: int, total: int) -> None:
        if self._file is None or (now - self._written < WRITE_EVERY and done != total):
            return
        self._written = now
        content = {"stage": self._kind, "done": done, "total": total}
        with contextlib.suppress(OSError):  # a count is not worth a job
            write_json(self._file, content, indent=None)


def show_images() -> CountProgress:
    """Return the progress of decoding images."""
    return CountProgress(Message("reading the images"), "images")
