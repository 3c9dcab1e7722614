"""The tour of the pages: texts for static/tour.js, the offer on the start page, the button that shows it again."""

from typing import Any

from . import translations
from .context import Ui
from .sanitize import escape

STEPS = ("new", "dataset", "runs", "draw", "settings")
"""Pages that the tour describes, in its order."""


def list_texts(language: str) -> dict[str, Any]:
    """Return the texts of the dialog."""

    def say(key: str) -> str:
        return translations.say(language, key)

    steps = [
        {
            "title": say(f"page.{name}"),
            "text": say(f"tour.{name}"),
            "link": f"/{language}/" + ("" if name == "runs" else name),
        }
        for name in STEPS
    ]
    texts: dict[str, Any] = {key: say(f"tour.{key}") for key in ("name", "back", "next", "close")}
    place = translations.say(language, "tour.place", step="{step}", steps="{steps}")
    return {**texts, "place": place, "begin": say("runs.begin"), "steps": steps}


def render_offer(ui: Ui) -> str:
    """Render the offer, which is hidden until static/tour.js finds that the browser has not seen it."""
    return (
        f'<div class="tour-offer" role="note" hidden><span>{escape(ui.say("tour.offer"))}</span>'
        f'<button type="button" data-tour="show">{escape(ui.say("tour.show"))}</button>'
        f'<button type="button" data-tour="skip">{escape(ui.say("tour.skip"))}</button></div>'
    )


def render_again(ui: Ui) -> str:
    """Render the button that shows the tour again."""
    return f'<div class="notify"><button type="button" data-tour="show">{escape(ui.say("tour.again"))}</button></div>'
