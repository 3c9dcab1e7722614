"""Find out the state of a job from its row, its processes, its run folder and the records of its keepers.

States: queued · starting · running · stopping · stopped (on request, can be resumed) · cancelled · done (and its files
are verified) · failed (with the reason) · lost (its processes disappeared without a record) · unknown (this user may
not read what would show it).

No state is taken from a flag: "running" means that a process with the attempt's token is alive, "done" that the log
says so and that the files it names exist. Every reason is a `Sentence`, a key with arguments, so that the web page can
show it in another language.
"""

import contextlib
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import config
from ..common.messages import add_translations, restore, without_home
from ..common.reading import MOST_JSON, MOST_TEXT, load_text, open_regular, parse_json, read_bytes
from ..run import Run, Unreadable
from . import procs
from .store import Row, parse_command

SENTENCES = {
    "queued": "waits for its turn",
    "no_worker": "waits; no worker is running (`lora-fp8 worker`)",
    "no_group": "waits for GPUs {gpus}, which the worker does not have; it has: {groups}",
    "requeued": "{cause}; attempt {attempt} of {attempts} follows",
    "starting": "its processes are starting",
    "stage": "{stage}",
    "training": "step {step} of {steps}",
    "stop_asked": "asked to save and stop",
    "stop_term": "asked to stop, then sent SIGTERM",
    "stop_kill": "asked to stop, sent SIGTERM, then killed (SIGKILL)",
    "cancelled": "taken out of the queue before it started",
    "stopped": "stopped and saved at step {step}",
    "stopped_early": "stopped before anything was saved",
    "stopped_hard": "did not stop when asked and was killed (SIGKILL); the newest checkpoint is of step {step}",
    "stopped_hard_early": "did not stop when asked and was killed (SIGKILL); nothing was saved",
    "done": "done; files written and verified: {files}",
    "done_unverified": "done; files written, and not verified (export.verify = false): {files}",
    "command_done": "done",
    "command_stopped": "stopped when asked",
    "command_killed": "did not end when asked and was killed (SIGKILL)",
    "no_files": "the log says done, but these are not there or did not pass: {files}",
    "no_word": "ended with exit code 0, but the log does not say that it is done",
    "input": "something given is wrong: {message}",
    "failure": "failed while running: {message}",
    "error": "ended with an error that nobody foresaw (exit code {code}): {message}",
    "exit": "ended with exit code {code}; the last lines of the log may say why",
    "access_violation": "ended with {code} (access violation), often a driver or a broken library",
    "killed_memory": "killed (SIGKILL) while the kernel was killing for lack of memory",
    "killed": "killed (SIGKILL), by somebody or because memory ran out; the kernel's log tells which",
    "terminated": "ended by SIGTERM, which nobody here had sent",
    "bus_error": "ended by SIGBUS: a file shrank while it was read (a download, a full disk), or memory is broken",
    "crash": "crashed ({signal}) in code outside of Python, often a driver or a broken library",
    "launcher": "its launcher was killed ({signal}); what it had started was ended",
    "vanished": "its processes have gone without a word",
    "reboot": "the machine was restarted meanwhile",
    "folder": "its run folder cannot be written: {message}",
    "unreadable": "what became of it is not known: this user may not read {file}",
    "damaged": "its entry in the queue is damaged and cannot be used ({error})",
}

ENDED = ("stopped", "cancelled", "done", "failed", "lost")


@dataclass(frozen=True)
class Sentence:
    """A reason or a status: a key of SENTENCES and its arguments.

    Attributes:
        key: a key of SENTENCES.
        args: text and numbers by name; "cause" may be a sentence itself, as {"key": ..., "args": ...}.
    """

    key: str
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The sentence in English."""
        arguments = {
            name: Sentence(**value).text if isinstance(value, dict) else value for name, value in self.args.items()
        }
        return SENTENCES[self.key].format(**arguments)

    def to_json(self) -> dict[str, Any]:
        """Return what the queue stores; `parse` reads it."""
        return add_translations({"key": self.key, "args": self.args})

    @classmethod
    def parse(cls, text: str) -> "Sentence":
        """Parse the sentence of a row; one that this program did not write becomes "damaged"."""
        try:
            sentence = cls(**restore(parse_json(text)))
            assert isinstance(sentence.text, str)
            return sentence
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            return describe_damage(error)


def describe_damage(error: Exception) -> Sentence:
    """Return the sentence for a row of the queue that cannot be used, or that names something that cannot."""
    return Sentence("damaged", {"error": str(error)[:200] or type(error).__name__})


@dataclass(frozen=True)
class JobView:
    """A job as it is now.

    Attributes:
        id: its number; for a run that was started in a shell, the path of its folder.
        name: the job's name.
        kind: "train", or "command" for a subcommand of `lora-fp8`.
        state, sentence: see the top of this file.
        stage: the trainer's stage: start, cache, load, preflight, train, export, verify; "" if nothing is training.
        step, steps, loss, eta_s: newest step, number of steps, the step's loss, and seconds left at the pace of this
            process; None if unknown.
        folder, log: the run folder, and the file with the job's output; None if there is none.
        command: a command's name and arguments.
        place: position in the queue, 1 being the next to start; 0 if it is not waiting.
        priority: higher starts earlier.
        gpus, assigned: the GPUs asked for ("" for any), and those that it was given.
        attempts, max_attempts: number of starts so far, and how often it may be started if it crashes.
        created, launched, ended: unix seconds; 0 if not yet.
        exit_code: of the last attempt.
        resumable: `requeue` would continue from a checkpoint, whose step is `saved_step`.
        asked, termed, killed: unix seconds of the request to stop, of SIGTERM and of SIGKILL; 0 if not yet.
    """

    id: int | str
    name: str
    kind: str
    state: str
    sentence: Sentence
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eta_s: float | None = None
    folder: Path | None = None
    log: Path | None = None
    command: tuple[str, ...] = ()
    place: int = 0
    priority: int = 0
    gpus: str = ""
    assigned: str = ""
    attempts: int = 0
    max_attempts: int = 0
    created: float = 0
    launched: float = 0
    ended: float = 0
    exit_code: int | None = None
    resumable: bool = False
    saved_step: int | None = None
    asked: float = 0
    termed: float = 0
    killed: float = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; "text" is the sentence in English."""
        content = {name: value for name, value in self.__dict__.items() if name != "sentence"}
        content |= {name: str(value) for name, value in content.items() if isinstance(value, Path)}
        content |= {"sentence": self.sentence.to_json(), "text": self.sentence.text, "command": list(self.command)}
        return content


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        state: "done", "stopped", "failed" or "lost".
        sentence: the reason.
        exit_code: of the trainer or command; None if unknown.
        crash: the attempt ended without a request and without a clear failure, so that another attempt makes sense.
    """

    state: str
    sentence: Sentence
    exit_code: int | None = None
    crash: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# the run folder


@dataclass
class Progress:
    """What the event log says about one attempt; updated by reading what was added."""

    offset: int
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    last: dict[str, Any] | None = None  # the newest of done, stopped and error, if no event follows it
    first: tuple[float, int] | None = None  # time and step number of the first step of this process
    newest: tuple[float, int] | None = None

    def compute_eta_s(self) -> float | None:
        """Return the seconds left at the pace of this process, including previews and checkpoints; None if unknown."""
        if not (self.first and self.newest and self.steps and self.newest[1] > self.first[1]):
            return None
        seconds = (self.newest[0] - self.first[0]) / (self.newest[1] - self.first[1])
        return max(0.0, (self.steps - self.newest[1]) * seconds - max(0.0, time.time() - self.newest[0]))

    def update(self, event: dict[str, Any]) -> None:
        """Update the progress with one event."""
        kind = event.get("event")
        if kind in ("done", "stopped", "error"):
            self.last = event
            return
        self.last = None
        if kind == "start":
            self.stage, self.first, self.newest = "start", None, None
        elif kind == "stage":
            self.stage = str(event.get("stage"))
            if _are_numbers(event, "step", "steps"):
                self.step, self.steps = event["step"], event["steps"]
        elif kind == "step" and _are_numbers(event, "step", "t"):  # another program may have written this log
            self.step, self.loss = event["step"], event.get("loss")
            self.newest = (event["t"], event["step"])
            self.first = self.first or self.newest


def _are_numbers(event: dict[str, Any], *names: str) -> bool:
    return all(isinstance(event.get(name), int | float) for name in names)


def follow(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines of an event log from this byte on.

    If the log is now shorter, it is a different one and is read from the start. Damaged lines are skipped. A log that
    does not exist or may not be read has no events.

    Returns:
        The events, and the byte to continue from.
    """
    try:
        with open_regular(file) as log:
            size = log.seek(0, 2)
            if size == offset:
                return [], offset
            log.seek(0 if size < offset else offset)
            begin, data = log.tell(), log.read()
    except OSError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    events = []
    for line in whole.decode(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            event = parse_json(line)
            if isinstance(event, dict):
                events.append(event)
    return events, begin + len(whole)


class Follower:
    """Progress of many runs, each read incrementally. Keep one instance for as long as you follow the runs."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Path, int], Progress] = {}

    def read_progress(self, folder: Path, mark: int) -> Progress:
        """Return what the log of this run says after byte `mark`."""
        progress = self._seen.setdefault((folder, mark), Progress(mark))
        events, offset = follow(folder / "events.jsonl", progress.offset)
        if offset < progress.offset:  # a different log
            progress = self._seen[folder, mark] = Progress(0)
        for event in events:
            progress.update(event)
        progress.offset = offset
        return progress


def find_saved_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a run folder, complete or not; None if there is none."""
    steps = [int(m[1]) for path in folder.glob("checkpoints/step-*") if (m := re.fullmatch(r"step-(\d+)", path.name))]
    return max(steps, default=None)


ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)")


def read_tail(file: Path, lines: int = 40) -> list[str]:
    """Return the last lines of a job's output, with progress bars in their newest state and no terminal escapes.

    The home folder is shown as `~`, as it is in the log itself once the job has ended.
    """
    try:
        with open_regular(file) as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - 400 * lines - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    if size > 400 * lines + 4096:
        text = text.partition("\n")[2] or text
    visible = [ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    visible = ["".join(c if c.isprintable() or c == "\t" else " " for c in line).rstrip() for line in visible]
    while visible and not visible[-1]:
        visible.pop()
    return without_home("\n".join(visible[-lines:])).split("\n") if visible else []


# ---------------------------------------------------------------------------------------------------------------------
# processes


def is_alive(row: Row) -> bool:
    """Return True if any process of the row's last attempt is alive. The keeper is checked first, in microseconds."""
    if not row.token:
        return False
    if row.boot and row.boot != procs.read_boot_id():
        return False
    if row.pid and procs.is_alive(procs.Identity(row.pid, row.start, row.boot)):
        return True
    return bool(procs.find_members(row.token, row.pid)) or _is_exiting(row)


def _is_exiting(row: Row) -> bool:
    """Return True if the trainer is exiting, perhaps in its own session: its lock and its GPU are not free yet."""
    if not row.folder:
        return False
    run = Run(Path(row.folder))
    with contextlib.suppress(OSError, ValueError, Unreadable):
        if not run.alive():
            return False
        return procs.is_exiting(int(run.lock_file.read_text(encoding="utf-8").rpartition(" ")[2]))
    return False


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the keepers of an attempt wrote, by file name without suffix: "launch", "trainer-0", ..."""
    contents = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            contents[path.stem] = parse_json(read_bytes(path, MOST_TEXT))
    return contents


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if the file has something else. Raises OSError."""
    try:
        content = parse_json(read_bytes(path, MOST_JSON))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def find_ending(row: Row, attempt: Path, follower: Follower) -> Ending:
    """Find out how an attempt ended that has no process left, from the run folder and the records in `attempt`."""
    by_name = read_records(attempt)
    trainer_statuses = [record["status"] for name, record in sorted(by_name.items()) if name.startswith("trainer")]
    launcher_status = by_name["launch"]["status"] if "launch" in by_name else None
    status = _pick_status(trainer_statuses, launcher_status)
    folder = Path(row.folder) if row.folder else None
    progress = follower.read_progress(folder, row.mark) if folder else Progress(0)
    last = progress.last or {}
    if folder and last.get("event") == "done":
        return _check_done(folder, last, status)
    if folder is None and status == 0:
        return Ending("done", Sentence("command_done"), 0)
    if status in (2, 3):
        # Once the run had begun, its log has the reason; before that, the trainer's last message has it.
        text = _read_message(attempt) or str(last.get("text", ""))
        return Ending("failed", Sentence("input" if status == 2 else "failure", {"message": text}), status)
    if _was_stopped(row, status, launcher_status, last):
        return Ending("stopped", _describe_stop(row, find_saved_step(folder) if folder else None, status), status)
    crash = _describe_crash(row, status, launcher_status, by_name, last)
    return Ending("lost" if status is None else "failed", crash, status, crash=row.wanted == "run")


def _was_stopped(row: Row, status: int | None, launcher_status: int | None, last: dict[str, Any]) -> bool:
    """Return True if the attempt was stopped: by its owner, by `lora-fp8 stop` or by a signal."""
    if row.wanted != "run" and not (last.get("event") == "error" and status and status > 0):
        return True
    return status == 75 and (launcher_status is None or launcher_status >= 0)


def will_retry(row: Row, end: Ending) -> bool:
    """Return True if another attempt follows."""
    return end.crash and row.crashes + 1 < row.max_attempts


def describe_retry(row: Row, end: Ending) -> Sentence:
    """Describe why another attempt follows, with its number since a person last started the job."""
    arguments = {"cause": end.sentence.to_json(), "attempt": row.crashes + 2, "attempts": row.max_attempts}
    return Sentence("requeued", arguments)


def _pick_status(trainer_statuses: list[int], launcher_status: int | None) -> int | None:
    """Return the most informative status: if one process was killed, the others ended only as a consequence."""
    killed = [status for status in trainer_statuses if status < 0 and status != -15]
    return next(iter([*killed, *trainer_statuses[:1]]), launcher_status)


def _read_message(attempt: Path) -> str:
    """Return what the attempt's command failed with; "" if it left no message."""
    try:
        content = restore(parse_json(load_text(attempt / "message.json")))
        return str(content["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _check_done(folder: Path, event: dict[str, Any], status: int | None) -> Ending:
    files = [str(file) for file in event["files"]] if isinstance(event.get("files"), list) else []
    file_names = ", ".join(Path(file).name for file in files)
    missing = [file for file in files if not _is_file(folder / file)]
    if missing or not files:
        return Ending("failed", Sentence("no_files", {"files": ", ".join(missing) or "none"}), status)
    try:
        reports = _read_object(folder / "verify.json")
    except OSError:
        reports = {}
    if not _wants_verification(folder):
        return Ending("done", Sentence("done_unverified", {"files": file_names}), 0)
    by_file = {file: reports.get(Path(file).name) for file in files}
    unverified = [file for file, report in by_file.items() if not (isinstance(report, dict) and report.get("ok"))]
    if unverified:
        return Ending("failed", Sentence("no_files", {"files": ", ".join(unverified)}), status)
    return Ending("done", Sentence("done", {"files": file_names}), 0)


def _is_file(path: Path) -> bool:
    """Return True if this is a file; False also for a name that no file system accepts."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _wants_verification(folder: Path) -> bool:
    try:
        return bool(config.read_toml(load_text(folder / "config.toml"))["export"]["verify"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _describe_stop(row: Row, step: int | None, status: int | None) -> Sentence:
    killed = row.killed and status != 75  # if the trainer has saved, only its launcher had to be killed
    if row.kind == "command":
        return Sentence("command_killed" if killed else "command_stopped")
    hard = "_hard" if killed else ""
    if step is None:
        return Sentence("stopped_hard_early" if hard else "stopped_early")
    return Sentence(f"stopped{hard}", {"step": step})


def _describe_crash(
    row: Row, status: int | None, launcher_status: int | None, by_name: dict[str, Any], last: dict[str, Any]
) -> Sentence:
    if row.boot and row.boot != procs.read_boot_id():
        return Sentence("reboot")
    if status is None:
        return Sentence("vanished")
    if status == 75 or (launcher_status is not None and launcher_status < 0 and status in (-15, launcher_status)):
        assert launcher_status is not None
        return Sentence("launcher", {"signal": procs.name_signal(-launcher_status)})
    if status < 0:
        out_of_memory = any(record.get("oom_kills", 0) > 0 for record in by_name.values())
        keys = {-9: "killed_memory" if out_of_memory else "killed", -15: "terminated", -7: "bus_error"}
        return Sentence(keys.get(status, "crash"), {} if status in keys else {"signal": procs.name_signal(-status)})
    if status in (3221225477, -1073741819):
        return Sentence("access_violation", {"code": status})
    if status == 0:
        return Sentence("no_word")
    if last.get("event") == "error":
        return Sentence("error", {"code": status, "message": f"{last.get('kind', '')}: {last.get('text', '')}"})
    return Sentence("exit", {"code": status})


# ---------------------------------------------------------------------------------------------------------------------
# a job, and a run that was started without the queue


def view(
    row: Row, records_folder: Path, follower: Follower, place: int = 0, worker: Any = None, taken: bool = False
) -> JobView:
    """Return the current state of a job.

    Args:
        row: the job's row.
        records_folder: folder with the job's records (Store.folder).
        follower: reads the event log.
        place: its position in the queue.
        worker: the current worker (worker.Info), or None.
        taken: a job is writing into its folder; if this one has ended, it is another job.
    """
    recorded = _view_row(row, records_folder, place)
    if row.phase == "queued":
        return replace(recorded, sentence=_describe_wait(row, worker))
    if row.phase == "ended":
        return _view_ended(row, recorded, follower, taken)
    if is_alive(row):
        return _view_alive(row, recorded, follower)
    return _view_unrecorded(row, recorded, records_folder / f"attempt-{row.attempts}", follower, worker)


def _view_row(row: Row, records_folder: Path, place: int) -> JobView:
    """Return the view of a job as its row has it, before its processes and its run folder are looked at."""
    folder = Path(row.folder) if row.folder else None
    step = find_saved_step(folder) if folder else None
    return JobView(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state="queued",
        sentence=Sentence("queued"),
        folder=folder,
        log=(folder or records_folder) / "log.txt",
        command=_read_command(row),
        place=place,
        priority=row.priority,
        gpus=row.gpus,
        assigned=row.assigned,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        created=row.created,
        launched=row.launched,
        ended=row.ended,
        exit_code=row.exit_code,
        resumable=step is not None and row.state != "done",
        saved_step=step,
        asked=row.asked,
        termed=row.termed,
        killed=row.killed,
    )


def _view_ended(row: Row, recorded: JobView, follower: Follower, taken: bool) -> JobView:
    """Return the view of a job whose end is recorded; of a run that goes on in a shell, that run's."""
    if taken:  # what happens in the folder is reported once, for the other job
        recorded = replace(recorded, resumable=False)
    elif recorded.folder and _is_continued_elsewhere(recorded.folder):
        continued = view_shell_run(recorded.folder, follower)
        return replace(continued, id=row.id, created=row.created, attempts=row.attempts, max_attempts=row.max_attempts)
    return replace(recorded, state=row.state, sentence=Sentence.parse(row.sentence), **_read_reached(row, follower))


def _view_unrecorded(row: Row, recorded: JobView, attempt: Path, follower: Follower, worker: Any) -> JobView:
    """Return the view of a started job without a process: it is about to start, or has ended.

    An end that is not recorded yet is about to be recorded by the worker, or there is none.
    """
    if not row.pid and time.time() - row.launched < 5:
        return replace(recorded, state="starting", sentence=Sentence("starting"))  # recorded first, then started
    end = find_ending(row, attempt, follower)
    if will_retry(row, end):
        state = "lost" if worker is None else "queued"
        return replace(recorded, state=state, sentence=describe_retry(row, end), exit_code=end.exit_code)
    values: dict[str, Any] = {"state": end.state, "sentence": end.sentence, "exit_code": end.exit_code}
    values |= {"resumable": recorded.resumable and end.state != "done"}
    values |= {"ended": max((record.get("t", 0) for record in read_records(attempt).values()), default=0)}
    return replace(recorded, **values, **_read_reached(row, follower))


def _view_alive(row: Row, recorded: JobView, follower: Follower) -> JobView:
    """Return the view of a job that has a process: it is starting, running or being stopped."""
    folder = recorded.folder
    progress = follower.read_progress(folder, row.mark) if folder else Progress(0)
    recorded = replace(
        recorded,
        stage=progress.stage,
        step=progress.step,
        steps=progress.steps,
        loss=progress.loss,
        eta_s=progress.compute_eta_s() if progress.stage == "train" else None,
    )
    if row.wanted != "run":
        key = "stop_kill" if row.killed else "stop_term" if row.termed else "stop_asked"
        return replace(recorded, state="stopping", sentence=Sentence(key), eta_s=None)
    if folder and not progress.stage:
        return replace(recorded, state="starting", sentence=Sentence("starting"))
    return replace(recorded, state="running", sentence=_describe_progress(progress, folder))


def view_damaged(row: Row, error: Exception) -> JobView:
    """Return the view of a job whose row, or something that it names, cannot be used."""
    name = "".join(c if c.isprintable() else " " for c in row.name[:100])
    return JobView(id=row.id, name=name, kind=row.kind, state="unknown", sentence=describe_damage(error))


def _read_command(row: Row) -> tuple[str, ...]:
    """Return the words of a command; () if the row has something else, which fails the job when it is started."""
    try:
        return tuple(parse_command(row))
    except ValueError:
        return ()


def _is_continued_elsewhere(folder: Path) -> bool:
    """Return True if somebody in a shell continues a job that has ended; False if the folder may not be read."""
    with contextlib.suppress(Unreadable):
        return Run(folder).alive()
    return False


def view_shell_run(folder: Path, follower: Follower) -> JobView:
    """Return the state of a run that was started without the queue, perhaps by another user."""
    try:
        return _view_shell_run(folder, follower)
    except (Unreadable, PermissionError) as error:
        sentence = Sentence("unreadable", {"file": str(error.filename)})
        return JobView(
            id=str(folder), name=folder.name, kind="train", state="unknown", sentence=sentence, folder=folder
        )


def _view_shell_run(folder: Path, follower: Follower) -> JobView:
    run = Run(folder)
    try:
        status = _read_object(run.status_file)
    except (FileNotFoundError, NotADirectoryError):
        status = {}
    log = folder / "log.txt"
    step = find_saved_step(folder)
    run_view = JobView(
        id=str(folder),
        name=folder.name,
        kind="train",
        state="lost",
        sentence=Sentence("vanished"),
        step=status.get("step"),
        steps=status.get("steps"),
        loss=status.get("loss"),
        folder=folder,
        log=log if log.is_file() else None,
        ended=status.get("t", 0),
        resumable=step is not None,
        saved_step=step,
    )
    if run.alive():
        progress = follower.read_progress(folder, 0)
        run_view = replace(
            run_view,
            state="running",
            sentence=_describe_progress(progress, folder),
            ended=0,
            stage=progress.stage,
            step=progress.step,
            steps=progress.steps,
            loss=progress.loss,
            eta_s=progress.compute_eta_s() if progress.stage == "train" else None,
            resumable=False,
        )
        if (run.control / "stop").exists():
            return replace(run_view, state="stopping", sentence=Sentence("stop_asked"), eta_s=None)
        return run_view
    state = status.get("state")
    if state == "stopped":
        sentence = Sentence("stopped", {"step": step}) if step is not None else Sentence("stopped_early")
        return replace(run_view, state="stopped", sentence=sentence)
    if state in ("done", "error"):
        last = follower.read_progress(folder, 0).last or {}
        if state == "error":
            return replace(
                run_view, state="failed", sentence=Sentence("failure", {"message": str(last.get("text", ""))})
            )
        end = _check_done(folder, last, None)
        return replace(run_view, state=end.state, sentence=end.sentence, resumable=False)
    return run_view


def _describe_wait(row: Row, worker: Any) -> Sentence:
    if worker is None:
        return Sentence("no_worker")
    if row.gpus and row.gpus not in worker.groups:
        return Sentence("no_group", {"gpus": row.gpus, "groups": "; ".join(filter(None, worker.groups)) or "the CPU"})
    return Sentence.parse(row.sentence) if row.sentence else Sentence("queued")


def _describe_progress(progress: Progress, folder: Path | None) -> Sentence:
    if folder is None:
        return Sentence("stage", {"stage": "running"})
    if progress.stage == "train" and progress.step is not None:
        return Sentence("training", {"step": progress.step, "steps": progress.steps})
    return Sentence("stage", {"stage": progress.stage})


def _read_reached(row: Row, follower: Follower) -> dict[str, Any]:
    if not row.folder:
        return {}
    progress = follower.read_progress(Path(row.folder), row.mark)
    return {"step": progress.step, "steps": progress.steps, "loss": progress.loss}
