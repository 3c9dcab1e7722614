"""Standard streams that are closed, or cannot be written: the disk is full, the terminal or the reader is gone.

A command whose result is what it prints fails with that reason. Training and other work goes on, as its results are
files; where output can be written again, it says that some was lost. A full disk behind stderr ends no command.
"""

import errno
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any

LOST = b"... what was printed here is lost\n"
_works = False
"""True while a command runs that is decorated with `works`."""


class _Output(io.FileIO):
    """Standard output or standard error of a process, by its file descriptor."""

    def __init__(self, descriptor: int, title: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title, self._may_be_lost, self._has_lost = title, descriptor == 2, False

    def write(self, data: Any) -> int | None:  # type: ignore[override]  # the buffer hands over memory
        try:
            if self._has_lost:
                super().write(LOST)
                self._has_lost = False
            return super().write(data)
        except OSError as error:
            is_known, self._has_lost = self._has_lost, True
            # Who closes the pipe of the progress, such as the page, waits for no answer any more.
            may_be_lost = self._may_be_lost and error.errno != errno.EPIPE
            if not (is_known or _works or may_be_lost):
                error.filename = self._title
                raise
            return len(data)


def prepare_streams() -> None:
    """Give this process an output that can be written in any state of its standard streams.

    Python sets a stream to None if it was closed when the process started, as by some service managers. Characters
    that a terminal lacks are escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            binary: Any = stream.buffer
            raw = getattr(binary, "raw", binary)  # the same with PYTHONUNBUFFERED
            # A Windows console has a writer of its own, and tests read streams of their own.
            if stream is getattr(sys, f"__{name}__") and type(raw) is io.FileIO:
                output = _Output(stream.fileno(), f"<{name}>")
                text = io.TextIOWrapper(
                    output if binary is raw else io.BufferedWriter(output),
                    stream.encoding,
                    "backslashreplace",
                    line_buffering=stream.line_buffering,
                    write_through=stream.write_through,
                )
                setattr(sys, name, text)


def works(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose result is not what it prints: it goes on if nothing can be printed."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        global _works
        _works = True
        try:
            command(*arguments, **options)
        finally:
            sys.stdout.flush()
            _works = False

    return run
