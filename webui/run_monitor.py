"""Read queue, run folders and GPUs for the pages of runs, and do what their buttons say.

Everything is read at most once a second for all windows.
"""

import threading
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lora_fp8 import config, jobs
from lora_fp8.common import reading
from lora_fp8.common.gpu import read_gpus
from lora_fp8.errors import Message, UserError, cannot_read
from lora_fp8.jobs import JobView, Queue, run_events
from lora_fp8.run import Run
from lora_fp8.run.run_log import RunLog, RunLogs

from . import form
from .context import Place, Ui
from .draft import Draft

LOGS = RunLogs()
T = TypeVar("T")


class Cached:
    """The value of a function, cached for some seconds."""

    def __init__(self, ask: Callable[[], Any], seconds: float):
        self._ask, self._seconds = ask, seconds
        self._lock = threading.Lock()
        self._value: Any = None
        self._until = -1.0

    def __call__(self) -> Any:
        """Return the value, calculated again if it is too old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._value = self._ask()
                self._until = time.monotonic() + self._seconds
            return self._value

    def invalidate(self) -> None:
        """Drop the cached value, because something changed."""
        self._until = -1.0


class RunMonitor:
    """Everything that is monitored in one home."""

    def __init__(self, place: Place):
        self._place = place
        self.views = Cached(self._read_views, 0.8)
        self.machine = Cached(self._read_machine, 1.2)
        self.previews: dict[Path, Path | None] = {}
        """The newest preview by run folder, as far as it was looked for since the jobs were read."""
        psutil.cpu_percent()  # the first call has nothing to compare with

    @cached_property
    def queue(self) -> Queue:
        """Return the queue, opened where it is shown: the error of a damaged one appears there, and all else works."""
        return Queue(self._place.home)

    def _read_views(self) -> list[JobView]:
        self.previews = {}
        self.queue.roots = tuple(dict.fromkeys(path for root in self._place.roots for path in (root, root / "runs")))
        return self.queue.list_jobs()

    def _read_machine(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        return {
            "cpu": psutil.cpu_percent(),
            "ram": (memory.total - memory.available, memory.total),
            "free": psutil.disk_usage(str(self._place.home)).free,
            "gpus": read_gpus(),
        }


@cache
def get_monitor(place: Place) -> RunMonitor:
    """Return the monitor of this place. There is one for as long as the page runs."""
    return RunMonitor(place)


def find_job(ui: Ui, text: str) -> JobView:
    """Find the job or run that an address names: a job number, a run name, or the path of its folder.

    Raises:
        UserError: there is none, or its folder is not allowed.
    """
    queue = get_monitor(ui.place).queue
    if text.isascii() and text.isdecimal() and len(text) < 15:
        return queue.get_job(int(text))
    if "/" in text or Path(text).is_absolute():
        return queue.get_job(str(ui.resolve_path(text)))
    for view in get_monitor(ui.place).views():
        if view.name == text and view.kind == "train":
            return view
    raise UserError(Message("{name}: there is no run of that name", name=text))


def has_trainings(place: Place) -> bool:
    """Return True if a training is in the queue or in a folder of the page; also where the queue cannot be read."""
    try:
        return any(view.kind == "train" for view in get_monitor(place).views())
    except UserError:
        return True


def require_run_folder(view: JobView) -> Path:
    """Return the run folder of a job. Raises UserError if the job is a command, which has none."""
    if view.folder is None:
        raise UserError(Message("job {id} is a command and has no run folder", id=view.id))
    return view.folder


def find_newest_command(place: Place, *words: str) -> JobView | None:
    """Return the newest job of the queue whose command begins with these words."""
    jobs = [view for view in get_monitor(place).views() if isinstance(view.id, int)]
    matching = [view for view in jobs if view.command[: len(words)] == words]
    return max(matching, key=lambda view: int(view.id), default=None)


def get_run_folder(ui: Ui, view: JobView) -> Path:
    """Return the run folder of a job, which the page may read.

    Raises:
        UserError: it is not allowed, or the job has none.
    """
    return ui.resolve_path(str(require_run_folder(view)))


def find_newest_preview(ui: Ui, view: JobView) -> Path | None:
    """Return the newest preview of a run's first prompt; None if there is none, or the page may not read the folder."""
    if view.kind != "train" or view.folder is None:
        return None
    # Looked for once for all who have the page open: to follow the paths of 50 runs takes longer than all else.
    known = get_monitor(ui.place).previews
    if view.folder not in known:
        try:
            drawn = sorted(get_run_folder(ui, view).glob("samples/step-[0-9]*-0.png"))
        except (UserError, OSError):
            drawn = []
        known[view.folder] = drawn[-1] if drawn else None
    return known[view.folder]


def read_run_log(ui: Ui, view: JobView) -> RunLog:
    """Return the event log of a job's run, up to date; empty before there is one."""
    return LOGS.read(get_run_folder(ui, view))


def run_action(ui: Ui, do: str, text: str) -> str:
    """Do what a button says to the job or run that it names. Returns a message.

    Raises:
        UserError: it cannot be done.
    """
    watching = get_monitor(ui.place)
    queue, view = watching.queue, find_job(ui, text)
    try:
        if do in ("force", "kill") and isinstance(view.id, str):
            queue.end_shell(get_run_folder(ui, view), hard=do == "kill")
            do = "kill" if do == "kill" else "term"
        elif do in ("stop", "cancel", "force"):
            queue.stop(view.id) if do == "stop" else queue.cancel(view.id)
        elif do in ("save", "preview"):
            Run.open(get_run_folder(ui, view)).request(do)
        elif do == "resume" and isinstance(view.id, int):
            queue.requeue(view.id)
        elif do == "resume":
            queue.submit_run(get_run_folder(ui, view))
        elif do == "rerun":
            queue.rerun(_get_job_number(view))
        elif do == "edit":
            _edit(ui, view)
        elif do in ("up", "down"):
            queue.move(_get_job_number(view), max(1, view.place + (1 if do == "down" else -1)))
        elif do in ("sooner", "later"):
            queue.set_priority(_get_job_number(view), view.priority + (1 if do == "sooner" else -1))
        else:
            raise make_button_error(do)
    finally:
        watching.views.invalidate()
    if do in ("resume", "rerun"):
        jobs.ensure_worker(queue.home)
    return ui.say(f"runs.told.{do}", name=view.name)


def make_button_error(do: str) -> UserError:
    """Return the error about a button that the page does not have."""
    return UserError(Message("{name}: there is no such button", name=do))


def _edit(ui: Ui, view: JobView) -> None:
    """Copy the settings of a run into a new draft under a free name. Undo on that page restores the former draft."""
    queue = get_monitor(ui.place).queue
    if isinstance(view.id, int):
        text = queue.read_config(view.id)
    else:
        file = get_run_folder(ui, view) / "config.toml"
        try:
            text = reading.load_text(file)
        except OSError as error:
            raise cannot_read(file, error) from None
    if view.folder is not None:
        text = form.put(text, "name", queue.find_free_name(view.folder), ui.place.home)
    Draft(ui.place.home).replace(text)


def get_question(ui: Ui, do: str, text: str) -> str:
    """Return the question to ask before `run_action` ends a job or run. Raises UserError if there is no such job."""
    shell = isinstance(find_job(ui, text).id, str)
    return ui.say("run.ask_kill" if do == "kill" else "run.ask_term" if shell else "run.ask_force")


def delete_job(ui: Ui, text: str, typed: str, with_run: bool) -> str:
    """Delete a job whose name was typed, with its run folder if wanted, or if it has nothing else. Returns a message.

    Raises:
        UserError: the name differs, or the job is running.
    """
    watching = get_monitor(ui.place)
    view = find_job(ui, text)
    if typed.strip() != view.name:
        raise UserError(Message("type the name, {name}, to delete it; nothing was deleted", name=view.name))
    if (with_run or isinstance(view.id, str)) and view.folder is not None:
        get_run_folder(ui, view)  # raises for a folder that the page may not delete
    with_run = with_run or isinstance(view.id, str)
    left = watching.queue.delete(view.id, with_run)
    watching.views.invalidate()
    if left:
        return ui.say("runs.told.delete_left", name=view.name, count=len(left), files=", ".join(left[:5]))
    return ui.say("runs.told.delete_all" if with_run else "runs.told.delete", name=view.name)


def _get_job_number(view: JobView) -> int:
    if isinstance(view.id, str):
        raise UserError(Message("{id}: the run was started from the command line, not by the queue", id=view.id))
    return view.id


def get_base_title(folder: Path | None) -> str:
    """Return the title of the architecture in a run's config; "" before there is one."""
    return (
        _read_base_title(folder, 0) if folder is None else _read_base_title(folder, _get_mtime(folder / "config.toml"))
    )


@cache
def _read_base_title(folder: Path | None, changed: int) -> str:
    if folder is None or not changed:
        return ""
    try:
        family = str(config.read_toml(reading.load_text(folder / "config.toml"))["model"]["family"])
        from lora_fp8 import families

        return families.get(family).title if family in families.list_families() else family
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _get_mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_log_tail(view: JobView) -> list[str]:
    """Return the last 40 lines that a job printed."""
    return run_events.read_tail(view.log) if view.log else []
