"""Write a job as text: `job.sh`, which sbatch takes too, and the task of SkyPilot.

job.sh is in the job's folder and is started there. It trains, or resumes, by what is in the run folder. SIGTERM is
passed on to the trainer, which saves at the end of its step and exits with 75. In Slurm the job then queues itself
again, unless somebody stopped it. The exit code is in the file `exit`, whoever asks for it.
"""

import hashlib
import re
import shlex
from dataclasses import dataclass

import yaml

from ...errors import Message, UserError
from .machine import MARKER

JOB, TASK = "job.sh", "task.yaml"
RESTARTS = 500
"""How often a Slurm job queues itself again: a job that never gets to a step must not do so forever."""
TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
KEY = re.compile(r"[a-z][a-z-]*")
OURS = ("job-name", "output", "open-mode", "requeue", "signal", "chdir", "nodes", "ntasks-per-node", "time", "array")
"""Options of sbatch that the script has already, or cannot do with."""
SECRET = re.compile(r"\b(\w*(?:TOKEN|PASSWORD|SECRET|API_KEY|ACCESS_KEY)\w*)\s*=\s*[^\s$]", re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class RemoteJob:
    """A job on another machine, whatever kind of machine it is.

    Attributes:
        name: of the run.
        run: the run folder, relative to the job's.
        kind: "slurm", "ssh" or "sky".
        gpus: for each node; 0 trains on the CPU.
        nodes: number of nodes.
        time: limit, as sbatch writes it; "" is the cluster's.
        setup: lines of bash that are run there first, each time that the job starts.
        install: lines of bash that prepare a new machine (SkyPilot).
        options: further options of sbatch, as KEY=VALUE.
        accelerator: name of the GPU (SkyPilot).
        secrets: names of environment variables that are passed on to the job.
    """

    name: str
    run: str
    kind: str
    gpus: int = 1
    nodes: int = 1
    time: str = ""
    setup: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    accelerator: str = ""
    secrets: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        """Return the number of processes on each node."""
        return max(self.gpus, 1)

    @property
    def is_launched(self) -> bool:
        """Return True if several processes train, which a launcher starts."""
        return self.processes > 1 or self.nodes > 1


def check(job: RemoteJob) -> None:
    """Refuse what cannot be carried out.

    Raises:
        UserError: with the option that is wrong.
    """
    for option, given, kinds in (
        ("--nodes", job.nodes > 1, ("slurm",)),
        ("--time", bool(job.time), ("slurm",)),
        ("--sbatch", bool(job.options), ("slurm",)),
        ("--accelerator", bool(job.accelerator), ("sky",)),
        ("--install", bool(job.install), ("sky",)),
        ("--env", bool(job.secrets), ("ssh", "sky")),
    ):
        if given and job.kind not in kinds:
            raise UserError(Message("{option} has no effect with --to {kind}; remove it", option=option, kind=job.kind))
    if job.time and not TIME.fullmatch(job.time):
        raise UserError(
            Message("--time {given}: expected minutes, hours:minutes:seconds or days-hours", given=job.time)
        )
    for option in job.options:
        key, equals, value = option.partition("=")
        if not KEY.fullmatch(key) or not value.isprintable():
            raise UserError(Message("--sbatch {given}: expected KEY=VALUE, such as partition=gpu", given=repr(option)))
        if key in OURS:
            raise UserError(Message("--sbatch {given}: the script sets {key} itself", given=repr(option), key=key))
    for line in (*job.setup, *job.install):
        if secret := SECRET.search(line):
            raise UserError(
                Message(
                    "{name} would be written to a file on that machine; set it in the environment of that machine, "
                    "or pass it with --env {name}",
                    name=secret[1],
                )
            )
    for name in job.secrets:
        if not VARIABLE.fullmatch(name):
            raise UserError(Message("--env {given}: expected the name of a variable, without a value", given=name))
    if job.kind == "sky" and bool(job.gpus) != bool(job.accelerator):
        raise UserError(
            Message("--to sky needs --accelerator, such as L40S, or --gpus-per-node 0 for a machine without a GPU")
        )
    if job.kind == "sky" and not job.install:
        raise UserError(
            Message(
                "--to sky needs --install with the command that installs lora-fp8 on a new machine, such as "
                "'pip install https://HOST/lora_fp8-0.1.0-py3-none-any.whl'"
            )
        )


def render(job: RemoteJob) -> str:
    """Return job.sh."""
    head = ["#!/bin/bash -l", *(_list_directives(job) if job.kind == "slurm" else [])]
    parts = [
        "\n".join(head),
        "# Written by `lora-fp8 submit`. Trains or resumes, by what is in the run folder; SIGTERM saves and stops.",
        f"run={shlex.quote(job.run)}",
        "" if job.kind == "slurm" else _LOCK,
        _ALONE if job.kind == "sky" else "",
        _BEGIN,
        "\n".join(job.setup),
        _CHOICE,
        _render_functions(job),
        _WAIT,
        _LAUNCHED if job.is_launched else "",
        _EXIT,
        _SLURM_END if job.kind == "slurm" else "",
        'exit "$code"',
    ]
    return "\n".join(part.rstrip() for part in parts if part) + "\n"


_LOCK = """\
exec 9>> job.lock                        # held as long as this script or the trainer lives
# Whoever asks whether the job runs holds it for a moment.
flock -w 5 9 || { echo "this job is running already" >&2; exit 2; }
echo "$$" > pid"""

_CHOICE = """\
# A run with a checkpoint, or with files that were written, is resumed; any other begins.
results=$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null
    find "$run/export" -maxdepth 1 -name '*.safetensors' 2> /dev/null)
if [ -n "$results" ]; then
    set -- resume "$run"
else
    set -- train config.toml
fi"""

_BEGIN = f"""\
asked=0
asking=
trainer=
trap 'asked=$((asked + 1)); [ -z "$trainer" ] || ask_to_stop' TERM
rm -f exit
cat {MARKER} > started"""

_ALONE = f"""\
# A machine of SkyPilot keeps its folder, which an earlier job of this name may have had.
if [ -s started ] && [ "$(cat started)" != "$(cat {MARKER})" ]; then
    echo "the run of an earlier job is here, which would be resumed; end this machine first (sky down)" >&2
    echo 2 > exit
    exit 2
fi"""

_WAIT = """\
code=75
if [ ! -e cancel ] && [ "$asked" = 0 ]; then
    start "$@" &
    trainer=$!
    [ "$asked" = 0 ] || ask_to_stop
    while :; do                          # a signal interrupts wait, which then has to be repeated
        before=$asked
        wait "$trainer"
        code=$?
        [ "$before" = "$asked" ] && break
    done
fi
[ -z "$asking" ] || kill "$asking" 2> /dev/null
# The signal came before the trainer could take it.
[ "$code" != 143 ] || code=75"""

_LAUNCHED = """\
# A launcher turns the exit code of its processes into 1; the run folder says how the run ended.
if [ "$code" != 0 ] && [ "$run/status.json" -nt started ]; then
    if grep -q '"state": "stopped"' "$run/status.json"; then code=75; fi
fi"""

_EXIT = 'echo "$code" > exit.new && mv exit.new exit'

_SLURM_END = f"""\
# Stopped early, and not by a person: queue again. Slurm itself does so when a node fails.
if [ "$code" = 75 ] && [ ! -e cancel ] && {{ [ "$asked" != 0 ] || [ ! -e "$run/control/stop" ]; }} &&
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RESTARTS} ]; then
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID"
fi"""


def _list_directives(job: RemoteJob) -> list[str]:
    """Return the lines that sbatch reads."""
    options = [f"job-name={job.name}", "output=log.txt", "open-mode=append", "requeue", "signal=B:TERM@120"]
    options += [f"nodes={job.nodes}", "ntasks-per-node=1"]
    options += [f"time={job.time}"] if job.time else []
    if job.gpus and not any(option.startswith(("gres=", "gpus")) for option in job.options):
        options.append(f"gres=gpu:{job.gpus}")
    return [f"#SBATCH --{_quote_directive(option)}" for option in (*options, *job.options)]


def _quote_directive(option: str) -> str:
    """Return an option as the lines of sbatch take it: a value in double quotes, special ones with a backslash."""
    key, equals, value = option.partition("=")
    if not equals or re.fullmatch(r"[\w.:,@/+-]+", value, re.ASCII):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _render_functions(job: RemoteJob) -> str:
    """Return the functions that start the trainer and ask it to stop."""
    launcher = f"torchrun --nproc-per-node={job.processes}"
    if job.kind == "slurm":
        step = 'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1'
        if not job.is_launched:
            lines = [f'{step} lora-fp8 "$@"']
        else:
            lines = [
                'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                'head=$(scontrol show node "$first" | grep -o "NodeAddr=[^ ]*" | cut -d = -f 2)',
                "port=$((20000 + SLURM_JOB_ID % 20000))",
                # A launcher would wait five minutes for those that ended with an error, as a stop is one to them.
                f'{step} --kill-on-bad-exit=1 {launcher} --nnodes="$SLURM_NNODES" \\',
                '    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" \\',
                '    --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" -m lora_fp8 "$@"',
            ]
        lines = ['[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK', *lines]
        # In the background, as Slurm refuses while it requeues the job. scancel alone would try again for a minute, and
        # could end the job's next start. Not as a child of the script, for whose end bash may wait in place of the
        # trainer's.
        signal = [
            '[ -z "$asking" ] || ! kill -0 "$asking" 2> /dev/null || return',
            'asking=$( (while kill -0 "$$" && ! timeout 4 scancel --signal=TERM "$SLURM_JOB_ID"; do sleep 1; done',
            "    ) > /dev/null 2>&1 & echo $!)",
        ]
    else:
        lines = [f'exec {launcher} --standalone -m lora_fp8 "$@"' if job.is_launched else 'exec lora-fp8 "$@"']
        signal = ['kill -TERM "$trainer" 2> /dev/null']
    asks = ["signal_trainer"]
    if job.is_launched:
        # A launcher would end its processes in the middle of their save, so the run folder asks them: again and again,
        # as a trainer that is starting takes the request for an old one.
        asks = [
            'if [ ! -d "$run/control" ]; then signal_trainer; return; fi',
            'while kill -0 "$trainer"; do : > "$run/control/stop"; sleep 2; done 2> /dev/null &',
        ]
    functions = {"start": lines, "signal_trainer": signal, "ask_to_stop": asks}
    return "\n".join(
        f"{name}() {{\n    {joined}\n}}" for name, body in functions.items() if (joined := "\n    ".join(body))
    )


def render_task(job: RemoteJob, folder: str) -> str:
    """Return the task of SkyPilot for a job's folder here, as YAML."""
    resources = {"accelerators": f"{job.accelerator}:{job.gpus}"} if job.gpus else {}
    task = {
        "name": make_cluster_name(job.name),
        "workdir": folder,
        "num_nodes": 1,
        **({"resources": resources} if resources else {}),
        "setup": "\n".join(job.install) + "\n",
        "run": f"exec bash -l {JOB} >> log.txt 2>&1\n",
    }
    return yaml.safe_dump(task, allow_unicode=True, sort_keys=False, width=120)


def make_cluster_name(name: str) -> str:
    """Return a name for a machine of SkyPilot, which is also its name for ssh."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:30].strip("-") or "job"
    # Jobs of two names must not get one machine, on which they would have one folder.
    mark = "" if plain == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"lora-{plain}{mark}"
