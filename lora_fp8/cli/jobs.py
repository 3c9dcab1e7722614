"""The queue's commands: `lora-fp8 submit | jobs | stop | worker`; added to `lora-fp8` by commands.py."""

import json
import os
import time
from pathlib import Path
from typing import Any

import typer

from .options import JSON, SET

JOB = typer.Argument(..., metavar="JOB", help="A job's number, as `lora-fp8 jobs` shows it.")
PRIORITY = typer.Option(0, help="Higher starts earlier.")
GPUS = typer.Option("", help="Wait for this group of the worker's GPUs, such as 0,1; empty takes any.")
WORKER = typer.Option(True, "--worker/--no-worker", help="Start a worker in the background where none lives.")

jobs_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Give `lora-fp8` these commands."""
    app.add_typer(jobs_app, name="jobs")
    for command in (submit, stop, worker):
        app.command()(command)


def submit(
    config_file: Path = typer.Argument(
        ..., metavar="CONFIG | RUN", help="A config file; or the folder of a run to go on with."
    ),
    overrides: list[str] = SET,
    priority: int = PRIORITY,
    gpus: str = GPUS,
    attempts: int = typer.Option(3, min=1, help="How often it is started where it crashes; 1 is never again."),
    with_worker: bool = WORKER,
    as_json: bool = JSON,
) -> None:
    """Queue a training. The settings are those of now: later edits of the file change nothing."""
    from .. import config, jobs
    from ..common.reading import load_text

    queue = jobs.Queue()
    if config_file.is_dir():
        id = queue.submit_run(config_file, overrides=overrides, priority=priority, gpus=gpus, max_attempts=attempts)
    else:
        # Once for its messages: a file that cannot be read is told here, in words.
        config.load(config_file, overrides)
        id = queue.submit(
            load_text(config_file),
            overrides=overrides,
            presets=config_file.parent,
            where=str(config_file),
            priority=priority,
            gpus=gpus,
            max_attempts=attempts,
        )
    _told(queue, id, with_worker, as_json)


def stop(
    job: str = typer.Argument(..., metavar="JOB | RUN", help="A job's number, or the folder of a run."),
) -> None:
    """Ask a job or a run to save and stop at its next step; a waiting job is taken out of the queue."""
    from .. import jobs
    from ..errors import UserError
    from ..run import Run

    if job.isdigit() and not os.path.exists(job):
        queue = jobs.Queue()
        queue.stop(int(job))
        after = queue.job(int(job))
        if after.state == "stopping":  # if it does not stop, somebody has to see to it
            jobs.ensure_worker(queue.home)
        print(f"job {job}: {after.sentence.text}")
        return
    run = Run.open(Path(job))
    if not run.alive():
        print(f"{job}: nothing is training here")
        return
    try:
        queue = jobs.Queue()
        queue.stop(job)
        if queue.job(job).launched:  # by a worker, so that one has to see to it
            jobs.ensure_worker(queue.home)
    except jobs.StoreError:  # without a queue, or with a broken one, a run is still asked
        run.request("stop")
    except UserError:
        if run.alive():
            raise
    print(f"{job}: asked to stop; it saves at the end of the current step")


def worker(
    gpus: list[str] = typer.Option([], help="A group of GPUs that gets one job at a time, such as 0,1. Repeatable."),
    idle: float | None = typer.Option(None, metavar="SECONDS", help="End when nothing was to do for so long."),
    background: bool = typer.Option(False, help="Go on as a process of its own, for who submits."),
) -> None:
    """Start queued jobs, one at a time on each GPU (or group), and see to them until Ctrl-C; running jobs go on."""
    from .. import jobs

    made = jobs.Worker(jobs.find_home(), gpus, report=lambda line: print(time.strftime("%F %T"), line, flush=True))
    if background:
        made.take_lock()  # what is in its way is told before
        made.store.close()
        if os.fork():
            os._exit(0)  # so that the worker is no child of who asked for it
    made.run(idle)


# ---------------------------------------------------------------------------------------------------------------------
# lora-fp8 jobs ...


@jobs_app.callback()
def listing(
    context: typer.Context,
    watch: bool = typer.Option(False, help="Show it again every second, until Ctrl-C."),
    runs: list[Path] = typer.Option([Path("runs")], help="Folders with runs that were started in a shell. Repeatable."),
    rescue: bool = typer.Option(False, help="Rebuild a damaged queue from the settings of its jobs."),
    as_json: bool = JSON,
) -> None:
    """Show what is running, waits and has ended; or change it."""
    from .. import jobs
    from ..errors import UserError

    if context.invoked_subcommand:
        return
    if rescue:
        from ..jobs.rescue import rescue as rebuild

        found = rebuild(jobs.find_home())
        told = {"waiting": found.waiting, "ended": found.ended, "guessed": found.guessed, "lost": found.lost}
        told |= {"aside": str(found.aside)}
        print(json.dumps(told, ensure_ascii=False, indent=1) if as_json else "\n".join(found.lines()))
        return
    if watch and as_json:
        raise UserError("--watch is for people and --json for programs; ask for one of them")
    queue = jobs.Queue(roots=runs)
    while True:
        found = queue.view()
        if as_json:
            print(json.dumps([job.to_json() for job in found], ensure_ascii=False, indent=1))
            return
        lines = _table(found) or ["nothing here yet; `lora-fp8 submit CONFIG` queues a training"]
        print(("\x1b[H\x1b[2J" if watch else "") + "\n".join(lines), flush=True)
        if not watch:
            return
        time.sleep(1)


@jobs_app.command()
def show(job: str = typer.Argument(..., metavar="JOB | RUN"), as_json: bool = JSON) -> None:
    """Tell all that is known of a job, and the last lines that it printed."""
    from .. import jobs

    queue = jobs.Queue()
    id = int(job) if job.isdigit() and not os.path.exists(job) else job
    found, lines = queue.job(id), queue.log_tail(id)
    if as_json:
        print(json.dumps(found.to_json() | {"log_tail": lines}, ensure_ascii=False, indent=1))
        return
    told = {"folder": found.folder, "log": found.log, "command": " ".join(found.command), "gpus": found.assigned}
    told |= {"attempts": f"{found.attempts}", "saved at step": found.saved_step}
    print("\n".join([*_table([found]), *(f"{name}: {value}" for name, value in told.items() if value), "", *lines]))


@jobs_app.command()
def run(
    command: str = typer.Argument(..., help="A subcommand of lora-fp8 that computes, such as precision or verify."),
    arguments: list[str] = typer.Argument(None, metavar="ARGUMENTS", help="Its arguments, after --."),
    priority: int = PRIORITY,
    gpus: str = GPUS,
    with_worker: bool = WORKER,
    as_json: bool = JSON,
) -> None:
    """Queue another command: `lora-fp8 jobs run precision -- my.toml --pictures 8`."""
    from .. import jobs

    queue = jobs.Queue()
    _told(queue, queue.submit_command(command, arguments or [], priority=priority, gpus=gpus), with_worker, as_json)


@jobs_app.command()
def cancel(id: int = JOB) -> None:
    """Take a waiting job out of the queue; a running one gets SIGTERM at once, on which a trainer saves, too."""
    from .. import jobs

    queue = jobs.Queue()
    queue.cancel(id)
    after = queue.job(id)
    if after.state == "stopping":
        jobs.ensure_worker(queue.home)
    print(f"job {id}: {after.sentence.text}")


@jobs_app.command()
def requeue(id: int = JOB, with_worker: bool = WORKER, as_json: bool = JSON) -> None:
    """Put a job that was stopped or failed into the queue again; it goes on from its newest checkpoint."""
    from .. import jobs

    queue = jobs.Queue()
    queue.requeue(id)
    _told(queue, id, with_worker, as_json)


@jobs_app.command()
def rerun(id: int = JOB, with_worker: bool = WORKER, as_json: bool = JSON) -> None:
    """Train a job's settings once more from the beginning, in a folder of its own."""
    from .. import jobs

    queue = jobs.Queue()
    _told(queue, queue.rerun(id), with_worker, as_json)


@jobs_app.command()
def clone(id: int = JOB, overrides: list[str] = SET, with_worker: bool = WORKER, as_json: bool = JSON) -> None:
    """Queue a job's settings as a new job, with changes."""
    from .. import jobs

    queue = jobs.Queue()
    _told(queue, queue.clone(id, overrides), with_worker, as_json)


@jobs_app.command()
def move(id: int = JOB, place: int = typer.Argument(..., min=1, help="1 is the next to start.")) -> None:
    """Put a waiting job at a place of the queue; it takes the priority found there."""
    from .. import jobs

    queue = jobs.Queue()
    queue.move(id, place)
    print(f"job {id}: place {queue.job(id).place}")


@jobs_app.command()
def delete(
    id: int = JOB, with_run: bool = typer.Option(False, help="Delete what its run wrote, too; other files are left.")
) -> None:
    """Forget a job that is not running; its run folder stays."""
    from .. import jobs
    from ..run import ownership

    left = jobs.Queue().delete(id, with_run)
    print(f"job {id}: deleted{' with its run' if with_run else ''}")
    if left:
        print(f"left in its folder, because the run did not write it: {ownership.counted(left)}")


def _told(queue: Any, id: int, with_worker: bool, as_json: bool) -> None:
    """Say that a job is queued, and see that somebody starts it."""
    from .. import jobs

    if with_worker:
        jobs.ensure_worker(queue.home)
    found = queue.job(id)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False, indent=1))
        return
    print(f"job {id} ({found.name}): {found.state}: {found.sentence.text}")


def _table(found: list) -> list[str]:
    """Jobs as lines: number, state, name, what is to say, and how long it will take."""
    rows = []
    for job in found:
        left = f", {_duration(job.eta_s)} left" if job.eta_s is not None else ""
        loss = f", loss {job.loss:.4f}" if job.state == "running" and job.loss is not None else ""
        number = str(job.id) if isinstance(job.id, int) else "-"
        rows.append((number, job.state, job.name, f"{job.sentence.text}{loss}{left}"))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min" if minutes else "1 min"
