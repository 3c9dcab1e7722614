"""The strict way from TOML text to a checked `Job`, and back.

* A **config** is complete and describes one job. A **preset** is partial and is laid under it.
  Precedence, merged in `_merge` and nowhere else: defaults < presets (in the order named) < config < `--set key=value`.
  The word "auto" means that the family or the objective decides; the run prints what was decided.
* Nothing is silently ignored: an unknown key, a wrong type, a wrong value and a contradiction are all errors, and a bad
  file reports all of them at once, each with its path, what was given, what is accepted, and "did you mean".

The settings themselves are declared in settings.py; they and what else a reader of jobs needs are imported from here.
Layer 0: no torch here, so that `lora-fp8 --help`, `check` and the web page start at once.
"""

import copy
import tomllib
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from .rules import contradictions, parse_factor, parse_override, parse_rank
from .settings import (
    MAX_SEED,
    SCALES,
    Adapter,
    Checkpoint,
    Dataset,
    Export,
    Folder,
    Job,
    Memory,
    Model,
    Objective,
    Optimizer,
    Preview,
    Quantize,
    Schedule,
    Section,
    Train,
    Validation,
    names_a_folder_of_masks,
)
from .wording import Location, accepted, did_you_mean, model_at, real_location, said, shown

__all__ = [
    "Adapter",
    "Checkpoint",
    "Dataset",
    "Export",
    "Folder",
    "Job",
    "Location",
    "MAX_SEED",
    "Memory",
    "Model",
    "Objective",
    "Optimizer",
    "PRESET_FOLDER",
    "Preview",
    "Quantize",
    "SCALES",
    "Schedule",
    "Section",
    "Train",
    "UserError",
    "UserErrors",
    "Validation",
    "accepted",
    "commented",
    "dumps",
    "layers",
    "load",
    "loads",
    "names_a_folder_of_masks",
    "parse_override",
    "parse_factor",
    "parse_rank",
    "preset_names",
    "read_toml",
    "toml_line",
]

HERE = Path(__file__).resolve().parent
PRESET_FOLDER = next(folder for folder in (HERE / "presets", HERE.parent / "presets") if folder.is_dir())
"""Inside of an installed package; beside it in a checkout."""


class UserError(Exception):
    """Something the user gave is wrong: one clear line, exit code 2, no traceback."""


class UserErrors(UserError):
    """Several things are wrong; all are reported at once.

    Args:
        problems: one line each.
        where: the file (or other source) that they were found in.
    """

    def __init__(self, problems: list[str], where: str = ""):
        self.problems, self.where = problems, where
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{where}: {count}" if where else count, *(f"  {p}" for p in problems)]))


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Job:
    """Read a config file, lay it over its presets, apply `--set` overrides, check everything.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts; the value is TOML (`train.steps=500`), or a bare word taken as a string.

    Raises:
        UserError, UserErrors: with every problem of the file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; `lora-fp8 new {path}` writes one") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; give the TOML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return loads(text, overrides, where=str(path), folder=path.parent)


def loads(text: str, overrides: list[str] | tuple[str, ...] = (), where: str = "config", folder: Path = Path()) -> Job:
    """As `load`, from TOML text; `folder` is where presets given as relative paths are looked for."""
    given = _parse_toml(text, where)
    problems: list[str] = []
    assignments = _parse_overrides(overrides, problems)
    data: dict[str, Any] = {}
    presets = {name: _read_preset(name, folder, problems) for name in _preset_names(given, assignments)}
    for preset in presets.values():
        _merge(data, preset)
    _merge(data, given)
    for keys, value in assignments:
        _assign(data, keys, value, problems)
    job, found = _validate(data)
    problems += [line + _origin(location, given, presets, assignments) for location, line in found]
    if problems:
        raise UserErrors(problems, where)
    assert job is not None
    return job


def toml_line(key: str, value: Any) -> str:
    """`key=value`, in a file or as an override; written by hand or as JSON, some characters come back as others."""
    return f"{key}={_inline(value).as_string()}"


def _inline(value: Any) -> Any:
    """As tomlkit's own `item`, with tables that stay on a line."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({name: _inline(one) for name, one in value.items()})
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend(map(_inline, value))
        return array
    return tomlkit.item(value)


def layers(text: str, where: str = "config", folder: Path = Path()) -> list[tuple[str, dict[str, Any]]]:
    """What a TOML text is made of, unchecked: (name, tables) of each preset that can be read, last the text's own, "".

    Raises:
        UserError: the text is not TOML. A preset that cannot be read is left out; `loads` tells why.
    """
    given = _parse_toml(text, where)
    unread: list[str] = []
    found = [(name, _read_preset(name, folder, unread)) for name in dict.fromkeys(_preset_names(given, []))]
    return [*found, ("", given)]


def preset_names() -> list[str]:
    """The bundled presets, by name."""
    return sorted(p.stem for p in PRESET_FOLDER.glob("*.toml"))


def dumps(job: Job) -> str:
    """The resolved job as TOML that `loads` turns into the same job; presets are already merged and no longer named."""
    data = job.model_dump()
    data["preset"] = []
    return tomlkit.dumps(data)


def commented(job: Job) -> str:
    """The job as a TOML file for people: every setting with its description and what it accepts, grouped by section."""
    lines: list[str] = []

    def section(model: Section, title: str, double: bool = False) -> None:
        doc = (type(model).__doc__ or "").strip().splitlines()[0]
        if title:
            lines.extend(["", f"[[{title}]]" if double else f"[{title}]", f"# {doc}"])
        inner: list[tuple[str, Any]] = []
        for name, field in type(model).model_fields.items():
            value = getattr(model, name)
            if isinstance(value, Section) or (name == "folders" and isinstance(value, list)):
                inner.append((name, value))
                continue
            choices = accepted(field)
            lines.append(
                f"{name} = {tomlkit.item(value).as_string()}  # {field.description}{choices and f' ({choices})'}"
            )
        for name, value in inner:
            for item in value if isinstance(value, list) else [value]:
                section(item, f"{title}.{name}" if title else name, isinstance(value, list))

    section(job, "")
    return "\n".join(lines).strip() + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# The steps of loading


DEEPEST = 20
"""Tables in tables in a file; ours has two."""


def read_toml(text: str) -> dict[str, Any]:
    """What TOML text holds, if everybody can walk and print it. Raises ValueError, RecursionError."""
    data = tomllib.loads(text)
    inner: list[Any] = [data]
    for _ in range(DEEPEST):
        inner = [v for node in inner for v in (node.values() if isinstance(node, dict) else node)]
        if any(isinstance(value, int) and value.bit_length() > 1024 for value in inner):  # written in hexadecimal
            raise ValueError("a whole number of more than 1024 bits")
        inner = [value for value in inner if isinstance(value, dict | list)]
    if inner:
        raise RecursionError(f"nested more than {DEEPEST} deep")
    return data


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return read_toml(text)
    # A number of 5,000 digits is a plain ValueError of int(), brackets nested a thousand deep a RecursionError.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None


def _parse_overrides(overrides: list[str] | tuple[str, ...], problems: list[str]) -> list[tuple[list[str], Any]]:
    assignments = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(f"--set {text}: expected key=value, such as --set train.steps=500")
            continue
        try:
            parsed = read_toml(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            parsed = value.strip()  # a bare word: --set model.family=flux
        keys = key.strip().split(".")
        if len(keys) > DEEPEST:
            problems.append(f"--set {shown(key)}: unknown setting")
            continue
        assignments.append((keys, parsed))
    return assignments


def _preset_names(given: dict[str, Any], assignments: list[tuple[list[str], Any]]) -> list[str]:
    names = given.get("preset", [])
    for keys, value in assignments:
        if keys == ["preset"]:
            names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return []  # its type is reported by the validation
    return [name for name in names if isinstance(name, str)]


def _read_preset(name: str, folder: Path, problems: list[str]) -> dict[str, Any]:
    path = folder / name if name.endswith(".toml") else PRESET_FOLDER / f"{name}.toml"
    try:
        found = path.is_file()
    except OSError:  # a name too long for the file system
        found = False
    if not found:
        hint = did_you_mean(name, preset_names())
        problems.append(
            f"preset: no preset {shown(name)}{hint}; accepted: {', '.join(preset_names())}, or the path of a .toml file"
        )
        return {}
    try:
        data = _parse_toml(path.read_text(encoding="utf-8-sig"), f"preset {name}")
    except UserError as error:
        problems.append(str(error))
        return {}
    except UnicodeDecodeError as error:
        problems.append(f"preset {name}: not UTF-8 text (byte {error.start}); save the file as UTF-8")
        return {}
    except OSError as error:
        problems.append(f"preset {name}: cannot be read ({error.strerror})")
        return {}
    if "preset" in data:
        problems.append(f"preset {name}: a preset cannot name presets; name them in the config")
        data.pop("preset")
    return data


def _merge(under: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` on `under` in place; tables are merged key by key, everything else is replaced."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _merge(under[key], value)
        else:
            under[key] = copy.deepcopy(value)  # what is merged later must not reach into the preset that this came from


def _assign(data: dict[str, Any], keys: list[str], value: Any, problems: list[str]) -> None:
    node: Any = data
    for i, key in enumerate(keys[:-1]):
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                problems.append(f"--set {'.'.join(keys)}: {'.'.join(keys[:i])} has {len(node)} entries, counted from 0")
                return
            node = node[int(key)]
        else:
            node = node.setdefault(key, {})
        if not isinstance(node, (dict, list)):
            problems.append(f"--set {'.'.join(keys)}: {'.'.join(keys[: i + 1])} is a value, not a table")
            return
    if isinstance(node, list):
        problems.append(f"--set {'.'.join(keys)}: give the entry's setting too, such as dataset.folders.0.repeats=2")
        return
    if keys == ["preset"] and isinstance(value, str):
        value = [value]
    if not keys[-1]:
        problems.append(f"--set {'.'.join(keys)}: the key is incomplete")
        return
    node[keys[-1]] = value


def _validate(data: dict[str, Any]) -> tuple[Job | None, list[tuple[Location, str]]]:
    """Check types, bounds and contradictions; returns the job (None if anything is wrong) and (place, line) of each."""
    problems: list[tuple[Location, str]] = []
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        # Each arm of a union complains; the last is the widest (int | float, a choice | a number) and says most.
        lines: dict[Location, str] = {}
        for item in error.errors(include_url=False):
            location = real_location(item["loc"], data)
            lines[location] = said(item, location)
        wrong = list(lines)
        problems += lines.items()
        # Contradictions are looked for in what remains, so that they are reported in the same go. A rule that reads a
        # setting which is wrong already would only repeat it, or judge by its default.
        names = [".".join(map(str, location)) for location in wrong]
        for keys, line in contradictions(Job.model_validate(_repaired(data, wrong))):
            if not any(f"{key}.".startswith(f"{n}.") or n.startswith(f"{key}.") for key in keys for n in names):
                problems.append((tuple(keys[0].split(".")), line))
        return None, problems
    problems += [(tuple(keys[0].split(".")), line) for keys, line in contradictions(job)]
    return (None if problems else job), problems


def _origin(
    location: Location, given: dict[str, Any], presets: dict[str, dict[str, Any]], assignments: list[Any]
) -> str:
    """Where a wrong setting was written, when that is not the file itself."""

    def holds(node: Any, parts: Location) -> bool:
        for part in parts:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return False
        return bool(parts)

    key = ".".join(map(str, location))
    if any(f"{key}.".startswith(f"{'.'.join(keys)}.") for keys, _ in assignments):
        return " (from --set)"
    if holds(given, location):
        return ""
    return next((f" (from preset {name})" for name in reversed(presets) if holds(presets[name], location)), "")


def _repaired(data: dict[str, Any], wrong: list[Location]) -> dict[str, Any]:
    """A deep copy without the entries at these places, and with empty text where something required is then missing."""

    def copied(node: Any, here: Location) -> Any:
        if isinstance(node, dict):
            table = {k: copied(v, (*here, k)) for k, v in node.items() if (*here, k) not in wrong}
            model = model_at(here)
            for name, field in model.model_fields.items() if model is not None else ():
                if field.is_required() and name not in table:
                    table[name] = copied({}, (*here, name)) if model_at((*here, name)) is not None else ""
            return table
        if isinstance(node, list):
            # A table that is none is emptied, not left out: the numbers of those after it must not change.
            keep = model_at(here) is not None
            entries = [((*here, i), v) for i, v in enumerate(node) if keep or (*here, i) not in wrong]
            return [copied({} if place in wrong else v, place) for place, v in entries]
        return node

    return copied(data, ())
