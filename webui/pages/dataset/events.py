"""The events of the page: which handler answers which component, what it is sent and what it repaints."""

from functools import partial
from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8.data import captions

from ... import live_panel
from .handlers import Handlers
from .layout import Layout
from .operations import OPERATIONS

NOW: dict[str, Any] = live_panel.private_event(queue=False)
"""For events that change what the window shows: they run in order (ask.js), so that a button acts on what is shown."""
OPENING = "(...inputs) => { window.opening(); return inputs; }"
OPENED = "() => window.opened()"
"""Wraps handlers that may put another caption into the editor."""
GO = "(folder) => { location.search = '?' + new URLSearchParams({folder: folder || ''}); }"


class Events:
    """Binds the components to their handlers.

    `here` is what each handler is sent of the window, `editor` the caption editor, and `everything` what shows the
    folder. Long handlers with a progress bar need Gradio's queue; the repainting `afterwards` follows in order.
    """

    def __init__(self, layout: Layout, handlers: Handlers):
        self.layout, self.handlers = layout, handlers
        self.here: dict[str, Block] = {"at": layout.at, "family": layout.family, "resolution": layout.resolution}
        self.editor: dict[str, Block] = {"caption": layout.caption, "editing": layout.editing}
        self.everything = [layout.at, layout.head, layout.grid, layout.view, layout.tags, *self.editor.values()]
        self.afterwards = {"fn": handlers.reload, "inputs_kwargs": self.here | self.editor, **NOW}
        self.afterwards["outputs"] = self.everything

    def bind(self) -> None:
        """Bind all events."""
        self._bind_grid()
        self._bind_edits()
        self._bind_captioning()
        self._bind_opening()
        self._bind_uploads()
        self._bind_examination()

    def _bind_grid(self) -> None:
        layout, handlers = self.layout, self.handlers
        for event in (layout.query.submit, layout.query.blur, layout.showing.input):
            event(
                handlers.filter_grid,
                inputs_kwargs=self.here | {"query": layout.query, "showing": layout.showing},
                outputs=[layout.at, layout.grid],
                **NOW,
            )
        for button, step in ((layout.save, 0), (layout.save_next, 1)):
            button.click(
                partial(handlers.save, step),
                inputs_kwargs=self.here | self.editor,
                outputs=[layout.message, *self.everything],
                js=OPENING,
                **NOW,
            ).then(None, js=OPENED)

    def _bind_edits(self) -> None:
        layout, handlers = self.layout, self.handlers
        layout.operation.change(
            lambda name: [gr.update(visible=OPERATIONS[name][0] > number) for number in range(2)],
            layout.operation,
            [layout.first, layout.second],
            **NOW,
        )
        given: dict[str, Block] = {
            "at": layout.at,
            "operation": layout.operation,
            "first": layout.first,
            "second": layout.second,
            "scope": layout.scope,
        }
        layout.preview.click(
            handlers.preview,
            inputs_kwargs=given,
            outputs=[layout.message, layout.edit, layout.changes],
            **NOW,
        )
        progress = live_panel.private_event(show_progress="full", show_progress_on=[layout.changes])
        layout.apply.click(
            handlers.apply,
            inputs_kwargs={"at": layout.at, "edit": layout.edit},
            outputs=[layout.message, layout.edit, layout.changes],
            **progress,
        ).then(**self.afterwards)
        for button, what in ((layout.undo, captions.undo), (layout.redo, captions.redo)):
            button.click(
                partial(handlers.undo_or_redo, what),
                inputs_kwargs={"at": layout.at},
                outputs=[layout.message],
                **progress,
            ).then(**self.afterwards)

    def _bind_captioning(self) -> None:
        layout, handlers = self.layout, self.handlers
        live_panel.on_press(layout.job, handlers.press_job, outputs=[layout.message])
        layout.begin.click(
            handlers.start_captioning,
            inputs_kwargs={"at": layout.at, **layout.captioning},
            outputs=[layout.message, layout.seen],
            **NOW,
        )

    def _bind_opening(self) -> None:
        layout, handlers = self.layout, self.handlers
        trained = [layout.family, layout.resolution, layout.cutting, *layout.cut.values()]
        opened = [layout.folder, layout.tabs, *trained, *self.everything]
        live_panel.get_load_event()(handlers.open, outputs=opened, js=OPENING, **NOW).then(None, js=OPENED)
        layout.go.click(None, inputs=[layout.folder], js=GO, api_visibility="private")
        layout.folder.select(None, inputs=[layout.folder], js=GO, api_visibility="private")
        edited = [layout.operation, layout.first, layout.second, layout.edit, layout.changes]
        for clickable in (layout.grid, layout.view, layout.tags, layout.findings, layout.head):
            live_panel.on_press(
                clickable,
                handlers.press,
                OPENED,
                inputs_kwargs=self.here | self.editor,
                outputs=[layout.message, *self.everything, *edited],
                js=OPENING,
            )

    def _bind_uploads(self) -> None:
        layout = self.layout
        layout.drop.upload(
            self.handlers.add_uploads,
            inputs_kwargs=self.here | {"files": layout.drop, "name": layout.new_set},
            outputs=[layout.drop, layout.address, layout.message],
            **live_panel.private_event(show_progress="minimal", show_progress_on=[layout.drop]),
        ).then(**self.afterwards)
        layout.address.change(None, inputs=[layout.address], js=GO, api_visibility="private")

    def _bind_examination(self) -> None:
        layout, handlers = self.layout, self.handlers
        timer = gr.Timer(live_panel.SECONDS)
        gr.on(
            [timer.tick, layout.family.input, layout.resolution.submit],
            handlers.paint,
            inputs_kwargs=self.here | {"seen": layout.seen},
            outputs=[layout.findings, layout.buckets, layout.job, layout.view, layout.grid, layout.seen],
            trigger_mode="always_last",
            **NOW,
        )
        layout.family.input(handlers.show_clip_settings, inputs=[layout.family], outputs=[layout.cutting], **NOW)
        for part in layout.cut.values():
            for event in (part.submit, part.blur) if isinstance(part, gr.Textbox) else (part.input,):
                event(
                    handlers.change_clip_settings,
                    inputs_kwargs={"at": layout.at, **layout.cut},
                    outputs=[layout.at],
                    trigger_mode="always_last",
                    **NOW,
                )
        layout.again.click(handlers.examine_again, inputs_kwargs=self.here, outputs=[layout.seen], **NOW)
