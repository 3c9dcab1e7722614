"""What a run's event log says, kept up to date by reading on from where the last look ended.

A log of hundreds of thousands of steps is held in a few hundred points: steps are gathered in groups, neighbouring
groups are put together when there are too many. No torch, no Gradio.
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POINTS = 500
"""Points of a curve, at most twice as many while it grows."""
MEASURES = ("loss", "lr", "grad_norm", "images_per_s", "vram_gb")
KEPT = 300
"""Newest warnings that are kept; a run that warns at every step must not fill the memory."""
CHUNK = 1 << 20

Point = tuple[int, float]


class Groups:
    """Means of one measure over neighbouring steps."""

    def __init__(self, limit: int = 2 * POINTS):
        self._limit = limit
        self._width = 1  # steps that one group is to hold
        self._groups: list[list[float]] = []  # first step, last step, sum, count

    def add(self, step: int, value: float) -> None:
        """The value at a step; steps come in rising order (see `forget_from`)."""
        if self._groups and step < self._groups[-1][0] + self._width:
            group = self._groups[-1]
            group[1], group[2], group[3] = step, group[2] + value, group[3] + 1
            return
        self._groups.append([step, step, value, 1])
        while len(self._groups) > self._limit:
            self._width *= 2
            old, self._groups = self._groups, []
            for first, last, total, count in old:
                if self._groups and last < self._groups[-1][0] + self._width:
                    group = self._groups[-1]
                    group[1], group[2], group[3] = last, group[2] + total, group[3] + count
                else:
                    self._groups.append([first, last, total, count])

    def forget_from(self, step: int) -> None:
        """Drop this step and later ones. Of a group that reaches beyond it, the mean stays as it was."""
        while self._groups and self._groups[-1][0] >= step:
            self._groups.pop()
        if self._groups:
            self._groups[-1][1] = min(self._groups[-1][1], step - 1)

    def points(self) -> list[Point]:
        """(last step, mean) of each group."""
        return [(int(last), total / count) for _, last, total, count in self._groups]


@dataclass
class Facts:
    """What a log says besides its curves, newest last."""

    start: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    stage: str = ""
    step: int = 0
    steps: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    """the event done, stopped or error, if that is the newest of the run"""
    previews: dict[int, dict[str, Any]] = field(default_factory=dict)
    """step -> its event"""
    checkpoints: list[int] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    exports: list[dict[str, Any]] = field(default_factory=list)


class Log:
    """One run's events.jsonl, followed by offset. Used by several threads: `read` and what it returns are whole."""

    def __init__(self, file: Path):
        self._file = file
        self._lock = threading.Lock()
        self.version = 0  # rises with every change
        self._begin()

    def _begin(self) -> None:
        self._offset, self._inode, self._rest = 0, -1, b""
        self._last_step = 0
        self.facts = Facts()
        self.measures = {name: Groups() for name in MEASURES}
        self.validation: dict[str, Groups] = {}
        self.version += 1

    def read(self) -> "Log":
        """Take in what was written since. A log that is not there yet is empty.

        Raises:
            OSError: it is there and cannot be read.
        """
        with self._lock:
            try:
                file = open(self._file, "rb")  # noqa: SIM115 - closed below; a missing file is no error
            except FileNotFoundError:
                if self._inode != -1:
                    self._begin()
                return self
            with file:
                status = self._file.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin()  # another file than before: a run that was deleted and made again
                    self._inode = status.st_ino
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    for line in lines:
                        self._take(line)
                    self.version += 1
        return self

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:  # torn by a kill, and ended by the next start
            return
        if not isinstance(event, dict):
            return
        kind, facts = event.get("event"), self.facts
        if kind == "step":
            self._step(event)
            return
        if kind in ("start", "stage"):
            facts.end = {}
        if kind == "start":
            facts.start = event
        elif kind == "stage":
            facts.stage = str(event.get("stage", ""))
            if isinstance(event.get("steps"), int):
                facts.steps = event["steps"]
        elif kind in ("data", "model"):
            setattr(facts, kind, event)
        elif kind == "validation":
            self._validation(event)
        elif kind == "preview" and isinstance(event.get("step"), int):
            facts.previews[event["step"]] = event
        elif kind == "checkpoint" and isinstance(event.get("step"), int):
            facts.checkpoints = [step for step in facts.checkpoints if step < event["step"]] + [event["step"]]
        elif kind == "warning":
            facts.warnings = [*facts.warnings, event][-KEPT:]
        elif kind == "export":
            facts.exports = [one for one in facts.exports if one.get("path") != event.get("path")] + [event]
        elif kind in ("done", "stopped", "error"):
            facts.end = event

    def _step(self, event: dict[str, Any]) -> None:
        step = event.get("step")
        if not isinstance(step, int):
            return
        if step <= self._last_step:  # a run that goes on from an earlier checkpoint: what came after did not happen
            for groups in (*self.measures.values(), *self.validation.values()):
                groups.forget_from(step)
        self._last_step = self.facts.step = step
        for name in MEASURES:
            if _finite(value := event.get(name)):
                self.measures[name].add(step, float(value))

    def _validation(self, event: dict[str, Any]) -> None:
        step, bands = event.get("step"), event.get("bands")
        if not isinstance(step, int) or not isinstance(bands, dict):
            return
        for band, value in {**bands, "": event.get("loss")}.items():
            if _finite(value):
                groups = self.validation.setdefault(str(band), Groups())
                groups.forget_from(step)
                groups.add(step, float(value))


class Logs:
    """Logs by run folder; the least recently used are forgotten."""

    def __init__(self, limit: int = 48):
        self._limit = limit
        self._lock = threading.Lock()
        self._logs: OrderedDict[Path, Log] = OrderedDict()

    def read(self, folder: Path) -> Log:
        """The log of this run folder, up to date."""
        with self._lock:
            log = self._logs.setdefault(folder, Log(folder / "events.jsonl"))
            self._logs.move_to_end(folder)
            while len(self._logs) > self._limit:
                self._logs.popitem(last=False)
        return log.read()


def smooth(points: Sequence[Point], amount: float) -> list[Point]:
    """An exponential mean that forgets by steps, not by points, so that thinning does not change how smooth it is.

    Args:
        amount: 0 (as it is) to below 1; what one step keeps of the mean before it.
    """
    if amount <= 0 or not points:
        return list(points)
    found, weight, total, before = [], 0.0, 0.0, points[0][0] - 1
    for step, value in points:
        kept = amount ** (step - before)
        # Divided by the weights so far: the first values are not drawn towards zero.
        total, weight = total * kept + value * (1 - kept), weight * kept + (1 - kept)
        found.append((step, total / weight))
        before = step
    return found


def thin(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most so many points: means of neighbours, each at the last of their steps."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
