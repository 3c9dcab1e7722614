"""Reads what a run and its processes write: events, checkpoints, the log and records."""

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.json_files import parse_json, read_json
from ..common.messages import restore, without_home
from ..common.numbers import is_finite_number
from ..common.reading import MOST_TEXT, open_regular
from ..run import REFUSED


@dataclass
class Progress:
    """What the event log says about one attempt; updated by reading what was added."""

    offset: int
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    download: dict[str, Any] | None = None  # the newest event of a download; None outside of one
    work: dict[str, Any] | None = None  # the newest event "progress", if no other event follows it
    since: float = 0  # time at which the stage began
    last: dict[str, Any] | None = None  # the newest of done, stopped and error, if no event follows it
    before: dict[str, Any] | None = None  # `last` when this process began
    refusal: str = ""  # why the newest resume was refused
    first: tuple[float, int] | None = None  # time and step number of the first step of this process
    newest: tuple[float, int] | None = None
    counted: tuple[float, int] | None = None  # time and number of the first event "progress" of its kind
    heard: float = 0  # time of the newest event of the training; 0 in other stages
    longest_silence: float = 0  # most seconds between two events of the training

    @property
    def alive_at(self) -> float:
        """Return the time of the newest step while training, else that at which the stage began; 0 if unknown."""
        return self.newest[0] if self.stage == "train" and self.newest else self.since

    def compute_eta_s(self) -> float | None:
        """Return the seconds left of the training or of its stage, at the pace of this process; None if unknown."""
        if self.download:
            return float(self.download["eta"]) if _are_numbers(self.download, "eta") else None
        if self.stage != "train":
            return self._compute_work_eta_s()
        if not (self.first and self.newest and self.steps and self.newest[1] > self.first[1]):
            return None
        seconds = (self.newest[0] - self.first[0]) / (self.newest[1] - self.first[1])
        return max(0.0, (self.steps - self.newest[1]) * seconds - max(0.0, time.time() - self.newest[0]))

    def _compute_work_eta_s(self) -> float | None:
        """Return the seconds left of what a stage counts; None where its parts are too unequal to tell."""
        if self.work is None or self.counted is None or self.work["stage"] not in ("cache", "load"):
            return None
        began, first = self.counted
        if self.work["done"] <= first:
            return None
        seconds = (self.work["t"] - began) / (self.work["done"] - first)
        return max(0.0, (self.work["total"] - self.work["done"]) * seconds - max(0.0, time.time() - self.work["t"]))

    def _update_work(self, event: dict[str, Any]) -> None:
        if event.get("event") == "warning":
            return
        if event.get("event") != "progress" or not _are_numbers(event, "done", "total", "t"):
            self.work = self.counted = None
            return
        event = {**event, "stage": str(event.get("stage"))}
        if self.work is None or self.work["stage"] != event["stage"]:
            self.counted = (event["t"], event["done"])
        self.work = event

    def _update_silence(self, event: dict[str, Any]) -> None:
        if event.get("event") in ("start", "stage"):
            self.heard = event["t"] if event.get("stage") == "train" and _are_numbers(event, "t") else 0
        elif self.heard and _are_numbers(event, "t"):
            self.longest_silence = max(self.longest_silence, event["t"] - self.heard)
            self.heard = event["t"]

    def update(self, event: dict[str, Any]) -> None:
        """Update the progress with one event."""
        kind = event.get("event")
        self._update_work(event)
        self._update_silence(event)
        if kind != "warning":
            self.download = event if kind == "download" and _are_numbers(event, "bytes", "total", "speed") else None
        if kind in ("done", "stopped", "error"):
            self.last = restore(event)
            return
        if kind == REFUSED:
            self.last, self.refusal = self.before, str(restore(event).get("text", ""))
            return
        if kind == "start":
            self.before = self.last
        self.last = None
        if kind in ("start", "stage"):
            self.since = event["t"] if _are_numbers(event, "t") else 0
        if kind == "start":
            self.stage, self.first, self.newest = "start", None, None
        elif kind == "stage":
            self.stage = str(event.get("stage"))
            if _are_numbers(event, "step", "steps"):
                self.step, self.steps = event["step"], event["steps"]
        elif kind == "step" and _are_numbers(event, "step", "t"):  # another program may have written this log
            self.step, self.loss = event["step"], event["loss"] if _are_numbers(event, "loss") else None
            self.newest = (event["t"], event["step"])
            self.first = self.first or self.newest


def _are_numbers(event: dict[str, Any], *names: str) -> bool:
    return all(is_finite_number(event.get(name)) for name in names)


def follow(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of an event log from this byte on.

    If the log is now shorter, it is a different one and is read from the start. Damaged lines are skipped. A log that
    does not exist or may not be read has no events.

    Returns:
        The events, and the byte to continue from.
    """
    try:
        with open_regular(file) as log:
            size = log.seek(0, 2)
            if size == offset:
                return [], offset
            log.seek(0 if size < offset else offset)
            begin, data = log.tell(), log.read()
    except OSError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    events = []
    for line in whole.decode(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            event = parse_json(line)
            if isinstance(event, dict):
                events.append(event)
    return events, begin + len(whole)


class Follower:
    """Progress of many runs, each read incrementally. Keep one instance for as long as you follow the runs."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Path, int], Progress] = {}

    def read_progress(self, folder: Path, mark: int) -> Progress:
        """Return what the log of this run says after byte `mark`."""
        progress = self._seen.setdefault((folder, mark), Progress(mark))
        events, offset = follow(folder / "events.jsonl", progress.offset)
        if offset < progress.offset:  # a different log
            progress = self._seen[folder, mark] = Progress(0)
        for event in events:
            progress.update(event)
        progress.offset = offset
        return progress


def find_saved_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a run folder, complete or not; None if there is none."""
    steps = [int(m[1]) for path in folder.glob("checkpoints/step-*") if (m := re.fullmatch(r"step-(\d+)", path.name))]
    return max(steps, default=None)


def read_status(file: Path) -> dict[str, Any]:
    """Read what can be used of a run's status.json, which another program may have written. Raises OSError.

    Returns:
        The state, "" if there is none; and t, step, steps and loss, as far as they are numbers.
    """
    content = read_object_or_empty(file)
    status = {name: content[name] for name in ("t", "step", "steps", "loss") if _are_numbers(content, name)}
    if not 0 <= status.get("t", 0) < LATEST:
        del status["t"]
    return status | {"state": str(content.get("state", ""))}


LATEST = 2**32
"""Later times, in seconds since 1970, are none of a run."""
COUNT_FILE = "count.json"
"""File in the folder of an attempt: see `common.progress.COUNT`."""
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)")


def read_tail(file: Path, lines: int = 40) -> list[str]:
    """Return the last lines of a job's output, with progress bars in their newest state and no terminal escapes.

    The home folder is shown as `~`, as it is in the log itself once the job has ended.
    """
    try:
        with open_regular(file) as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - 400 * lines - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    if size > 400 * lines + 4096:
        text = text.partition("\n")[2] or text
    visible = [ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    visible = ["".join(c if c.isprintable() or c == "\t" else " " for c in line).rstrip() for line in visible]
    while visible and not visible[-1]:
        visible.pop()
    return without_home("\n".join(visible[-lines:])).split("\n") if visible else []


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the keepers of an attempt wrote, by file name without suffix: "launch", "trainer-0", ..."""
    contents = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            contents[path.stem] = read_json(path, MOST_TEXT)
    return contents


def read_count(attempt: Path) -> dict[str, Any] | None:
    """Return what an attempt has counted before its run has a log, as {"stage", "done", "total"}; None if nothing."""
    try:
        count = read_object_or_empty(attempt / COUNT_FILE)
    except OSError:
        return None
    return {**count, "stage": str(count.get("stage"))} if _are_numbers(count, "done", "total") else None


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if the file has something else. Raises OSError."""
    try:
        content = read_json(path)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
