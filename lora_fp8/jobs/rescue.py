"""Rebuild a damaged queue from the folders of its jobs.

    rescue(home)  ->  Rescued: which jobs were restored, and what is no longer known about them

`Store.write_record` writes a job's settings and options into jobs/N when it is submitted, and the worker writes there
how its attempts ended. A job that never started therefore waits again. A job that was started is not started again: its
run folder and the records of its last attempt show how it ended. The damaged file is kept under another name.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import config
from ..common import system
from ..common.json_files import read_json
from ..common.locks import try_lock
from ..common.reading import MOST_TEXT, load_text
from ..common.writing import sync_folder, write_synced
from ..errors import Message, Plural, UserError, cannot_write
from . import job_endings, run_events
from .store import COLUMNS, CONFIG, RECORD, RECORD_COLUMNS, Damaged, Row, Store, StoreError, now

BUILDING = "queue.rescue"
"""Folder in which the new queue is built. While it is there, an interrupted rescue can be repeated."""
TYPES = {"priority": int, "again": int, "max_attempts": int, "created": float, "ended": float}


@dataclass
class Rescued:
    """The result of a rescue.

    Attributes:
        aside: the damaged file's new path.
        waiting, ended: numbers of the restored jobs.
        guessed: numbers of jobs with only their settings left: priority, GPUs and attempts are the defaults.
        lost: a line for each job that could not be restored.
    """

    aside: Path
    waiting: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def format_lines(self) -> list[str]:
        """Return sentences for people."""
        number = len(self.waiting) + len(self.ended)
        lines: list[str] = [
            Plural(
                "{count} job is restored: {waiting} waiting, {ended} ended",
                "{count} jobs are restored: {waiting} waiting, {ended} ended",
            )(
                count=number,
                waiting=len(self.waiting),
                ended=len(self.ended),
            )
        ]
        if self.guessed:
            lines.append(
                Message(
                    "priority, GPUs and attempts of job {names} are lost; the defaults are used",
                    names=", ".join(map(str, self.guessed)),
                )
            )
        if self.lost:
            lost = Plural("{count} job could not be restored:", "{count} jobs could not be restored:")
            lines.append(lost(count=len(self.lost)))
            lines += [Message("  {line}", line=line) for line in self.lost]
        lines.append(Message("positions that were changed with `lora-fp8 jobs move` are lost"))
        return [*lines, Message("the damaged file is kept as {path}", path=self.aside)]


def rescue(home: Path) -> Rescued:
    """Put a damaged queue aside and build a new one from the jobs' folders.

    Raises:
        UserError: the queue is not damaged, or a worker uses it.
    """
    if not (home / "queue.db").exists():
        raise UserError(Message("{path}: there is no queue in this folder", path=home / "queue.db"))
    with open(home / "worker.lock", "a+", encoding="utf-8") as lock:
        if not try_lock(lock):
            raise UserError(Message("{path}: a worker uses this queue; end the worker first", path=home))
        building = home / BUILDING
        if not building.exists() and not _is_damaged(home):
            raise UserError(
                Message("{path}: the queue is not damaged, so there is nothing to restore", path=home / "queue.db")
            )
        try:
            rescued = _build(home, building)
            _keep_aside(home, rescued.aside)
            system.replace(building / "queue.db", home / "queue.db")
            sync_folder(home)
            shutil.rmtree(building)
        except OSError as error:
            raise cannot_write(error.filename or home, error) from None
        return rescued


def _build(home: Path, building: Path) -> Rescued:
    """Build a new queue in a folder of its own, from the folders of the jobs."""
    shutil.rmtree(building, ignore_errors=True)  # of a rescue that was interrupted
    number = 1
    while (aside := home / f"queue.db.damaged-{number}").exists():
        number += 1
    rescued, store = Rescued(aside), Store(building)
    folders = [folder for folder in (home / "jobs").iterdir() if folder.name.isdecimal() and folder.is_dir()]
    for folder in sorted(folders, key=lambda folder: int(folder.name)):
        try:
            _restore(store, folder, rescued)
        except StoreError:  # of the new queue, not of this job
            raise
        except (UserError, OSError, ValueError, TypeError, OverflowError) as error:
            line = str(error) or type(error).__name__
            rescued.lost.append(Message("job {id}: {line}", id=folder.name, line=line))
    store.write_to_one_file()  # closing would do it too, but without a word if it fails
    store.close()
    return rescued


def _keep_aside(home: Path, aside: Path) -> None:
    """Copy the damaged file, which stays in its place until the new one replaces it, and move its companions away.

    Without that, SQLite would take what is in them for changes of the new file.
    """
    with open(home / "queue.db", "rb") as damaged, write_synced(aside) as copy:
        shutil.copyfileobj(damaged, copy)
    for suffix in ("-wal", "-shm"):
        if (companion := home / f"queue.db{suffix}").exists():
            system.replace(companion, aside.with_name(f"{aside.name}{suffix}"))
    sync_folder(home)


def _is_damaged(home: Path) -> bool:
    try:
        return Store(home).find_damage() != ""
    except Damaged:
        return True


def _restore(store: Store, folder: Path, rescued: Rescued) -> None:
    """Insert the job whose folder this is into the new queue, and note it in `rescued`."""
    id = int(folder.name)
    record = _read_record(folder)
    is_recorded = record.get("kind") in ("train", "command")
    values: dict[str, Any] = {"kind": "train", "command": "[]", "cwd": "", "gpus": "", "priority": 0, "created": now()}
    values |= {"again": 0, "max_attempts": 3, "phase": "queued"} | record
    values["text"] = ""
    if values["kind"] == "train":
        values["text"] = load_text(folder / CONFIG)
        job = config.loads(values["text"], where=str(folder / CONFIG))
        values |= {"name": job.name, "folder": str(Path(job.output_dir) / job.name)}
    attempts = [int(path.name[8:]) for path in folder.glob("attempt-*") if path.name[8:].isdecimal()]
    values["attempts"] = max(attempts, default=0)
    if attempts and values["phase"] != "ended":
        values |= _find_ending(id, values, folder)
    store.insert_with_id(id, **values)
    (rescued.ended if values["phase"] == "ended" else rescued.waiting).append(id)
    if not is_recorded:
        rescued.guessed.append(id)


def _read_record(folder: Path) -> dict[str, Any]:
    """Read the valid values that `Store.write_record` wrote."""
    try:
        content = read_json(folder / RECORD, MOST_TEXT)
    except (OSError, ValueError):
        return {}
    known = content if isinstance(content, dict) else {}
    ours = {name: value for name, value in known.items() if name in RECORD_COLUMNS}
    return {
        name: TYPES[name](value) if name in TYPES else value
        for name, value in ours.items()
        if isinstance(value, int | float if name in TYPES else str)
    }


def _find_ending(id: int, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Find out how a job that was started ended, from its run folder and the records of its last attempt."""
    defaults = {name: 0 for name in COLUMNS} | {"wanted": "run", "state": "", "sentence": "", "token": "", "boot": ""}
    row = Row(**(defaults | {"id": id, "exit_code": None, "name": "", "folder": "", "assigned": ""} | values))
    end = job_endings.find_ending(row, folder / f"attempt-{row.attempts}", run_events.Follower())
    ending = {"state": end.state, "sentence": json.dumps(end.sentence.to_json()), "exit_code": end.exit_code}
    return ending | {"phase": "ended", "ended": now()}
