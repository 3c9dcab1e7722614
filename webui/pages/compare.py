"""Several runs beside each other: curves over each other, previews of the same prompt and step, what was set otherwise.

`?runs=12,34` names them; the address follows the choice, so that it can be kept and passed on.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

import gradio as gr

from lora_fp8.config import UserError
from lora_fp8.jobs import JobView

from .. import live, shows, watch, words
from ..chart import Line, chart
from ..context import Ui
from ..curves import Log, smooth, thin
from ..safe import shown
from . import run, runs

MOST = 8
"""As many as there are colours."""
LISTED = 200
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
    curves = live.panel(elem_id="curves")
    pictures = live.panel(elem_id="grid")
    settings = live.panel(elem_id="settings")
    seen = gr.State({})

    def start(request: gr.Request) -> Any:
        choices = [(name_of(view), str(view.id)) for view in listed(ui)]
        known = {value for _, value in choices}
        asked = str(dict(request.query_params).get("runs", "")).split(",")
        return gr.update(choices=choices, value=[name for name in asked if name in known][:MOST])

    gr.on([live.opened()], start, outputs=[which], queue=False, **live.quiet())
    which.change(None, inputs=[which], js=ADDRESS, **live.quiet())

    def paint(which: list[str], amount: float, log: bool, prompt: str | None, seen: dict[str, Any]) -> list[Any]:
        chosen = looked_at(ui, which or [])
        prompts = list(dict.fromkeys(text for _, events in chosen for text in run.prompts_of(events)))
        prompt = prompt if prompt in prompts else next(iter(prompts), None)
        menu = gr.skip() if seen.get("prompts") == prompts else gr.update(choices=prompts, value=prompt)
        found = [curves_of(ui, chosen, amount, log), pictures_of(ui, chosen, prompt), settings_of(ui, chosen)]
        sent, now = live.changed(found, seen)
        return [*sent, menu, {**now, "prompts": prompts}]

    inputs = {"which": which, "amount": amount, "log": log, "prompt": prompt, "seen": seen}
    outputs = [curves, pictures, settings, prompt, seen]
    live.keep_painted(paint, inputs, outputs, seconds=3)
    gr.on(
        [which.change, amount.change, log.change, prompt.input],
        paint,
        inputs_kwargs=inputs,
        outputs=outputs,
        queue=False,
        trigger_mode="always_last",
        **live.quiet(),
    )


def listed(ui: Ui) -> list[JobView]:
    """The runs that can be chosen, as they stand on the first page."""
    try:
        views = watch.watch(ui.place).views()
    except UserError:
        return []
    return [view for view in runs.ordered(views) if view.kind == "train" and view.folder is not None][:LISTED]


def name_of(view: JobView) -> str:
    """A run in a menu and a legend."""
    return f"#{view.id} {view.name}" if isinstance(view.id, int) else view.name


def looked_at(ui: Ui, names: list[str]) -> list[tuple[JobView, Log]]:
    """The chosen runs and their logs; one that has gone or may not be read is left out, as it is in the menu."""
    found = []
    for name in names[:MOST]:
        try:
            view = watch.find(ui, name)
            found.append((view, watch.log_of(ui, view)))
        except UserError:
            continue
    return found


def curves_of(ui: Ui, chosen: list[tuple[JobView, Log]], amount: float, logarithmic: bool) -> str:
    """The same measure of each run in one chart."""
    if not chosen:
        return f'<p class="empty">{ui.say("compare.choose")}</p>'
    step, none = ui.say("runs.step"), ui.say("run.no_steps")
    loss, held_out, rate = [], [], []
    for number, (view, log) in enumerate(chosen):
        points = log.measures["loss"].points()
        loss.append(Line(name_of(view), thin(smooth(points, amount)), number))
        rate.append(Line(name_of(view), thin(log.measures["lr"].points()), number))
        if "" in log.validation:
            held_out.append(Line(name_of(view), thin(log.validation[""].points()), number))
    name = ui.say("run.loss" if not amount else "compare.loss")
    made = f'<div class="wide">{chart(name, loss, empty=none, log=logarithmic, x_label=step)}</div>'
    if held_out:
        made += chart(ui.say("run.validation"), held_out, empty=none, log=logarithmic, x_label=step)
    made += chart(ui.say("run.lr"), rate, empty=none, x_label=step)
    return f'<div class="charts">{made}</div>'


def pictures_of(ui: Ui, chosen: list[tuple[JobView, Log]], prompt: str | None) -> str:
    """A column for each run, a row for each step at which one of them was drawn, the newest first."""
    if not chosen or prompt is None:
        return ""
    cells: dict[int, dict[int, str]] = {}
    for number, (view, log) in enumerate(chosen):
        for step, event in log.facts.previews.items():
            prompts = event.get("prompts")
            if not isinstance(prompts, list) or prompt not in prompts:
                continue
            paths = run.pictures(ui, view, event)
            at = prompts.index(prompt)
            if at < len(paths):
                text = shown(f"{name_of(view)}, {run.step_name(ui, step)}")
                clip = next(iter(run.pictures(ui, view, event, "clips")[at:]), None)
                image = run.picture(ui, paths[at], clip, text)
                cells.setdefault(step, {})[number] = f'<span title="{text}">{image}</span>'
    head = "".join(f"<th>{shown(name_of(view))}</th>" for view, _ in chosen)
    rows = "".join(
        f"<tr><th>{run.step_name(ui, step)}</th>"
        + "".join(f"<td>{cells[step].get(number, '')}</td>" for number in range(len(chosen)))
        + "</tr>"
        for step in sorted(cells, reverse=True)[: run.ROWS]
    )
    return (
        f'<div class="scroll"><table class="pictures"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def settings_of(ui: Ui, chosen: list[tuple[JobView, Log]]) -> str:
    """The settings that are not the same in all of them."""
    if len(chosen) < 2:
        return ""
    flat = [dict(_flat(_config(ui, view))) for view, _ in chosen]
    names = list(dict.fromkeys(name for one in flat for name in one))
    rows = []
    for name in names:
        values = [one.get(name) for one in flat]
        if name not in ("name", "output_dir") and any(value != values[0] for value in values):
            cells = ("–" if value is None else f"<code>{shown(_short(value))}</code>" for value in values)
            key = f"section.{name}" if f"section.{name}" in words.named() else name
            label = words.label(ui.language, key)
            rows.append([f"{shown(label)}<br><code>{shown(name)}</code>" if label != name else shown(name), *cells])
    if not rows:
        return f'<p class="empty">{ui.say("compare.same")}</p>'
    return f"<h2>{ui.say('compare.differs')}</h2>" + shows.table(
        ["", *(shown(name_of(view)) for view, _ in chosen)], rows
    )


def _config(ui: Ui, view: JobView) -> dict[str, Any]:
    try:
        return tomllib.loads((watch.folder_of(ui, view) / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not begun yet: what it was submitted with
        text = watch.watch(ui.place).queue.config(view.id) if isinstance(view.id, int) else ""
        return tomllib.loads(text)


def _flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _short(value: Any) -> str:
    text = (" · ".join(map(str, value)) or "–") if isinstance(value, list) else str(value)
    return text if len(text) <= 300 else text[:299] + "…"
