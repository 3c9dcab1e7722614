"""pydantic's errors in words for people, with the setting that was meant; the only place that knows their codes. And
numbers for people."""

import difflib
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin

from .settings import Job, Section

Location = tuple[Any, ...]
"""Where a setting is: ("dataset", "folders", 0, "path")."""


def digits(number: float) -> str:
    """A number for people: three digits that count, all of those before the point, and never an exponent."""
    return str(round(number)) if abs(number) >= 100 else format(Decimal(f"{number:.3g}"), "f")


def accepted(field: Any) -> str:
    """What a setting accepts, in words, when that is a list of choices or bounds; empty otherwise."""
    choices = _choices(field.annotation)
    bounds = []
    for item in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if hasattr(item, attribute):
                bounds.append(f"{sign} {getattr(item, attribute)}")
    if choices and not _number_allowed(field.annotation):
        return " | ".join(choices)
    return ", ".join(([" | ".join(choices) + " | a number"] if choices else []) + bounds)


def is_utf8(text: str) -> bool:
    """Whether it can be written as UTF-8; a path from the command line or a folder may hold bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """What was given, on one line of bearable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


def _dotted(location: Location) -> str:
    # A key in quotes may hold anything, line breaks too.
    parts = [p if str(p).isprintable() and len(str(p)) <= 80 else shown(p) for p in location]
    return ".".join(map(str, parts))


def said(item: dict[str, Any], location: Location) -> str:
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
    if choices and kind != "list_type":
        hint = did_you_mean(item["input"], choices) if isinstance(item["input"], str) else ""
        more = " | a number" if field is not None and _number_allowed(field.annotation) else ""
        return f"{key}: expected {' | '.join(choices)}{more}, got {given}{hint}"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        words = {
            "greater_than_equal": "at least",
            "greater_than": "more than",
            "less_than_equal": "at most",
            "less_than": "less than",
        }
        limit = context.get("ge", context.get("gt", context.get("le", context.get("lt"))))
        limit = f"{limit:g}" if isinstance(limit, float) else limit  # pydantic makes 1.0 of 1
        return f"{key}: must be {words[kind]} {limit}, got {given}"
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
    """pydantic appends the arm of a union (`float`, `literal[...]`) to the path; keep only what is in the file."""
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
    return model.model_fields.get(named[-1]) if model is not None else None


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    return [c for a in get_args(annotation) for c in _choices(a)]


def _number_allowed(annotation: Any) -> bool:
    return any(a in (int, float) for a in get_args(annotation))


def _suggest(location: Location) -> str:
    """The table that has a setting of exactly this name, or the nearest setting in this table or in any."""
    model, name = model_at(location[:-1]), str(location[-1])
    names = list(model.model_fields) if model is not None else []
    prefix = _dotted(location[:-1])
    homes = [s for s in Job.model_fields if (m := model_at((s,))) is not None and name in m.model_fields]
    if homes:
        return f", did you mean {homes[0]}.{name}?"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f", did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    everywhere = {f"{s}.{n}": n for s in Job.model_fields if (m := model_at((s,))) is not None for n in m.model_fields}
    near = difflib.get_close_matches(name, list(everywhere.values()), n=1, cutoff=0.75)
    if near:
        return f", did you mean {next(k for k, v in everywhere.items() if v == near[0])}?"
    return f"; accepted here: {', '.join(names)}" if names else ""


def did_you_mean(given: str, names: list[str]) -> str:
    near = difflib.get_close_matches(str(given)[:80].lower(), names, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def sides(shape: Iterable[int]) -> str:
    """A tensor's shape for people: "320 x 64"."""
    return " x ".join(map(str, shape)) or "1"
