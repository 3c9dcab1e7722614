"""The commands of the queue: `lora-fp8 submit | jobs | stop | worker`; commands.py adds them to `lora-fp8`."""

import os
import time
from pathlib import Path
from typing import Any

import typer

from ..common import system
from ..errors import Message, UserError
from . import remote
from .help import Program
from .options import JSON, SET, load_config, open_run, print_json, print_lines
from .remote import ENV
from .streams import works

JOB = typer.Argument(..., metavar="JOB", help="Number of the job, from `lora-fp8 jobs`.")
PRIORITY = typer.Option(0, help="Priority: higher starts earlier.")
GPUS = typer.Option("", help="GPU group of the worker to wait for, such as 0,1. Default: any.")
WORKER = typer.Option(True, "--worker/--no-worker", help="Start a worker in the background if none is running.")

jobs_app = Program(invoke_without_command=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    app.add_typer(jobs_app, name="jobs")
    for command in (submit, stop, worker):
        app.command()(command)


def submit(
    config_file: Path = typer.Argument(
        ..., metavar="CONFIG | RUN", help="Config file, or the folder of a run to resume."
    ),
    overrides: list[str] = SET,
    priority: int = PRIORITY,
    gpus: str = GPUS,
    attempts: int = typer.Option(3, min=1, help="Number of starts if the job crashes. 1: no restart."),
    with_worker: bool = WORKER,
    to: str = typer.Option("", metavar="WHERE", help="Another machine: ssh:HOST, slurm, slurm:HOST or sky."),
    folder: str = typer.Option("", "--folder", help="With --to: folder for jobs there. Default: ~/lora-fp8-jobs."),
    gpus_per_node: int = typer.Option(1, min=0, help="With --to: number of GPUs on each node. 0: CPU."),
    nodes: int = typer.Option(1, min=1, help="With --to slurm: number of nodes."),
    time_limit: str = typer.Option("", "--time", help="With --to slurm: time limit, such as 4:00:00 or 1-12."),
    sbatch: list[str] = typer.Option(
        [], metavar="KEY=VALUE", help="With --to slurm: option of sbatch, such as partition=gpu. Repeatable."
    ),
    accelerator: str = typer.Option("", help="With --to sky: name of the GPU, such as L40S."),
    install: list[str] = typer.Option(
        [], metavar="COMMAND", help="With --to sky: command that installs lora-fp8 on the new machine. Repeatable."
    ),
    setup: list[str] = typer.Option(
        [],
        metavar="COMMAND",
        help="With --to: command to run before each start there, such as 'source ~/venv/bin/activate'. Repeatable.",
    ),
    env: list[str] = ENV,
    base: str = typer.Option("", metavar="PATH", help="With --to: path of the base model there."),
    send_base: bool = typer.Option(False, help="With --to: send the base model, also if it is larger than 1 GiB."),
    dry_run: bool = typer.Option(False, help="With --to: print what would be submitted, and send nothing."),
    write: Path | None = typer.Option(
        None, metavar="FILE", help="With --to: write what would be submitted to a new file, and send nothing."
    ),
    as_json: bool = JSON,
) -> None:
    """Queue a training here or on another machine. Later edits of the file change nothing."""
    given = {"to": to, "folder": folder, "gpus_per_node": gpus_per_node, "nodes": nodes, "time": time_limit}
    given |= {"sbatch": sbatch, "accelerator": accelerator, "install": install, "setup": setup, "env": env}
    given |= {"base": base, "send_base": send_base, "dry_run": dry_run, "write": write}
    here = {"priority": priority, "gpus": gpus, "attempts": attempts, "no_worker": not with_worker}
    _require_effect(here if to else given, to)
    if to:
        remote.submit_there(config_file, overrides, given, as_json)
        return
    from .. import jobs

    queue = jobs.Queue()
    scheduling = jobs.Scheduling(priority, gpus, attempts)
    if config_file.is_dir():
        id = queue.submit_run(config_file, overrides=overrides, scheduling=scheduling)
    else:
        load_config(config_file, overrides)  # for its error messages
        id = queue.submit_file(config_file, overrides=overrides, scheduling=scheduling)
    _print_queued(queue, id, with_worker, as_json)


DEFAULTS = {"attempts": 3, "gpus_per_node": 1, "nodes": 1}
"""Options of `submit` that are numbers, with their defaults."""


def _require_effect(options: dict[str, Any], to: str) -> None:
    """Refuse options of `submit` that have no effect with --to, or without it.

    Raises:
        UserError: one was given.
    """
    for name, value in options.items():
        if value and value != DEFAULTS.get(name):
            option = f"--{name.replace('_', '-')}"
            if to:
                raise UserError(Message("{option} has no effect with --to; remove it", option=option))
            raise UserError(Message("{option} has an effect only with --to; add --to or remove it", option=option))


def stop(
    job: str = typer.Argument(..., metavar="JOB | RUN", help="Number of a job, or the folder of a run."),
) -> None:
    """Save and stop a job or a run. It stops after its current step; a waiting job leaves the queue."""
    from .. import jobs

    if job.isdigit() and not os.path.exists(job):
        queue = jobs.Queue()
        queue.stop(int(job))
        after = queue.get_job(int(job))
        if after.state == "stopping":  # a worker ends it if it does not stop
            jobs.ensure_worker(queue.home)
        print_lines(Message("job {id}: {line}", id=job, line=after.sentence.text))
        return
    run = open_run(Path(job))
    if not run.is_locked():
        print_lines(jobs.NOT_TRAINING(folder=job))
        return
    try:
        queue = jobs.Queue()
        queue.stop(job)
        if queue.get_job(job).launched:  # by a worker, so that a worker has to end it
            jobs.ensure_worker(queue.home)
    except jobs.StoreError:  # a run is asked also without a queue, or with a broken one
        run.request("stop")
    except UserError:
        if run.is_locked():
            raise
    print_lines(Message("{path}: asked to stop; it saves at the end of the current step", path=job))


@works
def worker(
    gpus: list[str] = typer.Option(
        [], help="Group of GPUs for one job at a time, such as 0,1. Repeatable. Default: each GPU."
    ),
    idle: float | None = typer.Option(
        None, metavar="SECONDS", help="Seconds without jobs after which the worker exits. Default: never."
    ),
    background: bool = typer.Option(False, help="Run in the background, as a process of its own."),
) -> None:
    """Start queued jobs until Ctrl-C. Each GPU or group gets one at a time; running jobs continue after Ctrl-C."""
    from .. import jobs

    def report(line: str) -> None:
        print_lines(Message("{time} {line}", time=time.strftime("%Y-%m-%d %H:%M:%S"), line=line))

    if background and not system.CAN_FORK:
        raise typer.Exit(jobs.start_worker(jobs.find_home(), gpus, idle))
    queue_worker = jobs.Worker(jobs.find_home(), gpus, report)
    if background:
        queue_worker.take_lock()  # errors are reported before the fork
        queue_worker.store.close()
        if os.fork():
            os._exit(0)  # so that the worker is no child of the process that started it
    queue_worker.run(idle)


# ---------------------------------------------------------------------------------------------------------------------
# lora-fp8 jobs ...


@jobs_app.callback()
def list_jobs(
    context: typer.Context,
    watch: bool = typer.Option(False, help="Show the list again every second, until Ctrl-C."),
    runs: list[Path] = typer.Option([Path("runs")], help="Folder with runs that were started in a shell. Repeatable."),
    rescue: bool = typer.Option(False, help="Rebuild a damaged queue from the settings of its jobs."),
    as_json: bool = JSON,
) -> None:
    """List running, waiting and ended jobs, or change them."""
    from .. import jobs

    if context.invoked_subcommand:
        return
    if rescue:
        from ..jobs.rescue import rescue as rebuild

        rescued = rebuild(jobs.find_home())
        content = {"waiting": rescued.waiting, "ended": rescued.ended, "guessed": rescued.guessed, "lost": rescued.lost}
        content |= {"aside": str(rescued.aside)}
        if as_json:
            print_json(content)
        else:
            print_lines(*rescued.format_lines())
        return
    if watch and as_json:
        raise UserError(Message("--watch and --json exclude each other; give only one of them"))
    queue = jobs.Queue(roots=runs)
    while True:
        views = queue.list_jobs()
        if as_json:
            print_json([job.to_json() for job in views])
            return
        if watch:
            print("\x1b[H\x1b[2J", end="")  # clears the terminal
        print_lines(
            *(_format_table(views) or [Message("there are no jobs yet; `lora-fp8 submit CONFIG` queues a training")])
        )
        if not watch:
            return
        time.sleep(1)


@jobs_app.command()
def show(
    job: str = typer.Argument(..., metavar="JOB | RUN", help="Number of a job, or the folder of a run."),
    as_json: bool = JSON,
) -> None:
    """Show all facts about a job, and its last lines of output."""
    from .. import jobs

    queue = jobs.Queue()
    id = int(job) if job.isdigit() and not os.path.exists(job) else job
    view, lines = queue.get_job(id), queue.read_log_tail(id)
    if as_json:
        print_json(view.to_json() | {"log_tail": lines})
        return
    facts: dict[Message, object] = {
        Message("folder"): view.folder,
        Message("log"): view.log,
        Message("command"): " ".join(view.command),
        Message("GPUs"): view.assigned,
        Message("attempts"): f"{view.attempts}",
        Message("saved at step"): view.saved_step,
    }
    print_lines(
        *_format_table([view]),
        *(Message("{name}: {value}", name=name, value=value) for name, value in facts.items() if value),
        "",
        *lines,
    )


@jobs_app.command()
def run(
    command: str = typer.Argument(..., help="Command of lora-fp8 that computes, such as precision or verify."),
    arguments: list[str] = typer.Argument(None, metavar="ARGUMENTS", help="Arguments of the command, after --."),
    priority: int = PRIORITY,
    gpus: str = GPUS,
    with_worker: bool = WORKER,
    as_json: bool = JSON,
) -> None:
    """Queue another command. For example: `lora-fp8 jobs run precision -- my.toml --pictures 8`."""
    from .. import jobs

    queue = jobs.Queue()
    scheduling = jobs.Scheduling(priority, gpus, max_attempts=1)
    id = queue.submit_command(command, arguments or [], scheduling=scheduling)
    _print_queued(queue, id, with_worker, as_json)


@jobs_app.command()
def cancel(id: int = JOB) -> None:
    """Cancel a waiting job, or end a running one at once. A training gets SIGTERM, saves and stops."""
    from .. import jobs

    queue = jobs.Queue()
    queue.cancel(id)
    after = queue.get_job(id)
    if after.state == "stopping":
        jobs.ensure_worker(queue.home)
    print_lines(Message("job {id}: {line}", id=id, line=after.sentence.text))


@jobs_app.command()
def requeue(id: int = JOB, with_worker: bool = WORKER, as_json: bool = JSON) -> None:
    """Queue a stopped or failed job again. It continues from its newest checkpoint."""
    from .. import jobs

    queue = jobs.Queue()
    queue.requeue(id)
    _print_queued(queue, id, with_worker, as_json)


@jobs_app.command()
def rerun(id: int = JOB, with_worker: bool = WORKER, as_json: bool = JSON) -> None:
    """Train a job again from the beginning, in a new folder."""
    from .. import jobs

    queue = jobs.Queue()
    _print_queued(queue, queue.rerun(id), with_worker, as_json)


@jobs_app.command()
def clone(id: int = JOB, overrides: list[str] = SET, with_worker: bool = WORKER, as_json: bool = JSON) -> None:
    """Queue a copy of a job with changed settings."""
    from .. import jobs

    queue = jobs.Queue()
    _print_queued(queue, queue.clone(id, overrides), with_worker, as_json)


@jobs_app.command()
def move(id: int = JOB, place: int = typer.Argument(..., min=1, help="Position in the queue; 1 starts next.")) -> None:
    """Move a waiting job to another position in the queue. The job takes the priority of that position."""
    from .. import jobs

    queue = jobs.Queue()
    queue.move(id, place)
    print_lines(Message("job {id}: place {place}", id=id, place=queue.get_job(id).place))


@jobs_app.command()
def delete(
    id: int = JOB,
    with_run: bool = typer.Option(False, help="Delete also the files that its run wrote; other files stay."),
) -> None:
    """Delete a job that is not running. Its run folder stays."""
    from .. import jobs
    from ..run import ownership

    left = jobs.Queue().delete(id, with_run)
    print_lines(Message("job {id}: deleted with its run", id=id) if with_run else Message("job {id}: deleted", id=id))
    if left:
        names = ownership.format_entries(left)
        print_lines(Message("kept in its folder, because the run did not write them: {names}", names=names))


def _print_queued(queue: Any, id: int, with_worker: bool, as_json: bool) -> None:
    """Print the state of a queued job, and start a worker if `with_worker`."""
    from .. import jobs

    if with_worker:
        jobs.ensure_worker(queue.home)
    view = queue.get_job(id)
    if as_json:
        print_json(view.to_json())
        return
    line = view.sentence.text
    print_lines(Message("job {id} ({name}): {state}: {line}", id=id, name=view.name, state=view.state, line=line))


def _format_table(views: list) -> list[Message]:
    """Format jobs as lines: number, state, name, status, loss and time left."""
    rows, lines = [], []
    for job in views:
        line = job.sentence.text
        if job.state == "running" and job.loss is not None:
            line = Message("{line}, loss {loss}", line=line, loss=f"{job.loss:.4f}")
        if job.eta_s is not None:
            line = Message("{line}, {time} left", line=line, time=_format_duration(job.eta_s))
        rows.append((str(job.id) if isinstance(job.id, int) else "-", job.state, job.name))
        lines.append(line)
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [Message("{cells}  {line}", cells=cells, line=line) for cells, line in zip(aligned, lines, strict=True)]


def _format_duration(seconds: float) -> Message:
    minutes = max(round(seconds / 60), 1)
    if minutes < 60:
        return Message("{minutes} min", minutes=minutes)
    return Message("{hours} h {minutes} min", hours=minutes // 60, minutes=f"{minutes % 60:02d}")
