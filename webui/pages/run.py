"""One run: its curves, previews, files, log, settings and warnings. `?run=` names it: a job's number or a folder."""

import json
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.config import UserError
from lora_fp8.jobs import JobView

from .. import engine, live, shows, watch
from ..chart import Line, chart
from ..context import Ui
from ..curves import Log, smooth, thin
from ..safe import shown
from . import runs

SIDE = 320
"""Pixels of a preview in the grid; on the screen half of it, so that it is sharp on dense screens."""
ROWS = 60
"""Steps in the grid of previews, the newest first."""
FORMATS = ("auto", "kohya", "comfy", "diffusers")
DTYPES = ("", "bf16", "fp16", "fp32")
FOLLOW = "(right, told) => { const [was, now] = JSON.parse(told); return (right ?? null) === was ? now : right; }"
"""The newest preview takes the place of the one that was the newest, unless another one has been chosen by now."""


def build(ui: Ui) -> None:
    """Lay the page out."""
    head = live.panel(elem_id="head")
    said = live.panel(elem_id="said", visible=False)
    with gr.Group(visible=False, elem_classes="ask") as confirm:
        question = gr.Markdown()
        with gr.Row():
            keep = gr.Button(ui.say("runs.keep"))
            force = gr.Button(ui.say("runs.do.force"), variant="stop")
    how = gr.State("force")
    with gr.Tabs(elem_id="run-tabs"):
        with gr.Tab(ui.say("run.tab.curves"), id="curves"):
            with gr.Row(elem_classes="run-options"):
                amount = gr.Slider(0, 0.99, value=0.9, step=0.01, label=ui.say("run.smooth"))
                log = gr.Checkbox(label=ui.say("run.log"), value=False)
            curves = live.panel(elem_id="curves")
        with gr.Tab(ui.say("run.tab.previews"), id="previews"):
            with gr.Row():
                left = gr.Dropdown(label=ui.say("run.left"), choices=[], elem_id="left")
                right = gr.Dropdown(label=ui.say("run.right"), choices=[], elem_id="right")
                prompt = gr.Dropdown(label=ui.say("run.prompt"), choices=[], elem_id="prompt", scale=2)
            moving = gr.Checkbox(label=ui.say("run.moving"), value=True, visible=False, elem_id="moving")
            pair = live.panel(elem_id="pair")
            grid = live.panel(elem_id="grid")
        with gr.Tab(ui.say("run.tab.files"), id="files"):
            files = live.panel(elem_id="files")
            with gr.Row():
                step = gr.Dropdown(label=ui.say("run.export_step"), choices=[], elem_id="export-step")
                layout = gr.Dropdown(label=ui.say("run.export_format"), choices=list(FORMATS), value=FORMATS[0])
                dtype = gr.Dropdown(
                    label=ui.say("run.export_dtype"),
                    choices=[(name or ui.say("run.as_set"), name) for name in DTYPES],
                    value="",
                )
            export = gr.Button(ui.say("run.export"), elem_id="export")
            exported = live.panel(elem_id="exported", visible=False)
            with gr.Accordion(ui.say("run.kit"), open=False):
                gr.Markdown(ui.say("run.kit_about"))
                with gr.Row():
                    title = gr.Textbox(label=ui.say("run.kit_title"), max_lines=1)
                    trigger = gr.Textbox(label=ui.say("run.kit_trigger"), max_lines=1)
                    licence = gr.Textbox(label=ui.say("run.kit_licence"), max_lines=1, placeholder="apache-2.0")
                description = gr.Textbox(label=ui.say("run.kit_description"), lines=2)
                make = gr.Button(ui.say("run.kit_make"), elem_id="kit")
                made = live.panel(elem_id="made", visible=False)
        with gr.Tab(ui.say("run.tab.log"), id="log"):
            printed = live.panel(elem_id="log")
        with gr.Tab(ui.say("run.tab.warnings"), id="warnings"):
            warned = live.panel(elem_id="warnings")
        with gr.Tab(ui.say("run.tab.config"), id="config"):
            config = live.panel(elem_id="config")

    seen, steps = gr.State({}), gr.State([])
    newest = gr.Textbox(visible="hidden", elem_id="newest")
    newest.change(None, inputs=[right, newest], outputs=[right], js=FOLLOW, api_visibility="private")

    def paint(
        request: gr.Request,
        amount: float,
        log: bool,
        moving: bool,
        seen: dict[str, int],
        steps: list[Any],
    ) -> list[Any]:
        try:
            view, events = looked_at(ui, request)
        except UserError as error:
            nothing = [nobody(ui, str(error)), *[""] * 6]
            sent, seen = live.changed(nothing, seen)
            return [*sent, seen, *[gr.skip()] * 7]
        found = [
            header(ui, view, events),
            curves_of(ui, events, amount, log),
            grid_of(ui, view, events, moving),
            files_of(ui, view),
            log_of(ui, view),
            warnings_of(ui, events),
            config_of(ui, view),
        ]
        sent, seen = live.changed(found, seen)
        previews = events.facts.previews
        now = [sorted(previews), list(events.facts.checkpoints), prompts_of(events)]
        menus: list[Any] = [gr.skip()] * 7
        if now != steps:
            shown_ = [(step_name(ui, one), one) for one in now[0]]
            # The base on the left, the newest on the right, until somebody chooses otherwise.
            ends = (now[0][0], now[0][-1]) if now[0] else (None, None)
            old = steps[0] if steps else []
            menus = [
                gr.update(choices=shown_, **({} if old else {"value": ends[0]})),
                gr.update(choices=shown_),
                gr.update(choices=list(enumerate_prompts(now[2])), **({} if old or not now[2] else {"value": 0})),
                gr.update(
                    choices=[(ui.say("run.newest"), 0), *((str(one), one) for one in reversed(now[1]))],
                    **({} if steps and steps[1] else {"value": 0}),
                ),
                gr.update(visible=any("clips" in event for event in previews.values())),
                now,
                json.dumps([old[-1] if old else None, ends[1]]),
            ]
        return [*sent, seen, *menus]

    inputs = {"amount": amount, "log": log, "moving": moving, "seen": seen, "steps": steps}
    outputs = [head, curves, grid, files, printed, warned, config, seen, left, right, prompt, step, moving, steps]
    outputs.append(newest)
    live.keep_painted(paint, inputs, outputs)

    def redrawn(request: gr.Request, amount: float, log: bool) -> str:
        try:
            return curves_of(ui, looked_at(ui, request)[1], amount, log)
        except UserError:
            return ""

    gr.on(
        [amount.change, log.change],
        redrawn,
        inputs_kwargs={"amount": amount, "log": log},
        outputs=[curves],
        trigger_mode="always_last",
        **live.quiet(queue=False),
    )

    def press(request: gr.Request, event: gr.EventData) -> list[Any]:
        told = live.clicked(event)
        do = told.get("do", "")
        if do in ("force", "kill"):
            name = str(dict(request.query_params).get("run", ""))
            try:
                asked = watch.question(ui, do, name)
            except UserError as error:
                return [runs.notice(ui.tell(str(error)), wrong=True), *[gr.skip()] * 5]
            return [gr.update(visible=False), gr.update(visible=True), asked, do, *[gr.skip()] * 2]
        return [acted(ui, request, do), *[gr.skip()] * 3, header_now(ui, request), {}]

    now = live.quiet(queue=False)  # one after the other, as ask.js has it
    live.on_press(head, press, live.ASKED, outputs=[said, confirm, question, how, head, seen])

    def forced(request: gr.Request, do: str) -> list[Any]:
        return [acted(ui, request, do), gr.update(visible=False), header_now(ui, request), {}]

    ended = force.click(forced, inputs_kwargs={"do": how}, outputs=[said, confirm, head, seen], **now)
    kept = keep.click(lambda: gr.update(visible=False), outputs=[confirm], **now)
    for answered in (ended, kept):
        answered.then(None, js=live.ANSWERED)

    def pair_up(request: gr.Request, left: int | None, right: int | None, prompt: int | None, moving: bool) -> Any:
        if left is None or right is None:
            return gr.skip()  # the menus are filled one after the other, each of which asks
        try:
            view, events = looked_at(ui, request)
            return slider(ui, view, events, left, right, prompt, moving)
        except UserError:
            return ""

    gr.on(
        [left.change, right.change, prompt.change, moving.input],
        pair_up,
        inputs_kwargs={"left": left, "right": right, "prompt": prompt, "moving": moving},
        outputs=[pair],
        trigger_mode="always_last",
        **now,
    )

    def choose(event: gr.EventData) -> list[Any]:
        told = live.clicked(event)
        if told.get("do") != "show" or not (told["step"].isdecimal() and told["prompt"].isdecimal()):
            return [gr.skip(), gr.skip()]
        return [int(told["step"]), int(told["prompt"])]

    live.on_press(grid, choose, outputs=[right, prompt])

    def write(request: gr.Request, step: int | None, layout: str, dtype: str) -> Any:
        try:
            view, _ = looked_at(ui, request)
            folder = watch.folder_of(ui, view)
            arguments = [str(folder), "--step", str(int(step or 0)), "--format", layout]
            paths = engine.ask("export", [*arguments, *(["--set", f"export.dtype={dtype}"] if dtype else [])])
            return links(ui, ui.say("run.exported"), [Path(path) for path in paths], folder.parent)
        except UserError as error:
            return runs.notice(ui.tell(str(error)), wrong=True)

    export.click(
        write,
        inputs_kwargs={"step": step, "layout": layout, "dtype": dtype},
        outputs=[exported],
        **live.quiet(show_progress="minimal", concurrency_limit=2),
    )

    def kit(request: gr.Request, title: str, trigger: str, licence: str, description: str) -> Any:
        try:
            view, _ = looked_at(ui, request)
            return kit_of(ui, view, title, trigger, licence, description)
        except UserError as error:
            return runs.notice(ui.tell(str(error)), wrong=True)

    make.click(
        kit,
        inputs_kwargs={"title": title, "trigger": trigger, "licence": licence, "description": description},
        outputs=[made],
        **live.quiet(show_progress="minimal", concurrency_limit=2),
    )


# ---------------------------------------------------------------------------------------------------------------------
# what the address names


def looked_at(ui: Ui, request: gr.Request) -> tuple[JobView, Log]:
    """The job that this page's address names, and its event log.

    Raises:
        UserError: there is none, or its folder is none that the page may use.
    """
    name = str(dict(request.query_params).get("run", ""))
    if not name:
        raise UserError("no run is chosen")
    view = watch.find(ui, name)
    return view, watch.log_of(ui, view)


def nobody(ui: Ui, problem: str) -> str:
    """In place of a run."""
    back = f'<a href="{shown(ui.link(""))}">{ui.say("page.runs")}</a>'
    return f'<p class="empty">{shown(ui.tell(problem))} · {back}</p>'


def acted(ui: Ui, request: gr.Request, do: str) -> Any:
    """Press a button of this run."""
    try:
        return runs.pressed(ui, do, str(dict(request.query_params).get("run", "")))
    except UserError as error:
        return runs.notice(ui.tell(str(error)), wrong=True)


def header_now(ui: Ui, request: gr.Request) -> Any:
    """What a button has changed is seen at once, and not at the next tick."""
    try:
        return header(ui, *looked_at(ui, request))
    except UserError:  # told in place of the run by the next tick
        return gr.skip()


# ---------------------------------------------------------------------------------------------------------------------
# its parts, as HTML


def header(ui: Ui, view: JobView, log: Log) -> str:
    """Name, state, figures, buttons, and what is trained on what."""
    facts = log.facts
    about = [shown(watch.base_of(view.folder))]
    if images := facts.data.get("images"):
        about.append(ui.say("run.images", images=shown(images)))
    if trainable := facts.model.get("trainable"):
        about.append(ui.say("run.trainable", count=_counted(trainable) if _number(trainable) else "?"))
    if device := facts.start.get("device"):
        about.append(shown(device))
    links = runs.links(ui, view)
    buttons = shows.buttons(ui, view, without=["delete"], links=links)  # on the page of all runs its name is typed
    log_ = shows.last_lines(view, watch.tail(view))
    return (
        f'<section class="card"><div class="row"><h2>{shown(view.name)}</h2>{shows.state(ui, view)}'
        f'<span class="dim">{" · ".join(filter(None, about))}</span></div>'
        f"{shows.said(ui, view)}{shows.bar(view)}{shows.figures(ui, view)}{log_}{buttons}</section>"
    )


def curves_of(ui: Ui, log: Log, amount: float, logarithmic: bool) -> str:
    """All charts of a run; drawn once for all who look, until there is something new."""
    return _curves_of(ui, log, log.version, amount, logarithmic)


@lru_cache(maxsize=64)
def _curves_of(ui: Ui, log: Log, version: int, amount: float, logarithmic: bool) -> str:
    points = {name: groups.points() for name, groups in log.measures.items()}
    step = ui.say("runs.step")
    none = ui.say("run.no_steps")
    loss = thin(points["loss"])
    smoothed = thin(smooth(points["loss"], amount))
    raw = Line(ui.say("run.raw"), loss, 0, faint=amount > 0)
    lines = [raw, Line(ui.say("run.smoothed"), smoothed, 0)] if amount > 0 else [raw]
    made = [_wide(chart(ui.say("run.loss"), lines, empty=none, log=logarithmic, x_label=step))]
    if log.validation:
        bands = [
            Line(ui.tell(band) if band else ui.say("run.all_bands"), groups.points(), number)
            for number, (band, groups) in enumerate(sorted(log.validation.items()))
        ]
        made.append(_wide(chart(ui.say("run.validation"), bands, empty=none, log=logarithmic, x_label=step)))
    if not points["loss"]:
        return f'<div class="charts">{made[0]}</div>'
    for name, colour, scale in (("lr", 2, False), ("grad_norm", 1, logarithmic), ("images_per_s", 3, False)):
        found = [Line("", thin(points[name]), colour)]
        made.append(chart(ui.say(f"run.{name}"), found, empty=none, log=scale, x_label=step))
    if any(value > 0 for _, value in points["vram_gb"]):
        found = [Line("", thin(points["vram_gb"]), 0)]
        made.append(chart(ui.say("run.vram_gb"), found, empty=none, x_label=step))
    return f'<div class="charts">{"".join(made)}</div>'


def _wide(figure: str) -> str:
    return f'<div class="wide">{figure}</div>'


def grid_of(ui: Ui, view: JobView, log: Log, moving: bool = True) -> str:
    """Previews: a row for each step, the newest first, a column for each prompt; clips as `moving` says."""
    previews = log.facts.previews
    if not previews:
        return f'<p class="empty">{ui.say("run.no_previews")}</p>'
    prompts = prompts_of(log)
    head = "".join(f"<th>{shown(text)}</th>" for text in prompts)
    rows = ""
    for step in sorted(previews, reverse=True)[:ROWS]:
        name = step_name(ui, step)
        rows += f"<tr><th>{name}</th>"
        drawn = pictures(ui, view, previews[step])
        clips = pictures(ui, view, previews[step], "clips") if moving else []
        for number, path in enumerate(drawn):
            text = shown(f"{name}: {prompts[number] if number < len(prompts) else ''}")
            rows += (
                f'<td><button type="button" data-do="show" data-step="{step}" data-prompt="{number}" title="{text}">'
                f"{picture(ui, path, clips[number] if number < len(clips) else None, text)}</button></td>"
            )
        rows += "</tr>"
    return (
        f'<div class="scroll"><table class="pictures"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def picture(ui: Ui, still: Path, clip: Path | None, text: str) -> str:
    """A preview in a grid; `text` is HTML already. A clip stands still for who wants less motion."""
    source = shown(ui.picture(still, SIDE))
    if clip is None:
        return f'<img src="{source}" alt="{text}" loading="lazy">'
    return (
        f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{source}">'
        f'<img src="{shown(ui.picture(clip, SIDE, moving=True))}" alt="{text}" loading="lazy"></picture>'
    )


def step_name(ui: Ui, step: int) -> str:
    """Where in the training a preview was drawn."""
    return ui.say("run.at", step=step) if step else ui.say("run.base")


def prompts_of(log: Log) -> list[str]:
    """The prompts of the newest previews."""
    previews = log.facts.previews
    found = previews[max(previews)].get("prompts") if previews else None
    return [str(text) for text in found] if isinstance(found, list) else []


def enumerate_prompts(prompts: list[str]) -> list[tuple[str, int]]:
    """Choices of a menu."""
    return [(f"{number + 1}. {text}", number) for number, text in enumerate(prompts)]


def pictures(ui: Ui, view: JobView, event: dict[str, Any], what: str = "images") -> list[Path]:
    """The files of a preview event. A log may name anything: only what lies in the run's own folder counts.

    `what`: "images", of clips the first frames; or "clips".
    """
    found = event.get(what)
    folder = watch.folder_of(ui, view)
    paths = [folder / str(path) for path in found] if isinstance(found, list) else []
    return [path for path in paths if path.parent == folder / "samples"]


def slider(
    ui: Ui, view: JobView, log: Log, left: int | None, right: int | None, prompt: int | None, moving: bool = True
) -> str:
    """Two previews of one prompt over each other, with a handle between them; below them the clips, to be saved."""
    found, saved = [], []
    for step in (left, right):
        event = None if step is None else log.facts.previews.get(int(step))
        paths, clips = (pictures(ui, view, event, what) if event else [] for what in ("images", "clips"))
        number = int(prompt or 0)
        if step is None or number >= len(paths):
            return f'<p class="empty">{ui.say("run.choose_two")}</p>'
        name, clip = step_name(ui, step), clips[number] if number < len(clips) else None
        moves = moving and clip is not None
        found.append((name, ui.picture(clip if moves else paths[number], 1024, moves)))
        if clip is not None:
            link = f'<a class="button" href="{shown(ui.download(clip))}" download>'
            saved.append(f"{link}{ui.say('run.download')}: {shown(name)}</a>")
    images = "".join(f'<img src="{shown(address)}" alt="{shown(name)}">' for name, address in found)
    buttons = f'<div class="buttons">{"".join(saved)}</div>' if saved else ""
    return (
        f'<div class="ab">{images}<div class="cut"></div>'
        f'<input type="range" min="0" max="100" value="50" step="0.5" aria-label="{shown(ui.say("run.slide"))}">'
        f'<div class="names"><span>{shown(found[0][0])}</span><span>{shown(found[1][0])}</span></div></div>{buttons}'
    )


def files_of(ui: Ui, view: JobView) -> str:
    """The LoRA files, what the proof says of each, and the checkpoints."""
    folder = watch.folder_of(ui, view)
    found = sorted((folder / "export").glob("**/*.safetensors"))
    reports = shows.read_json(folder / "verify.json")
    reports = reports if isinstance(reports, dict) else {}
    parts = []
    for path in found:
        report = reports.get(path.name) if path.parent == folder / "export" else None
        parts.append(one_file(ui, path, path.relative_to(folder / "export"), report))
    if not parts:
        parts = [f'<p class="empty">{ui.say("run.no_files")}</p>']
    saved = [path.name for path in sorted(folder.glob("checkpoints/step-*"))]
    if saved:
        parts.append(f'<p class="dim">{ui.say("run.saved", steps=shown(", ".join(saved)))}</p>')
    return f'<div class="cards">{"".join(parts)}</div>'


def one_file(ui: Ui, path: Path, name: Path, report: Any) -> str:
    """A LoRA file with its proof."""
    about = shows.size(path.stat().st_size) if path.exists() else ""
    verdict, rows = f'<span class="dim">{ui.say("run.unverified")}</span>', ""
    if isinstance(report, dict) and isinstance(report.get("checks"), list):
        verdict = (
            f'<b class="yes">✓ {ui.say("run.verified")}</b>'
            if report.get("ok") is True
            else f'<b class="wrong">✗ {ui.say("run.not_verified")}</b>'
        )
        asks = "" if report.get("ok") is True else f'<p class="wrong">{ui.say("run.verify_asks")}</p>'
        rows = asks + shows.checks(ui, report["checks"])
    link = f'<a class="button" href="{shown(ui.download(path))}" download>{ui.say("run.download")}</a>'
    return (
        f'<section class="card"><div class="row"><h3>{shown(name)}</h3><span class="dim">{about}</span>{verdict}'
        f"{link}</div>{rows}</section>"
    )


def log_of(ui: Ui, view: JobView) -> str:
    """What the job printed, the last lines."""
    lines = watch.tail(view)
    if not lines:
        return f'<p class="empty">{ui.say("run.no_log" if isinstance(view.id, int) else "run.shell_log")}</p>'
    return f'<pre class="tail" tabindex="0">{shown(chr(10).join(lines))}</pre>'


def warnings_of(ui: Ui, log: Log) -> str:
    """What the trainer warned of, the newest first."""
    found = [
        (f"<time>{when}</time>", shown(ui.tell(str(one.get("text", "")))))
        for one in reversed(log.facts.warnings)
        for when in [shows.moment(float(one["t"])) if _number(one.get("t")) else ""]
    ]
    if not found:
        return f'<p class="empty">{ui.say("run.no_warnings")}</p>'
    return shows.table((ui.say("run.when"), ui.say("run.what")), found)


def config_of(ui: Ui, view: JobView) -> str:
    """The resolved settings, and a link to save them."""
    path = watch.folder_of(ui, view) / "config.toml"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        link = f'<a class="button" href="{shown(ui.download(path))}" download>{ui.say("run.download")}</a>'
    except OSError:  # the job has not begun: what it was submitted with is what it will have
        text = watch.watch(ui.place).queue.config(view.id) if isinstance(view.id, int) else ""
        link = ""
    return f'<div class="buttons">{link}</div><pre tabindex="0">{shown(text)}</pre>'


def links(ui: Ui, head: str, paths: list[Path], base: Path, more: str = "") -> Any:
    """Files that were written, each to be saved."""
    rows = "".join(
        f'<li><a href="{shown(ui.download(path))}" download>{shown(path.relative_to(base))}</a> '
        f'<span class="dim">{shows.size(path.stat().st_size)}</span></li>'
        for path in paths
    )
    return gr.update(value=f"<p>{shown(head)}</p><ul>{rows}</ul>{more}", visible=True)


def kit_of(ui: Ui, view: JobView, title: str, trigger: str, licence: str, description: str) -> Any:
    """Make a folder for publishing, and one archive of it."""
    folder = watch.folder_of(ui, view)
    place = ui.place.home / "tools" / "kits"
    place.mkdir(parents=True, exist_ok=True)
    number = 1
    while (out := place / f"{folder.name}-{number}").exists():
        number += 1
    given = {"title": title, "trigger": trigger, "license": licence, "description": description}
    options = [part for name, text in given.items() if text.strip() for part in (f"--{name}", text.strip())]
    told = engine.ask("kit", [str(folder), "--out", str(out), *options])
    archive = out.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            packed.write(path, Path(out.name) / path.relative_to(out))
    notes = "".join(f"<li>{shown(ui.tell(str(note)))}</li>" for note in told["notes"])
    return links(ui, ui.say("run.kit_made"), [archive], place, f"<ul>{notes}</ul>" if notes else "")


def _counted(number: float) -> str:
    """79,104 or 12.3 M."""
    return f"{number:,.0f}" if number < 1e6 else f"{shows.digits(number / 1e6)} M"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
