"""What the queue shows of a job, and the sentences about it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.json_files import parse_json
from ..common.messages import add_translations, restore
from ..errors import Message, Template

SENTENCES = {
    "queued": Template("waits for its turn"),
    "behind": Template("waits behind job {id}, {name}"),
    "after": Template("waits until job {id}, {name}, has ended"),
    "after_any": Template("waits until one of these jobs has ended: {jobs}"),
    "no_worker": Template("waits; no worker is running (`lora-fp8 worker`)"),
    "no_group": Template("waits for GPUs {gpus}, which the worker does not have; it has: {groups}"),
    "requeued": Template("{cause}; attempt {attempt} of {attempts} follows"),
    "starting": Template("its processes are starting"),
    "stage": Template("{stage}"),
    "training": Template("step {step} of {steps}"),
    "stop_asked": Template("asked to save and stop"),
    "stop_term": Template("asked to stop, then sent SIGTERM"),
    "stop_kill": Template("asked to stop, sent SIGTERM, then killed (SIGKILL)"),
    "cancelled": Template("taken out of the queue before it started"),
    "stopped": Template("stopped and saved at step {step}"),
    "stopped_early": Template("stopped before anything was saved"),
    "stopped_hard": Template(
        "did not stop when asked and was killed (SIGKILL); the newest checkpoint is of step {step}"
    ),
    "stopped_hard_early": Template("did not stop when asked and was killed (SIGKILL); nothing was saved"),
    "done": Template("done; files written and verified: {files}"),
    "done_unverified": Template("done; files written, and not verified (export.verify = false): {files}"),
    "command_done": Template("done"),
    "command_stopped": Template("stopped when asked"),
    "command_killed": Template("did not end when asked and was killed (SIGKILL)"),
    "no_files": Template("the log says done, but these are not there or did not pass: {files}"),
    "no_word": Template("ended with exit code 0, but its log has no entry that it is done"),
    "input": Template("something given is wrong: {message}"),
    "failure": Template("failed while running: {message}"),
    "error": Template("ended with an unexpected error (exit code {code}): {message}"),
    "exit": Template("ended with exit code {code}; the last lines of the log may say why"),
    "access_violation": Template("ended with {code} (access violation), often a driver or a broken library"),
    "killed_memory": Template("killed (SIGKILL) while the kernel was killing for lack of memory"),
    "killed": Template("killed (SIGKILL), by somebody or because memory ran out; the kernel's log tells which"),
    "terminated": Template("ended by SIGTERM from another program"),
    "bus_error": Template(
        "ended by SIGBUS: a file shrank while it was read (a download, a full disk), or memory is broken"
    ),
    "crash": Template("crashed ({signal}) in code outside of Python, often a driver or a broken library"),
    "launcher": Template("its launcher was killed ({signal}); what it had started was ended"),
    "vanished": Template("its processes disappeared without a message (killed, out of memory, or a power cut)"),
    "reboot": Template("the machine was restarted while it ran"),
    "folder": Template("its run folder cannot be written: {message}"),
    "unreadable": Template("what became of it is not known: this user may not read {file}"),
    "damaged": Template("its entry in the queue is damaged and cannot be used ({error})"),
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
        """The sentence."""
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
