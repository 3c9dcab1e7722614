"""Find out which processes are alive, and signal them. Everything is read anew: a stored note may be outdated.

Linux's /proc is read directly, as it also tells of processes that are exiting; elsewhere `portable_procs` asks psutil.

A process id alone means nothing after a reboot or a day, as ids are reused. Together with the process's start time (in
clock ticks since boot) and the id of the boot it identifies one process forever. The processes of a job are found by a
token in their environment: torch's launcher puts each worker into its own session, so no process group contains them
all.
"""

import contextlib
import functools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..common import system
from ..common.locks import read_holder

PROC = Path("/proc")
PF_EXITING = 0x4  # among the flags in /proc/PID/stat
TOKEN = "LORA_FP8_JOB"
"""Environment variable that exactly the processes of an attempt have."""


class Identity(NamedTuple):
    """Identifies one process forever."""

    pid: int
    start: int
    boot: str


@functools.cache
def has_proc() -> bool:
    """Return True if this system has a Linux-like /proc."""
    return _read_boot_id() is not None


def read_boot_id() -> str:
    """Return the id of the machine's current boot; "" where only Linux has one."""
    return _read_boot_id() or ""


def _read_boot_id() -> str | None:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def has_rebooted(boot: str, since: float) -> bool:
    """Return True if the machine was restarted.

    Args:
        boot: id of the boot then.
        since: that time, in seconds since 1970; it decides where boots have no id.
    """
    if has_proc():
        return bool(boot) and boot != read_boot_id()
    from . import portable_procs

    return portable_procs.find_boot_time() > since > 0


def identify(pid: int) -> Identity | None:
    """Return the identity of the living process with this id; None if there is none, or it only waits to be reaped."""
    if not has_proc():
        from . import portable_procs

        start = portable_procs.read_start(pid)
        return None if start is None else Identity(pid, start, "")
    fields = _read_stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return Identity(pid, int(fields[19]), read_boot_id())


def is_alive(process: Identity) -> bool:
    """Return True if this very process is alive, and not a later one with the same id."""
    return identify(process.pid) == process


def find_members(token: str, session: int = 0) -> list[int]:
    """Return the ids of the living processes with this token in their environment; takes about 30 us per process.

    A process that is exiting has no environment any more, but may hold its lock and its GPU for seconds. With
    `session`, the exiting processes of that session are included.
    """
    if not has_proc():
        from . import portable_procs

        return portable_procs.find_members(TOKEN, token)
    entry_of_token, pids = f"{TOKEN}={token}".encode(), []
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        pid, environment = int(entry.name), b""
        # The process is another user's, has exited, or is exiting: newer kernels then refuse, older ones return
        # nothing.
        with contextlib.suppress(OSError):
            environment = Path(entry.path, "environ").read_bytes()
        if entry_of_token in environment.split(b"\0"):
            if identify(pid):
                pids.append(pid)
        elif session and is_exiting(pid, session):
            pids.append(pid)
    return sorted(pids)


def find_parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if the process has exited."""
    if not has_proc():
        from . import portable_procs

        return portable_procs.find_parent(pid)
    fields = _read_stat(pid)
    return int(fields[1]) if fields else 0


def find_holder(file: Path) -> int | None:
    """Return the process named in `file`, a run's lock; None if it does not have the file open or is another user's."""
    if not has_proc():
        from . import portable_procs

        return portable_procs.find_holder(file)
    with contextlib.suppress(OSError):
        pid = read_holder(file)
        if any(os.path.samefile(entry.path, file) for entry in os.scandir(PROC / str(pid) / "fd")):
            return pid
    return None


def find_family(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    if not has_proc():
        from . import portable_procs

        return portable_procs.find_family(pid)
    children: dict[int, list[int]] = {}
    for entry in os.scandir(PROC):
        if entry.name.isdigit():
            children.setdefault(find_parent(int(entry.name)), []).append(int(entry.name))
    pids, waiting = [], [pid]
    while waiting:
        pids.append(waiting.pop())
        waiting += children.get(pids[-1], [])
    return pids


def is_exiting(pid: int, session: int = 0) -> bool:
    """Return True if a process (of this session) is exiting: its memory is freed, but it is still closing its files."""
    fields = _read_stat(pid)
    if fields is None or fields[0] in ("Z", "X") or (session and int(fields[3]) != session):
        return False
    return bool(int(fields[6]) & PF_EXITING)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists. On Windows, every signal ends it at once."""
    for pid in pids:
        assert pid > 1, f"{pid} would be a group of processes, or all"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """End each process that still exists at once (SIGKILL)."""
    for pid in pids:
        assert pid > 1, f"{pid} would be a group of processes, or all"
        with contextlib.suppress(ProcessLookupError):
            system.kill(pid)


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed since boot for lack of memory; 0 if it does not count them."""
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def name_signal(number: int) -> str:
    """Return the name of a signal: SIGKILL for 9."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (state) on; the second, a name, may contain anything."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
