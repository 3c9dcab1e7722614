"""The start page: the queue, running jobs, and ended jobs."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.errors import UserError
from lora_fp8.jobs import ENDED, JobView

from .. import dataset_folder, live_panel, run_cards, run_monitor
from ..context import Ui
from ..sanitize import escape

PER_PAGE = 20
KINDS = ("all", "active", "ended")


def build(ui: Ui) -> None:
    """Lay the page out."""
    machine = live_panel.panel(elem_id="machine")
    which = gr.Radio(
        [(ui.say(f"runs.kind.{kind}"), kind) for kind in KINDS],
        value="all",
        label=ui.say("runs.kind"),
        show_label=False,
        container=False,
    )
    note = live_panel.panel(elem_id="said", visible=False)
    doomed = gr.State({})
    with gr.Group(visible=False, elem_classes="ask") as confirm:
        question = gr.Markdown()
        typed = gr.Textbox(label=ui.say("runs.type_name"), max_lines=1, elem_id="typed-name")
        with_run = gr.Checkbox(label=ui.say("runs.with_folder"), value=False)
        with gr.Row():
            keep = gr.Button(ui.say("runs.keep"))
            go = gr.Button(ui.say("runs.do.delete"), variant="stop")
    with gr.Group(visible=False, elem_classes="ask") as sure:
        which_end = gr.Markdown()
        with gr.Row():
            not_now = gr.Button(ui.say("runs.keep"))
            end = gr.Button(ui.say("runs.do.force"), variant="stop", elem_id="end-now")
    cards = live_panel.panel(elem_id="cards")
    page = gr.State(0)
    seen = gr.State({})

    def paint(which: str, page: int, seen: dict[str, int]) -> list[Any]:
        sent, seen = live_panel.skip_unchanged([render_machine(ui), render_board(ui, which, page)], seen)
        return [*sent, seen]

    inputs = {"which": which, "page": page, "seen": seen}
    outputs = [machine, cards, seen]
    live_panel.repaint_on_ticks(paint, inputs, outputs)

    def press(event: gr.EventData, which: str, page: int) -> list[Any]:
        click = live_panel.read_click(event)
        do, name = click.get("do", ""), click.get("id", "")
        line = gr.update(visible=False)
        asked = [gr.skip()] * 7  # the two questions with their elements, and the job that they are about
        try:
            if do == "page":
                page = max(0, int(click.get("to", "0")))
            elif do == "delete":
                view = run_monitor.find_job(ui, name)
                shell = isinstance(view.id, str)
                question_ = _escape_markdown(
                    ui.say("runs.ask_delete_run" if shell else "runs.ask_delete", name=view.name)
                )
                folder_too = gr.update(value=False, visible=not shell)
                asked = [gr.update(visible=True), question_, "", folder_too, gr.update(visible=False), gr.skip(), click]
                return [line, *asked, page, gr.skip(), gr.skip()]
            elif do in ("force", "kill"):
                title = _escape_markdown(run_monitor.find_job(ui, name).name)
                about = f"**{title}** {run_monitor.get_question(ui, do, name)}"
                asked = [gr.update(visible=False), *[gr.skip()] * 3, gr.update(visible=True), about, click]
                return [line, *asked, page, gr.skip(), gr.skip()]
            else:
                line = press_button(ui, do, name)
        except (UserError, ValueError) as error:
            line = show_notice(ui.translate(str(error)), wrong=True)
        return [line, *asked, page, render_board(ui, which, page), {}]

    now = live_panel.private_event(queue=False)  # in order, see ask.js
    live_panel.on_press(
        cards,
        press,
        live_panel.ASKED,
        inputs_kwargs={"which": which, "page": page},
        outputs=[note, confirm, question, typed, with_run, sure, which_end, doomed, page, cards, seen],
    )

    def end_run(click: dict[str, str], which: str, page: int) -> list[Any]:
        try:
            line = show_notice(run_monitor.run_action(ui, click.get("do", ""), click.get("id", "")))
        except UserError as error:
            line = show_notice(ui.translate(str(error)), wrong=True)
        return [line, gr.update(visible=False), render_board(ui, which, page), {}]

    ended = end.click(
        end_run,
        inputs_kwargs={"click": doomed, "which": which, "page": page},
        outputs=[note, sure, cards, seen],
        **now,
    )
    not_ended = not_now.click(lambda: gr.update(visible=False), outputs=[sure], **now)

    def delete(click: dict[str, str], typed: str, with_run: bool, which: str, page: int) -> list[Any]:
        try:
            line = show_notice(run_monitor.delete_job(ui, click.get("id", ""), typed, with_run))
        except UserError as error:
            return [show_notice(ui.translate(str(error)), wrong=True), gr.skip(), gr.skip(), gr.skip()]
        return [line, gr.update(visible=False), render_board(ui, which, page), {}]

    deleted = go.click(
        delete,
        inputs_kwargs={"click": doomed, "typed": typed, "with_run": with_run, "which": which, "page": page},
        outputs=[note, confirm, cards, seen],
        **now,
    )
    kept = keep.click(lambda: gr.update(visible=False), outputs=[confirm], **now)
    for answered in (ended, not_ended, deleted, kept):
        answered.then(None, js=live_panel.ANSWERED)
    which.input(
        lambda which: [render_board(ui, which, 0), 0, {}],
        inputs_kwargs={"which": which},
        outputs=[cards, page, seen],
        **now,
    )


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
    return show_notice(run_monitor.run_action(ui, do, name), go=ui.link("new") if do == "edit" else "")


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
        link = f'<a href="{escape(ui.link("new"))}">{ui.say("runs.begin")}</a>'
        return f'<p class="empty">{ui.say("runs.none" if which == "all" else "runs.none_such")} {link}</p>'
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
    tail = run_monitor.read_log_tail(view) if view.state in ("failed", "lost") or view.kind != "train" else []
    if view.command[:1] == ("caption",):
        done, total = dataset_folder.parse_progress(tail)
        view = replace(view, step=done, steps=total)
        tail = [line for line in tail if not line.startswith("{")]  # JSON events, for programs
    return run_cards.render_card(ui, view, run_monitor.get_base_title(view.folder), tail, render_downloads(ui, view))


def render_downloads(ui: Ui, view: JobView) -> str:
    """Render download links to the LoRA files of a finished run or tool."""
    if view.state != "done":
        return ""
    try:
        if view.kind == "train":
            files = sorted((run_monitor.get_run_folder(ui, view) / "export").glob("*.safetensors"))
        else:  # a command that wrote a file
            files = [
                ui.path(argument)
                for at, argument in zip(view.command, view.command[1:], strict=False)
                if at == "--output"
            ]
    except UserError:  # it lies outside the allowed folders
        return ""
    made = ""
    for path in filter(Path.is_file, files):
        label = ui.say("run.download") if len(files) == 1 else ui.say("runs.download_of", name=path.name)
        title = f' title="{escape(path.name)}"'
        made += f'<a class="button main"{title} href="{escape(ui.download(path))}" download>{escape(label)}</a>'
    return made


def render_failures(ui: Ui, views: list[JobView]) -> str:
    """Render a line of the jobs that failed in the last 24 hours, which a long queue would hide."""
    lately = time.time() - 24 * 3600
    failed = [view for view in views if view.state in ("failed", "lost") and view.ended > lately]
    if not failed:
        return ""
    names = [
        f'<a href="{escape(ui.link("run", run=str(view.id)))}">{escape(view.name)}</a>'
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
        figures.append(
            f'<span title="{escape(gpu["name"])}">GPU {number} <meter max="100" value="{gpu["busy"]}"></meter>'
            f"{gpu['busy']} % · {run_cards.format_size(gpu['used'])} / {run_cards.format_size(gpu['total'])} · "
            f"{gpu['degrees']} °C</span>"
        )
    figures.append(f'<span>CPU <meter max="100" value="{now["cpu"]:.0f}"></meter>{now["cpu"]:.0f} %</span>')
    used, total = now["ram"]
    figures.append(
        f"<span>{ui.say('runs.memory')} {run_cards.format_size(used)} / {run_cards.format_size(total)}</span>"
    )
    figures.append(f"<span>{ui.say('runs.disk')} {run_cards.format_size(now['free'])}</span>")
    return f'<div class="machine">{"".join(figures)}</div>'
