"""The queue of jobs: what the command line and the page know of it.

    queue = Queue()                                # the user's own queue, see store.home_folder
    id = queue.submit(text)                        # a config as TOML; what it says now is what will be trained
    ensure_worker(queue.home)                      # somebody has to start it
    for job in queue.view(): print(job.id, job.state, job.sentence.text)
    events, offset = queue.events(id, 0)           # and on from offset the next time
    queue.stop(id)                                 # save and stop

No torch (layer 0). A run that was started in a shell is shown too; its id is the path of its folder. Everything here is
safe to call from several threads and processes; what is wrong raises config.UserError with one line for people.
"""

import json
import os
import re
import shutil
import signal
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import config
from ..config import UserError
from ..run import Run
from ..wording import is_utf8
from . import procs, truth
from .store import Row, Store, StoreError, home_folder, now
from .truth import ENDED, SENTENCES, JobView, Sentence
from .worker import Info, Settings, Worker, ensure_worker, group_name
from .worker import died as worker_died
from .worker import info as worker_info

__all__ = [
    "COMMANDS",
    "ENDED",
    "Info",
    "JobView",
    "Queue",
    "SENTENCES",
    "Sentence",
    "Settings",
    "StoreError",
    "Worker",
    "absolute_paths",
    "ensure_worker",
    "home_folder",
    "worker_died",
    "worker_info",
]

COMMANDS = ("caption", "precision", "export", "verify", "resize", "merge", "extract", "ema")
"""Subcommands of `lora-fp8` that may be queued: they compute, and end by themselves."""


class Queue:
    """The jobs of one home folder.

    Args:
        home: where the queue lives; None is `home_folder()`.
        roots: folders whose runs are shown too, beside those that queued jobs write into.

    Raises:
        UserError: the home cannot be used.
    """

    def __init__(self, home: Path | None = None, roots: Sequence[Path] = ()):
        self.store = Store(home or home_folder())
        self.home = self.store.home
        self.roots = tuple(Path(os.path.abspath(root)) for root in roots)
        self._follower = truth.Follower()
        self._follow = threading.Lock()  # a page asks from several threads

    # -- asking

    def view(self, shell: bool = True) -> list[JobView]:
        """All jobs: those in hand, the queue in its order, then what has ended, newest first; then shell runs.

        Args:
            shell: also runs that were started without the queue.
        """
        rows, worker = self.store.rows(), worker_info(self.home)
        waiting = [row.id for row in rows if row.phase == "queued"]
        groups = {"launched": 0, "queued": 1, "ended": 2}
        with self._follow:
            busy = {row.folder for row in rows if row.phase == "launched"}
            found = [self._view(row, waiting, worker, row.folder in busy) for row in rows]
            order = {row.id: (groups[row.phase], -row.ended if row.phase == "ended" else 0) for row in rows}
            found.sort(key=lambda job: order[job.id])  # stable: the queue keeps its order
            if shell:
                found += [truth.shell_view(folder, self._follower) for folder in self._shell_runs(rows)]
        return found

    def job(self, id: int | str) -> JobView:
        """One job, or the run in a folder.

        Raises:
            UserError: there is none.
        """
        with self._follow:
            if isinstance(id, str):
                folder = Run.open(Path(id)).path
                row = self._row_of(folder)
                if row is None:
                    return truth.shell_view(Path(os.path.abspath(folder)), self._follower)
            else:
                row = self.store.row(id)
            waiting = [other.id for other in self.store.rows("phase = 'queued'")]
            taken = bool(self.store.rows("phase = 'launched' AND folder = ?", row.folder))
            return self._view(row, waiting, worker_info(self.home), taken)

    def config(self, id: int) -> str:
        """The TOML text that a job was submitted with, all paths absolute; "" for commands."""
        return self.store.row(id).text

    def events(self, id: int | str, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Events of a run behind this byte of its log, and the byte to go on from; [] where it has no log yet.

        A log that has become shorter is told from its beginning.
        """
        folder = self._folder(id)
        return truth.follow(folder / "events.jsonl", offset) if folder else ([], 0)

    def log_tail(self, id: int | str, lines: int = 40) -> list[str]:
        """The last lines that a job printed; [] where it printed nothing. Fit to be shown, but not escaped for HTML."""
        log = self.job(id).log
        return truth.tail(log, lines) if log else []

    # -- submitting

    def submit(
        self,
        text: str,
        *,
        overrides: Sequence[str] = (),
        folder: Path | None = None,
        presets: Path | None = None,
        where: str = "config",
        priority: int = 0,
        gpus: str = "",
        max_attempts: int = 3,
        again: bool = False,
    ) -> int:
        """Queue a training. What is stored is the whole resolved config; later edits of any file change nothing.

        Args:
            text: TOML, as in a config file.
            overrides: as `--set`.
            folder: what relative paths in it are relative to; None is the working directory.
            presets: where presets given as paths are looked for; None is `folder`.
            where: what problems are told to be of.
            priority: higher starts earlier.
            gpus: the worker's GPU group to wait for, such as "0,1"; "" takes any.
            max_attempts: how often it is started, where it crashes; 1 is never again.
            again: the folder has a run with checkpoints, and this goes on with it.

        Returns:
            The job's id.

        Raises:
            UserError: with everything that is wrong in the config; or its folder has a run, or belongs to another job.
        """
        here = Path(os.path.abspath(folder or Path()))
        job = absolute_paths(config.loads(text, list(overrides), where=where, folder=presets or here), here)
        if max_attempts < 1:
            raise UserError(f"max_attempts: must be at least 1, got {max_attempts}")
        run = Run(Path(job.output_dir) / job.name)
        for row in self.store.rows("phase <> 'ended'"):
            if row.folder == str(run.path):
                raise UserError(f"{run.path}: job {row.id} writes there already; choose another name (--set name=...)")
        if not again and (any(run.checkpoints.glob("step-*")) or any(run.export.glob("*.safetensors"))):
            raise UserError(
                f"{run.path}: a run was here already; go on with it (`lora-fp8 submit {run.path}`), "
                "or choose another name (--set name=...)"
            )
        return self.store.insert(
            name=job.name,
            kind="train",
            text=(resolved := config.dumps(job)),
            command=json.dumps(_asked_otherwise(resolved, overrides) if again else []),
            folder=str(run.path),
            cwd="",
            again=int(again),
            **_common(priority, gpus, max_attempts),
        )

    def submit_run(self, folder: Path, **options: Any) -> int:
        """Queue going on with a run that was stopped, or that a shell had started; `options` as of `submit`.

        Raises:
            UserError: there is no run, or it is training.
        """
        run = Run.open(Path(os.path.abspath(folder)))
        if run.alive():
            raise UserError(f"{run.path}: is training now")
        # The folder may have been moved or renamed since: where it is now counts.
        place = {"name": run.path.name, "output_dir": str(run.path.parent)}
        overrides = [config.toml_line(key, value) for key, value in place.items()]
        overrides += options.pop("overrides", [])
        config.load(run.config_file, overrides)  # for its messages
        text = run.config_file.read_text(encoding="utf-8")
        return self.submit(text, overrides=overrides, where=str(run.config_file), again=True, **options)

    def submit_command(
        self, command: str, arguments: Sequence[str], *, folder: Path | None = None, name: str = "", **options: Any
    ) -> int:
        """Queue a subcommand of `lora-fp8` that is in COMMANDS; it runs in `folder`. `options` as of `submit`.

        Raises:
            UserError: the subcommand may not be queued.
        """
        if command not in COMMANDS:
            raise UserError(f"{command!r} cannot be queued; accepted: {', '.join(COMMANDS)}")
        if any("\0" in argument for argument in arguments):
            raise UserError("an argument has a NUL character in it")
        common = _common(options.pop("priority", 0), options.pop("gpus", ""), options.pop("max_attempts", 1))
        assert not options, options
        line = json.dumps([command, *arguments])  # in ASCII: a file's name may hold bytes that are no UTF-8
        cwd = os.path.abspath(folder or Path())
        return self.store.insert(
            name=name or command, kind="command", text="", command=line, folder="", cwd=cwd, **common
        )

    def clone(self, id: int, overrides: Sequence[str] = ()) -> int:
        """Queue a job's config again as a new job, in a folder of its own unless `overrides` name one. -> its id"""
        row = self.store.row(id)
        options: dict[str, Any] = {"priority": row.priority, "gpus": row.gpus, "max_attempts": row.max_attempts}
        if row.kind == "command":
            if overrides:
                raise UserError(f"job {id} is a command and has no settings to override")
            command, *arguments = json.loads(row.command)
            return self.submit_command(command, arguments, folder=Path(row.cwd), name=row.name, **options)
        given = [config.toml_line("name", self.free_name(Path(row.folder))), *overrides]
        return self.submit(row.text, overrides=given, where=f"job {id}", **options)

    def rerun(self, id: int) -> int:
        """Train a job's config once more from the beginning, as a new job in a folder of its own. -> its id"""
        return self.clone(id)

    # -- changing

    def stop(self, id: int | str) -> None:
        """Ask a job to save and stop; one that waits is taken out of the queue. Needs a worker for more than asking.

        Raises:
            UserError: it is neither running nor waiting.
        """
        self._end(id, "stop")

    def cancel(self, id: int | str) -> None:
        """Take a waiting job out of the queue; a running one gets SIGTERM at once, on which a trainer saves, too.

        Raises:
            UserError: it is neither running nor waiting.
        """
        self._end(id, "cancel")

    def end_shell(self, folder: Path, hard: bool = False) -> None:
        """End a run that was started in a shell at once: SIGTERM, on which its trainer saves and stops.

        Args:
            hard: SIGKILL, to all that the trainer started too; what it did since its newest checkpoint is lost.

        Raises:
            UserError: nothing is training there, or a job of the queue is; or the process is not this user's.
        """
        run = Run.open(folder)
        row = self._row_of(run.path)
        if row is not None and row.phase != "ended":
            raise UserError(f"{run.path}: job {row.id} writes there; `lora-fp8 jobs cancel {row.id}` ends it")
        if not run.alive():
            raise UserError(f"{run.path}: nothing is training here")
        pid = procs.holder(run.lock_file)
        if pid is None:
            raise UserError(f"{run.path}: the process that trains here is another user's, or on another machine")
        if not hard:
            run.request("stop")  # said before it ends, so that it is seen to be stopping
        try:
            procs.send(procs.family(pid) if hard else [pid], signal.SIGKILL if hard else signal.SIGTERM)
        except PermissionError:
            raise UserError(f"{run.path}: process {pid}, which trains here, is another user's") from None

    def requeue(self, id: int) -> None:
        """Put a job that has ended into the queue again: it goes on from its newest checkpoint, if it has one.

        Raises:
            UserError: it has not ended, or is done.
        """
        row = self._settled(id)
        if row.state == "done":
            raise UserError(f"job {id} is done; `lora-fp8 jobs rerun {id}` trains it again in another folder")
        for other in self.store.rows("phase <> 'ended' AND folder = ?", row.folder) if row.folder else []:
            raise UserError(f"{row.folder}: job {other.id} writes there already")
        values: dict[str, Any] = {"phase": "queued", "wanted": "run", "crashes": 0, "state": "", "sentence": ""}
        values |= {"ended": 0, "asked": 0, "termed": 0, "killed": 0, "exit_code": None}
        if not self.store.update(id, "phase = 'ended'", **values):
            raise UserError(f"job {id} is in the queue already")

    def move(self, id: int, place: int) -> None:
        """Put a waiting job at a place of the queue; 1 is the next to start. It takes the priority found there.

        Raises:
            UserError: it is not waiting.
        """
        self.store.row(id)
        self.store.move(id, place)

    def set_priority(self, id: int, priority: int) -> None:
        """Higher starts earlier.

        Raises:
            UserError: it is not waiting.
        """
        self.store.row(id)
        if not self.store.update(id, "phase = 'queued'", priority=priority):
            raise UserError(f"job {id} is not waiting in the queue, so that its priority means nothing")

    def delete(self, id: int | str, with_run: bool = False) -> None:
        """Forget a job that is not running; its run folder stays unless `with_run`.

        Args:
            id: or the folder of a run that was started in a shell, which is deleted: nothing else stands of it.

        Raises:
            UserError: it is running, or the folder is not that of a run that has ended.
        """
        if isinstance(id, str):
            run = Run.open(Path(id))
            for other in self.store.rows("phase <> 'ended' AND folder = ?", str(run.path)):
                raise UserError(f"{run.path}: job {other.id} writes there already")
            return _remove_run(run.path)
        row = self.store.row(id)
        if row.phase == "launched":
            row = self._settled(id)
        if with_run and row.folder:
            _remove_run(Path(row.folder))
        if not self.store.delete(id):
            raise UserError(f"job {id} has just been started; stop it first")
        shutil.rmtree(self.store.folder(id), ignore_errors=True)

    # -- inside

    def _view(self, row: Row, waiting: list[int], worker: Info | None, taken: bool = False) -> JobView:
        place = waiting.index(row.id) + 1 if row.id in waiting else 0
        return truth.view(row, self.store.folder(row.id), self._follower, place, worker, taken)

    def _shell_runs(self, rows: list[Row]) -> list[Path]:
        """Run folders in the roots, and beside those of jobs, that no job wrote."""
        own = {row.folder for row in rows}
        roots = dict.fromkeys([*self.roots, *(Path(row.folder).parent for row in rows if row.folder)])
        found = []
        for root in roots:
            try:
                entries = sorted(os.scandir(root), key=lambda entry: entry.name)
            except OSError:  # not made yet, or gone
                continue
            for entry in entries:
                if entry.path not in own and os.path.isfile(os.path.join(entry.path, "events.jsonl")):
                    found.append(Path(entry.path))
        return found

    def _row_of(self, folder: Path) -> Row | None:
        """The newest job that writes into this folder."""
        if not is_utf8(os.path.abspath(folder)):  # `submit` takes none such
            return None
        rows = self.store.rows("folder = ?", os.path.abspath(folder))
        return max(rows, key=lambda row: row.id, default=None)

    def _folder(self, id: int | str) -> Path | None:
        if isinstance(id, str):
            return Run.open(Path(id)).path
        row = self.store.row(id)
        return Path(row.folder) if row.folder else None

    def _end(self, id: int | str, wanted: str) -> None:
        if isinstance(id, str):
            run = Run.open(Path(id))
            row = self._row_of(run.path)
            if row is None or row.phase == "ended":
                if not run.alive():
                    raise UserError(f"{run.path}: nothing is training here")
                run.request("stop")
                return
        else:
            row = self.store.row(id)
        said = json.dumps(Sentence("cancelled").to_json())
        over = {"phase": "ended", "state": "cancelled", "sentence": said, "ended": now()}
        if self.store.update(row.id, "phase = 'queued'", wanted=wanted, **over):
            return
        run = Run(Path(row.folder)) if row.folder else None
        if not self.store.update(row.id, "phase = 'launched'", wanted=wanted):
            if run is None or not run.alive():
                raise UserError(f"job {row.id} is neither running nor waiting")
            run.request("stop")  # a shell goes on with it
            return
        if run and run.alive():  # at once; the worker sees to the rest
            run.request("stop")
            self.store.update(row.id, "asked = 0", asked=now())

    def _settled(self, id: int) -> Row:
        """The row of a job of which nothing lives; one that ended unseen is noted as ended.

        Raises:
            UserError: it lives, or waits.
        """
        row = self.store.row(id)
        if row.phase == "queued":
            raise UserError(f"job {id} waits in the queue")
        if row.phase == "launched":
            with self._follow:
                job = self._view(row, [], None)
            if job.state not in ENDED:
                raise UserError(f"job {id} is {job.state}; stop it first")
            values = {"phase": "ended", "state": job.state, "sentence": json.dumps(job.sentence.to_json())}
            self.store.update(
                id, "phase = 'launched' AND attempts = ?", row.attempts, ended=now(), exit_code=job.exit_code, **values
            )
            row = self.store.row(id)
        return row

    def free_name(self, folder: Path) -> str:
        """ "zibo" -> "zibo-2", or the next number that neither a folder nor a job has."""
        stem, taken = re.sub(r"-\d{1,4}$", "", folder.name), {row.folder for row in self.store.rows()}
        number = 2
        while (path := folder.with_name(f"{stem}-{number}")).exists() or str(path) in taken:
            number += 1
        return path.name


def _asked_otherwise(text: str, overrides: Sequence[str]) -> list[str]:
    """Arguments of `resume` that say again what these overrides have made of the resolved config in `text`.

    Resuming reads the run folder's own config. Name and place are the folder's.
    """
    arguments = []
    for key in (one.partition("=")[0].strip() for one in overrides):
        value: Any = tomllib.loads(text)
        for part in key.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        if key not in ("name", "output_dir"):
            arguments += ["--set", config.toml_line(key, value)]
    return arguments


PATHS = ("output_dir", "dataset.cache_dir", "model.components", "adapter.init_from", "preview.controls")
FOLDER_PATHS = ("path", "control", "mask")
"""Settings that name a place on this machine, or a list of them: of a job, and of each of its picture folders."""


def absolute_paths(job: config.Job, folder: Path) -> config.Job:
    """The job with each path that names something on this machine made absolute, relative ones from `folder`.

    A base model that is no file here is a Hugging Face id or the bundled one and stays as it is.
    """

    def there(path: str) -> str:
        return os.path.abspath(os.path.join(folder, os.path.expanduser(path))) if path else path

    data = job.model_dump()
    for name in PATHS:
        *tables, key = name.split(".")
        table = data
        for part in tables:
            table = table[part]
        value = table[key]
        table[key] = [there(path) for path in value] if isinstance(value, list) else there(value)
    if job.model.path != "demo" and os.path.exists(there(job.model.path)):
        data["model"]["path"] = there(job.model.path)
    for picture_folder in data["dataset"]["folders"]:
        for key in FOLDER_PATHS:
            if key != "mask" or config.names_a_folder_of_masks(picture_folder[key]):
                picture_folder[key] = there(picture_folder[key])
    return config.Job(**data)


def _common(priority: int, gpus: str, max_attempts: int) -> dict[str, Any]:
    procs.boot_id()  # a system on which processes cannot be told apart is refused before anything is queued
    wanted = group_name(gpus) if gpus else ""
    return {"priority": priority, "gpus": wanted, "max_attempts": max_attempts, "created": now()}


def _remove_run(folder: Path) -> None:
    """Delete a run folder, and nothing that is not one."""
    if not folder.exists():
        return
    run = Run.open(folder)
    if run.alive():
        raise UserError(f"{folder}: is training now; stop it first")
    if folder.is_symlink() or not run.events_file.is_file():
        raise UserError(f"{folder}: does not look like a run that was trained here; remove it by hand")
    shutil.rmtree(folder)
