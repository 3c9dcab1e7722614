"""Waiting in tests: for a state, never for a time."""

import time
from collections.abc import Callable
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
