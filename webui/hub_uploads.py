"""Uploads of a run's LoRA to the Hugging Face Hub: jobs of the queue that run `lora-fp8 push` beside the trainings."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_fp8 import jobs
from lora_fp8.common.messages import restore
from lora_fp8.jobs import JobView
from lora_fp8.tools import hub

from . import run_cards, run_monitor
from .context import Ui
from .sanitize import escape

COMMAND = "push"
TEXTS = ("title", "trigger", "description", "license")
"""Options of the command that are texts."""


def start(ui: Ui, folder: Path, repo: str, texts: Mapping[str, str], *, public: bool, update: bool) -> hub.Target:
    """Check token, rights and name, and queue the upload of a run.

    Args:
        folder: of the run.
        repo: OWNER/NAME, or NAME.
        texts: of the model card, by option; empty ones are those of the file.
        public: make a new repository public.
        update: update a repository that exists.

    Raises:
        UserError: everything that is missing; nothing was sent.
    """
    target = hub.check(repo, public=public, update=update)
    options = [f"--{name}={text.strip()}" for name, text in texts.items() if text.strip()]
    options += [*(["--public"] if public else []), *(["--update"] if update else []), "--json"]
    queue = run_monitor.get_monitor(ui.place).queue
    scheduling = jobs.Scheduling(gpus=jobs.BESIDE, max_attempts=1)
    queue.submit_command(
        COMMAND, [str(folder), target.repo, *options], name=f"{COMMAND} {target.repo}", scheduling=scheduling
    )
    run_monitor.get_monitor(ui.place).views.invalidate()
    jobs.ensure_worker(queue.home)
    return target


def find_newest(ui: Ui, folder: Path) -> JobView | None:
    """Return the newest upload of a run."""
    return run_monitor.find_newest_command(ui.place, COMMAND, str(folder))


def read_progress(view: JobView, tail: list[str]) -> tuple[JobView, list[str], str]:
    """Return an upload with its progress, the lines of its log that are no events, and the address at the end."""
    events, lines = [], []
    for line in tail:
        event: Any = None
        with contextlib.suppress(ValueError):
            event = restore(json.loads(line))
        if isinstance(event, dict):
            events.append(event)
        else:
            lines.append(line)
    sent = next((event for event in reversed(events) if event.get("event") == "upload"), None)
    address = next((str(event.get("address")) for event in events if event.get("event") == "done"), "")
    if sent and view.state in run_cards.ALIVE:
        figures = {name: sent.get(name) or 0 for name in ("bytes", "total", "speed")}
        view = replace(view, download=figures, eta_s=sent.get("eta"))
    return view, lines, address if address.startswith(("https://", "http://")) else ""


def render_link(ui: Ui, address: str) -> str:
    """Render the link to an uploaded repository; "" without one."""
    if not address:
        return ""
    return (
        f'<a class="button main" href="{escape(address)}" target="_blank" rel="noopener noreferrer">'
        f"{ui.say('push.open')}</a>"
    )


def render_newest(ui: Ui, folder: Path) -> str:
    """Render the newest upload of a run: its state, its progress, and where it is; "" before there is one."""
    newest = find_newest(ui, folder)
    if newest is None:
        return ""
    view, lines, address = read_progress(newest, run_monitor.read_log_tail(newest))
    return (
        f'<section class="card {escape(view.state)}"><div class="row"><h3>{escape(run_cards.translate_title(ui, view))}'
        f"</h3>{run_cards.render_state(ui, view)}</div>{run_cards.render_sentence(ui, view)}"
        f"{run_cards.render_progress(view)}{run_cards.render_figures(ui, view)}{run_cards.render_log_tail(view, lines)}"
        f'<div class="buttons">{render_link(ui, address)}</div></section>'
    )
