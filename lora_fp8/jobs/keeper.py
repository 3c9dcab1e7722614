"""Run a command and write down how it ended: `python -m lora_fp8.jobs.keeper [--sweep SECONDS] RECORD COMMAND...`.

Whoever started a job may be gone when it ends, and only a parent learns an exit status. So each attempt has two of
these parents, which do nothing else:

    keeper --sweep (a session of its own) -> accelerate launch -> keeper -> the trainer

The inner one learns the trainer's status, of which accelerate's launcher makes 1. The outer one outlives the launcher:
where that has been killed alone, what it leaves behind is asked to save and end, then killed, so that a GPU is free
when the record says so.

RECORD is JSON: {"status": exit code, or minus the signal; "t": unix seconds; "oom_kills": processes that the kernel
killed meanwhile for lack of memory; "swept": how many were left behind}. The inner one puts its rank in the name.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..run import atomic_write
from . import procs

PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Do it. -> the command's exit code, or 128 + signal."""
    parser = argparse.ArgumentParser(prog="keeper", allow_abbrev=False)
    parser.add_argument("--sweep", type=float, help="end what the command leaves behind; SIGTERM to SIGKILL")
    parser.add_argument("record", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    outer, record = given.sweep is not None, given.record
    if outer:
        # Orphans of the launcher become children of this process, which can then wait for them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        record = record.with_name(f"{record.stem}-{os.environ.get('RANK', '0')}{record.suffix}")
    oom_before = procs.oom_kills()
    child: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        # The outer one outlives every polite request: it has to write down how the others took it.
        if child is None:
            pending.append(number)
        elif not outer:
            procs.send([child.pid], number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    child = subprocess.Popen(given.command)
    if not outer:
        for number in pending:
            procs.send([child.pid], number)
    status = child.wait()
    swept = _sweep(given.sweep) if outer else 0
    told = {"status": status, "t": round(time.time(), 3), "oom_kills": procs.oom_kills() - oom_before, "swept": swept}
    try:
        atomic_write(record, json.dumps(told).encode())
    except OSError as error:  # a full disk: the log is the last place to say it
        print(f"{record}: {error.strerror}; the command ended with status {status}", file=sys.stderr)
    return status if status >= 0 else 128 - status


def _sweep(patience: float) -> int:
    """End what has this job's token and is still there. -> how many that were"""
    token, own = os.environ[procs.TOKEN], os.getpid()

    def left() -> list[int]:
        return [pid for pid in procs.members(token) if pid != own]

    def reaped() -> bool:
        """Wait for whom this process has inherited; whether nobody is left to wait for."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    found = left()
    procs.send(found, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while not reaped() or left():
        if time.monotonic() > deadline:
            procs.send(left(), signal.SIGKILL)
        time.sleep(0.05)
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
