"""What `procs` does where there is no Linux-like /proc (Windows, macOS), through psutil.

A process's id together with the time when it was started identifies it forever, across reboots too. What Linux alone
tells is left out: processes that are still exiting, and kills for lack of memory.
"""

import contextlib
from pathlib import Path

import psutil

from ..common.locks import read_holder

SLACK_SECONDS = 2.0
"""Difference between the clocks of processes and of files that is overlooked."""


def read_start(pid: int) -> int | None:
    """Return when a living process was started, in milliseconds since 1970; None if there is none."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return round(process.create_time() * 1000)
    except psutil.Error:
        return None


def find_members(variable: str, value: str) -> list[int]:
    """Return the ids of the living processes that have this environment variable, as far as this user may know."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value and read_start(process.pid) is not None:
                pids.append(process.pid)
    return sorted(pids)


def find_parent(pid: int) -> int:
    """Return the id of a process's parent; 0 if the process has exited."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def find_holder(file: Path) -> int | None:
    """Return the process named in a run's lock that is held; None if it was started after the lock was taken."""
    with contextlib.suppress(OSError, psutil.Error):
        pid = read_holder(file)
        if pid and psutil.Process(pid).create_time() <= file.stat().st_mtime + SLACK_SECONDS:
            return pid
    return None


def find_family(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def find_boot_time() -> float:
    """Return when the machine was started, in seconds since 1970, by its present clock."""
    return psutil.boot_time()
