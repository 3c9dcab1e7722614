"""What the pages of runs look at: queue, run folders, machine. Shared by all who look, and asked once a second."""

import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lora_fp8 import jobs
from lora_fp8.config import UserError
from lora_fp8.jobs import JobView, Queue, truth
from lora_fp8.run import Run

from . import form
from .context import Place, Ui
from .curves import Log, Logs
from .draft import Draft

LOGS = Logs()
T = TypeVar("T")


class Fresh:
    """The value of a function, not older than some time, however many ask."""

    def __init__(self, ask: Callable[[], Any], seconds: float):
        self._ask, self._seconds = ask, seconds
        self._lock = threading.Lock()
        self._value: Any = None
        self._until = -1.0

    def __call__(self) -> Any:
        with self._lock:
            if time.monotonic() >= self._until:
                self._value = self._ask()
                self._until = time.monotonic() + self._seconds
            return self._value

    def forget(self) -> None:
        """Ask again the next time: something was changed."""
        self._until = -1.0


class Watch:
    """All that is looked at in one home."""

    def __init__(self, place: Place):
        self._place = place
        self.queue = Queue(place.home)
        self.views = Fresh(self._look, 0.8)
        self.machine = Fresh(self._machine, 1.2)
        psutil.cpu_percent()  # the first call has nothing to compare with

    def _look(self) -> list[JobView]:
        self.queue.roots = tuple(dict.fromkeys(path for root in self._place.roots for path in (root, root / "runs")))
        return self.queue.view()

    def _machine(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        return {
            "cpu": psutil.cpu_percent(),
            "ram": (memory.total - memory.available, memory.total),
            "free": psutil.disk_usage(str(self._place.home)).free,
            "gpus": gpus(),
        }


@cache
def watch(place: Place) -> Watch:
    """The one of this place; a page has one place as long as it lives."""
    return Watch(place)


def find(ui: Ui, text: str) -> JobView:
    """The job or run that an address names: a job's number, a run's name, or the path of its folder.

    Raises:
        UserError: there is none, or its folder is none that the page may use.
    """
    queue = watch(ui.place).queue
    if text.isascii() and text.isdecimal() and len(text) < 15:
        return queue.job(int(text))
    if "/" in text:
        return queue.job(str(ui.path(text)))
    for view in watch(ui.place).views():
        if view.name == text and view.kind == "train":
            return view
    raise UserError(f"{text}: there is no run of that name")


def folder_of(ui: Ui, view: JobView) -> Path:
    """The run folder of a job, which the page may read.

    Raises:
        UserError: it lies where the page may not look, or it has none.
    """
    if view.folder is None:
        raise UserError(f"job {view.id} is a command and has no run folder")
    return ui.path(str(view.folder))


def log_of(ui: Ui, view: JobView) -> Log:
    """The event log of a job's run, up to date; empty before there is one."""
    return LOGS.read(folder_of(ui, view))


def act(ui: Ui, do: str, text: str) -> str:
    """Do what a button says to the job or run that it names. -> a sentence

    Raises:
        UserError: it cannot be done, and why.
    """
    watching = watch(ui.place)
    queue, view = watching.queue, find(ui, text)
    try:
        if do in ("force", "kill") and isinstance(view.id, str):
            queue.end_shell(folder_of(ui, view), hard=do == "kill")
            do = "kill" if do == "kill" else "term"
        elif do in ("stop", "cancel", "force"):
            queue.stop(view.id) if do == "stop" else queue.cancel(view.id)
        elif do in ("save", "preview"):
            Run.open(folder_of(ui, view)).request(do)
        elif do == "resume" and isinstance(view.id, int):
            queue.requeue(view.id)
        elif do == "resume":
            queue.submit_run(folder_of(ui, view))
        elif do == "rerun":
            queue.rerun(_number(view))
        elif do == "edit":
            _edit(ui, view)
        elif do in ("up", "down"):
            queue.move(_number(view), max(1, view.place + (1 if do == "down" else -1)))
        elif do in ("sooner", "later"):
            queue.set_priority(_number(view), view.priority + (1 if do == "sooner" else -1))
        else:
            raise UserError(f"{do}: there is no such button")
    finally:
        watching.views.forget()
    if do in ("resume", "rerun"):
        jobs.ensure_worker(queue.home)
    return ui.say(f"runs.told.{do}", name=view.name)


def _edit(ui: Ui, view: JobView) -> None:
    """Make the settings of a run the draft of a new training, under a name that is free; undo there takes it back."""
    queue = watch(ui.place).queue
    if isinstance(view.id, int):
        text = queue.config(view.id)
    else:
        file = folder_of(ui, view) / "config.toml"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    if view.folder is not None:
        text = form.put(text, "name", queue.free_name(view.folder), ui.place.home)
    Draft(ui.place.home).replace(text)


def question(ui: Ui, do: str, text: str) -> str:
    """What to ask before a job or run is ended by `act`. Raises UserError: there is none such."""
    shell = isinstance(find(ui, text).id, str)
    return ui.say("run.ask_kill" if do == "kill" else "run.ask_term" if shell else "run.ask_force")


def delete(ui: Ui, text: str, typed: str, with_run: bool) -> str:
    """Forget a job whose name was typed, and delete its run folder if asked to, or if it is all there is. -> a sentence

    Raises:
        UserError: the name is another, or the job lives.
    """
    watching = watch(ui.place)
    view = find(ui, text)
    if typed.strip() != view.name:
        raise UserError(f"type the name, {view.name}, to delete it; nothing was deleted")
    if (with_run or isinstance(view.id, str)) and view.folder is not None:
        folder_of(ui, view)  # what lies outside of the page's folders it does not delete
    with_run = with_run or isinstance(view.id, str)
    watching.queue.delete(view.id, with_run)
    watching.views.forget()
    return ui.say("runs.told.delete_all" if with_run else "runs.told.delete", name=view.name)


def _number(view: JobView) -> int:
    if isinstance(view.id, str):
        raise UserError(f"{view.id}: was started in a shell, not by the queue")
    return view.id


def base_of(folder: Path | None) -> str:
    """The architecture that a run's config names; "" before there is one."""
    return _base(folder, 0) if folder is None else _base(folder, _changed(folder / "config.toml"))


@cache
def _base(folder: Path | None, changed: int) -> str:
    import tomllib

    if folder is None or not changed:
        return ""
    try:
        family = str(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["model"]["family"])
        from lora_fp8 import families

        return str(families.facts(family)["title"]) if family in families.available() else family
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def gpus() -> list[dict[str, Any]]:
    """Each NVIDIA card: name, share of its time used, bytes used and held, degrees; [] without any."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, no library: this machine has no card to tell of
        return []
    found = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "busy": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                "used": memory.used,
                "total": memory.total,
                "degrees": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            }
        )
    return found


def tail(view: JobView) -> list[str]:
    """The last 40 lines that a job printed; [] where it printed nothing."""
    return truth.tail(view.log) if view.log else []
