"""Work on a folder that takes longer than a request: one at a time per folder, in a thread, with progress."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lora_fp8.errors import Message, UserError

from ..error_boundary import describe_error

Progress = Callable[[int, int], None]
KEPT = 64
"""Finished tasks whose results are kept."""


@dataclass
class Task:
    """A running or finished task.

    Attributes:
        number: numbers tasks from 1 on, so that a window can tell a new result from one that it has shown.
        done, total: progress; `total` is 0 before it is known.
        lines: the result, in sentences for the user.
        refused: sentences about files that were left out.
        error: why it failed; "" while it runs, or if it did not.
    """

    number: int
    done: int = 0
    total: int = 0
    running: bool = True
    lines: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    error: str = ""


_lock = threading.Lock()
_tasks: dict[Path, Task] = {}
_count = 0


def start(folder: Path, work: Callable[[Task, Progress], None], language: str) -> Task:
    """Run `work` in a thread.

    Args:
        folder: what it works on.
        work: is given the task, to add its result to, and a function for progress (done, total).
        language: of an error message.

    Raises:
        UserError: another task is at work on this folder.
    """
    global _count
    with _lock:
        former = _tasks.pop(folder, None)
        if former is not None and former.running:
            _tasks[folder] = former
            raise UserError(
                Message("{path}: another change of this folder is in progress; try again", path=folder.name)
            )
        _count += 1
        task = _tasks[folder] = Task(_count)
        for other in [path for path, known in _tasks.items() if not known.running][:-KEPT]:
            del _tasks[other]

    def run() -> None:
        try:
            work(task, lambda done, total: _set_progress(task, done, total))
        except Exception as error:  # any error becomes a sentence, as in a request
            task.error = describe_error(language, error)
        finally:
            task.running = False

    threading.Thread(target=run, daemon=True).start()
    return task


def find(folder: Path) -> Task | None:
    """Return the newest task of a folder; None if there was none."""
    return _tasks.get(folder)


def _set_progress(task: Task, done: int, total: int) -> None:
    task.done, task.total = done, total
