"""The events of the page: which handler answers which component, what it is sent and what it repaints."""

from typing import Any

import gradio as gr

from ... import live_panel
from .handlers import Handlers
from .layout import Layout

FIELDS = (
    *("source", "steps", "base", "prompt", "negative", "seed", "width", "height", "sampling_steps", "guidance"),
    *("strengths", "with_base", "where"),
)
"""Components of the form, by the names that `drawings.start` takes."""
SHOW_DRAWING = "() => document.getElementById('drawing')?.scrollIntoView({ block: 'nearest' })"
"""The button is below the form, and the drawing is beside it, or on a phone beneath."""


class Events:
    """Binds the components to their handlers."""

    def __init__(self, layout: Layout, handlers: Handlers):
        self.layout, self.handlers = layout, handlers
        self.now = live_panel.make_private_event(queue=False)

    def bind(self) -> None:
        """Bind all events."""
        layout, handlers = self.layout, self.handlers
        sources = [layout.source, layout.steps, layout.base]
        gr.on([live_panel.get_load_event()], handlers.open_page, outputs=[*sources, layout.prompt], **self.now)
        layout.source.focus(handlers.list_sources, outputs=[layout.source], **self.now)
        layout.source.change(
            handlers.choose_source,
            inputs_kwargs={"source": layout.source, "chosen": layout.steps},
            outputs=[layout.steps, layout.base],
            **self.now,
        )
        live_panel.refresh_on_ticks(
            handlers.refresh,
            {"chosen": layout.chosen, "seen": layout.seen},
            [layout.drawing, layout.history, layout.seen],
        )
        painted = [layout.note, layout.chosen, layout.drawing, layout.history, layout.seen]
        given = {name: getattr(layout, name) for name in FIELDS}
        started = layout.start.click(
            handlers.start, inputs_kwargs=given, outputs=painted, trigger_mode="once", **self.now
        )
        started.then(None, js=SHOW_DRAWING)
        asked = [*painted, layout.confirm, layout.doomed]
        pressed: dict[str, Any] = {"inputs_kwargs": {"chosen": layout.chosen}, "outputs": asked}
        live_panel.on_press(layout.drawing, handlers.handle_button, live_panel.ASKED, **pressed)
        live_panel.on_press(layout.history, handlers.handle_button, **pressed)
        deleted = layout.delete.click(
            handlers.delete, inputs_kwargs={"doomed": layout.doomed}, outputs=[*painted, layout.confirm], **self.now
        )
        kept = layout.keep.click(lambda: gr.update(visible=False), outputs=[layout.confirm], **self.now)
        for answered in (deleted, kept):
            answered.then(None, js=live_panel.ANSWERED)
