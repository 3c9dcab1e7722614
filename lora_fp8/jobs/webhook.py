"""Tell a webhook how a job ended: one POST of a JSON object to the address in worker.toml.

    {"job": 7, "name": "cat", "kind": "train", "state": "done", "ended": 1767225600.0, "seconds": 840.0,
     "text": "cat: done; ...", "content": "cat: done; ..."}

`text` is what Slack and Mattermost show, and `content` what Discord shows; both hold the same sentence. The address is
a secret (whoever has it may post), so only its host is named in logs and on the page. A message that cannot be
delivered is reported and never fails the job.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomlkit

from ..common.json_files import read_json, write_json
from ..common.messages import add_translations, get_language, restore, translate, without_home
from ..common.reading import load_text
from ..common.writing import atomic_write
from ..errors import Message, UserError, cannot_write, reason

SECONDS = 10.0
"""Seconds that a server may take to answer."""
PAUSES = (2.0, 8.0)
"""Seconds before a message is sent a second and a third time, if no server answered or it was out of order."""
MOST_TEXT = 1500
"""Characters of a message's text. Discord refuses more than 2000."""
RESULT = "webhook.json"
"""File in the queue's folder that tells what became of the newest message."""
QUIET = ("draw",)
"""Commands whose end is no news: somebody waits for the image on the page."""


class Undelivered(UserError):
    """A message that was not delivered.

    Args:
        line: the reason.
        is_final: sending it again would not help.
    """

    def __init__(self, line: Message, *, is_final: bool = False):
        super().__init__(line)
        self.is_final = is_final


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would turn the POST into a GET, and report success."""

    def redirect_request(self, *given: Any) -> None:
        return None


def check_address(address: str) -> str:
    """Return the address without surrounding spaces; "" switches messages off.

    Raises:
        UserError: it is no address of a web server.
    """
    address = address.strip()
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    is_plain = address.isascii() and address.isprintable() and " " not in address
    if address and (parts.scheme not in ("http", "https") or not host or not is_plain):
        raise UserError(
            Message(
                "`webhook`: this is not the address of a web server. Give one that starts with https:// (or http://)."
            )
        )
    if parts.username is not None or parts.password is not None:
        raise UserError(
            Message("`webhook`: the address contains a user name or password, which is not sent. Give one without.")
        )
    return address


def get_host(address: str) -> str:
    """Return the part of an address that may be shown."""
    return urlsplit(address).netloc


def write_address(home: Path, address: str) -> None:
    """Set `webhook` in worker.toml; everything else in the file stays as it is.

    Raises:
        UserError: it is no address, or the file cannot be read or written.
    """
    address, path = check_address(address), home / "worker.toml"
    try:
        document = tomlkit.parse(load_text(path)) if path.exists() else tomlkit.document()
        if address:
            document["webhook"] = address
        else:
            document.pop("webhook", None)
        atomic_write(path, tomlkit.dumps(document).encode())
        path.chmod(0o600)
        (home / RESULT).unlink(missing_ok=True)  # it tells of another address
    except OSError as error:
        raise cannot_write(path, error) from None
    except ValueError as error:
        raise UserError(Message("{where}: not valid TOML: {why}", where=path, why=error)) from None


def make_body(about: dict[str, Any], line: str, *, launched: float, ended: float) -> dict[str, Any]:
    """Make the message about a job that has ended.

    Args:
        about: its job, name, kind and state.
        line: the reason for its state.
        launched, ended: unix seconds; 0 if it was never started.
    """
    text = without_home(translate(get_language(), Message("{name}: {line}", name=about["name"], line=line)))
    text = text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."
    seconds = round(ended - launched, 1) if launched else None
    return {**about, "ended": ended, "seconds": seconds, "text": text, "content": text}


def post(address: str, body: dict[str, Any]) -> None:
    """Send a message once.

    Raises:
        Undelivered: the server did not accept it, or none answered. The reason has no part of the address but its host.
    """
    host = get_host(address)
    request = urllib.request.Request(
        check_address(address),
        json.dumps(body, ensure_ascii=False).encode(),
        {"Content-Type": "application/json; charset=utf-8", "User-Agent": "lora-fp8"},
    )
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=SECONDS):
            return
    except urllib.error.HTTPError as error:
        error.close()
        line = Message("{host} answered {code} ({why})", host=host, code=error.code, why=_name_status(error.code))
        if 300 <= error.code < 400:
            line = Message("{line} and points to another address. Set `webhook` to that one.", line=line)
        raise Undelivered(line, is_final=error.code < 500 and error.code not in (408, 429)) from None
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError with the reason as an attribute
        cause = getattr(error, "reason", error)
        if isinstance(cause, TimeoutError):
            line = Message("{host} did not answer within {seconds} s", host=host, seconds=f"{SECONDS:g}")
        else:
            why = (reason(cause) if isinstance(cause, OSError) else "") or type(cause).__name__
            line = Message("{host} cannot be reached ({why})", host=host, why=why)
        raise Undelivered(line) from None


def _name_status(code: int) -> str:
    return http.client.responses.get(code, "HTTP")


class Sender:
    """Sends messages on threads of their own, so that a slow server delays no job.

    Args:
        home: of the queue, where the newest result is kept for the page.
        report: called with a line about each message that was not delivered.
    """

    def __init__(self, home: Path, report: Callable[[str], None]):
        self.home, self.report = home, report
        self._threads: list[threading.Thread] = []
        self._writing = threading.Lock()

    def send(self, address: str, body: dict[str, Any]) -> None:
        """Send a message, up to three times if no server answers."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._deliver, args=(address, body), daemon=True, name="webhook")
        self._threads.append(thread)
        thread.start()

    def finish(self, seconds: float = SECONDS) -> None:
        """Wait for messages that are being sent, at most this long."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _deliver(self, address: str, body: dict[str, Any]) -> None:
        problem = _send_patiently(address, body)
        with self._writing:
            write_result(self.home, address, problem)
        if problem:
            self.report(describe_failure(body["job"], body["name"], problem))


def describe_failure(job: int, name: str, problem: str) -> Message:
    """Return the worker's line about a message that was not delivered."""
    return Message("job {id} ({name}): the webhook message was not delivered: {line}", id=job, name=name, line=problem)


def _send_patiently(address: str, body: dict[str, Any]) -> str:
    """Send a message, up to three times. Return why it was not delivered; "" if it was."""
    for pause in (*PAUSES, 0.0):
        try:
            post(address, body)
            return ""
        except Undelivered as error:
            problem = str(error)
            if error.is_final:
                break
            time.sleep(pause)
    return problem


def write_result(home: Path, address: str, problem: str) -> None:
    """Keep what became of the newest message; "" if it was delivered."""
    content = {"t": time.time(), "host": get_host(address), "problem": problem}
    try:
        write_json(home / RESULT, add_translations(content), indent=None)
    except OSError:
        pass  # a full disk: only the page's line about it is missing


def read_result(home: Path) -> dict[str, Any]:
    """Return what became of the newest message: t, host and problem; {} if none was sent."""
    try:
        content = restore(read_json(home / RESULT))
        return {"t": float(content["t"]), "host": str(content["host"]), "problem": content["problem"]}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
