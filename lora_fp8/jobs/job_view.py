"""What the queue shows of a job, and the sentences about it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.messages import add_translations, restore
from ..common.reading import parse_json

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
        stage: the trainer's stage: start, download, cache, load, preflight, train, export, verify; "" if nothing is
            training.
        step, steps, loss, eta_s: newest step, number of steps, the step's loss, and seconds left at the pace of this
            process; None if unknown.
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
