"""The queue of jobs, as the command line and the web page use it.

    queue = Queue()                                # the user's own queue, see store.find_home
    id = queue.submit(text)                        # a config as TOML; later changes to files do not affect the job
    ensure_worker(queue.home)                      # jobs are started by a worker
    for job in queue.list_jobs(): print(job.id, job.state, job.sentence.text)
    events, offset = queue.read_events(id, 0)      # pass offset to the next call
    queue.stop(id)                                 # save and stop

This package does not import torch. Runs that were started in a shell are shown too; their id is the path of their
folder. Everything here may be called from several threads and processes; errors are errors.UserError with one line.
"""

import json
import os
import re
import shutil
import signal
import threading
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import config, settings
from ..common import system
from ..common.reading import load_text
from ..common.text import is_utf8
from ..errors import Message, Template, UserError
from ..run import Run, ownership
from . import job_state, procs, run_events
from .job_view import ENDED, SENTENCES, JobView, Sentence
from .store import BESIDE, Damaged, Row, Store, StoreError, find_home, now, parse_command
from .worker import Info, Settings, Worker, ensure_worker, find_worker, normalize_group, start_worker, was_worker_killed

NOT_TRAINING = Template("{folder}: no training is running in this folder")
IN_USE = Template("{folder}: job {id} already uses this folder")

__all__ = [
    "BESIDE",
    "COMMANDS",
    "Damaged",
    "ENDED",
    "Info",
    "JobView",
    "NOT_TRAINING",
    "Queue",
    "SENTENCES",
    "Scheduling",
    "Sentence",
    "Settings",
    "Source",
    "StoreError",
    "Worker",
    "ensure_worker",
    "find_home",
    "find_worker",
    "make_paths_absolute",
    "start_worker",
    "was_worker_killed",
]

COMMANDS = (
    *("caption", "precision", "lr-find", "export", "verify", "resize", "merge", "extract", "average", "draw", "push"),
    "remote",
)
"""Subcommands of `lora-fp8` that may be queued: they do something and then exit."""


@dataclass(frozen=True)
class Source:
    """Where the text of a config comes from.

    Attributes:
        name: the source that error messages name.
        folder: base of relative paths in the config; None is the working directory.
        presets: base of presets given as paths; None is `folder`.
    """

    name: str = "config"
    folder: Path | None = None
    presets: Path | None = None


@dataclass(frozen=True)
class Scheduling:
    """When and where a job starts.

    Attributes:
        priority: higher starts earlier.
        gpus: GPU group of the worker to wait for, such as "0,1"; "" takes any. A command may have BESIDE: it runs on
            the CPU at once, one at a time, beside the jobs on the groups.
        max_attempts: how often the job is started if it crashes; 1 never restarts it.
    """

    priority: int = 0
    gpus: str = ""
    max_attempts: int = 3


WITHOUT_RESTART = Scheduling(max_attempts=1)


class Queue:
    """The jobs of one home folder.

    Args:
        home: folder of the queue; None is `find_home()`.
        roots: folders whose runs are shown too, besides the folders that queued jobs write into.

    Raises:
        UserError: the home cannot be used.
    """

    def __init__(self, home: Path | None = None, roots: Sequence[Path] = ()):
        self.store = Store(home or find_home())
        self.home = self.store.home
        self.roots = tuple(Path(os.path.abspath(root)) for root in roots)
        self._follower = run_events.Follower()
        self._follow = threading.Lock()  # the web page calls from several threads

    # -- queries

    def list_jobs(self, shell: bool = True) -> list[JobView]:
        """Return all jobs: running ones, the queue in its order, ended ones (newest first), then runs from a shell.

        Args:
            shell: include runs that were started without the queue.
        """
        rows, worker = self.store.read_rows(), find_worker(self.home)
        unfinished = [row for row in rows if row.phase != "ended"]
        groups = defaultdict(lambda: 2, {"launched": 0, "queued": 1})
        with self._follow:
            busy = {row.folder for row in rows if row.phase == "launched"}
            views = [self._view(row, unfinished, worker, row.folder in busy) for row in rows]
            order: dict[int | str, tuple[int, float]]
            order = {row.id: (groups[row.phase], -row.ended if row.phase == "ended" else 0) for row in rows}
            views.sort(key=lambda job: order[job.id])  # a stable sort, so the queue keeps its order
            if shell:
                views += [job_state.view_shell_run(folder, self._follower) for folder in self._find_shell_runs(rows)]
        return views

    def get_job(self, id: int | str) -> JobView:
        """Return one job, or the run in a folder.

        Raises:
            UserError: there is none.
        """
        with self._follow:
            if isinstance(id, str):
                folder = Run.open(Path(id)).path
                row = self._find_row(folder)
                if row is None:
                    return job_state.view_shell_run(Path(os.path.abspath(folder)), self._follower)
            else:
                row = self.store.read_row(id)
            unfinished = self.store.read_rows("phase <> 'ended'")
            taken = bool(self.store.read_rows("phase = 'launched' AND folder = ?", row.folder))
            return self._view(row, unfinished, find_worker(self.home), taken)

    def read_config(self, id: int) -> str:
        """Return the TOML text that a job was submitted with, with absolute paths; "" for commands."""
        return self.store.read_row(id).text

    def read_events(self, id: int | str, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return a run's events after this byte of its log, and the byte to continue from; [] if there is no log yet.

        If the log has become shorter, it is read from the start.
        """
        folder = self._find_folder(id)
        return run_events.follow(folder / "events.jsonl", offset) if folder else ([], 0)

    def read_log_tail(self, id: int | str, lines: int = 40) -> list[str]:
        """Return the last lines of a job's output, without control characters and not escaped for HTML; [] if none."""
        log = self.get_job(id).log
        return run_events.read_tail(log, lines) if log else []

    # -- submitting

    def submit(
        self,
        text: str,
        *,
        overrides: Sequence[str] = (),
        source: Source = Source(),  # frozen
        scheduling: Scheduling = Scheduling(),  # frozen
        again: bool = False,
    ) -> int:
        """Queue a training. The whole resolved config is stored, so later edits of any file change nothing.

        Args:
            text: TOML, as in a config file.
            overrides: as for `--set`.
            source: where the text comes from.
            scheduling: when and where the job starts.
            again: True if the folder has a run with checkpoints, which this job continues.

        Returns:
            The job's id.

        Raises:
            UserError: with everything that is wrong in the config; or its folder has a run, or belongs to another job.
        """
        here = Path(os.path.abspath(source.folder or Path()))
        job = config.loads(text, list(overrides), where=source.name, folder=source.presets or here)
        job = make_paths_absolute(job, here)
        if scheduling.gpus == BESIDE:
            raise UserError(
                Message(
                    "{text} is accepted for commands only; a training needs a group of GPUs, or cpu", text=repr(BESIDE)
                )
            )
        if scheduling.max_attempts < 1:
            raise UserError(
                Message("max_attempts: must be at least {limit}, got {given}", limit="1", given=scheduling.max_attempts)
            )
        run = Run(Path(job.output_dir) / job.name)
        if again:
            self._require_no_writer(run.path)
        else:
            self.require_new(run.path)
        return self._insert(
            name=job.name,
            kind="train",
            text=(resolved := config.dumps(job)),
            command=json.dumps(_make_resume_arguments(resolved, overrides) if again else []),
            folder=str(run.path),
            cwd="",
            again=int(again),
            **_make_columns(scheduling),
        )

    def submit_file(
        self,
        file: Path,
        *,
        overrides: Sequence[str] = (),
        scheduling: Scheduling = Scheduling(),  # frozen
    ) -> int:
        """Queue the training of a config file. Arguments, result and errors are as for `submit`."""
        source = Source(str(file), presets=file.parent)
        return self.submit(load_text(file), overrides=overrides, source=source, scheduling=scheduling)

    def submit_run(
        self,
        folder: Path,
        *,
        overrides: Sequence[str] = (),
        scheduling: Scheduling = Scheduling(),  # frozen
    ) -> int:
        """Queue the continuation of a run that was stopped, or that was started in a shell.

        Args:
            folder: the run folder.
            overrides, scheduling: as for `submit`.

        Raises:
            UserError: there is no run, or it is training.
        """
        run = Run.open(Path(os.path.abspath(folder)))
        if run.is_locked():
            raise UserError(Message("{path}: a training is running in this folder", path=run.path))
        ownership.require_ours(run.path)
        # The folder may have been moved or renamed since, so its current place counts.
        place = {"name": run.path.name, "output_dir": str(run.path.parent)}
        overrides = [*(config.Override(key, value) for key, value in place.items()), *overrides]
        config.load(run.config_file, overrides)  # only for its error messages
        text = load_text(run.config_file, encoding="utf-8")
        source = Source(str(run.config_file))
        return self.submit(text, overrides=overrides, source=source, scheduling=scheduling, again=True)

    def submit_command(
        self,
        command: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        name: str = "",
        scheduling: Scheduling = WITHOUT_RESTART,
    ) -> int:
        """Queue a subcommand of `lora-fp8`.

        Args:
            command: one of COMMANDS.
            arguments: of the command.
            folder: folder to run it in; None is the working directory.
            name: name of the job; "" is the command's.
            scheduling: as for `submit`.

        Raises:
            UserError: the subcommand cannot be queued.
        """
        if command not in COMMANDS:
            raise UserError(
                Message(
                    "{command} cannot be queued; accepted: {names}", command=repr(command), names=", ".join(COMMANDS)
                )
            )
        if any("\0" in argument for argument in arguments):
            raise UserError(Message("an argument contains a NUL character"))
        common = _make_columns(scheduling)
        line = json.dumps([command, *arguments])  # ASCII, as file names may have bytes that are not UTF-8
        cwd = os.path.abspath(folder or Path())
        return self._insert(name=name or command, kind="command", text="", command=line, folder="", cwd=cwd, **common)

    def clone(self, id: int, overrides: Sequence[str] = ()) -> int:
        """Queue a job's config as a new job, in a new folder unless `overrides` name one. Return its id."""
        row = self.store.read_row(id)
        scheduling = Scheduling(row.priority, row.gpus, row.max_attempts)
        if row.kind == "command":
            if overrides:
                raise UserError(Message("job {id} is a command and has no settings to override", id=id))
            command, *arguments = parse_command(row)
            return self.submit_command(command, arguments, folder=Path(row.cwd), name=row.name, scheduling=scheduling)
        overrides_of_copy = [config.Override("name", self.find_free_name(Path(row.folder))), *overrides]
        source = Source(f"job {id}")
        return self.submit(row.text, overrides=overrides_of_copy, source=source, scheduling=scheduling)

    def rerun(self, id: int) -> int:
        """Train a job's config again from the start, as a new job in a new folder. Return its id."""
        return self.clone(id)

    # -- changing

    def stop(self, id: int | str) -> None:
        """Ask a job to save and stop; remove it from the queue if it waits. Only a worker enforces the request.

        Raises:
            UserError: the job is neither running nor waiting.
        """
        self._end(id, "stop")

    def cancel(self, id: int | str) -> None:
        """Remove a waiting job from the queue; send SIGTERM to a running one at once, on which a trainer saves too.

        Raises:
            UserError: the job is neither running nor waiting.
        """
        self._end(id, "cancel")

    def end_shell(self, folder: Path, hard: bool = False) -> None:
        """End a run that was started in a shell at once: SIGTERM, on which its trainer saves and stops.

        Args:
            folder: the run folder.
            hard: send SIGKILL to the trainer and its descendants; its progress since the newest checkpoint is lost.

        Raises:
            UserError: nothing is training there, a job of the queue is training, or the process is another user's.
        """
        run = Run.open(folder)
        row = self._find_row(run.path)
        if row is not None and row.phase != "ended":
            raise UserError(
                Message(
                    "{path}: job {id} is writing to this folder; `lora-fp8 jobs cancel {id}` ends it",
                    path=run.path,
                    id=row.id,
                )
            )
        if not run.is_locked():
            raise UserError(NOT_TRAINING(folder=run.path))
        pid = procs.find_holder(run.lock_file)
        if pid is None:
            raise UserError(
                Message(
                    "{path}: the process that trains in this folder belongs to another user, or runs on another "
                    "machine",
                    path=run.path,
                )
            )
        if not hard:
            run.request("stop")  # before the signal, so that the run is seen to be stopping
        try:
            if hard:
                procs.kill(procs.find_family(pid))
            elif system.CAN_ASK_TO_STOP:
                procs.send([pid], signal.SIGTERM)
        except PermissionError:
            raise UserError(
                Message(
                    "{path}: process {pid}, which trains in this folder, belongs to another user",
                    path=run.path,
                    pid=pid,
                )
            ) from None

    def requeue(self, id: int) -> None:
        """Queue an ended job again; it continues from its newest checkpoint, if it has one.

        Raises:
            UserError: the job has not ended, or is done.
        """
        row = self._require_ended(id)
        if row.state == "done":
            raise UserError(
                Message("job {id} is done; to train it again in another folder, run `lora-fp8 jobs rerun {id}`", id=id)
            )
        for other in self.store.read_rows("phase <> 'ended' AND folder = ?", row.folder) if row.folder else []:
            raise UserError(IN_USE(folder=row.folder, id=other.id))
        values: dict[str, Any] = {"phase": "queued", "wanted": "run", "crashes": 0, "state": "", "sentence": ""}
        values |= {"ended": 0, "asked": 0, "termed": 0, "killed": 0, "exit_code": None}
        if not self.store.update(id, "phase = 'ended'", **values):
            raise UserError(Message("job {id} is already in the queue", id=id))
        self.store.write_record(id)

    def move(self, id: int, place: int) -> None:
        """Move a waiting job to a position in the queue, 1 being the next to start. It takes the priority found there.

        Raises:
            UserError: the job is not waiting.
        """
        self.store.read_row(id)
        self.store.move(id, place)

    def set_priority(self, id: int, priority: int) -> None:
        """Set the priority of a waiting job; higher starts earlier.

        Raises:
            UserError: the job is not waiting.
        """
        self.store.read_row(id)
        if not self.store.update(id, "phase = 'queued'", priority=priority):
            raise UserError(Message("job {id} is not waiting in the queue, so its priority has no effect", id=id))
        self.store.write_record(id)

    def delete(self, id: int | str, with_run: bool = False) -> list[str]:
        """Delete a job that is not running from the queue; its run folder stays unless `with_run`.

        Args:
            id: the job, or the folder of a run that was started in a shell, which is then deleted itself.
            with_run: delete the run folder too.

        Returns:
            What is left in the run folder because the run did not write it.

        Raises:
            UserError: the job is running, or the folder is not that of a run that has ended.
        """
        if isinstance(id, str):
            run = Run.open(Path(id))
            for other in self.store.read_rows("phase <> 'ended' AND folder = ?", str(run.path)):
                raise UserError(IN_USE(folder=run.path, id=other.id))
            return ownership.remove(run.path)
        row = self.store.read_row(id)
        if row.phase == "launched":
            row = self._require_ended(id)
        left = ownership.remove(Path(row.folder)) if with_run and row.folder and os.path.lexists(row.folder) else []
        if not self.store.delete(id):
            raise UserError(Message("job {id} has just been started; stop it first", id=id))
        shutil.rmtree(self.store.get_folder(id), ignore_errors=True)
        return left

    # -- internals

    def _insert(self, **values: Any) -> int:
        id = self.store.insert(**values)
        self.store.write_record(id)
        return id

    def _view(self, row: Row, unfinished: list[Row], worker: Info | None, taken: bool = False) -> JobView:
        before = job_state.list_before(row, unfinished)
        try:
            return job_state.view_job(row, self.store.get_folder(row.id), self._follower, before, worker, taken)
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:  # the other jobs are still shown
            return job_state.view_damaged(row, error)

    def _find_shell_runs(self, rows: list[Row]) -> list[Path]:
        """Return the run folders in the roots, and beside those of jobs, that no job wrote."""
        of_jobs = {row.folder for row in rows}
        roots = dict.fromkeys([*self.roots, *(Path(row.folder).parent for row in rows if row.folder)])
        folders = []
        for root in roots:
            try:
                entries = sorted(os.scandir(root), key=lambda entry: entry.name)
            except OSError:  # does not exist yet, or no more
                continue
            for entry in entries:
                if entry.path not in of_jobs and os.path.isfile(os.path.join(entry.path, "events.jsonl")):
                    folders.append(Path(entry.path))
        return folders

    def _find_row(self, folder: Path) -> Row | None:
        """Return the newest job that writes into this folder."""
        if not is_utf8(os.path.abspath(folder)):  # `submit` refuses such names
            return None
        rows = self.store.read_rows("folder = ?", os.path.abspath(folder))
        return max(rows, key=lambda row: row.id, default=None)

    def _find_folder(self, id: int | str) -> Path | None:
        if isinstance(id, str):
            return Run.open(Path(id)).path
        row = self.store.read_row(id)
        return Path(row.folder) if row.folder else None

    def _end(self, id: int | str, wanted: str) -> None:
        if isinstance(id, str):
            run = Run.open(Path(id))
            row = self._find_row(run.path)
            if row is None or row.phase == "ended":
                if not run.is_locked():
                    raise UserError(NOT_TRAINING(folder=run.path))
                run.request("stop")
                return
        else:
            row = self.store.read_row(id)
        sentence = json.dumps(Sentence("cancelled").to_json())
        ended = {"phase": "ended", "state": "cancelled", "sentence": sentence, "ended": now()}
        if self.store.update(row.id, "phase = 'queued'", wanted=wanted, **ended):
            self.store.write_record(row.id)
            return
        of_row = Run(Path(row.folder)) if row.folder else None
        if not self.store.update(row.id, "phase = 'launched'", wanted=wanted):
            if of_row is None or not of_row.is_locked():
                raise UserError(Message("job {id} is neither running nor queued", id=row.id))
            of_row.request("stop")  # somebody in a shell continues it
            return
        if of_row and of_row.is_locked():  # ask at once; the worker does the rest
            of_row.request("stop")
            self.store.update(row.id, "asked = 0", asked=now())

    def _require_ended(self, id: int) -> Row:
        """Return the row of a job that has no living process; record the end of one that ended without a worker.

        Raises:
            UserError: the job is running, or waits.
        """
        row = self.store.read_row(id)
        if row.phase == "queued":
            raise UserError(Message("job {id} is waiting in the queue", id=id))
        if row.phase == "launched":
            with self._follow:
                job = self._view(row, [], None)
            if job.state not in ENDED:
                raise UserError(Message("job {id} has not ended; stop it first", id=id))
            values = {"phase": "ended", "state": job.state, "sentence": json.dumps(job.sentence.to_json())}
            self.store.update(
                id, "phase = 'launched' AND attempts = ?", row.attempts, ended=now(), exit_code=job.exit_code, **values
            )
            row = self.store.read_row(id)
        return row

    def require_new(self, folder: Path) -> None:
        """Refuse a folder in which a new training cannot start.

        Raises:
            UserError: it has a run or other files, or belongs to another job that has not ended.
        """
        self._require_no_writer(folder)
        ownership.require_new(folder)

    def _require_no_writer(self, folder: Path) -> None:
        for row in self.store.read_rows("phase <> 'ended' AND folder = ?", str(folder)):
            raise UserError(
                Message(
                    "{path}: job {id} already uses this folder; choose another name (--set name=...)",
                    path=folder,
                    id=row.id,
                )
            )

    def find_free_name(self, folder: Path) -> str:
        """Return a new name for a run folder: "zibo" -> "zibo-2", or the next number that no folder and no job has."""
        stem, taken = re.sub(r"-\d{1,4}$", "", folder.name), {row.folder for row in self.store.read_rows()}
        number = 2
        while (path := folder.with_name(f"{stem}-{number}")).exists() or str(path) in taken:
            number += 1
        return path.name


def _make_resume_arguments(text: str, overrides: Sequence[str]) -> list[str]:
    """Return arguments of `resume` that repeat what these overrides changed in the resolved config `text`.

    Resuming reads the run folder's own config. Name and place are given by the folder.
    """
    arguments = []
    for key in (override.partition("=")[0].strip() for override in overrides):
        value: Any = tomllib.loads(text)
        for part in key.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        if key not in ("name", "output_dir"):
            arguments += ["--set", config.format_toml_line(key, value)]
    return arguments


def make_paths_absolute(job: settings.Job, folder: Path) -> settings.Job:
    """Return the job with all paths on this machine made absolute; relative ones start from `folder`.

    A base model, or its components, that are no path here are a Hugging Face id or a word, and stay as they are.
    """

    def make_absolute(path: str) -> str:
        return os.path.abspath(os.path.join(folder, os.path.expanduser(path))) if path else path

    data = job.model_dump()
    for named in settings.find_path_places(data):
        path = make_absolute(named.path)
        if named.setting in settings.WORDS and (
            named.path == settings.WORDS[named.setting] or not os.path.exists(path)
        ):
            continue
        if named.setting == "dataset.folders.mask" and not settings.is_mask_folder(named.path):
            continue
        named.table[named.name] = path
    return settings.Job(**data)


def _make_columns(scheduling: Scheduling) -> dict[str, Any]:
    """Return the columns that every new job has.

    Raises:
        UserError: the GPU group is malformed.
    """
    gpus = scheduling.gpus if scheduling.gpus in ("", BESIDE) else normalize_group(scheduling.gpus)
    values = asdict(scheduling) | {"gpus": gpus}
    return values | {"created": now()}
