"""Run a command and record how it ended: `python -m lora_fp8.jobs.keeper [--sweep SECONDS] RECORD COMMAND...`.

Whoever started a job may have exited when it ends, and only a parent process learns the exit status. Each attempt
therefore has two such parents, which do nothing else:

    keeper --sweep (in its own session) -> accelerate launch -> keeper -> the trainer

The inner keeper learns the trainer's status, which accelerate's launcher turns into 1. The outer keeper outlives the
launcher: if only the launcher was killed, the processes that it leaves behind are asked to save and exit, and then
killed, so that the GPU is free when the record says that the job has ended.

RECORD is JSON: {"status": exit code, or minus the signal; "t": unix seconds; "oom_kills": processes that the kernel
killed meanwhile for lack of memory; "swept": number of processes left behind}. The inner keeper adds its rank to the
file name.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..common import system
from ..common.json_files import write_json
from ..common.messages import get_language, translate
from ..errors import Message, reason
from . import procs


def main(arguments: list[str]) -> int:
    """Run the command and write its record. Return the command's exit code, or 128 + signal."""
    parser = argparse.ArgumentParser(prog="keeper", allow_abbrev=False)
    parser.add_argument("--sweep", type=float, help="end what the command leaves behind; SIGTERM to SIGKILL")
    parser.add_argument("record", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    outer, record = options.sweep is not None, options.record
    if outer:
        system.adopt_orphans()  # those of the launcher: this process can then wait for them
    else:
        record = record.with_name(f"{record.stem}-{os.environ.get('RANK', '0')}{record.suffix}")
    oom_before = procs.count_oom_kills()
    child: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        # The outer keeper outlives every polite request: it has to record how the others end.
        if child is None:
            pending.append(number)
        elif not outer and system.CAN_ASK_TO_STOP:  # Windows sends Ctrl-Break to all processes itself
            procs.send([child.pid], number)

    for number in (*system.STOP_SIGNALS, *system.HANGUP):
        signal.signal(number, pass_on)
    child = subprocess.Popen(options.command)
    if not outer and system.CAN_ASK_TO_STOP:
        for received in pending:
            procs.send([child.pid], received)
    status = child.wait()
    swept = _sweep(options.sweep) if outer else 0
    oom_kills = procs.count_oom_kills() - oom_before
    content = {"status": status, "t": round(time.time(), 3), "oom_kills": oom_kills, "swept": swept}
    try:
        write_json(record, content, indent=None)
    except OSError as error:  # a full disk: only the log is left to report it
        line = Message(
            "{path}: {why}; the command exited with status {status}", path=record, why=reason(error), status=status
        )
        print(translate(get_language(), line), file=sys.stderr)
    return status if status >= 0 else 128 - status


def _sweep(patience: float) -> int:
    """End the processes that still have this job's token. Return how many there were."""
    # The parent is the worker, which has no token, or on Windows the launcher of a venv's python.exe, which has it.
    token, own = os.environ[procs.TOKEN], (os.getpid(), os.getppid())

    def find_left() -> list[int]:
        return [pid for pid in procs.find_members(token) if pid not in own]

    to_end = find_left()
    procs.send(to_end, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while not system.reap_children() or find_left():
        if time.monotonic() > deadline:
            procs.kill(find_left())
        time.sleep(0.05)
    return len(to_end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
