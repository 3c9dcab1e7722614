"""Build the HTML of a report: sentences in its language, tables, and what is never shown of a computer."""

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from ...common import chart, messages
from ...common.markup import escape
from ...config import format_toml_value
from ...errors import Message

LONGEST_VALUE = 160
"""Characters of a setting's value; the rest is in the run's config.toml."""
FOLDERS = re.compile(r"""(?<![\w:/\\.~-])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\<>"'`|;,()]+)+[/\\](?=[^\s/\\])""")
"""Matches the folders of an absolute path in a text, but nothing of a web address."""


class Page:
    """Writes HTML in one language. Whatever comes from a run is escaped here.

    Args:
        language: "en" or "zh-CN".
    """

    def __init__(self, language: str) -> None:
        self.language = language

    def say(self, text: object) -> str:
        """Return a message or any other text as HTML, in the language of the page. Of a path, the last part is left."""
        given = text if isinstance(text, str) else str(text)
        return escape(FOLDERS.sub("", messages.without_home(messages.translate(self.language, given))))

    def render_paragraph(self, text: object, kind: str = "") -> str:
        """Return a paragraph of a message; "" of an empty one."""
        attribute = f' class="{kind}"' if kind else ""
        return f"<p{attribute}>{self.say(text)}</p>" if text else ""

    def render_section(self, title: Message, body: str, name: str) -> str:
        """Return a section with its heading; "" without a body."""
        if not body:
            return ""
        return f'<section aria-labelledby="{name}"><h2 id="{name}">{self.say(title)}</h2>{body}</section>'

    def render_table(
        self, head: Sequence[object], rows: Iterable[Sequence[str]], caption: object = "", stacked: bool = False
    ) -> str:
        """Return a table. The first cell of a row is its header. Cells are HTML already.

        Args:
            stacked: on a phone, show each row as a block of named values. The roles keep it a table for screen readers,
                which forget that where the style is not that of a table.
        """
        names = [self.say(cell) for cell in head]
        top = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in names)
        body = ""
        for row in rows:
            cells = "".join(
                f'<td role="cell" data-name="{name}">{cell}</td>' for name, cell in zip(names[1:], row[1:], strict=True)
            )
            body += f'<tr role="row"><th scope="row" role="rowheader">{row[0]}</th>{cells}</tr>'
        title = f"<caption>{self.say(caption)}</caption>" if caption else ""
        kind = ' class="stacked"' if stacked else ""
        return (
            f'<div class="scroll" tabindex="0"><table role="table"{kind}>{title}<thead role="rowgroup"><tr role="row">'
            f'{top}</tr></thead><tbody role="rowgroup">{body}</tbody></table></div>'
        )

    def render_facts(self, pairs: Iterable[tuple[object, object]]) -> str:
        """Return names with their values; pairs without a value are left out."""
        rows = "".join(
            f"<div><dt>{self.say(name)}</dt><dd>{self.say(value)}</dd></div>" for name, value in pairs if value
        )
        return f'<dl class="facts">{rows}</dl>' if rows else ""

    def render_details(self, title: object, body: str) -> str:
        """Return content that is folded until it is opened; it is printed in any case."""
        return f"<details><summary>{self.say(title)}</summary>{body}</details>"

    def format_duration(self, seconds: float) -> Message:
        """Format a time: "48 s", "12 min" or "2 h 05 min"."""
        if seconds < 90:
            return Message("{seconds} s", seconds=round(seconds))
        minutes = round(seconds / 60)
        if minutes < 60:
            return Message("{minutes} min", minutes=minutes)
        return Message("{hours} h {minutes} min", hours=minutes // 60, minutes=f"{minutes % 60:02d}")

    def format_value(self, value: Any) -> str:
        """Return a setting's value as HTML: as in TOML, shortened, and of an absolute path the last part."""
        if isinstance(value, dict) and not value:
            return "<code>{}</code>"
        text = format_toml_value(_without_folders(value))
        short = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
        return f"<code>{self.say(short)}</code>"


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    is_path = isinstance(value, str) and re.match(r"(/|~[/\\]|[A-Za-z]:[/\\]|\\\\)", value)
    return PurePath(value.replace("\\", "/")).name if is_path else value


def format_time(seconds: float) -> str:
    """Format a time in UTC, as a report is read elsewhere; "" for 0."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if 0 < seconds < 1e11 else ""


def format_number(number: object) -> str:
    """Format a number of a run; "" for anything else."""
    return chart.format_number(float(number)) if isinstance(number, int | float) else ""
