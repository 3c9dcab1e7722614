"""The optional login: one account with a password, and sessions that survive a restart.

A browser logs in with a form and gets a cookie. A program sends the cookie too (gradio_client's `auth=`), or the
password with each request (Basic). The disk holds a hash of each session, never a session or the password.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from pathlib import Path

from lora_fp8.common.writing import atomic_write, make_folder
from lora_fp8.errors import Message, UserError

COOKIE = "lora_fp8_session"
SHORTEST_PASSWORD = 10
SESSION_SECONDS = 14 * 86400
MOST_SESSIONS = 64
FREE_FAILURES = 5  # of one address before it has to wait
LONGEST_WAIT = 300


class Login:
    """The account, its sessions, and failed logins.

    Args:
        user, password: compared in constant time. The password has at least SHORTEST_PASSWORD characters.
        file: where sessions are kept. Sessions of another user or password are dropped.
    """

    def __init__(self, user: str, password: str, file: Path):
        if not user or len(password) < SHORTEST_PASSWORD:
            raise UserError(
                Message("a login needs a user and a password of at least {least} characters", least=SHORTEST_PASSWORD)
            )
        self.file = file
        self._given = _digest(user), _digest(password)
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[int, float]] = (
            OrderedDict()
        )  # address: number of failures, when it may try again
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        salt = bytes.fromhex(known.get("salt", "")) or secrets.token_bytes(16)
        # Sessions end when the password changes. The hash is slow, so that the file does not help to find the password.
        whose = hashlib.scrypt(f"{user}\0{password}".encode(), salt=salt, n=2**14, r=8, p=1).hex()
        same = hmac.compare_digest(known.get("whose", ""), whose)
        self._kept = {"salt": salt.hex(), "whose": whose, "sessions": known.get("sessions", {}) if same else {}}

    def get_wait(self, address: str) -> int:
        """Return the seconds until this address may try again; 0 is now."""
        with self._lock:
            return self._get_wait(address)

    def _get_wait(self, address: str) -> int:
        return max(0, math.ceil(self._failures.get(address, (0, 0.0))[1] - time.monotonic()))

    def check_password(self, user: str, password: str, address: str) -> tuple[bool, int]:
        """Check a password, unless this address has to wait. Each failure makes it wait longer.

        The wait is checked under the lock, so that many passwords at once count as many attempts.

        Returns:
            True if user and password are right, and the seconds to wait, during which no password is checked.
        """
        # Both are always compared, so that the time reveals nothing.
        fits = hmac.compare_digest(_digest(user), self._given[0])
        fits &= hmac.compare_digest(_digest(password), self._given[1])
        with self._lock:
            if wait := self._get_wait(address):
                return False, wait
            if fits:
                self._failures.pop(address, None)
            else:
                times = self._failures.get(address, (0, 0.0))[0] + 1
                pause = min(2 ** max(0, times - FREE_FAILURES), LONGEST_WAIT) if times >= FREE_FAILURES else 0
                self._failures[address] = (times, time.monotonic() + pause)
                self._failures.move_to_end(address)
                while len(self._failures) > 10_000:
                    self._failures.popitem(last=False)
        return fits, 0

    def start_session(self) -> str:
        """Start a session and return the value of its cookie."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            sessions = {key: end for key, end in self._kept["sessions"].items() if end > time.time()}
            sessions[_digest(token).hex()] = round(time.time()) + SESSION_SECONDS
            self._kept["sessions"] = dict(list(sessions.items())[-MOST_SESSIONS:])
            self._save()
        return token

    def has_session(self, token: str) -> bool:
        """Return True for a session that has not ended. The lookup is by hash, so that its time reveals nothing."""
        return self._kept["sessions"].get(_digest(token).hex(), 0) > time.time()

    def end_session(self, token: str) -> None:
        """Log out. A copy of the cookie is no longer valid either."""
        with self._lock:
            if self._kept["sessions"].pop(_digest(token).hex(), None) is not None:
                self._save()

    def _save(self) -> None:
        make_folder(self.file.parent, 0o700)
        before = os.umask(0o077)
        try:
            atomic_write(self.file, json.dumps(self._kept).encode())
        finally:
            os.umask(before)


def parse_basic_auth(header: str) -> tuple[str, str] | None:
    """Return user and password of an Authorization header, or None if it is not a Basic one."""
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
