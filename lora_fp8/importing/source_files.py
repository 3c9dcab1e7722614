"""Read the settings file of another trainer: TOML, JSON, YAML, or a script with the training command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from .. import config
from ..common.parsing import add_place, describe_parser_error, find_message
from ..common.reading import MOST_TEXT, read_bytes
from ..errors import Message, UserError, cannot_read, missing_file, not_utf8
from .readers import hide

MOST_VALUES = 100_000
"""Most values in a settings file; a few lines of YAML with aliases can stand for more than fits in memory."""


MOST_YAML = 1 << 18
"""Characters; PyYAML takes about 10 s per million."""


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


def read_text_file(path: Path) -> str:
    """Read a text file in UTF-8, or in UTF-16 with a byte-order mark. Raises UserError."""
    try:
        raw = read_bytes(path, MOST_TEXT)
    except FileNotFoundError:
        raise missing_file(path) from None
    except IsADirectoryError:
        raise UserError(Message("{path}: this is a folder; give the settings file in it", path=path)) from None
    except OSError as error:
        raise cannot_read(path, error) from None
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None


class UnreadableSettings(UserError):
    """A settings file is not in the format that its name says."""


def read_source(path: Path) -> Source:
    """Read TOML, JSON, YAML or the command in a script. Raises UserError, whose messages quote nothing of the file."""
    content = read_text_file(path)
    suffix = path.suffix.lower()
    # This pattern and that of `_join_lines` do not retry a long run from each of its characters, which takes quadratic
    # time.
    named = suffix in (".toml", ".json", ".yaml", ".yml")
    if suffix in SCRIPTS or not named and re.search(r"\S\.py\b[\"']?\s+.*--\w", _join_lines(content)):
        return _read_command(path, content)
    try:
        if suffix == ".json":
            return Source(path, "json", json.loads(content))
        if suffix in (".yaml", ".yml"):
            if len(content) > MOST_YAML:
                raise UserError(
                    Message(
                        "{path}: the file has more than {number} characters, too many for a settings file",
                        path=path,
                        number=MOST_YAML,
                    )
                )
            data = yaml.safe_load(content)
            if not _is_countable([data], MOST_VALUES):
                raise UserError(
                    Message(
                        "{path}: the file has more than {most} values, too many for a settings file",
                        path=path,
                        most=MOST_VALUES,
                    )
                )
            return Source(path, "yaml", data)
        if suffix == ".toml":
            return Source(path, "toml", config.read_toml(content))
    except json.JSONDecodeError as error:
        raise UnreadableSettings(
            Message(
                "{where}: not valid JSON: {why}",
                where=path,
                why=describe_parser_error(error),
            )
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = find_message(getattr(error, "problem", "") or "") or Message("cannot be read")
        if mark:
            why = add_place(mark.line + 1, mark.column + 1, why)
        raise UnreadableSettings(Message("{where}: not valid YAML: {why}", where=path, why=why)) from None
    except RecursionError:
        raise UserError(Message("{path}: nested too deeply", path=path)) from None
    except ValueError as error:
        raise UnreadableSettings(
            Message("{path}: not valid {format}: {why}", path=path, format=suffix[1:].upper(), why=hide(str(error)))
        ) from None
    raise UserError(
        Message(
            "{path}: expected a .toml, .json, .yaml or .yml file, or a script with the command that starts the "
            "training",
            path=path,
        )
    )


def _is_countable(values: Iterable[Any], most: int) -> bool:
    """Return True if nested data holds at most `most` values; a YAML alias counts each time that it is used."""
    waiting = list(values)
    for _ in range(most):
        if not waiting:
            return True
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if len(waiting) > most:
            return False
    return not waiting


def _join_lines(content: str) -> str:
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
    for line in _join_lines(content).splitlines():
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
                raise UserError(Message("{path}: a quotation mark of the training command is not closed", path=path))
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
                "{path}: no command runs a training script (...train...py) by its name. Variables and conditions "
                "are not evaluated: write the command with its values, or give the TOML file that it uses",
                path=path,
            )
        )
    if len(commands) > 1:
        raise UserError(
            Message(
                "{path}: the file has {count} training commands; give a file with one", path=path, count=len(commands)
            )
        )
    script, options, unknown = _read_command_options(commands[0], variables)
    notes: list[str] = (
        [Message("{file} also has other commands ({count}), which were not read", file=path.name, count=other)]
        if other
        else []
    )
    if unknown:
        notes.append(
            Message("{names}: the script fills these in when it runs, so they were not read", names=", ".join(unknown))
        )
    return Source(path, "command", options, script, notes)


def _read_command_options(words: list[str], variables: Mapping[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the script that a command runs, its options with variables substituted, and variables without a value."""
    at = max(i for i, word in enumerate(words) if TRAINING_SCRIPT.search(word))
    script = PureWindowsPath(words[at]).name

    def substitute(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name.lower(), match[0])

    words = [VARIABLE.sub(substitute, word) for word in words]
    unknown: set[str] = set()
    for word in words:
        for pattern in (VARIABLE, SUBSTITUTION):
            unknown |= {match[0] for match in pattern.finditer(word)}
    options = [word for i, word in enumerate(words) if i != at and not VARIABLE.fullmatch(word)]
    return script, parse_options(options), sorted(unknown)


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
                commands[-1].append(_unquote(piece["word"], windows))
            skip = False
    return [command for command in commands if command]


def _unquote(word: str, windows: bool) -> str:
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


def get_table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table of this name; {} if there is none or it is not a table."""
    table = data.get(name)
    return table if isinstance(table, dict) else {}


def flatten_tables(data: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted key, value) for nested tables and lists of tables; a list of plain values is one value."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from flatten_tables(value, f"{prefix}{str(key).removeprefix('--')}.")
    elif isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        for i, item in enumerate(data):
            yield from flatten_tables(item, f"{prefix}{i}.")
    else:
        yield prefix.removesuffix("."), data
