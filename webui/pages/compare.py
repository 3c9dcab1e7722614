"""The Compare page: curves of several runs in one chart, previews of the same prompt and step, and differing settings.

`?runs=12,34` names the runs. The address follows the choice, so that it can be kept and shared.
"""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from lora_fp8 import config
from lora_fp8.common import reading
from lora_fp8.common.chart import Line, format_number, render_chart
from lora_fp8.errors import UserError
from lora_fp8.jobs import JobView
from lora_fp8.run.run_log import RunLog, smooth, thin

from .. import live_panel, run_cards, run_monitor, setting_values, translations
from ..context import Ui
from ..sanitize import escape
from . import runs
from .run import rendering

MOST = 8
"""The number of colours of a chart."""
LISTED = 200
OPEN = ("auto", ["auto"])
"""Values that a run replaces when it starts."""
ADDRESS = """(runs) => {
  const address = new URL(location.href);
  if (runs.length) address.searchParams.set('runs', runs.join(',')); else address.searchParams.delete('runs');
  history.replaceState(history.state, '', address);
}"""


def build(ui: Ui) -> None:
    """Lay the page out."""
    which = gr.Dropdown(
        label=ui.say("compare.which", most=MOST),
        choices=[],
        multiselect=True,
        max_choices=MOST,
        elem_id="which",
    )
    with gr.Row():
        amount = gr.Slider(0, 0.99, value=0.9, step=0.01, label=ui.say("run.smooth"), min_width=240)
        log = gr.Checkbox(label=ui.say("run.log"), value=False, min_width=160)
        prompt = gr.Dropdown(label=ui.say("run.prompt"), choices=[], elem_id="prompt")
    curves = live_panel.make_panel(elem_id="curves")
    pictures = live_panel.make_panel(elem_id="grid")
    settings = live_panel.make_panel(elem_id="settings")
    seen = gr.State({})

    def open_page(request: gr.Request) -> Any:
        choices = [(label_run(view), str(view.id)) for view in list_runs(ui)]
        known = {value for _, value in choices}
        asked = str(dict(request.query_params).get("runs", "")).split(",")
        return gr.update(choices=choices, value=[name for name in asked if name in known][:MOST])

    gr.on([live_panel.get_load_event()], open_page, outputs=[which], queue=False, **live_panel.make_private_event())
    which.change(None, inputs=[which], js=ADDRESS, **live_panel.make_private_event())

    def refresh(which: list[str], amount: float, log: bool, prompt: str | None, seen: dict[str, Any]) -> list[Any]:
        chosen = find_runs(ui, which or [])
        of_runs = [rendering.list_prompts(events) for _, events in chosen]
        prompts = list(dict.fromkeys(text for texts in of_runs for text in texts))
        if prompt not in prompts:  # one that as many runs as possible have drawn
            prompt = max(prompts, key=lambda text: sum(text in texts for texts in of_runs), default=None)
        menu = gr.skip() if seen.get("prompts") == prompts else gr.update(choices=prompts, value=prompt)
        painted = [
            render_curves(ui, chosen, amount, log),
            render_previews(ui, chosen, prompt),
            render_settings(ui, chosen),
        ]
        sent, now = live_panel.skip_unchanged(painted, seen)
        return [*sent, menu, {**now, "prompts": prompts}]

    inputs = {"which": which, "amount": amount, "log": log, "prompt": prompt, "seen": seen}
    outputs = [curves, pictures, settings, prompt, seen]
    live_panel.refresh_on_ticks(refresh, inputs, outputs, seconds=3)
    gr.on(
        [which.change, amount.change, log.change, prompt.input],
        refresh,
        inputs_kwargs=inputs,
        outputs=outputs,
        queue=False,
        trigger_mode="always_last",
        **live_panel.make_private_event(),
    )


def list_runs(ui: Ui) -> list[JobView]:
    """List the runs that can be chosen, in the order of the start page."""
    try:
        views = run_monitor.get_monitor(ui.place).views()
    except UserError:
        return []
    return [view for view in runs.sort_jobs(views) if view.kind == "train" and view.folder is not None][:LISTED]


def label_run(view: JobView) -> str:
    """Return the name of a run in menus and legends."""
    return f"#{view.id} {view.name}" if isinstance(view.id, int) else view.name


def find_runs(ui: Ui, names: list[str]) -> list[tuple[JobView, RunLog]]:
    """Return the chosen runs and their logs. Runs that were deleted or are not allowed are left out, as in the menu."""
    runs = []
    for name in names[:MOST]:
        try:
            view = run_monitor.find_job(ui, name)
            runs.append((view, run_monitor.read_run_log(ui, view)))
        except UserError:
            continue
    return runs


def render_curves(ui: Ui, chosen: list[tuple[JobView, RunLog]], amount: float, logarithmic: bool) -> str:
    """Render one chart per measure, with a line for each run."""
    if not chosen:
        if len(list_runs(ui)) < 2:
            return run_cards.render_empty(ui, ui.say("compare.none"))
        return f'<p class="empty">{ui.say("compare.choose")}</p>'
    step, none = ui.say("runs.step"), ui.say("run.no_steps")
    loss, held_out, rate = [], [], []
    for number, (view, log) in enumerate(chosen):
        points = log.measures["loss"].list_points()
        loss.append(Line(label_run(view), thin(smooth(points, amount)), number))
        rate.append(Line(label_run(view), thin(log.measures["lr"].list_points()), number))
        if "" in log.validation:
            points, best, label = log.validation[""].list_points(), log.find_best(), label_run(view)
            dot = next((point for point in points if best and point[0] == best[0]), None)
            if dot:
                label = ui.say("compare.best", run=label, step=dot[0], loss=format_number(dot[1]))
            held_out.append(Line(label, thin(points), number, dot=dot))
    name = ui.say("run.loss" if not amount else "compare.loss")
    made = f'<div class="wide">{render_chart(name, loss, empty=none, log=logarithmic, x_label=step)}</div>'
    if held_out:
        made += render_chart(ui.say("run.validation"), held_out, empty=none, log=logarithmic, x_label=step)
    made += render_chart(ui.say("run.lr"), rate, empty=none, x_label=step)
    return f'<div class="charts">{made}</div>'


def render_previews(ui: Ui, chosen: list[tuple[JobView, RunLog]], prompt: str | None) -> str:
    """Render previews: a column per run and a row per step, newest first."""
    if not chosen or prompt is None:
        return ""
    cells: dict[int, dict[int, str]] = {}
    for number, (view, log) in enumerate(chosen):
        for step, event in log.facts.previews.items():
            prompts = event.get("prompts")
            if not isinstance(prompts, list) or prompt not in prompts:
                continue
            paths = rendering.list_pictures(ui, view, event)
            at = prompts.index(prompt)
            if at < len(paths):
                text = escape(f"{label_run(view)}, {rendering.format_step(ui, step)}")
                clip = next(iter(rendering.list_pictures(ui, view, event, "clips")[at:]), None)
                image = rendering.render_picture(ui, paths[at], clip, text)
                cells.setdefault(step, {})[number] = f'<span title="{text}">{image}</span>'
    head = "".join(f"<th>{escape(label_run(view))}</th>" for view, _ in chosen)
    rows = "".join(
        f"<tr><th>{rendering.format_step(ui, step)}</th>"
        + "".join(f"<td>{cells[step].get(number, '')}</td>" for number in range(len(chosen)))
        + "</tr>"
        for step in sorted(cells, reverse=True)[: rendering.ROWS]
    )
    return (
        f'<div class="scroll"><table class="pictures"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def render_settings(ui: Ui, chosen: list[tuple[JobView, RunLog]]) -> str:
    """Render the settings that differ between the runs. An automatic value that a run has not chosen yet is none."""
    if len(chosen) < 2:
        return ""
    flat = [dict(_flatten(_read_config(ui, view))) for view, _ in chosen]
    names = list(dict.fromkeys(name for values in flat for name in values))
    rows, undecided, waiting = [], [], set()
    for name in names:
        values = [config.get(name) for config in flat]
        known = [value for value in values if value not in OPEN]
        if name in ("name", "output_dir") or all(value == values[0] for value in values):
            continue
        if known and all(value == known[0] for value in known):
            undecided.append(name)
            waiting |= {label_run(view) for (view, _), value in zip(chosen, values, strict=True) if value in OPEN}
            continue
        cells = ("<br>".join(map(escape, setting_values.format_lines(ui, name, value))) for value in values)
        label = _get_label(ui, name)
        rows.append([f"{escape(label)}<br><code>{escape(name)}</code>" if label != name else escape(name), *cells])
    note = ""
    if undecided:
        runs_of = ui.say("compare.and").join(label_run(view) for view, _ in chosen if label_run(view) in waiting)
        settings = ui.say("compare.and").join(_get_label(ui, name) for name in undecided)
        note = f'<p class="dim">{escape(ui.say("compare.undecided", runs=runs_of, settings=settings))}</p>'
    if not rows:
        return f'<p class="empty">{ui.say("compare.same_so_far" if undecided else "compare.same")}</p>{note}'
    table = run_cards.render_table(["", *(escape(label_run(view)) for view, _ in chosen)], rows)
    return f"<h2>{ui.say('compare.differs')}</h2>{table}{note}"


def _get_label(ui: Ui, name: str) -> str:
    key = f"section.{name}" if f"section.{name}" in translations.load_setting_texts() else name
    return translations.get_label(ui.language, key)


def _read_config(ui: Ui, view: JobView) -> dict[str, Any]:
    try:
        return config.read_toml(reading.load_text(run_monitor.get_run_folder(ui, view) / "config.toml"))
    except (OSError, ValueError):  # not started yet: use the submitted config
        text = run_monitor.get_monitor(ui.place).queue.read_config(view.id) if isinstance(view.id, int) else ""
        return config.read_toml(text)


def _flatten(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
