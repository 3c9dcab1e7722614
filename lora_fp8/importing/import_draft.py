"""An import under construction, and its result: our settings, and an account of each key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from ..config.validation import find_model
from ..errors import Joined, Message, UserError
from ..settings import Job
from . import remarks
from .readers import HIDDEN, NOTHING, SECRET_KEY, Unfit, hide, is_off, keep_value
from .rules import JOINT, Rule
from .source_files import Source, read_source


@dataclass(frozen=True)
class Tool:
    """Another trainer.

    Attributes:
        name: as given to `--from`.
        title: its name, and the version that the table was made from.
        rules: key -> rule. Positions in lists are `*`; `name.**` matches all keys below `name` without a rule of their
            own.
        defaults: the tool's defaults for keys that a file lacks, where ours differ.
        recognise: given a file, returns what shows that it belongs to this tool, or "".
        flatten: given a draft, yields (key as shown, key of the table, value), reading the files that are referred to.
        combine: converts everything that depends on more than one key, or on the folders.
        aliases: other names of keys (from a settings page, for example).
        prefix: prefix of most keys of the table, left out when they are shown.
        loose: a key has the same meaning in whatever section it is.
    """

    name: str
    title: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    recognise: Callable[[Source], str]
    flatten: Callable[[Draft], Iterable[tuple[str, str, Any]]]
    combine: Callable[[Draft], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    loose: bool = False

    def find_rule(self, key: str) -> Rule | None:
        """Return the rule of a key; None if the table does not know the key."""
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)
        if pattern in self.rules:
            return self.rules[pattern]
        parts = pattern.split(".")
        for end in range(len(parts) - 1, 0, -1):
            rule = self.rules.get(".".join(parts[:end]) + ".**")
            if rule is not None:
                return rule
        return self.rules.get(parts[-1]) if self.loose else None


@dataclass(frozen=True)
class Entry:
    """What one key was converted to.

    Attributes:
        key: as in the file, preceded by the file's name if it is another file.
        value: as shown; secrets are hidden. Empty if the tool has no such value.
        to: our settings with their values, such as 'adapter.rank = 16'; empty if there are none.
        note: the remark, the difference, or the reason.
        off: the key switches something off, is empty, or does not affect what is learned.
    """

    key: str
    value: str
    to: str = ""
    note: str = ""
    off: bool = False


@dataclass
class Import:
    """The converted settings, and an entry for every key."""

    tool: Tool
    source: Path
    why: str
    settings: dict[str, Any]
    comments: dict[str, str]
    mapped: list[Entry]
    differs: list[Entry]
    no_counterpart: list[Entry]
    unknown: list[Entry]
    defaults: list[Entry]
    todo: list[str]
    notes: list[str]
    files: list[Path] = field(default_factory=list)
    """Existing files that this one refers to."""

    @property
    def only_pictures(self) -> bool:
        """Return True for a dataset file alone, which says nothing about the training."""
        return not self.settings.keys() & {"adapter", "optimizer", "schedule"}


@dataclass
class Folder:
    """A folder of images of the other tool, and the number of its images if it is on this machine.

    Attributes:
        path: as in the file.
        repeats, trigger, prefix, suffix: as our settings of these names.
        images: number of images in it; None if the folder is not on this machine.
        captionless: how many of them have no caption file.
        trigger_is_caption: the trigger is the whole caption of images that have none.
        control: the folder of control images.
        mask: as our setting of this name.
        regularization, weight, resolution: as our settings of these names.
    """

    path: str
    repeats: float = 1
    trigger: str = ""
    prefix: str = ""
    suffix: str = ""
    images: int | None = None
    captionless: int = 0
    trigger_is_caption: bool = False
    control: str = ""
    mask: str = ""
    regularization: bool = False
    weight: float = 1.0
    resolution: int = 0


class Draft:
    """The converted settings, under construction. `finish` ensures that each key of the file is reported exactly once.

    Attributes:
        given: the file's keys, by their names in the tool's table, with their values.
        family: our name of the architecture; "" while unknown.
        defaults: the tool's defaults for keys that the file lacks, initially `Tool.defaults`.
        settings: {"adapter.rank": 16}, in the order of writing.
    """

    def __init__(self, tool: Tool, source: Source, why: str, family: str):
        self.tool, self.source, self.why = tool, source, why
        self.defaults = dict(tool.defaults)
        self.family = family
        self.given: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.folders: list[Folder] = []
        self.assumed: dict[str, tuple[Any, str, str]] = {}
        self.comments: dict[str, list[str]] = {}
        self.lists: dict[str, list[Entry]] = {name: [] for name in ("mapped", "differs", "none", "unknown", "defaults")}
        self.todo: list[str] = []
        self.notes = list(source.notes)
        self.files: list[Path] = []
        self.done: set[str] = set()
        self.waiting: list[str] = []  # keys, with their values, that cannot be converted while the family is unknown
        for label, key, value in tool.flatten(self):
            key = tool.aliases.get(key, key)
            if key in self.given:  # a section of kohya's files overrides the one before
                overridden, equal = self.labels[key], self.given[key] == value
                note = Message("{key} sets it again and takes precedence", key=label)
                self.lists["none"].append(_make_entry(overridden, self.given[key], note=note, off=equal))
            self.given[key], self.labels[key] = value, label

    # -------------------------------------------------------------------------------------------------------- reading

    def has(self, key: str) -> bool:
        """Return True if the file sets this key to a value."""
        return self.given.get(key) not in NOTHING

    def get(self, key: str, read: Callable[[Any], Any] = keep_value) -> Any:
        """Return the key's value, or else the tool's default, or None. The key still has to be reported."""
        value = self.given[key] if self.has(key) else self.defaults.get(key)
        try:
            return None if value in NOTHING else read(value)
        except Unfit as error:
            raise UserError(
                Message("{path}: {key}: {line}", path=self.source.path, key=self.labels[key], line=hide(str(error)))
            ) from None

    def collect(self, name: str, tables: Iterable[str]) -> tuple[list[str], list[Any]]:
        """Return a setting's keys in several tables, and its value in each.

        Args:
            name: its name in a table.
            tables: beginnings of the keys, such as "concepts.0.".
        """
        keys = [f"{table}{name}" for table in tables]
        return keys, [self.get(key) for key in keys]

    def find_keys(self, pattern: str) -> list[str]:
        """Return the file's keys that match a pattern with `*` for positions in lists."""
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$")
        return [key for key in self.given if regex.match(key)]

    def find(self, path: str) -> Path | None:
        """Find a file or folder that the file refers to: as given, relative to the file, or beside it by its name."""
        beside = self.source.path.parent
        name = PureWindowsPath(path).name
        existing = None
        try:
            for candidate in (Path(path).expanduser(), beside / path):
                if existing is None and name and self.source.reach(candidate) and candidate.exists():
                    existing = candidate
            # Folders of another machine have other contents here, but a settings file may have been copied along.
            if existing is None and name and self.source.reach(beside / name) and (beside / name).is_file():
                self.notes.append(
                    Message(
                        "{path} was not found; {name} beside {file} was read instead",
                        path=path,
                        name=name,
                        file=self.source.path.name,
                    )
                )
                existing = beside / name
            if existing is not None and existing.is_file() and existing not in self.files:
                self.files.append(existing)
        except (OSError, ValueError, RuntimeError):  # not a valid path on this system
            return None
        return existing

    def refer(self, key: str, path: str) -> Any:
        """Read a settings file that this one refers to; return None, and add a note, if it was not found."""
        file = self.find(path)
        if file is None or not file.is_file():
            self.notes.append(remarks.PUT_BESIDE(key=key, path=repr(path), file=self.source.path.name))
            return None
        return read_source(file).data

    # -------------------------------------------------------------------------------------------------------- writing

    def set(self, setting: str, value: Any, comment: str = "") -> None:
        """Set one of our settings. Text goes through `hide`."""
        if isinstance(value, dict):
            value = {key: hide(entry) if isinstance(entry, str) else entry for key, entry in value.items()}
        self.settings[setting] = hide(value) if isinstance(value, str) else value
        if comment:
            self.comments.setdefault(setting, []).append(comment)

    def assume(self, setting: str, value: Any, key: str, note: str) -> None:
        """Set one of our settings to the tool's default unless the file sets it; `key` is the tool's name for it."""
        self.assumed[setting] = (value, key, note)

    def add_difference(self, what: str, note: str) -> None:
        """Report a difference that no key of the file is about."""
        self.lists["differs"].append(Entry(what, "", "", note))

    def add_todo(self, setting: str, what: str) -> None:
        """Add a TODO for one of our settings, to the file and to the report."""
        self.comments.setdefault(setting, []).append(Message("TODO: {line}", line=what))
        self.todo.append(Message("{key}: {line}", key=setting, line=what))

    def report_mapped(
        self, keys: str | Iterable[str], settings: Mapping[str, Any] | None = None, note: str = ""
    ) -> None:
        """Report that these keys have the same meaning in our settings."""
        self._report_keys("mapped", keys, settings or {}, note)

    def report_different(self, keys: str | Iterable[str], settings: Mapping[str, Any] | None, note: str) -> None:
        """Report that the counterpart of these keys differs in meaning."""
        self._report_keys("differs", keys, settings or {}, note)

    def report_unmatched(self, keys: str | Iterable[str], note: str, off: bool = False) -> None:
        """Report that these keys have no counterpart; with `off`, as they are set, they need none."""
        self._report_keys("none", keys, {}, note, off)

    def report_unmatched_parts(self, key: str, parts: Iterable[str], note: str) -> None:
        """Report that these parts of a key's value have no counterpart, where settings were made from other parts."""
        self.lists["none"].append(_make_entry(self.labels[key], list(parts), note=note))

    def wait(self, keys: str | Iterable[str]) -> None:
        """Report that these keys depend on the architecture, which is unknown; `finish` adds a TODO that names them."""
        before = len(self.lists["none"])
        self._report_keys("none", keys, {}, remarks.NEEDS_FAMILY)
        added = self.lists["none"][before:]
        self.waiting += [f"{entry.key} = {entry.value}" for entry in added if not entry.off]

    def _report_keys(
        self, kind: str, keys: str | Iterable[str], settings: Mapping[str, Any], note: str, off: bool = False
    ) -> None:
        keys = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
        here = [key for key in keys if key in self.given and key not in self.done]
        real = [key for key in here if self.has(key)]
        written = Joined(", ", [_format_assignment(name, value) for name, value in settings.items()])
        self._report_empty(here)
        for key in real:
            self.lists[kind].append(_make_entry(self.labels[key], self.given[key], written, note, off))
        origin: str = ", ".join(self.labels[key] for key in real)
        assumed = [key for key in keys if key not in real and key not in self.done and key in self.defaults]
        if settings and assumed and not real:
            origin = remarks.TOOLS_DEFAULT(tool=self.tool.name)
            for key in assumed:
                self.report_default(key.removeprefix(self.tool.prefix), self.defaults[key], written, note)
        for name, value in settings.items():
            self.set(name, value, origin)
        self.done.update(here)

    def _report_empty(self, keys: Iterable[str]) -> None:
        for key in keys:
            if not self.has(key):
                self.lists["none"].append(_make_entry(self.labels[key], self.given[key], note=remarks.EMPTY, off=True))

    def report_default(self, key: str, value: Any, written: str, note: str = "") -> None:
        """Report a default of the tool that was written because the file does not set it.

        Args:
            key: the tool's key, as shown.
            value: the default.
            written: our settings with their values.
            note: a remark.
        """
        self.lists["defaults"].append(_make_entry(key, value, written, note))

    # ------------------------------------------------------------------------------------------------------ the end

    def finish(self) -> Import:
        """Apply the rules to the keys that `Tool.combine` left, and check that none is lost."""
        for key, value in self.given.items():
            if key not in self.done:
                self._apply(key, value)
        self._set_defaults()
        if not self.folders:
            self.folders = [Folder("TODO")]
            self.add_todo("dataset.folders", Message("the file names no folder of images; add yours"))
        self._shorten_warmup()
        self._set_missing_caption()
        self._name_waiting()
        lost = self.given.keys() - self.done
        assert not lost, f"{self.tool.name}: no account of {sorted(lost)}"
        return Import(
            self.tool,
            self.source.path,
            self.why,
            _nest(self.settings, self.folders),
            {key: remarks.join(lines) for key, lines in self.comments.items()},
            self.lists["mapped"],
            self.lists["differs"],
            self.lists["none"],
            self.lists["unknown"],
            self.lists["defaults"],
            self.todo,
            self.notes,
            self.files,
        )

    def _set_defaults(self) -> None:
        """Set the tool's defaults, and those of `assume`, where the file sets nothing."""
        for key, value in self.defaults.items():
            rule = self.tool.rules.get(key)
            if key not in self.given and rule is not None and rule.to and rule.to not in self.settings:
                self._report_keys("mapped", key, {rule.to: rule.read(value)}, rule.note)
        for setting, (value, key, note) in self.assumed.items():
            if setting not in self.settings:
                # The value is in our units: the tool's own may be a flag, or not exist.
                self.lists["defaults"].append(Entry(key, "", _format_assignment(setting, value), note))
                self.set(setting, value, Message("not in the file; {line}", line=note))

    def _name_waiting(self) -> None:
        """Add a TODO for the keys that were not converted because the architecture is unknown."""
        if self.waiting:
            what = Message(
                "{names} depend on the architecture and were not written. Import again with --family NAME",
                names=", ".join(dict.fromkeys(self.waiting)),
            )
            self.add_todo("model.family", what)

    def _shorten_warmup(self) -> None:
        """Keep the warm-up shorter than the training, as our settings require."""
        warmup, steps = self.settings.get("schedule.warmup"), self.settings.get("train.steps")
        if isinstance(warmup, int) and isinstance(steps, int) and 0 < steps <= warmup:
            self.settings["schedule.warmup"] = steps - 1
            self.add_todo(
                "schedule.warmup",
                Message(
                    "the file has {warmup} warm-up steps, but the training has only {steps} steps; choose a "
                    "shorter warm-up",
                    warmup=warmup,
                    steps=steps,
                ),
            )

    def _set_missing_caption(self) -> None:
        """Set dataset.missing_caption if a folder's trigger is the caption of its images."""
        if not any(folder.trigger_is_caption for folder in self.folders):
            return
        if all(folder.trigger or folder.regularization for folder in self.folders):
            self.set(
                "dataset.missing_caption",
                "trigger",
                Message("the trigger of a folder is the caption of images that have none, as in the other trainer"),
            )
        else:
            self.add_todo(
                "dataset.folders",
                Message("add captions, or a trigger for each folder and dataset.missing_caption = 'trigger'"),
            )

    def _apply(self, key: str, value: Any) -> None:
        rule = self.tool.find_rule(key)
        if rule is None:
            self.lists["unknown"].append(_make_entry(self.labels[key], value))
            self.done.add(key)
            return
        if not self.has(key):
            self.report_unmatched(key, remarks.EMPTY, off=True)
        elif rule is JOINT:
            self.report_unmatched(key, Message("this setting has no effect with the other settings of this file"))
        elif rule.kind in ("none", "idle"):
            off = rule.kind == "idle" or is_off(value) or value in rule.off or str(value) in map(str, rule.off)
            self.report_unmatched(key, rule.note, off=off)
        elif not rule.to:
            if value is False and False not in rule.off:
                self.report_different(key, {}, Message("this trainer cannot switch it off: {line}", line=rule.note))
            else:
                self.report_mapped(key, {}, rule.note)
        else:
            try:
                ours = rule.read(value)
            except Unfit as error:
                self.report_unmatched(key, Message("{setting} was not written: {line}", setting=rule.to, line=error))
                self.todo.append(Message("{key}: {line}", key=rule.to, line=str(error)))
                return
            self._report_keys(rule.kind, key, {rule.to: ours}, rule.note)


def _make_entry(key: str, value: Any, written: str = "", note: str = "", off: bool = False) -> Entry:
    """Return the entry of a key, without secrets."""
    secret = SECRET_KEY.search(key) and value not in NOTHING
    printed = HIDDEN if secret else _shorten(hide(_format_value(value)))
    return Entry(hide(key), printed, hide(written), hide(note), off)


def _format_assignment(setting: str, value: Any) -> Message:
    return Message("{key} = {value}", key=setting, value=_shorten(_format_value(value)))


def _shorten(text: str) -> str:
    if len(text) <= 100:
        return text
    return Message("{text} ... ({count} characters)", text=text[:80], count=len(text))


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e15 else str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _round_repeats(repeats: float) -> float:
    """Round to four decimals, or to a whole number if that is the same; at least the setting's minimum."""
    rounded = max(0.01, round(repeats, 4))
    return int(rounded) if float(rounded).is_integer() else rounded


def _nest(settings: dict[str, Any], folders: list[Folder]) -> dict[str, Any]:
    """Convert {"adapter.rank": 16} to nested tables in the order of our config, and add the folders."""
    data: dict[str, Any] = {}
    order = list(Job.model_fields)

    def place(setting: str) -> tuple[int, int]:
        section, _, name = setting.rpartition(".")
        model = find_model((section,)) if section else None
        fields = list(model.model_fields) if model is not None else [setting]
        return (order.index(section) if section else -1, fields.index(name or setting))

    for setting in sorted(settings, key=place):
        section, _, name = setting.rpartition(".")
        (data.setdefault(section, {}) if section else data)[name] = settings[setting]
    tables = data.setdefault("dataset", {})
    tables["folders"] = [
        {
            "path": folder.path,
            **({"repeats": _round_repeats(folder.repeats)} if folder.repeats != 1 else {}),
            **({"trigger": folder.trigger} if folder.trigger else {}),
            **({"prefix": folder.prefix} if folder.prefix else {}),
            **({"suffix": folder.suffix} if folder.suffix else {}),
            **({"regularization": True} if folder.regularization else {}),
            **({"weight": folder.weight} if folder.weight != 1 else {}),
            **({"resolution": folder.resolution} if folder.resolution else {}),
            **({"control": folder.control} if folder.control else {}),
            **({"mask": folder.mask} if folder.mask else {}),
        }
        for folder in folders
    ]
    return {name: data[name] for name in sorted(data, key=lambda name: order.index(name))}
