"""A run in words and HTML: what the pages of runs have in common.

What comes from files and people is escaped here, once, at the place where it becomes HTML.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lora_fp8.jobs import JobView, Sentence
from lora_fp8.wording import digits

from . import words
from .context import Ui
from .safe import shown

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
"""What can be asked of a job in each state; the first of most is what a person most likely wants."""
OF_JOBS_ONLY = {"up", "down", "sooner", "later", "cancel", "rerun"}
"""Of a run that was started in a shell the queue has no config to submit again."""
OF_SHELLS_ONLY = {"kill"}
"""Of a job the worker sees to it that what ignores SIGTERM is killed."""
DANGEROUS = {"force", "kill", "cancel", "delete"}


def sentence(ui: Ui, told: Sentence) -> str:
    """The reason or the news of a job in the page's language; plain text."""
    values: dict[str, Any] = {}
    for name, value in told.args.items():
        if isinstance(value, dict):
            value = sentence(ui, Sentence(**value))
        elif name == "stage":
            value = stage(ui, str(value))
        elif name == "message":
            value = ui.tell(str(value))
        values[name] = value
    return ui.say(f"job.{told.key}", **values)


def said(ui: Ui, view: JobView) -> str:
    """The sentence as a paragraph, and how to go on; what the figures or the state's word say is not said twice."""
    if view.sentence.key in ("training", "queued"):
        return ""
    wrong = " wrong" if view.state in ("failed", "lost") else ""
    told = f'<p class="said{wrong}">{shown(sentence(ui, view.sentence))}</p>'
    if view.sentence.key == "input" and view.kind == "train":
        told += f'<p class="dim">{ui.say("runs.mend")}</p>'
    elif view.state in ("failed", "lost", "stopped") and view.resumable:
        told += f'<p class="dim">{ui.say("runs.goes_on", step=view.saved_step)}</p>'
    return told


def last_lines(view: JobView, tail: Sequence[str]) -> str:
    """The end of the log where a job failed, or has its answer there; "" where it only says the reason again."""
    result = view.command[:1] == ("verify",) and view.state == "done"  # stands in its log only
    if not (result or view.state in ("failed", "lost")) or not tail:
        return ""
    reason = {line.strip() for line in str(view.sentence.args.get("message", "")).split("\n")}
    if all(line.strip() in reason for line in tail):
        return ""
    return f'<pre class="tail" tabindex="0">{shown(chr(10).join(tail))}</pre>'


def stage(ui: Ui, name: str) -> str:
    """A stage of the trainer; one that the page has no word for stays as the engine calls it."""
    return ui.say(f"stage.{name}") if name in STAGES else name


STAGES = ("start", "cache", "load", "sensitivity", "preflight", "train", "export", "verify", "running")


def state(ui: Ui, view: JobView) -> str:
    """The state as a coloured word."""
    return f'<span class="state {shown(view.state)}">{ui.say(f"state.{view.state}")}</span>'


def bar(view: JobView) -> str:
    """How far it is; "" before the first step is known."""
    if view.step is None or not view.steps:
        return ""
    share = min(100.0, 100 * view.step / view.steps)
    kind = {"running": "", "stopping": "", "done": " done"}.get(view.state, " idle")
    return f'<div class="bar{kind}"><i style="width:{share:.1f}%"></i></div>'


def figures(ui: Ui, view: JobView) -> str:
    """Step, loss, time left."""
    found = []
    if view.step is not None and view.steps:
        counted = "runs.step" if view.kind == "train" else "runs.pictures"
        found.append((ui.say(counted), f"{view.step} / {view.steps}"))
    if view.loss is not None:
        found.append((ui.say("runs.loss"), f"{view.loss:.4f}"))
    if view.eta_s is not None:
        found.append((ui.say("runs.left"), duration(ui, view.eta_s)))
    if view.attempts > 1:
        found.append((ui.say("runs.attempt"), str(view.attempts)))
    if view.assigned and view.assigned != "cpu":
        found.append(("GPU", view.assigned))
    if view.place:
        found.append((ui.say("runs.place"), str(view.place)))
    if view.priority:
        found.append((ui.say("runs.priority"), str(view.priority)))
    shown_ = "".join(f"<span><span>{name}</span> <b>{shown(value)}</b></span>" for name, value in found)
    return f'<div class="figures">{shown_}</div>' if found else ""


def buttons(ui: Ui, view: JobView, without: Sequence[str] = (), links: str = "") -> str:
    """What can be asked of it now, behind `links`."""
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
        kind = "danger" if name in DANGEROUS else "main" if number == 0 and name in ("stop", "resume") else ""
        word = "again" if name == "resume" and not view.resumable else name  # it has not begun
        word = "repeat" if name == "rerun" and view.kind != "train" else word
        word = "halt" if name == "stop" and view.kind != "train" else word
        made += button(name, ui.say(f"runs.do.{word}"), kind, id=str(view.id))
    return f'<div class="buttons">{made}</div>' if made else ""


def button(do: str, label: str, kind: str = "", **data: str) -> str:
    """A button that `live.clicked` tells of."""
    values = "".join(f' data-{name}="{shown(value)}"' for name, value in data.items())
    return f'<button type="button" class="{kind}" data-do="{do}"{values}>{shown(label)}</button>'


def card(ui: Ui, view: JobView, base: str, tail: Sequence[str], links: str = "") -> str:
    """A job on the page of all jobs.

    Args:
        base: the base model's family for people; "" where it is not known.
        tail: the last lines of its log, shown where it failed.
        links: HTML of links to its files.
    """
    address = ui.link("run", run=str(view.id))
    when = moment(view.ended or view.launched or view.created)
    where = ui.say("runs.shell") if isinstance(view.id, str) else f"#{view.id}"
    about = " · ".join(filter(None, [shown(where), shown(base), when]))
    if view.command[:1] == ("caption",):
        address = ui.link("dataset", folder=view.command[1])
    name = shown(title(ui, view))
    name = f'<a href="{shown(address)}">{name}</a>' if view.kind == "train" or "/dataset" in address else name
    return (
        f'<section class="card {shown(view.state)}" data-job="{shown(view.id)}"><div class="row"><h2>{name}</h2>'
        f"{state(ui, view)}"
        f'<span class="dim">{about}</span></div>{said(ui, view)}'
        f"{bar(view)}{figures(ui, view)}{last_lines(view, tail)}{buttons(ui, view, links=links)}</section>"
    )


def title(ui: Ui, view: JobView) -> str:
    """What a job is called: a training by its name, a command by what it does."""
    command, _, rest = view.name.partition(" ")
    known = rest and view.command[:1] == (command,)
    return ui.say(f"runs.command.{command}", rest=rest) if known else view.name


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def checks(ui: Ui, found: Sequence[dict[str, Any]]) -> str:
    """What verify has looked at: passed or not, what, and what it found."""
    cells = []
    for check in found:
        kind = str(check.get("name", ""))
        mark = '<span class="yes">✓</span>' if check.get("ok") else '<span class="wrong">✗</span>'
        if not check.get("judged", True):
            mark = '<span class="dim">·</span>'  # a figure that is told and not judged
        word = ui.say(f"verify.{kind}") if kind in CHECKS else kind
        told = words.tell_joined(ui.language, str(check.get("detail", "")))
        cells.append((mark, shown(word), f'<span class="dim">{shown(told)}</span>'))
    return table(("", ui.say("run.check"), ui.say("run.found")), cells)


CHECKS = (
    *("file", "metadata", "hash", "pairs", "finite", "trained", "load", "delta", "prediction", "preview", "effect"),
    *("text", "text effect"),
    *("plain prediction", "plain preview", "merged, unscaled e4m3", "merged, row-scaled e4m3"),
)
"""Names of verify's checks that the page has words for."""


def duration(ui: Ui, seconds: float) -> str:
    """12 s, 3 min, 2 h 5 min."""
    if seconds < 90:
        return ui.say("time.seconds", seconds=round(seconds))
    minutes = round(seconds / 60)
    if minutes < 60:
        return ui.say("time.minutes", minutes=minutes)
    return ui.say("time.hours", hours=minutes // 60, minutes=minutes % 60)


def moment(seconds: float) -> str:
    """When, by this computer's clock; "" for never."""
    if not seconds:
        return ""
    then = datetime.fromtimestamp(seconds)
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def size(number: float) -> str:
    """1.3 MiB, as estimates and drivers count memory."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{digits(number)} TiB"


def read_json(path: Path) -> Any:
    """A JSON file, or None where it is not there or not whole."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
