"""Handlers of the page's events: each returns values for the components that `Events` names."""

from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8 import config
from lora_fp8.common import reading
from lora_fp8.errors import UserError
from lora_fp8.settings import read_options

from ... import drawings, live_panel, run_monitor
from ...context import Ui
from .. import runs
from . import rendering


class Handlers:
    """Handles the events of the components of one language."""

    def __init__(self, ui: Ui):
        self.ui = ui

    def open_page(self, request: gr.Request) -> list[Any]:
        """Handle the opening of the page: offer runs and files, and choose the run that the address names."""
        choices = drawings.list_sources(self.ui)
        name = str(dict(request.query_params).get("run", ""))
        value = ""
        if name:
            try:
                value = str(run_monitor.get_run_folder(self.ui, run_monitor.find_job(self.ui, name)))
            except UserError:
                value = ""
        elif choices:
            value = choices[0][1]
        steps, base = self.choose_source(value)
        return [gr.update(choices=choices, value=value or None), steps, base, self._propose_prompt(value)]

    def list_sources(self) -> Any:
        """Handle the opening of the menu: offer what is there now."""
        return gr.update(choices=drawings.list_sources(self.ui))

    def choose_source(self, source: str | None, chosen: list[int] | None = None) -> list[Any]:
        """Handle a chosen run or file: a run has checkpoints, and knows its base model.

        The page itself chooses when it opens, so the answer may come after a person has chosen checkpoints: those that
        the run has stay as they are.
        """
        try:
            path = drawings.find_source(self.ui, str(source or ""))
        except UserError:
            path = None
        is_run = path is not None and path.is_dir()
        steps = drawings.list_steps(path) if path is not None and is_run else []
        if not steps:
            return [gr.update(choices=[], value=[], visible=False), gr.update(visible=not is_run)]
        newest = self.ui.say("draw.newest", step=steps[0])
        choices = [(newest, 0), *((self.ui.say("run.at", step=step), step) for step in steps[1:])]
        stays = bool(chosen) and set(chosen or ()) <= {0, *steps[1:]}
        value: dict[str, Any] = {} if stays else {"value": [0]}
        return [gr.update(choices=choices, visible=True, **value), gr.update(visible=False)]

    def _propose_prompt(self, source: str) -> Any:
        """Return the first preview prompt of a run as a proposal."""
        try:
            content = config.read_toml(reading.load_text(Path(source) / "config.toml"))
            prompts = content["preview"]["prompts"]
            return read_options(str(prompts[0]))[0]
        except (UserError, OSError, ValueError, KeyError, TypeError, IndexError):
            return gr.skip()

    def refresh(self, chosen: str, seen: dict[str, int]) -> list[Any]:
        """Handle a tick: repaint what has changed since the window was painted."""
        sent, seen = live_panel.skip_unchanged(self._render(chosen), seen)
        return [*sent, seen]

    def start(self, **given: Any) -> list[Any]:
        """Handle the button that draws."""
        try:
            id = drawings.start(self.ui, given)
        except UserError as error:
            return [runs.show_notice(self.ui.translate(str(error)), wrong=True), *[gr.skip()] * 4]
        return [runs.show_notice(self.ui.say("draw.queued")), id, *self._render(id), {}]

    def handle_button(self, event: gr.EventData, chosen: str) -> list[Any]:
        """Handle a button of a drawing: open it, stop its job, or ask whether to delete it."""
        click = live_panel.read_click(event)
        do, id = click.get("do", ""), click.get("id", "")
        note: Any = gr.update(visible=False)
        question = [gr.skip(), gr.skip()]
        try:
            if do == "open":
                chosen = drawings.find_drawing(self.ui, id).id
            elif do == "delete":
                question = [gr.update(visible=True), drawings.find_drawing(self.ui, id).id]
            elif do in ("stop", "cancel"):
                job = drawings.find_drawing(self.ui, id).job
                if job is not None:
                    note = runs.show_notice(run_monitor.run_action(self.ui, do, str(job.id)))
        except UserError as error:
            note = runs.show_notice(self.ui.translate(str(error)), wrong=True)
        return [note, chosen, *self._render(chosen), {}, *question]

    def delete(self, doomed: str) -> list[Any]:
        """Handle the confirmed deletion of a drawing."""
        try:
            drawings.delete(self.ui, doomed)
            note = runs.show_notice(self.ui.say("draw.deleted"))
        except (UserError, OSError) as error:
            note = runs.show_notice(self.ui.translate(str(error)), wrong=True)
        return [note, "", *self._render(""), {}, gr.update(visible=False)]

    def _render(self, chosen: str) -> list[str]:
        every = drawings.list_drawings(self.ui)
        opened = next((drawing for drawing in every if drawing.id == chosen), every[0] if every else None)
        return [rendering.render_drawing(self.ui, opened), rendering.render_history(self.ui, every, opened)]
