"""Convert pydantic's errors to messages for people that name the setting; only this module knows pydantic's codes."""

import difflib
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..common.text import find_similar, quote
from ..errors import Joined, Message, Phrase
from ..settings import Job, Section

Location = tuple[Any, ...]
"""Path of a setting: ("dataset", "folders", 0, "path")."""
TODO = "TODO"
"""What an import writes where a person has to fill in a value."""
STILL_OPEN = Message("this setting must still be filled in (TODO)")


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "n *"}
EXPECTED = {
    "int_type": Message("a whole number"),
    "int_from_float": Message("a whole number"),
    "float_type": Message("a number"),
    "finite_number": Message("a finite number"),
    "bool_type": Message("true or false"),
    "string_type": Message("text in quotes"),
    "string_unicode": Message("text in UTF-8"),
    "list_type": Message("a list in [ ]"),
    "dict_type": Message("a table"),
    "model_type": Message("a table"),
    "model_attributes_type": Message("a table"),
}
"""What is accepted, by pydantic's code of the error."""
OUT_OF_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "multiple_of")
"""pydantic's codes for a number that has the right type but violates a declared bound."""


def describe_accepted(field: Any) -> str:
    """Return what a setting accepts: its choices and the bounds of its numbers; "" if it has neither."""
    if (layer_field := make_value_field(field)) is not None:
        extra = field.json_schema_extra
        names = extra.get("names", "a layer's name") if isinstance(extra, dict) else "a layer's name"
        inner = describe_accepted(layer_field)
        return f"{names} = {inner}" if inner else ""
    choices, bounds = _list_choices(field.annotation), format_bounds(field)
    if choices and list_number_ranges(field):
        return " | ".join([*choices, f"a number {bounds}".strip()])
    return " | ".join(choices) or bounds


def format_bounds(field: Any) -> str:
    """Return the bounds of a setting's numbers as signs, such as "> 0, <= 10"; "" if there are none.

    If whole numbers and fractions have different bounds, those of fractions are written with a decimal point.
    """
    ranges = _drop_equal_ranges(field)
    several = len({kind for kind, _ in ranges}) > 1

    def format_limits(limits: dict[str, Any]) -> str:
        if (only := _find_only_number(limits)) is not None:
            return str(only)
        return ", ".join(
            f"{SIGNS[bound]} {limit if several else _format_limit(limit)}" for bound, limit in limits.items()
        )

    return " | ".join(format_limits(limits) for _, limits in ranges if limits)


def describe_bounds(field: Any) -> Message:
    """Return the bounds of a setting's numbers in words, such as "at least 1"; "" if there are none."""
    ranges = [(kind, limits) for kind, limits in _drop_equal_ranges(field) if limits]
    several = len({kind for kind, _ in ranges}) > 1
    in_words = []
    for kind, limits in ranges:
        if (only := _find_only_number(limits)) is not None:
            in_words.append(Message("{only}", only=only))
            continue
        bounds = _describe_limits({bound: _format_limit(limit) for bound, limit in limits.items()})
        if several and kind is int:
            bounds = Message("a whole number of {bounds}", bounds=bounds)
        elif several:
            bounds = Message("a fraction of {bounds}", bounds=bounds)
        in_words.append(bounds)
    return Joined(", or ", in_words)


def _describe_limits(limits: dict[str, str]) -> Message:
    match limits:
        case {"ge": least, "le": most, "multiple_of": step}:
            return Message("{least} to {most}, and a multiple of {step}", least=least, most=most, step=step)
        case {"ge": least, "le": most}:
            return Message("at least {least} and at most {most}", least=least, most=most)
        case {"ge": least, "lt": most}:
            return Message("at least {least} and below {most}", least=least, most=most)
        case {"gt": least, "le": most}:
            return Message("above {least} and at most {most}", least=least, most=most)
        case {"gt": least, "lt": most}:
            return Message("above {least} and below {most}", least=least, most=most)
        case {"ge": least, "multiple_of": step}:
            return Message("at least {least} and a multiple of {step}", least=least, step=step)
        case {"ge": least}:
            return Message("at least {least}", least=least)
        case {"gt": least}:
            return Message("above {least}", least=least)
        case {"le": most}:
            return Message("at most {most}", most=most)
        case {"lt": most}:
            return Message("below {most}", most=most)
    raise AssertionError(f"bounds without words: {limits}")


def _find_only_number(limits: dict[str, Any]) -> Any:
    """Return the only number within these bounds, such as a 0 that is allowed besides a range; None for a range."""
    return limits["ge"] if limits.get("ge", 0) == limits.get("le") else None


def _format_limit(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _join_location(location: Location) -> str:
    # A quoted key may contain anything, even line breaks.
    parts = [p if str(p).isprintable() and len(str(p)) <= 80 else quote(p) for p in location]
    return ".".join(map(str, parts))


def describe_error(item: ErrorDetails, location: Location) -> Message:
    """Return the message for one of pydantic's errors, at the setting's path in the file."""
    return Message("{key}: {line}", key=_join_location(location), line=describe_value(item, location))


def describe_value(item: ErrorDetails, location: Location) -> Message:
    """Return the message for one of pydantic's errors, without the setting's path."""
    kind, context = item["type"], item.get("ctx", {})
    given: str = quote(item.get("input"))
    field = _find_field(location)
    choices = _list_choices(field.annotation) if field is not None else []
    if kind == "extra_forbidden":
        return _suggest(location)
    if item.get("input") == TODO:
        return STILL_OPEN
    if kind == "list_type" and location == ("dataset", "folders"):
        return Message("write [[dataset.folders]] with two brackets on each side, once for each folder")
    if kind == "missing":
        what = _describe_required(location)
        return Message("required. {what}", what=what) if what else Message("required.")
    if kind in OUT_OF_BOUNDS and field is not None:
        return Message("must be {bounds}, got {given}", bounds=describe_bounds(field), given=given)
    if choices and kind not in ("list_type", "dict_type"):
        expected: str = " | ".join(choices)
        if field is not None and list_number_ranges(field):
            expected = Message("{choices} | a number", choices=expected)
        line = Message("expected {choices}, got {given}", choices=expected, given=given)
        near = find_similar(item["input"], choices) if isinstance(item["input"], str) else None
        return line if near is None else Message("{line}, did you mean {meant}?", line=line, meant=repr(near))
    if kind == "string_pattern_mismatch":
        return Message("expected a colour such as #ffffff, got {given}", given=given)
    if kind == "string_too_short":
        return Message(
            "must be at least {limit} characters long, got {given}", limit=context["min_length"], given=given
        )
    if kind == "string_too_long":
        return Message("must be at most {limit} characters long, got {given}", limit=context["max_length"], given=given)
    # A code without a text of ours is a kind of mistake that no setting has today: pydantic's own words.
    return Message("expected {kind}, got {given}", kind=EXPECTED.get(kind, item["msg"]), given=given)


def _describe_required(location: Location) -> Phrase:
    """Return what a setting or a table is, by its declaration; "" if the declaration does not say."""
    model, field = find_model(location), _find_field(location)
    what = model.__doc__ if model is not None else field.description if field is not None else ""
    return Phrase((what or "").strip())


def list_required(model: type[Section] = Job, location: Location = ()) -> set[str]:
    """Return the descriptions of all required settings and tables, which messages quote."""
    texts: set[str] = set()
    for name, field in model.model_fields.items():
        place = (*location, name)
        texts |= {_describe_required(place).template} if field.is_required() else set()
        inner = find_model(place)
        texts |= list_required(inner, place) if inner is not None else set()
    return texts - {""}


def resolve_location(location: Location, data: dict[str, Any]) -> Location:
    """Return a location without the union members (`float`, `literal[...]`) that pydantic appends to the path."""
    node: Any = data
    real: list[Any] = []
    for part in location:
        inside_model = find_model(tuple(real)) is not None
        if isinstance(node, dict) and (part in node or inside_model):
            real.append(part)
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            real.append(part)
            node = node[part] if part < len(node) else None
        else:
            break
    return tuple(real)


def find_model(location: Location) -> type[Section] | None:
    """Return the section class of the table at a location; None if there is no such table."""
    model: Any = Job
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, Section) else None
        if field is None:
            return None
        inner = [
            a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type) and issubclass(a, Section)
        ]
        model = inner[0] if inner else None
        if model is None:
            return None
    return model


def _find_field(location: Location) -> Any:
    named = [part for part in location if not isinstance(part, int)]
    if not named:
        return None
    model = find_model(tuple(named[:-1]))
    if model is None and len(named) > 1 and (table := _find_field(tuple(named[:-1]))) is not None:
        return make_value_field(table)
    return model.model_fields.get(named[-1]) if model is not None else None


def make_value_field(field: Any) -> Any:
    """Return the declaration of the values of a table of layers, as if each were a setting; None for other settings."""
    if get_origin(field.annotation) is not dict:
        return None
    return FieldInfo.from_annotation(get_args(field.annotation)[1])


def _list_choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return _list_choices(get_args(annotation)[0])
    return [c for a in get_args(annotation) for c in (["true", "false"] if a is bool else _list_choices(a))]


def list_number_ranges(field: Any) -> list[tuple[type, dict[str, Any]]]:
    """Return the numeric types that a setting accepts, each with its bounds by pydantic's names."""
    is_union = get_origin(field.annotation) in (Union, UnionType)
    typed_ranges = []
    for part in get_args(field.annotation) if is_union else (field.annotation,):
        kind, *notes = get_args(part) if get_origin(part) is Annotated else (part,)
        if kind not in (int, float):
            continue
        limits: dict[str, Any] = {}
        for note in (*notes, *field.metadata):
            for rule in (note, *getattr(note, "metadata", ())):  # a Field in Annotated holds its rules in `metadata`
                limits |= {bound: kind(getattr(rule, bound)) for bound in SIGNS if hasattr(rule, bound)}
        typed_ranges.append((kind, {bound: limits[bound] for bound in SIGNS if bound in limits}))
    return typed_ranges


def _drop_equal_ranges(field: Any) -> list[tuple[type, dict[str, Any]]]:
    """Return the ranges of `list_number_ranges`, without that of whole numbers if fractions have the same bounds."""
    ranges = list_number_ranges(field)
    of_fractions = [{bound: int(limit) for bound, limit in limits.items()} for kind, limits in ranges if kind is float]
    return [(kind, limits) for kind, limits in ranges if kind is float or limits not in of_fractions]


def _suggest(location: Location) -> Message:
    """Suggest a table that has a setting of exactly this name, or the most similar setting of this or any table."""
    unknown = Message("unknown setting")
    model, name = find_model(location[:-1]), str(location[-1])
    names = list(model.model_fields) if model is not None else []
    prefix = _join_location(location[:-1])
    homes = [s for s in Job.model_fields if (m := find_model((s,))) is not None and name in m.model_fields]
    if location[:-1] and name in Job.model_fields and find_model((name,)) is None:  # under a [section] by mistake
        return Message("unknown setting here; move `{name}` before the first [section]", name=name)
    if homes:
        return Message("{line}, did you mean {meant}?", line=unknown, meant=f"{homes[0]}.{name}")
    if ours := list_foreign_names().get(name.lower()):
        listed = ", ".join(f"{key} ({theirs})" for key, theirs in ours.items())
        return Message("unknown setting; use {ours}", ours=listed)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        meant = f"{prefix}.{near[0]}" if prefix else near[0]
        return Message("{line}, did you mean {meant}?", line=unknown, meant=meant)
    everywhere = {
        f"{s}.{n}": n for s in Job.model_fields if (m := find_model((s,))) is not None for n in m.model_fields
    }
    near = difflib.get_close_matches(name, list(everywhere.values()), n=1, cutoff=0.75)
    if near:
        meant = next(k for k, v in everywhere.items() if v == near[0])
        return Message("{line}, did you mean {meant}?", line=unknown, meant=meant)
    return Message("unknown setting; accepted here: {names}", names=", ".join(names)) if names else unknown


def find_settings(name: str) -> list[str]:
    """Return the settings of this name: "train.steps", "steps", or what another trainer calls it."""
    section, _, key = name.rpartition(".")
    if section:
        model = find_model((section,))
        return [name] if model is not None and key in model.model_fields else []
    homes = [s for s in Job.model_fields if (m := find_model((s,))) is not None and name in m.model_fields]
    return [f"{home}.{name}" for home in homes] or list(list_foreign_names().get(name.lower(), {}))


@cache
def list_foreign_names() -> dict[str, dict[str, str]]:
    """Return, by each name that other trainers use, our settings of that meaning and who calls them so.

    Such as {"network_dim": {"adapter.rank": "kohya: network_dim"}}. What stands behind a name converts its value.
    """
    trainers_by_name: dict[str, dict[str, dict[str, list[str]]]] = {}  # name -> our setting -> whole text -> trainers
    for location, field in _walk(Job, ()):
        for trainer, texts in _read_also(field).items():
            for text in texts.split(", "):
                name = text.split(" ")[0]
                of_setting = trainers_by_name.setdefault(name, {}).setdefault(_join_location(location), {})
                of_setting.setdefault(text, []).append(trainer)
    return {
        name: {setting: _join_trainers(trainers) for setting, trainers in by_setting.items()}
        for name, by_setting in trainers_by_name.items()
    }


def _walk(model: type[Section], location: Location) -> Iterator[tuple[Location, Any]]:
    """Yield the settings of a section and of the sections in it: the place of each, and its declaration."""
    for key, field in model.model_fields.items():
        place = (*location, key)
        yield place, field
        inner = find_model(place)
        if inner is not None:
            yield from _walk(inner, place)


def _read_also(field: Any) -> dict[str, str]:
    """Return the names of a setting in other trainers, by trainer; several are separated by commas."""
    extra = field.json_schema_extra
    also = extra.get("also") if isinstance(extra, dict) else None
    return {str(trainer): str(names) for trainer, names in also.items()} if isinstance(also, dict) else {}


def _join_trainers(trainers_by_text: dict[str, list[str]]) -> str:
    """Return who calls a setting what: "kohya, musubi: network_dim; onetrainer: lora_rank"."""
    return "; ".join(f"{', '.join(trainers)}: {text}" for text, trainers in trainers_by_text.items())
