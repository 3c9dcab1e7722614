"""Convert pydantic's errors to messages for people that name the setting; only this module knows pydantic's codes."""

import difflib
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..common.text import did_you_mean, shown
from ..settings import Job, Section

Location = tuple[Any, ...]
"""Path of a setting: ("dataset", "folders", 0, "path")."""


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "n *"}
WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
OUT_OF_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "multiple_of")
"""pydantic's codes for a number that has the right type but violates a declared bound."""


def accepted(field: Any) -> str:
    """Return what a setting accepts: its choices and the bounds of its numbers; "" if it has neither."""
    if (each := each_value(field)) is not None:
        return f"a layer's name = {accepted(each)}"
    choices, bounds = _choices(field.annotation), accepted_numbers(field)
    if choices and number_ranges(field):
        return " | ".join([*choices, f"a number {bounds}".strip()])
    return " | ".join(choices) or bounds


def accepted_numbers(field: Any) -> str:
    """Return the bounds of a setting's numbers as signs, such as "> 0, <= 10"; "" if there are none.

    If whole numbers and fractions have different bounds, those of fractions are written with a decimal point.
    """
    ranges = number_ranges(field)
    several = len({kind for kind, _ in ranges}) > 1

    def in_signs(limits: dict[str, Any]) -> str:
        if (only := _only_number(limits)) is not None:
            return str(only)
        return ", ".join(f"{SIGNS[bound]} {limit if several else _short(limit)}" for bound, limit in limits.items())

    return " | ".join(in_signs(limits) for _, limits in ranges if limits)


def _in_words(field: Any) -> str:
    """Return the bounds of a setting's numbers in words."""
    ranges = number_ranges(field)
    several = len({kind for kind, _ in ranges}) > 1
    found = []
    for kind, limits in ranges:
        text = " and ".join(f"{word} {_short(limits[bound])}" for bound, word in WORDS.items() if bound in limits)
        if (only := _only_number(limits)) is not None:
            text = str(only)
        elif several:
            text = f"{'a whole number' if kind is int else 'a fraction'} of {text}"
        found.append(text)
    return ", or ".join(found)


def _only_number(limits: dict[str, Any]) -> Any:
    """Return the only number within these bounds, such as a 0 that is allowed besides a range; None for a range."""
    return limits["ge"] if limits.get("ge", 0) == limits.get("le") else None


def _short(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _dotted(location: Location) -> str:
    # A quoted key may contain anything, even line breaks.
    parts = [p if str(p).isprintable() and len(str(p)) <= 80 else shown(p) for p in location]
    return ".".join(map(str, parts))


def said(item: ErrorDetails, location: Location) -> str:
    """Return the message for one of pydantic's errors, at the setting's path in the file."""
    key = _dotted(location)
    kind, context = item["type"], item.get("ctx", {})
    given = shown(item.get("input"))
    field = _field(location)
    choices = _choices(field.annotation) if field is not None else []
    if kind == "extra_forbidden":
        return f"{key}: unknown setting{_suggest(location)}"
    if kind == "missing":
        model = model_at(location)
        what = (model.__doc__ if model is not None else field.description if field is not None else "") or ""
        return f"{key}: required. {what}".strip()
    if kind in OUT_OF_BOUNDS and field is not None:
        return f"{key}: must be {_in_words(field)}, got {given}"
    if choices and kind not in ("list_type", "dict_type"):
        hint = did_you_mean(item["input"], choices) if isinstance(item["input"], str) else ""
        more = " | a number" if field is not None and number_ranges(field) else ""
        return f"{key}: expected {' | '.join(choices)}{more}, got {given}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{key}: expected a colour such as #ffffff, got {given}"
    if kind in ("string_too_short", "string_too_long"):
        limit = f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
        return f"{key}: must be {limit} characters long, got {given}"
    expected = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text in quotes",
        "string_unicode": "text in UTF-8",
        "list_type": "a list in [ ]",
        "dict_type": "a table",
        "model_type": "a table",
        "model_attributes_type": "a table",
    }.get(kind)
    if expected is None:
        return f"{key}: {item['msg']}, got {given}"
    return f"{key}: expected {expected}, got {given}"


def real_location(location: Location, data: dict[str, Any]) -> Location:
    """Return a location without the union members (`float`, `literal[...]`) that pydantic appends to the path."""
    node: Any = data
    real: list[Any] = []
    for part in location:
        inside_model = model_at(tuple(real)) is not None
        if isinstance(node, dict) and (part in node or inside_model):
            real.append(part)
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            real.append(part)
            node = node[part] if part < len(node) else None
        else:
            break
    return tuple(real)


def model_at(location: Location) -> type[Section] | None:
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


def _field(location: Location) -> Any:
    named = [part for part in location if not isinstance(part, int)]
    if not named:
        return None
    model = model_at(tuple(named[:-1]))
    if model is None and len(named) > 1 and (table := _field(tuple(named[:-1]))) is not None:
        return each_value(table)
    return model.model_fields.get(named[-1]) if model is not None else None


def each_value(field: Any) -> Any:
    """Return the declaration of the values of a table of layers, as if each were a setting; None for other settings."""
    if get_origin(field.annotation) is not dict:
        return None
    return FieldInfo.from_annotation(get_args(field.annotation)[1])


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    return [c for a in get_args(annotation) for c in _choices(a)]


def number_ranges(field: Any) -> list[tuple[type, dict[str, Any]]]:
    """Return the numeric types that a setting accepts, each with its bounds by pydantic's names."""
    parts = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    found = []
    for part in parts:
        kind, *notes = (*get_args(part), *field.metadata) if get_origin(part) is Annotated else (part, *field.metadata)
        if kind in (int, float):
            rules = [rule for note in notes for rule in (note, *getattr(note, "metadata", ()))]
            limits = {bound: getattr(rule, bound) for bound in SIGNS for rule in rules if hasattr(rule, bound)}
            found.append((kind, {bound: kind(limit) for bound, limit in limits.items()}))
    return found


def _suggest(location: Location) -> str:
    """Suggest a table that has a setting of exactly this name, or the most similar setting of this or any table."""
    model, name = model_at(location[:-1]), str(location[-1])
    names = list(model.model_fields) if model is not None else []
    prefix = _dotted(location[:-1])
    homes = [s for s in Job.model_fields if (m := model_at((s,))) is not None and name in m.model_fields]
    if homes:
        return f", did you mean {homes[0]}.{name}?"
    if ours := names_elsewhere().get(name.lower()):
        return f"; here it is {', '.join(f'{key} ({theirs})' for key, theirs in ours.items())}"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f", did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    everywhere = {f"{s}.{n}": n for s in Job.model_fields if (m := model_at((s,))) is not None for n in m.model_fields}
    near = difflib.get_close_matches(name, list(everywhere.values()), n=1, cutoff=0.75)
    if near:
        return f", did you mean {next(k for k, v in everywhere.items() if v == near[0])}?"
    return f"; accepted here: {', '.join(names)}" if names else ""


@cache
def names_elsewhere() -> dict[str, dict[str, str]]:
    """Return, by each name that other trainers use, our settings of that meaning and who calls them so.

    Such as {"network_dim": {"adapter.rank": "kohya: network_dim"}}. What stands behind a name converts its value.
    """
    found: dict[str, dict[str, dict[str, list[str]]]] = {}

    def add(model: type[Section], location: Location) -> None:
        for key, field in model.model_fields.items():
            extra = field.json_schema_extra
            also = extra.get("also") if isinstance(extra, dict) else None
            for trainer, names in also.items() if isinstance(also, dict) else ():
                for theirs in str(names).split(", "):
                    by_name = found.setdefault(theirs.split(" ")[0], {}).setdefault(_dotted((*location, key)), {})
                    by_name.setdefault(theirs, []).append(trainer)
            inner = model_at((*location, key))
            if inner is not None:
                add(inner, (*location, key))

    add(Job, ())
    return {
        name: {
            key: "; ".join(f"{', '.join(trainers)}: {theirs}" for theirs, trainers in by_name.items())
            for key, by_name in ours.items()
        }
        for name, ours in found.items()
    }
