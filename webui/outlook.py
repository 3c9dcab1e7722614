"""What a training will take: steps and epochs by arithmetic, time from the last run here, memory from the engine.

`lora-fp8 estimate` needs torch, and so runs as a process of its own, one at a time, for the newest text; the page asks
now and then whether its answer has come.
"""

import json
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

from lora_fp8 import config, disk, jobs
from lora_fp8.config import UserError
from lora_fp8.run import Run

SETTLED_SECONDS = 1.5
"""How long a text must stand before it is estimated: people type on."""
MOST_SECONDS = 240
MOST_RUNS = 30


@dataclass(frozen=True)
class Epochs:
    """The arithmetic of a training.

    Attributes:
        samples: pictures (or pieces of clips) of an epoch, each as often as its folder's repeats say.
        per_step: pictures of a step.
        steps: steps of an epoch; batches hold one shape each, so that a few more may be needed.
        epochs: passes over all pictures.
    """

    samples: int
    per_step: int
    steps: float
    epochs: float


def epochs(samples: int, found: dict[str, Any]) -> Epochs | None:
    """From a form's values; None where they allow none."""
    numbers = [found["train.batch_size"], found["train.accumulate"], found["train.steps"]]
    if not samples or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        return None
    per_step = numbers[0] * numbers[1]
    return Epochs(samples, per_step, samples / per_step, numbers[2] * per_step / samples)


def examples(report: dict[str, Any], skipping: bool) -> int:
    """How many a folder gives, by what `lora-fp8 dataset` says of it: a picture is one, and each piece of a clip.

    `skipping`: what has no caption is left out.
    """
    missing = [one for one in report["findings"] if skipping and one["kind"] in ("caption_missing", "caption_empty")]
    left_out = {file["file"] for one in missing for file in one["files"]}
    return sum(one.get("pieces", 1) for one in report["pictures"] if one["file"] not in left_out)


def pace(folders: Iterable[Path], family: str) -> tuple[float, str] | None:
    """Seconds a step of the newest run of this family in these folders, and its name; None where there is none."""
    runs = [path for folder in folders for path in folder.glob("*/config.toml")]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in runs[:MOST_RUNS]:
        try:
            if tomllib.loads(path.read_text(encoding="utf-8"))["model"]["family"] != family:
                continue
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a run, or one that is being written
        steps = [event for event in Run(path.parent).events() if event.get("event") == "step"]
        # The last hundred at most: a run may have been stopped and gone on with, and the first steps take longer.
        steps = steps[-100:]
        if len(steps) >= 3 and steps[-1]["step"] > steps[0]["step"]:
            return (steps[-1]["t"] - steps[0]["t"]) / (steps[-1]["step"] - steps[0]["step"]), path.parent.name
    return None


def room(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Of an estimate: lines for what the disks have no room for, and for what they may lack.

    What is free is asked now: the estimate may be from before something was deleted.
    """
    return disk.shortages(map(disk.Need.from_json, found["writes"]))


@dataclass
class _Asked:
    text: str
    process: subprocess.Popen[bytes]
    begun: float
    file: Path
    answers: list[Path] = field(default_factory=list)


class Estimates:
    """Answers of `lora-fp8 estimate`, by the job that they are of."""

    def __init__(self, home: Path):
        self.home = home
        self._known: dict[str, dict[str, Any] | str] = {}
        self._asked: _Asked | None = None
        self._seen, self._since = "", 0.0
        self._lock = threading.Lock()

    def of(self, text: str) -> dict[str, Any] | str | None:
        """The estimate for this draft, the line why there is none, or None while it is being made."""
        try:
            job = jobs.absolute_paths(config.loads(text, folder=self.home), self.home)
        except UserError:
            return ""
        job = job.model_copy(update={"name": "estimate"})  # no name changes what it takes
        wanted = config.dumps(job)
        with self._lock:
            self._collect()
            if wanted in self._known:
                return self._known[wanted]
            now = time.monotonic()
            if wanted != self._seen:
                self._seen, self._since = wanted, now
            if now - self._since >= SETTLED_SECONDS:
                self._ask(wanted)
            return None

    def _ask(self, text: str) -> None:
        if self._asked is not None:
            if self._asked.text == text:
                return
            self._asked.process.kill()  # nobody waits for it any more
            self._asked.process.wait()
            for path in (self._asked.file, *self._asked.answers):
                path.unlink(missing_ok=True)
        folder = self.home / "drafts"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", suffix=".toml", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(text)
        path = Path(file.name)
        answers = [path.with_suffix(suffix) for suffix in (".out", ".err")]
        with open(answers[0], "wb") as out, open(answers[1], "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "lora_fp8", "estimate", str(path), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        self._asked = _Asked(text, process, time.monotonic(), path, answers)

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
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in asked.answers)
        for path in (asked.file, *asked.answers):
            path.unlink(missing_ok=True)
        self._asked = None
        if len(self._known) > 50:
            self._known.clear()
        if code == 0:
            self._known[asked.text] = json.loads(out)
        else:
            told = [line.strip() for line in err.splitlines() if line.strip()]
            self._known[asked.text] = (told[-1] if told else f"exit code {code}").replace(f"{asked.file}: ", "")
