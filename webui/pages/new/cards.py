"""Cards to choose from, and buttons, as HTML: base models and presets look alike (static/cards.css)."""

from collections.abc import Iterable
from pathlib import Path

from ... import sanitize
from ...context import Ui

STYLE = Path(__file__).resolve().parents[2] / "static" / "cards.css"


def read_style() -> str:
    """Return the style sheet of cards and buttons."""
    return STYLE.read_text(encoding="utf-8")


def render_card(
    title: str,
    lines: Iterable[tuple[str, str]],
    badges: Iterable[tuple[str, str]],
    is_chosen: bool,
    data: dict[str, str],
    id: str = "",
) -> str:
    """Render a card, a button that is pressed while it is chosen.

    Args:
        title: its first line.
        lines: (class, text) of the lines beneath.
        badges: (class, text) of short facts.
        is_chosen: True if it is the one that counts.
        data: the data-* attributes, which its press sends.
        id: the element's id, if it needs one.
    """
    escape = sanitize.escape
    values = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
    texts = "".join(f'<span class="{kind}">{escape(text)}</span>' for kind, text in lines if text)
    facts = "".join(f'<span class="{kind}" title="{escape(text)}">{escape(text)}</span>' for kind, text in badges)
    name = f' id="{id}"' if id else ""
    return (
        f'<button type="button" class="choice-card"{name}{values} aria-pressed="{str(is_chosen).lower()}">'
        f'<strong>{escape(title)}</strong>{texts}<span class="badges">{facts}</span></button>'
    )


def render_button(ui: Ui, do: str, key: str, kind: str = "", **data: str) -> str:
    """Render a button that calls `do` with this data; `key` is its text, filled in with the data."""
    values = "".join(f' data-{name}="{sanitize.escape(value)}"' for name, value in data.items())
    label = sanitize.escape(ui.say(key, **data))
    return f'<button type="button" class="choice-button {kind}" data-do="{do}"{values}>{label}</button>'
