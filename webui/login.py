"""Who may in, where the page asks at all: one person with a password, and sessions that outlive a restart.

A browser logs in with a form and gets a cookie; a program sends the cookie too (gradio_client's `auth=`), or the
password with each request (Basic). What is on the disk is a hash of each session, never a session or the password.
"""

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from pathlib import Path

from lora_fp8.config import UserError
from lora_fp8.run import atomic_write

COOKIE = "lora_fp8_session"
SHORTEST_PASSWORD = 10
SESSION_SECONDS = 14 * 86400
MOST_SESSIONS = 64
FREE_FAILURES = 5  # of one address, before it has to wait
LONGEST_WAIT = 300


class Login:
    """The person who may in, the sessions, and how often somebody was wrong.

    Args:
        user, password: compared in constant time; the password has at least SHORTEST_PASSWORD characters.
        file: where sessions are kept; sessions of another user or password are forgotten.
    """

    def __init__(self, user: str, password: str, file: Path):
        if not user or len(password) < SHORTEST_PASSWORD:
            raise UserError(f"a login needs a user and a password of {SHORTEST_PASSWORD} characters or more")
        self.file = file
        self._given = _digest(user), _digest(password)
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()  # address: how often, when it may again
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        salt = bytes.fromhex(known.get("salt", "")) or secrets.token_bytes(16)
        # Sessions end when the password changes. The file must not help to find it: hence a slow hash.
        whose = hashlib.scrypt(f"{user}\0{password}".encode(), salt=salt, n=2**14, r=8, p=1).hex()
        same = hmac.compare_digest(known.get("whose", ""), whose)
        self._kept = {"salt": salt.hex(), "whose": whose, "sessions": known.get("sessions", {}) if same else {}}

    def wait(self, address: str) -> int:
        """Seconds until this address may try again; 0 is now."""
        with self._lock:
            return max(0, round(self._failures.get(address, (0, 0.0))[1] - time.monotonic()))

    def right(self, user: str, password: str, address: str) -> bool:
        """Whether this is the person. Wrong answers make the address wait, longer each time."""
        # Both are compared whatever the first says, so that time tells nothing.
        fits = hmac.compare_digest(_digest(user), self._given[0])
        fits &= hmac.compare_digest(_digest(password), self._given[1])
        with self._lock:
            if fits:
                self._failures.pop(address, None)
            else:
                times = self._failures.get(address, (0, 0.0))[0] + 1
                pause = min(2 ** max(0, times - FREE_FAILURES), LONGEST_WAIT) if times >= FREE_FAILURES else 0
                self._failures[address] = (times, time.monotonic() + pause)
                self._failures.move_to_end(address)
                while len(self._failures) > 10_000:
                    self._failures.popitem(last=False)
        return fits

    def begin(self) -> str:
        """A new session: the value of its cookie."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            sessions = {key: end for key, end in self._kept["sessions"].items() if end > time.time()}
            sessions[_digest(token).hex()] = round(time.time()) + SESSION_SECONDS
            self._kept["sessions"] = dict(list(sessions.items())[-MOST_SESSIONS:])
            self._write()
        return token

    def knows(self, token: str) -> bool:
        """Whether this is a session that has not ended. The look-up is by hash, so that its time tells nothing."""
        return self._kept["sessions"].get(_digest(token).hex(), 0) > time.time()

    def end(self, token: str) -> None:
        """Log out: nobody who copied the cookie is in, either."""
        with self._lock:
            if self._kept["sessions"].pop(_digest(token).hex(), None) is not None:
                self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = os.umask(0o077)
        try:
            atomic_write(self.file, json.dumps(self._kept).encode())
        finally:
            os.umask(before)


def basic(header: str) -> tuple[str, str] | None:
    """User and password of an Authorization header, if it is a Basic one."""
    kind, _, rest = header.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(rest, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return (user, password) if colon else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
