"""The queue's database: which jobs there are, what is wanted of each, and what was noted about its last attempt.

    $LORA_FP8_HOME (else $XDG_DATA_HOME/lora_fp8, else ~/.local/share/lora_fp8)
      queue.db              SQLite in WAL mode
      worker.lock, .json    held by the one worker; what it is
      worker.toml           optional: its settings (see worker.Settings)
      jobs/12/              of job 12: config.toml (as submitted), attempt-1/ with the records of keeper.py

A row never says that a job *is* running: it says what was started when and what is wanted, and `truth` looks what is.
Transactions are short, and no file is read or written and no process asked inside one.
"""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import UserError
from ..wording import is_utf8, shown

BUSY_SECONDS = 10.0
"""How long a writer waits for another one; each holds the database for a millisecond."""

MIGRATIONS = (
    """
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        text TEXT NOT NULL,
        command TEXT NOT NULL,
        folder TEXT NOT NULL,
        cwd TEXT NOT NULL,
        place REAL NOT NULL DEFAULT 0,
        priority INTEGER NOT NULL,
        gpus TEXT NOT NULL,
        created REAL NOT NULL,
        phase TEXT NOT NULL DEFAULT 'queued',
        wanted TEXT NOT NULL DEFAULT 'run',
        again INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0,
        crashes INTEGER NOT NULL DEFAULT 0,
        max_attempts INTEGER NOT NULL,
        assigned TEXT NOT NULL DEFAULT '',
        token TEXT NOT NULL DEFAULT '',
        launched REAL NOT NULL DEFAULT 0,
        mark INTEGER NOT NULL DEFAULT 0,
        pid INTEGER NOT NULL DEFAULT 0,
        start INTEGER NOT NULL DEFAULT 0,
        boot TEXT NOT NULL DEFAULT '',
        asked REAL NOT NULL DEFAULT 0,
        termed REAL NOT NULL DEFAULT 0,
        killed REAL NOT NULL DEFAULT 0,
        ended REAL NOT NULL DEFAULT 0,
        state TEXT NOT NULL DEFAULT '',
        sentence TEXT NOT NULL DEFAULT '',
        exit_code INTEGER
    ) STRICT;
    CREATE UNIQUE INDEX jobs_folder ON jobs (folder) WHERE phase <> 'ended' AND folder <> '';
    CREATE INDEX jobs_phase ON jobs (phase);
    """,
)
"""Schema n is reached by the first n of these; a new one is appended and none is ever changed."""


@dataclass(frozen=True)
class Row:
    """One job as the database has it.

    Attributes:
        kind: "train", or "command" for a subcommand of `lora-fp8`.
        text: the whole config as TOML, with absolute paths; fixed when the job was submitted. "" for commands.
        command: a command's name and arguments, as a JSON list.
        folder: the run folder; "" for commands.
        cwd: where a command runs.
        place, priority: higher priority first, then smaller place, then smaller id.
        gpus: the GPU group that the job asks for, such as "0,1"; "" is any.
        phase: "queued", "launched" (an attempt was started; whether it lives is to be looked up) or "ended".
        wanted: "run", "stop" (save and stop) or "cancel" (stop now).
        again: 1 where the job goes on in a folder that has something already.
        attempts, crashes: how often it was started at all, and how often it crashed since a person last said run.
        assigned, token, launched, mark: of the last attempt: its GPUs; what its processes have in their environment;
            unix seconds; the size of the event log before it.
        pid, start, boot: its outer keeper; pid is 0 where that was not noted any more.
        asked, termed, killed: unix seconds of the request to stop, of SIGTERM and of SIGKILL; 0 is not yet.
        state, sentence, exit_code: how it ended, or why it is in the queue again; the sentence as JSON.
    """

    id: int
    name: str
    kind: str
    text: str
    command: str
    folder: str
    cwd: str
    place: float
    priority: int
    gpus: str
    created: float
    phase: str
    wanted: str
    again: int
    attempts: int
    crashes: int
    max_attempts: int
    assigned: str
    token: str
    launched: float
    mark: int
    pid: int
    start: int
    boot: str
    asked: float
    termed: float
    killed: float
    ended: float
    state: str
    sentence: str
    exit_code: int | None


COLUMNS = tuple(field.name for field in fields(Row))
ORDER = "ORDER BY priority DESC, place, id"


def home_folder() -> Path:
    """Where the queue lives: $LORA_FP8_HOME, else lora_fp8 in the user's data folder."""
    if own := os.environ.get("LORA_FP8_HOME"):
        return Path(os.path.expanduser(own)).absolute()  # Path's own way raises where there is no such user
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.path.expanduser(data)).absolute() / "lora_fp8"


class Store:
    """The database of one home folder; made where it is missing. Safe to use from several threads and processes.

    Raises:
        UserError: from every method, where the database cannot be opened, read or written (a full disk, no right), or
            was made by a newer version.
    """

    def __init__(self, home: Path):
        self.home = home
        self.file = home / "queue.db"
        self._local = threading.local()
        with self._in_words():
            if not home.is_dir():
                home.mkdir(parents=True, mode=0o700, exist_ok=True)  # configs name pictures, prompts and folders
            (home / "jobs").mkdir(exist_ok=True, mode=0o700)
            if not self.file.exists():
                # SQLite gives its other files the rights of this one.
                os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
        self._migrate()

    def folder(self, id: int) -> Path:
        """The folder of a job's config and records."""
        return self.home / "jobs" / str(id)

    def rows(self, where: str = "1", *values: Any) -> list[Row]:
        """Jobs in the order in which the queue takes them."""
        with self._in_words():
            found = self._connection().execute(f"SELECT {', '.join(COLUMNS)} FROM jobs WHERE {where} {ORDER}", values)
            return [Row(*row) for row in found]

    def row(self, id: int) -> Row:
        """One job.

        Raises:
            UserError: there is none of that number.
        """
        if found := self.rows("id = ?", id):
            return found[0]
        raise UserError(f"{id}: there is no such job; `lora-fp8 jobs` lists them")

    def insert(self, **values: Any) -> int:
        """A new job at the end of its priority. -> its id"""
        with self._writing() as database:
            try:
                cursor = database.execute(
                    f"INSERT INTO jobs ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})",
                    tuple(values.values()),
                )
            except sqlite3.IntegrityError:  # the index on folders; the others cannot be broken from outside
                raise UserError(f"{values['folder']}: another job writes there already; choose another name") from None
            database.execute("UPDATE jobs SET place = id WHERE id = ?", (cursor.lastrowid,))
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def update(self, id: int, where: str = "1", *conditions: Any, **values: Any) -> bool:
        """Change a job, if it (still) fulfils `where`. -> whether it was changed"""
        assignments = ", ".join(f"{name} = ?" for name in values)
        with self._writing() as database:
            cursor = database.execute(
                f"UPDATE jobs SET {assignments} WHERE id = ? AND ({where})", (*values.values(), id, *conditions)
            )
            return cursor.rowcount == 1

    def delete(self, id: int) -> bool:
        """Remove a job that is not in hand. -> whether it was"""
        with self._writing() as database:
            return database.execute("DELETE FROM jobs WHERE id = ? AND phase <> 'launched'", (id,)).rowcount == 1

    def move(self, id: int, place: int) -> None:
        """Put a queued job at a place of the queue, 1 being the next to start; it takes the priority found there.

        Raises:
            UserError: the job is not queued.
        """
        with self._writing() as database:
            queued = database.execute(f"SELECT id, priority FROM jobs WHERE phase = 'queued' {ORDER}").fetchall()
            order = [row for row in queued if row[0] != id]
            if len(order) == len(queued):
                raise UserError(f"job {id} is not waiting in the queue, so it has no place there")
            at = min(max(place, 1), len(queued)) - 1
            own = next(priority for other, priority in queued if other == id)
            highest = order[at - 1][1] if at else max(own, order[0][1] if order else own)
            lowest = order[at][1] if at < len(order) else min(own, highest)
            order.insert(at, (id, min(max(own, lowest), highest)))
            database.executemany(
                "UPDATE jobs SET place = ?, priority = ? WHERE id = ?",
                [(number, priority, other) for number, (other, priority) in enumerate(order, 1)],
            )
            # Later jobs get their id as place, which is larger than any number given here.

    def close(self) -> None:
        """Give up this thread's connection, before a fork; the next use opens another."""
        if database := getattr(self._local, "database", None):
            database.close()
            self._local.pid = None

    # -- inside

    def _connection(self) -> sqlite3.Connection:
        # One for each thread, and never one from before a fork.
        if getattr(self._local, "pid", None) != os.getpid():
            database = sqlite3.connect(self.file, timeout=BUSY_SECONDS, isolation_level=None)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a job that was accepted survives a power cut
            self._local.database, self._local.pid = database, os.getpid()
        return self._local.database

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._in_words():
            database = self._connection()
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back by itself
                    database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except UnicodeEncodeError as error:  # a name in a folder's path, or on the command line
            line = next(line for line in error.object.split("\n") if not is_utf8(line))
            raise UserError(f"{shown(line)}: the queue takes text in UTF-8 only; rename that file or folder") from None
        except sqlite3.Error as error:
            raise StoreError(f"{self.file}: the queue cannot be used ({error})") from error
        except OSError as error:
            raise StoreError(f"{error.filename or self.home}: the queue cannot be used ({error.strerror})") from error

    def _migrate(self) -> None:
        with self._in_words():
            version = self._connection().execute("PRAGMA user_version").fetchone()[0]
        if version == len(MIGRATIONS):
            return
        with self._writing() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]  # another process may have been faster
            if version > len(MIGRATIONS):
                raise StoreError(
                    f"{self.file}: made by a newer version (schema {version}, this one knows {len(MIGRATIONS)}); "
                    "update lora-fp8, or set LORA_FP8_HOME to another folder"
                )
            for migration in MIGRATIONS[version:]:
                for statement in filter(str.strip, migration.split(";")):  # executescript would commit each by itself
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


class StoreError(UserError):
    """The queue's own files refused; a worker goes on and tries again."""


def command_of(row: Row) -> list[str]:
    """A command job's subcommand and its arguments; of a training those with which it is resumed."""
    return json.loads(row.command)


def now() -> float:
    """Unix seconds, as the queue notes them."""
    return round(time.time(), 3)
