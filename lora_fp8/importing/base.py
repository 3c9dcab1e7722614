"""What every importer is made of: reading a file, rules for its keys, and the draft that keeps account of each key."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from lora_fp8 import config, wording
from lora_fp8.config import UserError

NOTHING = (None, "", (), [], {})
"""Values that mean "not set" in every tool: the settings pages write them for each empty field."""
SECRET_KEY = re.compile(
    r"(^|[._-])(?:token|passw(?:or)?d|secret|credentials?|access_key(?:_id)?|webhook(?:_url|_config)?)$"
    r"|(?:hf|hub|huggingface|access|auth|bot|api|wandb|github|civitai|user|session)_?(?:api_?)?(?:token|key)$|secret",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}"
    r"|^[0-9a-f]{40}$|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
SECRET_ASSIGNMENT = re.compile(
    r"((?:token|api[_-]?key|secret|passw(?:or)?d)(?:\s*=\s*|[\"']\s*:\s*)[\"']?)[^\s\"',}]+"
    r"|(--[\w-]*(?:token|api[_-]?key|secret|passw(?:or)?d)\s+)\S+",
    re.IGNORECASE,
)
HIDDEN = "(not shown)"
MOST_VALUES = 100_000
"""Of a settings file; a few lines of YAML may stand for more than a memory holds."""


class Unfit(Exception):
    """A value that our setting does not take; the message says why and what was done instead."""


def hide(text: str) -> str:
    """The text without tokens, API keys and passwords in URLs."""
    return SECRET_ASSIGNMENT.sub(lambda m: (m[1] or m[2]) + HIDDEN, SECRET_VALUE.sub(HIDDEN, text))


# ---------------------------------------------------------------------------------------------------------------------
# Values


def same(value: Any) -> Any:
    """As it is."""
    return value


def text(value: Any) -> str:
    """Text; a number becomes its digits."""
    if isinstance(value, dict | list):
        raise Unfit("is not text")
    return str(value)


def number(value: Any) -> float:
    """A number, which settings pages and YAML (1e-4 without a point) may hold as text."""
    if isinstance(value, bool):
        raise Unfit(f"{value} is not a number")
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Unfit(f"{wording.shown(value)} is not a number") from None
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise Unfit("is not a finite number")
    return found


def whole(value: Any) -> int:
    """A whole number, which may be held as text or with a point."""
    found = number(value)
    if found != int(found):
        raise Unfit(f"{wording.shown(value)} is not a whole number")
    return int(found)


def positive(value: Any) -> int:
    """A whole number of at least 1."""
    found = whole(value)
    if found < 1:
        raise Unfit(f"{wording.shown(value)} is less than 1")
    return found


def flag(value: Any) -> bool:
    """True or false, which may be held as text or 0 and 1."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise Unfit(f"{wording.shown(value)} is neither true nor false")
    return found


def listed(value: Any) -> list[Any]:
    """A list, or one value as a list of it."""
    if isinstance(value, bool | dict):
        raise Unfit(f"{wording.shown(value)} is not a list")
    return list(value) if isinstance(value, list | tuple) else [value]


def pair(value: Any) -> tuple[float, float]:
    """Two numbers in a list."""
    found = listed(value)
    if len(found) != 2:
        raise Unfit(f"{wording.shown(value)} are not two numbers")
    return number(found[0]), number(found[1])


def is_off(value: Any) -> bool:
    """Whether a value switches its key off: nothing, false, zero or "none"."""
    return (
        value in NOTHING or value is False or str(value).strip().lower() in ("0", "0.0", "false", "none", "no", "off")
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rules: what one key becomes


@dataclass(frozen=True)
class Rule:
    """What one key of another tool becomes.

    Attributes:
        kind: mapped, differs, none (no counterpart), idle (no effect on what is learned), joint (`Tool.combine` says).
        to: our setting, such as "adapter.rank"; empty when there is none.
        read: their value -> ours; raises `Unfit`.
        note: a remark, the difference, or why there is no counterpart and what to do instead.
        off: further values, beside `is_off`, at which a key without counterpart has no effect anyway.
    """

    kind: str
    to: str = ""
    read: Callable[[Any], Any] = same
    note: str = ""
    off: tuple[Any, ...] = ()


JOINT = Rule("joint")


def to(setting: str, read: Callable[[Any], Any] = same, note: str = "") -> Rule:
    """Means the same here."""
    return Rule("mapped", setting, read, note)


def near(setting: str, read: Callable[[Any], Any], note: str) -> Rule:
    """Has a setting here that differs in meaning."""
    return Rule("differs", setting, read, note)


def always(note: str) -> Rule:
    """What is always so here, and needs no setting. A value that switches it off is told."""
    return Rule("mapped", "", same, note)


def none(note: str, *off: Any) -> Rule:
    """Has no counterpart."""
    return Rule("none", "", same, note, off)


def idle(note: str = "says how the machine is used, not what is learned") -> Rule:
    """Has no counterpart and needs none."""
    return Rule("idle", "", same, note)


@dataclass(frozen=True)
class Tool:
    """Another trainer.

    Attributes:
        name: what `--from` takes.
        title: its name, and the version that the table was made from.
        rules: key -> rule. Positions in lists are `*`; `name.**` stands for all below `name` that has no rule itself.
        defaults: what the tool takes for keys that a file lacks, where ours would be something else.
        recognise: file -> what shows that it is of this tool, or "".
        flatten: file -> (key as shown, key of the table, value); reads the files that it refers to.
        combine: everything that takes more than one key, or a look at the folders.
        aliases: other names of keys (of a settings page, for example).
        prefix: what stands in front of most keys of the table, and is left out when they are shown.
        loose: the name of a key alone says what it is, in whatever section it stands.
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

    def rule(self, key: str) -> Rule | None:
        """The rule of a key, or None when the table does not know it."""
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)
        if pattern in self.rules:
            return self.rules[pattern]
        parts = pattern.split(".")
        for end in range(len(parts) - 1, 0, -1):
            found = self.rules.get(".".join(parts[:end]) + ".**")
            if found is not None:
                return found
        return self.rules.get(parts[-1]) if self.loose else None


# ---------------------------------------------------------------------------------------------------------------------
# Files


@dataclass
class Source:
    """A file that was read.

    Attributes:
        kind: "toml", "json", "yaml" or "command".
        data: what it holds; for a command, the options by name.
        script: of a command, the Python file that it runs.
        notes: what was left out while reading.
        reach: whether a file or folder that it refers to may be looked at; a path outside is as if nothing were there.
    """

    path: Path
    kind: str
    data: Any
    script: str = ""
    notes: list[str] = field(default_factory=list)
    reach: Callable[[Path], bool] = lambda path: True


def decoded(path: Path) -> str:
    """A text file in UTF-8, or UTF-16 with a byte-order mark. Raises UserError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; give the settings file in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None


def read_source(path: Path) -> Source:
    """Read TOML, JSON, YAML or the command in a script. Raises UserError; its messages quote nothing of the file."""
    content = decoded(path)
    suffix = path.suffix.lower()
    # Neither this pattern nor that of `_joined` tries a long run from each of its characters: that takes its square.
    if suffix not in (".toml", ".json", ".yaml", ".yml") and re.search(r"\S\.py\b[\"']?\s+.*--\w", _joined(content)):
        return _read_command(path, content)
    try:
        if suffix == ".json":
            return Source(path, "json", json.loads(content))
        if suffix in (".yaml", ".yml"):
            data = yaml.safe_load(content)
            if not _countable([data], MOST_VALUES):
                raise UserError(f"{path}: more than {MOST_VALUES} values, too many for a settings file")
            return Source(path, "yaml", data)
        if suffix == ".toml":
            return Source(path, "toml", config.read_toml(content))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{path}: not valid YAML: {getattr(error, 'problem', '') or 'cannot be read'}{where}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid {suffix[1:].upper()}: {hide(str(error))}") from None
    raise UserError(
        f"{path}: expected a .toml, .json, .yaml or .yml file, or a script with the command that starts the training"
    )


def _countable(values: Iterable[Any], most: int) -> bool:
    """Whether there are at most so many values in each other; an alias of YAML counts each time that it is named."""
    waiting = list(values)
    for _ in range(most):
        if not waiting:
            return True
        one = waiting.pop()
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        if len(waiting) > most:
            return False
    return not waiting


def _joined(content: str) -> str:
    """A script with its continued lines joined: \\ of sh, ^ of cmd, ` of PowerShell."""
    return re.sub(r"(?:(?<![ \t])[ \t]+)?[\\^`][ \t]*\r?\n[ \t]*", " ", content)


ASSIGNMENTS = {
    ".bat": re.compile(r'set\s+"?(?P<name>\w+)=(?P<value>[^"]*)"?$', re.IGNORECASE),
    ".cmd": re.compile(r'set\s+"?(?P<name>\w+)=(?P<value>[^"]*)"?$', re.IGNORECASE),
    ".ps1": re.compile(r"\$(?P<name>\w+)\s*=\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s#;]+)\s*(?:[#;].*)?$"),
}
ASSIGNMENT = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s#;]*)\s*(?:[#;].*)?$")
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|%([A-Za-z_]\w*)%")


def _read_command(path: Path, content: str) -> Source:
    """The training command of a script as {option: value}, with the variables that the script sets put in."""
    suffix = path.suffix.lower()
    commands: list[tuple[str, list[str]]] = []
    variables: dict[str, str] = {}
    other = 0
    for line in _joined(content).splitlines():
        line = line.strip()
        if not line or line.startswith(("#", "::", "REM ", "rem ", "@echo", "echo ")):
            continue
        assignment = ASSIGNMENTS.get(suffix, ASSIGNMENT).match(line)
        if assignment:
            variables[assignment["name"].lower()] = assignment["value"].strip("\"'")
            continue
        try:
            # A backslash is an escape in sh, and a part of a path in a Windows script.
            words = _windows_words(line) if suffix in ASSIGNMENTS else shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}: a command cannot be read: {error}") from None
        scripts = [i for i, word in enumerate(words) if re.search(r"train\w*\.py$", word)]
        if scripts:
            commands.append((PureWindowsPath(words[scripts[-1]]).name, words[: scripts[-1]] + words[scripts[-1] + 1 :]))
        else:
            other += 1
    if not commands:
        raise UserError(f"{path}: no command in it runs a training script (...train...py)")
    if len(commands) > 1:
        raise UserError(f"{path}: {len(commands)} training commands; give a file with one")
    script, words = commands[0]
    notes = [f"{path.name} has other commands too ({other} lines), which were not read"] if other else []
    words = [VARIABLE.sub(lambda m: variables.get((m[1] or m[2]).lower(), m[0]), word) for word in words]
    options = parse_options([word for word in words if not VARIABLE.fullmatch(word)])
    unset = sorted({m[0] for word in words for m in VARIABLE.finditer(word)})
    if unset:
        notes.append(f"{', '.join(unset)}: what the script puts in there is not known, and was not read")
    return Source(path, "command", options, script, notes)


def _windows_words(line: str) -> list[str]:
    return [re.sub("[\"']", "", word) for word in re.findall(r"(?:[^\s\"']|\"[^\"]*\"|'[^']*')+", line)]


def parse_options(words: list[str]) -> dict[str, Any]:
    """--name value, --name=value, --name v1 v2 (a list) and --name alone (true)."""
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        match = re.match(r"--([A-Za-z][\w-]*)(?:=(.*))?$", word, re.DOTALL)
        if match:
            name = match[1]
            options[name] = True if match[2] is None else match[2].strip("\"'")
        elif name:
            before = options[name]
            options[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return options


def flattened(data: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted key, value) of nested tables and lists of tables; a list of plain values is a value."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from flattened(value, f"{prefix}{str(key).removeprefix('--')}.")
    elif isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        for i, item in enumerate(data):
            yield from flattened(item, f"{prefix}{i}.")
    else:
        yield prefix.removesuffix("."), data


# ---------------------------------------------------------------------------------------------------------------------
# The draft


@dataclass(frozen=True)
class Entry:
    """What became of one key.

    Attributes:
        key: as in the file, with the file's name in front where that is another one.
        value: as shown; secrets are hidden.
        to: our settings with their values, such as 'adapter.rank = 16'; empty when there is none.
        note: the remark, the difference, or the reason.
        off: it switches something off, or is empty, or says nothing about what is learned.
    """

    key: str
    value: str
    to: str = ""
    note: str = ""
    off: bool = False


@dataclass
class Import:
    """Our settings, and the account of every key."""

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
    """Files that this one refers to, and that were found."""

    @property
    def only_pictures(self) -> bool:
        """Whether it is a dataset file alone, which says nothing of a training."""
        return not self.settings.keys() & {"adapter", "optimizer", "schedule"}


@dataclass
class Folder:
    """A folder of pictures of the other tool, and what is in it if it is here.

    Attributes:
        images: pictures in it; None: the folder is not here.
        captionless: how many of them have no caption file.
        trigger_is_caption: the trigger is the whole caption of pictures that have none.
        control: the folder of control pictures.
        mask: as our setting of this name.
        regularization, weight, resolution: as our settings of these names.
    """

    path: str
    repeats: int = 1
    trigger: str = ""
    images: int | None = None
    captionless: int = 0
    trigger_is_caption: bool = False
    control: str = ""
    mask: str = ""
    regularization: bool = False
    weight: float = 1.0
    resolution: int = 0


class Draft:
    """Our settings in the making. Each key of the file is accounted for exactly once; `finish` sees to it.

    Attributes:
        given: the file's keys, in the names of the tool's table, with their values.
        family: our name of the architecture, "" while unknown.
        defaults: what the tool takes for keys that the file lacks; starts as the tool's.
        settings: {"adapter.rank": 16}, in the order of writing.
    """

    def __init__(self, tool: Tool, source: Source, why: str, family: str):
        self.tool, self.source, self.why = tool, source, why
        self.defaults = dict(tool.defaults)
        self.family = family
        self.given: dict[str, Any] = {}
        self.shown: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.folders: list[Folder] = []
        self.assumed: dict[str, tuple[Any, str, str]] = {}
        self.comments: dict[str, list[str]] = {}
        self.lists: dict[str, list[Entry]] = {name: [] for name in ("mapped", "differs", "none", "unknown", "defaults")}
        self.todo: list[str] = []
        self.notes = list(source.notes)
        self.files: list[Path] = []
        self.done: set[str] = set()
        for shown, key, value in tool.flatten(self):
            key = tool.aliases.get(key, key)
            if key in self.given:  # sections of kohya's files are read one over the other
                overridden = self.shown[key]
                self._enter("none", overridden, self.given[key], note=f"given again as {shown}, which counts")
            self.given[key], self.shown[key] = value, shown

    # -------------------------------------------------------------------------------------------------------- reading

    def has(self, key: str) -> bool:
        """Whether the file sets this key to something."""
        return self.given.get(key) not in NOTHING

    def get(self, key: str, read: Callable[[Any], Any] = same) -> Any:
        """The key's value, or the tool's default for it; None when there is neither. Accounts for nothing."""
        value = self.given[key] if self.has(key) else self.defaults.get(key)
        try:
            return None if value in NOTHING else read(value)
        except Unfit as error:
            raise UserError(f"{self.source.path}: {self.shown[key]}: {hide(str(error))}") from None

    def keys(self, pattern: str) -> list[str]:
        """The file's keys that match a pattern with `*` for positions in lists."""
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$")
        return [key for key in self.given if regex.match(key)]

    def find(self, path: str) -> Path | None:
        """A file or folder that the file refers to: as given, seen from the file, or by its name beside it."""
        beside = self.source.path.parent
        name = PureWindowsPath(path).name
        found = None
        try:
            for candidate in (Path(path).expanduser(), beside / path):
                if found is None and name and self.source.reach(candidate) and candidate.exists():
                    found = candidate
            # The folders of another machine are not these, but a settings file may have come along.
            if found is None and name and self.source.reach(beside / name) and (beside / name).is_file():
                self.notes.append(f"{path} is not here; {name} beside {self.source.path.name} was read instead")
                found = beside / name
            if found is not None and found.is_file() and found not in self.files:
                self.files.append(found)
        except (OSError, ValueError, RuntimeError):  # a path that no file system takes
            return None
        return found

    def refer(self, key: str, path: str) -> Any:
        """The content of a settings file that this one refers to, or None with a note when it is not here."""
        found = self.find(path)
        if found is None or not found.is_file():
            self.notes.append(f"{key} = {path!r} is not here: put it beside {self.source.path.name} and import again")
            return None
        return read_source(found).data

    # -------------------------------------------------------------------------------------------------------- writing

    def set(self, setting: str, value: Any, comment: str = "") -> None:
        """Write one of our settings. Text goes through `hide`."""
        self.settings[setting] = hide(value) if isinstance(value, str) else value
        if comment:
            self.comments.setdefault(setting, []).append(comment)

    def assume(self, setting: str, value: Any, key: str, note: str) -> None:
        """One of our settings that is theirs unless the file says another; `key` is what they call it."""
        self.assumed[setting] = (value, key, note)

    def need(self, setting: str, what: str) -> None:
        """A TODO at one of our settings, in the file and in the report."""
        self.comments.setdefault(setting, []).append(f"TODO: {what}")
        self.todo.append(f"{setting}: {what}")

    def mapped(self, keys: str | Iterable[str], settings: Mapping[str, Any] | None = None, note: str = "") -> None:
        """These keys mean the same here."""
        self._account("mapped", keys, settings or {}, note)

    def differs(self, keys: str | Iterable[str], settings: Mapping[str, Any] | None, note: str) -> None:
        """These keys have a setting here that differs in meaning."""
        self._account("differs", keys, settings or {}, note)

    def none(self, keys: str | Iterable[str], note: str, off: bool = False) -> None:
        """These keys have no counterpart; `off`: and need none, as they stand."""
        self._account("none", keys, {}, note, off)

    def _account(
        self, kind: str, keys: str | Iterable[str], settings: Mapping[str, Any], note: str, off: bool = False
    ) -> None:
        keys = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
        here = [key for key in keys if key in self.given and key not in self.done]
        empty = [key for key in here if not self.has(key)]
        for key in empty:
            self._enter("none", self.shown[key], self.given[key], note="empty", off=True)
        told = ", ".join(f"{name} = {_toml(value)}" for name, value in settings.items())
        real = [key for key in here if key not in empty]
        for key in real:
            self._enter(kind, self.shown[key], self.given[key], told, note, off)
        assumed = [key for key in keys if key not in real and key not in self.done and key in self.defaults]
        if settings and not real:
            for key in assumed:
                self._enter("defaults", key.removeprefix(self.tool.prefix), self.defaults[key], told, note)
        for name, value in settings.items():
            origin = ", ".join(self.shown[key] for key in real)
            if not real and assumed:
                origin = f"not in the file: the default of {self.tool.name}"
            self.set(name, value, origin)
        self.done.update(here)

    def _enter(self, kind: str, key: str, value: Any, told: str = "", note: str = "", off: bool = False) -> None:
        secret = SECRET_KEY.search(key) and value not in NOTHING
        shown = HIDDEN if secret else hide(_toml(value))
        shown = shown if len(shown) <= 100 else shown[:80] + f" ... ({len(shown)} characters)"
        self.lists[kind].append(Entry(hide(key), shown, hide(told), hide(note), off))

    # ------------------------------------------------------------------------------------------------------ the end

    def finish(self) -> Import:
        """Apply the rules to what `Tool.combine` left, and check that no key is lost."""
        for key, value in self.given.items():
            if key not in self.done:
                self._apply(key, value)
        for key, value in self.defaults.items():
            rule = self.tool.rules.get(key)
            if key not in self.given and rule is not None and rule.to and rule.to not in self.settings:
                self._account("mapped", key, {rule.to: rule.read(value)}, rule.note)
        for setting, (value, key, note) in self.assumed.items():
            if setting not in self.settings:
                self._enter("defaults", key, value, f"{setting} = {_toml(value)}", note)
                self.set(setting, value, f"not in the file: {note}")
        if not self.folders:
            self.folders = [Folder("TODO")]
            self.need("dataset.folders", "the folder of your pictures; the file names none")
        warmup, steps = self.settings.get("schedule.warmup"), self.settings.get("train.steps")
        if isinstance(warmup, int) and steps is not None and 0 < steps <= warmup:
            self.settings["schedule.warmup"] = steps - 1
            self.need("schedule.warmup", f"theirs is {warmup} steps, the training {steps}: choose a shorter one")
        if any(folder.trigger_is_caption for folder in self.folders):
            if all(folder.trigger or folder.regularization for folder in self.folders):
                self.set("dataset.missing_caption", "trigger", "a folder's words are the captions it lacks, as there")
            else:
                self.need("dataset.folders", "captions, or a trigger for each and dataset.missing_caption = 'trigger'")
        lost = self.given.keys() - self.done
        assert not lost, f"{self.tool.name}: no account of {sorted(lost)}"
        return Import(
            self.tool,
            self.source.path,
            self.why,
            _nested(self.settings, self.folders),
            {key: "; ".join(dict.fromkeys(lines)) for key, lines in self.comments.items()},
            self.lists["mapped"],
            self.lists["differs"],
            self.lists["none"],
            self.lists["unknown"],
            self.lists["defaults"],
            self.todo,
            self.notes,
            self.files,
        )

    def _apply(self, key: str, value: Any) -> None:
        rule = self.tool.rule(key)
        if rule is None:
            self._enter("unknown", self.shown[key], value)
            self.done.add(key)
            return
        if not self.has(key):
            self.none(key, "empty", off=True)
        elif rule is JOINT:
            self.none(key, "says nothing beside the other settings of this file")
        elif rule.kind in ("none", "idle"):
            off = rule.kind == "idle" or is_off(value) or value in rule.off or str(value) in map(str, rule.off)
            self.none(key, rule.note, off=off)
        elif not rule.to:
            if value is False:
                self.differs(key, {}, f"cannot be switched off here: {rule.note}")
            else:
                self.mapped(key, {}, rule.note)
        else:
            try:
                ours = rule.read(value)
            except Unfit as error:
                self.none(key, f"{rule.to} was not written: {error}")
                self.todo.append(f"{rule.to}: {error}")
                return
            self._account(rule.kind, key, {rule.to: ours}, rule.note)


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e15 else str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _nested(settings: dict[str, Any], folders: list[Folder]) -> dict[str, Any]:
    """{"adapter.rank": 16} as nested tables in the order of our config, with the folders."""
    data: dict[str, Any] = {}
    order = list(config.Job.model_fields)

    def place(setting: str) -> tuple[int, int]:
        section, _, name = setting.rpartition(".")
        fields = list(config.Job.model_fields[section].annotation.model_fields) if section else [setting]
        return (order.index(section) if section else -1, fields.index(name or setting))

    for setting in sorted(settings, key=place):
        section, _, name = setting.rpartition(".")
        (data.setdefault(section, {}) if section else data)[name] = settings[setting]
    tables = data.setdefault("dataset", {})
    tables["folders"] = [
        {
            "path": folder.path,
            **({"repeats": folder.repeats} if folder.repeats != 1 else {}),
            **({"trigger": folder.trigger} if folder.trigger else {}),
            **({"regularization": True} if folder.regularization else {}),
            **({"weight": folder.weight} if folder.weight != 1 else {}),
            **({"resolution": folder.resolution} if folder.resolution else {}),
            **({"control": folder.control} if folder.control else {}),
            **({"mask": folder.mask} if folder.mask else {}),
        }
        for folder in folders
    ]
    return {name: data[name] for name in sorted(data, key=lambda name: order.index(name))}
