"""HTML of the base model's part of New training: the cards, and what is known of the chosen base."""

from collections.abc import Iterable

from lora_fp8 import families
from lora_fp8.families.sources import WEIGHT_ENDINGS

from ... import base_catalogue, sanitize
from ...context import Ui
from .cards import render_card

GIGABYTE = 10**9


def format_size(size: float) -> str:
    """Return bytes as hubs state them: "850 MB", "6.9 GB", "34 GB"."""
    if size < GIGABYTE:
        return f"{size / 10**6:.{0 if size >= 10**7 else 1}f} MB"
    return f"{size / GIGABYTE:.{0 if size >= 9.95 * GIGABYTE else 1}f} GB"


def format_seconds(seconds: float) -> str:
    """Return a time as minutes and seconds, or as hours and minutes: "1:05", "2 h 10 min"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def render_link(address: str, text: str, kind: str = "") -> str:
    """Render a link to another site; anything but a web address becomes plain text."""
    if not address.startswith(("https://", "http://")):
        return sanitize.escape(text)
    return (
        f'<a class="{kind}" href="{sanitize.escape(address)}" target="_blank" rel="noopener noreferrer">'
        f"{sanitize.escape(text)}</a>"
    )


class Cards:
    """Renders the cards in one language."""

    def __init__(self, ui: Ui):
        self.ui = ui

    def render_head(self) -> str:
        """Render the kinds of bases and the search field; static/base_cards.js brings them to life."""
        say, escape = self.ui.say, sanitize.escape
        chips = "".join(
            f'<button type="button" data-group="{group}" aria-pressed="{str(not number).lower()}">'
            f"{escape(say(f'base.group.{group}'))}</button>"
            for number, group in enumerate(base_catalogue.GROUPS)
        )
        use, count, none = (
            escape(say(f"base.search.{name}", **values))
            for name, values in (("use", {"text": "{}"}), ("count", {"count": "{}"}), ("none", {}))
        )
        return (
            f'<div class="base-groups" role="group" aria-label="{escape(say("base.group"))}">{chips}</div>'
            f'<div class="base-search"><input type="search" id="new-base-search" autocomplete="off" spellcheck="false" '
            f'aria-label="{escape(say("base.search"))}" placeholder="{escape(say("base.search.example"))}" '
            f'data-short="{escape(say("base.search.short"))}">'
            f'<button type="button" class="choice-button main" hidden data-use="{use}"></button></div>'
            f'<p class="unseen" role="status" data-count="{count}" data-none="{none}"></p>'
        )

    def render_cards(self, path: str = "", family: str = "", mine: Iterable[base_catalogue.Card] = ()) -> str:
        """Render all cards; the browser shows those of the chosen kind, or those that match the search.

        Args:
            path, family: the draft's base model, whose card is marked.
            mine: the bases of this machine's folders.
        """
        own = list(mine)
        cards = "".join(
            self._render_card(card, card.path == path and (path != "demo" or card.family == family))
            for card in (*base_catalogue.list_released(), *own)
        )
        label = sanitize.escape(self.ui.say("base.cards"))
        none = "" if own else self._render_none()
        return f'<div class="choice-cards" role="group" aria-label="{label}">{cards}{none}</div>'

    def _render_none(self) -> str:
        settings = f'<a href="{self.ui.make_link("settings")}">{sanitize.escape(self.ui.say("page.settings"))}</a>'
        text = sanitize.escape(self.ui.say("base.mine.none", settings="{}")).replace("{}", settings)
        return f'<p class="base-none" data-groups="mine">{text}</p>'

    def _render_card(self, card: base_catalogue.Card, is_chosen: bool) -> str:
        say = self.ui.say
        title, purpose = card.title, ""
        if card.known is not None:
            purpose = self.ui.translate(card.known.purpose)
        elif card.path == "demo":
            title, purpose = say("base.card.demo", title=card.title), say("base.card.demo.purpose")
        else:
            kind = "file" if card.path.endswith(WEIGHT_ENDINGS) else "folder"
            purpose = say(f"base.card.{kind}")
        words = " ".join([card.path, card.title, title, purpose, self._find_family_title(card)])
        words += " ".join(card.known.names) if card.known else ""
        data = {"do": "choose", "base": card.path, "family": card.family, "key": card.key}
        data |= {"groups": " ".join(card.groups), "words": words.lower()}
        id = f"new-{card.key}" if card.path == "demo" else ""
        return render_card(title, [("purpose", purpose)], self._list_badges(card), is_chosen, data, id)

    def _find_family_title(self, card: base_catalogue.Card) -> str:
        return families.get(card.family).title if card.family else ""

    def _list_badges(self, card: base_catalogue.Card) -> list[tuple[str, str]]:
        """List (style, text) of what decides whether a base can be used here: size, memory, gate and licence."""
        say = self.ui.say
        if card.known is None:
            title = self._find_family_title(card)
            return [("", title)] if card.is_mine and title else []
        badges: list[tuple[str, str]] = []
        presence = base_catalogue.find_presence(card)
        if presence is not None and not presence.missing:
            badges.append(("yes", say("base.card.here")))
        elif presence is not None:
            key = "base.card.size" if presence.missing == presence.total else "base.card.rest"
            badges.append(("", say(key, size=format_size(presence.missing))))
        whole, offloaded = base_catalogue.find_vram(card)
        if whole and offloaded != whole:
            badges.append(("", say("base.card.vram.both", gb=whole, less=offloaded)))
        elif whole or offloaded:
            badges.append(("", say("base.card.vram" if whole else "base.card.vram.offload", gb=whole or offloaded)))
        if card.known.gated and not (presence and not presence.missing):
            badges.append(("gate", say("base.card.gate")))
        return [*badges, ("licence", say("base.card.licence", name=card.known.licence))]
