"""Processes that are forked from one that has already imported what a training imports.

Importing torch, diffusers, transformers, peft and bitsandbytes takes about 11 CPU seconds, which each process that a
test starts would pay again. `start` asks a server, one per test session, to fork: what runs is a process of its own
(its pid, environment, folder, signals, sockets and exit code), but its imports are done. Tests of the imports
themselves, of `accelerate launch` and of the entry points start Python as a user does.

    one = forked.start([script, "--config", path], cwd=folder, env={"RANK": "0"})
    stdout, stderr = one.communicate(timeout=60)
"""

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_server: tuple[subprocess.Popen, socket.socket] | None = None


class Process:
    """A forked process; as much of `subprocess.Popen` as the tests use."""

    def __init__(self, args: list[str], pid: int, answer: socket.socket, stdout: int, stderr: int) -> None:
        self.args, self.pid, self.returncode, self._answer = args, pid, None, answer
        self.stdout, self.stderr = (os.fdopen(n, encoding="utf-8", errors="replace") for n in (stdout, stderr))

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError, TimeoutError):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the signal that ended it. Raises TimeoutError."""
        if self.returncode is None:
            self._answer.settimeout(timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._answer.recv(64)))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends, then wait."""
        read: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda name=name: read.update({name: getattr(self, name).read()}))
            for name in ("stdout", "stderr")
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except BaseException:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
        return read["stdout"], read["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(args: list[str], *, cwd: Path, env: dict[str, str]) -> Process:
    """Fork a process that runs the Python script `args[0]` with the rest as arguments; `env` is added to os.environ."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        theirs.close()
        _server = server, ours
        atexit.register(ours.close)  # which ends the server
    answer, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (stdout, to_stdout), (stderr, to_stderr) = os.pipe(), os.pipe()
    question = {"args": args, "cwd": str(cwd), "env": {**os.environ, **env}}
    memory = os.memfd_create("question")  # it may be longer than a packet
    os.write(memory, json.dumps(question).encode())
    os.lseek(memory, 0, os.SEEK_SET)
    with contextlib.closing(given):
        socket.send_fds(_server[1], [b"start"], [given.fileno(), to_stdout, to_stderr, memory])
    for number in (to_stdout, to_stderr, memory):
        os.close(number)
    return Process(args, int(answer.recv(64)), answer, stdout, stderr)


def start_group(args: list[str], number: int, *, cwd: Path, env: dict[str, str], machines: int = 1) -> list[Process]:
    """Start `number` processes of one job, told of each other as a launcher on each of the machines tells them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank % (number // machines))} for rank in range(number)]
    return [start(args, cwd=cwd, env={**env, **group, **rank}) for rank in ranks]


# ----------------------------------------------------------------------------------------------------------- the server


def serve(requests: socket.socket) -> None:
    """Fork for each request until the other side is closed. Tell each asker the pid, and in the end the wait status."""
    import gc

    import bitsandbytes  # noqa: F401
    import torch

    import lora_fp8.cli
    import lora_fp8.train  # noqa: F401
    from lora_fp8 import families

    families.get("sd15")
    torch.set_num_threads(1)
    gc.freeze()
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not requests:
                waiting.unregister(key.fileobj)
                pid, answer = key.data
                os.close(key.fileobj)
                status = os.waitpid(pid, 0)[1]
                with contextlib.suppress(OSError):  # the asker does not care any more
                    answer.send(str(status).encode())
                answer.close()
                continue
            word, numbers, *_ = socket.recv_fds(requests, 64, 4)
            if not word:
                return
            answer, stdout, stderr, question = socket.socket(fileno=numbers[0]), *numbers[1:]
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                waiting.close()
                requests.close()
                _run(json.loads(os.fdopen(question, "rb").read()), answer, stdout, stderr)
            answer.send(str(pid).encode())
            for number in (stdout, stderr, question):
                os.close(number)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answer))


def _run(question: dict[str, Any], answer: socket.socket, stdout: int, stderr: int) -> None:
    """Become the process that was asked for; never returns."""
    code = 1
    try:
        answer.close()
        os.setsid()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        # Made anew: what the server had may have been files, and these are pipes.
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)
        os.chdir(question["cwd"])
        os.environ.clear()
        os.environ.update(question["env"])
        sys.argv = question["args"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        code = _exit_code(sys.argv[0])
    finally:
        os._exit(code)


def _exit_code(script: str) -> int:
    """Run the script and what Python runs at its end; return the exit code that Python would have."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
