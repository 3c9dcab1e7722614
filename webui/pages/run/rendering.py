"""The parts of a run as HTML: header, curves, previews, files, log, warnings and settings."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_fp8.common.chart import Line, Mark, render_chart
from lora_fp8.common.numbers import format_bytes, format_count, is_finite_number
from lora_fp8.jobs import JobView
from lora_fp8.run.run_log import RunLog, smooth, thin

from ... import run_cards, run_monitor
from ...context import Ui
from ...sanitize import escape
from .. import runs

SIDE = 320
"""Pixels of a preview in the grid. It is displayed at half the size, so that it is sharp on dense screens."""
PLACES = ("kohya", "comfy", "diffusers")
"""Layouts of LoRA files for which the page says where programs look for them."""
ROWS = 60
"""Steps in the grid of previews, newest first."""


def render_missing(ui: Ui, problem: str) -> str:
    """Render a message in place of a run."""
    back = f'<a href="{escape(ui.make_link(""))}">{ui.say("page.runs")}</a>'
    return f'<p class="empty">{escape(ui.translate(problem))} · {back}</p>'


def render_header(ui: Ui, view: JobView, log: RunLog) -> str:
    """Render name, state, figures, buttons, base model, data and device."""
    facts = log.facts
    about = [escape(run_monitor.get_base_title(view.folder))]
    if images := facts.data.get("images"):
        about.append(ui.say("run.images", count=escape(images)))
    if trainable := facts.model.get("trainable"):
        about.append(ui.say("run.trainable", count=format_count(trainable) if is_finite_number(trainable) else "?"))
    if device := facts.start.get("device"):
        about.append(escape("CPU" if device == "cpu" else device))
    links = runs.render_downloads(ui, view)
    if facts.checkpoints:
        links += f'<a class="button" href="{escape(ui.make_link("draw", run=str(view.id)))}">{ui.say("page.draw")}</a>'
    if facts.start and view.folder is not None:
        about_it, address = escape(ui.say("run.report_about")), escape(ui.make_report_link(view.folder))
        links += f'<a class="button" title="{about_it}" href="{address}" download>{ui.say("run.report")}</a>'
    # Deleting asks for the run's name, which is typed on the page of all runs.
    buttons = run_cards.render_buttons(ui, view, without=["delete"], links=links)
    log_ = run_cards.render_log_tail(view, run_monitor.read_log_tail(view))
    return (
        f'<section class="card"><div class="row"><h2>{escape(view.name)}</h2>{run_cards.render_state(ui, view)}'
        f'<span class="dim">{" · ".join(filter(None, about))}</span></div>'
        f"{run_cards.render_sentence(ui, view)}{run_cards.render_parts(ui, view)}{run_cards.render_progress(view)}"
        f"{run_cards.render_figures(ui, view)}"
        f"{log_}{buttons}</section>"
    )


def render_curves(ui: Ui, log: RunLog, amount: float, logarithmic: bool, is_over: bool = False) -> str:
    """Render all charts of a run. The result is cached until the log changes."""
    return _render_curves(ui, log, log.version, amount, logarithmic, is_over)


def render_loss(ui: Ui, log: RunLog, amount: float, logarithmic: bool, is_over: bool = False) -> str:
    """Render the loss and the held-out loss, and where that was lowest and since when it has risen."""
    charts = _render_losses(ui, log, log.version, amount, logarithmic, is_over)
    return f'<div class="charts">{"".join(charts)}</div>{_render_verdict(ui, log)}'


def _render_verdict(ui: Ui, log: RunLog) -> str:
    """Render the sentence about the held-out loss, and why training ended before its steps."""
    verdict, best = log.facts.verdict, log.find_best()
    lines = [str(event["text"]) for event in (verdict, log.facts.patience) if isinstance(event.get("text"), str)]
    text = " ".join(map(ui.translate, lines))
    if not verdict.get("text") and best:  # of an earlier version
        text = f"{ui.say('run.best', step=best[0], loss=f'{best[1]:.4f}')} {text}".strip()
    risen = " risen" if verdict.get("risen_since") is not None else ""
    return f'<p class="verdict{risen or " dim"}">{escape(text)}</p>' if text else ""


@lru_cache(maxsize=64)
def _render_curves(ui: Ui, log: RunLog, version: int, amount: float, logarithmic: bool, is_over: bool) -> str:
    points = {name: groups.list_points() for name, groups in log.measures.items()}
    step = ui.say("runs.step")
    none = ui.say("run.no_steps")
    made = [*_render_losses(ui, log, version, amount, logarithmic, is_over)]
    if not points["loss"]:
        return f'<div class="charts">{made[0]}</div>'
    for name, colour, scale in (("lr", 2, False), ("grad_norm", 1, logarithmic), ("images_per_s", 3, False)):
        curve = [Line("", thin(points[name]), colour)]
        made.append(render_chart(ui.say(f"run.{name}"), curve, empty=none, log=scale, x_label=step))
    for name in ("max_key_norm", "vram_gb"):  # only with adapter.scale_weight_norms, and only on a GPU
        if any(value > 0 for _, value in points[name]):
            curve = [Line("", thin(points[name]), 0)]
            made.append(render_chart(ui.say(f"run.{name}"), curve, empty=none, x_label=step))
    return f'<div class="charts">{"".join(made)}</div>'


@lru_cache(maxsize=64)
def _render_losses(
    ui: Ui, log: RunLog, version: int, amount: float, logarithmic: bool, is_over: bool
) -> tuple[str, ...]:
    points = log.measures["loss"].list_points()
    step = ui.say("runs.step")
    none = ui.say("run.never_stepped" if is_over else "run.no_steps")
    loss, smoothed = thin(points), thin(smooth(points, amount))
    raw = Line(ui.say("run.raw"), loss, 0, faint=amount > 0)
    lines = [raw, Line(ui.say("run.smoothed"), smoothed, 0)] if amount > 0 else [raw]
    made = [_render_wide(render_chart(ui.say("run.loss"), lines, empty=none, log=logarithmic, x_label=step))]
    if log.validation:
        bands = [
            Line(ui.translate(band) if band else ui.say("run.all_bands"), groups.list_points(), number)
            for number, (band, groups) in enumerate(sorted(log.validation.items()))
        ]
        best = log.find_best()
        mark = Mark(best[0], ui.say("run.best_step", step=best[0])) if best else None
        title = ui.say("run.validation")
        made.append(_render_wide(render_chart(title, bands, empty=none, log=logarithmic, x_label=step, mark=mark)))
    scores = [
        Line(ui.say(f"run.{name}"), groups.list_points(), number)
        for number, (name, groups) in enumerate(log.scores.items())
        if groups.list_points()
    ]
    if scores:
        made.append(_render_wide(render_chart(ui.say("run.scores"), scores, empty=none, x_label=step)))
    return tuple(made)


def _render_wide(figure: str) -> str:
    return f'<div class="wide">{figure}</div>'


def render_grid(ui: Ui, view: JobView, log: RunLog, moving: bool = True) -> str:
    """Render previews: a row per step, newest first, and a column per prompt. Clips play if `moving`."""
    previews = log.facts.previews
    if not previews:
        return f'<p class="empty">{ui.say("run.no_previews")}</p>'
    prompts = list_prompts(log)  # of several times, if they were changed while training
    head = "".join(f"<th>{escape(text)}</th>" for text in prompts)
    rows = ""
    for step in sorted(previews, reverse=True)[:ROWS]:
        name = format_step(ui, step)
        rows += f"<tr><th>{name}</th>"
        drawn = list_pictures(ui, view, previews[step])
        clips = list_pictures(ui, view, previews[step], "clips") if moving else []
        for number, prompt in enumerate(prompts):
            at = find_prompt(previews[step], prompts, number)
            if at is None or at >= len(drawn):
                rows += "<td></td>"
                continue
            path, text = drawn[at], escape(f"{name}: {prompt}")
            rows += (
                f'<td><button type="button" data-do="show" data-step="{step}" data-prompt="{number}" title="{text}">'
                f"{render_picture(ui, path, clips[at] if at < len(clips) else None, text)}</button></td>"
            )
        rows += "</tr>"
    return (
        f'<div class="scroll"><table class="pictures"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def render_picture(ui: Ui, still: Path, clip: Path | None, text: str) -> str:
    """Render a preview in the grid. `text` is HTML already. A clip is still for people who prefer less motion."""
    source = escape(ui.make_picture_link(still, SIDE))
    if clip is None:
        return f'<img src="{source}" alt="{text}" loading="lazy">'
    return (
        f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{source}">'
        f'<img src="{escape(ui.make_picture_link(clip, SIDE, moving=True))}" alt="{text}" loading="lazy"></picture>'
    )


def format_step(ui: Ui, step: int) -> str:
    """Name the step of a preview; 0 is the base model."""
    return ui.say("run.at", step=step) if step else ui.say("run.base")


def list_prompts(log: RunLog) -> list[str]:
    """List the prompts of all previews, those of the newest first: they may be changed while a run trains."""
    prompts: list[str] = []
    for step in sorted(log.facts.previews, reverse=True):
        texts = log.facts.previews[step].get("prompts")
        known = set(prompts)  # one prompt may be drawn twice, with two seeds
        prompts += [str(text) for text in texts if str(text) not in known] if isinstance(texts, list) else []
    return prompts


def find_prompt(event: dict[str, Any], prompts: list[str], number: int) -> int | None:
    """Return which of an event's images shows the prompt of this number; None if none does."""
    texts = event.get("prompts")
    texts = [str(text) for text in texts] if isinstance(texts, list) else []
    if number >= len(prompts) or prompts[number] not in texts:
        return None
    return number if texts[number : number + 1] == [prompts[number]] else texts.index(prompts[number])


def choose_prompt(log: RunLog, prompts: list[str], steps: tuple[int | None, int | None]) -> int:
    """Return the number of the first prompt that was drawn at both steps; 0 if there is none."""
    drawn = [log.facts.previews.get(step, {}) for step in steps if step is not None]
    numbers = range(len(prompts))
    return next((n for n in numbers if all(find_prompt(event, prompts, n) is not None for event in drawn)), 0)


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
    ui: Ui, view: JobView, log: RunLog, steps: tuple[int | None, int | None], prompt: int | None, moving: bool = True
) -> str:
    """Render previews of a prompt at two steps on top of each other with a slider, and links to save their clips."""
    sides, saved = [], []
    for step in dict.fromkeys(steps):  # a single image where there is nothing to compare yet
        event = None if step is None else log.facts.previews.get(int(step))
        paths, clips = (list_pictures(ui, view, event, what) if event else [] for what in ("images", "clips"))
        number = find_prompt(event, list_prompts(log), int(prompt or 0)) if event else None
        if step is None or event is None:
            return f'<p class="empty">{ui.say("run.choose_two")}</p>'
        if number is None or number >= len(paths):
            return f'<p class="empty">{escape(ui.say("run.no_such_prompt", step=format_step(ui, step)))}</p>'
        name, clip = format_step(ui, step), clips[number] if number < len(clips) else None
        file = clip if moving and clip is not None else paths[number]
        sides.append((name, ui.make_picture_link(file, 1024, moving and clip is not None)))
        if clip is not None:
            link = f'<a class="button" href="{escape(ui.make_download_link(clip))}" download>'
            saved.append(f"{link}{ui.say('run.download')}: {escape(name)}</a>")
    images = "".join(f'<img src="{escape(address)}" alt="{escape(name)}">' for name, address in sides)
    buttons = f'<div class="buttons">{"".join(saved)}</div>' if saved else ""
    if len(sides) == 1:
        name = f'<div class="names"><span>{escape(sides[0][0])}</span></div>'
        return f'<div class="ab one">{images}{name}</div>{buttons}'
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
    if parts:
        parts.append(f'<p class="dim">{ui.say("run.folder")} <code>{escape(folder / "export")}</code></p>')
    else:
        parts = [f'<p class="empty">{ui.say("run.no_files")}</p>']
    numbers = (path.name.removeprefix("step-") for path in sorted(folder.glob("checkpoints/step-*")))
    saved = [str(int(number)) for number in numbers if number.isdecimal()]
    if saved:
        parts.append(f'<p class="dim">{ui.say("run.saved", steps=", ".join(saved))}</p>')
    return f'<div class="cards">{"".join(parts)}</div>'


def render_file(ui: Ui, path: Path, name: Path, report: Any) -> str:
    """Render a LoRA file with its verification."""
    about = format_bytes(path.stat().st_size) if path.exists() else ""
    if path.stem.rpartition("_")[0].endswith("-best"):
        about += f" · {escape(ui.say('run.best_file'))}"
    verdict, rows = f'<span class="dim">{ui.say("run.unverified")}</span>', ""
    if isinstance(report, dict) and isinstance(report.get("checks"), list):
        verdict = (
            f'<b class="yes">✓ {ui.say("run.verified")}</b>'
            if report.get("ok") is True
            else f'<b class="wrong">✗ {ui.say("run.not_verified")}</b>'
        )
        is_good = report.get("ok") is True
        checks = run_cards.render_checks(ui, report["checks"])
        rows = (
            f"<details><summary>{ui.say('run.verified_how')}</summary>{checks}</details>"
            if is_good
            else f'<p class="wrong">{ui.say("run.verify_asks")}</p>{checks}'
        )
    link = f'<a class="button" href="{escape(ui.make_download_link(path))}" download>{ui.say("run.download")}</a>'
    return (
        f'<section class="card"><div class="row"><h3>{escape(name)}</h3><span class="dim">{about}</span>{verdict}'
        f"{link}</div>{_render_places(ui, name)}{rows}</section>"
    )


def _render_places(ui: Ui, name: Path) -> str:
    """Render where programs look for a LoRA file, by the layout at the end of its name; "" for another name."""
    layout = name.stem.rpartition("_")[2]
    return (
        f'<p class="dim">{escape(ui.say(f"run.place.{layout}", file=name.name, name=name.stem))}</p>'
        if layout in PLACES
        else ""
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
        for when in [run_cards.format_time(float(warning["t"])) if is_finite_number(warning.get("t")) else ""]
    ]
    if not rows:
        return f'<p class="empty">{ui.say("run.no_warnings")}</p>'
    return run_cards.render_table((ui.say("run.when"), ui.say("run.what")), rows)


def render_config(ui: Ui, view: JobView) -> str:
    """Render the resolved settings with a download link."""
    path = run_monitor.get_run_folder(ui, view) / "config.toml"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        link = f'<a class="button" href="{escape(ui.make_download_link(path))}" download>{ui.say("run.download")}</a>'
    except OSError:  # the job has not started: its submitted config is what it will run with
        text = run_monitor.get_monitor(ui.place).queue.read_config(view.id) if isinstance(view.id, int) else ""
        link = ""
    return f'<div class="buttons">{link}</div><pre tabindex="0">{escape(text)}</pre>'
