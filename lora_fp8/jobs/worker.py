"""The process that starts queued jobs, stops those that are to stop, and writes down how they ended.

One for each home folder (flock). It keeps nothing in memory that matters: what was started and what is wanted stands in
the database, what lives in /proc. So it can be killed at any moment; jobs go on, and the next one takes them over.

A job is to stop: a file control/stop in its run folder (the trainer saves at the end of its step) -> after `patience_s`
SIGTERM to the trainers -> after `kill_after_s` SIGKILL to all that have its token. Before the first step there is
nothing to save, so SIGTERM comes at once.
"""

import contextlib
import errno
import glob
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from .. import locks
from ..config import Section, UserError, UserErrors
from ..run import Run, atomic_write, without_home
from . import procs, truth
from .store import Row, Store, StoreError, command_of, now

TICK_SECONDS = 0.25
PROGRAM = ("-m", "lora_fp8")
"""What `ensure_worker` has Python run; stand-ins put theirs here."""
NOTHING_TO_SAVE = ("", "start", "cache", "load", "preflight")
"""Stages in which a request to stop is followed by SIGTERM at once."""


class Settings(Section):
    """worker.toml in the home folder; all of it may be left out."""

    gpus: list[str] = Field(default=[], description="GPU groups, such as ['0,1', '2']; empty: each GPU by itself.")
    patience_s: float = Field(default=180, ge=0, description="From the request to stop to SIGTERM.")
    kill_after_s: float = Field(default=60, ge=0, description="From SIGTERM to SIGKILL.")
    logs: int = Field(default=5, ge=0, description="Logs of earlier attempts that are kept.")


@dataclass(frozen=True)
class Info:
    """The living worker.

    Attributes:
        groups: GPU groups such as "0" or "0,1"; "cpu" where there is none.
        since, heartbeat: unix seconds.
    """

    pid: int
    groups: tuple[str, ...]
    since: float
    heartbeat: float


def settings(home: Path) -> Settings:
    """What worker.toml says.

    Raises:
        UserError: it cannot be read, or with all that is wrong in it.
    """
    path = home / "worker.toml"
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        found = Settings(**given)
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        accepted = ", ".join(Settings.model_fields)
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}; accepted: {accepted}" for e in error.errors()]
        raise UserErrors(lines, str(path)) from None
    groups(found.gpus)
    return found


def groups(given: Sequence[str]) -> tuple[str, ...]:
    """GPU groups as they are called from then on; those of this machine where none are given.

    Raises:
        UserError: a group is malformed, or a GPU stands in two of them.
    """
    if not given:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = visible.split(",") if visible is not None else [str(i) for i in range(_num_gpus())]
        return tuple(gpu.strip() for gpu in found if gpu.strip()) or ("cpu",)
    made = [group_name(text) for text in given]
    each = [gpu for name in made for gpu in name.split(",")]
    if twice := sorted({gpu for gpu in each if each.count(gpu) > 1}):
        raise UserError(f"GPU {', '.join(twice)} is in two groups; a GPU does one job at a time")
    return tuple(made)


def group_name(text: str) -> str:
    """ "0, 1" -> "0,1".

    Raises:
        UserError: it is no list of GPUs.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() or part.startswith(("GPU-", "MIG-")) for part in parts) and parts != ["cpu"]:
        raise UserError(f"{text!r} is no group of GPUs; give numbers, such as 0 or 0,1, or cpu")
    if len(set(parts)) < len(parts):
        raise UserError(f"{text!r} names a GPU twice")
    return ",".join(parts)


def _num_gpus() -> int:
    return len(glob.glob("/dev/nvidia[0-9]*"))


def info(home: Path) -> Info | None:
    """The worker of this home, if one lives. The lock is asked, not the file."""
    try:
        with open(home / "worker.lock", "rb") as file:
            if locks.try_lock(file, shared=True):
                return None
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):  # it is only just starting, or its disk is full
        told = json.loads((home / "worker.json").read_bytes())
        if procs.identify(told["pid"]):  # else that of an earlier one
            return Info(told["pid"], tuple(told["groups"]), told["since"], told["heartbeat"])
    return Info(0, (), 0, 0)


def died(home: Path) -> bool:
    """Whether the last worker was killed: nobody has the lock, and its file is there, which one told to end removes."""
    return (home / "worker.json").exists() and info(home) is None


def ensure_worker(home: Path, idle_s: float = 600) -> Info:
    """Start a worker in the background where none lives; it ends when it had nothing to do for `idle_s`. Safe to race.

    Raises:
        UserError: it did not start; with what it said.
    """
    if (found := info(home)) and found.pid:
        return found
    Store(home)  # so that a home that cannot be used is told here
    settings(home)
    log = home / "worker.log"
    environment = {name: value for name, value in os.environ.items() if name != procs.TOKEN}
    environment |= {"LORA_FP8_HOME": str(home), "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    for _ in range(3):  # who was faster may have ended again meanwhile
        with _writable(log) as file:
            # It starts the worker and ends: so the worker is nobody's child here, and no zombie either when it ends.
            subprocess.run(
                [sys.executable, *PROGRAM, "worker", "--idle", str(idle_s), "--background"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + 5
        while found := info(home):  # this one, or that of who was faster
            if found.pid or time.monotonic() > deadline:
                return found
            time.sleep(0.02)
    lines = truth.tail(log, 3)
    raise UserError(f"the worker did not start; {log} ends with: {' / '.join(lines) or 'nothing'}")


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[Any]:
    try:
        if path.exists() and path.stat().st_size > 1_000_000:
            os.replace(path, path.with_suffix(".1.log"))
        file = open(path, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    with file:
        yield file


def _hide_home(log: Path) -> None:
    """Write `~` for the home folder in a log that has ended: tracebacks name it, and logs are shown to others."""
    text = log.read_bytes().decode(errors="surrogateescape")
    if (hidden := without_home(text)) != text:
        atomic_write(log, hidden.encode(errors="surrogateescape"))


class Worker:
    """Runs the queue of one home. `run` does it all; `tick` is one look at everything.

    Args:
        gpus: groups of GPUs that get one job at a time; () is the settings', or each GPU of the machine by itself.
        say: is shown each line of what it does.
    """

    def __init__(self, home: Path, gpus: Sequence[str] = (), say: Callable[[str], None] = print):
        self.store, self.home, self.say = Store(home), home, say
        self.settings = settings(home)
        self.groups = groups(gpus or self.settings.gpus)
        self.follower = truth.Follower()
        self.since = now()
        self._lock: Any = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._beat = -1.0
        self._said: set[str] = set()
        self._leave = False

    def run(self, idle_s: float | None = None) -> None:
        """Work until SIGTERM or Ctrl-C, or until nothing was to do for `idle_s`. Jobs that are running go on.

        Raises:
            UserError: another worker has this home.
        """
        if self._lock is None:
            self.take_lock()
        self._beat = -1.0  # at once, as this may be another process than that which took the lock
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "_leave", True))
        self.say(f"worker {os.getpid()}: {self.home}, one job at a time on each of: {'; '.join(self.groups)}")
        busy_at = time.monotonic()
        while not self._leave:
            try:
                busy = self.tick()
            except (StoreError, OSError) as error:
                # A full disk must not end the worker: running jobs are to be seen to when there is room again.
                self._say_once(f"{error}; trying again")
                busy = True
            if busy:
                busy_at = time.monotonic()
            if idle_s is not None and time.monotonic() - busy_at > idle_s:
                self._take_leave()
                # Looked at after the lock is given back: who submits now finds no worker, and starts one.
                if not self.store.rows("phase <> 'ended'"):
                    break
                self.take_lock()
            time.sleep(TICK_SECONDS)
        self.say("worker: leaving; jobs that are running go on, and the next worker takes them over")
        self._take_leave()

    def tick(self) -> bool:
        """Look at each job once and do what is to be done. -> whether any is queued or started"""
        self._heartbeat()
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]
        rows = self.store.rows("phase <> 'ended'")
        taken = set()
        for row in rows:
            if row.phase == "launched" and not self._over(row):
                taken.add(row.assigned)
        # Those that have ended just now may be in the queue again.
        for row in self.store.rows("phase = 'queued'"):
            free = [group for group in self.groups if group not in taken and row.gpus in ("", group)]
            if free and self._launch(row, free[0]):
                taken.add(free[0])
        return bool(rows)

    # -- starting

    def _launch(self, row: Row, group: str) -> bool:
        """Start an attempt. -> whether the group is taken now"""
        attempt = self.store.folder(row.id) / f"attempt-{row.attempts + 1}"
        attempt.mkdir(parents=True, exist_ok=True)
        folder = Path(row.folder) if row.folder else None
        try:
            log = self._open_log(folder / "log.txt" if folder else self.store.folder(row.id) / "log.txt")
            mark = (folder / "events.jsonl").stat().st_size if folder and (folder / "events.jsonl").exists() else 0
        except OSError as error:
            said = truth.Sentence("folder", {"message": f"{error.filename or folder}: {error.strerror}"})
            self._end(row, truth.Ending("failed", said, 3))
            return False
        with log:
            token = uuid.uuid4().hex
            # Noted before anything is started: a worker that is killed between the two finds it by its token.
            if not self.store.update(
                row.id,
                "phase = 'queued' AND wanted = 'run'",
                phase="launched",
                attempts=row.attempts + 1,
                assigned=group,
                token=token,
                launched=now(),
                mark=mark,
                boot=procs.boot_id(),
                **{"pid": 0, "start": 0, "asked": 0, "termed": 0, "killed": 0, "ended": 0, "exit_code": None},
            ):
                return False  # cancelled or deleted in this moment
            command = [sys.executable, "-m", "lora_fp8.jobs.keeper", "--sweep", str(self.settings.kill_after_s)]
            command += [str(attempt / "launch.json"), *self.command(row, group, attempt)]
            child = subprocess.Popen(
                command,
                cwd=row.cwd if row.kind == "command" and os.path.isdir(row.cwd) else attempt,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(token, group, attempt),
                start_new_session=True,
            )
        self._children[child.pid] = child
        if process := procs.identify(child.pid):  # else it has ended already
            self.store.update(row.id, pid=process.pid, start=process.start)
        self.say(f"job {row.id} ({row.name}): attempt {row.attempts + 1} started on {group}, process {child.pid}")
        return True

    def command(self, row: Row, group: str, attempt: Path) -> list[str]:
        """What the outer keeper runs, as a list of arguments; no shell sees it."""
        inner = [str(attempt / "trainer.json"), sys.executable, "-m", "lora_fp8"]
        if row.kind == "command":
            return [sys.executable, "-m", "lora_fp8.jobs.keeper", *inner, *command_of(row)]
        number = len(group.split(","))
        run = Run(Path(row.folder))
        begun = any(run.checkpoints.glob("step-*")) or any(run.export.glob("*.safetensors"))
        resumes = begun and (row.again or row.attempts)
        on = ["resume", row.folder, *command_of(row)] if resumes else ["train", self.config_file(row)]
        many = ["--multi_gpu", "--main_process_port", "0"] if number > 1 else []
        # A config file of our own: what the user has told `accelerate config` about another program is not for us.
        neutral = attempt / "accelerate.yaml"
        neutral.write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: false\n", encoding="utf-8"
        )
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # OpenMP takes a list, one a level
        threads = given if given.isdecimal() else len(os.sched_getaffinity(0)) // len(self.groups) // number
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(neutral), "--quiet", *many]
        launch += ["--num_processes", str(number), "--num_machines", "1", "--mixed_precision", "no"]
        launch += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", str(max(1, int(threads)))]
        return [*launch, "-m", "lora_fp8.jobs.keeper", *inner, *on]

    def config_file(self, row: Row) -> str:
        """The job's config as it was submitted, as a file."""
        path = self.store.folder(row.id) / "config.toml"
        atomic_write(path, row.text.encode())
        return str(path)

    def environment(self, token: str, group: str, attempt: Path) -> dict[str, str]:
        """The worker's own, without what would change how files are read or processes meet."""
        unwanted = ("ACCELERATE_", "TORCHELASTIC_", "LORA_FP8_JOB")
        alone = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        unsafe = ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        kept = {name: value for name, value in kept.items() if name not in (*alone, *unsafe)}
        return kept | {
            procs.TOKEN: token,
            "LORA_FP8_MESSAGE": str(attempt / "message.txt"),
            "PYTHONUTF8": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",  # a torch.py in somebody's folder is not imported
            "TQDM_MININTERVAL": "2",  # of a progress bar the log needs no more
            "CUDA_DEVICE_ORDER": kept.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),  # as nvidia-smi counts
            "CUDA_VISIBLE_DEVICES": "" if group == "cpu" else group,
        }

    def _open_log(self, path: Path) -> Any:
        """A new log for this attempt; earlier ones become log.1.txt (the newest), log.2.txt, ..."""
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [path, *(path.with_name(f"log.{i}.txt") for i in range(1, self.settings.logs + 1))]
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                os.replace(newer, older)
        return open(path, "wb")

    # -- what has been started

    def _over(self, row: Row) -> bool:
        """See to a started job: it has ended, or is to stop. -> whether its GPUs are free"""
        if not truth.living(row):
            if not row.pid and time.time() - row.launched < 2 and row.boot == procs.boot_id():
                return False  # killed between noting and starting: what was started may only just be appearing
            end = truth.ending(row, self.store.folder(row.id) / f"attempt-{row.attempts}", self.follower)
            self._end(row, end)
            return True
        if not row.pid:
            self._adopt(row)
        if row.wanted != "run":
            self._stop(row)
        return False

    def _adopt(self, row: Row) -> None:
        """The keeper of an attempt whose start was not noted any more: the one whose parent has not the token."""
        pids = procs.members(row.token)
        for pid in pids:
            if procs.parent(pid) not in pids and (process := procs.identify(pid)):
                self.store.update(row.id, pid=process.pid, start=process.start)

    def _stop(self, row: Row) -> None:
        """One look at a job that is to stop: ask, then SIGTERM, then SIGKILL, each when its time has come."""
        stage = ""
        if row.folder:
            run = Run(Path(row.folder))
            stage = self.follower.progress(run.path, row.mark).stage
            # A starting trainer clears requests to earlier ones, so that this one is made until it stands.
            with contextlib.suppress(UserError):  # a folder that cannot be read or written: the signal follows
                if run.alive() and not (run.control / "stop").exists():
                    run.request("stop")
        if not row.asked:
            self.store.update(row.id, asked=now())
            return
        at_once = row.wanted == "cancel" or row.kind == "command" or stage in NOTHING_TO_SAVE
        pids = procs.members(row.token)
        keeper = row.pid if row.pid in pids else 0
        launcher = {pid for pid in pids if keeper and procs.parent(pid) == keeper}
        if not row.termed:
            if at_once or time.time() - row.asked > self.settings.patience_s:
                # Not the launcher: it would take its processes along in the middle of their save.
                trainers = [pid for pid in pids if pid != keeper and pid not in launcher]
                self.store.update(row.id, termed=now())
                procs.send(trainers or launcher, signal.SIGTERM)
                self.say(f"job {row.id} ({row.name}): SIGTERM to {len(trainers or launcher)} processes")
            return
        if time.time() - row.termed > self.settings.kill_after_s:
            if not row.killed:
                self.store.update(row.id, killed=now())
                self.say(f"job {row.id} ({row.name}): does not end; killed")
            # The keeper last: it writes the record.
            procs.send([pid for pid in pids if pid != keeper] or pids, signal.SIGKILL)

    def _end(self, row: Row, end: truth.Ending) -> None:
        """Note how an attempt ended; after a crash put the job into the queue again."""
        folder = Path(row.folder) if row.folder else self.store.folder(row.id)
        with contextlib.suppress(OSError):  # none was made, or there is no room for another
            _hide_home(folder / "log.txt")
        values: dict[str, Any] = {"exit_code": end.exit_code, "crashes": row.crashes + end.crash}
        if truth.goes_on(row, end):
            said = truth.requeued(row, end)
            values |= {"phase": "queued"}
        else:
            said = end.sentence
            values |= {"phase": "ended", "state": end.state, "ended": now()}
        values |= {"sentence": json.dumps(said.to_json())}
        # Only what was looked at: a stop asked for in this very moment counts, and a cancelled job does not come back.
        unchanged = "phase = ? AND attempts = ? AND wanted = ?", row.phase, row.attempts, row.wanted
        if self.store.update(row.id, *unchanged, **values):
            self.say(f"job {row.id} ({row.name}): {end.state}: {said.text}")

    # -- the worker itself

    def take_lock(self) -> None:
        """Be the worker of this home; the lock outlives a fork.

        Raises:
            UserError: another worker is.
        """
        self._lock = open(self.home / "worker.lock", "a+", encoding="utf-8")  # noqa: SIM115 - held for life
        for _ in range(20):  # who asks for `info` has a shared lock for an instant
            if locks.try_lock(self._lock):
                self._beat = -1.0
                self._heartbeat()
                return
            time.sleep(0.02)
        self._lock.close()
        other = info(self.home)
        raise UserError(
            f"{self.home}: a worker is there already (process {other.pid if other else 'unknown'}); one is enough"
        )

    def _take_leave(self) -> None:
        """Give the lock back, and say that this was meant (see `died`)."""
        if not self._lock.closed:  # else the file may be another worker's by now
            with contextlib.suppress(OSError):  # not to be removed: then it counts as killed, and another comes
                (self.home / "worker.json").unlink()
            self._lock.close()

    def _heartbeat(self) -> None:
        if time.monotonic() - self._beat < 1:
            return
        self._beat = time.monotonic()
        told = {"pid": os.getpid(), "groups": self.groups, "since": self.since, "heartbeat": now()}
        temporary = self.home / f".worker.{os.getpid()}.tmp"
        try:
            temporary.write_text(json.dumps(told), encoding="utf-8")
            os.replace(temporary, self.home / "worker.json")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._say_once(f"{self.home}: no space left for the heartbeat")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)
