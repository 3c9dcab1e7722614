"""Waiting in tests: for a state, never for a time."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LONG_SECONDS = 600
"""A state comes or it does not: this long only so that a test that fails ends, on a machine however busy."""


def wait_until(condition: Callable[[], Any], what: Callable[[], object] = lambda: "") -> Any:
    """Return what `condition` returns once that is true.

    Args:
        what: is asked for the message if it never is.
    """
    deadline = time.monotonic() + LONG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, what() or "what was waited for did not come"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Let a process run for a tenth of the time: it does the same as ever, and leaves the processor to the test."""
    over = threading.Event()

    def alternate() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.9)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.1)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_worker(home: Path) -> None:
    """End the worker of this home, if there is one.

    One that is starting or leaving is alive without an id, 0. Sent to 0, the signal would end every process of the
    test run, and stop the trainings of their tests.
    """
    from lora_fp8 import jobs

    while (worker := jobs.find_worker(home)) and not worker.pid:
        time.sleep(0.02)
    if worker:
        os.kill(worker.pid, signal.SIGTERM)
