"""Find out the state of a job from its row, its processes, its run folder and the records of its keepers.

States: queued · starting · running · stopping · stopped (on request, can be resumed) · cancelled · done (and its files
are verified) · failed (with the reason) · lost (its processes disappeared without a record) · unknown (this user may
not read what would show it).

No state is taken from a flag: "running" means that a process with the attempt's token is alive, "done" that the log
says so and that the files it names exist. Every reason is a `Sentence`, a key with arguments, so that the web page can
show it in another language.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..run import REFUSED, Run, Unreadable
from .job_endings import check_done, describe_retry, find_ending, is_alive, will_retry
from .job_view import JobView, Sentence, describe_damage
from .run_events import Follower, Progress, find_saved_step, read_count, read_records, read_status
from .store import BESIDE, Row, parse_command


def list_before(row: Row, unfinished: list[Row]) -> list[Row]:
    """List the jobs that a queued one may wait for: those that were started, and those queued before it.

    Args:
        row: the job.
        unfinished: all jobs that have not ended, in the order of the queue.
    """
    if row.phase != "queued":
        return []
    ids = [other.id for other in unfinished]
    ahead = set(ids[: ids.index(row.id)]) if row.id in ids else set()
    return [other for other in unfinished if other.phase == "launched" or other.id in ahead]


def view_job(
    row: Row,
    records_folder: Path,
    follower: Follower,
    before: Sequence[Row] = (),
    worker: Any = None,
    taken: bool = False,
) -> JobView:
    """Return the current state of a job.

    Args:
        row: the job's row.
        records_folder: folder with the job's records (Store.folder).
        follower: reads the event log.
        before: the jobs that it may wait for; see `list_before`.
        worker: the current worker (worker.Info), or None.
        taken: a job is writing into its folder; if this one has ended, it is another job.
    """
    recorded = _view_row(row, records_folder)
    if row.phase == "queued":
        place = 1 + sum(other.phase == "queued" for other in before)
        return replace(recorded, place=place, sentence=_describe_wait(row, before, worker))
    if row.phase == "ended":
        return _view_ended(row, recorded, follower, taken)
    if is_alive(row):
        return _view_alive(row, recorded, records_folder / f"attempt-{row.attempts}", follower)
    return _view_unrecorded(row, recorded, records_folder / f"attempt-{row.attempts}", follower, worker)


def _view_row(row: Row, records_folder: Path) -> JobView:
    """Return the view of a job as its row has it, before its processes and its run folder are looked at."""
    folder = Path(row.folder) if row.folder else None
    step = find_saved_step(folder) if folder else None
    return JobView(
        id=row.id,
        name=row.name,
        kind=row.kind,
        state="queued",
        sentence=Sentence("queued"),
        folder=folder,
        log=(folder or records_folder) / "log.txt",
        command=_read_command(row),
        priority=row.priority,
        gpus=row.gpus,
        assigned=row.assigned,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        created=row.created,
        launched=row.launched,
        ended=row.ended,
        exit_code=row.exit_code,
        resumable=step is not None and row.state != "done",
        saved_step=step,
        asked=row.asked,
        termed=row.termed,
        killed=row.killed,
    )


def _view_ended(row: Row, recorded: JobView, follower: Follower, taken: bool) -> JobView:
    """Return the view of a job whose end is recorded; of a run that goes on in a shell, that run's."""
    if taken:  # what happens in the folder is reported once, for the other job
        recorded = replace(recorded, resumable=False)
    elif recorded.folder and _is_continued_elsewhere(recorded.folder):
        continued = view_shell_run(recorded.folder, follower)
        return replace(continued, id=row.id, created=row.created, attempts=row.attempts, max_attempts=row.max_attempts)
    return replace(recorded, state=row.state, sentence=Sentence.parse(row.sentence), **_read_reached(row, follower))


def _view_unrecorded(row: Row, recorded: JobView, attempt: Path, follower: Follower, worker: Any) -> JobView:
    """Return the view of a started job without a process: it is about to start, or has ended.

    An end that is not recorded yet is about to be recorded by the worker, or there is none.
    """
    if not row.pid and time.time() - row.launched < 5:
        return replace(recorded, state="starting", sentence=Sentence("starting"))  # recorded first, then started
    end = find_ending(row, attempt, follower)
    if will_retry(row, end):
        state = "lost" if worker is None else "queued"
        return replace(recorded, state=state, sentence=describe_retry(row, end), exit_code=end.exit_code)
    values: dict[str, Any] = {"state": end.state, "sentence": end.sentence, "exit_code": end.exit_code}
    values |= {"resumable": recorded.resumable and end.state != "done"}
    values |= {"ended": max((record.get("t", 0) for record in read_records(attempt).values()), default=0)}
    return replace(recorded, **values, **_read_reached(row, follower))


def _view_alive(row: Row, recorded: JobView, attempt: Path, follower: Follower) -> JobView:
    """Return the view of a job that has a process: it is starting, running or being stopped."""
    folder = recorded.folder
    progress = follower.read_progress(folder, row.mark) if folder else Progress(0)
    recorded = replace(
        recorded,
        stage=progress.stage,
        step=progress.step,
        steps=progress.steps,
        loss=progress.loss,
        eta_s=progress.compute_eta_s(),
        download=progress.download,
        work=progress.work if progress.stage else read_count(attempt),
        since=progress.alive_at or row.launched,
    )
    if row.wanted != "run":
        key = "stop_kill" if row.killed else "stop_term" if row.termed else "stop_asked"
        return replace(recorded, state="stopping", sentence=Sentence(key), eta_s=None)
    if folder and not progress.stage:
        return replace(recorded, state="starting", sentence=Sentence("starting"))
    return replace(recorded, state="running", sentence=_describe_progress(progress, folder))


def view_damaged(row: Row, error: Exception) -> JobView:
    """Return the view of a job whose row, or something that it names, cannot be used."""
    name = "".join(c if c.isprintable() else " " for c in row.name[:100])
    return JobView(id=row.id, name=name, kind=row.kind, state="unknown", sentence=describe_damage(error))


def _read_command(row: Row) -> tuple[str, ...]:
    """Return the words of a command; () if the row has something else, which fails the job when it is started."""
    try:
        return tuple(parse_command(row))
    except ValueError:
        return ()


def _is_continued_elsewhere(folder: Path) -> bool:
    """Return True if somebody in a shell continues a job that has ended; False if the folder may not be read."""
    with contextlib.suppress(Unreadable):
        return Run(folder).is_locked()
    return False


def view_shell_run(folder: Path, follower: Follower) -> JobView:
    """Return the state of a run that was started without the queue, perhaps by another user."""
    try:
        return _view_shell_run(folder, follower)
    except (Unreadable, PermissionError) as error:
        sentence = Sentence("unreadable", {"file": str(error.filename)})
        return JobView(
            id=str(folder), name=folder.name, kind="train", state="unknown", sentence=sentence, folder=folder
        )


def _view_shell_run(folder: Path, follower: Follower) -> JobView:
    run = Run(folder)
    try:
        status = read_status(run.status_file)
    except (FileNotFoundError, NotADirectoryError):
        status = {}
    log = folder / "log.txt"
    step = find_saved_step(folder)
    run_view = JobView(
        id=str(folder),
        name=folder.name,
        kind="train",
        state="lost",
        sentence=Sentence("vanished"),
        step=status.get("step"),
        steps=status.get("steps"),
        loss=status.get("loss"),
        folder=folder,
        log=log if log.is_file() else None,
        ended=status.get("t", 0),
        resumable=step is not None,
        saved_step=step,
    )
    if run.is_locked():
        progress = follower.read_progress(folder, 0)
        run_view = replace(
            run_view,
            state="running",
            sentence=_describe_progress(progress, folder),
            ended=0,
            stage=progress.stage,
            step=progress.step,
            steps=progress.steps,
            loss=progress.loss,
            eta_s=progress.compute_eta_s(),
            download=progress.download,
            work=progress.work,
            since=progress.alive_at,
            resumable=False,
        )
        if (run.control / "stop").exists():
            return replace(run_view, state="stopping", sentence=Sentence("stop_asked"), eta_s=None)
        return run_view
    state = status.get("state")
    if state == REFUSED:  # it is as it was before
        progress = follower.read_progress(folder, 0)
        state = (progress.last or {}).get("event")
        run_view = replace(run_view, step=progress.step, steps=progress.steps, loss=progress.loss)
    if state == "stopped":
        sentence = Sentence("stopped", {"step": step}) if step is not None else Sentence("stopped_early")
        return replace(run_view, state="stopped", sentence=sentence)
    if state in ("done", "error"):
        last = follower.read_progress(folder, 0).last or {}
        if state == "error":
            key = "input" if str(last.get("kind")).startswith("UserError") else "failure"
            return replace(run_view, state="failed", sentence=Sentence(key, {"message": str(last.get("text", ""))}))
        end = check_done(folder, last, None)
        return replace(run_view, state=end.state, sentence=end.sentence, resumable=False)
    return run_view


def _describe_wait(row: Row, before: Sequence[Row], worker: Any) -> Sentence:
    if worker is None:
        return Sentence("no_worker")
    if row.gpus and row.gpus not in (BESIDE, *worker.groups):
        return Sentence("no_group", {"gpus": row.gpus, "groups": "; ".join(filter(None, worker.groups)) or "the CPU"})
    if row.sentence:  # of an attempt that crashed
        return Sentence.parse(row.sentence)
    groups = {row.gpus} if row.gpus else set(worker.groups)
    for other in reversed(before):
        if other.phase == "queued" and (other.gpus in groups or (not other.gpus and row.gpus != BESIDE)):
            return Sentence("behind", {"id": other.id, "name": other.name})
    running = [other for other in before if other.phase == "launched" and other.assigned in groups]
    if len(running) < len(groups):
        return Sentence("queued")  # it is about to start
    if len(running) == 1:
        return Sentence("after", {"id": running[0].id, "name": running[0].name})
    return Sentence("after_any", {"jobs": ", ".join(f"{other.id} ({other.name})" for other in running)})


def _describe_progress(progress: Progress, folder: Path | None) -> Sentence:
    if folder is None:
        return Sentence("stage", {"stage": "running"})
    if progress.stage == "train" and progress.step is not None:
        return Sentence("training", {"step": progress.step, "steps": progress.steps})
    return Sentence("stage", {"stage": progress.stage})


def _read_reached(row: Row, follower: Follower) -> dict[str, Any]:
    if not row.folder:
        return {}
    progress = follower.read_progress(Path(row.folder), row.mark)
    return {"step": progress.step, "steps": progress.steps, "loss": progress.loss}
