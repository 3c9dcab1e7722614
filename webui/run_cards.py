"""Render a job or run as HTML: its state, figures, buttons and checks. Shared by the pages that show runs.

Text from files and people is escaped here, once, where it becomes HTML.
"""

import json
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lora_fp8.common.messages import restore
from lora_fp8.common.numbers import format_bytes
from lora_fp8.jobs import BESIDE, ENDED, JobView, Sentence, run_events

from .context import Ui
from .sanitize import escape

BUTTONS = {
    "queued": ("up", "down", "sooner", "later", "cancel"),
    "starting": ("stop", "force"),
    "running": ("stop", "save", "preview", "force"),
    "stopping": ("force", "kill"),
    "stopped": ("resume", "rerun", "edit", "delete"),
    "cancelled": ("resume", "rerun", "edit", "delete"),
    "failed": ("resume", "rerun", "edit", "delete"),
    "lost": ("resume", "rerun", "edit", "delete"),
    "done": ("rerun", "edit", "delete"),
}
"""Buttons of a job in each state; where there is a most likely one, it comes first."""
OF_JOBS_ONLY = {"up", "down", "sooner", "later", "cancel", "rerun"}
"""Buttons of queued jobs only: the queue has no config of a run that was started in a shell."""
OF_SHELLS_ONLY = {"kill"}
"""Buttons of runs in a shell only: the worker itself kills a job that ignores SIGTERM."""
DANGEROUS = {"force", "kill", "cancel", "delete"}


def translate_sentence(ui: Ui, sentence: Sentence) -> str:
    """Translate the reason for a job's state to plain text."""
    values: dict[str, Any] = {}
    for name, value in sentence.args.items():
        if isinstance(value, dict):
            value = translate_sentence(ui, Sentence(**value))
        elif name == "stage":
            value = translate_stage(ui, str(value))
        elif name == "message":
            value = ui.translate(value if isinstance(value, str) else str(value))
        values[name] = value
    return ui.say(f"job.{sentence.key}", **values)


def render_sentence(ui: Ui, view: JobView) -> str:
    """Render the reason as a paragraph, with how to continue; "" where the figures or the state say it already."""
    if view.sentence.key in ("training", "queued"):
        return ""
    wrong = " wrong" if view.state in ("failed", "lost") else ""
    paragraphs = f'<p class="said{wrong}">{escape(translate_sentence(ui, view.sentence))}</p>'
    if view.sentence.key == "input" and view.kind == "train":
        paragraphs += f'<p class="dim">{ui.say("runs.mend")}</p>'
    elif view.state in ("failed", "lost", "stopped") and view.resumable:
        paragraphs += f'<p class="dim">{ui.say("runs.goes_on", step=view.saved_step)}</p>'
    return paragraphs


def render_log_tail(view: JobView, tail: Sequence[str]) -> str:
    """Render the end of a log that has an error or an answer, without the reason that is shown above it."""
    # The answer of these commands is in the log only.
    result = view.command[:1] in (("verify",), ("lr-find",)) and view.state == "done"
    if not (result or view.state in ("failed", "lost")) or not tail:
        return ""
    reason = {line.strip() for line in str(view.sentence.args.get("message", "")).split("\n")}
    lines = list(tail)
    while lines and lines[-1].strip() in reason:
        lines.pop()
    # What was given is wrong: nothing that was printed before says more.
    if not lines or (len(lines) < len(tail) and view.sentence.key == "input"):
        return ""
    return f'<pre class="tail" tabindex="0">{escape(chr(10).join(lines))}</pre>'


def translate_stage(ui: Ui, name: str) -> str:
    """Translate a stage of training. A stage without a translation keeps the engine's name."""
    return ui.say(f"stage.{name}") if name in STAGES else ui.translate(name)


STAGES = (
    "start",
    "download",
    "cache",
    "memory",
    "load",
    "sensitivity",
    "preflight",
    "train",
    "export",
    "verify",
    "running",
)
PARTS = {
    "download": ("start", "download"),
    "cache": ("cache",),
    "load": ("memory", "load", "sensitivity", "preflight"),
    "train": ("train",),
    "verify": ("export", "verify"),
}
"""The parts of a training that a card shows, and the stages of each."""
COUNTED = ("images", "cache", "load", "preflight", "verify", "previews", "validation")
"""What a run counts beside its steps, for which there is a word."""
SLOW_STEP_S = 20
"""Seconds after which the time since the last step is shown."""
ALIVE = ("starting", "running", "stopping")


def render_state(ui: Ui, view: JobView) -> str:
    """Render the state as a coloured label."""
    return f'<span class="state {escape(view.state)}">{ui.say(f"state.{view.state}")}</span>'


def render_parts(ui: Ui, view: JobView) -> str:
    """Render the parts of a training in their order, with the present one marked; "" if it is not running."""
    at = [part for part, stages in PARTS.items() if view.stage in stages]
    if view.kind != "train" or view.state not in ALIVE or not at:
        return ""
    made, kind = "", "past"
    for part in PARTS:
        is_now = part == at[0]
        here = ' aria-current="step"' if is_now else ""
        made += f'<li class="{"now" if is_now else kind}"{here}>{ui.say(f"runs.part.{part}")}</li>'
        kind = "next" if is_now else kind
    return f'<ol class="parts" aria-label="{escape(ui.say("runs.parts"))}">{made}</ol>'


def render_progress(view: JobView) -> str:
    """Render a progress bar, of the training or of its present stage; "" before there is one."""
    share = _compute_share(view)
    if share is None:
        return ""
    kind = "" if view.state in ALIVE else " done" if view.state == "done" else " idle"
    return f'<div class="bar{kind}"><i style="width:{min(100.0, 100 * share):.1f}%"></i></div>'


def _compute_share(view: JobView) -> float | None:
    """Return how much of the download, of what a stage counts or of the steps is done; None if that is unknown."""
    if view.download:
        return float(view.download["bytes"] / max(1, view.download["total"]))
    is_stage = view.kind == "train" and view.state in ALIVE and view.stage != "train"
    if is_stage:
        return float(view.work["done"] / max(1, view.work["total"])) if view.work else None
    return view.step / view.steps if view.step is not None and view.steps else None


def render_figures(ui: Ui, view: JobView) -> str:
    """Render step or bytes, loss, times, GPU, place in the queue and priority, as far as each is known."""
    figures = []
    if view.download:
        arrived, total, speed = (format_bytes(int(view.download[name])) for name in ("bytes", "total", "speed"))
        moved = "runs.uploaded" if view.command[:1] == ("push",) else "runs.downloaded"
        figures.append((ui.say(moved), f"{arrived} / {total}"))
        figures.append((ui.say("runs.speed"), f"{speed}/s"))
    elif view.step is not None and view.steps:
        counted = "runs.step" if view.kind == "train" else "runs.pictures"
        figures.append((ui.say(counted), f"{view.step} / {view.steps}"))
    figures += _list_work(ui, view)
    if view.loss is not None:
        figures.append((ui.say("runs.loss"), f"{view.loss:.4f}"))
    if view.eta_s is not None:
        figures.append((ui.say("runs.left"), format_duration(ui, view.eta_s)))
    if view.attempts > 1:
        figures.append((ui.say("runs.attempt"), str(view.attempts)))
    if view.assigned and view.assigned not in ("cpu", BESIDE):
        figures.append(("GPU", view.assigned))
    if view.place:
        figures.append((ui.say("runs.place"), str(view.place)))
    if view.priority and view.state not in ENDED:
        figures.append((ui.say("runs.priority"), str(view.priority)))
    spans = "".join(f"<span><span>{name}</span> <b>{escape(value)}</b></span>" for name, value in figures)
    return f'<div class="figures">{spans}</div>' if figures else ""


def _list_work(ui: Ui, view: JobView) -> list[tuple[str, str]]:
    """List what a stage has counted, and how long it has taken: a sign of life where nothing is counted."""
    figures = []
    if view.work and view.work["stage"] in COUNTED:
        figures.append((ui.say(f"runs.work.{view.work['stage']}"), f"{view.work['done']} / {view.work['total']}"))
        check = view.work.get("check")
        if check in CHECKS:
            figures.append((ui.say("runs.work.check"), ui.say(f"verify.{check}")))
    if view.state in ALIVE and view.since:
        taken = max(0.0, time.time() - view.since)
        is_between = view.stage == "train" and view.loss is not None
        if not is_between or (taken > SLOW_STEP_S and not view.work):
            label = ui.say("runs.since_step" if is_between else "runs.taken")
            figures.append((label, format_duration(ui, taken)))
    return figures


def render_buttons(ui: Ui, view: JobView, without: Sequence[str] = (), links: str = "") -> str:
    """Render the buttons of a job in its present state, after `links`."""
    of_job = isinstance(view.id, int)
    names = [name for name in BUTTONS.get(view.state, ()) if name not in (OF_SHELLS_ONLY if of_job else OF_JOBS_ONLY)]
    if view.state == "running" and view.stage != "train":
        names = [name for name in names if name not in ("save", "preview")]
    names = [name for name in names if name not in without]
    if view.kind != "train":
        names = [name for name in names if name not in ("save", "preview", "edit")]
    if not view.resumable:
        names = [name for name in names if name != "resume" or view.state == "cancelled"]
    made = links
    for number, name in enumerate(names):
        kind = "danger" if name in DANGEROUS else "main" if number == 0 and name == "resume" else ""
        word = "again" if name == "resume" and not view.resumable else name  # it has not started
        word = "repeat" if name == "rerun" and view.kind != "train" else word
        word = "halt" if name == "stop" and view.kind != "train" else word
        made += render_button(name, ui.say(f"runs.do.{word}"), kind, id=str(view.id))
    return f'<div class="buttons">{made}</div>' if made else ""


def render_button(do: str, label: str, kind: str = "", **data: str) -> str:
    """Render a button; `live_panel.read_click` returns its data."""
    values = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
    return f'<button type="button" class="{kind}" data-do="{do}"{values}>{escape(label)}</button>'


def render_card(ui: Ui, view: JobView, base: str, tail: Sequence[str], links: str = "", image: str = "") -> str:
    """Render a job for the list of all jobs.

    Args:
        base: title of the base model's family; "" if unknown.
        tail: last lines of its log, shown if it failed.
        links: HTML of links to its files.
        image: HTML of its newest preview.
    """
    address = ui.make_link("run", run=str(view.id))
    when = format_time(view.ended or view.launched or view.created)
    where = ui.say("runs.shell") if isinstance(view.id, str) else f"#{view.id}"
    about = " · ".join(filter(None, [escape(where), escape(base), when]))
    if view.command[:1] == ("caption",):
        address = ui.make_link("dataset", folder=view.command[1])
    name = escape(translate_title(ui, view))
    name = f'<a href="{escape(address)}">{name}</a>' if view.kind == "train" or "/dataset" in address else name
    return (
        f'<section class="card {escape(view.state)}" data-job="{escape(view.id)}">{image}'
        f'<div class="row"><h2>{name}</h2>'
        f"{render_state(ui, view)}"
        f'<span class="dim">{about}</span></div>{render_sentence(ui, view)}'
        f"{render_parts(ui, view)}{render_progress(view)}{render_figures(ui, view)}{render_log_tail(view, tail)}"
        f"{render_buttons(ui, view, links=links)}</section>"
    )


def translate_title(ui: Ui, view: JobView) -> str:
    """Return a job's title: a training's name, or what a command does."""
    command, _, rest = view.name.partition(" ")
    known = rest and view.command[:1] == (command,)
    return ui.say(f"runs.command.{command}", rest=rest) if known else view.name


def render_empty(ui: Ui, text: str, about: str = "") -> str:
    """Render what to do where there are no runs yet, with a button to New training."""
    more = f"<p>{escape(about)}</p>" if about else ""
    button = f'<a class="button main" href="{escape(ui.make_link("new"))}">{ui.say("runs.begin")}</a>'
    return f'<div class="empty"><p class="title">{escape(text)}</p>{more}<div class="buttons">{button}</div></div>'


def render_table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table. The cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def render_checks(ui: Ui, checks: Sequence[Any]) -> str:
    """Render the checks of verify: passed or not, name, and detail."""
    cells = []
    for check in checks:
        if not isinstance(check, dict):  # verify.json of another program, or damaged
            continue
        kind = str(check.get("name", ""))
        mark = '<span class="yes">✓</span>' if check.get("ok") else '<span class="wrong">✗</span>'
        if not check.get("judged", True):
            mark = '<span class="dim">·</span>'  # for information, not judged
        word = ui.say(f"verify.{kind}") if kind in CHECKS else kind
        detail = ui.translate(check.get("detail", ""))
        cells.append((mark, escape(word), f'<span class="dim">{escape(detail)}</span>'))
    return render_table(("", ui.say("run.check"), ui.say("run.found")), cells)


CHECKS = (
    *("file", "metadata", "hash", "pairs", "finite", "trained", "load", "delta", "prediction", "preview", "effect"),
    *("text", "text effect"),
    *("plain prediction", "plain preview", "merged, unscaled e4m3", "merged, row-scaled e4m3"),
)
"""Names of checks that have a translation."""


def format_duration(ui: Ui, seconds: float) -> str:
    """Format seconds as "12 s", "3 min" or "2 h 5 min"."""
    if seconds < 90:
        return ui.say("time.seconds", seconds=round(seconds))
    minutes = round(seconds / 60)
    if minutes < 60:
        return ui.say("time.minutes", minutes=minutes)
    return ui.say("time.hours", hours=minutes // 60, minutes=minutes % 60)


def format_time(seconds: float) -> str:
    """Format a time in this computer's time zone, without the date if it is today; "" if it is none of a run."""
    if not 0 < seconds < run_events.LATEST:  # another program may have written it
        return ""
    then = datetime.fromtimestamp(seconds)
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it is missing or incomplete. Messages are restored."""
    try:
        content = json.loads(path.read_bytes())
        return {key: restore(value) for key, value in content.items()} if isinstance(content, dict) else content
    except (OSError, ValueError):
        return None
