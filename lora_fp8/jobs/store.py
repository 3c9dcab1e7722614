"""The queue's database: the jobs, what is wanted of each, and what was recorded about its last attempt.

    $LORA_FP8_HOME (else $XDG_DATA_HOME/lora_fp8, else ~/.local/share/lora_fp8)
      queue.db              SQLite in WAL mode
      worker.lock, .json    held by the one worker; what it is
      worker.toml           optional: its settings (see worker.Settings)
      jobs/12/              of job 12: config.toml and job.json (as submitted; rescue.py reads them), attempt-1/ with
                            the records of keeper.py

A row never says that a job *is* running: it records what was started when and what is wanted, and `job_state` finds out
what is the case. Transactions are short: inside one, no file is read or written and no process is checked.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..common import system
from ..common.json_files import parse_json, write_json
from ..common.text import is_utf8, quote
from ..common.writing import atomic_write
from ..errors import Message, UserError, reason

BUSY_SECONDS = 10.0
"""How long a writer waits for another one; each locks the database for about a millisecond."""

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
"""The first n statements produce schema n; new ones are appended, and none is ever changed."""


@dataclass(frozen=True)
class Row:
    """One job, as stored in the database.

    Attributes:
        kind: "train", or "command" for a subcommand of `lora-fp8`.
        text: the whole config as TOML, with absolute paths; fixed when the job was submitted. "" for commands.
        command: a command's name and arguments, or the options with which a training is resumed, as a JSON list.
        folder: the run folder; "" for commands.
        cwd: working directory of a command.
        place, priority: jobs start in order of higher priority, then smaller place, then smaller id.
        gpus: the GPU group that the job asks for, such as "0,1"; "" for any.
        phase: "queued", "launched" (an attempt was started; whether it is alive must be looked up) or "ended".
        wanted: "run", "stop" (save and stop) or "cancel" (stop now).
        again: 1 if the job continues the run in its folder.
        attempts, crashes: how often it was started in all, and how often it crashed since a person last started it.
        assigned: GPUs of the last attempt.
        token: environment variable of the last attempt's processes.
        launched: start of the last attempt, in unix seconds.
        mark: size of the event log before the last attempt.
        pid, start, boot: identity of its outer keeper; pid is 0 if the worker was killed before recording it.
        asked, termed, killed: unix seconds of the request to stop, of SIGTERM and of SIGKILL; 0 if not yet.
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


BESIDE = "beside"
"""In the column of GPUs: no group of them, but the CPU, for a command that runs beside the jobs on the groups."""
CONFIG, RECORD = "config.toml", "job.json"
"""Files in a job's folder: its settings as submitted, and the other options."""
RECORD_COLUMNS: tuple[str, ...]
RECORD_COLUMNS = ("name", "kind", "command", "folder", "cwd", "priority", "gpus", "created", "again", "max_attempts")
RECORD_COLUMNS += ("phase", "state", "sentence", "ended")
COLUMNS = tuple(field.name for field in fields(Row))
ORDER = "ORDER BY priority DESC, place, id"


def find_home() -> Path:
    """Return the folder of the queue: $LORA_FP8_HOME, else lora_fp8 in the user's data folder."""
    if own := os.environ.get("LORA_FP8_HOME"):
        return Path(os.path.expanduser(own)).absolute()  # Path.expanduser raises if there is no such user
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.path.expanduser(data)).absolute() / "lora_fp8"


class Store:
    """The database of one home folder, created if missing. Safe to use from several threads and processes.

    Raises:
        UserError: from every method, if the database cannot be opened, read or written (a full disk, no permission), or
            was made by a newer version.
    """

    def __init__(self, home: Path):
        self.home = home
        self.file = home / "queue.db"
        self._local = threading.local()
        with self._translate_errors():
            if not home.is_dir():
                home.mkdir(parents=True, mode=0o700, exist_ok=True)  # private: configs name images and prompts
            (home / "jobs").mkdir(exist_ok=True, mode=0o700)
            if not self.file.exists():
                # SQLite gives its other files the same permissions.
                os.close(os.open(self.file, system.combine_flags("O_CREAT", "O_RDWR"), 0o600))
        self._migrate()

    def get_folder(self, id: int) -> Path:
        """Return the folder of a job's config and records."""
        return self.home / "jobs" / str(id)

    def read_rows(self, where: str = "1", *values: Any) -> list[Row]:
        """Return jobs in the order in which the queue starts them."""
        with self._translate_errors():
            rows = self._connect().execute(f"SELECT {', '.join(COLUMNS)} FROM jobs WHERE {where} {ORDER}", values)
            return [Row(*row) for row in rows]

    def read_row(self, id: int) -> Row:
        """Return one job.

        Raises:
            UserError: there is no job with this number.
        """
        if rows := self.read_rows("id = ?", id):
            return rows[0]
        raise UserError(Message("{id}: there is no such job; `lora-fp8 jobs` lists all jobs", id=id))

    def insert(self, **values: Any) -> int:
        """Insert a new job after the others of its priority. Return its id."""
        with self._transaction() as database:
            cursor = _insert(database, values)
            database.execute("UPDATE jobs SET place = id WHERE id = ?", (cursor.lastrowid,))
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def insert_with_id(self, id: int, **values: Any) -> None:
        """Insert a job under its old number; the errors are those of `_insert`."""
        with self._transaction() as database:
            _insert(database, {"id": id, "place": id, **values})

    def find_damage(self) -> str:
        """Return what SQLite finds wrong with the file; "" for nothing."""
        with self._translate_errors():
            lines = [str(line) for (line,) in self._connect().execute("PRAGMA integrity_check(3)")]
            self.read_rows()
            return "" if lines == ["ok"] else "; ".join(lines)

    def write_record(self, id: int) -> None:
        """Write the job's row into its folder, so that a damaged database can be rebuilt.

        Raises:
            StoreError: the folder cannot be written.
        """
        row = self.read_row(id)
        with self._translate_errors():
            self.get_folder(id).mkdir(parents=True, exist_ok=True)
            if row.kind == "train":
                atomic_write(self.get_folder(id) / CONFIG, row.text.encode())
            columns = {name: getattr(row, name) for name in RECORD_COLUMNS}
            write_json(self.get_folder(id) / RECORD, columns)

    def update(self, id: int, where: str = "1", *conditions: Any, **values: Any) -> bool:
        """Change a job if it (still) meets `where`. Return True if it was changed."""
        assignments = ", ".join(f"{name} = ?" for name in values)
        with self._transaction() as database:
            cursor = database.execute(
                f"UPDATE jobs SET {assignments} WHERE id = ? AND ({where})", (*values.values(), id, *conditions)
            )
            return cursor.rowcount == 1

    def delete(self, id: int) -> bool:
        """Delete a job that is not launched. Return True if it was deleted."""
        with self._transaction() as database:
            return database.execute("DELETE FROM jobs WHERE id = ? AND phase <> 'launched'", (id,)).rowcount == 1

    def move(self, id: int, place: int) -> None:
        """Move a queued job to a position, 1 being the next to start; it takes the priority found there.

        Raises:
            UserError: the job is not queued.
        """
        with self._transaction() as database:
            queued = database.execute(f"SELECT id, priority FROM jobs WHERE phase = 'queued' {ORDER}").fetchall()
            order = [row for row in queued if row[0] != id]
            if len(order) == len(queued):
                raise UserError(Message("job {id} is not waiting in the queue, so it cannot be moved", id=id))
            at = min(max(place, 1), len(queued)) - 1
            own = next(priority for other, priority in queued if other == id)
            highest = order[at - 1][1] if at else max(own, order[0][1] if order else own)
            lowest = order[at][1] if at < len(order) else min(own, highest)
            order.insert(at, (id, min(max(own, lowest), highest)))
            database.executemany(
                "UPDATE jobs SET place = ?, priority = ? WHERE id = ?",
                [(number, priority, other) for number, (other, priority) in enumerate(order, 1)],
            )
            # Later jobs get their id as place, which is larger than any number used here.

    def write_to_one_file(self) -> None:
        """Bring the changes that are only in queue.db-wal into queue.db, which can then be moved alone."""
        with self._translate_errors():
            is_busy, *_ = self._connect().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert not is_busy, "the file is of this process alone"

    def close(self) -> None:
        """Close this thread's connection, as before a fork; the next use opens another."""
        if database := getattr(self._local, "database", None):
            if self._local.opened[0] == os.getpid():
                database.close()
            self._local.database = self._local.opened = None

    # -- inside

    def _connect(self) -> sqlite3.Connection:
        """Return this thread's connection.

        A connection from before a fork, or to a file that was moved or deleted, is replaced.
        """
        about = os.stat(self.file)
        opened = os.getpid(), about.st_dev, about.st_ino
        if getattr(self._local, "opened", None) != opened:
            self.close()
            database = sqlite3.connect(self.file, timeout=BUSY_SECONDS, isolation_level=None)
            database.text_factory = lambda data: data.decode(errors="replace")  # one bad row must not hide the others
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a job that was accepted survives a power cut
            self._local.database, self._local.opened = database, opened
        return self._local.database

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction; it is rolled back if the block fails."""
        with self._translate_errors():
            database = self._connect()
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # on a full disk, SQLite has rolled back already
                    database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of SQLite and of the system into errors for the user."""
        try:
            yield
        except UnicodeEncodeError as error:  # from a name in a folder's path, or on the command line
            line = next(line for line in error.object.split("\n") if not is_utf8(line))
            raise UserError(
                Message("{text}: the queue accepts UTF-8 text only; rename the file or folder", text=quote(line))
            ) from None
        except sqlite3.Error as error:
            if _is_damage(error):
                raise Damaged(
                    Message(
                        "{file}: the queue is damaged ({error}). Run `lora-fp8 jobs --rescue` to rebuild it from "
                        "the settings of its jobs",
                        file=self.file,
                        error=error,
                    )
                ) from error
            raise _make_unusable_error(self.file, error) from error
        except OSError as error:
            raise _make_unusable_error(error.filename or self.home, reason(error)) from error

    def _migrate(self) -> None:
        with self._translate_errors():
            version = self._connect().execute("PRAGMA user_version").fetchone()[0]
        if version == len(MIGRATIONS):
            return
        with self._transaction() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]  # another process may have done it
            if version > len(MIGRATIONS):
                raise StoreError(
                    Message(
                        "{file}: a newer version made this queue (schema {version}, supported: {known}); update "
                        "lora-fp8, or set LORA_FP8_HOME to another folder",
                        file=self.file,
                        version=version,
                        known=len(MIGRATIONS),
                    )
                )
            for migration in MIGRATIONS[version:]:
                for statement in filter(str.strip, migration.split(";")):  # executescript would commit each by itself
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


class StoreError(UserError):
    """An error with the queue's own files; a worker continues and tries again."""


class Damaged(StoreError):
    """The file is not a valid database any more, or lacks a table or column of the queue."""


def _make_unusable_error(file: Path | str, why: object) -> StoreError:
    return StoreError(Message("{file}: the queue cannot be used ({error})", file=file, error=why))


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the other bits say where in SQLite it was noticed
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(error).startswith("no such ")


def _insert(database: sqlite3.Connection, values: dict[str, Any]) -> sqlite3.Cursor:
    """Insert a row.

    Raises:
        UserError: another job uses its folder.
        ValueError: a value is missing, or of another type.
    """
    try:
        return database.execute(
            f"INSERT INTO jobs ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
        )
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            raise ValueError(str(error)) from None
        raise UserError(
            Message("{path}: another job already uses this folder; choose another name", path=values["folder"])
        ) from None


def parse_command(row: Row) -> list[str]:
    """Return a command job's subcommand and arguments, or the arguments with which a training is resumed.

    Raises:
        ValueError: the row has something else.
    """
    words = parse_json(row.command)
    if not isinstance(words, list) or any(not isinstance(word, str) or "\0" in word for word in words):
        raise ValueError("its command is no list of words")
    return words


def now() -> float:
    """Return the time in unix seconds, rounded as the queue stores it."""
    return round(time.time(), 3)
