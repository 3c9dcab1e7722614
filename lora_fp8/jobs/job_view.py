"""What the queue shows of a job, and the sentences about it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.json_files import parse_json
from ..common.messages import add_translations, restore
from ..errors import Message, Template

SENTENCES = {
    "queued": Template("waiting in the queue"),
    "behind": Template("waiting behind job {id}, {name}"),
    "after": Template("waiting for job {id}, {name}, to end"),
    "after_any": Template("waiting for one of these jobs to end: {jobs}"),
    "no_worker": Template("waiting: no worker is running (`lora-fp8 worker`)"),
    "no_group": Template("waiting for GPUs {gpus}, but the worker has only: {groups}"),
    "requeued": Template("{cause}; attempt {attempt} of {attempts} is next"),
    "starting": Template("starting"),
    "stage": Template("{stage}"),
    "training": Template("step {step} of {steps}"),
    "stop_asked": Template("stopping: it saves first"),
    "stop_term": Template("stopping: SIGTERM was sent; a training saves at the end of its step"),
    "stop_kill": Template("stopping: it did not respond to the request or to SIGTERM, so it was killed (SIGKILL)"),
    "cancelled": Template("removed from the queue before it started"),
    "stopped": Template("stopped and saved at step {step}"),
    "stopped_early": Template("stopped before the first save"),
    "stopped_hard": Template(
        "killed (SIGKILL) because it did not stop when asked; the newest checkpoint is from step {step}"
    ),
    "stopped_hard_early": Template("killed (SIGKILL) because it did not stop when asked; nothing was saved"),
    "done": Template("done; files written and verified: {files}"),
    "done_unverified": Template("done; files written but not verified (export.verify = false): {files}"),
    "command_done": Template("done"),
    "command_stopped": Template("stopped on request"),
    "command_killed": Template("killed (SIGKILL), because it did not stop when asked"),
    "no_files": Template(
        "the log says that the job is done, but these files are missing or failed verification: {files}"
    ),
    "no_word": Template("exited with code 0, but the log does not say that the job is done"),
    "input": Template("invalid settings or input: {message}"),
    "failure": Template("failed: {message}"),
    "error": Template("unexpected error (exit code {code}): {message}"),
    "exit": Template("exited with code {code}; the last lines of the log may say why"),
    "access_violation": Template(
        "crashed with {code} (access violation), often caused by a driver or a broken library"
    ),
    "killed_memory": Template("killed (SIGKILL) while the system ran out of memory"),
    "killed": Template("killed (SIGKILL) by a user or for lack of memory; the kernel log says which"),
    "terminated": Template("ended by a SIGTERM from outside this program"),
    "bus_error": Template(
        "crashed (SIGBUS): a file shrank while it was being read (unfinished download, full disk), or the RAM is faulty"
    ),
    "crash": Template("crashed ({signal}) outside Python, often caused by a driver or a broken library"),
    "launcher": Template("the launcher was killed ({signal}), so the processes that it had started were ended"),
    "vanished": Template("the processes disappeared without a message: killed, out of memory, or a power failure"),
    "reboot": Template("the computer was restarted"),
    "folder": Template("the run folder cannot be written: {message}"),
    "unreadable": Template("state unknown: the current user may not read {file}"),
    "damaged": Template("the queue entry is damaged and cannot be used ({error})"),
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
    def text(self) -> Message:
        """Return the sentence."""
        arguments = {
            name: Sentence(**value).text if isinstance(value, dict) else value for name, value in self.args.items()
        }
        return SENTENCES[self.key](**arguments)

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
        stage: the trainer's stage: start, download, cache, load, preflight, train, export, verify; "" if nothing is
            training.
        step, steps, loss, eta_s: newest step, number of steps, the step's loss, and seconds left at the pace of this
            process; None if unknown.
        work: {"stage": "cache", "done": 5, "total": 9, ...} while a stage counts what it does; None at other times.
        since: unix seconds of the newest step while training, else of the begin of the stage; 0 if nothing is running.
        download: {"bytes": 5, "total": 9, "speed": 1, ...} while the base model is downloaded; None at other times.
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
    download: dict[str, Any] | None = None
    work: dict[str, Any] | None = None
    since: float = 0
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
