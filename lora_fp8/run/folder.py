"""The run folder: where a job writes, and the only interface between the trainer and everything that watches it.

    runs/<name>/  .lora-fp8-run  config.toml  events.jsonl  status.json  lock  control/  samples/  checkpoints/  export/
                  verify.json  validation.json  tracking.json  tensorboard/

* `.lora-fp8-run` marks the folder as one that we created; `ownership` decides which files in it are ours.
* `config.toml` is the resolved job: a run can always be repeated from its own folder.
* `events.jsonl` has one JSON object per line: {"t": unix seconds, "event": ..., ...}. Readers follow it by offset.
* `control/stop`, `control/save` and `control/preview` are requests: somebody creates the file, and the trainer acts at
  its next step. A signal is a request to stop, too (`StopSignal`).
* `previews.json` and `control/sample-*.json` change the previews of a run that trains (`preview_requests`).
* `status.json` has the newest stage, step and state; a run that can be resumed ends with "state": "stopped", a resume
  that does not fit with "refused"; then `events.jsonl` says how the run had ended. It shows
  how a run ended under `accelerate launch`, whose own exit code is 1 for everything but success.
* `lock` is held (flock) as long as the trainer is alive. That lock, never a flag, says whether it is: a killed process
  cannot fail to release it.

Standard library only: the web page and the queue read run folders without torch.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common import system
from ..common.json_files import parse_json, read_json
from ..common.locks import read_holder, try_lock, write_holder
from ..common.messages import add_translations, restore, without_home
from ..common.reading import read_bytes
from ..common.shell import quote_path
from ..common.writing import atomic_write, make_folder
from ..errors import Message, UserError, reason
from . import ownership

ENDS = ("done", "error", "stopped")
"""Events with which a run ends."""
REFUSED = "refused"
"""Event of a resume that was refused before anything changed: the run has ended as it had before."""


class Unreadable(UserError):
    """This user may not read a file that is needed to find out about a run, such as another user's.

    Args:
        filename: the file that cannot be read.
        reason: why, in the system's words.
    """

    def __init__(self, filename: Path, reason: str | None):
        self.filename = filename
        super().__init__(
            Message(
                "{path}: the file cannot be read ({why}); use the account of the user who trains",
                path=filename,
                why=reason,
            )
        )


class Run:
    """One run folder. The trainer uses `Run.create`, which takes the lock; readers use `Run.open`."""

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
        self.previews_file, self.validation_file = path / "previews.json", path / "validation.json"
        self.watch: Callable[[dict[str, Any]], None] | None = (
            None  # called with each event, an end before it is written
        )
        self.echo: Callable[[dict[str, Any]], None] | None = None  # called with each event, to print it
        self.is_accepted = False  # True once the config of this process is that of the run
        self._lock: Any = None
        self._events: Any = None
        self._status: dict[str, Any] = {}
        self._status_written = -1.0  # by the monotonic clock

    @classmethod
    def create(cls, path: Path, config_text: str, *, resume: bool = False) -> "Run":
        """Create (or, with `resume`, take over) a run folder, lock it and write the resolved config.

        With `resume`, the existing config stays until `write_config` is called: if the checkpoint refuses a change, the
        next attempt must not read that change.

        Raises:
            UserError: another process holds the folder, or it is not ours (see `ownership.claim`).
        """
        run = cls(path)
        try:
            if not os.path.lexists(path):
                make_folder(path)
            ownership.claim(path, resume=resume)
            run._take_lock()
            for folder in (run.checkpoints, run.samples, run.export, run.control):
                folder.mkdir(exist_ok=True)
            # Only here, under the lock: otherwise it could delete what a trainer is writing.
            ownership.sweep(path)
            if not (resume and run.config_file.exists()):
                run.write_config(config_text)
            run._mend_events()
            # "replace": a file name may have bytes that are not text, and a warning about it must not end the run.
            run._events = open(run.events_file, "a", encoding="utf-8", errors="replace")  # open for life
        except BaseException as error:
            run.close()  # the error's traceback would keep the lock held for as long as it exists
            if isinstance(error, OSError):
                raise ownership.make_unusable_error(path, error) from None
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open an existing run folder for reading.

        Raises:
            UserError: there is no run in this folder.
            Unreadable: this user may not read it.
        """
        try:
            exists = (path / "config.toml").is_file()
        except OSError as error:  # access is denied; for a missing file, is_file returns False
            raise Unreadable(path, reason(error)) from None
        if not exists:
            raise UserError(
                Message(
                    "{path}: this is not a run folder (it has no config.toml); `{command}` creates one",
                    path=path,
                    command="lora-fp8 train",
                )
            )
        return cls(path)

    def close(self) -> None:
        """Close the event log and release the lock."""
        for file in (self._events, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # on a full disk closing fails too; the first error counts
                    file.close()
        self._events = self._lock = None

    # -- for the trainer

    def check_place(self) -> None:
        """Check that the folder is still the one that this process holds, and that its folders are not links.

        Raises:
            FileNotFoundError: it was moved or deleted; what is written from now on would be separate from the rest.
            NotADirectoryError: see `ownership.require_folders`.
        """
        try:
            here = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.lock_file))
        except OSError:
            here = False
        if not here:
            gone = Message(
                "the run folder was moved or deleted during training; if it was moved, run `lora-fp8 resume` on its "
                "new path"
            )
            raise FileNotFoundError(errno.ENOENT, gone, os.fspath(self.path))
        ownership.require_folders(self.path)

    def log_event(self, event: str, **fields: Any) -> None:
        """Append one line to events.jsonl and update status.json (the newest stage, step and state).

        In a `text`, the home folder is replaced by `~`: it contains its owner's name, and logs are shown to others.

        Raises:
            OSError: the disk refused the write, or the folder does not exist any more.
        """
        self.check_place()
        if isinstance(fields.get("text"), str):
            fields["text"] = without_home(fields["text"])
        if event in ENDS and self.watch is not None:
            watch, self.watch = self.watch, None
            watch({"event": event, **fields})
        now = round(time.time(), 3)
        line = add_translations({"t": now, "event": event, **fields})
        self._events.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._events.flush()
        if self.echo is not None:
            try:
                self.echo(line)
            except OSError as error:  # the terminal, pipe or page that it prints to was closed
                self.echo = None
                self.log_event(
                    "warning",
                    text=Message("events are no longer printed ({why}); the training continues", why=reason(error)),
                )
        if self.watch is not None:
            self.watch(line)
        if event == "step":
            self._status.update(step=fields["step"], loss=fields.get("loss"))
        elif event in ("stage", "start"):
            self._status.update(fields, state=fields.get("stage", event))
        elif event in (*ENDS, REFUSED):
            self._status.update(state=event)
        # status.json is a convenience for pollers; making each step durable would cost an fsync per step.
        if event != "step" or time.monotonic() - self._status_written >= 1:
            self._status_written = time.monotonic()
            self._status["t"], self._status["pid"] = now, os.getpid()
            temporary = self.status_file.with_name(f".status.json.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self._status), encoding="utf-8")
            system.replace(temporary, self.status_file)

    def write_config(self, config_text: str) -> None:
        """Write the resolved job into the folder."""
        self.is_accepted = True
        atomic_write(self.config_file, config_text.encode())

    def take_request(self, what: str) -> bool:
        """Return True if somebody asked for `stop`, `save` or `preview`; this deletes requests to save and preview."""
        request = self.control / what
        if not request.exists():
            return False
        if what != "stop":
            request.unlink(missing_ok=True)
        return True

    # -- for readers

    def request(self, what: str) -> None:
        """Ask the trainer for `stop`, `save` or `preview` at its next step.

        Raises:
            UserError: the folder cannot be written, or see `ownership.require_ours`.
        """
        try:
            ownership.require_ours(self.path)
            self.control.mkdir(exist_ok=True)
            (self.control / what).touch()
        except OSError as error:
            raise UserError(
                Message(
                    "{key}: the file cannot be written ({why}); use the account of the user who trains, or send "
                    "SIGTERM to the process that `lock` names",
                    key=self.control / what,
                    why=reason(error),
                )
            ) from None

    def is_locked(self) -> bool:
        """Return True if a process holds this run now.

        Raises:
            Unreadable: this user may not read the lock, so it is unknown.
        """
        try:
            with open(self.lock_file, "rb") as file:
                return not try_lock(file, shared=True)
        except (FileNotFoundError, NotADirectoryError):  # there is no folder, or a file in its place
            return False
        except OSError as error:
            raise Unreadable(self.lock_file, reason(error)) from None

    def read_events(self) -> list[dict[str, Any]]:
        """Return all complete events of the log; the partial last line of a killed process is left out."""
        try:
            text = read_bytes(self.events_file).decode(errors="replace")
        except FileNotFoundError:
            return []
        entries = []
        for line in text.split("\n")[:-1]:  # not splitlines: a caption may contain a Unicode line separator
            with contextlib.suppress(ValueError):  # a partial line that a later start has terminated
                entries.append(restore(parse_json(line)))
        # It may be another program's log.
        return [entry for entry in entries if isinstance(entry, dict) and "event" in entry]

    def read_validations(self) -> dict[str, Any]:
        """Return the content of validation.json; {} if it is missing or damaged, as its validations can be repeated."""
        try:
            content = read_json(self.validation_file, most=None)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    # -- internals

    def _take_lock(self) -> None:
        # "a+", as opening must not empty the file: it has the holder's name.
        self._lock = open(self.lock_file, "a+", encoding="utf-8")  # held for life
        for attempt in range(10):
            if try_lock(self._lock):
                break
            # Try for a moment: a call to `is_locked` holds a shared lock for an instant without training.
            if attempt < 9:
                time.sleep(0.02)
        else:
            pid = read_holder(self.lock_file)
            holder = Message("process {pid}", pid=pid) if pid else Message("another process")
            self._lock.close()
            raise UserError(
                Message(
                    "{path}: {holder} is training in this folder; stop it (`{command}`), or choose another name",
                    path=self.path,
                    holder=holder,
                    command=f"lora-fp8 stop {quote_path(self.path)}",
                )
            )
        write_holder(self._lock)

    def _mend_events(self) -> None:
        """Terminate a partial line that a killed process left, so that the next event gets its own line."""
        if self.events_file.exists() and self.events_file.stat().st_size:
            with open(self.events_file, "rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
