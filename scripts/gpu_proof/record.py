"""Append rows of results to a file as they come, so that whatever ends a stage, its results stay."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class NotHere(Exception):
    """This machine cannot answer the question, for instance because it has no GPU. The message says what it needs."""


@dataclass(frozen=True)
class Context:
    """What every stage gets.

    Attributes:
        device: where the work runs.
        toy: small shapes and few repeats, to try the script itself.
        deadline: `time.monotonic()` after which no new measurement begins.
        out: folder for the stage's own files.
        questions: only questions of `numerics`, `rates` and `models` in whose name one of these regular expressions is
            found; () means all.
    """

    device: torch.device
    toy: bool
    deadline: float
    out: Path
    questions: Sequence[str] = ()

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def is_asked(self, name: str) -> bool:
        """Return True if a question with this name is to be asked."""
        return not self.questions or any(re.search(word, name) for word in self.questions)


class Record:
    """Append rows to `results.jsonl`.

    A row has `stage`, `name` and `ok`: true, false, or null if the question cannot be asked on this machine or only a
    number is reported. `value` with `unit`, `limit` and `note` follow if there are any.
    """

    def __init__(self, file: Path, stage: str) -> None:
        self.file, self.stage = file, stage

    def write(self, name: str, ok: bool | None, **facts: Any) -> None:
        """Append one row and sync it to the disk."""
        row = {"stage": self.stage, "name": name, "ok": ok, **facts}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{self.stage}: {describe(row)}", flush=True)

    def ask(self, name: str, question: Callable[[], dict[str, Any]]) -> None:
        """Write what `question` returns, or why it failed. A failure never hides the other answers."""
        started = time.perf_counter()
        with self.guard(name):
            facts = question()
            self.write(name, facts.pop("ok", None), seconds=round(time.perf_counter() - started, 3), **facts)

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Turn an exception into a row."""
        try:
            yield
        except NotHere as reason:
            self.write(name, None, note=f"not asked: {reason}")
        except Exception as error:  # a failure is a result
            text = " ".join(str(error).split())[:400]
            self.write(name, False, note=f"{type(error).__name__}: {text}")


def describe(row: dict[str, Any]) -> str:
    """Return a row as one line for the terminal."""
    sign = {True: "right", False: "WRONG", None: "-"}[row["ok"]]
    parts = [f"{row['name']}: {sign}"]
    if row.get("value") is not None:
        parts.append(f"{row['value']:.4g} {row.get('unit', '')}".rstrip())
    if row.get("limit") is not None:
        parts.append(f"(limit {row['limit']:.4g})")
    return " ".join([*parts, row.get("note", "")]).rstrip()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a results file, without a last line that was cut short."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1] if line.endswith("}")]


def select_newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of each question: a results file may hold several runs, one after the other."""
    return list({(row["stage"], row["name"]): row for row in rows}.values())


def require_cuda(device: torch.device) -> None:
    """Raise NotHere on a device other than a CUDA GPU."""
    if device.type != "cuda":
        raise NotHere("needs a CUDA GPU")


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
