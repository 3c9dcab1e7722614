"""The process that starts queued jobs, stops those that should stop, and records how they ended.

There is one per home folder (flock). It keeps nothing important in memory: the database says what was started and what
is wanted, the system's process table says what is alive. It can therefore be killed at any time: its jobs continue, and
the next worker takes them over.

A job is stopped in steps: a file control/stop in its run folder (the trainer saves at the end of its step); after
`patience_s`, SIGTERM to the trainers; after `kill_after_s`, SIGKILL to all processes with its token. A training that is
to save is killed only if it has logged nothing for `silence_s`, and for twice as long as it ever did before. Before the
first step there is nothing to save, so SIGTERM comes at once, as it does for a job that is cancelled. On Windows
SIGTERM kills, and so it is the last step there.
"""

import contextlib
import errno
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ..common import system
from ..common.locks import try_lock
from ..common.messages import LANGUAGE, MESSAGE, without_home
from ..common.progress import COUNT
from ..common.reading import load_text
from ..common.writing import atomic_write
from ..config import read_toml
from ..errors import Joined, Message, Plural, UserError, UserErrors, cannot_read, cannot_write, reason
from ..run import Run, ownership, run_log
from ..settings import Section
from . import job_endings, job_view, procs, run_events, webhook
from .store import BESIDE, CONFIG, Row, Store, StoreError, now, parse_command

TICK_SECONDS = 0.25
PROGRAM = ("-m", "lora_fp8")
"""Arguments with which `ensure_worker` runs Python; test doubles replace them."""
NOTHING_TO_SAVE = ("", "start", "download", "cache", "memory", "load", "preflight")
"""Stages in which a request to stop is followed by SIGTERM at once."""
MOST_SILENCE_S = 3600.0
"""Longest silence of a training that counts when it is stopped: a longer one is that of a machine that slept."""


class Settings(Section):
    """worker.toml in the home folder; every setting is optional."""

    gpus: list[str] = Field(default=[], description="GPU groups, such as ['0,1', '2']; empty: each GPU by itself.")
    patience_s: float = Field(default=180, ge=0, description="From the request to stop to SIGTERM.")
    kill_after_s: float = Field(default=60, ge=0, description="From SIGTERM to SIGKILL.")
    silence_s: float = Field(default=1800, ge=0, description="How long a training that is to save may log nothing.")
    logs: int = Field(default=5, ge=0, description="Logs of earlier attempts that are kept.")
    webhook: str = Field(default="", description="Address that gets a message when a job ends; empty: none.")


@dataclass(frozen=True)
class Info:
    """The living worker.

    Attributes:
        pid: its process id; 0 if it has not written its file yet.
        groups: GPU groups such as "0" or "0,1"; "cpu" if there is no GPU.
        since, heartbeat: unix seconds.
    """

    pid: int
    groups: tuple[str, ...]
    since: float
    heartbeat: float


def read_settings(home: Path) -> Settings:
    """Read worker.toml.

    Raises:
        UserError: it cannot be read, or is invalid; the message lists everything that is wrong.
    """
    path = home / "worker.toml"
    try:
        content = read_toml(load_text(path))
        settings = Settings(**content)
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise cannot_read(path, error) from None
    except ValidationError as error:
        accepted = ", ".join(Settings.model_fields)
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}; accepted: {accepted}" for e in error.errors()]
        raise UserErrors(lines, str(path)) from None
    except ValueError as error:
        raise UserError(Message("{where}: not valid TOML: {why}", where=path, why=error)) from None
    parse_groups(settings.gpus)
    return settings.model_copy(update={"webhook": webhook.check_address(settings.webhook)})


def parse_groups(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the normalized names of GPU groups; if none are given, each GPU of this machine is a group.

    Raises:
        UserError: a group is malformed, or a GPU is in two groups.
    """
    if not texts:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible is not None else [str(i) for i in range(_count_gpus())]
        return tuple(gpu.strip() for gpu in gpus if gpu.strip()) or ("cpu",)
    names = [normalize_group(text) for text in texts]
    gpus_in_names = [gpu for name in names for gpu in name.split(",")]
    if twice := sorted({gpu for gpu in gpus_in_names if gpus_in_names.count(gpu) > 1}):
        raise UserError(
            Message(
                "GPU {names} is in two groups, but a GPU runs one job at a time; list it once", names=", ".join(twice)
            )
        )
    return tuple(names)


def normalize_group(text: str) -> str:
    """Normalize the name of a GPU group: "0, 1" becomes "0,1".

    Raises:
        UserError: it is not a list of GPUs.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() or part.startswith(("GPU-", "MIG-")) for part in parts) and parts != ["cpu"]:
        raise UserError(
            Message("{text} is not a group of GPUs; give numbers, such as 0 or 0,1, or cpu", text=repr(text))
        )
    if len(set(parts)) < len(parts):
        raise UserError(Message("{text} lists a GPU twice", text=repr(text)))
    return ",".join(parts)


def _count_gpus() -> int:
    """Count NVIDIA GPUs by their device files, or by nvidia-smi where there are none (Windows, and Linux in WSL2)."""
    if number := len(glob.glob("/dev/nvidia[0-9]*")):
        return number
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run([program, "-L"], capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith(b"GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def find_worker(home: Path) -> Info | None:
    """Return the worker of this home, if one is alive. The lock decides, not the file."""
    try:
        with open(home / "worker.lock", "rb") as file:
            if try_lock(file, shared=True):
                return None
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):  # the worker is just starting, or its disk is full
        content = json.loads((home / "worker.json").read_bytes())
        process = procs.identify(content["pid"]) if content["pid"] else None
        # Otherwise the file is an earlier worker's, whose id another process may have by now.
        if process and process.start == content["start"]:
            return Info(content["pid"], tuple(content["groups"]), content["since"], content["heartbeat"])
    return Info(0, (), 0, 0)


def was_worker_killed(home: Path) -> bool:
    """Return True if the last worker was killed: the lock is free, but worker.json, deleted on leaving, exists."""
    return (home / "worker.json").exists() and find_worker(home) is None


def ensure_worker(home: Path, idle_s: float = 600) -> Info:
    """Start a worker in the background if none is alive; it exits after `idle_s` seconds without jobs.

    Several processes may call this at once: one worker is started.

    Raises:
        UserError: it did not start; the message has its last output.
    """
    if (worker := find_worker(home)) and worker.pid:
        return worker
    Store(home)  # report an unusable home here
    read_settings(home)
    log = home / "worker.log"
    environment = {name: value for name, value in os.environ.items() if name != procs.TOKEN}
    environment |= {"LORA_FP8_HOME": str(home), "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    for _ in range(3):  # a worker that another process started may have exited again
        with _open_rotated(log) as file:
            # This process starts the worker and exits, so that the worker is not our child and leaves no zombie when it
            # exits.
            subprocess.run(
                [sys.executable, *PROGRAM, "worker", "--idle", str(idle_s), "--background"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                **system.make_detach_options(),
            )
        deadline = time.monotonic() + 5
        while worker := find_worker(home):  # ours, or one that another process started first
            if worker.pid or time.monotonic() > deadline:
                return worker
            time.sleep(0.02)
    lines = run_events.read_tail(log, 3)
    raise UserError(
        Message(
            "the worker did not start; the last lines of {log}: {tail}",
            log=log,
            tail=" / ".join(lines) or Message("nothing"),
        )
    )


def start_worker(home: Path, gpus: Sequence[str] = (), idle_s: float | None = None) -> int:
    """Start a worker in a process of its own where a process cannot fork, and wait until it holds the lock.

    Returns:
        The exit code: 0, or that of a worker that ended with an error, which it has printed.
    """
    command = [sys.executable, *PROGRAM, "worker", *(part for gpu in gpus for part in ("--gpus", gpu))]
    command += [] if idle_s is None else ["--idle", str(idle_s)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **system.make_detach_options())
    while process.poll() is None:
        worker = find_worker(home)
        if worker is not None and worker.pid:
            return 0
        time.sleep(0.05)
    return process.returncode


@contextlib.contextmanager
def _open_rotated(path: Path) -> Iterator[Any]:
    try:
        if path.exists() and path.stat().st_size > 1_000_000:
            system.replace(path, path.with_suffix(".1.log"))
        file = open(path, "ab")  # closed below
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        yield file


def _hide_home(log: Path) -> None:
    """Replace the home folder by `~` in an ended job's log: tracebacks contain it, and logs are shown to others."""
    text = log.read_bytes().decode(errors="surrogateescape")
    if (hidden := without_home(text)) != text:
        atomic_write(log, hidden.encode(errors="surrogateescape"))


class HomeGone(Exception):
    """The home folder of a worker does not exist any more, or was replaced."""


class Worker:
    """Runs the queue of one home. `run` is the main loop; `tick` checks all jobs once.

    Args:
        home: the home folder.
        gpus: GPU groups that get one job at a time; () takes those of the settings, or each GPU as a group.
        report: called with each line about what it does.
    """

    def __init__(self, home: Path, gpus: Sequence[str] = (), report: Callable[[str], None] = print):
        self.store, self.home, self.report = Store(home), home, report
        self.settings = read_settings(home)
        self.groups = parse_groups(gpus or self.settings.gpus)
        self.follower = run_events.Follower()
        self.sender = webhook.Sender(home, report)
        self.since = now()
        self._lock: Any = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._last_beat = -1.0
        self._reported: set[str] = set()
        self._is_leaving = False

    def run(self, idle_s: float | None = None) -> None:
        """Work until SIGTERM or Ctrl-C, or until there was nothing to do for `idle_s`. Running jobs continue.

        Raises:
            UserError: another worker has this home.
        """
        if self._lock is None:
            self.take_lock()
        self._last_beat = -1.0  # write it at once: the lock may have been taken by the process before a fork
        for number in system.STOP_SIGNALS:
            signal.signal(number, lambda *_: setattr(self, "_is_leaving", True))
        self.report(
            Message(
                "worker {pid}: {path}, one job at a time on each of: {names}",
                pid=os.getpid(),
                path=self.home,
                names="; ".join(self.groups),
            )
        )
        busy_at = time.monotonic()
        while not self._is_leaving:
            try:
                busy = self.tick()
            except HomeGone as error:
                self.report(Message("worker: exiting; {line}", line=error))
                self._lock.close()
                return
            except (StoreError, OSError) as error:
                # A full disk must not end the worker: running jobs still need it when there is space again.
                self._report_once(Message("{line}; trying again", line=str(error)))
                busy = True
            if busy:
                busy_at = time.monotonic()
            if idle_s is not None and time.monotonic() - busy_at > idle_s:
                self._release_lock()
                # Checked after the lock is released: a process that submits now finds no worker and starts one.
                if not self.store.read_rows("phase <> 'ended'"):
                    break
                self.take_lock()
            time.sleep(TICK_SECONDS)
        self.report(Message("worker: exiting; running jobs continue, and the next worker takes them over"))
        self._release_lock()
        self.sender.finish()

    def tick(self) -> bool:
        """Check each job once and act. Return True if any is queued or running."""
        self._write_heartbeat(os.getpid())
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]
        rows = self.store.read_rows("phase <> 'ended'")
        taken = set()
        for row in rows:
            if row.phase == "launched" and not self._try(row, partial(self._check_ended, row), if_damaged=True):
                taken.add(row.assigned)
        # Jobs that ended just now may be in the queue again.
        for row in self.store.read_rows("phase = 'queued'"):
            wanted = (BESIDE,) if row.gpus == BESIDE else self.groups
            free = [group for group in wanted if group not in taken and row.gpus in ("", group)]
            if free and self._try(row, partial(self._launch, row, free[0]), if_damaged=False):
                taken.add(free[0])
        return bool(rows)

    def _try(self, row: Row, action: Callable[[], bool], if_damaged: bool) -> bool:
        """Act on a job. If its row has values that this program did not write, it fails and the others continue."""
        try:
            return action()
        except (ValueError, TypeError, OverflowError) as error:
            self._end(row, job_view.Ending("failed", job_view.describe_damage(error)))
            return if_damaged

    # -- starting

    def _launch(self, row: Row, group: str) -> bool:
        """Start an attempt. Return True if the group is now busy."""
        attempt = self.store.get_folder(row.id) / f"attempt-{row.attempts + 1}"
        attempt.mkdir(parents=True, exist_ok=True)
        folder = Path(row.folder) if row.folder else None
        try:
            if folder:
                ownership.claim(folder, resume=bool(row.again or row.attempts))
            log = self._open_log(folder / "log.txt" if folder else self.store.get_folder(row.id) / "log.txt")
            mark = (folder / "events.jsonl").stat().st_size if folder and (folder / "events.jsonl").exists() else 0
        except OSError as error:
            line = Message("{path}: {why}", path=error.filename or folder, why=reason(error))
            self._end(row, job_view.Ending("failed", job_view.Sentence("folder", {"message": line}), 3))
            return False
        except UserError as error:  # the folder came to belong to another run after the job was queued
            self._end(row, job_view.Ending("failed", job_view.Sentence("input", {"message": str(error)}), 2))
            return False
        with log:
            token = uuid.uuid4().hex
            keeper = [sys.executable, "-m", "lora_fp8.jobs.keeper", "--sweep", str(self.settings.kill_after_s)]
            command = [*keeper, str(attempt / "launch.json"), *self.make_command(row, group, attempt)]
            # Recorded before anything is started: if the worker is killed in between, the next one finds the job by its
            # token.
            if not self.store.update(
                row.id,
                "phase = 'queued' AND wanted = 'run'",
                phase="launched",
                attempts=row.attempts + 1,
                assigned=group,
                token=token,
                launched=now(),
                mark=mark,
                boot=procs.read_boot_id(),
                **{"pid": 0, "start": 0, "asked": 0, "termed": 0, "killed": 0, "ended": 0, "exit_code": None},
            ):
                return False  # cancelled or deleted at this moment
            child = subprocess.Popen(
                command,
                cwd=row.cwd if row.kind == "command" and os.path.isdir(row.cwd) else attempt,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.make_environment(token, group, attempt),
                **system.make_detach_options(),
            )
        self._children[child.pid] = child
        if process := procs.identify(child.pid):  # else it has exited already
            self.store.update(row.id, pid=process.pid, start=process.start)
        self.report(
            Message(
                "job {id} ({name}): attempt {attempt} started on {group}, process {pid}",
                id=row.id,
                name=row.name,
                attempt=row.attempts + 1,
                group=group,
                pid=child.pid,
            )
        )
        return True

    def make_command(self, row: Row, group: str, attempt: Path) -> list[str]:
        """Return the outer keeper's command as a list of arguments; no shell is involved."""
        inner = [str(attempt / "trainer.json"), sys.executable, "-m", "lora_fp8"]
        if row.kind == "command":
            return [sys.executable, "-m", "lora_fp8.jobs.keeper", *inner, *parse_command(row)]
        number = len(group.split(","))
        run = Run(Path(row.folder))
        resumes = ownership.has_results(run.path) and (row.again or row.attempts)
        arguments = ["resume", row.folder, *parse_command(row)] if resumes else ["train", self.write_config(row)]
        multi_gpu = ["--multi_gpu", "--main_process_port", "0"] if number > 1 else []
        # Use our own config file: the user may have set up `accelerate config` for another program.
        settings_file = attempt / "accelerate.yaml"
        settings_file.write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: false\n", encoding="utf-8"
        )
        # OpenMP accepts a number for each nesting level, separated by commas; the first is that of the outermost.
        omp_threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        threads = omp_threads if omp_threads.isdecimal() else system.count_cpus() // len(self.groups) // number
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(settings_file), "--quiet"]
        launch += multi_gpu
        launch += ["--num_processes", str(number), "--num_machines", "1", "--mixed_precision", "no"]
        launch += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", str(max(1, int(threads)))]
        return [*launch, "-m", "lora_fp8.jobs.keeper", *inner, *arguments]

    def write_config(self, row: Row) -> str:
        """Write the job's config as submitted, and return the path of the file."""
        path = self.store.get_folder(row.id) / CONFIG
        atomic_write(path, row.text.encode())
        return str(path)

    def make_environment(self, token: str, group: str, attempt: Path) -> dict[str, str]:
        """Return the worker's environment without variables that change how files are read or how processes connect."""
        prefixes = ("ACCELERATE_", "TORCHELASTIC_", "LORA_FP8_JOB")
        of_a_launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        unsafe = ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        environment = {name: value for name, value in environment.items() if name not in (*of_a_launcher, *unsafe)}
        return environment | {
            procs.TOKEN: token,
            MESSAGE: str(attempt / "message.json"),
            COUNT: str(attempt / run_events.COUNT_FILE),
            "PYTHONUTF8": "1",
            LANGUAGE: "en",  # logs are read by people of any language, and by this program
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",  # a torch.py in the working folder is not imported
            "TQDM_MININTERVAL": "2",  # seconds between updates of progress bars in the log
            "CUDA_DEVICE_ORDER": environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),  # the order that nvidia-smi uses
            "CUDA_VISIBLE_DEVICES": system.NO_GPUS if group in ("cpu", BESIDE) else group,
            # What runs beside trainings leaves them half of the cores.
            **({"OMP_NUM_THREADS": str(max(1, system.count_cpus() // 2))} if group == BESIDE else {}),
        }

    def _open_log(self, path: Path) -> Any:
        """Open a new log for this attempt; earlier ones become log.1.txt (the newest), log.2.txt, ..."""
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [path, *(path.with_name(f"log.{i}.txt") for i in range(1, self.settings.logs + 1))]
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                system.replace(newer, older)
        return open(path, "wb")

    # -- started jobs

    def _check_ended(self, row: Row) -> bool:
        """Check a started job, which may have ended or may have to be stopped. Return True if its GPUs are free."""
        if not job_endings.is_alive(row):
            if not row.pid and time.time() - row.launched < 2 and row.boot == procs.read_boot_id():
                return False  # the worker was killed around the start, and the processes may only just be appearing
            end = job_endings.find_ending(row, self.store.get_folder(row.id) / f"attempt-{row.attempts}", self.follower)
            self._end(row, end)
            return True
        if not row.pid:
            self._adopt(row)
        if row.wanted != "run":
            self._stop(row)
        return False

    def _adopt(self, row: Row) -> None:
        """Record the keeper of an attempt whose start was not recorded: the process whose parent lacks the token."""
        pids = procs.find_members(row.token)
        for pid in pids:
            if procs.find_parent(pid) not in pids and (process := procs.identify(pid)):
                self.store.update(row.id, pid=process.pid, start=process.start)

    def _stop(self, row: Row) -> None:
        """Take the next step to stop a job if it is due: ask, then SIGTERM, then SIGKILL."""
        progress = self._ask_to_stop(row) if row.folder else run_events.Progress(0)
        stage = progress.stage
        if not row.asked:
            self.store.update(row.id, asked=now())
            return
        at_once = (
            row.kind == "command" or stage in NOTHING_TO_SAVE or (row.wanted == "cancel" and system.CAN_ASK_TO_STOP)
        )
        pids = procs.find_members(row.token)
        keeper = row.pid if row.pid in pids else 0
        if not row.termed:
            may_kill = not system.CAN_ASK_TO_STOP and not at_once
            if at_once or self._has_waited(row, row.asked, self.settings.patience_s, progress if may_kill else None):
                self._terminate(row, pids, keeper)
        elif self._has_waited(row, row.termed, self.settings.kill_after_s, None if at_once else progress):
            if not row.killed:
                self.store.update(row.id, killed=now())
                self.report(Message("job {id} ({name}): did not end and was killed", id=row.id, name=row.name))
            # The keeper is killed last: it writes the record.
            procs.kill([pid for pid in pids if pid != keeper] or pids)

    def _has_waited(self, row: Row, since: float, seconds: float, progress: run_events.Progress | None) -> bool:
        """Return True if the next step to stop a job is due.

        Args:
            row: the job.
            since: time of the step before.
            seconds: to wait after it.
            progress: what the training has logged, if the next step may kill it. It saves at the end of its step, and
                there may be many previews before that. So one that is to save is not killed while it logs something.
        """
        if progress is not None and row.wanted == "stop":
            since = max(since, progress.heard)
            seconds = max(seconds, self.settings.silence_s, 2 * min(progress.longest_silence, MOST_SILENCE_S))
        return time.time() - since > seconds

    def _ask_to_stop(self, row: Row) -> run_events.Progress:
        """Request a stop in the job's run folder. Return how far the run is."""
        run = Run(Path(row.folder))
        progress = self.follower.read_progress(run.path, row.mark)
        # A starting trainer deletes requests to earlier ones, so the request is repeated until it stays.
        with contextlib.suppress(UserError):  # if the folder cannot be read or written, the signal follows
            if run.is_locked() and not (run.control / "stop").exists():
                run.request("stop")
        return progress

    def _terminate(self, row: Row, pids: Sequence[int], keeper: int) -> None:
        """Send SIGTERM to the trainers of a job, or to their launcher if there is no trainer."""
        launcher = {pid for pid in pids if keeper and procs.find_parent(pid) == keeper}
        # Not the launcher: it would end its processes in the middle of their save.
        trainers = [pid for pid in pids if pid != keeper and pid not in launcher]
        self.store.update(row.id, termed=now())
        procs.send(trainers or launcher, signal.SIGTERM)
        sent = Plural(
            "job {id} ({name}): SIGTERM was sent to {count} process",
            "job {id} ({name}): SIGTERM was sent to {count} processes",
        )
        self.report(sent(id=row.id, name=row.name, count=len(trainers or launcher)))

    def _end(self, row: Row, end: job_view.Ending) -> None:
        """Record how an attempt ended; after a crash, queue the job again."""
        folder = Path(row.folder) if row.folder else self.store.get_folder(row.id)
        with contextlib.suppress(OSError):  # there is no log, or no space for another
            _hide_home(folder / "log.txt")
        values: dict[str, Any] = {"exit_code": end.exit_code, "crashes": row.crashes + end.crash}
        if job_endings.will_retry(row, end):
            sentence = job_endings.describe_retry(row, end)
            values |= {"phase": "queued"}
        else:
            sentence = end.sentence
            values |= {"phase": "ended", "state": end.state, "ended": now()}
        values |= {"sentence": json.dumps(sentence.to_json())}
        # Only if the row has not changed: a stop requested just now counts, and a cancelled job does not come back.
        unchanged = "phase = ? AND attempts = ? AND wanted = ?", row.phase, row.attempts, row.wanted
        if self.store.update(row.id, *unchanged, **values):
            self.report(
                Message(
                    "job {id} ({name}): {state}: {line}", id=row.id, name=row.name, state=end.state, line=sentence.text
                )
            )
            if values["phase"] == "ended":
                self._tell_webhook(row, end)

    def _tell_webhook(self, row: Row, end: job_view.Ending) -> None:
        """Send how a job ended to the address in worker.toml, which may have changed since the worker started."""
        kind = row.kind
        with contextlib.suppress(ValueError, IndexError):  # its row is damaged, and says so in its end
            kind = parse_command(row)[0] if kind == "command" else kind
        if kind in webhook.QUIET:
            return
        try:
            address = read_settings(self.home).webhook
        except UserError as error:
            self.report(webhook.describe_failure(row.id, row.name, str(error)))
            return
        if address:
            about = {"job": row.id, "name": row.name, "kind": kind, "state": end.state}
            times = {"launched": row.launched, "ended": now()}
            line = _add_verdict(end.sentence.text, Path(row.folder)) if row.folder else end.sentence.text
            self.sender.send(address, webhook.make_body(about, line, **times))

    # -- the worker itself

    def take_lock(self) -> None:
        """Become the worker of this home; the lock survives a fork.

        Raises:
            UserError: there is a worker already.
        """
        self._lock = open(self.home / "worker.lock", "a+", encoding="utf-8")  # held for life
        for _ in range(20):  # a call to `find_worker` holds a shared lock for an instant
            if try_lock(self._lock):
                self._last_beat = -1.0
                self._write_heartbeat(0)  # its id follows when it hears signals, and may be another after a fork
                self._last_beat = -1.0
                return
            time.sleep(0.02)
        self._lock.close()
        other = find_worker(self.home)
        raise UserError(
            Message(
                "{path}: a worker is already running (process {pid}); one is enough",
                path=self.home,
                pid=other.pid if other else "unknown",
            )
        )

    def _release_lock(self) -> None:
        """Release the lock, and delete worker.json to show that leaving was intended (see `was_worker_killed`)."""
        if not self._lock.closed:  # else the file may be another worker's by now
            with contextlib.suppress(OSError):  # if the file stays, the worker counts as killed
                (self.home / "worker.json").unlink()
            self._lock.close()

    def _write_heartbeat(self, pid: int) -> None:
        if time.monotonic() - self._last_beat < 1:
            return
        self._last_beat = time.monotonic()
        self._check_home()
        own = procs.identify(pid) if pid else None
        content = {"pid": pid, "start": own.start if own else 0, "groups": self.groups}
        content |= {"since": self.since, "heartbeat": now()}
        temporary = self.home / f".worker.{os.getpid()}.tmp"
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            system.replace(temporary, self.home / "worker.json")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._report_once(Message("{path}: there is no space left for the heartbeat file", path=self.home))

    def _check_home(self) -> None:
        """Check that the folder is still the one whose lock this process holds.

        Raises:
            HomeGone: it is not, so nobody would read what is written from now on.
        """
        if self._lock is None or self._lock.closed:  # a worker that only ticks once has no lock
            return
        try:
            here = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.home / "worker.lock"))
        except OSError:
            here = False
        if not here:
            raise HomeGone(Message("its folder {path} was moved or deleted", path=self.home))

    def _report_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self.report(line)


def _add_verdict(line: str, folder: Path) -> str:
    """Return a sentence with what the run's held-out losses say after it, if they say anything."""
    with contextlib.suppress(OSError):  # the message is sent without it; the run's page says what is wrong with its log
        if verdict := run_log.read_verdict(folder):
            return Joined(". ", (line, verdict))
    return line
