"""Explain mistakes that people make in TOML: Windows paths, missing quotation marks, files of other programs.

TOML's own errors name a place and a grammar rule. These functions look at the text again and say what to write instead.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from .. import settings
from ..errors import Message
from ..settings import Job

PATHS = {setting.rpartition(".")[2] for setting in settings.PATHS}
"""Names of settings that are paths, without their tables."""
_ASSIGNMENT = re.compile(r"""\s*(?P<key>[\w.-]+|"[^"]*"|'[^']*')\s*=(?P<value>.*)$""")
_WINDOWS = re.compile(r'"(?P<path>[A-Za-z]:\\(?!\\)[^"]*|\\\\[^"\\][^"]*)"')
"""Matches a Windows path in double quotes, where each `\\` begins an escape."""
_CURLY = "“”„‟″＂‘’‚‛"
_WORDS = {
    "True": "true",
    "False": "false",
    "None": '""',
    "TRUE": "true",
    "FALSE": "false",
    "yes": "true",
    "no": "false",
}
_COMMA = re.compile(r"[+-]?(?P<thousands>[1-9]\d{0,2},\d{3})|[+-]?\d+,\d+(?:[eE][+-]?\d+)?", re.ASCII)
"""Matches a number with a comma."""
_VARIABLE = re.compile(r"\$(?:[A-Z][A-Z_]{2,}|\{[A-Z][A-Z_]{2,}\})|%[A-Z][A-Z_]{2,}%", re.ASCII)
"""Matches a variable of a shell, whose name is usually in capitals; other dollar signs are names of folders."""


def explain_toml(text: str) -> list[Message]:
    """Return what is wrong in a text that is not TOML, one line each; [] if only the parser knows."""
    if kind := _find_kind(text):
        return [kind]
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _ASSIGNMENT.match(line)
        if match and (what := _explain_value(match["key"], match["value"].strip())):
            lines.append(Message("line {number}: {line}", number=number, line=what))
    return lines


def find_escaped_paths(text: str) -> list[Message]:
    """Return the Windows paths in double quotes of a TOML text: C:\\new is read as C:, a line break and "ew"."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _WINDOWS.search(line)
        # Not a search for a key at the end of the text before the value: that would take minutes for a long number.
        before, equals, between = line.partition('"')[0].rpartition("=")
        key = re.split(r"[^\w-]", before.rstrip())[-1] if match and equals and not between.strip() else ""
        if match and match["path"][1] == ":" and key in PATHS:
            what = _explain_windows(key, match["path"])
            lines.append(Message("line {number}: {line}", number=number, line=what))
    return lines


def find_variables(job: Job) -> Iterator[tuple[tuple[str | int, ...], Message]]:
    """Yield (place, message) of each path with a variable of the shell, which nothing expands."""
    for named in settings.find_path_places(job.model_dump()):
        match = _VARIABLE.search(named.path)
        if match and not os.path.lexists(os.path.expanduser(named.path)):
            yield named.place, _explain_variable(named.key, named.path, match[0])


def _explain_variable(key: str, path: str, variable: str) -> Message:
    name, home = variable.strip("${}%"), Path(os.path.expanduser("~"))
    value = os.environ.get(name) or (str(home) if name in ("HOME", "USERPROFILE") else None)
    meant = path.replace(variable, value).replace("\\", "/") if value else None
    if meant and Path(meant).is_relative_to(home):
        meant = f"~/{Path(meant).relative_to(home).as_posix()}"
    if meant is None or _VARIABLE.search(meant):
        return Message(
            "{key}: {variable} is not expanded here. Write the path itself; ~ is your home folder",
            key=key,
            variable=variable,
        )
    return Message("{key}: {variable} is not expanded here. Write '{path}'", key=key, variable=variable, path=meant)


def _find_kind(text: str) -> Message | None:
    """Return the message for a file of another kind than TOML."""
    begin = text.lstrip("\ufeff \t\r\n")
    if begin.startswith("{") or re.match(r"\[\s*[{\"]", begin):
        return Message("this is JSON, not TOML. `lora-fp8 import-config` converts the settings of other trainers")
    lines = [line for line in begin.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if begin.startswith("#!") or any(
        re.match(r"\s*(?:accelerate launch|python3? |export |set |@echo)", x) for x in lines
    ):
        return Message("this is a script, not TOML. `lora-fp8 import-config` converts the settings of other trainers")
    colons = sum(bool(re.match(r"""\s*(?:- )?["']?[\w.-]+["']?:(?:\s|$)""", line)) for line in lines)
    if colons and not any("=" in line for line in lines if not line.lstrip().startswith("[")):
        return Message("this is YAML, not TOML. `lora-fp8 import-config` converts the settings of other trainers")
    return None


def _explain_value(key: str, value: str) -> Message | None:
    """Return what is wrong with a value as it is written; None if nothing is known."""
    if match := _WINDOWS.match(value):
        return _explain_windows(key, match["path"])
    bare = re.split(r"\s+#", value)[0].strip()
    if not bare:
        return Message("{key} has no value", key=key)
    if bare[0] in _CURLY:
        plain = bare.strip(_CURLY)
        return Message("TOML does not accept curly quotation marks. Write {key} = '{value}'", key=key, value=plain)
    if bare in _WORDS:
        return Message("{given} is not a TOML value. Write {key} = {value}", given=bare, key=key, value=_WORDS[bare])
    if match := _COMMA.fullmatch(bare):
        return _explain_comma(key, bare, match["thousands"] is not None)
    is_toml = bare[0] in "\"'[{" or re.match(r"[+-]?(?:\d|inf|nan)", bare) or bare in ("true", "false")
    if is_toml or any(mark in bare for mark in "\"'"):
        return None
    return Message("text needs quotation marks. Write {key} = '{value}'", key=key, value=bare)


def _explain_comma(key: str, number: str, may_be_thousands: bool) -> Message:
    """Return what to write for a number with a comma, which may stand between thousands."""
    decimal = number.replace(",", ".")
    if may_be_thousands:
        whole = number.replace(",", "")
        return Message(
            "a number cannot contain a comma. Write {key} = {whole}, or with a decimal point {key} = {decimal}",
            key=key,
            whole=whole,
            decimal=decimal,
        )
    return Message("the decimal separator is a point. Write {key} = {decimal}", key=key, decimal=decimal)


def _explain_windows(key: str, path: str) -> Message:
    r"""Return what to write for a Windows path; a `\` at its end would be an escape in single quotes too."""
    return Message(
        "in double quotes, \\ begins an escape. Use single quotes or /: {key} = '{path}'",
        key=key,
        path=path.rstrip("\\"),
    )
