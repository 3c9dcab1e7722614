"""Send a job to another machine and start it: look around there, send, verify, start. Nothing is left of a failure."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from ... import __version__
from ...common.numbers import format_bytes
from ...common.shell import quote_path
from ...common.writing import make_folder
from ...errors import Message, RunFailure, UserError, cannot_write
from . import control, handle, script
from .handle import Handle
from .machine import (
    EXISTS,
    MARKER,
    NO_FOLDER,
    NO_PROGRAM,
    NO_TOOL,
    Disconnected,
    Machine,
    Target,
    quote_folder,
    require_success,
)
from .package import CONFIG, MANIFEST, Package, write_archive
from .script import JOB, TASK, RemoteJob

FOLDER = "~/lora-fp8-jobs"
"""Where jobs are there, unless somebody says otherwise."""
ROOM = 1 << 30
"""Bytes that have to be free there besides those that are sent."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """What is submitted, before it is.

    Attributes:
        target: where to.
        job: its resources and its script.
        package: its config and files.
        folder: folder there in which the job's folder is made.
        output: the run folder here, into which it is fetched later.
    """

    target: Target
    job: RemoteJob
    package: Package
    folder: str
    output: Path

    def render_files(self, folder: str = "") -> dict[str, str]:
        """Return the files that are written for the job, whose folder there is known, or ""."""
        mark = f"{self.job.name}\n{uuid.uuid4().hex}\n"  # another one each time that the job is submitted
        texts = {JOB: script.render(self.job), MARKER: mark, CONFIG: self.package.render_config(folder)}
        if self.target.kind == "sky":
            texts[TASK] = script.render_task(self.job, str(self.staged))
        return texts

    @property
    def folder_name(self) -> str:
        """Return the name of the job's folder there: the job's, without what a config takes for a variable."""
        return re.sub(r"[$%~]", "-", self.job.name)

    @property
    def staged(self) -> Path:
        """Return the folder here that SkyPilot sends."""
        return handle.find_remote_home() / self.job.name / "job"

    def render_text(self) -> str:
        """Return what `--dry-run` prints: the text for sbatch or sky, or the script that is started over ssh."""
        return self.render_files()[TASK if self.target.kind == "sky" else JOB]


def submit(plan: Plan, progress: Progress | None = None) -> Handle:
    """Send a job and start it.

    Args:
        plan: the job, which has passed `check` here.
        progress: called with (bytes sent, bytes in all).

    Returns:
        The handle, which is saved.

    Raises:
        UserError: something is wrong there: no connection, no program, no room, a path that does not exist.
        Disconnected: the connection was lost while the job was started, which then is remembered.
        RunFailure: it failed on the way.
    """
    script.check(plan.job)
    if "$" in plan.folder:
        raise UserError(
            Message(
                "--folder {given}: variables are not expanded; write ~/ for the home folder of that machine",
                given=plan.folder,
            )
        )
    control.require_variables(plan.job.secrets)
    handle.require_new(plan.job.name)
    if plan.target.kind == "sky":
        return _submit_to_sky(plan, progress)
    machine = Machine(plan.target.address)
    folder = f"{prepare_remote_folder(machine, plan).rstrip('/')}/{plan.folder_name}"
    send(machine, folder, plan, progress)
    new = Handle(
        name=plan.job.name,
        kind=plan.target.kind,
        address=plan.target.address,
        folder=folder,
        run=plan.job.run,
        output=str(plan.output),
        places=plan.package.list_places(folder),
        created=time.time(),
        secrets=plan.job.secrets,
    )
    try:
        handle.save(new)  # before the job can run: this command may be killed, or the connection lost, at any time
    except UserError:
        control.remove(machine, folder)
        raise
    try:
        return control.start(new)
    except Disconnected as error:  # its folder is not to be deleted beneath a job that may run by now
        command = f"lora-fp8 remote status {quote_path(new.name)}"
        raise Disconnected(
            Message(
                "{why}. Everything was sent; check with `{command}` if the job has started",
                why=error,
                command=command,
            )
        ) from None
    except (UserError, RunFailure):
        control.remove(machine, folder)
        handle.delete(new)
        raise


def prepare_remote_folder(machine: Machine, plan: Plan) -> str:
    """Return the absolute path of the folder for jobs there, which is made, after checking that a job can start.

    Raises:
        UserError: it cannot.
    """
    tools = (
        ["tar", "sha256sum", "find", "setsid", "flock"] if plan.target.kind == "ssh" else ["tar", "sha256sum", "find"]
    )
    tools += ["sbatch", "squeue", "scancel", "scontrol"] if plan.target.kind == "slurm" else []
    lines = [*plan.job.setup]
    lines += [f"command -v {tool} > /dev/null || {{ echo {tool} >&2; exit {NO_TOOL}; }}" for tool in tools]
    lines += [f"command -v lora-fp8 > /dev/null || exit {NO_PROGRAM}"]
    if plan.job.is_launched:
        lines += [f"command -v torchrun > /dev/null || {{ echo torchrun >&2; exit {NO_TOOL}; }}"]
    folder = quote_folder(plan.folder)
    lines += [f"mkdir -p -- {folder} && cd -- {folder} || exit {NO_FOLDER}"]
    name = shlex.quote(plan.folder_name)
    lines += [f"if [ -e {name} ] || [ -L {name} ]; then exit {EXISTS}; fi"]
    lines += [
        f'if [ ! -e {quote_folder(path)} ]; then echo "missing {index}"; fi' for index, path in _list_needed(plan)
    ]
    lines += [
        'echo "version $(lora-fp8 --version)"',
        'echo "free $(($(stat -f -c "%a * %S" .) / 1024))"',  # of df's columns, two can have spaces in them
        'echo "at $PWD"',
    ]
    answer = machine.run("\n".join(lines), login=True)
    if answer.code == EXISTS:
        raise UserError(
            Message(
                "{host}: {folder}/{name} exists already on that machine; choose another name (--set name=...) or "
                "another --folder",
                host=machine,
                folder=plan.folder,
                name=plan.folder_name,
            )
        )
    if answer.code == NO_PROGRAM:
        raise UserError(
            Message(
                "{host}: lora-fp8 is not installed on that machine, or not on its PATH. Install it (`{command}` in "
                "a checkout), or activate it, such as with --setup 'source ~/venv/bin/activate'",
                host=machine,
                command="sh scripts/install.sh",
            )
        )
    facts = dict(line.partition(" ")[::2] for line in require_success(machine, answer).text.splitlines())
    _require_fit(machine, plan, facts)
    return facts["at"]


def _list_needed(plan: Plan) -> list[tuple[int, str]]:
    return list(enumerate(plan.package.needed))


def _require_fit(machine: Machine, plan: Plan, facts: dict[str, str]) -> None:
    """Refuse a machine that lacks a path or room, or has another version of this program."""
    if "missing" in facts:
        raise UserError(
            Message(
                "{host}: the base model {path} does not exist on that machine; give its path there with --base, or "
                "send it with --send-base",
                host=machine,
                path=plan.package.needed[int(facts["missing"])],
            )
        )
    version = facts.get("version", "").removeprefix("lora-fp8 ")
    if version != __version__:
        raise UserError(
            Message(
                "{host}: lora-fp8 {version} is installed on that machine, but {own} on this one; install the same "
                "version on both",
                host=machine,
                version=version or "?",
                own=__version__,
            )
        )
    free = int(facts.get("free", "0")) * 1024
    if free < plan.package.size + ROOM:
        raise UserError(
            Message(
                "{host}: the disk of that machine is too full: {size} are to be sent, and {free} are free",
                host=machine,
                size=format_bytes(plan.package.size),
                free=format_bytes(free),
            )
        )


def send(machine: Machine, folder: str, plan: Plan, progress: Progress | None = None) -> None:
    """Make the job's folder there, fill it and compare checksums. If that fails, the folder is deleted again.

    Raises:
        UserError: see `Machine.run`, `write_archive`.
        RunFailure: the disk there is full, or something else went wrong.
    """
    place = shlex.quote(folder)
    lines = (
        f"mkdir -- {place} && cd -- {place} || exit {NO_FOLDER}",
        f": > {MARKER}",
        f"tar -xf - --no-same-owner --no-same-permissions && sha256sum --quiet -c {MANIFEST} && rm {MANIFEST}",
    )
    try:
        answer = machine.run("\n".join(lines), give=partial(_write, plan, folder, progress))
        if answer.code != NO_FOLDER:
            require_success(machine, answer)
    except BaseException:
        control.remove(machine, folder)
        raise
    require_success(machine, answer)  # a folder that was not made here is not deleted


def _write(plan: Plan, folder: str, progress: Progress | None, stream: IO[bytes]) -> None:
    write_archive(stream, plan.package, plan.render_files(folder), progress)


# ---------------------------------------------------------------------------------------------------------------------
# SkyPilot


def _submit_to_sky(plan: Plan, progress: Progress | None) -> Handle:
    """Copy the job's folder to where SkyPilot takes it from, and launch a machine with it."""
    if shutil.which("sky") is None:
        raise UserError(
            Message(
                "{program} is not installed on this machine; install it: {command}",
                program="sky",
                command="pip install skypilot",
            )
        )
    _stage(plan, progress)
    new = Handle(
        name=plan.job.name,
        kind="sky",
        address=script.make_cluster_name(plan.job.name),
        folder="~/sky_workdir",
        run=plan.job.run,
        output=str(plan.output),
        places=plan.package.list_places(),
        created=time.time(),
        secrets=plan.job.secrets,
    )
    handle.save(new)  # before a machine is rented, which costs money from then on
    command = ["sky", "launch", "--yes", "--detach-run", "--cluster", new.address]
    command += [part for name in plan.job.secrets for part in ("--secret", name)]
    code = subprocess.run([*command, str(plan.staged / TASK)], stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        handle.delete(new)
        raise RunFailure(Message("sky launch failed with exit code {code}; its messages are above", code=code))
    return new


def _stage(plan: Plan, progress: Progress | None) -> None:
    """Write the job's folder, as it is to be there, into the program's own folder here."""
    if os.path.lexists(plan.staged):  # of a launch that failed
        shutil.rmtree(plan.staged)
    try:
        make_folder(plan.staged)
        with tempfile.TemporaryFile(dir=plan.staged.parent) as archive:
            write_archive(archive, plan.package, plan.render_files(), progress)
            archive.seek(0)
            unpack = ["tar", "-xf", "-", "-C", str(plan.staged)]
            subprocess.run(unpack, stdin=archive, check=True)
    except OSError as error:
        raise cannot_write(plan.staged, error) from None
    if not (plan.staged / CONFIG).is_file():
        raise RunFailure(Message("{path}: the job could not be written", path=plan.staged))
