"""Download what is missing of a base model: with progress, resumable, and each file's checksum verified.

    base = download(describe("owner/name", family="sdxl"), report=print)

Files of Hugging Face go into its own cache, in its layout and under its locks, so that every other program finds them.
The transfer itself is not left to `hf_hub_download`, which begins a file anew after each interruption and does not
compare its hash: here a file grows as SHA256.incomplete, and the next attempt continues it, also after a crash.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.numbers import format_bytes
from ...errors import Message, Stopped, UserError, combine
from . import hosts, places
from .description import BaseDescription
from .transfer import Transfer

WORKERS = 4
"""Number of files that are transferred at the same time."""
TICK = 0.2
"""Seconds between two reports."""
WINDOW = 10.0
"""Seconds over which the speed is measured."""
LAST_WAIT = 2.0
"""Seconds that a cancelled download waits for its threads."""


@dataclass(frozen=True)
class Progress:
    """How far a download is.

    Attributes:
        done: bytes that are on the disk, of those that were missing.
        total: bytes that were missing.
        speed: bytes per second over the last seconds.
        eta: seconds that are left at this speed; None if it is unknown.
        waiting: what is waited for, such as another process or the server's rate limit; "" while bytes arrive.
    """

    done: int
    total: int
    speed: float = 0.0
    eta: float | None = None
    waiting: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the progress as the fields of an event."""
        fields: dict[str, Any] = {"bytes": self.done, "total": self.total, "speed": round(self.speed)}
        fields["eta"] = None if self.eta is None else round(self.eta, 1)
        return fields | ({"waiting": self.waiting} if self.waiting else {})


Report = Callable[[Progress], None]


def download(
    base: BaseDescription, report: Report | None = None, is_cancelled: Callable[[], bool] = lambda: False
) -> BaseDescription:
    """Download the missing files of a base, each verified.

    Args:
        base: its description.
        report: called several times a second with the progress, always in this thread.
        is_cancelled: asked as often; True stops the download, and the next one continues it.

    Returns:
        The description with all files local.

    Raises:
        UserError: the model or a file of it is not accessible, the disk has no room, or downloads are switched off.
        RunFailure: the connection failed again and again, or a file arrived damaged twice.
        Stopped: it was cancelled.
    """
    return download_all([base], report, is_cancelled)[0]


def download_all(
    bases: Sequence[BaseDescription], report: Report | None = None, is_cancelled: Callable[[], bool] = lambda: False
) -> tuple[BaseDescription, ...]:
    """Download the missing files of several bases at once; see `download`."""
    for base in bases:
        _check(base)
    # Small files first: should something be wrong, it shows at once.
    pairs = sorted(((base, file) for base in bases for file in base.missing), key=lambda pair: pair[1].size)
    transfers = [Transfer(hosts.make_host(base.reference, base.branch), base, file) for base, file in pairs]
    if not transfers:
        return tuple(bases)
    _run_all(transfers, report or (lambda progress: None), is_cancelled)
    for base in bases:
        places.remember_branch(base)
    return tuple(map(places.with_local_files, bases))


def _check(base: BaseDescription) -> None:
    """Raise the problem of a download that cannot succeed."""
    if base.problems:
        raise combine(base.problems)
    if not base.missing:
        return
    if hosts.is_offline():
        raise UserError(
            Message(
                "{setting} = {name}: {size} of the model are not on this machine, and HF_HUB_OFFLINE forbids "
                "downloads. Unset it, or copy the model to this machine and give its folder",
                setting=base.reference.settings[0],
                name=repr(base.reference.name),
                size=format_bytes(base.missing_bytes),
            )
        )
    if problem := places.find_disk_problem(base):
        raise UserError(problem)


def _run_all(transfers: list[Transfer], report: Report, is_cancelled: Callable[[], bool]) -> None:
    """Run the transfers on threads while this thread reports, and end them all if one fails or it is cancelled."""
    stop, queue = threading.Event(), deque(transfers)

    def run_queue() -> None:
        while not stop.is_set():
            try:
                transfer = queue.popleft()
            except IndexError:
                return
            transfer.run(stop)

    # Daemons, as a thread may hang in a read until its timeout, and the program need not wait for that.
    threads = [
        threading.Thread(target=run_queue, daemon=True, name="download") for _ in range(min(WORKERS, len(transfers)))
    ]
    meter = _Meter(transfers)
    for thread in threads:
        thread.start()
    try:
        while True:
            alive = [thread for thread in threads if thread.is_alive()]
            if error := next((transfer.error for transfer in transfers if transfer.error), None):
                raise error
            report(meter.read())
            if not alive:
                return
            if is_cancelled():
                raise Stopped(STOPPED)
            alive[0].join(TICK)
    finally:
        stop.set()
        deadline = time.monotonic() + LAST_WAIT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


STOPPED = Message("the download was stopped; the downloaded part is kept, and the next download continues from it")


class _Meter:
    """Measures the progress of all transfers together."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers
        self._total = sum(transfer.file.size for transfer in transfers)
        self._seen: deque[tuple[float, int]] = deque()

    def read(self) -> Progress:
        """Return the present progress; the speed counts the bytes that came over the network."""
        now, received = time.monotonic(), sum(transfer.received for transfer in self._transfers)
        self._seen.append((now, received))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        begun, before = self._seen[0]
        speed = (received - before) / (now - begun) if now > begun else 0.0
        done = sum(min(transfer.done, transfer.file.size) for transfer in self._transfers)
        eta = (self._total - done) / speed if speed > 0 else None
        waiting = [transfer.waiting for transfer in self._transfers if transfer.is_active]
        return Progress(done, self._total, speed, eta, waiting[0] if waiting and all(waiting) else "")
