"""The start page: the queue, running jobs, and ended jobs."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8.common.numbers import format_bytes
from lora_fp8.errors import UserError
from lora_fp8.jobs import ENDED, JobView

from .. import dataset_folder, hub_uploads, live_panel, notifications, remote_jobs, run_cards, run_monitor, tour
from ..context import Ui
from ..sanitize import escape

THUMB = 192
"""Pixels of the preview on a card. It is displayed at half the size, so that it is sharp on dense screens."""
PER_PAGE = 20
KINDS = ("all", "active", "ended")


def build(ui: Ui) -> None:
    """Lay the page out."""
    _Events(_Layout(ui), _Handlers(ui)).bind()


class _Layout:
    """The components: the jobs as cards, and the questions before a job is deleted or ended.

    `doomed` is the button that was pressed before a question, and `seen` what the window shows.
    """

    def __init__(self, ui: Ui):
        gr.HTML(tour.render_offer(ui), elem_classes="notify-box tour-box")
        self.machine = live_panel.make_panel(elem_id="machine")
        with gr.Row(elem_id="board-options"):
            self.which = gr.Radio(
                [(ui.say(f"runs.kind.{kind}"), kind) for kind in KINDS],
                value="all",
                label=ui.say("runs.kind"),
                show_label=False,
                container=False,
            )
            gr.HTML(notifications.render_button(ui), elem_classes="notify-box")
        self.note = live_panel.make_panel(elem_id="said", visible=False)
        self.doomed = gr.State({})
        with gr.Group(visible=False, elem_classes="ask") as self.confirm:
            self.question = gr.Markdown()
            self.typed = gr.Textbox(label=ui.say("runs.type_name"), max_lines=1, elem_id="typed-name")
            self.with_run = gr.Checkbox(label=ui.say("runs.with_folder"), value=False)
            with gr.Row():
                self.keep = gr.Button(ui.say("runs.keep"))
                self.go = gr.Button(ui.say("runs.do.delete"), variant="stop")
        with gr.Group(visible=False, elem_classes="ask") as self.sure:
            self.which_end = gr.Markdown()
            with gr.Row():
                self.not_now = gr.Button(ui.say("runs.keep"))
                self.end = gr.Button(ui.say("runs.do.force"), variant="stop", elem_id="end-now")
        self.cards = live_panel.make_panel(elem_id="cards")
        self.remote = live_panel.make_panel(elem_id="remote")
        self.page = gr.State(0)
        self.seen = gr.State({})


class _Handlers:
    """Handles the events; each returns values for the components that `_Events` names."""

    def __init__(self, ui: Ui):
        self.ui = ui

    def refresh(self, which: str, page: int, seen: dict[str, int]) -> list[Any]:
        """Handle a tick: repaint what has changed since the window was painted."""
        painted = [render_machine(self.ui), render_board(self.ui, which, page), remote_jobs.render(self.ui)]
        sent, seen = live_panel.skip_unchanged(painted, seen)
        return [*sent, seen]

    def handle_remote_button(self, event: gr.EventData) -> list[Any]:
        """Handle a button of a job on another machine."""
        click = live_panel.read_click(event)
        try:
            line = show_notice(remote_jobs.run_action(self.ui, click.get("do", ""), click.get("id", "")))
        except UserError as error:
            line = show_notice(self.ui.translate(str(error)), wrong=True)
        return [line, remote_jobs.render(self.ui), {}]

    def handle_button(self, event: gr.EventData, which: str, page: int) -> list[Any]:
        """Handle a button of a card; deleting a job, or ending it now, asks first."""
        click = live_panel.read_click(event)
        do, name = click.get("do", ""), click.get("id", "")
        line = gr.update(visible=False)
        asked = [gr.skip()] * 7  # the two questions with their elements, and the job that they are about
        try:
            if do == "page":
                page = max(0, int(click.get("to", "0")))
            elif do == "delete":
                view = run_monitor.find_job(self.ui, name)
                shell = isinstance(view.id, str)
                question_ = _escape_markdown(
                    self.ui.say("runs.ask_delete_run" if shell else "runs.ask_delete", name=view.name)
                )
                folder_too = gr.update(value=False, visible=not shell)
                asked = [gr.update(visible=True), question_, "", folder_too, gr.update(visible=False), gr.skip(), click]
                return [line, *asked, page, gr.skip(), gr.skip()]
            elif do in ("force", "kill"):
                title = _escape_markdown(run_monitor.find_job(self.ui, name).name)
                about = f"**{title}** {run_monitor.get_question(self.ui, do, name)}"
                asked = [gr.update(visible=False), *[gr.skip()] * 3, gr.update(visible=True), about, click]
                return [line, *asked, page, gr.skip(), gr.skip()]
            else:
                line = press_button(self.ui, do, name)
        except (UserError, ValueError) as error:
            line = show_notice(self.ui.translate(str(error)), wrong=True)
        return [line, *asked, page, render_board(self.ui, which, page), {}]

    def end_run(self, click: dict[str, str], which: str, page: int) -> list[Any]:
        """Handle the confirmed end of a job."""
        try:
            line = show_notice(run_monitor.run_action(self.ui, click.get("do", ""), click.get("id", "")))
        except UserError as error:
            line = show_notice(self.ui.translate(str(error)), wrong=True)
        return [line, gr.update(visible=False), render_board(self.ui, which, page), {}]

    def delete(self, click: dict[str, str], typed: str, with_run: bool, which: str, page: int) -> list[Any]:
        """Handle the confirmed deletion of a job."""
        try:
            line = show_notice(run_monitor.delete_job(self.ui, click.get("id", ""), typed, with_run))
        except UserError as error:
            return [show_notice(self.ui.translate(str(error)), wrong=True), gr.skip(), gr.skip(), gr.skip()]
        return [line, gr.update(visible=False), render_board(self.ui, which, page), {}]

    def choose_kind(self, which: str) -> list[Any]:
        """Handle a change of the kind of jobs that are listed."""
        return [render_board(self.ui, which, 0), 0, {}]


class _Events:
    """Binds the components to their handlers."""

    def __init__(self, layout: _Layout, handlers: _Handlers):
        self.layout, self.handlers = layout, handlers
        self.now = live_panel.make_private_event(queue=False)  # in order, see ask.js

    def bind(self) -> None:
        """Bind all events."""
        layout, handlers = self.layout, self.handlers
        window = {"which": layout.which, "page": layout.page}
        live_panel.refresh_on_ticks(
            handlers.refresh,
            window | {"seen": layout.seen},
            [layout.machine, layout.cards, layout.remote, layout.seen],
        )
        live_panel.on_press(
            layout.remote, handlers.handle_remote_button, outputs=[layout.note, layout.remote, layout.seen]
        )
        about_deletion = [layout.confirm, layout.question, layout.typed, layout.with_run]
        about_end = [layout.sure, layout.which_end]
        live_panel.on_press(
            layout.cards,
            handlers.handle_button,
            live_panel.ASKED,
            inputs_kwargs=window,
            outputs=[
                layout.note,
                *about_deletion,
                *about_end,
                layout.doomed,
                layout.page,
                layout.cards,
                layout.seen,
            ],
        )
        self._bind_answers()
        layout.which.input(
            handlers.choose_kind,
            inputs_kwargs={"which": layout.which},
            outputs=[layout.cards, layout.page, layout.seen],
            **self.now,
        )

    def _bind_answers(self) -> None:
        layout, handlers = self.layout, self.handlers
        asked: dict[str, Block] = {"click": layout.doomed, "which": layout.which, "page": layout.page}
        ended = layout.end.click(
            handlers.end_run,
            inputs_kwargs=asked,
            outputs=[layout.note, layout.sure, layout.cards, layout.seen],
            **self.now,
        )
        not_ended = layout.not_now.click(lambda: gr.update(visible=False), outputs=[layout.sure], **self.now)
        deleted = layout.go.click(
            handlers.delete,
            inputs_kwargs=asked | {"typed": layout.typed, "with_run": layout.with_run},
            outputs=[layout.note, layout.confirm, layout.cards, layout.seen],
            **self.now,
        )
        kept = layout.keep.click(lambda: gr.update(visible=False), outputs=[layout.confirm], **self.now)
        for answered in (ended, not_ended, deleted, kept):
            answered.then(None, js=live_panel.ANSWERED)


def show_notice(line: str, wrong: bool = False, go: str = "") -> Any:
    """Show the result of the last button in a panel that is hidden until then.

    Args:
        go: the address that the browser opens afterwards.
    """
    then = f' data-go="{escape(go)}"' if go else ""
    kind = " wrong" if wrong else ""
    return gr.update(value=live_panel.render_toast(escape(line), kind, then), visible=True)


def press_button(ui: Ui, do: str, name: str) -> Any:
    """Run the action of a button and show its result. Raises UserError."""
    return show_notice(run_monitor.run_action(ui, do, name), go=ui.make_link("new") if do == "edit" else "")


def _escape_markdown(text: str) -> str:
    # For gr.Markdown, which must not read a run's name as markup.
    return "".join(f"\\{c}" if c in r"\`*_{}[]<>()#+-.!|~$&" else c for c in text)


def render_board(ui: Ui, which: str, page: int) -> str:
    """Render one page of job cards."""
    try:
        views = run_monitor.get_monitor(ui.place).views()
    except UserError as error:
        return f'<p class="wrong">{escape(ui.translate(str(error)))}</p>'
    views = sort_jobs([view for view in views if which == "all" or (view.state in ENDED) == (which == "ended")])
    if not views:
        if which == "all":
            return run_cards.render_empty(ui, ui.say("runs.none"), ui.say("runs.none_about"))
        return run_cards.render_empty(ui, ui.say("runs.none_such"))
    pages = (len(views) - 1) // PER_PAGE + 1
    page = min(page, pages - 1)
    waiting = any(view.state == "queued" for view in views)
    news = render_failures(ui, views) if which == "all" and not page and waiting else ""
    made = news + "".join(render_job(ui, view) for view in views[page * PER_PAGE : (page + 1) * PER_PAGE])
    turn = ""
    if pages > 1:
        earlier = run_cards.render_button("page", ui.say("runs.newer"), to=str(page - 1)) if page else ""
        later = run_cards.render_button("page", ui.say("runs.older"), to=str(page + 1)) if page + 1 < pages else ""
        turn = (
            f'<div class="buttons">{earlier}{later}'
            f'<span class="dim">{ui.say("runs.page", page=page + 1, pages=pages)}</span></div>'
        )
    return f'<div class="cards">{made}</div>{turn}'


def render_job(ui: Ui, view: JobView) -> str:
    """Render the card of a job."""
    tail = run_monitor.read_log_tail(view) if view.state in ("failed", "lost") or view.kind != "train" else []
    if view.command[:1] == ("caption",):
        done, total = dataset_folder.parse_progress(tail)
        view = replace(view, step=done, steps=total, download=dataset_folder.parse_download(tail))
        tail = [line for line in tail if not line.startswith("{")]  # JSON events, for programs
    links = render_downloads(ui, view)
    if view.command[:1] == (hub_uploads.COMMAND,):
        view, tail, address = hub_uploads.read_progress(view, tail)
        links += hub_uploads.render_link(ui, address)
    preview = run_monitor.find_newest_preview(ui, view)
    image = (
        f'<img class="preview" src="{escape(ui.make_picture_link(preview, THUMB))}" alt="" loading="lazy">'
        if preview
        else ""
    )
    title = run_monitor.get_base_title(view.folder)
    return run_cards.render_card(ui, view, title, tail, links, image)


def render_downloads(ui: Ui, view: JobView) -> str:
    """Render download links to the LoRA files of a finished run or tool."""
    if view.state != "done":
        return ""
    try:
        if view.kind == "train":
            files = sorted((run_monitor.get_run_folder(ui, view) / "export").glob("*.safetensors"))
        else:  # a command that wrote a file
            files = [
                ui.resolve_path(argument)
                for at, argument in zip(view.command, view.command[1:], strict=False)
                if at == "--output"
            ]
    except UserError:  # it lies outside the allowed folders
        return ""
    made = ""
    for path in filter(Path.is_file, files):
        label = ui.say("run.download") if len(files) == 1 else ui.say("runs.download_of", name=path.name)
        title = f' title="{escape(path.name)}"'
        made += (
            f'<a class="button main"{title} href="{escape(ui.make_download_link(path))}" download>{escape(label)}</a>'
        )
    return made


def render_failures(ui: Ui, views: list[JobView]) -> str:
    """Render a line of the jobs that failed in the last 24 hours, which a long queue would hide."""
    lately = time.time() - 24 * 3600
    failed = [view for view in views if view.state in ("failed", "lost") and view.ended > lately]
    if not failed:
        return ""
    names = [
        f'<a href="{escape(ui.make_link("run", run=str(view.id)))}">{escape(view.name)}</a>'
        if view.kind == "train"
        else escape(view.name)
        for view in sorted(failed, key=lambda view: -view.ended)[:5]
    ]
    more = f" +{len(failed) - 5}" if len(failed) > 5 else ""
    return f'<p class="failures">{ui.say("runs.failed")} {" · ".join(names)}{more}</p>'


def sort_jobs(views: list[JobView]) -> list[JobView]:
    """Sort: running jobs, then waiting jobs in the queue's order, then ended jobs, newest first."""

    def place(view: JobView) -> tuple[int, float]:
        if view.state == "queued":
            return 1, view.place
        return (2, -view.ended) if view.state in ENDED else (0, -view.launched)

    return sorted(views, key=place)


def render_machine(ui: Ui) -> str:
    """Render a line about GPUs, CPU, memory and disk."""
    now = run_monitor.get_monitor(ui.place).machine()
    figures = []
    for number, gpu in enumerate(now["gpus"]):
        parts = []
        if gpu.busy is not None:
            parts.append(f'<meter max="100" value="{gpu.busy}"></meter>{gpu.busy} %')
        if gpu.total is not None and gpu.free is not None:
            parts.append(f"{format_bytes(gpu.total - gpu.free)} / {format_bytes(gpu.total)}")
        if gpu.degrees is not None:
            parts.append(f"{gpu.degrees} °C")
        figures.append(f'<span title="{escape(gpu.name)}">GPU {number} {" · ".join(parts)}</span>')
    figures.append(f'<span>CPU <meter max="100" value="{now["cpu"]:.0f}"></meter>{now["cpu"]:.0f} %</span>')
    used, total = now["ram"]
    figures.append(f"<span>{ui.say('runs.memory')} {format_bytes(used)} / {format_bytes(total)}</span>")
    figures.append(f"<span>{ui.say('runs.disk')} {format_bytes(now['free'])}</span>")
    return f'<div class="machine">{"".join(figures)}</div>'
