"""Which processes are there: read from /proc, never from what somebody noted and forgot to clear.

A process id alone says nothing after a reboot or a day: ids are used again. With the process's start time (in clock
ticks since boot) and the boot's id it names one process for ever. The processes of a job are found by a token in
their environment: torch's launcher puts each worker into a session of its own, so that a process group does not have
them all.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..config import UserError

PROC = Path("/proc")
PF_EXITING = 0x4  # among the flags in /proc/PID/stat
TOKEN = "LORA_FP8_JOB"
"""Environment variable that all processes of an attempt have, and nobody else."""


class Identity(NamedTuple):
    """One process, for ever."""

    pid: int
    start: int
    boot: str


def boot_id() -> str:
    """The id of this boot of the machine.

    Raises:
        UserError: this system has no Linux-like /proc.
    """
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        raise UserError("the queue needs Linux's /proc to see its processes; here, use `lora-fp8 train`") from None


def identify(pid: int) -> Identity | None:
    """The living process with this id, or None; one that has ended and is not yet reaped does not live."""
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return Identity(pid, int(fields[19]), boot_id())


def alive(process: Identity) -> bool:
    """Whether this very process lives, and not another one that was given its id."""
    return identify(process.pid) == process


def members(token: str, session: int = 0) -> list[int]:
    """Ids of the living processes that have this token in their environment; about 30 us for each process there is.

    One that is ending has no environment any more, and may still hold its lock and its GPU for seconds: with `session`
    given, those of that session are found, too.
    """
    wanted, found = f"{TOKEN}={token}".encode(), []
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        pid, environment = int(entry.name), b""
        # Somebody else's, gone, or ending: newer kernels refuse then, older ones answer with nothing.
        with contextlib.suppress(OSError):
            environment = Path(entry.path, "environ").read_bytes()
        if wanted in environment.split(b"\0"):
            if identify(pid):
                found.append(pid)
        elif session and exiting(pid, session):
            found.append(pid)
    return sorted(found)


def parent(pid: int) -> int:
    """The id of a process's parent; 0 where it has gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def holder(file: Path) -> int | None:
    """The process that `file`, a run's lock, names; None where it has not that file open, or is another user's."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(file.read_text(encoding="utf-8").rpartition(" ")[2])
        if any(os.path.samefile(entry.path, file) for entry in os.scandir(PROC / str(pid) / "fd")):
            return pid
    return None


def family(pid: int) -> list[int]:
    """A process and all that it started, and those started, that live."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir(PROC):
        if entry.name.isdigit():
            children.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def exiting(pid: int, session: int = 0) -> bool:
    """Whether a process (of this session) is ending just now: it has left its memory, and still closes its files."""
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X") or (session and int(fields[3]) != session):
        return False
    return bool(int(fields[6]) & PF_EXITING)


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each; who has gone meanwhile needs none."""
    for pid in pids:
        assert pid > 1, f"{pid} would be a group of processes, or all"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def oom_kills() -> int:
    """How many processes the kernel has killed since boot because memory ran out; 0 where it does not count."""
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on; the second, a name, may hold anything."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
