"""JSON of the engine as tables."""

from collections.abc import Mapping
from typing import Any

from .safe import shown

MOST_ROWS = 400


def table(value: Mapping[str, Any], titles: Mapping[str, str] | None = None) -> str:
    """An object as HTML: a row a key, what lies in it as tables of its own that open.

    Args:
        value: what `json.loads` makes.
        titles: keys in the page's words; others stand as they are.
    """
    rows = []
    for key, entry in value.items():
        title = shown((titles or {}).get(key, key if "." in key else key.replace("_", " ")))
        if isinstance(entry, Mapping) and entry:
            inner = table(dict(list(entry.items())[:MOST_ROWS]))
            rows.append(_row(title, inner if len(entry) <= 6 else _folded(f"{len(entry)}", inner)))
        elif isinstance(entry, list) and entry and isinstance(entry[0], Mapping):
            rows.append(_row(title, _folded(f"{len(entry)}", _wide(entry[:MOST_ROWS]))))
        else:
            rows.append(_row(title, _plain(entry)))
    return f'<table class="facts">{"".join(rows)}</table>'


def _row(title: str, cell: str) -> str:
    return f"<tr><th>{title}</th><td>{cell}</td></tr>"


def _folded(count: str, inner: str) -> str:
    return f"<details><summary>{count}</summary>{inner}</details>"


def _wide(entries: list[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    head = "".join(f"<th>{shown(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_plain(entry.get(name))}</td>" for name in names) + "</tr>" for entry in entries
    )
    return f'<table class="facts wide"><tr>{head}</tr>{body}</table>'


def _plain(value: Any) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return "✓" if value else "✗"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return shown(", ".join(map(str, value[:MOST_ROWS])))
    return shown(value)
