"""Progress of training: a bar on a terminal, few lines in a log."""

import io
import sys

import pytest

from lora_fp8.stages import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, is_shown: bool = True) -> str:
    """What 100 steps of a second each write."""
    now = iter(range(10_000))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    with progress.Progress("job", 20, 120, is_shown=is_shown) as bar:
        for step in range(21, 121):
            bar.update(step, 0.25, 1e-4)
    return stream.getvalue()


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, io.StringIO()).splitlines()
    assert lines[0] == "job: step 30 of 120, loss 0.2500, lr 1.00e-04, 1 s per step"
    assert len(lines) == 10 and lines[-1].startswith("job: step 120 of 120")


def test_a_terminal_gets_a_bar_and_a_hidden_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = shown(monkeypatch, Terminal())
    assert "\r" in bar and "120/120" in bar and "job: step" not in bar
    assert shown(monkeypatch, io.StringIO(), is_shown=False) == ""
