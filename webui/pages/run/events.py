"""The events of the page: which handler answers which component, what it is sent and what it repaints."""

import gradio as gr

from ... import live_panel
from .handlers import Handlers, find_run
from .layout import Layout

FOLLOW = "(right, ends) => { const [was, now] = JSON.parse(ends); return (right ?? null) === was ? now : right; }"
"""Moves on from the previous newest preview to the newest, unless another one was chosen."""


class Events:
    """Binds the components to their handlers."""

    def __init__(self, layout: Layout, handlers: Handlers):
        self.layout, self.handlers = layout, handlers
        self.now = live_panel.make_private_event(queue=False)  # in order, see ask.js

    def bind(self) -> None:
        """Bind all events."""
        self._bind_ticks()
        self._bind_buttons()
        self._bind_previews()
        self._bind_files()
        self.layout.requests.bind(find_run)

    def _bind_ticks(self) -> None:
        layout = self.layout
        layout.newest.change(
            None, inputs=[layout.right, layout.newest], outputs=[layout.right], js=FOLLOW, api_visibility="private"
        )
        inputs = {
            "amount": layout.amount,
            "log": layout.log,
            "moving": layout.moving,
            "seen": layout.seen,
            "steps": layout.steps,
        }
        panels = [
            layout.head,
            layout.loss,
            layout.curves,
            layout.grid,
            layout.files,
            layout.printed,
            layout.warned,
            layout.config,
            layout.samples,
            layout.publishing.pushed,
        ]
        menus = [layout.left, layout.right, layout.prompt, layout.step, layout.moving]
        outputs = [*panels, layout.seen, *menus, layout.steps, layout.newest]
        live_panel.refresh_on_ticks(self.handlers.refresh, inputs, outputs)
        gr.on(
            [layout.amount.change, layout.log.change],
            self.handlers.redraw,
            inputs_kwargs={"amount": layout.amount, "log": layout.log},
            outputs=[layout.loss, layout.curves],
            trigger_mode="always_last",
            **self.now,
        )

    def _bind_buttons(self) -> None:
        layout = self.layout
        live_panel.on_press(
            layout.head,
            self.handlers.handle_button,
            live_panel.ASKED,
            outputs=[layout.note, layout.confirm, layout.question, layout.how, layout.head, layout.seen],
        )
        ended = layout.force.click(
            self.handlers.end_run,
            inputs_kwargs={"do": layout.how},
            outputs=[layout.note, layout.confirm, layout.head, layout.seen],
            **self.now,
        )
        kept = layout.keep.click(lambda: gr.update(visible=False), outputs=[layout.confirm], **self.now)
        for answered in (ended, kept):
            answered.then(None, js=live_panel.ANSWERED)

    def _bind_previews(self) -> None:
        layout = self.layout
        gr.on(
            [layout.left.change, layout.right.change, layout.prompt.change, layout.moving.input],
            self.handlers.pair_up,
            inputs_kwargs={
                "left": layout.left,
                "right": layout.right,
                "prompt": layout.prompt,
                "moving": layout.moving,
            },
            outputs=[layout.pair],
            trigger_mode="always_last",
            **self.now,
        )
        live_panel.on_press(layout.grid, self.handlers.choose_preview, outputs=[layout.right, layout.prompt])

    def _bind_files(self) -> None:
        layout = self.layout
        working = live_panel.make_private_event(show_progress="minimal", concurrency_limit=2)
        layout.export.click(
            self.handlers.announce_export, outputs=[layout.exported], **live_panel.make_private_event(queue=False)
        ).then(
            self.handlers.write_export,
            inputs_kwargs={"step": layout.step, "layout": layout.format, "dtype": layout.dtype},
            outputs=[layout.exported],
            **working,
        )
        layout.publishing.bind(find_run, self.handlers.write_kit)
