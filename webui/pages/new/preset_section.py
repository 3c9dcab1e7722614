"""The presets' part of New training: their cards in two views, what a press does, and its undo."""

import functools
from typing import TYPE_CHECKING, Any

import gradio as gr

from ... import live_panel
from .preset_choice import KINDS

if TYPE_CHECKING:
    from .handlers import Handlers

STYLE = """<style>
.preset-panel .html-container { padding: 0; }
.preset-panel .prose { max-width: none; }
.preset-panel h3 { margin: 14px 0 8px; font-size: 15px; font-weight: 600; }
.preset-panel h3:first-child { margin-top: 0; }
.preset-panel .choice-card .effect { font-size: 13px; overflow-wrap: anywhere; }
.preset-panel .choice-card .kept { font-size: 13px; color: var(--body-text-color-subdued); overflow-wrap: anywhere; }
.preset-panel .choice-card .badges:empty { display: none; }
.preset-panel .choice-cards.card { grid-template-columns: repeat(auto-fill, minmax(min(150px, 100%), 1fr)); }
.preset-panel p { margin: 8px 0 0; }
</style>"""


class PresetParts:
    """The panels of one language, by view."""

    def __init__(self) -> None:
        self.panels: dict[str, gr.HTML] = {}

    def add(self, view: str) -> None:
        """Make the panel of a view, "simple" or "all"."""
        self.panels[view] = gr.HTML(
            "",
            js_on_load=live_panel.CLICKS,
            apply_default_css=False,
            elem_id=f"{'new' if view == 'simple' else 'set'}-presets",
            elem_classes="preset-panel",
        )


class PresetHandlers:
    """Handles the presses in a view."""

    def __init__(self, handlers: "Handlers", view: str):
        self.handlers, self.painter, self.view = handlers, handlers.painter, view
        self.draft, self.choice = handlers.draft, handlers.painter.choice

    def bind(self, outputs: list[Any], **events: Any) -> None:
        """Bind the panel of the view.

        Args:
            outputs: what a press repaints.
            events: arguments of the event; its handler may show a message.
        """
        self.handlers.layout.presets.panels[self.view].click(
            self.handle_preset_button,
            outputs=outputs,
            js="(...inputs) => { window.choosing(); return inputs; }",
            **events | {"trigger_mode": "multiple"},
        ).then(None, js="() => { window.pressed?.shift(); window.chosen(); }")

    def handle_preset_button(self, event: gr.EventData, everything: bool) -> dict[Any, Any]:
        """Handle a pressed card or the button that undoes the last press."""
        pressed = live_panel.read_click(event)
        do, kind, name = (pressed.get(key, "") for key in ("do", "id", "name"))
        if do == "undo":
            return self.undo(everything)
        if do == "choose" and kind in KINDS:
            return self.choose(kind, name, everything, pressed.get("to") != "off")
        return {}

    def choose(self, kind: str, name: str, everything: bool, is_on: bool = True) -> dict[Any, Any]:
        """Name a preset in the draft or take it out. Returns values for the components of the view."""
        done = before, after = self.handlers.change_draft(functools.partial(self.choice.choose, kind, name, is_on))
        if before != after:
            self.painter.last_choice = (after, before, kind)
        return self.painter.update_side(everything) | self.painter.update_view(self.view, done)

    def undo(self, everything: bool) -> dict[Any, Any]:
        """Restore the draft from before the last press, if nothing has changed since."""
        after, before, _ = self.painter.last_choice
        self.draft.change(lambda text: before if text == after else text)
        self.painter.last_choice = ("", "", "")
        return self.painter.update_all(self.view, everything)
