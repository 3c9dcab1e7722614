"""The base model's part of New training: its components, what they do, and how they are kept up to date."""

import functools
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from lora_fp8.errors import UserError
from lora_fp8.families.sources import known_bases
from lora_fp8.families.sources.reference import clean

from ... import base_catalogue, base_models, form, live_panel
from ...context import Ui
from .base_rendering import Cards
from .base_state import BaseState, find_family
from .cards import read_style

if TYPE_CHECKING:
    from .handlers import Handlers

STATIC = Path(__file__).resolve().parents[2] / "static"
SECONDS = 1.5
LISTED_SECONDS = 10.0
"""Folders are searched for base models at most this often."""


class BaseParts:
    """The components of one language.

    Args:
        add_field: makes the field of a setting.
    """

    def __init__(self, ui: Ui, add_field: Callable[[str], None]):
        cards = Cards(ui)
        style = read_style() + (STATIC / "base_cards.css").read_text(encoding="utf-8")
        script = (STATIC / "base_cards.js").read_text(encoding="utf-8")
        gr.HTML(f"<style>{style}</style>", elem_classes="style-only")

        self.head = gr.HTML(cards.render_head(), js_on_load=script, elem_id="new-base-head", apply_default_css=False)
        clicks: dict[str, Any] = {"js_on_load": live_panel.CLICKS, "apply_default_css": False}
        self.state = gr.HTML("", elem_id="new-base-state", **clicks)
        with gr.Row(visible=False, elem_id="new-base-login") as self.login:
            self.token = gr.Textbox(
                type="password",
                label=ui.say("base.token"),
                info=ui.say("base.token.info"),
                elem_id="new-base-token",
                html_attributes=gr.InputHTMLAttributes(autocomplete="off"),
                scale=4,
            )
            self.save = gr.Button(ui.say("base.token.save"), elem_id="new-base-token-save", elem_classes="beside")
        self.notice = gr.HTML("", elem_id="new-base-told")
        self.cards = gr.HTML(cards.render_cards(), elem_id="new-base-cards", **clicks)
        # What the window shows; answers may arrive in another order than they were asked for.
        self.seen = gr.Textbox(visible="hidden", elem_id="new-base-seen")
        with gr.Accordion(ui.say("base.by_hand"), open=False, elem_id="new-base-by-hand"):
            for key in ("model.family", "model.path", "model.components"):
                add_field(key)

    @property
    def painted(self) -> list[Any]:
        """Return the components that `BaseHandlers.update_components` gives values."""
        return [self.state, self.login, self.notice, self.cards, self.seen]


class BaseHandlers:
    """Handles the events of these components."""

    def __init__(self, parts: BaseParts, handlers: "Handlers"):
        self.parts, self.handlers = parts, handlers
        self.ui, self.draft, self.reader = handlers.ui, handlers.draft, handlers.reader
        self.cards = Cards(self.ui)
        self.state = BaseState(self.ui, self.reader, handlers.problems)
        self._unrecognized = ""  # a base whose architecture becomes the draft's as soon as its hub answers
        self._listed: tuple[float, list[base_catalogue.Card]] = (0.0, [])
        self._lock = threading.Lock()

    def bind(self, side: list[Any], fields: list[Any], window: dict[str, Any], events: dict[str, Any]) -> None:
        """Bind all events.

        Args:
            side, fields: what the handlers of the page repaint when the draft has changed.
            window: what each handler is sent of the window.
            events: arguments of an event whose handler may show a message.
        """
        parts = self.parts
        changed = [*side, *fields, *parts.painted]
        for panel in (parts.head, parts.state, parts.cards):
            panel.click(
                self.handle_button,
                inputs_kwargs=window,
                outputs=changed,
                js="(...inputs) => { window.choosing(); return inputs; }",
                **events | {"trigger_mode": "multiple"},
            ).then(None, js="() => { window.pressed?.shift(); window.chosen(); }")
        gr.on(
            [parts.save.click, parts.token.submit],
            self.save_token,
            inputs_kwargs={"token": parts.token},
            outputs=[parts.token, *parts.painted],
            **events,
        )
        gr.on(
            [live_panel.get_load_event(), gr.Timer(SECONDS).tick],
            self.refresh,
            inputs_kwargs={"seen": parts.seen, **window},
            outputs=changed,
            **events | {"queue": False},
        )

    def handle_button(self, event: gr.EventData, everything: bool) -> dict[Any, Any]:
        """Handle a pressed card or button."""
        pressed = live_panel.read_click(event)
        actions: dict[str, Callable[[], None]] = {
            "choose": functools.partial(self._choose, pressed.get("base", ""), pressed.get("family", "")),
            "adopt": functools.partial(self._adopt, pressed.get("family", "")),
            "download": self._download,
            "cancel": self._cancel,
            "again": self.reader.descriptions.forget,
        }
        action = actions.get(pressed.get("do", ""))
        if action is None:
            return {}
        done = self.handlers.change_draft(action)
        painter = self.handlers.painter
        return painter.update_side(everything) | painter.update_view("simple", done) | self.update_components()

    def choose(self, path: str, family: str, everything: bool) -> dict[Any, Any]:
        """Choose a base model, and its architecture if it is known. Returns values for the components."""
        done = self.handlers.change_draft(functools.partial(self._choose, path, family))
        painter = self.handlers.painter
        return painter.update_side(everything) | painter.update_view("simple", done) | self.update_components()

    def _choose(self, path: str, family: str) -> None:
        name = base_models.read_address(path) or clean(path)
        known = known_bases.get(name)
        name = known.id if known else name
        family = family if family in self.reader.families else known.family if known else ""
        if family:
            self.draft.put("model.family", family)
        self.draft.put("model.path", name)
        self.state.login.forget()
        self._unrecognized = "" if family else name
        self.handlers.recognize_base()
        self.draft.put("model.components", "auto")  # of the base that was chosen before

    def _adopt(self, family: str) -> None:
        if family in self.reader.families:
            self.draft.put("model.family", family)

    def _download(self) -> None:
        values = form.read_values(self.draft.load_text(), self.draft.home)
        described = self.state.describe(values)
        if described and described.missing and not described.problems:
            revision = str(values["model.revision"] or "")
            self.state.downloads.start(described.reference.name, revision, described.family)

    def _cancel(self) -> None:
        values = form.read_values(self.draft.load_text(), self.draft.home)
        self.state.downloads.cancel(str(values["model.path"]), str(values["model.revision"] or ""))

    def save_token(self, token: str) -> dict[Any, Any]:
        """Handle a token for the hub; the field is emptied."""
        self.state.login.save(token or "")
        return {self.parts.token: ""} | self.update_components()

    def refresh(self, seen: str, everything: bool) -> dict[Any, Any]:
        """Repaint what has changed: an answer has come, a download goes on, another window chose a base."""
        recognized = self._recognize_late(everything)
        painted = self.update_components()
        return recognized | (painted if painted[self.parts.seen] != seen else {self.parts.seen: gr.skip()})

    def _recognize_late(self, everything: bool) -> dict[Any, Any]:
        """Set the architecture that the hub names for a base that was pasted."""
        if not self._unrecognized:
            return {}
        values = self._read_values()
        if not values or values["model.path"] != self._unrecognized:
            self._unrecognized = ""
            return {}
        family = find_family(self.reader.describe_base(values))
        if not family:  # not answered yet, or gated
            return {}
        self._unrecognized = ""
        if base_models.fits_family(base_models.Base(family), values["model.family"]):
            return {}
        done = self.handlers.change_draft(functools.partial(self._adopt, family))
        painter = self.handlers.painter
        return painter.update_side(everything) | painter.update_view("simple", done)

    def _read_values(self) -> dict[str, Any]:
        try:
            return form.read_values(self.draft.load_text(), self.draft.home)
        except UserError:
            return {}

    def update_components(self) -> dict[Any, Any]:
        """Return values for the components; none if the draft is not TOML."""
        parts, values = self.parts, self._read_values()
        if not values:
            return {parts.seen: ""}
        self._notice_login()
        path, family = str(values["model.path"] or ""), str(values["model.family"])
        state, needs_token = self.state.render(values), self.state.needs_token(values)
        notice, cards = self.state.render_login(), self.cards.render_cards(path, family, self._list_mine())
        digest = hashlib.sha256(repr((state, needs_token, notice, cards)).encode()).hexdigest()
        return {
            parts.state: state,
            parts.login: gr.update(visible=needs_token),
            parts.notice: notice,
            parts.cards: cards,
            parts.seen: digest,
        }

    def _notice_login(self) -> None:
        """Ask the hub again after somebody has logged in."""
        if self.state.login.is_new():
            self.reader.descriptions.forget()

    def _list_mine(self) -> list[base_catalogue.Card]:
        with self._lock:
            if time.monotonic() - self._listed[0] > LISTED_SECONDS or not self._listed[0]:
                place = self.ui.place
                self._listed = time.monotonic(), base_catalogue.list_mine(place.models, place.roots)
            return self._listed[1]
