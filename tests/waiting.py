"""Waiting in tests: for a state, never for a time."""

import os
import signal
import time
from collections.abc import Callable
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
