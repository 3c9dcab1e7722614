"""Read what a report says from a run folder, and nothing else: no weight is loaded, and nothing is measured again.

A run folder may be damaged, of an earlier version, or from somebody else. What is missing is left out; values are
checked before they are used.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from ... import config, families
from ...common.json_files import read_object
from ...common.messages import restore
from ...common.numbers import is_finite_number
from ...common.reading import load_text, open_regular
from ...config import recipes, unused
from ...config.recipes import Value
from ...errors import UserError
from ...jobs.run_events import find_saved_step
from ...run import Run, Unreadable
from ...run.run_log import RunLog

UNCOUNTED = ("step", "progress", "download")
"""Events that are read by `RunLog` only: there may be hundreds of thousands."""


@dataclass(frozen=True)
class ResultFile:
    """A LoRA file of a run.

    Attributes:
        name: relative to export/.
        num_bytes: its size.
        sha256: of the whole file, as hosts show it; "" if it cannot be read.
        step: optimizer steps of its adapter, as its header says; "" if unknown.
        report: its verification, as in verify.json; {} without one.
    """

    name: str
    num_bytes: int
    sha256: str
    step: str
    report: dict[str, Any]


class Contents:
    """What is known of a run.

    Args:
        run: its folder.

    Attributes:
        log: curves, and the newest event of each kind.
        events: all events but steps and progress, oldest first.
        settings: the resolved settings by key, such as "train.steps"; {} if they cannot be read.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.log = RunLog(run.events_file).read()
        times: list[list[float]] = []  # first and last event of each start
        self.events: list[dict[str, Any]] = []
        for event in run.read_events():
            if is_finite_number(t := event.get("t")):
                if event["event"] == "start" or not times:
                    times.append([t, t])
                times[-1][1] = t
            if event["event"] not in UNCOUNTED:
                self.events.append(event)
        self._times = times
        self.settings = _read_settings(run.config_file)

    @cached_property
    def state(self) -> str:
        """Return "running", "done", "stopped", "error", "interrupted" (it ended without a word) or "unknown"."""
        try:
            if self.run.is_locked():
                return "running"
        except Unreadable:
            return "unknown"
        return str(self.log.facts.end.get("event") or "interrupted")

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return str(self.settings.get("name") or self.run.path.resolve().name)

    @property
    def began(self) -> float:
        """Return the unix seconds of the first event; 0 without one."""
        return self._times[0][0] if self._times else 0.0

    @property
    def newest(self) -> float:
        """Return the unix seconds of the newest event; 0 without one."""
        return self._times[-1][1] if self._times else 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of all starts together, without the time between a stop and the next start."""
        return sum(last - first for first, last in self._times)

    @property
    def starts(self) -> int:
        """Return how often it was started."""
        return sum(event["event"] == "start" for event in self.events)

    @property
    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint."""
        return find_saved_step(self.run.path)

    def find_newest(self, kind: str) -> dict[str, Any]:
        """Return the newest event of a kind; {} without one."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})

    @property
    def base_title(self) -> str:
        """Return the title of the architecture."""
        family = str(self.settings.get("model.family", ""))
        known = families.get(family).title if family in families.list_families() else family
        return str(self.log.facts.model.get("base") or known)

    @property
    def base_name(self) -> str:
        """Return the base as it was given: its id on a hub, or the last part of a path."""
        path = str(self.settings.get("model.path", ""))
        is_path = path.startswith(("/", "~", ".", "\\")) or ":" in path[:3] or path.count("/") > 1
        return PurePath(path.replace("\\", "/")).name if is_path else path

    @property
    def peak_gb(self) -> float:
        """Return the most memory of a step, in GiB; 0 if unknown."""
        return max((value for _, value in self.log.measures["vram_gb"].list_points()), default=0.0)

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """Return the step of the lowest held-out loss, and that loss; None before there are two validations."""
        return self.log.find_best()

    @cached_property
    def files(self) -> list[ResultFile]:
        """Return the LoRA files in export/, those of the end of the training first."""
        try:
            reports = restore(read_object(self.run.verify_file))
        except (OSError, ValueError):
            reports = {}
        export = self.run.export
        paths = sorted(export.glob("**/*.safetensors"), key=lambda path: (path.parent != export, str(path)))
        files = []
        for path in paths:
            if path.is_symlink() or not path.is_file():
                continue
            report = restore(reports.get(path.name)) if path.parent == export else None
            files.append(_describe_file(path, path.relative_to(export).as_posix(), report))
        return files

    def list_differences(self) -> list[tuple[str, Any, Any]]:
        """Return the settings that differ from their defaults, as (key, value, default)."""
        return [
            (key, self.settings[key], default)
            for key, default in unused.list_defaults().items()
            if key in self.settings and key != "preset" and self.settings[key] != default
        ]

    def find_reasons(self) -> dict[str, str]:
        """Return the reasons of recipes whose values this run has, by setting.

        The config of a run no longer names its presets. A recipe counts if all of its values are those of the run; of
        recipes that give different reasons for a setting, none is taken.
        """
        family = str(self.settings.get("model.family", ""))
        if family not in families.list_families():
            return {}
        reasons: dict[str, set[str]] = {}
        for values in _list_recipes(family):
            if values and all(self.settings.get(value.key) == value.value for value in values):
                for value in values:
                    reasons.setdefault(value.key, set()).add(value.why)
        return {key: next(iter(texts)) for key, texts in reasons.items() if len(texts) == 1}


def _list_recipes(family: str) -> Iterable[Sequence[Value]]:
    for goal in recipes.find_goals(family):
        yield recipes.list_goal_values(goal, family)
    for card in recipes.CARDS:
        yield recipes.find_preset_values(recipes.format_card_name(card), family, draws=True) or []


def _describe_file(path: Path, name: str, report: Any) -> ResultFile:
    sha256 = step = ""
    with contextlib.suppress(OSError), open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="numpy") as header:  # needs no torch
        step = (header.metadata() or {}).get("ss_steps", "")
    return ResultFile(name, path.stat().st_size, sha256, step, report if isinstance(report, dict) else {})


def _read_settings(file: Path) -> dict[str, Any]:
    """Read a run's settings by key. Values are not validated: they may be of a version that had other bounds."""
    try:
        return unused.flatten_tables(config.read_toml(load_text(file)))
    except (OSError, ValueError, UserError):
        return {}
