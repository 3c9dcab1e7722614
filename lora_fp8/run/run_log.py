"""Read a run's event log incrementally, from where the last read ended.

A log of hundreds of thousands of steps is kept as a few hundred points: steps are gathered in groups, and neighbouring
groups are merged when there are too many. Standard library only.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common import json_files, messages, reading
from ..common.chart import Point
from ..common.numbers import is_finite_number
from .folder import REFUSED

POINTS = 500
"""Points of a curve; up to twice as many while it grows."""
MEASURES = ("loss", "lr", "grad_norm", "images_per_s", "vram_gb", "max_key_norm")
SCORES = ("likeness", "prompt_fit")
"""What `preview.score_model` measures of the previews."""
KEPT = 300
"""Newest warnings that are kept, since a run that warns at every step must not fill the memory."""
KEPT_LOGS = 48
"""Logs of runs that are kept in memory."""
CHUNK = 1 << 20


class StepMeans:
    """Means of one measure over neighbouring steps."""

    def __init__(self, limit: int = 2 * POINTS):
        self._limit = limit
        self._width = 1  # steps that one group is to hold
        self._groups: list[list[float]] = []  # first step, last step, sum, count

    def add(self, step: int, value: float) -> None:
        """Add the value of a step. Steps come in rising order (see `forget_from`)."""
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
        """Drop this step and later ones. A group that reaches beyond it keeps its mean."""
        while self._groups and self._groups[-1][0] >= step:
            self._groups.pop()
        if self._groups:
            self._groups[-1][1] = min(self._groups[-1][1], step - 1)

    def list_points(self) -> list[Point]:
        """Return (last step, mean) of each group."""
        return [(int(last), total / count) for _, last, total, count in self._groups]


@dataclass
class RunFacts:
    """What a log says besides its curves, newest last."""

    start: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    stage: str = ""
    step: int = 0
    steps: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    """The event done, stopped or error, if it is the newest of the run."""
    previews: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step -> its event."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Events of images that were asked for while training."""
    checkpoints: list[int] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    exports: list[dict[str, Any]] = field(default_factory=list)
    verdict: dict[str, Any] = field(default_factory=dict)
    """What the newest event "verdict" says of the held-out losses; {} if training went on from before it."""
    best: int | None = None
    """Step of the newest LoRA that was kept as the best one."""
    patience: dict[str, Any] = field(default_factory=dict)
    """The event that `validation.patience` has ended training; {} if it went on since."""


class RunLog:
    """A run's events.jsonl, followed by offset. Threads may share it: each sees complete values."""

    def __init__(self, file: Path):
        self._file = file
        self._lock = threading.Lock()
        self.version = 0  # rises with every change
        self._start_over()

    def _start_over(self) -> None:
        self._offset, self._inode, self._rest = 0, -1, b""
        self._last_step = 0
        self._end_before: dict[str, Any] = {}
        self.facts = RunFacts()
        self.measures = {name: StepMeans() for name in MEASURES}
        self.validation: dict[str, StepMeans] = {}
        self.scores = {name: StepMeans() for name in SCORES}
        self.version += 1

    def read(self) -> "RunLog":
        """Read what was written since the last call. A missing log is empty.

        Raises:
            OSError: it exists and cannot be read.
        """
        with self._lock:
            try:
                file = reading.open_regular(self._file)  # closed below; a missing file is no error
            except FileNotFoundError:
                if self._inode != -1:
                    self._start_over()
                return self
            with file:
                status = self._file.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._start_over()  # another file than before: the run was deleted and made again
                    self._inode = status.st_ino
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    for line in lines:
                        self._read_line(line)
                    self.version += 1
        return self

    def find_best(self) -> tuple[int, float] | None:
        """Return the step of the lowest held-out loss, and that loss; None before there are two validations."""
        verdict = self.facts.verdict
        if isinstance(verdict.get("best"), int) and is_finite_number(verdict.get("loss")):
            return verdict["best"], float(verdict["loss"])
        # A log of an earlier version has no verdicts.
        points = self.validation[""].list_points() if "" in self.validation else []
        return min(points, key=lambda point: point[1]) if len(points) > 1 else None

    def _read_line(self, line: bytes) -> None:
        try:
            event = messages.restore(json_files.parse_json(line))
        except ValueError:  # cut short by a kill; the next start ended the line
            return
        if not isinstance(event, dict):
            return
        kind, facts = event.get("event"), self.facts
        if kind == "step":
            self._read_step(event)
            return
        if kind == "start":
            self._end_before = facts.end
        if kind in ("start", "stage"):
            facts.end = {}
        if kind == "start":
            facts.start = event
        elif kind == "stage":
            facts.stage = str(event.get("stage", ""))
            if isinstance(event.get("steps"), int):
                facts.steps = event["steps"]
        elif kind in ("data", "model", "verdict", "patience"):
            setattr(facts, kind, event)
        elif kind == "validation":
            self._read_validation(event)
        elif kind == "score":
            self._read_scores(event)
        elif kind == "best" and isinstance(event.get("step"), int):
            facts.best = event["step"]
        elif kind == "preview" and isinstance(event.get("step"), int):
            facts.previews[event["step"]] = event
        elif kind == "sample" and isinstance(event.get("step"), int):
            facts.samples = [*facts.samples, event][-KEPT:]
        elif kind == "checkpoint" and isinstance(event.get("step"), int):
            facts.checkpoints = [step for step in facts.checkpoints if step < event["step"]] + [event["step"]]
        elif kind == "warning":
            facts.warnings = [*facts.warnings, event][-KEPT:]
        elif kind == "export":
            facts.exports = [export for export in facts.exports if export.get("path") != event.get("path")] + [event]
        elif kind in ("done", "stopped", "error"):
            facts.end = event
        elif kind == REFUSED:
            facts.end = self._end_before

    def _read_step(self, event: dict[str, Any]) -> None:
        step = event.get("step")
        if not isinstance(step, int):
            return
        if step <= self._last_step:  # resumed from an earlier checkpoint: later steps are void
            for groups in (*self.measures.values(), *self.validation.values(), *self.scores.values()):
                groups.forget_from(step)
            if not _is_before(self.facts.verdict, step):
                self.facts.verdict = {}
        self.facts.patience = {}  # the step came after it
        self._last_step = self.facts.step = step
        for name in MEASURES:
            if is_finite_number(value := event.get(name)):
                self.measures[name].add(step, float(value))

    def _read_scores(self, event: dict[str, Any]) -> None:
        step = event.get("step")
        for name, groups in self.scores.items():
            if isinstance(step, int) and is_finite_number(value := event.get(name)):
                groups.forget_from(step)
                groups.add(step, float(value))

    def _read_validation(self, event: dict[str, Any]) -> None:
        step, bands = event.get("step"), event.get("bands")
        if not isinstance(step, int) or not isinstance(bands, dict):
            return
        for band, value in {**bands, "": event.get("loss")}.items():
            if is_finite_number(value):
                groups = self.validation.setdefault(str(band), StepMeans())
                groups.forget_from(step)
                groups.add(step, float(value))


def read_verdict(folder: Path) -> str:
    """Return the newest sentence on the held-out losses of a run; "" if it has none."""
    text = RunLog(folder / "events.jsonl").read().facts.verdict.get("text")
    return text if isinstance(text, str) else ""


class RunLogs:
    """Logs by run folder. The least recently used are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: OrderedDict[Path, RunLog] = OrderedDict()

    def read(self, folder: Path) -> RunLog:
        """Return the log of this run folder, up to date."""
        with self._lock:
            log = self._logs.setdefault(folder, RunLog(folder / "events.jsonl"))
            self._logs.move_to_end(folder)
            while len(self._logs) > KEPT_LOGS:
                self._logs.popitem(last=False)
        return log.read()


def smooth(points: Sequence[Point], amount: float) -> list[Point]:
    """Return an exponential mean that forgets by steps, not by points, so that thinning does not change the smoothness.

    Args:
        amount: 0 (unchanged) to below 1; the share of the mean that one step keeps.
    """
    if amount <= 0 or not points:
        return list(points)
    smoothed, weight, total, before = [], 0.0, 0.0, points[0][0] - 1
    for step, value in points:
        kept = amount ** (step - before)
        # Divided by the weights so far, so that the first values are not biased towards zero.
        total, weight = total * kept + value * (1 - kept), weight * kept + (1 - kept)
        smoothed.append((step, total / weight))
        before = step
    return smoothed


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most POINTS points: means of neighbours, each at the last of their steps."""
    size = math.ceil(len(points) / POINTS)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _is_before(event: dict[str, Any], step: int) -> bool:
    return isinstance(event.get("step"), int) and event["step"] < step
