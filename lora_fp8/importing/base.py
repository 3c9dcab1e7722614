"""What all importers share: reading files, rules for their keys, and the draft that accounts for every key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from .. import config
from ..common.reading import MOST_TEXT, read_bytes
from ..common.text import shown
from ..config.validation import model_at
from ..errors import Message, UserError
from ..settings import Job

NOTHING: tuple[Any, ...] = (None, "", (), [], {})
"""Values that mean "not set" in every tool: settings pages write them for empty fields."""
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
"""Most values in a settings file; a few lines of YAML with aliases can stand for more than fits in memory."""


MOST_YAML = 1 << 18
"""Characters; PyYAML takes about 10 s per million."""
MOST_NUMBER = 1e20
"""Largest number in a setting: above every 64-bit seed, and two of them can still be multiplied."""


class Unfit(Exception):
    """A value that our setting does not accept; the message says why, and what was done instead."""


def hide(text: str) -> str:
    """Return the text without tokens, API keys and passwords in URLs."""
    return SECRET_ASSIGNMENT.sub(lambda m: (m[1] or m[2]) + HIDDEN, SECRET_VALUE.sub(HIDDEN, text))


# ---------------------------------------------------------------------------------------------------------------------
# Values


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def text(value: Any) -> str:
    """Return the value as text."""
    if isinstance(value, dict | list):
        raise Unfit(Message("is not text"))
    return str(value)


def number(value: Any) -> float:
    """Read a number, which settings pages and YAML (1e-4 without a point) may store as text."""
    if isinstance(value, bool):
        raise Unfit(Message("{value} is not a number", value=value))
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Unfit(Message("{value} is not a number", value=shown(value))) from None
    except OverflowError:
        found = math.inf
    if not abs(found) <= MOST_NUMBER:  # NaN fails this comparison too
        raise Unfit(
            Message("is not a number that can be used") if math.isfinite(found) else Message("is not a finite number")
        )
    return found


def whole(value: Any) -> int:
    """Read a whole number, which may be stored as text or with a decimal point."""
    found = number(value)
    if found != int(found):
        raise Unfit(Message("{value} is not a whole number", value=shown(value)))
    return int(found)


def positive(value: Any) -> int:
    """Read a whole number of at least 1."""
    found = whole(value)
    if found < 1:
        raise Unfit(Message("{value} is less than 1", value=shown(value)))
    return found


def flag(value: Any) -> bool:
    """Read true or false, which may be stored as text or as 0 and 1."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise Unfit(Message("{value} is neither true nor false", value=shown(value)))
    return found


def listed(value: Any) -> list[Any]:
    """Return a list; a single value becomes a list of one."""
    if isinstance(value, bool | dict):
        raise Unfit(Message("{value} is not a list", value=shown(value)))
    return list(value) if isinstance(value, list | tuple) else [value]


def pair(value: Any) -> tuple[float, float]:
    """Read a list of two numbers."""
    found = listed(value)
    if len(found) != 2:
        raise Unfit(Message("{value} are not two numbers", value=shown(value)))
    return number(found[0]), number(found[1])


def is_off(value: Any) -> bool:
    """Return True if a value switches its key off: empty, false, zero or "none"."""
    return (
        value in NOTHING or value is False or str(value).strip().lower() in ("0", "0.0", "false", "none", "no", "off")
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rules: how one key is converted


@dataclass(frozen=True)
class Rule:
    """How one key of another tool is converted.

    Attributes:
        kind: mapped (same meaning), differs, none (no counterpart), idle (no effect on what is learned), or joint
            (`Tool.combine` converts it).
        to: our setting, such as "adapter.rank"; empty if there is none.
        read: converts the tool's value to ours; raises `Unfit`.
        note: a remark, the difference, or why there is no counterpart and what to do instead.
        off: values, besides those of `is_off`, at which a key without a counterpart has no effect anyway.
    """

    kind: str
    to: str = ""
    read: Callable[[Any], Any] = same
    note: str = ""
    off: tuple[Any, ...] = ()


JOINT = Rule("joint")


def to(setting: str, read: Callable[[Any], Any] = same, note: str = "") -> Rule:
    """Return the rule of a key that means the same here."""
    return Rule("mapped", setting, read, note)


def near(setting: str, read: Callable[[Any], Any], note: str) -> Rule:
    """Return the rule of a key whose counterpart here differs in meaning."""
    return Rule("differs", setting, read, note)


def always(note: str) -> Rule:
    """Return the rule of a feature that is always on here; a value that switches it off is reported."""
    return Rule("mapped", "", same, note)


def cached(note: str) -> Rule:
    """Return the rule of a feature that is always on here, and that can be off without changing what is learned."""
    return Rule("mapped", "", same, note, (False,))


def none(note: str, *off: Any) -> Rule:
    """Return the rule of a key that has no counterpart."""
    return Rule("none", "", same, note, off)


def idle(note: str = "says how the machine is used, not what is learned") -> Rule:
    """Return the rule of a key that has no counterpart and needs none."""
    return Rule("idle", "", same, note)


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

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a key; None if the table does not know the key."""
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
        path: the file.
        kind: "toml", "json", "yaml" or "command".
        data: its content; for a command, the options by name.
        script: for a command, the Python file that it runs.
        notes: what was left out while reading.
        reach: returns True if a file or folder that it refers to may be accessed; any other counts as missing.
    """

    path: Path
    kind: str
    data: Any
    script: str = ""
    notes: list[str] = field(default_factory=list)
    reach: Callable[[Path], bool] = lambda path: True


def decoded(path: Path) -> str:
    """Read a text file in UTF-8, or in UTF-16 with a byte-order mark. Raises UserError."""
    try:
        raw = read_bytes(path, MOST_TEXT)
    except FileNotFoundError:
        raise UserError(Message("{path}: no such file", path=path)) from None
    except IsADirectoryError:
        raise UserError(Message("{path}: this is a folder; give the settings file in it", path=path)) from None
    except OSError as error:
        raise UserError(Message("{path}: cannot be read ({why})", path=path, why=error.strerror)) from None
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            Message("{path}: not UTF-8 text (byte {byte}); save the file as UTF-8", path=path, byte=error.start)
        ) from None


def read_source(path: Path) -> Source:
    """Read TOML, JSON, YAML or the command in a script. Raises UserError, whose messages quote nothing of the file."""
    content = decoded(path)
    suffix = path.suffix.lower()
    # This pattern and that of `_joined` do not retry a long run from each of its characters, which takes quadratic
    # time.
    named = suffix in (".toml", ".json", ".yaml", ".yml")
    if suffix in SCRIPTS or not named and re.search(r"\S\.py\b[\"']?\s+.*--\w", _joined(content)):
        return _read_command(path, content)
    try:
        if suffix == ".json":
            return Source(path, "json", json.loads(content))
        if suffix in (".yaml", ".yml"):
            if len(content) > MOST_YAML:
                raise UserError(
                    Message(
                        "{path}: more than {number} characters, too many for a settings file",
                        path=path,
                        number=MOST_YAML,
                    )
                )
            data = yaml.safe_load(content)
            if not _countable([data], MOST_VALUES):
                raise UserError(
                    Message(
                        "{path}: more than {most} values, too many for a settings file", path=path, most=MOST_VALUES
                    )
                )
            return Source(path, "yaml", data)
        if suffix == ".toml":
            return Source(path, "toml", config.read_toml(content))
    except json.JSONDecodeError as error:
        raise UserError(
            Message(
                "{where}: not valid JSON: {why}",
                where=path,
                why=f"line {error.lineno}, column {error.colno}: {error.msg}",
            )
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(
            Message(
                "{where}: not valid YAML: {why}",
                where=path,
                why=f"{getattr(error, 'problem', '') or 'cannot be read'}{where}",
            )
        ) from None
    except RecursionError:
        raise UserError(Message("{path}: nested too deeply", path=path)) from None
    except ValueError as error:
        raise UserError(
            Message("{path}: not valid {format}: {why}", path=path, format=suffix[1:].upper(), why=hide(str(error)))
        ) from None
    raise UserError(
        Message(
            "{path}: expected a .toml, .json, .yaml or .yml file, or a script with the command that starts the "
            "training",
            path=path,
        )
    )


def _countable(values: Iterable[Any], most: int) -> bool:
    """Return True if nested data holds at most `most` values; a YAML alias counts each time that it is used."""
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
    """Join the continued lines of a script: \\ in sh, ^ in cmd, ` in PowerShell."""
    return re.sub(r"(?:(?<![ \t])[ \t]+)?[\\^`][ \t]*\r?\n[ \t]*", " ", content)


SCRIPTS = (".sh", ".bash", ".bat", ".cmd", ".ps1")
ASSIGNMENTS = {
    ".bat": re.compile(r'set\s+"?(?P<name>\w+)=(?P<value>[^"]*)"?$', re.IGNORECASE),
    ".cmd": re.compile(r'set\s+"?(?P<name>\w+)=(?P<value>[^"]*)"?$', re.IGNORECASE),
    ".ps1": re.compile(r"\$(?P<name>\w+)\s*=\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s#;]+)\s*(?:[#;].*)?$"),
}
ASSIGNMENT = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s#;]*)\s*(?:[#;].*)?$")
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|%([A-Za-z_]\w*)%")


def _read_command(path: Path, content: str) -> Source:
    """Read the training command of a script as {option: value}, and substitute the variables that the script sets.

    Raises:
        UserError: there is no training command, there are several, or it cannot be read.
    """
    suffix = path.suffix.lower()
    commands: list[list[str]] = []
    variables: dict[str, str] = {}
    other, continues = 0, False
    for line in _joined(content).splitlines():
        line = line.strip()
        if not line or line.startswith(("#", "::", "REM ", "rem ", "@echo", "echo ")):
            continue
        assignment = ASSIGNMENTS.get(suffix, ASSIGNMENT).match(line)
        if assignment:
            variables[assignment["name"].lower()] = assignment["value"].strip("\"'")
            continue
        parts = split_commands(line, suffix)
        if parts is None:
            if TRAINING_SCRIPT.search(line):
                raise UserError(Message("{path}: a command cannot be read: a quotation mark is not closed", path=path))
            other += 1
            continue
        # Documents print commands over several lines without marking the continuation.
        if continues and parts and line.startswith("-"):
            commands[-1] += parts.pop(0)
            continues = not parts
        for part in parts:
            continues = any(TRAINING_SCRIPT.search(word) for word in part)
            if continues:
                commands.append(part)
            else:
                other += 1
    if not commands:
        raise UserError(
            Message(
                "{path}: no command in it runs a training script (...train...py) by its name. Variables and "
                "conditions of a script are not evaluated: write the command out with its values, or give the "
                "TOML that it uses",
                path=path,
            )
        )
    if len(commands) > 1:
        raise UserError(
            Message("{path}: {count} training commands; give a file with one", path=path, count=len(commands))
        )
    script, options, unknown = _command_options(commands[0], variables)
    notes: list[str] = (
        [Message("{file} has other commands too ({count}), which were not read", file=path.name, count=other)]
        if other
        else []
    )
    if unknown:
        notes.append(
            Message("{names}: what the script puts in there is not known, and was not read", names=", ".join(unknown))
        )
    return Source(path, "command", options, script, notes)


def _command_options(words: list[str], variables: Mapping[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the script that a command runs, its options with variables substituted, and variables without a value."""
    at = max(i for i, word in enumerate(words) if TRAINING_SCRIPT.search(word))
    script = PureWindowsPath(words[at]).name
    words = [VARIABLE.sub(lambda m: variables.get((m[1] or m[2]).lower(), m[0]), word) for word in words]
    unknown = sorted({m[0] for word in words for pattern in (VARIABLE, SUBSTITUTION) for m in pattern.finditer(word)})
    kept = [word for i, word in enumerate(words) if i != at and not VARIABLE.fullmatch(word)]
    return script, parse_options(kept), unknown


TRAINING_SCRIPT = re.compile(r"(?:train\w{0,80}|fine_tune)\.py(?=[\"'\s]|$)")
QUOTED = re.compile(r"'([^']*)'|\\(.)|\"((?:\\.|[^\"\\])*)\"")
SUBSTITUTION = re.compile(r"\$\([^()]*\)")
REDIRECTION = r"(?P<redirection>(?:\d+|&|\*)?(?:<<<|<<|>>|<>|>\||[<>]&|[<>]))"
SHELL = {
    "": re.compile(
        rf"{REDIRECTION}|(?P<control>&&|\|\||\|&|[;&|()])|(?P<comment>#.*)"
        r"|(?P<word>(?:\$\([^()]*\)|[^\s\"'\\;&|<>()]|\\.|\"(?:\\.|[^\"\\])*\"|'[^']*')+)"
    ),
    ".ps1": re.compile(
        rf"{REDIRECTION}|(?P<control>&&|\|\||[;&|])|(?P<comment>#.*)"
        r"|(?P<word>(?:[^\s\"';&|<>]|\"[^\"]*\"|'[^']*')+)"
    ),
    ".bat": re.compile(rf"{REDIRECTION}|(?P<control>&&|\|\||[&|])|(?P<word>(?:[^\s\"'&|<>]|\"[^\"]*\"|'[^']*')+)"),
}
"""Parts of a line: words, and shell operators that end a command or redirect its output."""


def split_commands(line: str, suffix: str) -> list[list[str]] | None:
    """Split a line of a script into its commands, each a list of words without quotation marks and redirections.

    Args:
        line: the line.
        suffix: of the script; .bat, .cmd and .ps1 have paths with backslashes, everything else is a POSIX shell.

    Returns:
        None if a quotation mark is not closed.
    """
    windows = suffix in ASSIGNMENTS
    pattern = SHELL[".bat" if suffix == ".cmd" else suffix if windows else ""]
    line = line if windows else line.removesuffix("\\")
    commands: list[list[str]] = [[]]
    place, skip = 0, False  # skip: the next word is the target of a redirection
    while place < len(line):
        if line[place].isspace():
            place += 1
            continue
        piece = pattern.match(line, place)
        if piece is None:
            return None
        place = piece.end()
        if piece["redirection"]:
            skip = True
        elif piece["control"]:
            commands.append([])
            skip = False
        elif piece["word"]:
            if not skip:
                commands[-1].append(_unquoted(piece["word"], windows))
            skip = False
    return [command for command in commands if command]


def _unquoted(word: str, windows: bool) -> str:
    """Remove the quotation marks of a word; a backslash is an escape in sh, and part of a path in Windows."""
    if windows:
        return re.sub("[\"']", "", word)
    return QUOTED.sub(lambda m: m[1] if m[1] is not None else m[2] or re.sub(r"\\([\"\\$`])", r"\1", m[3] or ""), word)


def parse_options(words: list[str]) -> dict[str, Any]:
    """Parse --name value, --name=value, --name v1 v2 (a list) and --name alone (True)."""
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


def table_in(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table of this name; {} if there is none or it is not a table."""
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def flattened(data: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted key, value) for nested tables and lists of tables; a list of plain values is one value."""
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
    """What one key was converted to.

    Attributes:
        key: as in the file, preceded by the file's name if it is another file.
        value: as shown; secrets are hidden.
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
        """True for a dataset file alone, which says nothing about the training."""
        return not self.settings.keys() & {"adapter", "optimizer", "schedule"}


@dataclass
class Folder:
    """A folder of images of the other tool, and what is in it if it exists here.

    Attributes:
        path: as in the file.
        repeats, trigger: as our settings of these names.
        images: number of images in it; None if the folder does not exist here.
        captionless: how many of them have no caption file.
        trigger_is_caption: the trigger is the whole caption of images that have none.
        control: the folder of control images.
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
        for label, key, value in tool.flatten(self):
            key = tool.aliases.get(key, key)
            if key in self.given:  # a section of kohya's files overrides the one before
                overridden = self.shown[key]
                note = Message("given again as {key}, which counts", key=label)
                self.lists["none"].append(_entry(overridden, self.given[key], note=note))
            self.given[key], self.shown[key] = value, label

    # -------------------------------------------------------------------------------------------------------- reading

    def has(self, key: str) -> bool:
        """Return True if the file sets this key to a value."""
        return self.given.get(key) not in NOTHING

    def get(self, key: str, read: Callable[[Any], Any] = same) -> Any:
        """Return the key's value, or else the tool's default, or None. The key still has to be reported."""
        value = self.given[key] if self.has(key) else self.defaults.get(key)
        try:
            return None if value in NOTHING else read(value)
        except Unfit as error:
            raise UserError(f"{self.source.path}: {self.shown[key]}: {hide(str(error))}") from None

    def keys(self, pattern: str) -> list[str]:
        """Return the file's keys that match a pattern with `*` for positions in lists."""
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$")
        return [key for key in self.given if regex.match(key)]

    def find(self, path: str) -> Path | None:
        """Find a file or folder that the file refers to: as given, relative to the file, or beside it by its name."""
        beside = self.source.path.parent
        name = PureWindowsPath(path).name
        found = None
        try:
            for candidate in (Path(path).expanduser(), beside / path):
                if found is None and name and self.source.reach(candidate) and candidate.exists():
                    found = candidate
            # Folders of another machine have other contents here, but a settings file may have been copied along.
            if found is None and name and self.source.reach(beside / name) and (beside / name).is_file():
                self.notes.append(
                    Message(
                        "{path} is not here; {name} beside {file} was read instead",
                        path=path,
                        name=name,
                        file=self.source.path.name,
                    )
                )
                found = beside / name
            if found is not None and found.is_file() and found not in self.files:
                self.files.append(found)
        except (OSError, ValueError, RuntimeError):  # not a valid path on this system
            return None
        return found

    def refer(self, key: str, path: str) -> Any:
        """Read a settings file that this one refers to; return None, and add a note, if it does not exist here."""
        found = self.find(path)
        if found is None or not found.is_file():
            self.notes.append(
                Message(
                    "{key} = {path} is not here: put it beside {file} and import again",
                    key=key,
                    path=repr(path),
                    file=self.source.path.name,
                )
            )
            return None
        return read_source(found).data

    # -------------------------------------------------------------------------------------------------------- writing

    def set(self, setting: str, value: Any, comment: str = "") -> None:
        """Set one of our settings. Text goes through `hide`."""
        self.settings[setting] = hide(value) if isinstance(value, str) else value
        if comment:
            self.comments.setdefault(setting, []).append(comment)

    def assume(self, setting: str, value: Any, key: str, note: str) -> None:
        """Set one of our settings to the tool's default unless the file sets it; `key` is the tool's name for it."""
        self.assumed[setting] = (value, key, note)

    def need(self, setting: str, what: str) -> None:
        """Add a TODO for one of our settings, to the file and to the report."""
        self.comments.setdefault(setting, []).append(f"TODO: {what}")
        self.todo.append(f"{setting}: {what}")

    def mapped(self, keys: str | Iterable[str], settings: Mapping[str, Any] | None = None, note: str = "") -> None:
        """Report that these keys mean the same here."""
        self._account("mapped", keys, settings or {}, note)

    def differs(self, keys: str | Iterable[str], settings: Mapping[str, Any] | None, note: str) -> None:
        """Report that the counterpart of these keys differs in meaning."""
        self._account("differs", keys, settings or {}, note)

    def none(self, keys: str | Iterable[str], note: str, off: bool = False) -> None:
        """Report that these keys have no counterpart; with `off`, as they are set, they need none."""
        self._account("none", keys, {}, note, off)

    def _account(
        self, kind: str, keys: str | Iterable[str], settings: Mapping[str, Any], note: str, off: bool = False
    ) -> None:
        keys = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
        here = [key for key in keys if key in self.given and key not in self.done]
        real = [key for key in here if self.has(key)]
        told = ", ".join(f"{name} = {_short(_toml(value))}" for name, value in settings.items())
        self._report_empty(here)
        for key in real:
            self.lists[kind].append(_entry(self.shown[key], self.given[key], told, note, off))
        origin = ", ".join(self.shown[key] for key in real)
        assumed = [key for key in keys if key not in real and key not in self.done and key in self.defaults]
        if settings and assumed and not real:
            origin = f"not in the file: the default of {self.tool.name}"
            for key in assumed:
                self.report_default(key.removeprefix(self.tool.prefix), self.defaults[key], told, note)
        for name, value in settings.items():
            self.set(name, value, origin)
        self.done.update(here)

    def _report_empty(self, keys: Iterable[str]) -> None:
        for key in keys:
            if not self.has(key):
                self.lists["none"].append(_entry(self.shown[key], self.given[key], note="empty", off=True))

    def report_default(self, key: str, value: Any, told: str, note: str = "") -> None:
        """Report a default of the tool that was written, although the file does not say it.

        Args:
            key: the tool's key, as shown.
            value: the default.
            told: our settings with their values.
            note: a remark.
        """
        self.lists["defaults"].append(_entry(key, value, told, note))

    # ------------------------------------------------------------------------------------------------------ the end

    def finish(self) -> Import:
        """Apply the rules to the keys that `Tool.combine` left, and check that none is lost."""
        for key, value in self.given.items():
            if key not in self.done:
                self._apply(key, value)
        self._set_defaults()
        if not self.folders:
            self.folders = [Folder("TODO")]
            self.need("dataset.folders", Message("the folder of your pictures; the file names none"))
        self._shorten_warmup()
        self._set_missing_caption()
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

    def _set_defaults(self) -> None:
        """Set what the file does not say to the tool's defaults, and to those of `assume`."""
        for key, value in self.defaults.items():
            rule = self.tool.rules.get(key)
            if key not in self.given and rule is not None and rule.to and rule.to not in self.settings:
                self._account("mapped", key, {rule.to: rule.read(value)}, rule.note)
        for setting, (value, key, note) in self.assumed.items():
            if setting not in self.settings:
                self.report_default(key, value, f"{setting} = {_toml(value)}", note)
                self.set(setting, value, f"not in the file: {note}")

    def _shorten_warmup(self) -> None:
        """Keep the warm-up shorter than the training, which ours has to be."""
        warmup, steps = self.settings.get("schedule.warmup"), self.settings.get("train.steps")
        if isinstance(warmup, int) and steps is not None and 0 < steps <= warmup:
            self.settings["schedule.warmup"] = steps - 1
            self.need(
                "schedule.warmup",
                Message(
                    "theirs is {warmup} steps, the training {steps}: choose a shorter one", warmup=warmup, steps=steps
                ),
            )

    def _set_missing_caption(self) -> None:
        """Set dataset.missing_caption if a folder's trigger is the caption of its images."""
        if not any(folder.trigger_is_caption for folder in self.folders):
            return
        if all(folder.trigger or folder.regularization for folder in self.folders):
            self.set("dataset.missing_caption", "trigger", "a folder's words are the captions it lacks, as there")
        else:
            self.need(
                "dataset.folders", Message("captions, or a trigger for each and dataset.missing_caption = 'trigger'")
            )

    def _apply(self, key: str, value: Any) -> None:
        rule = self.tool.rule(key)
        if rule is None:
            self.lists["unknown"].append(_entry(self.shown[key], value))
            self.done.add(key)
            return
        if not self.has(key):
            self.none(key, "empty", off=True)
        elif rule is JOINT:
            self.none(key, Message("says nothing beside the other settings of this file"))
        elif rule.kind in ("none", "idle"):
            off = rule.kind == "idle" or is_off(value) or value in rule.off or str(value) in map(str, rule.off)
            self.none(key, rule.note, off=off)
        elif not rule.to:
            if value is False and False not in rule.off:
                self.differs(key, {}, Message("cannot be switched off here: {line}", line=rule.note))
            else:
                self.mapped(key, {}, rule.note)
        else:
            try:
                ours = rule.read(value)
            except Unfit as error:
                self.none(key, Message("{setting} was not written: {line}", setting=rule.to, line=error))
                self.todo.append(f"{rule.to}: {error}")
                return
            self._account(rule.kind, key, {rule.to: ours}, rule.note)


def _entry(key: str, value: Any, told: str = "", note: str = "", off: bool = False) -> Entry:
    """Return the entry of a key, without secrets."""
    secret = SECRET_KEY.search(key) and value not in NOTHING
    printed = HIDDEN if secret else _short(hide(_toml(value)))
    return Entry(hide(key), printed, hide(told), hide(note), off)


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:80] + f" ... ({len(text)} characters)"


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e15 else str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _nested(settings: dict[str, Any], folders: list[Folder]) -> dict[str, Any]:
    """Convert {"adapter.rank": 16} to nested tables in the order of our config, and add the folders."""
    data: dict[str, Any] = {}
    order = list(Job.model_fields)

    def place(setting: str) -> tuple[int, int]:
        section, _, name = setting.rpartition(".")
        model = model_at((section,)) if section else None
        fields = list(model.model_fields) if model is not None else [setting]
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
