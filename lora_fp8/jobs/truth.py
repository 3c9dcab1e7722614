"""What is true of a job, looked up each time: its row, its processes, its run folder and the records of its keepers.

States: queued · starting · running · stopping · stopped (asked for, can be resumed) · cancelled · done (with files that
were verified) · failed (with the reason) · lost (its processes have gone without a word) · unknown (this user may not
read what would tell).

No state is taken from a flag. "running" means that a process with the attempt's token lives, "done" that the log says
so and the files it names are there. Every reason is a `Sentence`: a key and its arguments, so that a page can say it in
another language.
"""

import contextlib
import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..run import Run, Unreadable, without_home
from . import procs
from .store import Row

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
}

ENDED = ("stopped", "cancelled", "done", "failed", "lost")


@dataclass(frozen=True)
class Sentence:
    """A reason or a piece of news: a key of SENTENCES and what stands in it.

    Attributes:
        args: text and numbers by name; "cause" may itself be a sentence, as {"key": ..., "args": ...}.
    """

    key: str
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """In English."""
        shown = {
            name: Sentence(**value).text if isinstance(value, dict) else value for name, value in self.args.items()
        }
        return SENTENCES[self.key].format(**shown)

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "args": self.args}


@dataclass(frozen=True)
class JobView:
    """A job as it is now.

    Attributes:
        id: its number; of a run that was started in a shell, the path of its folder.
        state, sentence: see the head of this file.
        stage: what the trainer does: start, cache, load, preflight, train, export, verify; "" where it does not train.
        step, steps, loss, eta_s: newest step, how many there will be, its loss, seconds left as this process goes; None
            where not known.
        folder, log: the run folder and the file with what the job printed; None where there is none.
        place: 1 is the next to start; 0 where it does not wait.
        gpus, assigned: the GPUs asked for ("" is any), and those that it was given.
        resumable: whether `requeue` would go on from a checkpoint, whose step is `saved_step`.
        asked, termed, killed: unix seconds of the request to stop, of SIGTERM, of SIGKILL; 0 is not yet.
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
        """Plain values; the sentence also in English, as "text"."""
        told = {name: value for name, value in self.__dict__.items() if name != "sentence"}
        told |= {name: str(value) for name, value in told.items() if isinstance(value, Path)}
        return told | {"sentence": self.sentence.to_json(), "text": self.sentence.text, "command": list(self.command)}


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        crash: nobody asked for it and it was no clear failure, so that another attempt makes sense.
    """

    state: str
    sentence: Sentence
    exit_code: int | None = None
    crash: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# the run folder


@dataclass
class Progress:
    """What the event log tells of one attempt, read on from where the last look ended."""

    offset: int
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    last: dict[str, Any] | None = None  # the newest of done, stopped, error, if nothing came after it
    first: tuple[float, int] | None = None  # time and number of this process's first step
    newest: tuple[float, int] | None = None

    def eta_s(self) -> float | None:
        """Seconds left at the pace of this process, previews and checkpoints included."""
        if not (self.first and self.newest and self.steps and self.newest[1] > self.first[1]):
            return None
        seconds = (self.newest[0] - self.first[0]) / (self.newest[1] - self.first[1])
        return max(0.0, (self.steps - self.newest[1]) * seconds - max(0.0, time.time() - self.newest[0]))

    def take(self, event: dict[str, Any]) -> None:
        """Count one event in."""
        kind = event.get("event")
        if kind in ("done", "stopped", "error"):
            self.last = event
            return
        self.last = None
        if kind == "start":
            self.stage, self.first, self.newest = "start", None, None
        elif kind == "stage":
            self.stage = str(event.get("stage"))
            if _numbers(event, "step", "steps"):
                self.step, self.steps = event["step"], event["steps"]
        elif kind == "step" and _numbers(event, "step", "t"):  # a folder may hold anybody's log
            self.step, self.loss = event["step"], event.get("loss")
            self.newest = (event["t"], event["step"])
            self.first = self.first or self.newest


def _numbers(event: dict[str, Any], *names: str) -> bool:
    return all(isinstance(event.get(name), int | float) for name in names)


def follow(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of an event log behind this byte. -> (events, the byte to go on from)

    A log that has become shorter is read from its beginning: it is another one. Torn lines are left out, and a log that
    is not there or may not be read has none.
    """
    try:
        with open(file, "rb") as log:
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
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.append(event)
    return events, begin + len(whole)


class Follower:
    """Progress of many runs, each read on from where the last look ended. Keep one as long as you look."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Path, int], Progress] = {}

    def progress(self, folder: Path, mark: int) -> Progress:
        """What the log of this run tells behind byte `mark`."""
        found = self._seen.setdefault((folder, mark), Progress(mark))
        events, offset = follow(folder / "events.jsonl", found.offset)
        if offset < found.offset:  # another log
            found = self._seen[folder, mark] = Progress(0)
        for event in events:
            found.take(event)
        found.offset = offset
        return found


def saved_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in a run folder, whole or not; None where there is none."""
    steps = [int(m[1]) for path in folder.glob("checkpoints/step-*") if (m := re.fullmatch(r"step-(\d+)", path.name))]
    return max(steps, default=None)


ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)")


def tail(file: Path, lines: int = 40) -> list[str]:
    """The last lines of what a job printed: of a progress bar its newest state, and nothing that steers a terminal.

    The home folder is `~`, as in the log itself when the job has ended.
    """
    try:
        with open(file, "rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - 400 * lines - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    if size > 400 * lines + 4096:
        text = text.partition("\n")[2] or text
    shown = [ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    shown = ["".join(c if c.isprintable() or c == "\t" else " " for c in line).rstrip() for line in shown]
    while shown and not shown[-1]:
        shown.pop()
    return without_home("\n".join(shown[-lines:])).split("\n") if shown else []


# ---------------------------------------------------------------------------------------------------------------------
# processes


def living(row: Row) -> bool:
    """Whether any process of the row's last attempt is there. Its keeper is asked first, which takes microseconds."""
    if not row.token:
        return False
    if row.boot and row.boot != procs.boot_id():
        return False
    if row.pid and procs.alive(procs.Identity(row.pid, row.start, row.boot)):
        return True
    return bool(procs.members(row.token, row.pid)) or _letting_go(row)


def _letting_go(row: Row) -> bool:
    """Whether the trainer, in a session of its own perhaps, is just ending: its lock and its GPU are not free yet."""
    if not row.folder:
        return False
    run = Run(Path(row.folder))
    with contextlib.suppress(OSError, ValueError, Unreadable):
        if not run.alive():
            return False
        return procs.exiting(int(run.lock_file.read_text(encoding="utf-8").rpartition(" ")[2]))
    return False


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """What the keepers of an attempt wrote, by file name without suffix: "launch", "trainer-0", ..."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_bytes())
    return found


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where something else is in it. Raises OSError."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def ending(row: Row, attempt: Path, follower: Follower) -> Ending:
    """How an attempt of which no process is left ended. Reads the run folder and the records in `attempt`."""
    found = records(attempt)
    trainers = [record["status"] for name, record in sorted(found.items()) if name.startswith("trainer")]
    launch = found["launch"]["status"] if "launch" in found else None
    status = _status(trainers, launch)
    message = _message(attempt)
    folder = Path(row.folder) if row.folder else None
    progress = follower.progress(folder, row.mark) if folder else Progress(0)
    last = progress.last or {}
    if folder and last.get("event") == "done":
        return _done(folder, last, status)
    if folder is None and status == 0:
        return Ending("done", Sentence("command_done"), 0)
    if status in (2, 3):
        # The log's own words where the run had begun; before that, what the trainer said last.
        text = message or str(last.get("text", ""))
        return Ending("failed", Sentence("input" if status == 2 else "failure", {"message": text}), status)
    step = saved_step(folder) if folder else None
    if row.wanted != "run" and not (last.get("event") == "error" and status and status > 0):
        return Ending("stopped", _stopped(row, step, status), status)
    if status == 75 and (launch is None or launch >= 0):
        return Ending(
            "stopped", _stopped(row, step, status), status
        )  # asked by somebody else: `lora-fp8 stop`, a signal
    crashed = _crash(row, status, launch, found, last)
    return Ending("lost" if status is None else "failed", crashed, status, crash=row.wanted == "run")


def goes_on(row: Row, end: Ending) -> bool:
    """Whether another attempt follows."""
    return end.crash and row.crashes + 1 < row.max_attempts


def requeued(row: Row, end: Ending) -> Sentence:
    """Why, and which attempt it will be since a person last said run."""
    args = {"cause": end.sentence.to_json(), "attempt": row.crashes + 2, "attempts": row.max_attempts}
    return Sentence("requeued", args)


def _status(trainers: list[int], launch: int | None) -> int | None:
    """The status that tells most: where one process was killed, the others' ends are only what followed."""
    killed = [status for status in trainers if status < 0 and status != -15]
    return next(iter([*killed, *trainers[:1]]), launch)


def _message(attempt: Path) -> str:
    try:
        return (attempt / "message.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _done(folder: Path, event: dict[str, Any], status: int | None) -> Ending:
    files = [str(file) for file in event["files"]] if isinstance(event.get("files"), list) else []
    names = ", ".join(Path(file).name for file in files)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing or not files:
        return Ending("failed", Sentence("no_files", {"files": ", ".join(missing) or "none"}), status)
    try:
        reports = _object(folder / "verify.json")
    except OSError:
        reports = {}
    if not _verifies(folder):
        return Ending("done", Sentence("done_unverified", {"files": names}), 0)
    told = {file: reports.get(Path(file).name) for file in files}
    wrong = [file for file, report in told.items() if not (isinstance(report, dict) and report.get("ok"))]
    if wrong:
        return Ending("failed", Sentence("no_files", {"files": ", ".join(wrong)}), status)
    return Ending("done", Sentence("done", {"files": names}), 0)


def _verifies(folder: Path) -> bool:
    import tomllib

    try:
        return bool(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["export"]["verify"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _stopped(row: Row, step: int | None, status: int | None) -> Sentence:
    killed = row.killed and status != 75  # a trainer that has saved is not blamed for a launcher that lingers
    if row.kind == "command":
        return Sentence("command_killed" if killed else "command_stopped")
    hard = "_hard" if killed else ""
    if step is None:
        return Sentence("stopped_hard_early" if hard else "stopped_early")
    return Sentence(f"stopped{hard}", {"step": step})


def _crash(row: Row, status: int | None, launch: int | None, found: dict[str, Any], last: dict[str, Any]) -> Sentence:
    if row.boot and row.boot != procs.boot_id():
        return Sentence("reboot")
    if status is None:
        return Sentence("vanished")
    if status == 75 or (launch is not None and launch < 0 and status in (-15, launch)):
        assert launch is not None
        return Sentence("launcher", {"signal": procs.signal_name(-launch)})
    if status < 0:
        out_of_memory = any(record.get("oom_kills", 0) > 0 for record in found.values())
        known = {-9: "killed_memory" if out_of_memory else "killed", -15: "terminated", -7: "bus_error"}
        return Sentence(known.get(status, "crash"), {} if status in known else {"signal": procs.signal_name(-status)})
    if status in (3221225477, -1073741819):
        return Sentence("access_violation", {"code": status})
    if status == 0:
        return Sentence("no_word")
    if last.get("event") == "error":
        return Sentence("error", {"code": status, "message": f"{last.get('kind', '')}: {last.get('text', '')}"})
    return Sentence("exit", {"code": status})


# ---------------------------------------------------------------------------------------------------------------------
# a job, and a run that no queue knows


def view(
    row: Row, records_folder: Path, follower: Follower, place: int = 0, worker: Any = None, taken: bool = False
) -> JobView:
    """A job as it is now.

    Args:
        records_folder: where the job's records are (Store.folder).
        place: its place in the queue.
        worker: who launches jobs now (worker.Info), or None.
        taken: a job is writing into its folder: another one, where this has ended.
    """
    folder = Path(row.folder) if row.folder else None
    step = saved_step(folder) if folder else None
    log = folder / "log.txt" if folder else records_folder / "log.txt"
    told = JobView(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state="queued",
        sentence=Sentence("queued"),
        folder=folder,
        log=log,
        command=tuple(json.loads(row.command)),
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
    if row.phase == "queued":
        return replace(told, sentence=_waiting(row, worker))
    if row.phase == "ended" and taken:  # what goes on there is told once, by the other job
        told = replace(told, resumable=False)
    elif row.phase == "ended" and folder and _goes_on_elsewhere(folder):
        now = shell_view(folder, follower)
        return replace(now, id=row.id, created=row.created, attempts=row.attempts, max_attempts=row.max_attempts)
    if row.phase == "ended":
        return replace(told, state=row.state, sentence=Sentence(**json.loads(row.sentence)), **_reached(row, follower))
    if not living(row):
        if not row.pid and time.time() - row.launched < 5:
            return replace(told, state="starting", sentence=Sentence("starting"))  # noted first, then started
        # Over, and not noted yet: the worker is about to, or there is none.
        attempt = records_folder / f"attempt-{row.attempts}"
        end = ending(row, attempt, follower)
        if goes_on(row, end):
            state = "lost" if worker is None else "queued"
            return replace(told, state=state, sentence=requeued(row, end), exit_code=end.exit_code)
        values = {"state": end.state, "sentence": end.sentence, "exit_code": end.exit_code}
        values |= {"resumable": told.resumable and end.state != "done"}
        values |= {"ended": max((record.get("t", 0) for record in records(attempt).values()), default=0)}
        return replace(told, **values, **_reached(row, follower))
    progress = follower.progress(folder, row.mark) if folder else Progress(0)
    told = replace(
        told,
        stage=progress.stage,
        step=progress.step,
        steps=progress.steps,
        loss=progress.loss,
        eta_s=progress.eta_s() if progress.stage == "train" else None,
    )
    if row.wanted != "run":
        key = "stop_kill" if row.killed else "stop_term" if row.termed else "stop_asked"
        return replace(told, state="stopping", sentence=Sentence(key), eta_s=None)
    if folder and not progress.stage:
        return replace(told, state="starting", sentence=Sentence("starting"))
    return replace(told, state="running", sentence=_doing(progress, folder))


def _goes_on_elsewhere(folder: Path) -> bool:
    """Whether a shell goes on with a job that has ended; of a folder that may not be read any more, its end is told."""
    with contextlib.suppress(Unreadable):
        return Run(folder).alive()
    return False


def shell_view(folder: Path, follower: Follower) -> JobView:
    """A run that was started without the queue; another user's too, as far as it may be read."""
    try:
        return _shell_view(folder, follower)
    except (Unreadable, PermissionError) as error:
        said = Sentence("unreadable", {"file": str(error.filename)})
        return JobView(id=str(folder), name=folder.name, kind="train", state="unknown", sentence=said, folder=folder)


def _shell_view(folder: Path, follower: Follower) -> JobView:
    run = Run(folder)
    try:
        status = _object(run.status_file)
    except (FileNotFoundError, NotADirectoryError):
        status = {}
    log = folder / "log.txt"
    step = saved_step(folder)
    told = JobView(
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
        progress = follower.progress(folder, 0)
        told = replace(
            told,
            state="running",
            sentence=_doing(progress, folder),
            ended=0,
            stage=progress.stage,
            step=progress.step,
            steps=progress.steps,
            loss=progress.loss,
            eta_s=progress.eta_s() if progress.stage == "train" else None,
            resumable=False,
        )
        if (run.control / "stop").exists():
            return replace(told, state="stopping", sentence=Sentence("stop_asked"), eta_s=None)
        return told
    state = status.get("state")
    if state == "stopped":
        found = Sentence("stopped", {"step": step}) if step is not None else Sentence("stopped_early")
        return replace(told, state="stopped", sentence=found)
    if state in ("done", "error"):
        last = follower.progress(folder, 0).last or {}
        if state == "error":
            return replace(told, state="failed", sentence=Sentence("failure", {"message": str(last.get("text", ""))}))
        end = _done(folder, last, None)
        return replace(told, state=end.state, sentence=end.sentence, resumable=False)
    return told


def _waiting(row: Row, worker: Any) -> Sentence:
    if worker is None:
        return Sentence("no_worker")
    if row.gpus and row.gpus not in worker.groups:
        return Sentence("no_group", {"gpus": row.gpus, "groups": "; ".join(filter(None, worker.groups)) or "the CPU"})
    return Sentence(**json.loads(row.sentence)) if row.sentence else Sentence("queued")


def _doing(progress: Progress, folder: Path | None) -> Sentence:
    if folder is None:
        return Sentence("stage", {"stage": "running"})
    if progress.stage == "train" and progress.step is not None:
        return Sentence("training", {"step": progress.step, "steps": progress.steps})
    return Sentence("stage", {"stage": progress.stage})


def _reached(row: Row, follower: Follower) -> dict[str, Any]:
    if not row.folder:
        return {}
    progress = follower.progress(Path(row.folder), row.mark)
    return {"step": progress.step, "steps": progress.steps, "loss": progress.loss}
