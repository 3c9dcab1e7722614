"""Trainings on other machines, as the start page shows them: how each is doing, and what its buttons do.

Each machine is asked by a thread of its own while somebody looks, so that a slow connection never holds a page.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lora_fp8 import jobs
from lora_fp8.errors import Message, RunFailure, UserError
from lora_fp8.jobs.remote import control, handle
from lora_fp8.jobs.remote.control import View
from lora_fp8.jobs.remote.handle import Handle

from . import run_cards, run_monitor
from .context import Ui
from .sanitize import escape

FRESH_SECONDS = 20.0
"""An answer about a job that has not ended is shown this long before its machine is asked again."""
ENDED_SECONDS = 600.0
"""The same of a job that has ended: it can be started again from a shell."""
BUTTONS = {
    "waiting": ("cancel",),
    "starting": ("cancel",),
    "running": ("cancel",),
    "done": ("fetch",),
    "stopped": ("resume", "fetch"),
    "failed": ("resume", "fetch"),
    "lost": ("resume", "fetch"),
}
"""Buttons of a job in each state; the most likely one comes first."""
STATES = {"waiting": "queued"}
"""States that have another name in the queue of this machine."""


@dataclass
class _Known:
    """What is known of a job.

    Attributes:
        view: how it was doing when its machine answered last; None before.
        error: why the machine did not answer, or the last button did nothing; "" if all is well.
        asked: monotonic seconds of the last answer; 0 before the first, and when it does not count any more.
        doing: the button that is being worked on; "ask" while the machine is asked; "" otherwise.
    """

    view: View | None = None
    error: str = ""
    asked: float = 0.0
    doing: str = ""


class RemoteJobs:
    """The jobs of one home, and what their machines answered."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float], _Known] = {}
        self._lock = threading.Lock()

    def find_all(self) -> list[tuple[Handle, _Known]]:
        """Return all jobs, the newest first, with what is known now; machines whose answers are old are asked."""
        now, listed = time.monotonic(), []
        for job in handle.load_all():
            with self._lock:
                known = self._known.setdefault((job.name, job.created), _Known())
                is_ended = known.view is not None and known.view.has_ended and not known.error
                is_old = not known.asked or now - known.asked > (ENDED_SECONDS if is_ended else FRESH_SECONDS)
                if is_old and not known.doing:
                    self._start(known, "ask", partial(control.fetch_view, job))
            listed.append((job, known))
        return listed

    def act(self, job: Handle, do: str) -> None:
        """Stop a job or start it again, in the background. Presses of a job that is busy with another do nothing."""

        def run() -> View:
            if do == "cancel":
                control.cancel(job)
            else:
                control.resume(job)
            return control.fetch_view(handle.load(job.name))

        with self._lock:
            known = self._known.setdefault((job.name, job.created), _Known())
            if known.doing in ("", "ask"):
                self._start(known, do, run)

    def _start(self, known: _Known, doing: str, ask: Callable[[], View]) -> None:
        known.doing = doing

        def work() -> None:
            view, error = None, ""
            try:
                view = ask()
            except (UserError, RunFailure) as refused:
                error = refused.args[0]
            finally:
                with self._lock:
                    if known.doing == doing:  # else a button was pressed meanwhile, whose answer counts
                        known.view, known.error = view or known.view, error
                        known.asked, known.doing = time.monotonic(), ""

        threading.Thread(target=work, daemon=True, name="remote").start()


@cache
def get_jobs() -> RemoteJobs:
    """Return the jobs. There is one object for as long as the page runs."""
    return RemoteJobs()


def run_action(ui: Ui, do: str, name: str) -> str:
    """Do what a button of a job says. Returns a message.

    Raises:
        UserError: there is no such job or button, or its files belong into a folder that the page may not write.
    """
    job = handle.load(name)
    if do not in ("cancel", "resume", "fetch", "forget"):
        raise run_monitor.make_button_error(do)
    if do == "forget":
        if _find_run(ui, job) is None:
            raise UserError(Message("{name}: its files are not here yet; fetch them first", name=name))
        handle.delete(job)
    elif do == "fetch":
        ui.resolve_path(job.output)
        beside = jobs.Scheduling(gpus=jobs.BESIDE, max_attempts=1)
        queue = run_monitor.get_monitor(ui.place).queue
        queue.submit_command("remote", ["fetch", "--", name], name=f"remote {name}", scheduling=beside)
        run_monitor.get_monitor(ui.place).views.invalidate()
        jobs.ensure_worker(queue.home)
    else:
        get_jobs().act(job, do)
    return ui.say(f"remote.told.{do}", name=name)


def render(ui: Ui) -> str:
    """Render the jobs on other machines as cards under a heading; "" if there are none."""
    listed = get_jobs().find_all()
    if not listed:
        return ""
    cards = "".join(_render_card(ui, job, known) for job, known in listed)
    return f"<h2 class='heading'>{escape(ui.say('remote.title'))}</h2><div class='cards'>{cards}</div>"


def _render_card(ui: Ui, job: Handle, known: _Known) -> str:
    view = known.view
    state = "" if view is None else STATES.get(view.state, view.state)
    label = f'<span class="state {state}">{ui.say(f"state.{state}")}</span>' if state else ""
    name, run = escape(job.name), _find_run(ui, job)
    if run is not None:
        name = f'<a href="{escape(ui.make_link("run", run=str(run)))}">{name}</a>'
    about = " · ".join(filter(None, [escape(job.where), run_cards.format_time(job.created)]))
    lines = ""
    if known.error:
        lines += f'<p class="said wrong">{escape(ui.translate(known.error))}</p>'
    elif view is None:
        lines += f'<p class="dim">{escape(ui.say("remote.asking"))}</p>'
    elif view.state == "failed":
        lines += f'<p class="said wrong">{escape(ui.translate(view.sentence))}</p>'
    elif view.has_ended:
        which = "fetched" if view.state == "done" and run is not None else view.state
        lines += f'<p class="said">{escape(ui.say(f"remote.said.{which}", step=view.step or 0))}</p>'
    return (
        f'<section class="card {state}"><div class="row"><h2>{name}</h2>{label}<span class="dim">{about}</span></div>'
        f"{lines}{_render_figures(ui, view)}{_render_buttons(ui, job, known, run is not None)}</section>"
    )


def _find_run(ui: Ui, job: Handle) -> Path | None:
    """Return the run folder here, if its files were fetched and the page may read it."""
    try:
        folder = ui.resolve_path(job.output)
    except UserError:
        return None
    return folder if job.fetched and folder.is_dir() else None


def _render_figures(ui: Ui, view: View | None) -> str:
    if view is None or view.state != "running":
        return ""
    figures = []
    if view.stage and view.stage != "train":
        figures.append((ui.say("remote.stage"), run_cards.translate_stage(ui, view.stage)))
    if view.step is not None and view.steps:
        figures.append((ui.say("runs.step"), f"{view.step} / {view.steps}"))
    if view.loss is not None:
        figures.append((ui.say("runs.loss"), f"{view.loss:.4f}"))
    spans = "".join(f"<span><span>{escape(label)}</span> <b>{escape(value)}</b></span>" for label, value in figures)
    share = 100 * view.step / view.steps if view.step is not None and view.steps else 0
    bar = f'<div class="bar"><i style="width:{min(100.0, share):.1f}%"></i></div>' if share else ""
    return f'{bar}<div class="figures">{spans}</div>' if figures else ""


def _render_buttons(ui: Ui, job: Handle, known: _Known, is_here: bool) -> str:
    if known.doing not in ("", "ask"):
        return f'<p class="dim">{escape(ui.say(f"remote.doing.{known.doing}"))}</p>'
    names = BUTTONS.get(known.view.state, ()) if known.view else ()
    names = (*names, "forget") if is_here and known.view and known.view.has_ended else names
    made = ""
    for number, do in enumerate(names):
        kind = "danger" if do == "cancel" else "main" if not number and not is_here else ""
        made += run_cards.render_button(do, ui.say(f"remote.do.{do}"), kind, id=job.name)
    return f'<div class="buttons">{made}</div>' if made else ""
