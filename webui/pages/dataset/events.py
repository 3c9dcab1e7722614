"""The events of the page: which handler answers which component, what it is sent and what it repaints."""

from typing import Any

import gradio as gr
from gradio.blocks import Block

from ... import live_panel
from .handlers import Handlers
from .layout import Layout
from .operations import OPERATIONS

NOW: dict[str, Any] = live_panel.make_private_event(queue=False)
"""For events that change what the window shows: they run in order (ask.js), so that a button acts on what is shown."""
GO = "(folder) => { location.search = '?' + new URLSearchParams({folder: folder || ''}); }"
SHOW = "(purpose) => { window.datasetPurpose = purpose; document.dispatchEvent(new Event('dataset-purpose')); }"
"""Tells the workbench what to show; it may be loaded before or after."""
SAVED = "async (...inputs) => { await window.saveCaptions?.(); return inputs; }"
"""What was typed into the boxes of the workbench is part of a batch edit."""
CHANGED = "() => { document.dispatchEvent(new Event('captions-changed')); }"


class Events:
    """Binds the components to their handlers. `here` is what most handlers are sent of the window."""

    def __init__(self, layout: Layout, handlers: Handlers):
        self.layout, self.handlers = layout, handlers
        self.here: dict[str, Block] = {"at": layout.at, "family": layout.family, "resolution": layout.resolution}

    def bind(self) -> None:
        """Bind all events."""
        self._bind_opening()
        self._bind_edits()
        self._bind_examination()

    def _bind_opening(self) -> None:
        layout, handlers = self.layout, self.handlers
        trained = [layout.family, layout.resolution, layout.cutting, *layout.cut.values()]
        opened = [layout.folder, *layout.of_folder, *trained, layout.at, layout.purpose, layout.head]
        live_panel.get_load_event()(handlers.open, outputs=opened, **NOW)
        layout.purpose.change(None, inputs=[layout.purpose], js=SHOW, api_visibility="private")
        layout.go.click(None, inputs=[layout.folder], js=GO, api_visibility="private")
        layout.folder.select(None, inputs=[layout.folder], js=GO, api_visibility="private")
        layout.images.select(handlers.select, inputs_kwargs={"at": layout.at}, outputs=[layout.at], **NOW)

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
            js=SAVED,
            **NOW,
        )
        layout.apply.click(
            handlers.apply,
            inputs_kwargs={"at": layout.at, "edit": layout.edit},
            outputs=[layout.message, layout.edit, layout.changes],
            js=SAVED,
            **live_panel.make_private_event(show_progress="full", show_progress_on=[layout.changes]),
        ).then(None, js=CHANGED)
        edited = [layout.tabs, layout.many, layout.operation, layout.first, layout.second, layout.edit, layout.changes]
        for clickable in (layout.tags, layout.findings, layout.head):
            live_panel.on_press(
                clickable, handlers.handle_button, CHANGED, inputs_kwargs=self.here, outputs=[layout.message, *edited]
            )

    def _bind_examination(self) -> None:
        layout, handlers = self.layout, self.handlers
        gr.on(
            [gr.Timer(live_panel.SECONDS).tick],
            handlers.refresh,
            inputs_kwargs=self.here | {"seen": layout.seen},
            outputs=[layout.head, layout.tags, layout.findings, layout.buckets, layout.seen],
            trigger_mode="always_last",
            **NOW,
        )
        changes = [layout.family.input, layout.resolution.submit, layout.resolution.blur]
        for part in layout.cut.values():
            changes += (part.submit, part.blur) if isinstance(part, gr.Textbox) else (part.input,)
        gr.on(
            changes,
            handlers.change_purpose,
            inputs_kwargs=self.here | layout.cut,
            outputs=[layout.at, layout.purpose, layout.cutting],
            trigger_mode="always_last",
            **NOW,
        )
        layout.again.click(handlers.examine_again, inputs_kwargs=self.here, outputs=[layout.seen], **NOW)
