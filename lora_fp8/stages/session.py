"""The Session that all stages of a run share; it brings a failure of one process to the user and the others."""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import settings
from ..distributed.processes import Processes
from ..errors import Joined, Message, RunFailure, Stopped, reason
from ..families.base import ModelFamily
from ..plan.memory_choice import MemoryChoice
from ..plan.plan import Plan
from ..run import Run, StopSignal
from ..settings import Job
from ..training import checkpoint, memory


@dataclass(frozen=True)
class Session:
    """One run of a job by its processes: the argument that every stage takes."""

    plan: Plan
    run: Run
    processes: Processes
    stop: StopSignal = field(default_factory=StopSignal)
    shows_progress: bool = False
    choice: MemoryChoice | None = None
    """the memory settings of this run; None before they are chosen"""

    @property
    def memory(self) -> settings.Memory:
        """Return the `[memory]` table in force, with a value for every "auto" once they are chosen."""
        return self.job.memory if self.choice is None else self.choice.section

    @property
    def tiles_previews(self) -> bool:
        """Return True if previews are decoded in tiles."""
        return self.job.preview.tiled is True if self.choice is None else self.choice.tiled

    @property
    def shares_base(self) -> bool:
        """Return True if the processes hold the frozen base together, each a part of it."""
        return self.memory.shard_base and self.processes.world > 1

    @property
    def job(self) -> Job:
        """Return the job, with a value for every "auto" that the plan resolved."""
        return self.plan.job

    @property
    def family(self) -> ModelFamily:
        """Return the architecture of the base model."""
        return self.plan.family

    def describe_full_memory(self) -> Message:
        """Return a sentence for a job that does not fit: how much memory it used, and what to change first."""
        job, section, world = self.job, self.memory, self.processes.world
        share = 0.0 if section.offload == "auto" else section.offload
        steps = {
            "memory.gradient_checkpointing = true": section.gradient_checkpointing is not True,
            Message("a smaller train.batch_size"): job.train.batch_size > world,
            "quantize.storage = 'fp8'": job.quantize.storage == "none",
            "memory.shard_base = true": world > 1 and not section.shard_base,
            f"memory.offload = {0.5 if share < 0.5 else 1.0}": share < 1 and not section.shard_base,
            Message("a smaller dataset.resolution"): True,
            Message("a smaller adapter.rank"): True,
        }
        return Message(
            "out of memory on {device} ({size} GiB were in use); try, in this order: {steps}",
            device=self.processes.device,
            size=f"{memory.read_peak_gib(self.processes.device):.1f}",
            steps=Joined(", ", [step for step, helps in steps.items() if helps]),
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all processes; if it fails on one, raise the error on all of them."""
        with self.processes.together(), explain_errors(self):
            yield

    def warn(self, text: str) -> None:
        """Log a warning to the run's events."""
        self.run.log_event("warning", text=text)

    def stop_if_asked(self) -> None:
        """Raise Stopped if a stop is requested in a stage that has no step to finish."""
        if self.stop.at_once is not None and self.run.take_request("stop"):
            raise Stopped(self.stop.at_once)


class Bystander(Run):
    """The run of a process other than the main one: it reads requests and writes nothing."""

    def log_event(self, event: str, **fields: Any) -> None:
        """Write nothing."""


class UnwrittenRun(Run):
    """A run without a folder: its events are passed to `echo` and not written."""

    def __init__(self, echo: Callable[[dict[str, Any]], None] | None) -> None:
        super().__init__(Path())
        self.echo = echo

    def log_event(self, event: str, **fields: Any) -> None:
        """Pass the event on."""
        if self.echo is not None:
            self.echo({"event": event, **fields})


@contextlib.contextmanager
def explain_errors(session: Session) -> Iterator[None]:
    """Turn errors of the machine (memory, disk, network) into a RunFailure of one line; others pass unchanged."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailure(session.describe_full_memory()) from error
    except OSError as error:
        line: str = reason(error) or type(error).__name__
        if error.errno in (*checkpoint.FULL, errno.EFBIG):
            # Name the disk that is full; the folder itself may not exist any more.
            full = Path(error.filename or session.run.path).resolve()
            there = next(path for path in (full, *full.parents) if path.exists())
            free = f"{shutil.disk_usage(there).free / 2**20:.1f}"
            line = Message("{why}; {free} MiB are free at {place}", why=line, free=free, place=there)
        if error.filename:
            line = Message("{key}: {line}", key=error.filename, line=line)
        raise RunFailure(line) from error
