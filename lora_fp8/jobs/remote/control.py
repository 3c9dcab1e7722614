"""Start a job on another machine, see how it is doing, follow its events, and stop it.

What a job does is read from its own folder there: `exit`, status.json and events.jsonl. That it runs is known from a
lock that ends with its processes, or from Slurm. So a connection may end at any time.
"""

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from ...common.messages import restore
from ...common.shell import quote_path
from ...errors import Message, Template, UserError
from ..run_events import ESCAPES
from . import handle as handles
from .handle import Handle
from .machine import MARKER, NOT_RUNNING, Disconnected, Machine, enter, find_last_line, quote_folder, require_success
from .script import JOB

NUMBER = "slurm"
"""File in the job's folder there with what sbatch printed: the number of the job, and the cluster after a ;."""
RETRY_SECONDS = 5.0
"""How long `follow` waits before it connects again."""
POLL_SECONDS = 2
"""How often it looks for new events there. It asks Slurm every fifth time."""
SENTENCES = {
    "waiting": Template("waiting in Slurm's queue ({slurm})"),
    "starting": Template("starting"),
    "running": Template("{stage}"),
    "training": Template("step {step} of {steps}"),
    "done": Template("done; `{fetch}` fetches its files"),
    "stopped": Template("stopped at step {step}; `{resume}` resumes it"),
    "failed": Template("failed with exit code {code}: {line}"),
    "lost": Template("the processes exited without a message; `{resume}` continues from the newest checkpoint"),
}


@dataclass(frozen=True)
class View:
    """A job as it is now.

    Attributes:
        state: "waiting", "starting", "running", "done", "stopped", "failed" or "lost".
        sentence: the same with details.
        stage, step, steps, loss: from its newest events; None if unknown.
        exit_code: of the last attempt; None while it runs.
    """

    state: str
    sentence: Message
    stage: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        """Return True if nothing runs there, and nothing will."""
        return self.state in ("done", "stopped", "failed", "lost")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: value for name, value in self.__dict__.items() if name != "sentence"} | {"text": self.sentence}


def require_variables(names: Sequence[str]) -> None:
    """Check that environment variables which a job gets are set here. Raises UserError."""
    for name in names:
        if name not in os.environ:
            raise UserError(
                Message(
                    "the job needs the environment variable {name} of this machine (--env), which is not set here; "
                    "set it first",
                    name=name,
                )
            )


def start(job: Handle) -> Handle:
    """Start a job whose folder is there; it trains or resumes. Return its handle, which is saved.

    The values of the environment variables that it gets go through the connection, into no file.

    Args:
        job: the job, which is not running.

    Raises:
        UserError: Slurm refuses it, a variable is not set, or see `Machine.run`.
    """
    require_variables(job.secrets)
    begin = f"{enter(job.folder)}\nrm -f cancel exit {NUMBER}\n"
    if job.kind == "slurm":
        # The number goes into a file first: it is known then, even if the connection is lost before it arrives here.
        answer = job.machine.run(f"{begin}sbatch --parsable {JOB} > {NUMBER} && cat {NUMBER}", login=True)
        number = answer.text.strip().partition(";")[0]
        if answer.code != 0 or not number.isdecimal():
            line = find_last_line(answer.errors)
            raise UserError(Message("{host}: sbatch refuses the job ({why})", host=job.machine, why=line))
        return handles.update(job, slurm=number)
    lines = (
        "while IFS= read -r -d '' variable; do export \"$variable\"; done",
        f"setsid nohup bash -l {JOB} >> log.txt 2>&1 < /dev/null &",
        "for _ in $(seq 100); do",
        "    if [ -e exit ] || ! flock -s -n job.lock true; then exit 0; fi",
        "    sleep 0.1",
        "done",
        "tail -n 1 log.txt >&2",
        "exit 1",
    )

    def give(stream: IO[bytes]) -> None:
        stream.write(b"".join(f"{name}={os.environ[name]}\0".encode() for name in job.secrets))

    require_success(job.machine, job.machine.run(begin + "\n".join(lines), give=give))
    handles.save(job)
    return job


def resume(job: Handle, secrets: Sequence[str] = ()) -> Handle:
    """Start a job again that was stopped, failed or was lost.

    Args:
        job: the job.
        secrets: names of the environment variables that it gets from now on; none: those that it got before.

    Raises:
        UserError: it runs, or is done, or a variable is not set.
    """
    view = fetch_view(job)
    if not view.has_ended:
        raise UserError(Message("{name} has not ended yet: {line}", name=job.name, line=view.sentence))
    if view.state == "done":
        raise UserError(Message("{name}: {line}", name=job.name, line=view.sentence))
    return start(replace(job, secrets=tuple(secrets) or job.secrets))


def fetch_view(job: Handle) -> View:
    """Return how a job is doing now.

    Raises:
        UserError: there is no connection, or its folder there is gone.
    """
    run = shlex.quote(job.run)
    lines = [enter(job.folder), _make_alive_script(job)]
    # One that was cancelled while it waited in the queue was stopped before it began.
    code = "cat exit 2> /dev/null || { [ -e cancel ] && [ ! -e started ] && echo 75; }"
    lines += ['echo "alive $alive"', f'echo "exit $({code})"']
    lines += [f'echo "status $(cat {run}/status.json 2> /dev/null)"']
    lines += ['echo "log $(tail -c 4000 log.txt 2> /dev/null | tr "\\r" "\\n" | grep . | tail -n 1)"']
    answer = require_success(job.machine, job.machine.run("\n".join(lines), login=job.kind == "slurm"))
    return read_view(job, answer.text)


def _make_alive_script(job: Handle) -> str:
    """Return the part of a script that sets `alive`: empty, "yes", or the state in Slurm."""
    if job.kind != "slurm":
        # SkyPilot prepares the machine before it starts the script.
        prepares = "; [ -e started ] || alive=yes" if job.kind == "sky" else ""
        # A shared lock: others may ask at the same time, while the script has it for itself.
        return f"alive=; [ ! -e job.lock ] || flock -s -n job.lock true || alive=yes{prepares}"
    return (
        f"number=$(cut -d ';' -f 1 {NUMBER} 2> /dev/null)\n"
        'alive=\n[ -z "$number" ] || alive=$(squeue --noheader --jobs="$number" --format=%T 2>&1) || case $alive in\n'
        "    *'Invalid job id'*) alive= ;;\n"
        '    *) echo "$alive" >&2; exit 1 ;;\n'
        "esac"
    )


def read_view(job: Handle, text: str) -> View:
    """Return the view for what a script has printed, which may be cut anywhere."""
    facts = dict(line.partition(" ")[::2] for line in text.splitlines())
    status: Any = {}
    with contextlib.suppress(ValueError, RecursionError):
        status = json.loads(facts.get("status", ""))
    status = status if isinstance(status, dict) else {}
    numbers = {name: status.get(name) for name in ("step", "steps", "loss")}
    numbers = {name: value if _is_small(value) else None for name, value in numbers.items()}
    stage, alive = _clean(str(status.get("state", ""))), _clean(facts.get("alive", ""))
    exit_code = int(facts["exit"]) if re.fullmatch("[0-9]{1,3}", facts.get("exit", "")) else None
    if alive in ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"):
        state = key = "waiting"
    elif alive:
        state = key = "running" if stage else "starting"
        if stage == "train" and numbers["step"] is not None and numbers["steps"]:
            key = "training"
    else:
        state = key = {0: "done", 75: "stopped", None: "lost"}.get(exit_code, "failed")
    values = {"slurm": alive, "stage": stage, "code": exit_code, **numbers}
    values["line"] = _clean(ESCAPES.sub("", facts.get("log", "")))
    values["step"] = numbers["step"] or 0
    values["resume"] = f"lora-fp8 remote resume {quote_path(job.name)}"
    values["fetch"] = f"lora-fp8 remote fetch {quote_path(job.name)}"
    sentence = SENTENCES[key](**values)
    code = exit_code if not alive else None
    return View(state, sentence, stage, numbers["step"], numbers["steps"], numbers["loss"], code)


def _is_small(value: Any) -> bool:
    """Return True for a number as trainings have them."""
    return isinstance(value, int | float) and -1e15 < value < 1e15


def _clean(text: str) -> str:
    """Return what can be printed of a text from another machine, at most 500 characters."""
    return "".join(filter(str.isprintable, text)).strip()[:500]


def follow(
    job: Handle,
    report: Callable[[dict[str, Any]], None],
    retrying: Callable[[str], None],
) -> View:
    """Report the events of a run from its begin, until it has ended. A lost connection is made again.

    Args:
        job: the job.
        report: called with each event.
        retrying: called with the reason before another attempt to connect.

    Returns:
        How the job has ended.

    Raises:
        UserError: the first connection cannot be made, or the job's folder there is gone.
    """
    offset, connected = 0, False

    def take(stream: IO[bytes]) -> None:
        nonlocal offset, connected
        connected = True
        while (line := stream.readline()).endswith(b"\n"):
            offset += len(line)
            with contextlib.suppress(ValueError, RecursionError):  # cut short by a kill; the next start ended the line
                event = restore(json.loads(line))
                if isinstance(event, dict) and "event" in event:
                    report(event)

    while True:
        try:
            script = _follow_script(job, offset)
            require_success(job.machine, job.machine.run(script, login=job.kind == "slurm", take=take))
            view = fetch_view(job)
            if view.has_ended:
                return view
        except Disconnected as error:
            if not connected:
                raise
            retrying(str(error))
        time.sleep(RETRY_SECONDS)


def _follow_script(job: Handle, offset: int) -> str:
    """Return a script that prints the events from this byte on, as they are written, until the job has ended."""
    file = shlex.quote(f"{job.run}/events.jsonl")
    return f"""\
{enter(job.folder)}
n={offset}
i=0
while :; do
    if [ $((i % {5 if job.kind == "slurm" else 1})) = 0 ]; then
{_make_alive_script(job)}
    fi
    i=$((i + 1))
    size=$(cat {file} 2> /dev/null | wc -c)
    [ "$size" -ge "$n" ] || n=0
    if [ "$size" -gt "$n" ]; then
        tail -c +$((n + 1)) {file} | head -c $((size - n)) || exit 1
        n=$size
    fi
    [ -n "$alive" ] || break
    sleep {POLL_SECONDS}
done"""


def cancel(job: Handle) -> None:
    """Stop a job: it saves at the end of its step and can be resumed. A job that waits in Slurm leaves the queue.

    Raises:
        UserError: it is not running.
    """
    stop = shlex.quote(f"{job.run}/control/stop")
    lines = [
        enter(job.folder),
        _make_alive_script(job),
        f'[ -n "$alive" ] || exit {NOT_RUNNING}',
    ]
    lines += [": > cancel"]
    if job.kind == "slurm":
        lines += ['if [ "$alive" = RUNNING ]; then scancel --batch --signal=TERM "$number"; else scancel "$number"; fi']
    else:
        lines += [
            "pid=$(cat pid)",
            f'if grep -qzF {JOB} "/proc/$pid/cmdline" && kill -TERM "$pid"; then exit 0; fi 2> /dev/null',
            f": > {stop}",
        ]
    answer = job.machine.run("\n".join(lines), login=job.kind == "slurm")
    if answer.code == NOT_RUNNING:
        raise UserError(Message("{name} is not running: {line}", name=job.name, line=fetch_view(job).sentence))
    require_success(job.machine, answer)


def delete(job: Handle, there: bool) -> None:
    """Forget a job that has ended.

    Args:
        job: the job.
        there: delete its folder there too, with its run.

    Raises:
        UserError: it is running; or see `Machine.run`, if `there`.
    """
    if there:
        view = fetch_view(job)
        if not view.has_ended:
            raise UserError(Message("{name} has not ended yet: {line}", name=job.name, line=view.sentence))
        remove(job.machine, job.folder)
    handles.delete(job)


def remove(machine: Machine, folder: str) -> None:
    """Delete the folder of a job there, if it is the folder of a job. What fails here is left."""
    place = quote_folder(folder)
    line = f"if [ -f {place}/{MARKER} ] && [ ! -L {place} ]; then rm -rf -- {place}; fi"
    try:
        machine.run(line)
    except UserError:
        return
