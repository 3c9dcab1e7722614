"""Turn SIGTERM, Ctrl-C and (on Windows) Ctrl-Break into a stop at the end of the step."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from ..common import system
from ..errors import Message, Stopped

STOPPED_EARLY = Message("stopped before the first step; cached images and captions are kept")


class StopSignal:
    """SIGTERM and Ctrl-C: during training, finish the step, save and exit; at other times, exit at once.

    A second Ctrl-C ends the process in the ordinary way, unless it comes within a second of the first: launchers
    forward a signal that the terminal has already sent to every process.

    Attributes:
        requested: somebody asked to stop.
        at_once: message for stopping at once; None while the end of the step must be waited for.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once: str | None = STOPPED_EARLY
        self._first = 0.0
        self._raised: str | None = None  # the message of the stop that was raised
        self._held = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals inside the block, and restore the previous handlers after it."""
        try:
            before = {number: signal.signal(number, self._handle_signal) for number in system.STOP_SIGNALS}
        except ValueError:  # not the main thread, whose owner handles signals
            yield
            return
        try:
            with self.recognised():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def recognised(self) -> Iterator[None]:
        """Raise Stopped for whatever the block makes of a stop at once.

        The stop is raised wherever the program is, so also in a library or a check that takes any error for one of its
        own, such as a config that cannot be read.
        """
        try:
            yield
        except Exception as error:
            if self._raised is None or isinstance(error, Stopped):
                raise
            raise Stopped(self._raised) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay a stop at once until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self._raise_if_at_once()

    def _handle_signal(self, number: int, frame: Any) -> None:
        if not self.requested:
            self.requested, self._first = True, time.monotonic()
            if self.at_once is None:
                with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
                    os.write(2, b"\nstopping after this step; press Ctrl-C again to end at once\n")
        elif number != signal.SIGTERM and time.monotonic() - self._first >= 1:
            raise KeyboardInterrupt
        self._raise_if_at_once()

    def _raise_if_at_once(self) -> None:
        if self.requested and self.at_once is not None and not self._held and self._raised is None:
            self._raised = self.at_once
            raise Stopped(self.at_once)
