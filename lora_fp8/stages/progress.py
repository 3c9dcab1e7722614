"""Show how far training or a download is: a bar on a terminal, a line every ten seconds in a log.

`StageProgress` writes the progress of everything else into the run's events, for the page and other readers.
"""

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from ..common.messages import get_language, translate
from ..common.numbers import format_bytes
from ..errors import Message
from ..families.sources.download import Progress as TransferProgress
from ..run import Run

SECONDS = 10
"""Seconds between two lines in a log."""
REPORT_SECONDS = 2.0
"""Seconds between two reports of a download."""


class Progress:
    """Progress of training, on stderr.

    Args:
        name: name of the job.
        step: number of steps that are done.
        steps: number of all steps.
        is_shown: False shows nothing.
    """

    def __init__(self, name: str, step: int, steps: int, *, is_shown: bool) -> None:
        on_terminal = is_shown and sys.stderr.isatty()
        self._name, self._steps, self._writes_lines = name, steps, is_shown and not on_terminal
        self._first, self._began = step, time.monotonic()
        self._last_line = self._began
        self._bar = tqdm(total=steps, initial=step, desc=name, unit="step", disable=not on_terminal)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, step: int, loss: float, lr: float) -> None:
        """Show that this step is done, with its loss and learning rate."""
        self._bar.update()
        self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}", refresh=False)
        now = time.monotonic()
        if self._writes_lines and (now - self._last_line >= SECONDS or step == self._steps):
            self._last_line = now
            per_step = (now - self._began) / (step - self._first)
            _write(
                Message(
                    "{name}: step {step} of {steps}, loss {loss}, lr {lr}, {seconds} s per step",
                    name=self._name,
                    step=step,
                    steps=self._steps,
                    loss=f"{loss:.4f}",
                    lr=f"{lr:.2e}",
                    seconds=f"{per_step:.3g}",
                )
            )


class StageProgress:
    """Progress of a stage that has no steps, as events "progress" of the run: at most one every two seconds.

    Args:
        run: whose log it is.
        stage: what is counted: a stage ("cache", "load", "preflight", "verify"), "previews" or "validation".
        seconds: between two events; 0 logs each.
    """

    def __init__(self, run: Run, stage: str, *, seconds: float = 2.0) -> None:
        self._run, self._stage, self._seconds = run, stage, seconds
        self._last = time.monotonic()

    def begin(self, total: int) -> None:
        """Log that none of `total` is done, where the first may take minutes."""
        if total:
            self._run.log_event("progress", stage=self._stage, done=0, total=total)

    def update(self, done: int, total: int, **more: object) -> None:
        """Log that `done` of `total` are done, and what else is known."""
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            self._run.log_event("progress", stage=self._stage, done=done, total=total, **more)


class DownloadProgress:
    """Progress of a download or upload, on stderr.

    Args:
        name: of what is transferred.
        is_shown: False shows nothing.
        report: called with the progress at most every two seconds, and when everything has arrived.
    """

    def __init__(
        self, name: str, *, is_shown: bool, report: Callable[[TransferProgress], object] = lambda progress: None
    ) -> None:
        self._report, self._last_report = report, -math.inf
        on_terminal = is_shown and sys.stderr.isatty()
        self._name, self._writes_lines, self._last_line = name, is_shown and not on_terminal, time.monotonic()
        self._bar = tqdm(desc=name, unit="B", unit_scale=True, unit_divisor=1024, disable=not on_terminal)

    def __enter__(self) -> "DownloadProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, progress: TransferProgress) -> None:
        """Show the bytes that have arrived."""
        if self._bar.total is None and progress.total:
            self._bar.total = progress.total
            self._bar.initial = self._bar.n = progress.done  # what was here is no part of the speed
        self._bar.set_postfix_str(translate(get_language(), progress.waiting), refresh=False)
        self._bar.update(progress.done - self._bar.n)
        now = time.monotonic()
        if now - self._last_report >= REPORT_SECONDS or progress.done == progress.total:
            self._last_report = now
            self._report(progress)
        if self._writes_lines and (now - self._last_line >= SECONDS or progress.done == progress.total):
            self._last_line = now
            self._writes_lines = progress.done < progress.total  # the last line once
            line = Message(
                "{name}: {done} of {total}, {speed}/s",
                name=self._name,
                done=format_bytes(progress.done),
                total=format_bytes(progress.total),
                speed=format_bytes(int(progress.speed)),
            )
            if progress.waiting:
                line = Message("{line}, {more}", line=line, more=progress.waiting)
            if progress.eta is not None:
                line = Message("{line}, {time} left", line=line, time=tqdm.format_interval(progress.eta))
            _write(line)


def _write(line: Message) -> None:
    print(translate(get_language(), line), file=sys.stderr, flush=True)
