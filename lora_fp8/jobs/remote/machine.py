"""Run shell scripts on the machine of a job: over ssh, or here, where this machine submits to a cluster itself.

A script is one argument of bash and never passes through another shell unquoted. What a login prints before the script
begins is skipped. Names of hosts cannot be options of ssh.
"""

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from ...errors import Message, RunFailure, UserError

BEGIN = b"lora-fp8: the script begins\n"
"""Printed before anything that a script prints."""
MOST_NOISE = 1 << 20
"""Bytes that a login may print before the script begins."""
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
"""Options of ssh: no terminal, no questions, and an error instead of a connection that hangs."""
SSH_FAILED = 255
ADDRESS = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
TARGETS = "slurm, slurm:HOST, ssh:HOST, sky"

MARKER = ".lora-fp8-job"
"""File that marks a job's folder there as ours."""
NO_FOLDER, EXISTS, NO_PROGRAM, NO_TOOL, NOT_RUNNING = 40, 41, 43, 44, 45
"""Exit codes of our own scripts."""


class Disconnected(UserError):
    """The connection was lost or could not be made."""


@dataclass(frozen=True)
class Target:
    """Where a job runs.

    Attributes:
        kind: "slurm", "ssh" or "sky".
        address: host for ssh, as user@host:port; "" is this machine.
    """

    kind: str
    address: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.address}" if self.address else self.kind


def parse_target(text: str) -> Target:
    """Return the target that `--to` names.

    Raises:
        UserError: it names none, or a host that ssh would take for an option.
    """
    kind, colon, address = text.partition(":")
    if kind not in ("slurm", "ssh", "sky") or (kind == "ssh") > bool(address) or (kind == "sky" and colon):
        raise UserError(Message("--to {text}: expected {targets}", text=text, targets=TARGETS))
    if colon:
        require_address(address)
    return Target(kind, address)


def require_address(address: str) -> None:
    """Refuse what is no name of a host.

    Raises:
        UserError: it is none.
    """
    if not ADDRESS.fullmatch(address):
        raise UserError(
            Message(
                "{address} is not a host address; give host, user@host or user@host:port, or a name from ~/.ssh/config",
                address=repr(address),
            )
        )


@dataclass(frozen=True)
class Answer:
    """What a script did.

    Attributes:
        code: its exit code.
        output: what it printed.
        errors: what it printed as errors.
    """

    code: int
    output: bytes
    errors: str

    @property
    def text(self) -> str:
        """Return the output as text."""
        return self.output.decode(errors="surrogateescape")


@dataclass(frozen=True)
class Machine:
    """The machine that holds a job's folder.

    Attributes:
        address: host for ssh; "" is this machine.
    """

    address: str = ""

    def __str__(self) -> str:
        return self.address or "localhost"

    def build_command(self, script: str, login: bool = False) -> list[str]:
        """Return the command that runs a script of bash there."""
        bash = ["bash", "-lc" if login else "-c", f"printf %s {shlex.quote(BEGIN.decode())}\n{script}"]
        if not self.address:
            return bash
        require_address(self.address)
        host, colon, port = self.address.rpartition(":")
        if not colon or host.endswith(":") or port.endswith("]"):
            host, port = self.address, ""
        host = host.replace("[", "").replace("]", "")
        return ["ssh", *OPTIONS, *(["-p", port] if port else []), "--", host, f"exec {shlex.join(bash)}"]

    def run(
        self,
        script: str,
        *,
        login: bool = False,
        give: Callable[[IO[bytes]], None] | None = None,
        take: Callable[[IO[bytes]], None] | None = None,
    ) -> Answer:
        """Run a script there.

        Args:
            script: for bash.
            login: read the profile of the account first, as a login does.
            give: writes the script's input. The output is then read at the end only, and has to be short.
            take: reads the output instead, which is then missing from the answer.

        Raises:
            Disconnected: the connection cannot be made, or was lost.
            UserError: bash or ssh is missing here.
        """
        command = self.build_command(script, login)
        if shutil.which(command[0]) is None:
            raise UserError(
                Message(
                    "{program} is not installed on this machine; on Debian and Ubuntu: {command}",
                    **_find_package(command[0]),
                )
            )
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if give else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            assert process.stdout is not None
            with process:
                try:
                    output = _exchange(process, give, take)
                except BaseException:
                    process.kill()
                    raise
                code = process.wait()
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        if self.address and code == SSH_FAILED:
            raise Disconnected(
                Message("{host}: the ssh connection failed or was lost ({why})", host=self, why=find_last_line(text))
            )
        return Answer(code, output, text)


def _exchange(
    process: Any, give: Callable[[IO[bytes]], None] | None, take: Callable[[IO[bytes]], None] | None
) -> bytes:
    """Write the input and read the output of a process; a process that ends early is no error here."""
    if give:
        try:
            with process.stdin as stdin:
                give(stdin)
        except BrokenPipeError:  # its exit code and its errors tell why
            pass
    if not _skip_noise(process.stdout):
        return b""
    if take is None:
        return bytes(process.stdout.read())
    take(process.stdout)
    return b""


def _skip_noise(stream: IO[bytes]) -> bool:
    """Read up to the line with which every script begins. Return False if it does not come."""
    size = 0
    while size < MOST_NOISE and (line := stream.readline(MOST_NOISE)):
        if line.endswith(BEGIN):
            return True
        size += len(line)
    return False


def _find_package(program: str) -> dict[str, str]:
    package = {"ssh": "openssh-client"}.get(program, program)
    return {"program": program, "command": f"sudo apt-get install {package}"}


def find_last_line(text: str) -> str:
    """Return the last line that has something in it; what a script could not do is the last that it says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else Message("no reason was given")


def require_success(machine: Machine, answer: Answer) -> Answer:
    """Return the answer of a script that succeeded.

    Raises:
        UserError, RunFailure: with the reason, if it did not.
    """
    if answer.code == 0:
        return answer
    line = find_last_line(answer.errors)
    if "No space left on device" in answer.errors or "Disk quota exceeded" in answer.errors:
        raise RunFailure(Message("{host}: the disk of that machine is full ({why})", host=machine, why=line))
    if answer.code == NO_FOLDER:
        raise UserError(
            Message("{host}: the job's folder on that machine cannot be used ({why})", host=machine, why=line)
        )
    if answer.code == NO_TOOL:
        raise UserError(Message("{host}: {program} is missing on that machine", host=machine, program=line))
    raise RunFailure(
        Message(
            "{host}: a command on that machine failed with exit code {code} ({why})",
            host=machine,
            code=answer.code,
            why=line,
        )
    )


def quote_folder(folder: str) -> str:
    """Return a folder there as bash takes it; ~/ is the home folder there."""
    if folder == "~":
        return '"$HOME"'
    return '"$HOME"/' + shlex.quote(folder[2:]) if folder.startswith("~/") else shlex.quote(folder)


def enter(folder: str) -> str:
    """Return the line with which a script goes into a job's folder there, and into no other."""
    return (
        f"cd -- {quote_folder(folder)} && [ -f {MARKER} ] || "
        f"{{ echo 'this is not the folder of a job, or it no longer exists' >&2; exit {NO_FOLDER}; }}"
    )
