"""Waiting in tests: for a state, never for a time."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG_SECONDS = 600
"""A state comes or it does not: this long only so that a test that fails ends, on a machine however busy."""


def wait_until(condition: Callable[[], Any], what: Callable[[], object] = lambda: "", poll: float = 0.02) -> Any:
    """Return what `condition` returns once that is true.

    Args:
        what: is asked for the message if it never is.
        poll: seconds between two questions.
    """
    deadline = time.monotonic() + LONG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, what() or "what was waited for did not come"
        time.sleep(poll)
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


@dataclass(frozen=True)
class Held:
    """A process that is stopped, and goes on only as far as the test wants, however slow the test is."""

    pid: int

    def run_until(self, condition: Callable[[], Any], what: Callable[[], object] = lambda: "") -> None:
        """Let the process run until something is true, which must be quick to ask."""
        os.kill(self.pid, signal.SIGCONT)
        try:
            wait_until(condition, what, poll=0.002)
        finally:
            os.kill(self.pid, signal.SIGSTOP)

    def is_sent(self, number: signal.Signals) -> bool:
        """Return True if the signal waits for the process, or another program has let it go on, or it has ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return True
        fields = dict(line.split(":", 1) for line in status.splitlines())
        pending = int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)
        return bool(pending >> number - 1 & 1) or not fields["State"].strip().startswith("T")


@contextlib.contextmanager
def held(pid: int) -> Iterator[Held]:
    """Stop a process; it goes on at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield Held(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


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
