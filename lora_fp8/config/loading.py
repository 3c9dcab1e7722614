"""Parse TOML strictly into a checked `Job`, and write it back.

* A **config** is complete and describes one job. A **preset** is partial, and the config overrides it. It is a file, or
  half of a recipe (`recipes`), which is made for the family. Precedence, which only `_merge` implements: defaults <
  presets (in the order named) < config < `--set key=value`. The word "auto" means that the family or the objective
  decides; the run prints what was decided.
* Nothing is silently ignored: an unknown key, a wrong type, a wrong value and a contradiction are all errors. All
  errors of a file are reported at once, each with its path, what was given, what is accepted, and "did you mean".

The settings themselves are declared in `settings`. This package does not import torch, so that `lora-fp8 --help`,
`check` and the web page start at once.
"""

import copy
import logging
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import ValidationError

from ..common.json_files import TOO_DEEP
from ..common.messages import get_language, translate
from ..common.parsing import describe_parser_error
from ..common.reading import load_text
from ..common.shell import quote_path
from ..common.text import find_similar, quote
from ..errors import Message, Plural, UserError, UserErrors, cannot_read, looked_for, not_utf8
from ..families.sources import parse as parse_reference
from ..settings import TABLES, Job, Section, flatten_table, parse_lines
from . import recipes
from .mistakes import explain_toml, find_escaped_paths, find_variables
from .relations import KINDS, find_contradictions, find_kinds
from .unused import list_unused_keys
from .validation import OUT_OF_BOUNDS, Location, describe_accepted, describe_error, find_model, resolve_location

HERE = Path(__file__).resolve().parent.parent
PRESET_FOLDER = next(folder for folder in (HERE / "presets", HERE.parent / "presets") if folder.is_dir())
"""Inside the installed package, or beside it in a checkout."""


class InvalidConfig(UserErrors):
    """Settings of a config are wrong.

    Attributes:
        valid: the job of the valid settings, with defaults or nothing in place of the others; None if too many are
            wrong.
        wrong: the places of the wrong settings: {"train.steps", "dataset.folders.0.path"}.
    """

    def __init__(self, problems: list[str], where: str, valid: Job | None, wrong: Iterable[Location]):
        super().__init__(problems, where)
        self.valid, self.wrong = valid, {".".join(map(str, location)) for location in wrong}


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Job:
    """Read a config file, merge it with its presets, apply the `--set` overrides, and check everything.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts; the value is TOML (`train.steps=500`), or a bare word, taken as a string.

    Raises:
        UserError, InvalidConfig: with every problem of the file.
    """
    path = Path(path)
    try:
        text = load_text(path)
    except FileNotFoundError:
        raise _explain_missing_file(path) from None
    except IsADirectoryError:
        raise UserError(Message("{path}: this is a folder; give the TOML file in it", path=path)) from None
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    except OSError as error:
        raise cannot_read(path, error) from None
    return loads(text, overrides, where=str(path), folder=path.parent)


def loads(text: str, overrides: list[str] | tuple[str, ...] = (), where: str = "config", folder: Path = Path()) -> Job:
    """Load a config from TOML text, as `load` does; `folder` is the base of presets given as relative paths."""
    given = _parse_toml(text, where)
    problems: list[str] = []
    assignments = _parse_overrides(overrides, problems)
    data: dict[str, Any] = {}
    names = _read_preset_names(given, assignments)
    if len(names) > MOST_PRESETS:
        problems.append(
            Message(
                "preset: a config can use at most {number} presets, got {given}", number=MOST_PRESETS, given=len(names)
            )
        )
    presets = {name: _read_preset(name, folder, problems) for name in names[:MOST_PRESETS]}
    layers = [*presets.values(), given]
    family = _find_family(layers, assignments)
    _fill_recipes(presets.items(), family, layers, assignments)
    for name, preset in presets.items():
        _merge_kinds(preset, family, name, problems)
        _read_tables(preset, f"preset {name}")
        _merge(data, preset)
    _read_tables(given, where)
    _merge(data, given)
    for keys, value in assignments:
        _assign(data, keys, _read_table(".".join(keys), value, "--set"), problems)
    _read_tables(data, where)  # again: `--set adapter.ranks.ff.net=8` has made tables in tables
    wrong_base = _normalise_base(data)
    job, problem_lines = _validate(data)
    problem_lines = [*wrong_base, *problem_lines]
    options = {text.partition("=")[0].strip(): getattr(text, "option", "--set") for text in overrides}
    problems += [_add_origin(line, location, given, presets, options) for location, line in problem_lines]
    if problems:
        raise InvalidConfig(problems, where, job, [location for location, _ in problem_lines])
    assert job is not None
    return job


def _explain_missing_file(path: Path) -> UserError:
    """Return the error for a config file that does not exist, with the file beside it that was probably meant."""
    stem = path.name.removesuffix(".toml")
    present = [file.stem for file in path.parent.glob("*.toml")]  # without the ending, which makes all names similar
    near = stem if stem in present else find_similar(stem, present)
    if near is not None:
        meant = quote_path(path.parent / f"{near}.toml")
        return UserError(
            Message("{path}: this config file does not exist, did you mean {meant}?", path=path, meant=meant)
        )
    return UserError(
        Message(
            "{line}; `{command}` writes one",
            line=looked_for(path, Message("{path}: this config file does not exist", path=path)),
            command=f"lora-fp8 new {quote_path(path)}",
        )
    )


def format_toml_line(key: str, value: Any) -> str:
    """Return `key=value` for a file or an override, with the escapes of TOML, which differ from those of JSON."""
    return f"{key}={format_toml_value(value)}"


class Override(str):
    """`key=value`, as `--set` takes it, of another origin.

    Attributes:
        option: the option of the command that gave it, such as "--prompt"; "" if no option did.
    """

    option: str

    def __new__(cls, key: str, value: Any, option: str = "") -> "Override":
        """Write the value as TOML."""
        line = super().__new__(cls, format_toml_line(key, value))
        line.option = option
        return line


def format_toml_value(value: Any) -> str:
    """Return a value as TOML writes it behind a key; a table stays on the line."""
    return _make_inline(value).as_string()


def _make_inline(value: Any) -> Any:
    """Convert a value as tomlkit's `item` does, but with inline tables."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({name: _make_inline(inner) for name, inner in value.items()})
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend(map(_make_inline, value))
        return array
    return tomlkit.item(value)


def read_layers(text: str, folder: Path = Path()) -> list[tuple[str, dict[str, Any]]]:
    """Return the parts of a TOML text, unchecked: (name, tables) of each readable preset, then ("", its own tables).

    Raises:
        UserError: the text is not TOML. A preset that cannot be read is left out; `loads` reports why.
    """
    given = _parse_toml(text, "config")
    unread: list[str] = []
    presets = [
        (name, _read_preset(name, folder, unread))
        for name in dict.fromkeys(_read_preset_names(given, [])[:MOST_PRESETS])
    ]
    tables = [*(preset for _, preset in presets), given]
    family = _find_family(tables, [])
    _fill_recipes(presets, family, tables, [])
    for name, preset in presets:
        _merge_kinds(preset, family, name, unread)
        _read_tables(preset)
    _read_tables(given)
    return [*presets, ("", given)]


def list_preset_names() -> list[str]:
    """Return the names of the presets: those of recipes, and the bundled files."""
    return [*recipes.list_names(), *sorted(p.stem for p in PRESET_FOLDER.glob("*.toml"))]


def dumps(job: Job) -> str:
    """Return the resolved job as TOML that `loads` turns into the same job; presets are merged and no longer named."""
    data = job.model_dump()
    data["preset"] = []
    for section, _, name in (key.partition(".") for key in (*TABLES, "optimizer.arguments")):
        data[section][name] = _make_inline(data[section][name])  # on its line, not as a table behind the section
    return tomlkit.dumps(data)


def format_with_comments(job: Job) -> str:
    """Return the job as a TOML file for people: each setting with its description and accepted values, by section.

    Settings that have no effect in this job are left out, unless they are set.
    """
    lines: list[str] = []
    idle = list_unused_keys(job)

    def add_section(model: Section, title: str, double: bool = False) -> None:
        doc = (type(model).__doc__ or "").strip().splitlines()[0]
        if title:
            lines.extend(["", f"[[{title}]]" if double else f"[{title}]", f"# {doc}"])
        inner: list[tuple[str, Any]] = []
        for name, field in type(model).model_fields.items():
            value = getattr(model, name)
            if isinstance(value, Section) or (name == "folders" and isinstance(value, list)):
                inner.append((name, value))
                continue
            key = f"{title}.{name}" if title else name
            if key in idle and value == field.get_default(call_default_factory=True):
                continue
            choices = describe_accepted(field)
            lines.append(f"{name} = {format_toml_value(value)}  # {field.description}{choices and f' ({choices})'}")
        for name, value in inner:
            for item in value if isinstance(value, list) else [value]:
                add_section(item, f"{title}.{name}" if title else name, isinstance(value, list))

    add_section(job, "")
    return "\n".join(lines).strip() + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Steps of loading


MOST_PRESETS = 20
"""Presets that a config may name; each is read, or compared with all preset names if it does not exist."""
UNLISTED = Plural("{count} more problem is not listed", "{count} more problems are not listed")
MOST_PROBLEMS = 200
"""Wrong settings that are listed; a file with more is not a file of settings."""
DEEPEST = 20
"""Levels of nested tables in a file; ours has two."""
QUOTED = re.compile(
    r'"""(?:[^\\"]|\\.|"(?!""))*+"""|\'\'\'.*?\'\'\'|"(?:[^\\"\n]|\\.)*+"|\'[^\'\n]*+\'|#[^\n]*+', re.DOTALL
)
"""Matches strings and comments of TOML."""
DEEP_KEY = re.compile(rf"(?:(?<![\w-])[\w-]++[ \t]*+\.[ \t]*+){{{DEEPEST}}}")


def read_toml(text: str, *, quotes_line: bool = False) -> dict[str, Any]:
    """Parse TOML into values that are safe to traverse and print.

    Args:
        text: of the file.
        quotes_line: quote the line in the error; not for files that may hold secrets.

    Raises:
        ValueError: it is not TOML, is nested deeper than `DEEPEST`, or has a key of more parts than that, for which
            tomllib takes quadratic time.
    """
    if DEEP_KEY.search(QUOTED.sub("_", text)):
        raise ValueError(Message("a key has more than {most} parts", most=DEEPEST))
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(describe_parser_error(error, text if quotes_line else "")) from None
    inner: list[Any] = [data]
    for _ in range(DEEPEST):
        inner = [v for node in inner for v in (node.values() if isinstance(node, dict) else node)]
        if any(isinstance(value, int) and value.bit_length() > 1024 for value in inner):  # hex has no digit limit
            raise ValueError(Message("a whole number has more than 1024 bits"))
        inner = [value for value in inner if isinstance(value, dict | list)]
    if inner:
        raise ValueError(Message("tables are nested more than {most} deep", most=DEEPEST))
    return data


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        data = read_toml(text, quotes_line=True)
    # Not only TOMLDecodeError: a number of 5,000 digits is a plain ValueError from int().
    except ValueError as error:
        if known := explain_toml(text):
            raise UserErrors(known, where) from None
        raise UserError(Message("{where}: not valid TOML: {why}", where=where, why=error)) from None
    if escaped := find_escaped_paths(text):
        raise UserErrors(escaped, where)
    return data


def _parse_overrides(overrides: list[str] | tuple[str, ...], problems: list[str]) -> list[tuple[list[str], Any]]:
    assignments = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(Message("--set {text}: expected key=value, such as --set train.steps=500", text=text))
            continue
        try:
            parsed = read_toml(f"value = {value}")["value"]
        except ValueError:
            parsed = value.strip()  # a bare word: --set model.family=flux
        keys = key.strip().split(".")
        if len(keys) > DEEPEST:
            problems.append(Message("--set {key}: unknown setting", key=quote(key)))
            continue
        assignments.append((keys, parsed))
    return assignments


def _read_preset_names(given: dict[str, Any], assignments: list[tuple[list[str], Any]]) -> list[str]:
    names = given.get("preset", [])
    for keys, value in assignments:
        if keys == ["preset"]:
            names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return []  # the validation reports its type
    return [name for name in names if isinstance(name, str)]


def _read_preset(name: str, folder: Path, problems: list[str]) -> dict[str, Any]:
    if name in recipes.list_names():
        return {}  # `_fill_recipes` needs the family
    path = folder / name if name.endswith(".toml") else PRESET_FOLDER / f"{name}.toml"
    try:
        exists = path.is_file()
    except OSError:  # a name too long for the file system
        exists = False
    if not exists:
        given, names = quote(name), ", ".join(list_preset_names())
        if near := find_similar(name, list_preset_names()):
            line = Message(
                "preset: there is no preset {name}, did you mean {meant}?; accepted: {names}, or the path of a "
                ".toml file",
                name=given,
                meant=repr(near),
                names=names,
            )
        else:
            line = Message(
                "preset: there is no preset {name}; accepted: {names}, or the path of a .toml file",
                name=given,
                names=names,
            )
        problems.append(line)
        return {}
    try:
        data = _parse_toml(load_text(path), f"preset {name}")
    except UserError as error:
        problems.append(str(error))
        return {}
    except UnicodeDecodeError as error:
        problems.append(str(not_utf8(f"preset {name}", error)))
        return {}
    except OSError as error:
        problems.append(str(cannot_read(f"preset {name}", error)))
        return {}
    if "preset" in data:
        problems.append(Message("preset {name}: a preset cannot name presets; name them in the config", name=name))
        data.pop("preset")
    return data


def _find_value(layers: list[dict[str, Any]], assignments: list[tuple[list[str], Any]], key: str) -> Any:
    """Return the value of a setting (section.name) that results from these layers and overrides; None without one."""
    section, _, name = key.partition(".")
    tables = [layer.get(section) for layer in layers]
    given = [table[name] for table in tables if isinstance(table, dict) and name in table]
    given += [value for keys, value in assignments if keys == [section, name]]
    return given[-1] if given else None


def _find_family(layers: list[dict[str, Any]], assignments: list[tuple[list[str], Any]]) -> str:
    """Return the `model.family` that results from these layers and overrides; "" if none names one."""
    named = _find_value(layers, assignments, "model.family")
    return named if isinstance(named, str) else ""


def _fill_recipes(
    presets: Iterable[tuple[str, dict[str, Any]]],
    family: str,
    layers: list[dict[str, Any]],
    assignments: list[tuple[list[str], Any]],
) -> None:
    """Write the values of goals and cards into their empty presets, in place; other presets stay as they are.

    A card depends on what the goal sets, wherever it is named.
    """
    for name, preset in sorted(presets, key=lambda pair: pair[0] not in recipes.GOALS):
        draws = bool(_find_value(layers, assignments, "preview.prompts"))
        frames = recipes.find_longest_clip(_find_value(layers, assignments, "dataset.frames"))
        dropout = recipes.is_dropout(_find_value(layers, assignments, "adapter.dropout"))
        base = str(_find_value(layers, assignments, "model.path") or "")
        values = recipes.find_preset_values(name, family, draws=draws, frames=frames, dropout=dropout, base=base)
        for value in values or []:
            section, _, key = value.key.partition(".")
            preset.setdefault(section, {})[key] = copy.deepcopy(value.value)


def _merge_kinds(preset: dict[str, Any], family: str, name: str, problems: list[str]) -> None:
    """Merge into a preset, in place, those of its [for.KIND] tables that apply to this family, and drop the others."""
    tables = preset.pop("for", {})
    for kind, table in tables.items() if isinstance(tables, dict) else [("", tables)]:
        if kind not in KINDS or not isinstance(table, dict):
            problems.append(
                Message(
                    "preset {name}: for.{kind} names no kind of architectures; accepted: {kinds}",
                    name=name,
                    kind=kind,
                    kinds=" | ".join(KINDS),
                )
            )
        elif kind in find_kinds(family):
            _merge(preset, table)


def _read_tables(data: dict[str, Any], where: str = "") -> None:
    """Bring the tables of layers (`settings.TABLES`) into their form, in place; see `_read_table`."""
    for key in TABLES:
        section, _, name = key.partition(".")
        if isinstance(data.get(section), dict) and name in data[section]:
            data[section][name] = _read_table(key, data[section][name], where)


def _read_table(key: str, value: Any, where: str = "") -> Any:
    """Return a table of layers in its form: an older list of texts is converted, tables in it are joined by dots.

    Args:
        key: the setting; another than a table of layers keeps its value.
        value: what was given.
        where: the file, to warn of the older form; "" warns of nothing.
    """
    if key in TABLES and isinstance(value, list) and all(isinstance(line, str) for line in value):
        table = parse_lines(value)
        if where:
            line: str = f"{key.partition('.')[2]} = {format_toml_value(table)}"
            if len(table) < len(value):
                line = Message("{line}; if a name occurs twice, its first line counts", line=line)
            _warn_of_lines(key, line, where)
        return table
    return flatten_table(value) if key in TABLES and isinstance(value, dict) else value


@cache
def _warn_of_lines(key: str, line: str, where: str) -> None:
    """Warn once of a list where a table belongs."""
    warning = Message(
        "{where}: {key} is a list of strings, as in older versions; write it as a table: {line}",
        where=where,
        key=key,
        line=line,
    )
    logging.getLogger(__name__).warning("%s", translate(get_language(), warning))


def _merge(under: dict[str, Any], over: dict[str, Any], section: str = "") -> None:
    """Lay `over` on `under` in place; sections are merged key by key, everything else is replaced.

    A table of layers is a value: its order counts, and entries of a preset would come first.
    """
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict) and f"{section}.{key}" not in TABLES:
            _merge(under[key], value, key)
        else:
            under[key] = copy.deepcopy(value)  # later merges must not change the preset


def _assign(data: dict[str, Any], keys: list[str], value: Any, problems: list[str]) -> None:
    node: Any = data
    for i, key in enumerate(keys[:-1]):
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                problems.append(
                    Message(
                        "--set {key}: {part} has {count} entries, counted from 0",
                        key=".".join(keys),
                        part=".".join(keys[:i]),
                        count=len(node),
                    )
                )
                return
            node = node[int(key)]
        else:
            node = node.setdefault(key, {})
        if not isinstance(node, (dict, list)):
            problems.append(
                Message("--set {key}: {part} is a value, not a table", key=".".join(keys), part=".".join(keys[: i + 1]))
            )
            return
    if isinstance(node, list):
        problems.append(
            Message(
                "--set {key}: the setting of the entry is missing; add it, such as dataset.folders.0.repeats=2",
                key=".".join(keys),
            )
        )
        return
    if keys == ["preset"] and isinstance(value, str):
        value = [value]
    if not keys[-1]:
        problems.append(Message("--set {key}: the key is incomplete", key=".".join(keys)))
        return
    node[keys[-1]] = value


def _validate(data: dict[str, Any]) -> tuple[Job | None, list[tuple[Location, str]]]:
    """Check types, bounds and contradictions.

    Returns:
        The job, without its invalid settings, or None if there are too many; and (place, line) for each problem.
    """
    problems: list[tuple[Location, str]] = []
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        # Each member of a union reports an error; the last is the widest (int | float, a choice | a number) and says
        # most.
        lines: dict[Location, str] = {}
        bounded: set[Location] = set()
        items = error.errors(include_url=False)
        for number, item in enumerate(items):
            location = resolve_location(item["loc"], data)
            if location not in bounded:  # report the violated bound, not the choices
                lines[location] = describe_error(item, location)
            if item["type"] in OUT_OF_BOUNDS:
                bounded.add(location)
            if len(lines) == MOST_PROBLEMS and number + 1 < len(items):
                # Nobody reads more, and each is compared with all settings and with all other problems.
                return None, [
                    *lines.items(),
                    ((), UNLISTED(count=len(items) - number - 1)),
                ]
        wrong = list(lines)
        problems += lines.items()
        # Look for contradictions in what remains, to report them at the same time. A rule that reads a wrong setting
        # would only repeat the problem, or judge by the default.
        names = [".".join(map(str, location)) for location in wrong]
        job = Job.model_validate(_repair(data, wrong))
        for keys, line in find_contradictions(job):
            if not any(f"{key}.".startswith(f"{n}.") or n.startswith(f"{key}.") for key in keys for n in names):
                problems.append((tuple(keys[0].split(".")), line))
        return job, problems
    problems += [(tuple(keys[0].split(".")), line) for keys, line in find_contradictions(job)]
    problems += find_variables(job)
    return job, problems


def _add_origin(
    line: str, location: Location, given: dict[str, Any], presets: dict[str, dict[str, Any]], options: dict[str, str]
) -> str:
    """Add where a wrong setting was written, if not in the file itself."""

    def has_path(node: Any, parts: Location) -> bool:
        for part in parts:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and str(part).isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return False
        return bool(parts)

    key = ".".join(map(str, location))
    origins = [option for name, option in options.items() if f"{key}.".startswith(f"{name}.")]
    if origins:
        return Message("{line} (from {option})", line=line, option=origins[-1]) if origins[-1] else line
    if has_path(given, location):
        return line
    preset = next((name for name in reversed(presets) if has_path(presets[name], location)), None)
    return line if preset is None else Message("{line} (from preset {preset})", line=line, preset=preset)


def _normalise_base(data: dict[str, Any]) -> list[tuple[Location, str]]:
    """Bring `model.path` into its normal form in place, and move the revision of an address into `model.revision`.

    Returns:
        (place, line) of each problem.
    """
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("path"), str):
        return []  # the validation reports it
    try:
        reference = parse_reference(model["path"])
    except UserError as error:
        return [(("model", "path"), str(error))]
    own = model.get("revision") or ""
    if reference.revision and own not in ("", reference.revision):
        line = Message(
            "model.path names the revision {named}, but model.revision is {own}. Remove one of them",
            named=repr(reference.revision),
            own=repr(own),
        )
        return [(("model", "revision"), line)]
    model["path"] = reference.name
    if reference.revision and not reference.file:
        model["revision"] = reference.revision
    return []


def _repair(data: dict[str, Any], wrong: list[Location]) -> dict[str, Any]:
    """Return a deep copy without the entries at these places, in which required settings that are missing are empty."""

    def copy_node(node: Any, here: Location) -> Any:
        if isinstance(node, dict):
            table = {k: copy_node(v, (*here, k)) for k, v in node.items() if (*here, k) not in wrong}
            model = find_model(here)
            for name, field in model.model_fields.items() if model is not None else ():
                if field.is_required() and name not in table:
                    table[name] = copy_node({}, (*here, name)) if find_model((*here, name)) is not None else ""
            return table
        if isinstance(node, list):
            # An invalid table is emptied, not removed, so that the numbers of the tables after it do not change.
            keep = find_model(here) is not None
            entries = [((*here, i), v) for i, v in enumerate(node) if keep or (*here, i) not in wrong]
            return [copy_node({} if place in wrong else v, place) for place, v in entries]
        return node

    return copy_node(data, ())
