"""Show how far training is: a bar on a terminal, a line every ten seconds in a log."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

SECONDS = 10
"""Seconds between two lines in a log."""


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
            figures = f"loss {loss:.4f}, lr {lr:.2e}, {per_step:.3g} s per step"
            print(f"{self._name}: step {step} of {self._steps}, {figures}", file=sys.stderr, flush=True)
