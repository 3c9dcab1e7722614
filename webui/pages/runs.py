"""The first page: the queue, what runs now, and what has ended."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.config import UserError
from lora_fp8.jobs import ENDED, JobView

from .. import album as room
from .. import live, shows, watch
from ..context import Ui
from ..safe import shown

PER_PAGE = 20
KINDS = ("all", "active", "ended")


def build(ui: Ui) -> None:
    """Lay the page out."""
    machine = live.panel(elem_id="machine")
    which = gr.Radio(
        [(ui.say(f"runs.kind.{kind}"), kind) for kind in KINDS],
        value="all",
        label=ui.say("runs.kind"),
        show_label=False,
        container=False,
    )
    said = live.panel(elem_id="said", visible=False)
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
    cards = live.panel(elem_id="cards")
    page = gr.State(0)
    seen = gr.State({})

    def paint(which: str, page: int, seen: dict[str, int]) -> list[Any]:
        sent, seen = live.changed([strip(ui), board(ui, which, page)], seen)
        return [*sent, seen]

    inputs = {"which": which, "page": page, "seen": seen}
    outputs = [machine, cards, seen]
    live.keep_painted(paint, inputs, outputs)

    def press(event: gr.EventData, which: str, page: int) -> list[Any]:
        told = live.clicked(event)
        do, name = told.get("do", ""), told.get("id", "")
        line = gr.update(visible=False)
        asked = [gr.skip()] * 7  # the two questions with their parts, and whom they are about
        try:
            if do == "page":
                page = max(0, int(told.get("to", "0")))
            elif do == "delete":
                view = watch.find(ui, name)
                shell = isinstance(view.id, str)
                question_ = _plain(ui.say("runs.ask_delete_run" if shell else "runs.ask_delete", name=view.name))
                folder_too = gr.update(value=False, visible=not shell)
                asked = [gr.update(visible=True), question_, "", folder_too, gr.update(visible=False), gr.skip(), told]
                return [line, *asked, page, gr.skip(), gr.skip()]
            elif do in ("force", "kill"):
                about = f"**{_plain(watch.find(ui, name).name)}** {watch.question(ui, do, name)}"
                asked = [gr.update(visible=False), *[gr.skip()] * 3, gr.update(visible=True), about, told]
                return [line, *asked, page, gr.skip(), gr.skip()]
            else:
                line = pressed(ui, do, name)
        except (UserError, ValueError) as error:
            line = notice(ui.tell(str(error)), wrong=True)
        return [line, *asked, page, board(ui, which, page), {}]

    now = live.quiet(queue=False)  # one after the other, as ask.js has it
    live.on_press(
        cards,
        press,
        live.ASKED,
        inputs_kwargs={"which": which, "page": page},
        outputs=[said, confirm, question, typed, with_run, sure, which_end, doomed, page, cards, seen],
    )

    def end_it(told: dict[str, str], which: str, page: int) -> list[Any]:
        try:
            line = notice(watch.act(ui, told.get("do", ""), told.get("id", "")))
        except UserError as error:
            line = notice(ui.tell(str(error)), wrong=True)
        return [line, gr.update(visible=False), board(ui, which, page), {}]

    ended = end.click(
        end_it,
        inputs_kwargs={"told": doomed, "which": which, "page": page},
        outputs=[said, sure, cards, seen],
        **now,
    )
    not_ended = not_now.click(lambda: gr.update(visible=False), outputs=[sure], **now)

    def delete(told: dict[str, str], typed: str, with_run: bool, which: str, page: int) -> list[Any]:
        try:
            line = notice(watch.delete(ui, told.get("id", ""), typed, with_run))
        except UserError as error:
            return [notice(ui.tell(str(error)), wrong=True), gr.skip(), gr.skip(), gr.skip()]
        return [line, gr.update(visible=False), board(ui, which, page), {}]

    deleted = go.click(
        delete,
        inputs_kwargs={"told": doomed, "typed": typed, "with_run": with_run, "which": which, "page": page},
        outputs=[said, confirm, cards, seen],
        **now,
    )
    kept = keep.click(lambda: gr.update(visible=False), outputs=[confirm], **now)
    for answered in (ended, not_ended, deleted, kept):
        answered.then(None, js=live.ANSWERED)
    which.input(
        lambda which: [board(ui, which, 0), 0, {}],
        inputs_kwargs={"which": which},
        outputs=[cards, page, seen],
        **now,
    )


def notice(line: str, wrong: bool = False, go: str = "") -> Any:
    """What became of the last button, in a panel that is not there before there is something to say.

    Args:
        go: the address to which the browser goes then.
    """
    then = f' data-go="{shown(go)}"' if go else ""
    kind = " wrong" if wrong else ""
    return gr.update(value=f'<p class="toast{kind}" role="status"{then}>{shown(line)}</p>', visible=True)


def pressed(ui: Ui, do: str, name: str) -> Any:
    """Do what a button says, and tell what became of it. Raises UserError."""
    return notice(watch.act(ui, do, name), go=ui.link("new") if do == "edit" else "")


def _plain(text: str) -> str:
    # In a gr.Markdown: a run's name must not be read as markup.
    return "".join(f"\\{c}" if c in r"\`*_{}[]<>()#+-.!|~$&" else c for c in text)


def board(ui: Ui, which: str, page: int) -> str:
    """The cards of one page."""
    try:
        views = watch.watch(ui.place).views()
    except UserError as error:
        return f'<p class="wrong">{shown(ui.tell(str(error)))}</p>'
    views = ordered([view for view in views if which == "all" or (view.state in ENDED) == (which == "ended")])
    if not views:
        link = f'<a href="{shown(ui.link("new"))}">{ui.say("runs.begin")}</a>'
        return f'<p class="empty">{ui.say("runs.none" if which == "all" else "runs.none_such")} {link}</p>'
    pages = (len(views) - 1) // PER_PAGE + 1
    page = min(page, pages - 1)
    waiting = any(view.state == "queued" for view in views)
    news = failures(ui, views) if which == "all" and not page and waiting else ""
    made = news + "".join(one_card(ui, view) for view in views[page * PER_PAGE : (page + 1) * PER_PAGE])
    turn = ""
    if pages > 1:
        earlier = shows.button("page", ui.say("runs.newer"), to=str(page - 1)) if page else ""
        later = shows.button("page", ui.say("runs.older"), to=str(page + 1)) if page + 1 < pages else ""
        turn = (
            f'<div class="buttons">{earlier}{later}'
            f'<span class="dim">{ui.say("runs.page", page=page + 1, pages=pages)}</span></div>'
        )
    return f'<div class="cards">{made}</div>{turn}'


def one_card(ui: Ui, view: JobView) -> str:
    tail = watch.tail(view) if view.state in ("failed", "lost") or view.kind != "train" else []
    if view.command[:1] == ("caption",):
        done, total = room.progress(tail)
        view = replace(view, step=done, steps=total)
        tail = [line for line in tail if not line.startswith("{")]  # events, for programs
    return shows.card(ui, view, watch.base_of(view.folder), tail, links(ui, view))


def links(ui: Ui, view: JobView) -> str:
    """The LoRA files of a finished run or tool, each to be saved."""
    if view.state != "done":
        return ""
    try:
        if view.kind == "train":
            found = sorted((watch.folder_of(ui, view) / "export").glob("*.safetensors"))
        else:  # a tool that has written a file
            found = [ui.path(one) for at, one in zip(view.command, view.command[1:], strict=False) if at == "--output"]
    except UserError:  # it lies where the page may not look
        return ""
    made = ""
    for path in filter(Path.is_file, found):
        label = ui.say("run.download") if len(found) == 1 else ui.say("runs.download_of", name=path.name)
        title = f' title="{shown(path.name)}"'
        made += f'<a class="button main"{title} href="{shown(ui.download(path))}" download>{shown(label)}</a>'
    return made


def failures(ui: Ui, views: list[JobView]) -> str:
    """One line about what has failed since yesterday, which a long queue would hide."""
    lately = time.time() - 24 * 3600
    found = [view for view in views if view.state in ("failed", "lost") and view.ended > lately]
    if not found:
        return ""
    names = [
        f'<a href="{shown(ui.link("run", run=str(view.id)))}">{shown(view.name)}</a>'
        if view.kind == "train"
        else shown(view.name)
        for view in sorted(found, key=lambda view: -view.ended)[:5]
    ]
    more = f" +{len(found) - 5}" if len(found) > 5 else ""
    return f'<p class="failures">{ui.say("runs.failed")} {" · ".join(names)}{more}</p>'


def ordered(views: list[JobView]) -> list[JobView]:
    """What lives first, then what waits in the queue's order, then what has ended, the newest first."""

    def place(view: JobView) -> tuple[int, float]:
        if view.state == "queued":
            return 1, view.place
        return (2, -view.ended) if view.state in ENDED else (0, -view.launched)

    return sorted(views, key=place)


def strip(ui: Ui) -> str:
    """One line about the machine."""
    now = watch.watch(ui.place).machine()
    found = []
    for number, gpu in enumerate(now["gpus"]):
        found.append(
            f'<span title="{shown(gpu["name"])}">GPU {number} <meter max="100" value="{gpu["busy"]}"></meter>'
            f"{gpu['busy']} % · {shows.size(gpu['used'])} / {shows.size(gpu['total'])} · {gpu['degrees']} °C</span>"
        )
    found.append(f'<span>CPU <meter max="100" value="{now["cpu"]:.0f}"></meter>{now["cpu"]:.0f} %</span>')
    used, total = now["ram"]
    found.append(f"<span>{ui.say('runs.memory')} {shows.size(used)} / {shows.size(total)}</span>")
    found.append(f"<span>{ui.say('runs.disk')} {shows.size(now['free'])}</span>")
    return f'<div class="machine">{"".join(found)}</div>'
