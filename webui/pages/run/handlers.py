"""Handlers of the page's events: each finds the run that the address names, and returns values for the components."""

import json
import zipfile
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.common.numbers import format_bytes
from lora_fp8.errors import Message, UserError
from lora_fp8.jobs import ENDED, JobView
from lora_fp8.run.run_log import RunLog

from ... import engine, hub_uploads, live_panel, run_monitor
from ...context import Ui
from ...sanitize import escape
from .. import runs
from . import publishing, rendering
from .preview_requests import render_samples

BEST = -1
"""Stands for the best LoRA in the menu of checkpoints."""


class Handlers:
    """Handles the events of the components of one language."""

    def __init__(self, ui: Ui):
        self.ui = ui

    def refresh(
        self,
        request: gr.Request,
        amount: float,
        log: bool,
        moving: bool,
        seen: dict[str, int],
        steps: list[Any],
    ) -> list[Any]:
        """Handle a tick: repaint what has changed since the window was painted."""
        try:
            view, events = find_run(self.ui, request)
        except UserError as error:
            nothing = [rendering.render_missing(self.ui, str(error)), *[""] * 9]
            sent, seen = live_panel.skip_unchanged(nothing, seen)
            return [*sent, seen, *[gr.skip()] * 7]
        painted = [
            rendering.render_header(self.ui, view, events),
            rendering.render_loss(self.ui, events, amount, log, view.state in ENDED),
            rendering.render_curves(self.ui, events, amount, log, view.state in ENDED),
            rendering.render_grid(self.ui, view, events, moving),
            rendering.render_files(self.ui, view),
            rendering.render_log(self.ui, view),
            rendering.render_warnings(self.ui, events),
            rendering.render_config(self.ui, view),
            render_samples(self.ui, view, events),
            hub_uploads.render_newest(self.ui, run_monitor.get_run_folder(self.ui, view)),
        ]
        sent, seen = live_panel.skip_unchanged(painted, seen)
        return [*sent, seen, *self._update_menus(events, steps)]

    def _update_menus(self, events: RunLog, steps: list[Any]) -> list[Any]:
        """Return values for the menus of steps, prompts and checkpoints, if they differ from `steps`."""
        previews = events.facts.previews
        drawn_at, kept_at = sorted(previews), list(events.facts.checkpoints)
        prompts = rendering.list_prompts(events)
        best = events.facts.best
        now = [drawn_at, kept_at, prompts, best]
        if now == steps:
            return [gr.skip()] * 7
        choices = [(rendering.format_step(self.ui, drawn), drawn) for drawn in drawn_at]
        # By default the base model on the left and the newest preview on the right.
        ends = (drawn_at[0], drawn_at[-1]) if drawn_at else (None, None)
        old = steps[0] if steps else []
        base_model: dict[str, Any] = {} if old else {"value": ends[0]}
        first_prompt: dict[str, Any] = {}
        if prompts and not old:
            first_prompt = {"value": rendering.choose_prompt(events, prompts, ends)}
        newest_file: dict[str, Any] = {} if steps and steps[1] else {"value": 0}
        files = [(self.ui.say("run.newest"), 0)]
        files += [] if best is None else [(self.ui.say("run.best_step", step=best), BEST)]
        return [
            gr.update(choices=choices, **base_model),
            gr.update(choices=choices),
            gr.update(choices=list(rendering.enumerate_prompts(prompts)), **first_prompt),
            gr.update(
                choices=[*files, *((str(kept), kept) for kept in reversed(kept_at))],
                **newest_file,
            ),
            gr.update(visible=any("clips" in event for event in previews.values())),
            now,
            json.dumps([old[-1] if old else None, ends[1]]),
        ]

    def redraw(self, request: gr.Request, amount: float, log: bool) -> list[str]:
        """Handle a changed option of the curves."""
        try:
            view, events = find_run(self.ui, request)
        except UserError:
            return ["", ""]
        draw = (rendering.render_loss, rendering.render_curves)
        return [render(self.ui, events, amount, log, view.state in ENDED) for render in draw]

    def handle_button(self, request: gr.Request, event: gr.EventData) -> list[Any]:
        """Handle a button in the header; ending a run now asks first."""
        click = live_panel.read_click(event)
        do = click.get("do", "")
        if do in ("force", "kill"):
            name = str(dict(request.query_params).get("run", ""))
            try:
                asked = run_monitor.get_question(self.ui, do, name)
            except UserError as error:
                return [runs.show_notice(self.ui.translate(str(error)), wrong=True), *[gr.skip()] * 5]
            return [gr.update(visible=False), gr.update(visible=True), asked, do, *[gr.skip()] * 2]
        return [press_button(self.ui, request, do), *[gr.skip()] * 3, refresh_header(self.ui, request), {}]

    def end_run(self, request: gr.Request, do: str) -> list[Any]:
        """Handle the confirmed end of the run."""
        return [press_button(self.ui, request, do), gr.update(visible=False), refresh_header(self.ui, request), {}]

    def pair_up(
        self, request: gr.Request, left: int | None, right: int | None, prompt: int | None, moving: bool
    ) -> Any:
        """Handle a chosen pair of previews."""
        if left is None or right is None:
            return gr.skip()  # the menus are filled one after the other, and each change calls this
        try:
            view, events = find_run(self.ui, request)
            return rendering.render_slider(self.ui, view, events, (left, right), prompt, moving)
        except UserError:
            return ""

    def choose_preview(self, event: gr.EventData) -> list[Any]:
        """Handle a click in the grid of previews: compare with it."""
        click = live_panel.read_click(event)
        if click.get("do") != "show" or not (click["step"].isdecimal() and click["prompt"].isdecimal()):
            return [gr.skip(), gr.skip()]
        return [int(click["step"]), int(click["prompt"])]

    def announce_export(self) -> Any:
        """Say that files are being written, which takes some seconds."""
        return gr.update(value=f'<p class="dim">{escape(self.ui.say("run.exporting"))}</p>', visible=True)

    def write_export(self, request: gr.Request, step: int | None, layout: str, dtype: str) -> Any:
        """Handle the button that writes the LoRA files again, in another layout or from a checkpoint."""
        try:
            view, _ = find_run(self.ui, request)
            folder = run_monitor.get_run_folder(self.ui, view)
            if next(folder.glob("checkpoints/step-*"), None) is None:
                return runs.show_notice(self.ui.say("run.no_checkpoint"), wrong=True)
            which = ["--best"] if step == BEST else ["--step", str(int(step or 0))]
            arguments = [str(folder), *which, "--format", layout]
            paths = engine.run_command("export", [*arguments, *(["--set", f"export.dtype={dtype}"] if dtype else [])])
            return show_links(self.ui, self.ui.say("run.exported"), [Path(path) for path in paths], folder.parent)
        except UserError as error:
            return runs.show_notice(self.ui.translate(str(error)), wrong=True)

    def write_kit(self, request: gr.Request, title: str, trigger: str, licence: str, description: str) -> Any:
        """Handle the button that makes a folder for publishing."""
        try:
            view, _ = find_run(self.ui, request)
            return make_kit(self.ui, view, title, trigger, licence, description)
        except UserError as error:
            return runs.show_notice(self.ui.translate(str(error)), wrong=True)


def find_run(ui: Ui, request: gr.Request) -> tuple[JobView, RunLog]:
    """Find the job that the address of the page names, and read its event log.

    Raises:
        UserError: there is no such job, or its folder is not allowed.
    """
    name = str(dict(request.query_params).get("run", ""))
    if not name:
        raise UserError(Message("no run is chosen"))
    view = run_monitor.find_job(ui, name)
    return view, run_monitor.read_run_log(ui, view)


def press_button(ui: Ui, request: gr.Request, do: str) -> Any:
    """Run the action of a button of this run."""
    try:
        return runs.press_button(ui, do, str(dict(request.query_params).get("run", "")))
    except UserError as error:
        return runs.show_notice(ui.translate(str(error)), wrong=True)


def refresh_header(ui: Ui, request: gr.Request) -> Any:
    """Render the header right after a button, without waiting for the next tick."""
    try:
        return rendering.render_header(ui, *find_run(ui, request))
    except UserError:  # the next tick shows the error in place of the run
        return gr.skip()


def show_links(ui: Ui, head: str, paths: list[Path], base: Path, more: str = "") -> Any:
    """Show download links to files that were written."""
    rows = "".join(
        f'<li><a href="{escape(ui.make_download_link(path))}" download>{escape(path.relative_to(base))}</a> '
        f'<span class="dim">{format_bytes(path.stat().st_size)}</span></li>'
        for path in paths
    )
    return gr.update(value=f"<p>{escape(head)}</p><ul>{rows}</ul>{more}", visible=True)


def make_kit(ui: Ui, view: JobView, title: str, trigger: str, licence: str, description: str) -> Any:
    """Make a folder for publishing, and a zip archive of it."""
    folder = run_monitor.get_run_folder(ui, view)
    place = ui.place.home / "tools" / "kits"
    place.mkdir(parents=True, exist_ok=True)
    number = 1
    while (out := place / f"{folder.name}-{number}").exists():
        number += 1
    given = {"title": title, "trigger": trigger, "license": licence, "description": description}
    options = [part for name, text in given.items() if text.strip() for part in (f"--{name}", text.strip())]
    answer = engine.run_command("kit", [str(folder), "--out", str(out), *options])
    archive = out.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            packed.write(path, Path(out.name) / path.relative_to(out))
    notes = "".join(f"<li>{escape(publishing.describe_note(ui, str(note)))}</li>" for note in answer["notes"])
    return show_links(ui, ui.say("run.kit_made"), [archive], place, f"<ul>{notes}</ul>" if notes else "")
