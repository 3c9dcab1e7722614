"""The form of a training: a table of settings from their declarations, and one text that all views edit.

The state of the form is a TOML text, as `lora-fp8 train` reads it, with only what its writer set. A view shows the
values that the text and its presets resolve to (`read_values`), and changes one setting at a time (`put`), so that
comments and everything that a view does not show stay. A setting that is put to the value that it would have without
its line loses the line.

A wrong value is written all the same. The engine's own check says what is wrong with it (`find_problems`).
"""

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import tomlkit
from pydantic_core import PydanticUndefined
from tomlkit.exceptions import TOMLKitError

from lora_fp8 import config
from lora_fp8.config import find_unmet_rules, validation
from lora_fp8.errors import Message, UserError
from lora_fp8.settings import Job, Section, flatten_table, parse_lines

Tables = dict[str, Any]
START = '[model]\nfamily = "sd15"\npath = ""\n'
"""The text of an untouched form: every setting at its default, base model and images left open."""


@dataclass(frozen=True)
class Setting:
    """A setting as a form needs it.

    Attributes:
        key: "adapter.rank". "dataset.folders" is a table whose columns have keys that continue its own.
        kind: its field: flag, choice, switch (true, false or a choice), number, mixed (a choice or a number), text,
            lines (one text per line), numbers (integers with commas), entries (a table of layers, one "NAME = VALUE"
            per line), choices (several), table (rows of `columns`), or toml (anything else, as in the file).
        choices: accepted words, for kinds with a choice.
        whole: integers stay integers; for other numbers a final ".0" may be left out.
        default: the value without a line; None if a value is required.
        bounds: accepted range in signs, such as ">= 1"; "" if there is none.
        accepts: the same in words.
        when: see `declarations.setting`.
        also: its names in other trainers, by trainer.
    """

    key: str
    kind: str
    choices: tuple[str, ...]
    whole: bool
    default: Any
    description: str
    bounds: str
    accepts: Message
    when: dict[str, tuple[Any, ...]]
    also: dict[str, str]
    columns: tuple["Setting", ...] = ()

    @property
    def section(self) -> str:
        """Return the table that it is in; "" for settings of the job itself."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Return its name in that table."""
        return self.key.rpartition(".")[2]


SWITCH = {"true": True, "false": False}
"""What a switch that has other words too shows for a bool."""


class Problem(NamedTuple):
    """What prevents a text from being trained: the setting ("" if none), and the message of the engine."""

    key: str
    line: str


# ---------------------------------------------------------------------------------------------------------------------
# The table of settings


@cache
def collect_settings() -> dict[str, Setting]:
    """Return every setting by key, in the order of the declarations."""
    return {setting.key: setting for setting in _list_settings(Job, "")}


@cache
def collect_sections() -> dict[str, str]:
    """Return every table of the config with its description; "" is the job itself."""
    descriptions = {"": Job.__doc__ or ""}
    for name, field in Job.model_fields.items():
        if model := _find_section(field.annotation):
            descriptions[name] = model.__doc__ or ""
    return descriptions


def _find_section(annotation: Any) -> type[Section] | None:
    """Return the section that an annotation is, or is a list of; None for other types."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _list_settings(model: type[Section], prefix: str) -> Iterable[Setting]:
    for name, field in model.model_fields.items():
        key, inner = prefix + name, _find_section(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from _list_settings(inner, f"{key}.")
            continue
        default = None if field.default is PydanticUndefined else _to_entries(field.default)
        extra: Any = field.json_schema_extra or {}
        when, also = extra.get("when", {}), extra.get("also", {})
        kind, choices = ("table", ()) if inner is not None else _find_kind(field.annotation)
        columns = tuple(_list_settings(inner, f"{key}.")) if inner is not None else ()
        numbers = validation.make_value_field(field) or field
        whole = int in {kind for kind, _ in validation.list_number_ranges(numbers)}
        bounds, accepts = validation.format_bounds(numbers), validation.describe_bounds(numbers)
        yield Setting(key, kind, choices, whole, default, field.description or "", bounds, accepts, when, also, columns)


def _find_kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    """Return the kind of field for a type, and the words that it accepts."""
    parts = get_args(annotation) if get_origin(annotation) not in (None, Literal, list, dict) else (annotation,)
    parts = tuple(get_args(part)[0] if get_origin(part) is Annotated else part for part in parts)
    words = tuple(str(w) for part in parts if get_origin(part) is Literal for w in get_args(part))
    plain = {part for part in parts if get_origin(part) is not Literal}
    if words and plain == {bool}:
        return "switch", (*words, *SWITCH)
    if words and all(isinstance(w, str) for part in parts if get_origin(part) is Literal for w in get_args(part)):
        if not plain:
            return "choice", words
        if plain <= {int, float}:
            return "mixed", words
        if plain == {str}:
            return "choice", words
    if plain == {bool}:
        return "flag", ()
    if plain and plain <= {int, float}:
        return "number", ()
    if plain == {str}:
        return "text", ()
    if get_origin(annotation) is dict:
        item = get_args(annotation)[1]
        if item is Any:
            return "toml", ()
        return "entries", tuple(map(str, get_args(item))) if get_origin(item) is Literal else ()
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


def to_component(setting: Setting, value: Any) -> Any:
    """Convert a value to what the field of this setting holds. Values of a wrong type are shown as in the file."""
    if setting.kind == "table":
        rows = value if isinstance(value, list) else []
        return [[to_component(column, _get_cell(row, column)) for column in setting.columns] for row in rows]
    if setting.kind == "flag" and isinstance(value, bool):
        return value
    if setting.kind == "switch" and isinstance(value, bool):
        return config.format_toml_value(value)
    if setting.kind == "choices" and isinstance(value, list):
        return [str(item) for item in value]
    if setting.kind == "lines" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(map(_quote_line, value))
    if setting.kind == "entries" and isinstance(value, dict) and all(map(_fits_a_line, value.items())):
        return "\n".join(f"{name} = {entry}" for name, entry in value.items())
    if setting.kind == "numbers" and isinstance(value, list) and all(type(item) is int for item in value):
        return ", ".join(map(str, value))
    if setting.kind in ("number", "mixed") and isinstance(value, int | float) and not isinstance(value, bool):
        text = repr(value)
        return text if setting.whole else text.removesuffix(".0")
    if isinstance(value, str) and setting.kind not in ("numbers", "entries", "toml"):
        return value
    return "" if value is None else config.format_toml_value(value)


def _get_cell(row: Any, column: Setting) -> Any:
    return row.get(column.name, column.default) if isinstance(row, dict) else None


def from_component(setting: Setting, held: Any) -> Any:
    """Convert what a field of this setting holds to a value; the inverse of `to_component`.

    Text that is not a number stays text where a number is expected, and the check says what is accepted.
    """
    if setting.kind == "table":
        return [row for row in (_read_row(setting, cells) for cells in held or []) if row]
    if setting.kind == "flag":
        return bool(held)
    if setting.kind == "switch" and held in SWITCH:
        return SWITCH[held]
    if setting.kind == "choices" or isinstance(held, list):  # presets are chosen, not typed
        return list(held or [])
    text = "" if held is None else str(held)
    if setting.kind == "lines":
        return [_unquote_line(line) for line in text.split("\n") if line.strip()]
    if setting.kind in ("number", "mixed"):
        return _parse_number(text.strip(), (int, float) if setting.whole else (float,))
    if setting.kind == "numbers" and not text.lstrip().startswith(("[", '"', "'")):
        return [_parse_number(part, (int,)) for part in re.split(r"[,，\s]+", text) if part]
    if setting.kind == "entries" and not text.lstrip().startswith(("{", "[", '"', "'")):
        return Entries(parse_lines(line for line in text.splitlines() if line.strip()))
    if setting.kind in ("numbers", "entries", "toml"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            return text
    return text


class Entries(dict[str, Any]):
    """The entries of a table of layers, whose order counts."""


def _to_entries(value: Any) -> Any:
    return Entries(value) if isinstance(value, dict) else value


def _fits_a_line(entry: tuple[str, Any]) -> bool:
    """Return True if an entry comes back as it is from its line."""
    name, value = entry
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return False
    back = parse_lines(f"{name} = {value}".splitlines())
    return not name.startswith(("{", "[", '"', "'")) and is_same_value(back, {name: value})


def _read_row(setting: Setting, cells: Any) -> Tables:
    """Convert a row of a table to a dict without values at their defaults; {} for an empty row."""
    cell_values = {
        column.name: (column, from_component(column, cell))
        for column, cell in zip(setting.columns, cells, strict=False)
    }
    if all(value in ("", None) or is_same_value(value, column.default) for column, value in cell_values.values()):
        return {}
    # An emptied number means its default. The check reports a required value that is missing.
    return {
        name: value
        for name, (column, value) in cell_values.items()
        if not is_same_value(value, column.default) and (value not in ("", None) or column.default is None)
    }


def _parse_number(text: str, kinds: tuple[type, ...]) -> Any:
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _quote_line(text: str) -> str:
    """Write a text as one line, in quotes if it would be read differently."""
    plain = text == text.strip() and text and not text.startswith('"') and text.splitlines() == [text]
    return text if plain else json.dumps(text, ensure_ascii=False)


def _unquote_line(line: str) -> str:
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


def read_values(text: str, folder: Path = Path()) -> dict[str, Any]:
    """Resolve every setting: its line, else the last preset that has it, else its default. Values are not checked.

    Raises:
        UserError: the text is not TOML.
    """
    return _resolve(config.read_layers(text, folder=folder))


def _resolve(layers: list[tuple[str, Tables]]) -> dict[str, Any]:
    values = {key: setting.default for key, setting in collect_settings().items()}
    for _, tables in layers:
        values |= {key: _convert_table(key, value) for key in values if (value := _look_up(tables, key)) is not None}
    return values


def _convert_table(key: str, value: Any) -> Any:
    """Return the table of a setting of kind "entries" as `Entries`, without tables in it; other values unchanged."""
    return (
        Entries(flatten_table(value))
        if collect_settings()[key].kind == "entries" and isinstance(value, dict)
        else value
    )


def _look_up(tables: Tables, key: str) -> Any:
    node: Any = tables
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def find_origins(text: str, folder: Path = Path()) -> dict[str, str]:
    """Return where each setting that has a line comes from: the name of a preset, or "" for the text itself."""
    origins: dict[str, str] = {}
    for name, tables in config.read_layers(text, folder=folder):
        origins |= {key: name for key in collect_settings() if _look_up(tables, key) is not None}
    return origins


def find_preset_settings(text: str, name: str, folder: Path = Path()) -> dict[str, Any]:
    """Return the settings, with their values, that a preset has lines for; {} if the text does not name the preset."""
    tables = next((tables for layer, tables in config.read_layers(text, folder=folder) if layer == name), {})
    return {
        key: _convert_table(key, value) for key in collect_settings() if (value := _look_up(tables, key)) is not None
    }


def unset(text: str, key: str, folder: Path = Path()) -> str:
    """Return the text without this setting, so that its presets' value counts, or the default.

    Raises:
        UserError: the text is not TOML.
    """
    return put(text, key, _resolve(config.read_layers(text, folder=folder)[:-1])[key], folder)


def put(text: str, key: str, value: Any, folder: Path = Path()) -> str:
    """Return the text with this setting at this value. Nothing else in it changes.

    Raises:
        UserError: the text is not TOML, or has a plain value in place of the setting's table.
    """
    layers = config.read_layers(text, folder=folder)
    given = layers[-1][1]
    *tables, name = key.split(".")
    given, wanted = _copy(given), _copy(given)
    for document in (given, wanted):
        for table in (key for key in collect_settings() if collect_settings()[key].kind == "entries"):
            if isinstance(entries := _look_up(document, table), dict):
                document[table.partition(".")[0]][table.partition(".")[2]] = _convert_table(table, entries)
    if tables and not isinstance(wanted.setdefault(tables[0], {}), dict):
        raise UserError(Message("{key}: expected a table, got {given}", key=tables[0], given=repr(wanted[tables[0]])))
    home = wanted[tables[0]] if tables else wanted
    setting, under = collect_settings()[key], _resolve(layers[:-1])[key]
    if setting.default is not None and (
        is_same_value(value, under) or is_same_value(value, from_component(setting, to_component(setting, under)))
    ):
        home.pop(name, None)
    elif value != "" or setting.default is not None or name in home:  # a required value that is missing has no line
        home[name] = value
    if tables and not home and given.get(tables[0]) != {}:
        del wanted[tables[0]]
    return text if is_same_value(wanted, given) else _write(text, wanted)


def is_same_value(value: Any, other: Any) -> bool:
    """Compare values, where true is not 1, 1.0 is not 1, and the order of `Entries` counts."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same_value, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        if isinstance(value, Entries) and list(value) != list(other):
            return False
        return value.keys() == other.keys() and all(is_same_value(value[key], other[key]) for key in value)
    return type(value) is type(other) and value == other


def _copy(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copy(value) for key, value in node.items()}
    return [_copy(value) for value in node] if isinstance(node, list) else node


def _write(text: str, wanted: Tables) -> str:
    """Return the text changed to hold these tables, with comments and order kept.

    tomlkit cannot write every change into every layout (tables that are continued later, dotted keys). The result is
    therefore read back, and written anew if it differs from what was wanted: a comment may be lost, but never a value.
    """
    try:
        document = tomlkit.parse(text)
        _update_node(document, wanted)
        changed = tomlkit.dumps(document)
        if is_same_value(wanted, config.read_layers(changed)[-1][1]):
            return changed
    except (TOMLKitError, UserError, KeyError, TypeError, AttributeError):
        pass
    return tomlkit.dumps(wanted)


def _update_node(node: Any, wanted: Tables) -> None:
    for key in [key for key in node if key not in wanted]:
        del node[key]
    for key, value in wanted.items():
        if key not in node:
            node[key] = _make_item(value)
        elif isinstance(value, dict) and isinstance(node[key], dict) and not isinstance(value, Entries):
            _update_node(node[key], value)
        elif isinstance(value, Entries) and is_same_value(value, _read_entries(node[key])):
            continue
        elif not is_same_value(_unwrap(node[key]), value):
            if _is_rows(value) and _is_rows(_unwrap(node[key])) and len(value) == len(node[key]):
                for row, wanted_row in zip(node[key], value, strict=True):
                    _update_node(row, wanted_row)
                continue
            new, trivia = _make_item(value), getattr(node[key], "trivia", None)
            if trivia is not None and not _is_rows(value):
                new.trivia.comment_ws, new.trivia.comment = trivia.comment_ws, trivia.comment
            node[key] = new


def _unwrap(item: Any) -> Any:
    return item.unwrap() if hasattr(item, "unwrap") else item


def _read_entries(item: Any) -> Any:
    """Return a table of layers from the file, in either form; other values unchanged."""
    value = _unwrap(item)
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return parse_lines(value)
    return flatten_table(value) if isinstance(value, dict) else value


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _make_item(value: Any) -> Any:
    if isinstance(value, Entries):
        table = tomlkit.inline_table()
        table.update(value)
        return table
    if not _is_rows(value):
        return tomlkit.item(value)
    rows = tomlkit.aot()
    for row in value:
        row_table = tomlkit.table()
        for key, cell in row.items():
            row_table[key] = cell
        rows.append(row_table)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# What follows from it


def find_problems(text: str, folder: Path = Path()) -> list[Problem]:
    """Return everything that the engine's check finds wrong, with the setting of each."""
    try:
        config.loads(text, folder=folder)
    except UserError as error:
        lines = error.problems
        return [Problem(find_key(line), line) for line in lines]
    return []


def find_key(line: str) -> str:
    """Return the setting that a message is about: "dataset.folders.0.path: is empty" -> "dataset.folders"; or ""."""
    parts = line.partition(":")[0].split(".")
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in collect_settings():
            return key
    return ""


def find_unused(values: dict[str, Any]) -> set[str]:
    """Return the settings that have no effect with these values; see `declarations.setting`."""
    return set(find_unmet_rules(values)) & collect_settings().keys()
