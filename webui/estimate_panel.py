"""Estimate the draft of a training: steps and epochs by arithmetic, time from the last run here, memory by the engine.

`lora-fp8 estimate` needs torch, so it runs in a process of its own, one at a time, for the newest text. The page polls
for the answer.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_fp8 import config, jobs
from lora_fp8.common import system
from lora_fp8.common.messages import LANGUAGE, MESSAGE, read_message, restore
from lora_fp8.errors import Message, UserError
from lora_fp8.run import Run, disk_space

from . import engine

SETTLED_SECONDS = 1.5
"""A text must stay unchanged this long before it is estimated."""
MOST_SECONDS = 240
MOST_RUNS = 30


@dataclass(frozen=True)
class Epochs:
    """The arithmetic of a training.

    Attributes:
        samples: images (or pieces of clips) of an epoch, each counted with its folder's repeats.
        per_step: images of a step. A batch has at most those of an epoch.
        steps: steps of an epoch. A batch holds one shape only, so a few more may be needed; an estimate has the number.
        epochs: passes over all images.
        has_buckets: `steps` and `epochs` are those of an estimate, which knows the shapes, and other than without them.
    """

    samples: float
    per_step: int
    steps: float
    epochs: float
    has_buckets: bool = False


def count_epochs(samples: float, values: dict[str, Any], estimate: dict[str, Any] | str | None = None) -> Epochs | None:
    """Count epochs from a form's values, and from their estimate if there is one; None if the values are not valid."""
    numbers = [values["train.batch_size"], values["train.accumulate"], values["train.steps"]]
    if not samples or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        return None
    per_step = min(numbers[0], math.ceil(samples)) * numbers[1]
    rough = Epochs(samples, per_step, samples / per_step, numbers[2] * per_step / samples)
    if not isinstance(estimate, dict) or abs(estimate["steps_per_epoch"] - rough.steps) < 0.01 * rough.steps:
        return rough
    return Epochs(samples, per_step, estimate["steps_per_epoch"], estimate["epochs"], has_buckets=True)


def count_examples(report: dict[str, Any], skipping: bool) -> int:
    """Count the examples of a folder by the report of `lora-fp8 dataset`: each image, and each piece of a clip.

    Args:
        skipping: images without a caption are skipped.
    """
    missing = [
        finding
        for finding in report["findings"]
        if skipping and finding["kind"] in ("caption_missing", "caption_empty")
    ]
    left_out = {file["file"] for finding in missing for file in finding["files"]}
    return sum(picture.get("pieces", 1) for picture in report["pictures"] if picture["file"] not in left_out)


def find_pace(folders: Iterable[Path], family: str) -> tuple[float, str] | None:
    """Return the seconds per step of the newest run of this family in these folders, and its name; None without one."""
    runs = [path for folder in folders for path in folder.glob("*/config.toml")]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in runs[:MOST_RUNS]:
        try:
            if tomllib.loads(path.read_text(encoding="utf-8"))["model"]["family"] != family:
                continue
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a run, or its config is being written
        steps = [event for event in Run(path.parent).read_events() if event.get("event") == "step"]
        # The last hundred at most: a run may have been resumed, and the first steps take longer.
        steps = steps[-100:]
        if len(steps) >= 3 and steps[-1]["step"] > steps[0]["step"]:
            return (steps[-1]["t"] - steps[0]["t"]) / (steps[-1]["step"] - steps[0]["step"]), path.parent.name
    return None


def check_disk_space(estimate: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Compare an estimate with the free disk space. Returns (errors, warnings).

    Free space is read now, because files may have been deleted since the estimate.
    """
    return disk_space.find_shortages(map(disk_space.Need.from_json, estimate["writes"]))


@dataclass
class _Request:
    text: str
    process: subprocess.Popen[bytes]
    begun: float
    file: Path
    answers: list[Path] = field(default_factory=list)


def _take_last_line(text: str) -> str:
    """Return the last line of a message: the first ones name the draft's file, which nobody has given."""
    return text.splitlines()[-1].strip()


class Estimates:
    """Answers of `lora-fp8 estimate`, by job."""

    def __init__(self, home: Path):
        self.home = home
        self._known: dict[str, dict[str, Any] | str] = {}
        self._asked: _Request | None = None
        self._seen, self._since = "", 0.0
        self._lock = threading.Lock()

    def get(self, text: str) -> dict[str, Any] | str | None:
        """Return the estimate for this draft, the error if there is none, or None while it is being made."""
        try:
            job = jobs.make_paths_absolute(config.loads(text, folder=self.home), self.home)
        except UserError:
            return ""
        job = job.model_copy(update={"name": ".lora-fp8-estimate"})  # the name has no effect on the estimate
        wanted = config.dumps(job)
        with self._lock:
            self._collect()
            if wanted in self._known:
                return self._known[wanted]
            now = time.monotonic()
            if wanted != self._seen:
                self._seen, self._since = wanted, now
            if now - self._since >= SETTLED_SECONDS:
                self._start(wanted)
            return None

    def _start(self, text: str) -> None:
        if self._asked is not None:
            if self._asked.text == text:
                return
            self._asked.process.kill()  # its answer is no longer wanted
            self._asked.process.wait()
            for path in (self._asked.file, *self._asked.answers):
                path.unlink(missing_ok=True)
        folder = self.home / "drafts"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", suffix=".toml", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(text)
        path = Path(file.name)
        answers = [path.with_suffix(suffix) for suffix in (".out", ".err", ".message")]
        with open(answers[0], "wb") as out, open(answers[1], "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "lora_fp8", "estimate", str(path), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONUTF8": "1", LANGUAGE: "en", MESSAGE: str(answers[2])},
                **system.make_detach_options(),
            )
        self._asked = _Request(text, process, time.monotonic(), path, answers)

    def _collect(self) -> None:
        asked = self._asked
        if asked is None:
            return
        code = asked.process.poll()
        if code is None and time.monotonic() - asked.begun < MOST_SECONDS:
            return
        if code is None:
            asked.process.kill()
            asked.process.wait()
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in asked.answers[:2])
        message = read_message(asked.answers[2])
        for path in (asked.file, *asked.answers):
            path.unlink(missing_ok=True)
        self._asked = None
        if len(self._known) > 50:
            self._known.clear()
        if code == 0:
            self._known[asked.text] = restore(json.loads(out))
        else:
            self._known[asked.text] = (
                message.map(_take_last_line)
                if isinstance(message, Message)
                else message or engine.describe_crash(err, asked.process.returncode)
            )
