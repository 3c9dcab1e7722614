"""Downloads of base models: each is a process of its own, which goes on when the page is closed.

    home/downloads/KEY.json      what is downloaded, by which process, and whether it was cancelled
    home/downloads/KEY.jsonl     what `lora-fp8 download --json` reports
    home/downloads/KEY.message   why it failed

What has arrived is kept: the next download of the same base, of a training too, continues it.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_fp8.common import system
from lora_fp8.common.messages import LANGUAGE, MESSAGE, read_message, restore
from lora_fp8.common.writing import atomic_write, make_folder
from lora_fp8.jobs import procs

TAIL = 16_384
"""Bytes at the end of a log in which the last line is looked for."""

State = Literal["running", "cancelling", "cancelled", "failed", "done"]


@dataclass(frozen=True)
class Download:
    """A download as it is now.

    Attributes:
        state: what became of it.
        done, total: bytes that have arrived, and that were missing; 0 until the first report.
        speed: bytes per second.
        eta: seconds left; None if unknown.
        waiting: what is waited for; "" while bytes arrive.
        error: why it failed; "" otherwise.
    """

    state: State
    done: int = 0
    total: int = 0
    speed: float = 0.0
    eta: float | None = None
    waiting: str = ""
    error: str = ""


class Downloads:
    """The downloads that were started below a home folder, by this page or an earlier one."""

    _lock = threading.Lock()

    def __init__(self, home: Path):
        self.folder = home / "downloads"

    def start(self, path: str, revision: str, family: str) -> None:
        """Start or continue the download of a base, unless it is running.

        Args:
            path: the normal form of `model.path`, of a base on a hub.
            revision: `model.revision`.
            family: its architecture; "" is told from its files.
        """
        with self._lock:
            known = self._read_note(path, revision)
            if known and procs.is_alive(procs.Identity(*known["process"])):
                return
            make_folder(self.folder, 0o700)
            options = [f"--{name}={value}" for name, value in (("revision", revision), ("family", family)) if value]
            log, message = self._get_log_files(path, revision)
            message.unlink(missing_ok=True)
            with open(log, "wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "lora_fp8", "download", "--json", *options, "--", path],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONUTF8": "1", LANGUAGE: "en", MESSAGE: str(message)},
                    **system.make_detach_options(),
                )
            identity = procs.identify(process.pid) or procs.Identity(process.pid, 0, "")
            self._write_note(path, revision, {"path": path, "revision": revision, "process": list(identity)})
            threading.Thread(target=process.wait, daemon=True, name="download").start()  # leaves no zombie

    def cancel(self, path: str, revision: str) -> None:
        """Ask the download of a base to stop; what has arrived stays."""
        with self._lock:
            known = self._read_note(path, revision)
            if known is None:
                return
            identity = procs.Identity(*known["process"])
            if procs.is_alive(identity):
                self._write_note(path, revision, {**known, "cancelled": True})
                procs.send([identity.pid], signal.SIGTERM)

    def read(self, path: str, revision: str) -> Download | None:
        """Return the newest download of a base; None if there was none."""
        known = self._read_note(path, revision)
        if known is None:
            return None
        is_alive = procs.is_alive(procs.Identity(*known["process"]))  # before its last line is read
        log, message = self._get_log_files(path, revision)
        reports = _read_reports(log)
        state: State = "running"
        progress: dict[str, Any] = next(
            (report for report in reversed(reports) if report.get("event") == "download"), {}
        )
        base = next((report for report in reports if report.get("event") == "base"), {})
        error = ""
        if not is_alive:
            is_done = any(report.get("event") == "done" for report in reports)
            state = "done" if is_done else "cancelled" if known.get("cancelled") else "failed"
            error = read_message(message) if state == "failed" else ""
        elif known.get("cancelled"):
            state = "cancelling"
        return Download(
            state,
            done=int(progress.get("bytes", 0)),
            total=int(progress.get("total", base.get("missing_bytes", 0))),
            speed=float(progress.get("speed", 0)),
            eta=progress.get("eta"),
            waiting=progress.get("waiting", ""),
            error=error,
        )

    def _get_log_files(self, path: str, revision: str) -> tuple[Path, Path]:
        stem = self._get_note_file(path, revision)
        return stem.with_suffix(".jsonl"), stem.with_suffix(".message")

    def _get_note_file(self, path: str, revision: str) -> Path:
        key = hashlib.blake2b(json.dumps([path, revision]).encode(), digest_size=16).hexdigest()
        return self.folder / f"{key}.json"

    def _read_note(self, path: str, revision: str) -> dict[str, Any] | None:
        try:
            note = json.loads(self._get_note_file(path, revision).read_bytes())
            procs.Identity(*note["process"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return note

    def _write_note(self, path: str, revision: str, note: dict[str, Any]) -> None:
        atomic_write(self._get_note_file(path, revision), json.dumps(note).encode())


def _read_reports(log: Path) -> list[dict[str, Any]]:
    """Read the first line of a log and those at its end."""
    reports: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), open(log, "rb") as stream:
        lines = [stream.readline()]
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(len(lines[0]), end - TAIL))
        lines += stream.read().split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # one that was cut, or is being written
                report = restore(json.loads(line))
                reports += [report] if isinstance(report, dict) else []
    return reports
