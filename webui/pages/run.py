"""The page of one run: curves, previews, files, log, warnings and settings. `?run=` is a job number or a folder."""

import json
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.errors import Message, UserError
from lora_fp8.jobs import JobView

from .. import engine, live_panel, run_cards, run_monitor
from ..chart import Line, render_chart
from ..context import Ui
from ..run_log import RunLog, smooth, thin
from ..sanitize import escape
from . import runs

SIDE = 320
"""Pixels of a preview in the grid. It is displayed at half the size, so that it is sharp on dense screens."""
ROWS = 60
"""Steps in the grid of previews, newest first."""
FORMATS = ("auto", "kohya", "comfy", "diffusers")
DTYPES = ("", "bf16", "fp16", "fp32")
FOLLOW = "(right, told) => { const [was, now] = JSON.parse(told); return (right ?? null) === was ? now : right; }"
"""Moves on from the previous newest preview to the newest, unless another one was chosen."""


def build(ui: Ui) -> None:
    """Lay the page out."""
    head = live_panel.panel(elem_id="head")
    note = live_panel.panel(elem_id="said", visible=False)
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
            curves = live_panel.panel(elem_id="curves")
        with gr.Tab(ui.say("run.tab.previews"), id="previews"):
            with gr.Row():
                left = gr.Dropdown(label=ui.say("run.left"), choices=[], elem_id="left")
                right = gr.Dropdown(label=ui.say("run.right"), choices=[], elem_id="right")
                prompt = gr.Dropdown(label=ui.say("run.prompt"), choices=[], elem_id="prompt", scale=2)
            moving = gr.Checkbox(label=ui.say("run.moving"), value=True, visible=False, elem_id="moving")
            pair = live_panel.panel(elem_id="pair")
            grid = live_panel.panel(elem_id="grid")
        with gr.Tab(ui.say("run.tab.files"), id="files"):
            files = live_panel.panel(elem_id="files")
            with gr.Row():
                step = gr.Dropdown(label=ui.say("run.export_step"), choices=[], elem_id="export-step")
                layout = gr.Dropdown(label=ui.say("run.export_format"), choices=list(FORMATS), value=FORMATS[0])
                dtype = gr.Dropdown(
                    label=ui.say("run.export_dtype"),
                    choices=[(name or ui.say("run.as_set"), name) for name in DTYPES],
                    value="",
                )
            export = gr.Button(ui.say("run.export"), elem_id="export")
            exported = live_panel.panel(elem_id="exported", visible=False)
            with gr.Accordion(ui.say("run.kit"), open=False):
                gr.Markdown(ui.say("run.kit_about"))
                with gr.Row():
                    title = gr.Textbox(label=ui.say("run.kit_title"), max_lines=1)
                    trigger = gr.Textbox(label=ui.say("run.kit_trigger"), max_lines=1)
                    licence = gr.Textbox(label=ui.say("run.kit_licence"), max_lines=1, placeholder="apache-2.0")
                description = gr.Textbox(label=ui.say("run.kit_description"), lines=2)
                make = gr.Button(ui.say("run.kit_make"), elem_id="kit")
                made = live_panel.panel(elem_id="made", visible=False)
        with gr.Tab(ui.say("run.tab.log"), id="log"):
            printed = live_panel.panel(elem_id="log")
        with gr.Tab(ui.say("run.tab.warnings"), id="warnings"):
            warned = live_panel.panel(elem_id="warnings")
        with gr.Tab(ui.say("run.tab.config"), id="config"):
            config = live_panel.panel(elem_id="config")

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
            view, events = find_run(ui, request)
        except UserError as error:
            nothing = [render_missing(ui, str(error)), *[""] * 6]
            sent, seen = live_panel.skip_unchanged(nothing, seen)
            return [*sent, seen, *[gr.skip()] * 7]
        painted = [
            render_header(ui, view, events),
            render_curves(ui, events, amount, log),
            render_grid(ui, view, events, moving),
            render_files(ui, view),
            render_log(ui, view),
            render_warnings(ui, events),
            render_config(ui, view),
        ]
        sent, seen = live_panel.skip_unchanged(painted, seen)
        previews = events.facts.previews
        drawn_at, kept_at, prompts = sorted(previews), list(events.facts.checkpoints), list_prompts(events)
        now = [drawn_at, kept_at, prompts]
        menus: list[Any] = [gr.skip()] * 7
        if now != steps:
            choices = [(format_step(ui, drawn), drawn) for drawn in drawn_at]
            # By default the base model on the left and the newest preview on the right.
            ends = (drawn_at[0], drawn_at[-1]) if drawn_at else (None, None)
            old = steps[0] if steps else []
            base_model: dict[str, Any] = {} if old else {"value": ends[0]}
            first_prompt: dict[str, Any] = {} if old or not prompts else {"value": 0}
            newest_file: dict[str, Any] = {} if steps and steps[1] else {"value": 0}
            menus = [
                gr.update(choices=choices, **base_model),
                gr.update(choices=choices),
                gr.update(choices=list(enumerate_prompts(prompts)), **first_prompt),
                gr.update(
                    choices=[(ui.say("run.newest"), 0), *((str(kept), kept) for kept in reversed(kept_at))],
                    **newest_file,
                ),
                gr.update(visible=any("clips" in event for event in previews.values())),
                now,
                json.dumps([old[-1] if old else None, ends[1]]),
            ]
        return [*sent, seen, *menus]

    inputs = {"amount": amount, "log": log, "moving": moving, "seen": seen, "steps": steps}
    outputs = [head, curves, grid, files, printed, warned, config, seen, left, right, prompt, step, moving, steps]
    outputs.append(newest)
    live_panel.repaint_on_ticks(paint, inputs, outputs)

    def redraw(request: gr.Request, amount: float, log: bool) -> str:
        try:
            return render_curves(ui, find_run(ui, request)[1], amount, log)
        except UserError:
            return ""

    gr.on(
        [amount.change, log.change],
        redraw,
        inputs_kwargs={"amount": amount, "log": log},
        outputs=[curves],
        trigger_mode="always_last",
        **live_panel.private_event(queue=False),
    )

    def press(request: gr.Request, event: gr.EventData) -> list[Any]:
        click = live_panel.read_click(event)
        do = click.get("do", "")
        if do in ("force", "kill"):
            name = str(dict(request.query_params).get("run", ""))
            try:
                asked = run_monitor.get_question(ui, do, name)
            except UserError as error:
                return [runs.show_notice(ui.translate(str(error)), wrong=True), *[gr.skip()] * 5]
            return [gr.update(visible=False), gr.update(visible=True), asked, do, *[gr.skip()] * 2]
        return [press_button(ui, request, do), *[gr.skip()] * 3, refresh_header(ui, request), {}]

    now = live_panel.private_event(queue=False)  # in order, see ask.js
    live_panel.on_press(head, press, live_panel.ASKED, outputs=[note, confirm, question, how, head, seen])

    def end_run(request: gr.Request, do: str) -> list[Any]:
        return [press_button(ui, request, do), gr.update(visible=False), refresh_header(ui, request), {}]

    ended = force.click(end_run, inputs_kwargs={"do": how}, outputs=[note, confirm, head, seen], **now)
    kept = keep.click(lambda: gr.update(visible=False), outputs=[confirm], **now)
    for answered in (ended, kept):
        answered.then(None, js=live_panel.ANSWERED)

    def pair_up(request: gr.Request, left: int | None, right: int | None, prompt: int | None, moving: bool) -> Any:
        if left is None or right is None:
            return gr.skip()  # the menus are filled one after the other, and each change calls this
        try:
            view, events = find_run(ui, request)
            return render_slider(ui, view, events, left, right, prompt, moving)
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
        click = live_panel.read_click(event)
        if click.get("do") != "show" or not (click["step"].isdecimal() and click["prompt"].isdecimal()):
            return [gr.skip(), gr.skip()]
        return [int(click["step"]), int(click["prompt"])]

    live_panel.on_press(grid, choose, outputs=[right, prompt])

    def write(request: gr.Request, step: int | None, layout: str, dtype: str) -> Any:
        try:
            view, _ = find_run(ui, request)
            folder = run_monitor.get_run_folder(ui, view)
            arguments = [str(folder), "--step", str(int(step or 0)), "--format", layout]
            paths = engine.run_command("export", [*arguments, *(["--set", f"export.dtype={dtype}"] if dtype else [])])
            return show_links(ui, ui.say("run.exported"), [Path(path) for path in paths], folder.parent)
        except UserError as error:
            return runs.show_notice(ui.translate(str(error)), wrong=True)

    export.click(
        write,
        inputs_kwargs={"step": step, "layout": layout, "dtype": dtype},
        outputs=[exported],
        **live_panel.private_event(show_progress="minimal", concurrency_limit=2),
    )

    def kit(request: gr.Request, title: str, trigger: str, licence: str, description: str) -> Any:
        try:
            view, _ = find_run(ui, request)
            return make_kit(ui, view, title, trigger, licence, description)
        except UserError as error:
            return runs.show_notice(ui.translate(str(error)), wrong=True)

    make.click(
        kit,
        inputs_kwargs={"title": title, "trigger": trigger, "licence": licence, "description": description},
        outputs=[made],
        **live_panel.private_event(show_progress="minimal", concurrency_limit=2),
    )


# ---------------------------------------------------------------------------------------------------------------------
# what the address names


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


def render_missing(ui: Ui, problem: str) -> str:
    """Render a message in place of a run."""
    back = f'<a href="{escape(ui.link(""))}">{ui.say("page.runs")}</a>'
    return f'<p class="empty">{escape(ui.translate(problem))} · {back}</p>'


def press_button(ui: Ui, request: gr.Request, do: str) -> Any:
    """Run the action of a button of this run."""
    try:
        return runs.press_button(ui, do, str(dict(request.query_params).get("run", "")))
    except UserError as error:
        return runs.show_notice(ui.translate(str(error)), wrong=True)


def refresh_header(ui: Ui, request: gr.Request) -> Any:
    """Render the header right after a button, without waiting for the next tick."""
    try:
        return render_header(ui, *find_run(ui, request))
    except UserError:  # the next tick shows the error in place of the run
        return gr.skip()


# ---------------------------------------------------------------------------------------------------------------------
# its parts, as HTML


def render_header(ui: Ui, view: JobView, log: RunLog) -> str:
    """Render name, state, figures, buttons, base model, data and device."""
    facts = log.facts
    about = [escape(run_monitor.get_base_title(view.folder))]
    if images := facts.data.get("images"):
        about.append(ui.say("run.images", images=escape(images)))
    if trainable := facts.model.get("trainable"):
        about.append(ui.say("run.trainable", count=_format_count(trainable) if _is_number(trainable) else "?"))
    if device := facts.start.get("device"):
        about.append(escape(device))
    links = runs.render_downloads(ui, view)
    # Deleting asks for the run's name, which is typed on the page of all runs.
    buttons = run_cards.render_buttons(ui, view, without=["delete"], links=links)
    log_ = run_cards.render_log_tail(view, run_monitor.read_log_tail(view))
    return (
        f'<section class="card"><div class="row"><h2>{escape(view.name)}</h2>{run_cards.render_state(ui, view)}'
        f'<span class="dim">{" · ".join(filter(None, about))}</span></div>'
        f"{run_cards.render_sentence(ui, view)}{run_cards.render_progress(view)}{run_cards.render_figures(ui, view)}"
        f"{log_}{buttons}</section>"
    )


def render_curves(ui: Ui, log: RunLog, amount: float, logarithmic: bool) -> str:
    """Render all charts of a run. The result is cached until the log changes."""
    return _render_curves(ui, log, log.version, amount, logarithmic)


@lru_cache(maxsize=64)
def _render_curves(ui: Ui, log: RunLog, version: int, amount: float, logarithmic: bool) -> str:
    points = {name: groups.points() for name, groups in log.measures.items()}
    step = ui.say("runs.step")
    none = ui.say("run.no_steps")
    loss = thin(points["loss"])
    smoothed = thin(smooth(points["loss"], amount))
    raw = Line(ui.say("run.raw"), loss, 0, faint=amount > 0)
    lines = [raw, Line(ui.say("run.smoothed"), smoothed, 0)] if amount > 0 else [raw]
    made = [_render_wide(render_chart(ui.say("run.loss"), lines, empty=none, log=logarithmic, x_label=step))]
    if log.validation:
        bands = [
            Line(ui.translate(band) if band else ui.say("run.all_bands"), groups.points(), number)
            for number, (band, groups) in enumerate(sorted(log.validation.items()))
        ]
        made.append(
            _render_wide(render_chart(ui.say("run.validation"), bands, empty=none, log=logarithmic, x_label=step))
        )
    if not points["loss"]:
        return f'<div class="charts">{made[0]}</div>'
    for name, colour, scale in (("lr", 2, False), ("grad_norm", 1, logarithmic), ("images_per_s", 3, False)):
        curve = [Line("", thin(points[name]), colour)]
        made.append(render_chart(ui.say(f"run.{name}"), curve, empty=none, log=scale, x_label=step))
    if any(value > 0 for _, value in points["vram_gb"]):
        curve = [Line("", thin(points["vram_gb"]), 0)]
        made.append(render_chart(ui.say("run.vram_gb"), curve, empty=none, x_label=step))
    return f'<div class="charts">{"".join(made)}</div>'


def _render_wide(figure: str) -> str:
    return f'<div class="wide">{figure}</div>'


def render_grid(ui: Ui, view: JobView, log: RunLog, moving: bool = True) -> str:
    """Render previews: a row per step, newest first, and a column per prompt. Clips play if `moving`."""
    previews = log.facts.previews
    if not previews:
        return f'<p class="empty">{ui.say("run.no_previews")}</p>'
    prompts = list_prompts(log)
    head = "".join(f"<th>{escape(text)}</th>" for text in prompts)
    rows = ""
    for step in sorted(previews, reverse=True)[:ROWS]:
        name = format_step(ui, step)
        rows += f"<tr><th>{name}</th>"
        drawn = list_pictures(ui, view, previews[step])
        clips = list_pictures(ui, view, previews[step], "clips") if moving else []
        for number, path in enumerate(drawn):
            text = escape(f"{name}: {prompts[number] if number < len(prompts) else ''}")
            rows += (
                f'<td><button type="button" data-do="show" data-step="{step}" data-prompt="{number}" title="{text}">'
                f"{render_picture(ui, path, clips[number] if number < len(clips) else None, text)}</button></td>"
            )
        rows += "</tr>"
    return (
        f'<div class="scroll"><table class="pictures"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def render_picture(ui: Ui, still: Path, clip: Path | None, text: str) -> str:
    """Render a preview in the grid. `text` is HTML already. A clip is still for people who prefer less motion."""
    source = escape(ui.picture(still, SIDE))
    if clip is None:
        return f'<img src="{source}" alt="{text}" loading="lazy">'
    return (
        f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{source}">'
        f'<img src="{escape(ui.picture(clip, SIDE, moving=True))}" alt="{text}" loading="lazy"></picture>'
    )


def format_step(ui: Ui, step: int) -> str:
    """Name the step of a preview; 0 is the base model."""
    return ui.say("run.at", step=step) if step else ui.say("run.base")


def list_prompts(log: RunLog) -> list[str]:
    """List the prompts of the newest previews."""
    previews = log.facts.previews
    prompts = previews[max(previews)].get("prompts") if previews else None
    return [str(text) for text in prompts] if isinstance(prompts, list) else []


def enumerate_prompts(prompts: list[str]) -> list[tuple[str, int]]:
    """List the prompts as choices of a menu."""
    return [(f"{number + 1}. {text}", number) for number, text in enumerate(prompts)]


def list_pictures(ui: Ui, view: JobView, event: dict[str, Any], what: str = "images") -> list[Path]:
    """List the files of a preview event that lie in the run's own folder: a log could name any file.

    Args:
        what: "images" (of clips the first frames) or "clips".
    """
    names = event.get(what)
    folder = run_monitor.get_run_folder(ui, view)
    paths = [folder / str(path) for path in names] if isinstance(names, list) else []
    return [path for path in paths if path.parent == folder / "samples"]


def render_slider(
    ui: Ui, view: JobView, log: RunLog, left: int | None, right: int | None, prompt: int | None, moving: bool = True
) -> str:
    """Render two previews of a prompt on top of each other with a slider, and links to save their clips."""
    sides, saved = [], []
    for step in (left, right):
        event = None if step is None else log.facts.previews.get(int(step))
        paths, clips = (list_pictures(ui, view, event, what) if event else [] for what in ("images", "clips"))
        number = int(prompt or 0)
        if step is None or number >= len(paths):
            return f'<p class="empty">{ui.say("run.choose_two")}</p>'
        name, clip = format_step(ui, step), clips[number] if number < len(clips) else None
        file = clip if moving and clip is not None else paths[number]
        sides.append((name, ui.picture(file, 1024, moving and clip is not None)))
        if clip is not None:
            link = f'<a class="button" href="{escape(ui.download(clip))}" download>'
            saved.append(f"{link}{ui.say('run.download')}: {escape(name)}</a>")
    images = "".join(f'<img src="{escape(address)}" alt="{escape(name)}">' for name, address in sides)
    buttons = f'<div class="buttons">{"".join(saved)}</div>' if saved else ""
    return (
        f'<div class="ab">{images}<div class="cut"></div>'
        f'<input type="range" min="0" max="100" value="50" step="0.5" aria-label="{escape(ui.say("run.slide"))}">'
        f'<div class="names"><span>{escape(sides[0][0])}</span><span>{escape(sides[1][0])}</span></div></div>{buttons}'
    )


def render_files(ui: Ui, view: JobView) -> str:
    """Render the LoRA files with their verification, and the list of checkpoints."""
    folder = run_monitor.get_run_folder(ui, view)
    files = sorted((folder / "export").glob("**/*.safetensors"))
    reports = run_cards.read_json(folder / "verify.json")
    reports = reports if isinstance(reports, dict) else {}
    parts = []
    for path in files:
        report = reports.get(path.name) if path.parent == folder / "export" else None
        parts.append(render_file(ui, path, path.relative_to(folder / "export"), report))
    if not parts:
        parts = [f'<p class="empty">{ui.say("run.no_files")}</p>']
    saved = [path.name for path in sorted(folder.glob("checkpoints/step-*"))]
    if saved:
        parts.append(f'<p class="dim">{ui.say("run.saved", steps=escape(", ".join(saved)))}</p>')
    return f'<div class="cards">{"".join(parts)}</div>'


def render_file(ui: Ui, path: Path, name: Path, report: Any) -> str:
    """Render a LoRA file with its verification."""
    about = run_cards.format_size(path.stat().st_size) if path.exists() else ""
    verdict, rows = f'<span class="dim">{ui.say("run.unverified")}</span>', ""
    if isinstance(report, dict) and isinstance(report.get("checks"), list):
        verdict = (
            f'<b class="yes">✓ {ui.say("run.verified")}</b>'
            if report.get("ok") is True
            else f'<b class="wrong">✗ {ui.say("run.not_verified")}</b>'
        )
        asks = "" if report.get("ok") is True else f'<p class="wrong">{ui.say("run.verify_asks")}</p>'
        rows = asks + run_cards.render_checks(ui, report["checks"])
    link = f'<a class="button" href="{escape(ui.download(path))}" download>{ui.say("run.download")}</a>'
    return (
        f'<section class="card"><div class="row"><h3>{escape(name)}</h3><span class="dim">{about}</span>{verdict}'
        f"{link}</div>{rows}</section>"
    )


def render_log(ui: Ui, view: JobView) -> str:
    """Render the last lines that the job printed."""
    lines = run_monitor.read_log_tail(view)
    if not lines:
        return f'<p class="empty">{ui.say("run.no_log" if isinstance(view.id, int) else "run.shell_log")}</p>'
    return f'<pre class="tail" tabindex="0">{escape(chr(10).join(lines))}</pre>'


def render_warnings(ui: Ui, log: RunLog) -> str:
    """Render the warnings, newest first."""
    rows = [
        (f"<time>{when}</time>", escape(ui.translate(str(warning.get("text", "")))))
        for warning in reversed(log.facts.warnings)
        for when in [run_cards.format_time(float(warning["t"])) if _is_number(warning.get("t")) else ""]
    ]
    if not rows:
        return f'<p class="empty">{ui.say("run.no_warnings")}</p>'
    return run_cards.render_table((ui.say("run.when"), ui.say("run.what")), rows)


def render_config(ui: Ui, view: JobView) -> str:
    """Render the resolved settings with a download link."""
    path = run_monitor.get_run_folder(ui, view) / "config.toml"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        link = f'<a class="button" href="{escape(ui.download(path))}" download>{ui.say("run.download")}</a>'
    except OSError:  # the job has not started: its submitted config is what it will run with
        text = run_monitor.get_monitor(ui.place).queue.config(view.id) if isinstance(view.id, int) else ""
        link = ""
    return f'<div class="buttons">{link}</div><pre tabindex="0">{escape(text)}</pre>'


def show_links(ui: Ui, head: str, paths: list[Path], base: Path, more: str = "") -> Any:
    """Show download links to files that were written."""
    rows = "".join(
        f'<li><a href="{escape(ui.download(path))}" download>{escape(path.relative_to(base))}</a> '
        f'<span class="dim">{run_cards.format_size(path.stat().st_size)}</span></li>'
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
    notes = "".join(f"<li>{escape(ui.translate(str(note)))}</li>" for note in answer["notes"])
    return show_links(ui, ui.say("run.kit_made"), [archive], place, f"<ul>{notes}</ul>" if notes else "")


def _format_count(number: float) -> str:
    """Format a count as "79,104" or "12.3 M"."""
    return f"{number:,.0f}" if number < 1e6 else f"{run_cards.digits(number / 1e6)} M"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
