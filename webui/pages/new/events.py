"""The events of the page: which handler answers which component, what it is sent and what it repaints."""

import functools
import json
from typing import Any

import gradio as gr
from gradio.blocks import Block

from ... import live_panel
from .base_section import BaseHandlers
from .handlers import Handlers
from .layout import Layout
from .preset_section import PresetHandlers
from .questions import PROPOSED, PROPOSING

SECONDS = 2.0
QUIET = live_panel.make_private_event(queue=False, trigger_mode="always_last")
QUEUED = QUIET | {"queue": True}
"""For handlers that may show a message: gr.Info and gr.Warning reach the browser only through the queue."""
SLOW = live_panel.make_private_event(show_progress="minimal", trigger_mode="once")
"""For handlers that take long; each says where its progress is shown."""
OPENING = "(...inputs) => { window.opening(); return inputs; }"
OPENED = "() => window.opened()"
"""Wraps handlers that repaint a whole view, so that input typed meanwhile is not lost."""
FIRST_PROBLEM = "() => window.showFirstProblem()"
"""Leads to the first problem of a draft that cannot start."""
CHOOSING = "(...inputs) => { window.choosing(); return inputs; }"
CHOSEN = "() => window.chosen()"
"""Wraps handlers that may change other settings than their own."""
GO = "address => { if (address) location.assign(address); }"
REPAINTING = ("preset", "model.family", "model.path", "model.components")
"""Settings that other fields depend on."""


class Events:
    """Binds the components to their handlers.

    `side` is what shows the state of the draft beside the form, `window` what each handler is sent of the window, and
    `views` what each view shows.
    """

    def __init__(self, layout: Layout, handlers: Handlers, base: BaseHandlers, presets: list[PresetHandlers]):
        self.layout, self.handlers, self.base, self.presets = layout, handlers, base, presets
        self.side: list[Any] = [
            layout.state,
            layout.summary,
            layout.recipe,
            layout.marks,
            layout.changes,
            layout.seen,
            layout.back,
        ]
        self.window: dict[str, Block] = {"everything": layout.everything}
        self.views: dict[str, list[Any]] = {
            "simple": [*layout.parts["simple"].values(), layout.presets.panels["simple"]],
            "all": [*layout.parts["all"].values(), layout.presets.panels["all"]],
            "toml": [layout.code],
        }
        self.proposed = [layout.parts["simple"][key] for key in PROPOSED]
        self.everywhere = [part for parts in self.views.values() for part in parts]
        held = {part.elem_id: part for part in self.everywhere if part.elem_id in layout.keys}
        self.typed = {**self.window, "touched": layout.touched, **held}
        # Gradio fails without a table's value.
        tables = [id for id, part in held.items() if isinstance(part, gr.Dataframe)]
        # Other fields are sent only if they were touched: a field may hold a value that is not among its choices, which
        # Gradio would refuse with a message of its own.
        self.script = f"""(...given) => {{
            const ids = {json.dumps(list(held))}, touched = %s;
            const sent = [...touched, ...{json.dumps(tables)}], before = given.slice(0, -ids.length - 1);
            const values = ids.map((id, i) => sent.includes(id) ? given[before.length + 1 + i] : null);
            return [...before, touched.join(" "), ...values];
        }}"""

    def bind(self) -> None:
        """Bind all events."""
        self._bind_fields()
        self._bind_choices()
        self._bind_views()
        self._bind_folders()
        self._bind_files()
        self._bind_start()

    def _bind_fields(self) -> None:
        for view, parts in self.layout.parts.items():
            for key, part in parts.items():
                repaint = key in REPAINTING
                proposing = view == "simple" and key in PROPOSING
                changed = part.input(
                    functools.partial(self.handlers.change, view, key, repaint),
                    inputs_kwargs={"held": part, **self.window},
                    outputs=[*self.side, *(self.views[view] if repaint else self.proposed if proposing else [])],
                    js=CHOOSING if repaint or proposing else None,
                    **(QUEUED if repaint else QUIET),
                )
                if repaint or proposing:
                    changed.then(None, js=CHOSEN)

    def _bind_choices(self) -> None:
        layout = self.layout
        for presets in self.presets:
            presets.bind([*self.side, *self.views[presets.view]], inputs_kwargs=self.window, **QUEUED)
        layout.code.input(
            self.handlers.write_text, inputs_kwargs={"text": layout.code, **self.window}, outputs=self.side, **QUIET
        )
        self.base.bind(self.side, self.views["simple"], self.window, QUEUED)

    def _bind_views(self) -> None:
        layout, handlers = self.layout, self.handlers
        # Gradio selects a tab also while it draws the page. Only a change of the view asks the server: what it sends,
        # every field, Gradio goes through at each later event, which makes typing slow.
        for view, tab in layout.tabs.items():
            tab.select(None, None, layout.view, js=f"() => {json.dumps(view)}")
        layout.view.change(
            handlers.switch_view,
            inputs_kwargs={"view": layout.view, **self.typed},
            outputs=[*self.side, *self.everywhere],
            js=self.script % "window.leftSettings()",
            **QUIET | {"trigger_mode": "multiple"},
        ).then(None, js=OPENED)
        live_panel.get_load_event()(
            functools.partial(handlers.painter.update_all, "", offers=True),
            inputs_kwargs=self.window,
            outputs=[*self.side, *self.everywhere, layout.source],
            js=OPENING,
            **QUIET,
        ).then(None, js=OPENED)
        live_panel.on_press(
            layout.changes,
            handlers.set_default,
            inputs_kwargs=self.window,
            outputs=[*self.side, *self.everywhere],
        )
        layout.everything.input(handlers.painter.update_side, inputs_kwargs=self.window, outputs=self.side, **QUIET)

    def _bind_folders(self) -> None:
        layout = self.layout
        # Only these of the view, because people may be typing elsewhere.
        folders = [layout.parts["simple"]["dataset.folders"], *self.proposed]
        for event, change in (
            (layout.images.upload, self.handlers.use_folder),
            (layout.images.delete, self.handlers.remove_folder),
        ):
            event(
                change,
                inputs_kwargs=self.window,
                outputs=[*self.side, *folders],
                **QUEUED | {"trigger_mode": "multiple"},
            )

    def _bind_files(self) -> None:
        layout, handlers = self.layout, self.handlers
        layout.load.click(
            handlers.load,
            inputs_kwargs={"source": layout.source, **self.window},
            outputs=[*self.side, *self.everywhere],
            js=OPENING,
            **QUEUED,
        ).then(None, js=OPENED)
        layout.foreign.upload(
            handlers.import_settings,
            inputs_kwargs={"files": layout.foreign, **self.window},
            outputs=[layout.foreign, layout.imported, *self.side, *self.everywhere],
            js=OPENING,
            show_progress_on=[layout.imported],
            **SLOW,
        ).then(None, js=OPENED)
        layout.save.click(
            handlers.save_preset,
            inputs_kwargs={"name": layout.preset_name},
            outputs=[layout.parts["all"]["preset"], layout.presets.panels["all"]],
            **QUEUED,
        )
        once = QUIET | {"trigger_mode": "once"}  # restoring twice would undo itself
        for button, restore in ((layout.reset, handlers.reset), (layout.back, handlers.restore_draft)):
            button.click(
                restore, inputs_kwargs=self.window, outputs=[*self.side, *self.everywhere], js=OPENING, **once
            ).then(None, js=OPENED)

    def _bind_start(self) -> None:
        layout = self.layout
        for button, submit in ((layout.start, self.handlers.start), (layout.find_rate, self.handlers.find_rate)):
            button.click(
                submit,
                inputs_kwargs=self.typed,
                outputs=[layout.address, *self.side],
                js=self.script % "window.touchedSettings()",
                show_progress_on=[layout.summary],
                **SLOW,
            ).then(None, js=FIRST_PROBLEM)
        layout.address.change(None, [layout.address], None, js=GO)
        gr.Timer(SECONDS).tick(
            self.handlers.refresh,
            inputs_kwargs={"seen": layout.seen, **self.window},
            outputs=[*self.side, *layout.presets.panels.values()],
            **QUIET,
        )
