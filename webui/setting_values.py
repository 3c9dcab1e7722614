"""Values of settings as the page shows them: with the form's names, and not in a programming notation."""

from typing import Any

from lora_fp8 import families
from lora_fp8.errors import Message

from . import form, sanitize, translations
from .context import Ui

MOST_ROWS = 12
"""Rows of a table that are shown of a run, for example of its folders."""


def format_lines(ui: Ui, key: str, value: Any) -> list[str]:
    """Format a setting's value as the form names it: plain text, a line per row of a table."""
    setting = form.collect_settings().get(key)
    if setting is not None and setting.kind == "table" and isinstance(value, list):
        lines = [_format_row(ui, setting, row) for row in value]
        more = len(lines) - MOST_ROWS
        return [*lines[:MOST_ROWS], *([f"+{more}"] if more > 0 else [])] or ["–"]
    return [sanitize.shorten(format_value(ui, key, value), 300)]


def _format_row(ui: Ui, table: form.Setting, row: Any) -> str:
    """Format a row of a table: its first column, and by name the others that differ from their defaults."""
    if not isinstance(row, dict):
        return sanitize.shorten(format_value(ui, table.key, row), 300)
    first, *others = table.columns
    set_here = [column for column in others if row.get(column.name, column.default) != column.default]
    parts = [format_value(ui, first.key, row.get(first.name))]
    parts += [
        f"{translations.get_label(ui.language, column.key)} {format_value(ui, column.key, row[column.name])}"
        for column in set_here
    ]
    return sanitize.shorten(" · ".join(parts), 300)


def format_value(ui: Ui, key: str, value: Any) -> str:
    """Format a value as text, with the form's names where there are any, and not in a programming notation."""
    if value is None or value == "" or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return ui.say("value.yes" if value else "value.no")
    if key == "model.family" and value in families.list_families():
        return families.get(value).title
    if isinstance(value, str):
        return translations.get_choice_label(ui.language, key, value)
    if isinstance(value, list):
        return " · ".join(format_value(ui, key, item) for item in value)
    if isinstance(value, dict):
        named = ((f"{key}.{name}", name, inner_value) for name, inner_value in value.items())
        return " · ".join(f"{name} {format_value(ui, inner, inner_value)}" for inner, name, inner_value in named)
    setting = form.collect_settings().get(key)
    if setting is not None and setting.kind in ("number", "mixed"):
        return str(form.to_component(setting, value))
    return str(value)


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong with a value


def translate_problem(ui: Ui, key: str, line: str) -> str:
    """Translate a problem without its setting's key, since it is shown at that setting."""
    return ui.translate(remove_key(line)).removeprefix(f"{key}: ").removeprefix(f"{key}：")


def label_problem(ui: Ui, key: str, line: str) -> str:
    """Put the setting's name before a translated problem, for a list of several."""
    return f"{get_title(ui, key)}{': ' if ui.language == 'en' else '：'}{line}"


def describe_problem(ui: Ui, line: str) -> str:
    """Translate a problem, with the name of its setting in place of the key."""
    key = form.find_key(line)
    return label_problem(ui, key, translate_problem(ui, key, line)) if key else ui.translate(line)


def get_title(ui: Ui, key: str) -> str:
    """Return a setting's name in the page's language."""
    section = "section." if form.collect_settings()[key].kind == "table" else ""
    return translations.get_label(ui.language, f"{section}{key}")


def remove_key(line: str) -> str:
    """Return a message of the check without the setting that it begins with, which may stand in a message around it."""
    if not isinstance(line, Message):
        return line
    inner = line.values.get("line")
    if line.template == "{key}: {line}":
        return str(inner)
    return line.with_values(line=remove_key(inner)) if isinstance(inner, Message) else line
