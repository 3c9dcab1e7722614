"""The report of a verification: one line for each check, and the measured numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import Message


@dataclass(frozen=True)
class Check:
    """The result of one check. `judged` is False for what is only measured; then `ok` is True."""

    name: str
    ok: bool
    detail: str
    judged: bool = True


@dataclass
class Report:
    """The checks of one file.

    Attributes:
        file: name of the file.
        checks: results, in the order of the checks.
        measured: numbers by name: prediction_error, delta_error, preview_psnr, plain_prediction_error,
            plain_preview_psnr, merged_unscaled, merged_row-scaled.
        on_check: called with each result as it is added.
    """

    file: str
    checks: list[Check] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    on_check: Callable[[Check], None] = field(default=lambda check: None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Return True if every judged check passed."""
        return all(check.ok for check in self.checks)

    def list_failures(self) -> list[str]:
        """Return the checks that failed, each as "name: detail"."""
        return [Message("{name}: {line}", name=c.name, line=c.detail) for c in self.checks if not c.ok]

    def add(self, name: str, ok: bool, detail: str, *, judged: bool = True) -> bool:
        """Add a check's result, and return `ok`."""
        check = Check(name, bool(ok), detail, judged)
        self.checks.append(check)
        self.on_check(check)
        return bool(ok)

    def measure(self, name: str, value: float) -> float:
        """Record a number, and return it."""
        self.measured[name] = float(value)
        return float(value)

    def to_json(self) -> dict[str, Any]:
        """Return what verify.json stores: plain JSON types; infinity (identical images) becomes None."""
        return {
            "file": self.file,
            "ok": self.ok,
            "checks": [vars(check) for check in self.checks],
            "measured": {name: value if math.isfinite(value) else None for name, value in self.measured.items()},
        }

    def format_lines(self) -> list[str]:
        """Return one line per check, for the log."""
        marks = {(True, True): "ok  ", (False, True): "FAIL", (True, False): "info", (False, False): "info"}
        return [
            Message("{mark} {name}: {line}", mark=marks[c.ok, c.judged], name=c.name, line=c.detail)
            for c in self.checks
        ]
