"""Trainings on other machines: `lora-fp8 submit --to` and `lora-fp8 remote`; commands.py adds the latter."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..common.numbers import format_bytes
from ..common.progress import CountProgress
from ..common.shell import quote_path
from ..errors import Message, Plural, UserError, UserErrors
from .events import print_event, print_json_line
from .help import Program
from .options import JSON, load_config, print_json, print_lines, without_collection

if TYPE_CHECKING:
    from ..jobs.remote.control import View
    from ..jobs.remote.package import Package
    from ..jobs.remote.script import RemoteJob
    from ..jobs.remote.submit import Plan
    from ..settings import Job

NAME = typer.Argument(..., metavar="NAME", help="Name of the job, from `lora-fp8 remote`.")
ENV = typer.Option(
    [],
    "--env",
    metavar="NAME",
    help="Environment variable to pass on, such as HF_TOKEN; it is not written to any file. Repeatable.",
)
STEP_SECONDS = 10.0
"""Seconds between two lines about steps."""

remote_app = Program(invoke_without_command=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    app.add_typer(remote_app, name="remote")


# ---------------------------------------------------------------------------------------------------------------------
# lora-fp8 submit CONFIG --to ...


def submit_there(config_file: Path, overrides: list[str], given: dict[str, Any], as_json: bool) -> None:
    """Check a job here, send it to another machine and start it there.

    Args:
        config_file: of the job.
        overrides: as for `--set`.
        given: the options of `submit` that belong to --to, by name.
        as_json: print the answer as JSON.
    """
    from ..jobs.remote import script, submit

    if config_file.is_dir():
        raise UserError(
            Message(
                "{path}: --to needs a config; a run that began on this machine must be resumed on this machine",
                path=config_file,
            )
        )
    job = load_config(config_file, overrides)
    plan = _make_plan(job, given)
    script.check(plan.job)
    with without_collection():
        _require_checked(job, str(config_file), plan.job.processes * plan.job.nodes, bool(given["base"]))
    if given["write"]:
        _write(given["write"], plan.render_text())
    if given["dry_run"] or given["write"]:
        if as_json:
            files = {name: str(path) for name, path in plan.package.files.items()}
            needed = list(plan.package.needed)
            print_json(
                {"text": plan.render_text(), "config": plan.package.render_config(), "files": files, "needed": needed}
            )
            return
        if given["dry_run"]:
            print(plan.render_text(), end="")
        print_lines(_describe_package(plan), file=sys.stderr)
        return
    progress = None if as_json else CountProgress(Message("sending"))
    handle = submit.submit(plan, progress)
    if as_json:
        print_json({"name": handle.name, "where": handle.where, "folder": handle.folder, "slurm": handle.slurm})
        return
    name = quote_path(handle.name)
    print_lines(
        Message(
            "{name} was sent to {where}, into {folder}", name=handle.name, where=handle.where, folder=handle.folder
        ),
        Message("to follow it: {command}", command=f"lora-fp8 remote follow {name}"),
        Message("to fetch its files when it is done: {command}", command=f"lora-fp8 remote fetch {name}"),
    )


def _make_plan(job: "Job", given: dict[str, Any]) -> "Plan":
    """Return what is submitted for a job and the options of `submit`."""
    from ..jobs.remote.machine import parse_target
    from ..jobs.remote.package import Options, pack
    from ..jobs.remote.submit import FOLDER, Plan

    target = parse_target(given["to"])
    package = pack(job, Options(given["base"], given["send_base"]))
    folder = given["folder"] or FOLDER
    return Plan(target, _make_job(package, target.kind, given), package, folder, job.run_folder.absolute())


def _make_job(package: "Package", kind: str, given: dict[str, Any]) -> "RemoteJob":
    from ..jobs.remote.script import RemoteJob

    return RemoteJob(
        name=package.name,
        run=package.run,
        kind=kind,
        gpus=given["gpus_per_node"],
        nodes=given["nodes"],
        time=given["time"],
        setup=tuple(given["setup"]),
        install=tuple(given["install"]),
        options=tuple(given["sbatch"]),
        accelerator=given["accelerator"],
        secrets=tuple(given["env"]),
    )


def _require_checked(job: "Job", where: str, world: int, has_base_there: bool) -> None:
    """Refuse a job in which `lora-fp8 check` finds problems. A base model that is only there is not looked at.

    Args:
        job, where: the job, and the file that it comes from.
        world: number of processes there.
        has_base_there: the base model's path there is given.

    Raises:
        UserErrors: the problems.
    """
    from ..common.progress import show_images
    from ..plan.check import check
    from ..plan.plan import find_batch_problems
    from ..plan.scan import scan
    from ..run import ownership

    if has_base_there and not os.path.exists(job.model.path):
        ownership.require_new(job.run_folder)
        problems = scan(job, show_images()).problems
    else:
        result = check(job, show_images())
        problems = result.problems
        print_lines(*(Message("warning: {line}", line=line) for line in result.warnings), file=sys.stderr)
    problems = [*problems, *find_batch_problems(job.train.batch_size, world)]
    if problems:
        raise UserErrors(problems, where)


def _write(path: Path, text: str) -> None:
    from ..common.writing import atomic_write, make_folder
    from ..errors import cannot_write

    if os.path.lexists(path):
        raise UserError(Message("{path}: the file exists already; choose another name with --write", path=path))
    try:
        make_folder(path.absolute().parent)
        atomic_write(path, text.encode())
    except OSError as error:
        raise cannot_write(path, error) from None


def _describe_package(plan: "Plan") -> Message:

    return Message(
        "nothing was sent; {count} files ({size}) and the config would go to {target}, into {folder}/{name}",
        count=len(plan.package.files),
        size=format_bytes(plan.package.size),
        target=plan.target,
        folder=plan.folder if plan.target.kind != "sky" else "~/sky_workdir",
        name=plan.folder_name,
    )


# ---------------------------------------------------------------------------------------------------------------------
# lora-fp8 remote ...


@remote_app.callback()
def list_jobs(context: typer.Context, as_json: bool = JSON) -> None:
    """List trainings on other machines, or manage one."""
    from ..jobs.remote import handle

    if context.invoked_subcommand:
        return
    jobs = handle.load_all()
    if as_json:
        print_json([{"name": job.name, "where": job.where, "folder": job.folder, "slurm": job.slurm} for job in jobs])
        return
    width = max((len(job.name) for job in jobs), default=0)
    lines: list[str] = [f"{job.name.ljust(width)}  {job.where}  {job.folder}" for job in jobs]
    print_lines(
        *lines
        or [
            Message(
                "there are no jobs on other machines yet; `{command}` sends a training",
                command="lora-fp8 submit CONFIG --to ssh:HOST",
            )
        ]
    )


@remote_app.command()
def status(name: str = NAME, as_json: bool = JSON) -> None:
    """Show the state of a job on another machine."""
    from ..jobs.remote import control, handle

    _print_view(name, control.fetch_view(handle.load(name)), as_json)


@remote_app.command()
def follow(name: str = NAME, as_json: bool = JSON) -> None:
    """Print the events of a job until it ends. Ctrl-C stops the output; the job continues."""
    from ..jobs.remote import control, handle

    newest = 0.0

    def report(event: dict[str, Any]) -> None:
        nonlocal newest
        if as_json:
            print_json_line(event)
            return
        if event["event"] == "step" and time.monotonic() - newest >= STEP_SECONDS:
            newest = time.monotonic()
            print_lines(Message("step {step}: loss {loss}", step=event.get("step"), loss=f"{event.get('loss', 0):.4g}"))
        print_event(event)

    def retry(why: str) -> None:
        print_lines(Message("{why}; connecting again", why=why), file=sys.stderr)

    view = control.follow(handle.load(name), report, retry)
    if not as_json:
        _print_view(name, view, as_json)


@remote_app.command()
def fetch(name: str = NAME, as_json: bool = JSON) -> None:
    """Fetch a job's run folder and verify it. Your own files are never replaced."""
    from ..jobs.remote import fetch as fetching
    from ..jobs.remote import handle
    from ..run import ownership

    result = fetching.fetch(handle.load(name), None if as_json else CountProgress(Message("receiving")))
    if as_json:
        print_json(result.to_json())
        return
    print_lines(
        Plural(
            "{folder}: {count} file ({size}) fetched, SHA-256 verified; {same} were here already",
            "{folder}: {count} files ({size}) fetched, SHA-256 verified; {same} were here already",
        )(
            folder=result.folder,
            count=result.files,
            size=format_bytes(result.size),
            same=result.same,
        ),
        *result.notes,
    )
    if result.left:
        names = ownership.format_entries(result.left)
        print_lines(Message("kept on that machine, because the run did not write them: {names}", names=names))


@remote_app.command()
def cancel(name: str = NAME) -> None:
    """Stop a job on another machine. It saves at the end of its step and can be resumed."""
    from ..jobs.remote import control, handle

    job = handle.load(name)
    control.cancel(job)
    print_lines(Message("{name}: asked to stop; it saves at the end of the current step", name=name))
    if job.kind == "sky":
        line = Message(
            "the machine is still rented and costs money; `{command}` releases it", command=f"sky down {job.address}"
        )
        print_lines(line)


@remote_app.command()
def resume(name: str = NAME, env: list[str] = ENV) -> None:
    """Start a job on another machine again.

    It continues from its newest checkpoint. It gets the same environment variables as before, with their present
    values on this machine. `--env` names others.
    """
    from ..jobs.remote import control, handle

    job = control.resume(handle.load(name), env)
    print_lines(Message("{name} was started again on {where}", name=name, where=job.where))


@remote_app.command()
def delete(
    name: str = NAME,
    there: bool = typer.Option(False, help="Delete also its folder on the other machine, with its run."),
) -> None:
    """Remove a job on another machine from the list. Fetched files stay."""
    from ..jobs.remote import control, handle

    control.delete(handle.load(name), there)
    print_lines(Message("{name}: removed from the list", name=name))


def _print_view(name: str, view: "View", as_json: bool) -> None:
    if as_json:
        print_json({"name": name, **view.to_json()})
    else:
        print_lines(Message("{name}: {line}", name=name, line=view.sentence))
