"""The form of a training: one table of settings from their declarations, and one text that all views work on.

The state of the form is a TOML text, as `lora-fp8 train` reads it: what its writer set, and nothing else. A view shows
what the text and its presets come to (`values`) and changes one setting at a time in it (`put`), so that comments and
everything that a view does not show stay as they are. A setting that is put to what it would be without its line loses
the line.

A value that is wrong is written all the same: what it means for the training, the engine's own check says (`problems`).
"""

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tomlkit
from pydantic_core import PydanticUndefined
from tomlkit.exceptions import TOMLKitError

from lora_fp8 import config, families
from lora_fp8.config import Job, Section, UserError

Tables = dict[str, Any]
START = '[model]\nfamily = "sd15"\npath = ""\n'
"""The text of an untouched form: every setting at its default, the base and the pictures left open."""


@dataclass(frozen=True)
class Setting:
    """One setting as a form needs it.

    Attributes:
        key: "adapter.rank"; "dataset.folders" is a table of its own settings, whose keys go on behind it.
        kind: how it is shown: flag, choice, number, mixed (a choice or a number), text, lines (texts, one a line),
            numbers (whole ones, with commas), choices (several), table (rows of `columns`), or toml (anything else, as
            it stands in the file).
        choices: what kinds with a choice know.
        whole: a number without a point stays one; of a number with a point, ".0" may be left out.
        default: what holds where nothing is written; None where something must be.
        bounds: what a number must be, in words; "" where it is free or its choices say it.
        when: see `settings.setting`.
    """

    key: str
    kind: str
    choices: tuple[str, ...]
    whole: bool
    default: Any
    description: str
    bounds: str
    when: dict[str, tuple[Any, ...]]
    columns: tuple["Setting", ...] = ()

    @property
    def section(self) -> str:
        """The table that it stands in; "" for those of the job itself."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in that table."""
        return self.key.rpartition(".")[2]


class Problem(NamedTuple):
    """What keeps a text from being trained: the setting ("" where it is none), and the engine's line."""

    key: str
    line: str


# ---------------------------------------------------------------------------------------------------------------------
# The table of settings


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its key, in the order of the declarations."""
    return {one.key: one for one in _declared(Job, "")}


@cache
def sections() -> dict[str, str]:
    """Every table of the config and what it is for; "" is the job itself."""
    found = {"": Job.__doc__ or ""}
    for name, field in Job.model_fields.items():
        if model := _inner(field.annotation):
            found[name] = model.__doc__ or ""
    return found


def _inner(annotation: Any) -> type[Section] | None:
    """The section that an annotation is, or is a list of."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, Section):
            return one
    return None


def _declared(model: type[Section], prefix: str) -> Iterable[Setting]:
    for name, field in model.model_fields.items():
        key, inner = prefix + name, _inner(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from _declared(inner, f"{key}.")
            continue
        default = None if field.default is PydanticUndefined else field.default
        when = (field.json_schema_extra or {}).get("when", {})  # type: ignore[union-attr]
        kind, choices = ("table", ()) if inner is not None else _kind(field.annotation)
        columns = tuple(_declared(inner, f"{key}.")) if inner is not None else ()
        whole = int in (field.annotation, *get_args(field.annotation))
        bounds = config.accepted(field) if kind == "number" else ""
        yield Setting(key, kind, choices, whole, default, field.description or "", bounds, when, columns)


def _kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    """How a type is shown, and the words it knows."""
    parts = get_args(annotation) if get_origin(annotation) not in (None, Literal, list) else (annotation,)
    words = tuple(str(w) for part in parts if get_origin(part) is Literal for w in get_args(part))
    plain = {part for part in parts if get_origin(part) is not Literal}
    if words and all(isinstance(w, str) for part in parts if get_origin(part) is Literal for w in get_args(part)):
        if not plain:
            return "choice", words
        if plain <= {int, float}:
            return "mixed", words
    if plain == {bool}:
        return "flag", ()
    if plain and plain <= {int, float}:
        return "number", ()
    if plain == {str}:
        return "text", ()
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        if item is str:
            return "lines", ()
        if item is int:
            return "numbers", ()
        if get_origin(item) is Literal:
            return "choices", tuple(map(str, get_args(item)))
    return "toml", ()


# ---------------------------------------------------------------------------------------------------------------------
# Between a value and what a component holds


def shown(setting: Setting, value: Any) -> Any:
    """A value as the component of this setting holds it. What cannot be one is shown as it stands in the file."""
    if setting.kind == "table":
        rows = value if isinstance(value, list) else []
        return [[shown(one, _of(row, one)) for one in setting.columns] for row in rows]
    if setting.kind == "flag" and isinstance(value, bool):
        return value
    if setting.kind == "choices" and isinstance(value, list):
        return [str(one) for one in value]
    if setting.kind == "lines" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(map(_line, value))
    if setting.kind == "numbers" and isinstance(value, list) and all(type(one) is int for one in value):
        return ", ".join(map(str, value))
    if setting.kind in ("number", "mixed") and isinstance(value, int | float) and not isinstance(value, bool):
        text = repr(value)
        return text if setting.whole else text.removesuffix(".0")
    if isinstance(value, str) and setting.kind not in ("numbers", "toml"):
        return value
    return "" if value is None else tomlkit.item(value).as_string()


def _of(row: Any, column: Setting) -> Any:
    return row.get(column.name, column.default) if isinstance(row, dict) else None


def read(setting: Setting, held: Any) -> Any:
    """What a component of this setting holds, as a value; `shown` the other way round.

    What is typed where a number belongs, and is none, stays text: the check says what is accepted.
    """
    if setting.kind == "table":
        return [row for row in (_row(setting, cells) for cells in held or []) if row]
    if setting.kind == "flag":
        return bool(held)
    if setting.kind == "choices" or isinstance(held, list):  # presets are texts that are chosen, not typed
        return list(held or [])
    text = "" if held is None else str(held)
    if setting.kind == "lines":
        return [_unline(line) for line in text.split("\n") if line.strip()]
    if setting.kind in ("number", "mixed"):
        return _number(text.strip(), (int, float) if setting.whole else (float,))
    if setting.kind == "numbers" and not text.lstrip().startswith(("[", '"', "'")):
        return [_number(one, (int,)) for one in re.split(r"[,，\s]+", text) if one]
    if setting.kind in ("numbers", "toml"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            return text
    return text


def _row(setting: Setting, cells: Any) -> Tables:
    """One row of a table without what is at its default; {} for an empty row."""
    found = {one.name: (one, read(one, cell)) for one, cell in zip(setting.columns, cells, strict=False)}
    if all(value in ("", None) or same(value, one.default) for one, value in found.values()):
        return {}
    # An emptied cell of a number means its default; what must be given is shown as missing by the check.
    return {
        name: value
        for name, (one, value) in found.items()
        if not same(value, one.default) and (value not in ("", None) or one.default is None)
    }


def _number(text: str, kinds: tuple[type, ...]) -> Any:
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _line(text: str) -> str:
    """A text as one line; in quotes where it would be read as another."""
    plain = text == text.strip() and text and not text.startswith('"') and text.splitlines() == [text]
    return text if plain else json.dumps(text, ensure_ascii=False)


def _unline(line: str) -> str:
    line = line.strip()
    if line.startswith('"'):
        try:
            value = json.loads(line)
        except ValueError:
            return line
        if isinstance(value, str):
            return value
    return line


# ---------------------------------------------------------------------------------------------------------------------
# The text


def values(text: str, folder: Path = Path()) -> dict[str, Any]:
    """What every setting comes to: by its line, else by the last preset that has it, else its default. Unchecked.

    Raises:
        UserError: the text is not TOML.
    """
    return _resolved(config.layers(text, folder=folder))


def _resolved(layers: list[tuple[str, Tables]]) -> dict[str, Any]:
    found = {key: one.default for key, one in settings().items()}
    for _, tables in layers:
        found |= {key: value for key in found if (value := _look(tables, key)) is not None}
    return found


def _look(tables: Tables, key: str) -> Any:
    node: Any = tables
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def origins(text: str, folder: Path = Path()) -> dict[str, str]:
    """Where each setting that is not at its default comes from: the name of a preset, or "" for the text itself."""
    found = {}
    for name, tables in config.layers(text, folder=folder):
        found |= {key: name for key in settings() if _look(tables, key) is not None}
    return found


def put(text: str, key: str, value: Any, folder: Path = Path()) -> str:
    """The text with this setting at this value; nothing else in it changes.

    Raises:
        UserError: the text is not TOML, or has a plain value where the setting's table belongs.
    """
    layers = config.layers(text, folder=folder)
    given = layers[-1][1]
    *tables, name = key.split(".")
    wanted = _copied(given)
    if tables and not isinstance(wanted.setdefault(tables[0], {}), dict):
        raise UserError(f"{tables[0]}: expected a table, got {wanted[tables[0]]!r}")
    home = wanted[tables[0]] if tables else wanted
    setting, under = settings()[key], _resolved(layers[:-1])[key]
    if setting.default is not None and (same(value, under) or same(value, read(setting, shown(setting, under)))):
        home.pop(name, None)
    elif value != "" or setting.default is not None or name in home:  # what must be given, and is not, has no line
        home[name] = value
    if tables and not home and given.get(tables[0]) != {}:
        del wanted[tables[0]]
    return text if same(wanted, given) else _written(text, wanted)


def same(one: Any, other: Any) -> bool:
    """Equality in which true is not 1, and 1.0 is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def _copied(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copied(value) for key, value in node.items()}
    return [_copied(value) for value in node] if isinstance(node, list) else node


def _written(text: str, wanted: Tables) -> str:
    """The text changed to hold these tables, comments and order kept.

    tomlkit cannot write every change into every layout (tables that are taken up again, dotted keys). What it has
    written is therefore read back, and where it does not hold what was wanted, the tables are written anew: a comment
    may be lost, never a value.
    """
    try:
        document = tomlkit.parse(text)
        _change(document, wanted)
        changed = tomlkit.dumps(document)
        if same(tomllib.loads(changed), wanted):
            return changed
    except (TOMLKitError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError):
        pass
    return tomlkit.dumps(wanted)


def _change(node: Any, wanted: Tables) -> None:
    for key in [key for key in node if key not in wanted]:
        del node[key]
    for key, value in wanted.items():
        if key not in node:
            node[key] = _item(value)
        elif isinstance(value, dict) and isinstance(node[key], dict):
            _change(node[key], value)
        elif not same(_plain(node[key]), value):
            if _is_rows(value) and _is_rows(_plain(node[key])) and len(value) == len(node[key]):
                for row, wanted_row in zip(node[key], value, strict=True):
                    _change(row, wanted_row)
                continue
            new, trivia = _item(value), getattr(node[key], "trivia", None)
            if trivia is not None and not _is_rows(value):
                new.trivia.comment_ws, new.trivia.comment = trivia.comment_ws, trivia.comment
            node[key] = new


def _plain(item: Any) -> Any:
    return item.unwrap() if hasattr(item, "unwrap") else item


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _item(value: Any) -> Any:
    if not _is_rows(value):
        return tomlkit.item(value)
    rows = tomlkit.aot()
    for row in value:
        table = tomlkit.table()
        for key, one in row.items():
            table[key] = one
        rows.append(table)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# What follows from it


def problems(text: str, folder: Path = Path()) -> list[Problem]:
    """Everything that the engine's check finds wrong, each with its setting."""
    try:
        config.loads(text, folder=folder)
    except UserError as error:
        lines = getattr(error, "problems", [str(error)])
        return [Problem(_key_of(line), line) for line in lines]
    return []


def _key_of(line: str) -> str:
    """The setting that a line of the check is about: "dataset.folders.0.path: is empty" -> "dataset.folders"."""
    parts = line.partition(":")[0].split(".")
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in settings():
            return key
    return ""


def idle(found: dict[str, Any]) -> set[str]:
    """The settings that can have no effect beside these values; see `settings.setting`."""
    family = found["model.family"]
    traits = families.traits(family) if family in families.available() else {}
    found = found | {f"family.{name}": value for name, value in traits.items()}
    rows = found["dataset.folders"] if isinstance(found["dataset.folders"], list) else []
    for column in settings()["dataset.folders"].columns:
        found[column.key] = [row for row in rows if isinstance(row, dict) and row.get(column.name)]
    return {key for key, one in settings().items() if not all(_holds(rule, found) for rule in one.when.items())}


def _holds(rule: tuple[str, tuple[Any, ...]], found: dict[str, Any]) -> bool:
    def does(key: str) -> bool:
        if key not in found:
            return True  # of a family that there is not, nothing is known
        value = found[key]
        if accepted and isinstance(value, str | bool | int | float | None):
            return value in accepted
        return bool(value)

    keys, accepted = rule
    return any(map(does, keys.split(" | ")))
