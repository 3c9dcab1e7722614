"""Render JSON of the engine as HTML tables."""

from collections.abc import Mapping
from typing import Any

from .sanitize import escape

MOST_ROWS = 400


def render_object(value: Mapping[str, Any], titles: Mapping[str, str] | None = None) -> str:
    """Render an object: a row per key, with nested values as tables that can be opened.

    Args:
        value: what `json.loads` returns.
        titles: translated keys; others are shown as they are.
    """
    rows = []
    for key, entry in value.items():
        title = escape((titles or {}).get(key, key if "." in key else key.replace("_", " ")))
        if isinstance(entry, Mapping) and entry:
            inner = render_object(dict(list(entry.items())[:MOST_ROWS]))
            rows.append(_render_row(title, inner if len(entry) <= 6 else _render_folded(f"{len(entry)}", inner)))
        elif isinstance(entry, list) and entry and isinstance(entry[0], Mapping):
            rows.append(_render_row(title, _render_folded(f"{len(entry)}", _render_list(entry[:MOST_ROWS]))))
        else:
            rows.append(_render_row(title, _render_value(entry)))
    return f'<table class="facts">{"".join(rows)}</table>'


def _render_row(title: str, cell: str) -> str:
    return f"<tr><th>{title}</th><td>{cell}</td></tr>"


def _render_folded(count: str, inner: str) -> str:
    return f"<details><summary>{count}</summary>{inner}</details>"


def _render_list(entries: list[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_render_value(entry.get(name))}</td>" for name in names) + "</tr>" for entry in entries
    )
    return f'<table class="facts wide"><tr>{head}</tr>{body}</table>'


def _render_value(value: Any) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return "✓" if value else "✗"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return escape(", ".join(map(str, value[:MOST_ROWS])))
    return escape(value)
