"""Transfer one file: from where an earlier attempt ended, with as many attempts as it takes, and compare its hash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import Message, RunFailure, UserError, reason
from . import places
from .description import BaseDescription, BaseFile
from .hosts import Host, NoAnswer
from .remembered import RemoteFile

ATTEMPTS = 6
"""Number of failures in a row, without a new byte between them, after which a file is given up."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds that are waited before the second attempt, and before any, unless the server asks for another number."""
LONGEST_LIMIT = 900.0
"""Most seconds that a server's rate limit may ask for."""
TICK = 0.2
"""Seconds after which a wait looks whether the download was cancelled."""
BLOCK = 1 << 20


class Cancelled(Exception):
    """The whole download ends."""


class Retry(Exception):
    """An attempt failed, and another may succeed.

    Attributes:
        reason: for people.
        seconds: what the server asks to wait for; None if it asks for nothing.
    """

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.seconds = reason, seconds


class Transfer:
    """The transfer of one file, run by a thread; the main thread reads its attributes.

    Attributes:
        done: bytes on the disk.
        received: bytes that came over the network.
        waiting: what is waited for, such as another process or the server's rate limit; "" while bytes arrive.
        is_active: a thread works on it.
        error: why it failed; None so far.
    """

    def __init__(self, host: Host, description: BaseDescription, file: BaseFile) -> None:
        self.file = file
        self._host, self._description = host, description
        self._place = places.find_place(description, file)
        self.done, self.received = min(places.read_size(self._place.incomplete), file.size), 0
        self.waiting, self.is_active = "", False
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._hash = hashlib.sha256()

    def run(self, stop: threading.Event) -> None:
        """Transfer the file; an error is kept for the main thread."""
        self._stop, self.is_active = stop, True
        try:
            if self._description.reference.kind == "hub" and self.file.sha256 is None:
                self._host.fetch_small(self._description.revision, [RemoteFile(*self.file[:3])])
            else:
                self._put()
                places.link(self._place)
            self.done = self.file.size
        except Cancelled:
            pass
        except Exception as error:
            self.error = self._explain(error)
        finally:
            self.is_active = False

    def _put(self) -> None:
        """Put the verified file into its place, unless somebody else has done so meanwhile."""
        target, incomplete = self._place.target, self._place.incomplete
        for path in (target, incomplete, self._place.lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if not places.has_size(target, self.file.size):
                self._fetch_verified()
                os.replace(incomplete, target)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the file, which huggingface_hub takes too; wait while another process transfers it."""
        from filelock import Timeout
        from huggingface_hub.utils import WeakFileLock

        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(WeakFileLock(self._place.lock, timeout=TICK))
                    break
                except Timeout:
                    self.waiting = Message("another process is downloading the same file")
                    self.done = min(places.read_size(self._place.incomplete), self.file.size)
                    self._raise_if_stopped()
            self.waiting = ""
            yield

    def _fetch_verified(self) -> None:
        """Fetch the file into `incomplete`, and a second time if its content is wrong."""
        for is_last in (False, True):
            self._fetch()
            if self.file.sha256 in (None, self._hash.hexdigest()):
                return
            self._restart()  # the wrong part may have been left by another program
            if is_last:
                raise RunFailure(
                    Message(
                        "{file} of {name} arrived damaged twice: its SHA-256 is not {expected}. A proxy or mirror "
                        "may have changed it; try another network or HF_ENDPOINT",
                        file=self.file.path,
                        name=self._description.reference.name,
                        expected=self.file.sha256,
                    )
                )

    def _restart(self) -> None:
        """Forget what has arrived."""
        self._place.incomplete.unlink(missing_ok=True)
        self.done, self._hash = 0, hashlib.sha256()

    def _fetch(self) -> None:
        """Fetch what is missing of the file, with as many attempts as that takes, and hash all of it."""
        if places.read_size(self._place.incomplete) > self.file.size:
            self._restart()
        self._hash_earlier()
        failures = 0
        while self.done < self.file.size:
            before = self.received
            try:
                self._receive()
            except Retry as retry:
                failures = 1 if self.received > before else failures + 1
                if failures >= ATTEMPTS or (retry.seconds or 0) > LONGEST_LIMIT:
                    raise self._give_up(retry.reason) from retry
                self._wait(retry, failures)
        with open(self._place.incomplete, "ab") as stream:
            os.fsync(stream.fileno())

    def _hash_earlier(self) -> None:
        """Hash what an earlier attempt has left."""
        self.done, self._hash = places.read_size(self._place.incomplete), hashlib.sha256()
        if not self.done:
            return
        self.waiting = Message("verifying the part that was downloaded before")
        with open(self._place.incomplete, "rb") as stream:
            while block := stream.read(BLOCK):
                self._hash.update(block)
                self._raise_if_stopped()
        self.waiting = ""

    def _receive(self) -> None:
        """Receive bytes from where the file ends, until it is complete.

        Raises:
            Retry: the connection ended early, or the server could not answer now.
        """
        address, fields = self._host.make_address(self._description.revision, self.file.path)
        with open_stream(address, fields, self.done) as response:
            if is_from_start(response, self.file.size, self.done):  # the server ignores ranges
                self._restart()
            with open(self._place.incomplete, "ab") as stream:
                for block in response.iter_raw():
                    self._raise_if_stopped()
                    if self.done + len(block) > self.file.size:
                        raise Retry(Message("more bytes arrived than were announced"))
                    stream.write(block)
                    stream.flush()  # others see how far it is, and a crash loses nothing
                    self._hash.update(block)
                    self.done += len(block)
                    self.received += len(block)

    def _wait(self, retry: Retry, failures: int) -> None:
        """Wait as long as the server asks, or twice as long after each failure."""
        seconds = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1)) if retry.seconds is None else retry.seconds
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.waiting = Message("{why}; next attempt in {seconds} s", why=retry.reason, seconds=math.ceil(left))
            if self._stop.wait(min(TICK, left)):
                break
        self.waiting = ""
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Cancelled

    def _give_up(self, why: str) -> RunFailure:
        return RunFailure(
            Message(
                "{file} of {name} cannot be downloaded: {why}. The downloaded part is kept; repeat the command to "
                "continue",
                file=self.file.path,
                name=self._description.reference.name,
                why=why,
            )
        )

    def _explain(self, error: Exception) -> Exception:
        """Return the error for people: what is not accessible and what to do, or that the disk is full."""
        error = self._host.explain(error)
        if isinstance(error, UserError | RunFailure):
            return error
        if isinstance(error, NoAnswer | Retry):
            return self._give_up(str(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return RunFailure(
                Message(
                    "{folder}: the disk is full. Free some space and repeat the command; the downloaded part is kept",
                    folder=self._description.folder,
                )
            )
        if isinstance(error, OSError):
            place = Path(error.filename or self._place.incomplete)
            return RunFailure(Message("{path}: {why}", path=place, why=reason(error) or type(error).__name__))
        return error


@contextlib.contextmanager
def open_stream(address: str, fields: Mapping[str, str], start: int) -> Iterator[Any]:
    """Open a file's content from byte `start` on. Yields the response, of httpx2.

    Raises:
        Retry: the connection failed, also inside the block, or the server cannot answer now.
        HfHubHTTPError: the file is not accessible.
    """
    import httpx2
    from huggingface_hub import constants, get_session

    headers = {**fields, "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    options: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    try:
        with get_session().stream("GET", address, follow_redirects=True, **options) as response:
            _check(response, address)
            yield response
    except httpx2.TransportError as error:
        host, why = urlsplit(address).netloc, str(error) or type(error).__name__
        raise Retry(Message("the connection to {host} failed ({why})", host=host, why=why)) from error


def is_from_start(response: Any, size: int, start: int) -> bool:
    """Return True if the response has the whole file though only the rest was asked for.

    Args:
        response: to a request from byte `start` on.
        size: of the file, as it was announced.
        start: number of the first byte that was asked for.

    Raises:
        Retry: it has some other part, or the file has another size.
    """
    begin, stated = 0, response.headers.get("Content-Length", "")
    if response.status_code == 206:
        _, _, span = response.headers.get("Content-Range", "").partition("bytes ")
        span, _, stated = span.partition("/")
        begin = int(span.partition("-")[0]) if span.partition("-")[0].isdigit() else -1
    if begin not in (0, start) or (stated.isdigit() and int(stated) != size):
        raise Retry(
            Message(
                "the file on the server has changed ({size} bytes, announced: {expected})",
                size=stated or "?",
                expected=size,
            )
        )
    return start > 0 and begin == 0


def _check(response: Any, address: str) -> None:
    """Raise what a response's status means, if it is no success."""
    status = response.status_code
    if status in (200, 206):
        return
    asked = urlsplit(address)
    host = asked.netloc
    is_elsewhere = (response.url.host, response.url.port) != (asked.hostname, asked.port)
    # An address of the storage, to which the hub redirects, expires; the hub gives a new one.
    if status in (408, 416, 429) or status >= 500 or (is_elsewhere and status in (401, 403, 404)):
        reason = (
            Message("{host} limits the number of requests (429)", host=host)
            if status == 429
            else Message("{host} answered with status {status}", host=response.url.host, status=status)
        )
        raise Retry(reason, _read_wait(response.headers))
    from huggingface_hub.utils import hf_raise_for_status

    hf_raise_for_status(response)
    raise Retry(Message("{host} answered with status {status}", host=host, status=status))


def _read_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait for; None if it does not."""
    from huggingface_hub.utils import parse_ratelimit_headers

    if (given := headers.get("Retry-After", "").strip()).isdigit():
        return float(given)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None
