"""Finds out whether a job still runs, and how it ended."""

import contextlib
from pathlib import Path
from typing import Any

from .. import config
from ..common.locks import read_holder
from ..common.messages import read_message
from ..common.reading import load_text
from ..errors import Message
from ..run import Run, Unreadable
from . import procs
from .job_view import Ending, Sentence
from .run_events import Follower, Progress, find_saved_step, read_object_or_empty, read_records
from .store import Row


def is_alive(row: Row) -> bool:
    """Return True if any process of the row's last attempt is alive. The keeper is checked first, in microseconds."""
    if not row.token:
        return False
    if row.boot and row.boot != procs.read_boot_id():
        return False
    if row.pid and procs.is_alive(procs.Identity(row.pid, row.start, row.boot)):
        return True
    return bool(procs.find_members(row.token, row.pid)) or _is_exiting(row)


def _is_exiting(row: Row) -> bool:
    """Return True if the trainer is exiting, perhaps in its own session: its lock and its GPU are not free yet."""
    if not row.folder:
        return False
    run = Run(Path(row.folder))
    with contextlib.suppress(OSError, ValueError, Unreadable):
        if not run.is_locked():
            return False
        return procs.is_exiting(read_holder(run.lock_file))
    return False


def find_ending(row: Row, attempt: Path, follower: Follower) -> Ending:
    """Find out how an attempt ended that has no process left, from the run folder and the records in `attempt`."""
    by_name = read_records(attempt)
    trainer_statuses = [record["status"] for name, record in sorted(by_name.items()) if name.startswith("trainer")]
    launcher_status = by_name["launch"]["status"] if "launch" in by_name else None
    status = _pick_status(trainer_statuses, launcher_status)
    folder = Path(row.folder) if row.folder else None
    progress = follower.read_progress(folder, row.mark) if folder else Progress(0)
    last = progress.last or {}
    if folder and last.get("event") == "done":
        return check_done(folder, last, status)
    if folder is None and status == 0:
        return Ending("done", Sentence("command_done"), 0)
    if status in (2, 3):
        # Once the run had begun, its log has the reason; before that, the trainer's last message has it.
        text = read_message(attempt / "message.json") or str(last.get("text", "")) or progress.refusal
        return Ending("failed", Sentence("input" if status == 2 else "failure", {"message": text}), status)
    if _was_stopped(row, status, launcher_status, last):
        return Ending("stopped", _describe_stop(row, find_saved_step(folder) if folder else None, status), status)
    crash = _describe_crash(row, status, launcher_status, by_name, last)
    return Ending("lost" if status is None else "failed", crash, status, crash=row.wanted == "run")


def _was_stopped(row: Row, status: int | None, launcher_status: int | None, last: dict[str, Any]) -> bool:
    """Return True if the attempt was stopped: by its owner, by `lora-fp8 stop` or by a signal."""
    if row.wanted != "run" and not (last.get("event") == "error" and status and status > 0):
        return True
    return status == 75 and (launcher_status is None or launcher_status >= 0)


def will_retry(row: Row, end: Ending) -> bool:
    """Return True if another attempt follows."""
    return end.crash and row.crashes + 1 < row.max_attempts


def describe_retry(row: Row, end: Ending) -> Sentence:
    """Describe why another attempt follows, with its number since a person last started the job."""
    arguments = {"cause": end.sentence.to_json(), "attempt": row.crashes + 2, "attempts": row.max_attempts}
    return Sentence("requeued", arguments)


def _pick_status(trainer_statuses: list[int], launcher_status: int | None) -> int | None:
    """Return the most informative status: if one process was killed, the others ended only as a consequence."""
    killed = [status for status in trainer_statuses if status < 0 and status != -15]
    return next(iter([*killed, *trainer_statuses[:1]]), launcher_status)


def check_done(folder: Path, event: dict[str, Any], status: int | None) -> Ending:
    """Return how a run ended that logged "done": done, unless its files are missing or failed verification."""
    files = [str(file) for file in event["files"]] if isinstance(event.get("files"), list) else []
    file_names = ", ".join(Path(file).name for file in files)
    missing = [file for file in files if not _is_file(folder / file)]
    if missing or not files:
        return Ending("failed", Sentence("no_files", {"files": ", ".join(missing) or Message("none")}), status)
    try:
        reports = read_object_or_empty(folder / "verify.json")
    except OSError:
        reports = {}
    if not _wants_verification(folder):
        return Ending("done", Sentence("done_unverified", {"files": file_names}), 0)
    by_file = {file: reports.get(Path(file).name) for file in files}
    unverified = [file for file, report in by_file.items() if not (isinstance(report, dict) and report.get("ok"))]
    if unverified:
        return Ending("failed", Sentence("no_files", {"files": ", ".join(unverified)}), status)
    return Ending("done", Sentence("done", {"files": file_names}), 0)


def _is_file(path: Path) -> bool:
    """Return True if this is a file; False also for a name that no file system accepts."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _wants_verification(folder: Path) -> bool:
    try:
        return bool(config.read_toml(load_text(folder / "config.toml"))["export"]["verify"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _describe_stop(row: Row, step: int | None, status: int | None) -> Sentence:
    killed = row.killed and status != 75  # if the trainer has saved, only its launcher had to be killed
    if row.kind == "command":
        return Sentence("command_killed" if killed else "command_stopped")
    hard = "_hard" if killed else ""
    if step is None:
        return Sentence("stopped_hard_early" if hard else "stopped_early")
    return Sentence(f"stopped{hard}", {"step": step})


def _describe_crash(
    row: Row, status: int | None, launcher_status: int | None, by_name: dict[str, Any], last: dict[str, Any]
) -> Sentence:
    if procs.has_rebooted(row.boot, row.launched):
        return Sentence("reboot")
    if status is None:
        return Sentence("vanished")
    if status == 75 or (launcher_status is not None and launcher_status < 0 and status in (-15, launcher_status)):
        assert launcher_status is not None
        return Sentence("launcher", {"signal": procs.name_signal(-launcher_status)})
    if status < 0:
        out_of_memory = any(record.get("oom_kills", 0) > 0 for record in by_name.values())
        keys = {-9: "killed_memory" if out_of_memory else "killed", -15: "terminated", -7: "bus_error"}
        return Sentence(keys.get(status, "crash"), {} if status in keys else {"signal": procs.name_signal(-status)})
    if status in (3221225477, -1073741819):
        return Sentence("access_violation", {"code": status})
    if status == 0:
        return Sentence("no_word")
    if last.get("event") == "error":
        line = Message("{name}: {line}", name=last.get("kind", ""), line=last.get("text", ""))
        return Sentence("error", {"code": status, "message": line})
    return Sentence("exit", {"code": status})
