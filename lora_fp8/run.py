"""The run folder: where a job happens, and the only interface between the trainer and everything that watches it.

    runs/<name>/  config.toml  events.jsonl  status.json  lock  control/  samples/  checkpoints/  export/  verify.json

* `config.toml` is the resolved job: a run can always be repeated from its own folder.
* `events.jsonl` has one JSON object a line: {"t": unix seconds, "event": ..., ...}. Readers follow it by offset.
* `control/stop`, `control/save` and `control/preview` are requests: somebody makes the file, the trainer acts at the
  next step. A signal is a request to stop, too (`StopSignal`).
* `status.json` has the newest stage, step and state; a run that can be resumed ends with "state": "stopped". Under
  `accelerate launch`, whose own exit code is 1 for everything but success, this is where to look.
* `lock` is held (flock) as long as the trainer lives. Liveness is derived from that lock, never from a flag: a killed
  process cannot forget to clear a lock.

Standard library only (layer 0): the web page and the queue read run folders without torch.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import locks
from .config import UserError


class RunFailure(Exception):
    """The run failed while running, through no typing mistake of the user: exit code 3."""


class Stopped(Exception):
    """The run was asked to stop, has saved, and can be resumed: exit code 75 (EX_TEMPFAIL)."""


class Unreadable(UserError):
    """This user may not read what would tell of a run, such as another user's.

    Args:
        filename: what cannot be read.
        reason: why, in the system's words.
    """

    def __init__(self, filename: Path, reason: str | None):
        self.filename = filename
        super().__init__(f"{filename}: cannot be read ({reason}); ask as the user whose run it is")


def without_home(text: str) -> str:
    """The text with `~` for the home folder where a path begins with it."""
    home = os.path.expanduser("~")
    if len(Path(home).parts) < 2:  # "/", or nobody knows
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?=[/\\])", "~", text)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader, a crash or a power cut sees the old content or the new, never a part.

    The bytes go to a temporary file in the same folder through our own descriptor (so that a full disk is an OSError
    with its number), are synced, renamed over the target, and the folder is synced so that the rename itself survives.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with write_synced(temporary) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def write_synced(path: Path) -> Iterator[Any]:
    """A new binary file, flushed and fsynced when the block ends; permissions follow the umask.

    Raises:
        OSError: with the folder as its `filename`, where the system named no file (a full disk).
    """
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path.parent)
        raise


def sync_folder(path: Path) -> None:
    """Make renames and new names in this folder durable."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Run:
    """One run folder. `Run.create` for the trainer (takes the lock), `Run.open` for readers."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints, self.samples, self.export = path / "checkpoints", path / "samples", path / "export"
        self.control = path / "control"
        self.events_file, self.status_file, self.config_file = (
            path / "events.jsonl",
            path / "status.json",
            path / "config.toml",
        )
        self.verify_file, self.lock_file = path / "verify.json", path / "lock"
        self.echo: Callable[[dict[str, Any]], None] | None = None  # is shown each event, to print it
        self._lock: Any = None
        self._events: Any = None
        self._status: dict[str, Any] = {}
        self._status_written = -1.0  # by the clock that never jumps

    @classmethod
    def create(cls, path: Path, config_text: str, *, resume: bool = False) -> "Run":
        """Make (or, to resume, take over) a run folder, lock it and write the resolved config.

        When resuming, the config that is there stays until `write_config`: a change that the checkpoint refuses must
        not be what the next attempt reads.

        Raises:
            UserError: another process holds the folder; or it has checkpoints already and `resume` is not asked for.
        """
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            if not resume and (any(run.checkpoints.glob("step-*")) or any(run.export.glob("*.safetensors"))):
                raise UserError(
                    f"{path}: a run was here already; `lora-fp8 resume {path}` goes on with it, "
                    "or choose another name (--set name=...)"
                )
            for folder in (run.checkpoints, run.samples, run.export, run.control):
                folder.mkdir(exist_ok=True)
            for request in run.control.iterdir():  # a request to an earlier process must not stop this one
                request.unlink()
            # What killed processes left. Only here, under the lock: elsewhere it may be what the trainer writes now.
            for leftover in (*path.glob(".*.tmp"), *run.export.rglob(".*.tmp"), *run.samples.glob(".*.tmp")):
                leftover.unlink()
            for leftover in run.checkpoints.glob(".tmp-step-*"):
                shutil.rmtree(leftover)
            if not (resume and run.config_file.exists()):
                run.write_config(config_text)
            run._mend_events()
            # "replace": a file's name may hold bytes that are no text, and a warning about it must not end the run.
            run._events = open(run.events_file, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 - open for life
        except BaseException as error:
            run.close()  # the traceback would keep the lock for as long as somebody holds it
            if isinstance(error, OSError):
                raise UserError(f"{path}: the run folder cannot be made or written ({error.strerror})") from None
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """An existing run folder, for reading.

        Raises:
            UserError: there is no run at that place.
            Unreadable: this user may not look.
        """
        try:
            found = (path / "config.toml").is_file()
        except OSError as error:  # no way in; where there is nothing, is_file answers
            raise Unreadable(path, error.strerror) from None
        if not found:
            raise UserError(f"{path}: not a run folder (it has no config.toml); runs are made by `lora-fp8 train`")
        return cls(path)

    def close(self) -> None:
        """Close the event log and give the lock back."""
        for file in (self._events, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # on a full disk closing fails too, and must not hide why
                    file.close()
        self._events = self._lock = None

    # -- what the trainer says

    def check_place(self) -> None:
        """Look whether the folder is still the one that this process holds.

        Raises:
            FileNotFoundError: it was moved or deleted; what is written from now on would be apart from the rest.
        """
        try:
            here = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.lock_file))
        except OSError:
            here = False
        if not here:
            gone = (
                "the run folder was moved or deleted while it was being trained; `lora-fp8 resume` goes on where it is"
            )
            raise FileNotFoundError(errno.ENOENT, gone, os.fspath(self.path))

    def log_event(self, event: str, **fields: Any) -> None:
        """Append one line to events.jsonl and refresh status.json (the newest stage, step and state).

        In a `text` the home folder is written as `~`: logs are shown to others, and it has their owner's name in it.

        Raises:
            OSError: the disk refused, or the folder has gone.
        """
        self.check_place()
        if isinstance(fields.get("text"), str):
            fields["text"] = without_home(fields["text"])
        now = round(time.time(), 3)
        line = {"t": now, "event": event, **fields}
        self._events.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._events.flush()
        if self.echo is not None:
            try:
                self.echo(line)
            except OSError as error:  # the terminal, the pipe or the page that it was printed to has gone
                self.echo = None
                self.log_event("warning", text=f"events are no longer printed ({error.strerror}); the run goes on")
        if event == "step":
            self._status.update(step=fields["step"], loss=fields.get("loss"))
        elif event in ("stage", "start"):
            self._status.update(fields, state=fields.get("stage", event))
        elif event in ("done", "error", "stopped"):
            self._status.update(state=event)
        # status.json is a convenience for pollers; per-step durability would cost an fsync a step.
        if event != "step" or time.monotonic() - self._status_written >= 1:
            self._status_written = time.monotonic()
            self._status["t"], self._status["pid"] = now, os.getpid()
            temporary = self.status_file.with_suffix(".tmp")
            temporary.write_text(json.dumps(self._status), encoding="utf-8")
            os.replace(temporary, self.status_file)

    def write_config(self, config_text: str) -> None:
        """Put the resolved job into the folder."""
        atomic_write(self.config_file, config_text.encode())

    def requested(self, what: str) -> bool:
        """Whether somebody asked for `stop`, `save` or `preview`; `save` and `preview` are cleared by asking."""
        request = self.control / what
        if not request.exists():
            return False
        if what != "stop":
            request.unlink(missing_ok=True)
        return True

    # -- what readers ask

    def request(self, what: str) -> None:
        """Ask the trainer for `stop`, `save` or `preview` at its next step.

        Raises:
            UserError: the folder cannot be written, by this user or at all.
        """
        try:
            self.control.mkdir(exist_ok=True)
            (self.control / what).touch()
        except OSError as error:
            raise UserError(
                f"{self.control / what}: cannot be written ({error.strerror}); ask as the user who trains, "
                "or send SIGTERM to the process that `lock` names"
            ) from None

    def alive(self) -> bool:
        """Whether a process holds this run now.

        Raises:
            Unreadable: this user may not read the lock, and so cannot know.
        """
        try:
            with open(self.lock_file, "rb") as file:
                return not locks.try_lock(file, shared=True)
        except (FileNotFoundError, NotADirectoryError):  # no folder, or what should be one is a file
            return False
        except OSError as error:
            raise Unreadable(self.lock_file, error.strerror) from None

    def events(self) -> list[dict[str, Any]]:
        """All whole lines of the event log; the torn last line of a killed process is left out."""
        if not self.events_file.exists():
            return []
        text = self.events_file.read_text(encoding="utf-8", errors="replace")
        found = []
        for line in text.split("\n")[:-1]:  # not splitlines: a caption may hold a line separator of Unicode
            with contextlib.suppress(json.JSONDecodeError):  # a torn line that a later start has ended
                found.append(json.loads(line))
        return [one for one in found if isinstance(one, dict) and "event" in one]  # a folder may hold anybody's log

    # -- inside

    def _take_lock(self) -> None:
        # "a+": opening must not empty the file, the holder's name is in it.
        self._lock = open(self.lock_file, "a+", encoding="utf-8")  # noqa: SIM115 - held for life
        for attempt in range(10):
            if locks.try_lock(self._lock):
                break
            # Tried for a moment: who asks `alive` has a shared lock for an instant, and that is nobody training.
            if attempt < 9:
                time.sleep(0.02)
        else:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise UserError(
                f"{self.path}: {holder} is training here; stop it (`lora-fp8 stop {self.path}`) or choose another name"
            )
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()}")
        self._lock.flush()

    def _mend_events(self) -> None:
        """A killed process may leave half a line; end it, so that the next line stands by itself."""
        if self.events_file.exists() and self.events_file.stat().st_size:
            with open(self.events_file, "rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


class StopSignal:
    """SIGTERM and Ctrl-C: while training, finish the step, save, exit; before and after, there is nothing to save.

    A second Ctrl-C ends the process in the ordinary way, unless it comes within a second of the first: launchers pass
    on what the terminal has given to every process already.

    Attributes:
        requested: somebody wants to stop.
        at_once: what to say when stopping at once, or None while a step's end is to be waited for.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once: str | None = "stopped before the first step; what was cached stays cached"
        self._first = 0.0
        self._raised = self._held = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take the signals over, and give them back."""
        try:
            before = {number: signal.signal(number, self._received) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread of the process: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, stopping at once waits until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self._raise_if_at_once()

    def _received(self, number: int, frame: Any) -> None:
        if not self.requested:
            self.requested, self._first = True, time.monotonic()
            if self.at_once is None:
                with contextlib.suppress(OSError):  # not print: it may be in the middle of a line just now
                    os.write(2, b"\nstopping after this step; press Ctrl-C again to end at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._first >= 1:
            raise KeyboardInterrupt
        self._raise_if_at_once()

    def _raise_if_at_once(self) -> None:
        if self.requested and self.at_once is not None and not self._held and not self._raised:
            self._raised = True
            raise Stopped(self.at_once)
