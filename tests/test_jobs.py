"""The queue: what is stored, in which order, what is said of a job, and by whom it is run.

Whole lives of jobs, with kills, are in test_jobs_soak.py. Here processes are real where a process is judged (exit
statuses, locks, /proc), and short.
"""

import contextlib
import cProfile
import fcntl
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG_SECONDS, end_worker, wait_until

from lora_fp8 import cli, config, jobs, settings
from lora_fp8.common import progress
from lora_fp8.common.messages import translate
from lora_fp8.errors import Message, UserError, UserErrors
from lora_fp8.jobs import Queue, Sentence, job_endings, job_view, procs, run_events, store, worker
from lora_fp8.run import Run

ROOT = Path(__file__).resolve().parent.parent
TEXT = """
name = "{name}"
output_dir = "runs"
[model]
family = "sd15"
path = "demo"
[dataset]
folders = [{{path = "pictures"}}, {{path = "~/more"}}]
[train]
steps = 4
"""


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path / "home")


@pytest.fixture
def add(queue: Queue, tmp_path: Path) -> Callable[..., int]:
    """add("name", priority=1): a queued job."""

    def submit(name: str, overrides: Sequence[str] = (), **scheduling: Any) -> int:
        source = jobs.Source(folder=tmp_path)
        text = TEXT.format(name=name)
        return queue.submit(text, overrides=overrides, source=source, scheduling=jobs.Scheduling(**scheduling))

    return submit


def fresh(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=LONG_SECONDS,
    )


def over(queue: Queue, id: int, state: str = "failed", **values: object) -> None:
    """Note that a job has ended."""
    said = json.dumps(Sentence("vanished").to_json())
    queue.store.update(id, phase="ended", state=state, sentence=said, ended=time.time(), **values)


# ----------------------------------------------------------------------------------------------------------- submitting


def test_a_job_is_what_the_file_said_when_it_was_submitted(queue: Queue, tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("[adapter]\nrank = 7\n", encoding="utf-8")
    (tmp_path / "base").mkdir()
    text = TEXT.format(name="zibo").replace('"demo"', '"base"').replace("name =", 'preset = ["./mine.toml"]\nname =', 1)
    id = queue.submit(text, overrides=["train.steps=9"], source=jobs.Source(folder=tmp_path))
    preset.write_text("[adapter]\nrank = 8\n", encoding="utf-8")
    stored = config.loads(queue.read_config(id), folder=Path("/nowhere"))
    assert (stored.adapter.rank, stored.train.steps, stored.preset) == (7, 9, [])
    assert stored.output_dir == str(tmp_path / "runs") and stored.dataset.cache_dir == str(tmp_path / "cache")
    assert stored.model.path == str(tmp_path / "base")
    assert [f.path for f in stored.dataset.folders] == [str(tmp_path / "pictures"), os.path.expanduser("~/more")]
    assert queue.get_job(id).folder == tmp_path / "runs" / "zibo"
    # Ids on the hub and the bundled base are no paths.
    for name in ("demo", "owner/model"):
        job = config.loads(TEXT.format(name="x"), [f"model.path='{name}'"])
        assert jobs.make_paths_absolute(job, tmp_path).model.path == name


def test_every_setting_that_names_a_place_is_made_absolute(tmp_path: Path) -> None:
    """Found by what the settings say of themselves, so that a new one cannot be forgotten."""
    no_places = {"name", "preset", "model.path"}  # a folder's name; merged already; a place only where it is one

    def places(model: type[settings.Section], prefix: str = "") -> dict[str, object]:
        found = {}
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, settings.Section):
                found |= places(inner, f"{prefix}{name}.")
            elif re.search(r"\b([Ff]olders?|[Pp]aths?)\b", field.description or "") and "str" in str(inner):
                found[prefix + name] = inner
        return found

    listed = [key for key in places(settings.Job) if key not in no_places]
    assert {"output_dir", "dataset.cache_dir", "model.components"} <= set(listed)
    data = config.loads(TEXT.format(name="x")).model_dump()
    many = places(settings.Job)

    def put(data: dict, key: str, value: object = None) -> object:
        *tables, last = key.split(".")
        for part in tables:
            data = data[part]
        data[last] = data[last] if value is None else value
        return data[last]

    (tmp_path / "here").mkdir()  # model.components is a place only where there is one
    for key in listed:
        put(data, key, ["here"] if "list" in str(many[key]) else "here")
    absolute = jobs.make_paths_absolute(settings.Job(**data), tmp_path).model_dump()
    for key in listed:
        here = str(tmp_path / "here")
        assert put(absolute, key) in (here, [here]), f"{key}: declare what it names"
    folder = config.loads(TEXT.format(name="x")).dataset.folders[0]
    inside = [key for key in places(type(folder)) if key not in ("trigger", "prefix", "suffix", "repeats")]
    given = config.loads(TEXT.format(name="x")).model_dump()
    given["dataset"]["folders"] = [{**folder.model_dump(), **dict.fromkeys(inside, "here")}]
    made = jobs.make_paths_absolute(settings.Job(**given), tmp_path).dataset.folders[0].model_dump()
    assert [made[key] for key in inside] == [str(tmp_path / "here")] * len(inside), inside


def test_what_is_wrong_is_told_before_anything_is_queued(queue: Queue, add: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(UserErrors) as found:
        queue.submit(
            TEXT.format(name="x"), overrides=["train.stepz=1", "train.batch_size=0"], source=jobs.Source("x.toml")
        )
    assert len(found.value.problems) == 2
    first = add("zibo")
    with pytest.raises(UserError, match=f"job {first} already uses this folder"):
        add("zibo")
    with pytest.raises(UserError, match="not a group of GPUs"):
        add("other", gpus="all")
    with pytest.raises(UserError, match="max_attempts"):
        add("other", max_attempts=0)
    Run.create(tmp_path / "runs/there", "x = 1").close()
    (tmp_path / "runs/there/checkpoints/step-000004").mkdir()
    with pytest.raises(UserError, match="this folder already contains a run"):
        add("there")
    assert len(queue.list_jobs(shell=False)) == 1
    # The index holds where two who asked at the same time have both seen nothing.
    row = queue.store.read_row(first)
    with pytest.raises(UserError, match="another job already uses this folder"):
        values = {"text": "", "command": "[]", "cwd": "", "priority": 0, "gpus": "", "created": 0.0, "max_attempts": 1}
        queue.store.insert(name="y", kind="train", folder=row.folder, **values)
    over(queue, first)
    assert add("zibo") > first


def test_only_listed_commands_can_be_queued(queue: Queue) -> None:
    names = {command.name or command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands}
    names |= {str(group.name) for group in cli.app.registered_groups}
    assert set(jobs.COMMANDS) <= names and not set(jobs.COMMANDS) & {"submit", "worker", "train", "ui"}
    assert len(set(jobs.COMMANDS)) == len(jobs.COMMANDS)
    for name in ("rm", "submit", "worker", "--help", "verify; rm"):
        with pytest.raises(UserError, match="cannot be queued"):
            queue.submit_command(name, [])
    id = queue.submit_command("verify", ["$(touch x); a b.safetensors", "--json"])
    assert queue.get_job(id).command == ("verify", "$(touch x); a b.safetensors", "--json")


def test_fifty_submit_at_once(tmp_path: Path) -> None:
    """Each with a connection of its own, as fifty processes would."""
    ids: list[int] = []
    errors: list[Exception] = []
    together = threading.Barrier(50)

    def one(number: int) -> None:
        try:
            together.wait()
            found = Queue(tmp_path / "home").submit(TEXT.format(name=f"n{number}"), source=jobs.Source(folder=tmp_path))
            ids.append(found)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and sorted(ids) == list(range(1, 51))
    rows = Queue(tmp_path / "home").store.read_rows()
    assert [row.place for row in rows] == list(range(1, 51))
    with sqlite3.connect(tmp_path / "home/queue.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# ------------------------------------------------------------------------------------------------------- order, changes


def waiting(queue: Queue) -> list[str]:
    return [job.name for job in queue.list_jobs() if job.state == "queued"]


def test_the_order_of_the_queue(queue: Queue, add: Callable[..., int]) -> None:
    ids = {name: add(name, priority=priority) for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 0))}
    assert waiting(queue) == ["c", "a", "b", "d"]
    queue.move(ids["d"], 2)
    assert waiting(queue) == ["c", "d", "a", "b"] and queue.get_job(ids["d"]).place == 2
    queue.move(ids["b"], 1)  # before one of a higher priority
    assert waiting(queue) == ["b", "c", "d", "a"] and queue.get_job(ids["b"]).priority == 5
    queue.move(ids["c"], 99)
    assert waiting(queue) == ["b", "d", "a", "c"] and queue.get_job(ids["c"]).priority == 0
    queue.set_priority(ids["a"], 9)
    add("e")
    assert waiting(queue) == ["a", "b", "d", "c", "e"]
    queue.cancel(ids["d"])
    with pytest.raises(UserError, match="not waiting"):
        queue.move(ids["d"], 1)
    assert queue.get_job(ids["d"]).state == "cancelled" and waiting(queue) == ["a", "b", "c", "e"]


def test_again_and_copies(queue: Queue, add: Callable[..., int], tmp_path: Path) -> None:
    id = add("zibo", priority=3)
    with pytest.raises(UserError, match="is waiting in the queue"):
        queue.requeue(id)
    over(queue, id, "stopped", wanted="stop", crashes=2, asked=1.0, killed=1.0)
    queue.requeue(id)
    row = queue.store.read_row(id)
    assert (row.phase, row.wanted, row.crashes, row.killed) == ("queued", "run", 0, 0)
    copy = queue.clone(id, ["train.steps=77"])
    assert queue.get_job(copy).name == "zibo-2" and queue.get_job(copy).priority == 3
    assert config.loads(queue.read_config(copy)).train.steps == 77
    assert queue.get_job(queue.rerun(copy)).name == "zibo-3"
    over(queue, id, "done")
    with pytest.raises(UserError, match="is done"):
        queue.requeue(id)
    with pytest.raises(UserError, match="no such job"):
        queue.requeue(999)


def test_deleting_takes_the_run_only_when_asked_and_only_a_run(
    queue: Queue, add: Callable[..., int], tmp_path: Path
) -> None:
    ids = [add(name) for name in ("kept", "gone", "alien", "linked", "alive")]
    folders = [queue.get_job(id).folder for id in ids]
    for folder in folders[:3]:
        Run.create(folder, "x = 1").close()
    folders[2].joinpath(".lora-fp8-run").unlink()
    folders[1].joinpath("notes.txt").write_text("mine", encoding="utf-8")
    folders[3].symlink_to(folders[0])
    held = Run.create(folders[4], "x = 1")
    for id in ids:
        over(queue, id)
    queue.delete(ids[0])
    assert queue.delete(ids[1], with_run=True) == ["notes.txt"]
    assert folders[0].exists() and os.listdir(folders[1]) == ["notes.txt"]
    for id in ids[2:4]:
        with pytest.raises(UserError, match="does not look like a run"):
            queue.delete(id, with_run=True)
    with pytest.raises(UserError, match="a training is running in this folder"):
        queue.delete(ids[4], with_run=True)
    held.close()
    assert folders[0].joinpath("config.toml").exists() and folders[2].exists()
    assert {job.id for job in queue.list_jobs(shell=False)} == set(ids[2:])


# ------------------------------------------------------------------------------------------------------------- the home


def test_the_home_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORA_FP8_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert store.find_home() == tmp_path / "data/lora_fp8"
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "own"))
    assert Queue().home == tmp_path / "own"
    monkeypatch.setenv("LORA_FP8_HOME", "~no-such-user/x")
    assert store.find_home() == Path("~no-such-user/x").absolute()
    before = os.umask(0)
    try:
        home = Queue(tmp_path / "new").home
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "queue.db", home / "jobs")]
    assert modes == [0o700, 0o600, 0o700]


def test_a_newer_schema_is_reached_and_an_older_program_refuses_it(
    queue: Queue, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    add("before")
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, "ALTER TABLE jobs ADD COLUMN note TEXT DEFAULT 'x';"))
    assert [row.name for row in Queue(queue.home).store.read_rows()] == ["before"]
    with sqlite3.connect(queue.store.file) as database:
        assert database.execute("SELECT name, note FROM jobs").fetchall() == [("before", "x")]
        assert database.execute("PRAGMA user_version").fetchone() == (len(store.MIGRATIONS),)
    monkeypatch.undo()
    with pytest.raises(UserError, match="newer version"):
        Queue(queue.home)
    # One that breaks off leaves what was.
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, "", "DROP TABLE jobs; nonsense"))
    with pytest.raises(UserError, match="nonsense"):
        Queue(queue.home)
    with sqlite3.connect(queue.store.file) as database:
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (1,)


def test_a_full_disk_is_told_in_one_line_and_loses_nothing(queue: Queue, add: Callable[..., int]) -> None:
    add("before")
    code = """
import resource, sys
from pathlib import Path
from lora_fp8.errors import UserError
from lora_fp8.jobs import Queue
queue = Queue(Path(sys.argv[1]))
sys.dont_write_bytecode = True  # or Python would leave cut .pyc files in the checkout
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    queue.submit(sys.argv[2])
except UserError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(queue.submit(sys.argv[2]))
"""
    done = fresh(code, queue.home, TEXT.format(name="full"))
    assert done.returncode == 0 and not done.stderr, done
    message, id = done.stdout.splitlines()
    assert message.startswith(str(queue.home)) and "the queue cannot be used" in message
    assert [row.name for row in queue.store.read_rows()] == ["before", "full"] and id == "2"


def test_a_home_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="the queue cannot be used"):
        Queue(tmp_path / "file" / "home")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/queue.db").write_bytes(b"not a database" * 100)
    with pytest.raises(UserError, match="not a database"):
        Queue(tmp_path / "broken")


# ------------------------------------------------------------------------------------------------------------ processes


def test_a_process_is_known_by_more_than_its_number() -> None:
    me = procs.identify(os.getpid())
    assert me is not None and procs.is_alive(me)
    assert not procs.is_alive(me._replace(start=me.start + 1)) and not procs.is_alive(me._replace(boot="another"))
    with subprocess.Popen(["sleep", "60"], env={**os.environ, procs.TOKEN: "abc"}, start_new_session=True) as child:
        other = procs.identify(child.pid)
        assert other is not None and procs.find_parent(child.pid) == os.getpid()
        wait_until(lambda: procs.find_members("abc"))  # between fork and exec
        assert procs.find_members("abc") == [child.pid] and procs.find_members("ab") == []
        child.kill()
        wait_until(lambda: not procs.identify(child.pid))
        assert not procs.is_alive(other) and procs.find_members("abc") == []  # dead, though nobody has waited for it


def test_a_process_that_is_ending_is_still_there() -> None:
    """A large one that was killed gives its memory back for a while; its lock and its GPU come after that."""
    code = "x = bytearray(b'1') * 2_000_000_000; print(flush=True); import time; time.sleep(3600)"
    environment = {**os.environ, procs.TOKEN: "large"}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=-1, env=environment, start_new_session=True)
    child.stdout.readline()
    child.kill()
    while procs.identify(child.pid):
        known = procs.find_members("large", child.pid)
        assert known == [child.pid] or not procs.identify(child.pid)
    assert procs.find_members("large", child.pid) == [] and child.wait() == -9
    child.stdout.close()


@pytest.mark.parametrize("status", [0, 2, 75, -9, -15, -7, -11])
def test_a_keeper_learns_how_a_process_ended(status: int, tmp_path: Path) -> None:
    code = f"import os, sys; os.kill(os.getpid(), {-status}) if {status} < 0 else sys.exit({status})"
    keeper = [sys.executable, "-m", "lora_fp8.jobs.keeper", str(tmp_path / "trainer.json")]
    done = subprocess.run([*keeper, sys.executable, "-c", code], env={**os.environ, "RANK": "3"})
    told = json.loads((tmp_path / "trainer-3.json").read_bytes())
    assert told["status"] == status and done.returncode == (status if status >= 0 else 128 - status)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_keeper_ends_what_a_killed_launcher_leaves(deaf: bool, tmp_path: Path) -> None:
    """In a session of its own, as torch's launcher starts its workers; one that does not hear is killed."""
    hear = "SIG_IGN" if deaf else "SIG_DFL"
    trainer = f"import signal, time; signal.signal(15, signal.{hear}); print('up', flush=True); time.sleep(3600)"
    launcher = "import os, subprocess, sys; started = [sys.executable, '-c', sys.argv[1]]"
    launcher += "; trainer = subprocess.Popen(started, start_new_session=True, stdout=subprocess.PIPE)"
    launcher += "; os.write(1, trainer.stdout.readline()); os.kill(os.getpid(), 9)"
    keeper = [sys.executable, "-m", "lora_fp8.jobs.keeper", "--sweep", "0.5", str(tmp_path / "launch.json")]
    environment = {**os.environ, procs.TOKEN: f"of-{os.getpid()}-{tmp_path.name}"}
    done = subprocess.run(
        [*keeper, sys.executable, "-c", launcher, trainer], env=environment, capture_output=True, timeout=LONG_SECONDS
    )
    assert done.stdout == b"up\n" and done.returncode == 137
    told = json.loads((tmp_path / "launch.json").read_bytes())
    assert (told["status"], told["swept"]) == (-9, 1) and procs.find_members(environment[procs.TOKEN]) == []


# ------------------------------------------------------------------------------------------------------ state of a job


DONE = {"event": "done", "files": ["export/x.safetensors"]}
ERROR = {"event": "error", "text": "the disk is full", "kind": "OSError"}


@pytest.mark.parametrize(
    ("launch", "trainers", "events", "wanted", "state", "key", "crash"),
    [
        (0, [0], [DONE], "run", "done", "done", False),
        (1, [-9], [DONE], "run", "done", "done", False),  # killed after all was done
        (0, [0], [], "run", "failed", "no_word", True),
        (1, [2], [], "run", "failed", "input", False),
        (1, [3], [ERROR], "run", "failed", "failure", False),
        (1, [75], [{"event": "stopped"}], "run", "stopped", "stopped_early", False),
        (1, [75], [{"event": "stopped"}], "stop", "stopped", "stopped_early", False),
        (1, [1], [ERROR], "run", "failed", "error", True),
        (1, [1], [], "run", "failed", "exit", True),
        (1, [1], [ERROR], "stop", "failed", "error", False),
        (1, [-9], [], "run", "failed", "killed", True),
        (1, [-9], [], "cancel", "stopped", "stopped_early", False),
        (1, [-15, -9, 75], [], "run", "failed", "killed", True),  # one of three: the others followed
        (1, [-15], [], "run", "failed", "terminated", True),
        (1, [-7], [], "run", "failed", "bus_error", True),
        (1, [-11], [], "run", "failed", "crash", True),
        (1, [3221225477], [], "run", "failed", "access_violation", True),
        (-9, [75], [{"event": "stopped"}], "run", "failed", "launcher", True),
        (-9, [], [], "run", "failed", "launcher", True),
        (1, [], [], "run", "failed", "exit", True),
        (None, [], [], "run", "lost", "vanished", True),
        (None, [-9], [], "run", "failed", "killed", True),
        (None, [], [], "stop", "stopped", "stopped_early", False),
    ],
)
def test_how_it_ended(
    launch: int | None,
    trainers: list[int],
    events: list[dict],
    wanted: str,
    state: str,
    key: str,
    crash: bool,
    queue: Queue,
    add: Callable[..., int],
    tmp_path: Path,
) -> None:
    row = queue.store.read_row(add("x"))
    folder, attempt = Path(row.folder), tmp_path / "attempt"
    (folder / "export").mkdir(parents=True)
    attempt.mkdir()
    (folder / "export/x.safetensors").touch()
    (folder / "verify.json").write_text('{"x.safetensors": {"ok": true}}', encoding="utf-8")
    before = '{"event": "done", "files": []}\n'  # of an earlier attempt
    (folder / "events.jsonl").write_text(before + "".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")
    named = {"launch": launch} if launch is not None else {}
    for name, status in {**named, **{f"trainer-{i}": status for i, status in enumerate(trainers)}}.items():
        (attempt / f"{name}.json").write_text(json.dumps({"status": status}), encoding="utf-8")
    queue.store.update(row.id, phase="launched", token="t", boot=procs.read_boot_id(), mark=len(before), wanted=wanted)
    end = job_endings.find_ending(queue.store.read_row(row.id), attempt, run_events.Follower())
    assert (end.state, end.sentence.key, end.crash) == (state, key, crash)
    assert "{" not in end.sentence.text and end.sentence.text


def test_done_needs_files_that_were_verified(queue: Queue, add: Callable[..., int], tmp_path: Path) -> None:
    row = queue.store.read_row(add("x"))
    folder = Path(row.folder)
    (folder / "export").mkdir(parents=True)
    (folder / "events.jsonl").write_text(json.dumps(DONE) + "\n", encoding="utf-8")

    def answer() -> tuple[str, str]:
        end = job_endings.find_ending(row, tmp_path, run_events.Follower())
        return end.state, end.sentence.key

    assert answer() == ("failed", "no_files")
    (folder / "export/x.safetensors").touch()
    assert answer() == ("failed", "no_files")
    for text in ('{"x.safetensors": {"ok": false}}', "[]", '{"x.safetensors": true}', "{", "3"):
        (folder / "verify.json").write_text(text, encoding="utf-8")
        assert answer() == ("failed", "no_files"), text
    (folder / "config.toml").write_text("[export]\nverify = false\n", encoding="utf-8")
    assert answer() == ("done", "done_unverified")


def test_what_was_killed_for_memory_says_so_only_with_evidence(
    queue: Queue, add: Callable[..., int], tmp_path: Path
) -> None:
    row = queue.store.read_row(add("x"))
    for kills, key in ((0, "killed"), (1, "killed_memory")):
        record = json.dumps({"status": -9, "oom_kills": kills})
        (tmp_path / "trainer-0.json").write_text(record, encoding="utf-8")
        assert job_endings.find_ending(row, tmp_path, run_events.Follower()).sentence.key == key


def test_every_sentence_is_said_somewhere() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lora_fp8/jobs").glob("*.py"))
    built = {"stopped_hard", "stopped_hard_early"}  # from parts
    unsaid = [key for key in job_view.SENTENCES if code.count(f'"{key}"') < 2 and key not in built]
    assert not unsaid


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert run_events.read_tail(log) == []
    bar = "\r".join(f"\x1b[31m{i}%\x1b[0m|###" for i in range(101))
    log.write_bytes(f"first\r\n\x1b]0;title\x07second\n{bar}\nwei\xdf\n\n".encode("latin-1"))
    assert run_events.read_tail(log) == ["first", "second", "100%|###", "wei\N{REPLACEMENT CHARACTER}"]
    log.write_text(f'Traceback:\n  File "{Path.home()}/a.py", line 1\n', encoding="utf-8")
    assert run_events.read_tail(log) == ["Traceback:", '  File "~/a.py", line 1'], "also while it is being written"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)), encoding="utf-8")
    assert run_events.read_tail(log, 3) == ["line 99997", "line 99998", "line 99999"]
    log.write_text("x" * 1_000_000, encoding="utf-8")
    assert len(run_events.read_tail(log)) == 1


def test_events_are_followed_by_offset(queue: Queue, add: Callable[..., int]) -> None:
    id = add("x")
    assert queue.read_events(id, 0) == ([], 0)
    log = queue.get_job(id).folder / "events.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"event": "start"}\n{"event": "ste', encoding="utf-8")
    events, offset = queue.read_events(id)
    assert events == [{"event": "start"}] and offset == 19
    with open(log, "a", encoding="utf-8") as file:
        file.write('p"}\nnonsense\n7\n{"event": "\u2028"}\n')
    events, offset = queue.read_events(id, offset)
    assert events == [{"event": "step"}, {"event": "\u2028"}] and offset == log.stat().st_size
    assert queue.read_events(id, offset) == ([], offset)
    log.write_text('{"event": "anew"}\n', encoding="utf-8")
    assert queue.read_events(id, offset) == ([{"event": "anew"}], 18)


def test_the_time_left_is_of_this_process() -> None:
    progress = run_events.Progress(0)
    now = time.time()
    for event in (
        {"event": "step", "step": 500, "t": now - 9000},
        {"event": "start"},
        {"event": "stage", "stage": "train", "step": 100, "steps": 200},
        {"event": "step", "step": 101, "t": now - 20},
        {"event": "step", "step": 111, "t": now},
    ):
        progress.update(event)
    assert progress.compute_eta_s() == pytest.approx(89 * 2, abs=1)


def test_runs_of_a_shell_are_shown_as_they_are(queue: Queue, tmp_path: Path) -> None:
    queue = Queue(queue.home, roots=[tmp_path / "runs"])
    folder = tmp_path / "runs/shell"
    run = Run.create(folder, "[export]\nverify = false\n")
    run.log_event("start")
    run.log_event("stage", stage="train", step=0, steps=10)
    run.log_event("step", step=3, loss=0.5)
    run.log_event("stage", stage="train", steps=10)  # of another program: it must not take the list of all runs down
    run.log_event("step", step="four")
    (seen,) = queue.list_jobs()
    assert (seen.id, seen.state, seen.step, seen.steps) == (str(folder), "running", 3, 10)
    assert seen.sentence.text == "step 3 of 10"
    queue.stop(str(folder))
    assert run.take_request("stop") and queue.get_job(str(folder)).state == "stopping"
    run.close()  # as if killed
    assert queue.get_job(str(folder)).state == "lost"
    with pytest.raises(UserError, match="no training is running"):
        queue.stop(str(folder))
    for event, fields, state in (
        ("stopped", {}, "stopped"),
        ("error", {"text": "too full"}, "failed"),
        ("done", {"files": ["export/x.safetensors"]}, "done"),
    ):
        run = Run.create(folder, "", resume=True)
        run.log_event("start")
        run.log_event(event, **fields)
        (run.export / "x.safetensors").touch()
        run.close()
        assert queue.get_job(str(folder)).state == state
    assert queue.get_job(str(folder)).resumable is False
    with pytest.raises(UserError, match="not a run folder"):
        queue.get_job(str(tmp_path))


def test_the_reason_of_a_failed_run_is_in_the_readers_language(queue: Queue, add: Callable[..., int]) -> None:
    reason = Message("{key}: there is no such folder; give the cache folder (dataset.cache_dir) of your runs", key="x")
    folder = queue.home.parent / "runs/failed"
    with contextlib.closing(Run.create(folder, "")) as run:
        run.log_event("error", kind="UserError", text=reason)
    (seen,) = Queue(queue.home, roots=[folder.parent]).list_jobs()
    assert seen.state == "failed" and reason in seen.sentence.text
    for text in (seen.sentence.text, Sentence.parse(json.dumps(seen.sentence.to_json())).text):
        assert translate("zh-CN", reason) in translate("zh-CN", text) and "no such folder" not in translate(
            "zh-CN", text
        )


def test_a_job_whose_run_another_job_goes_on_with_has_ended(queue: Queue, add: Callable[..., int]) -> None:
    """What goes on there is told once: two cards with a button to stop it would be two trainings."""
    first = add("a")
    folder = queue.get_job(first).folder
    Run.create(folder, queue.read_config(first)).close()
    (folder / "checkpoints" / "step-000002").mkdir()
    over(queue, first, "stopped")
    assert queue.get_job(first).resumable
    config = (folder / "config.toml").read_bytes()
    (folder / "config.toml").write_bytes(b"\xff" + config)
    with pytest.raises(UserError, match="not UTF-8"):
        queue.submit_run(folder)
    (folder / "config.toml").write_bytes(config)
    second = queue.submit_run(folder)
    queue.store.update(second, phase="launched", token="t", boot=procs.read_boot_id(), launched=time.time())
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for views in ({view.id: view for view in queue.list_jobs()}, {first: queue.get_job(first)}):
            assert views[first].state == "stopped" and not views[first].resumable


def test_a_job_that_a_shell_goes_on_with(queue: Queue, add: Callable[..., int]) -> None:
    """Its row has ended; what is true is what its folder says."""
    id = add("x")
    over(queue, id, "stopped")
    folder = queue.get_job(id).folder
    run = Run.create(folder, "x = 1")
    run.log_event("start")
    run.log_event("stage", stage="train", step=4, steps=9)
    for seen in (queue.get_job(id), queue.get_job(str(folder)), *queue.list_jobs()):
        assert (seen.id, seen.state, seen.step) == (id, "running", 4)
    queue.stop(id)
    assert run.take_request("stop") and queue.get_job(id).state == "stopping"
    run.close()
    assert queue.get_job(id).state == "stopped"
    with pytest.raises(UserError, match="neither running nor queued"):
        queue.stop(id)


def test_a_hundred_jobs_are_seen_in_a_moment(queue: Queue, add: Callable[..., int]) -> None:
    """Half of them ended, with logs. Function calls are counted, which no other program on this machine changes."""
    for number in range(100):
        id = add(f"n{number}")
        if number % 2:
            folder = Path(queue.store.read_row(id).folder)
            (folder / "checkpoints/step-000500").mkdir(parents=True)
            lines = [json.dumps({"event": "step", "step": i, "loss": 0.1, "t": 1.0}) for i in range(200)]
            (folder / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            over(queue, id)
    assert len(queue.list_jobs()) == 100
    with cProfile.Profile() as profile:
        queue.list_jobs()
    calls = sum(entry.callcount for entry in profile.getstats())
    print(calls, "calls")
    assert calls < 500 * 100


# ----------------------------------------------------------------------------------------------------------- the worker


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (["0,1", "1"], "two groups"),
        (["0,0"], "twice"),
        (["gpu"], "not a group"),
        (["-1"], "not a group"),
        ([""], "not a group"),
        (["beside"], "not a group"),
    ],
)
def test_groups_that_cannot_be(given: list[str], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        worker.parse_groups(given)


def test_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert worker.parse_groups(["0, 1", "2"]) == ("0,1", "2")
    monkeypatch.setattr(worker, "_count_gpus", lambda: 2)
    assert worker.parse_groups([]) == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-af12")
    assert worker.parse_groups([]) == ("3", "GPU-af12")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert worker.parse_groups([]) == ("cpu",)
    (tmp_path / "worker.toml").write_text('gpus = ["0"]\npatience_s = 1.5\n', encoding="utf-8")
    assert worker.read_settings(tmp_path).gpus == ["0"] and worker.read_settings(tmp_path).patience_s == 1.5
    (tmp_path / "worker.toml").write_text("gpu = 1\npatience_s = -1\n", encoding="utf-8")
    with pytest.raises(UserErrors) as found:
        worker.read_settings(tmp_path)
    assert len(found.value.problems) == 2


# (time, signals so far, killed) of a training whose previews take an hour, in two halves, after a stop at 1,000 s.
SLOW = [(1170, 0, False), (1190, 1, False), (2700, 1, False), (4499, 1, False), (8100, 1, False), (8110, 1, True)]


@pytest.mark.parametrize(
    ("wanted", "asks", "expected"),
    [
        ("stop", True, SLOW),
        ("stop", False, [(1210, 0, False), (4499, 0, False), (8100, 0, False), (8110, 1, False)]),
        ("cancel", True, [(1001, 1, False), (1070, 1, True)]),
    ],
    ids=["stop", "stop on Windows", "cancel"],
)
def test_a_training_is_not_killed_before_it_can_save(
    queue: Queue,
    add: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    asks: bool,
    expected: list[tuple[int, int, bool]],
) -> None:
    """It hears of a stop at the end of its next step, which comes after all previews that are being drawn."""
    id, sent, killed = add("slow"), list[int](), list[list[int]]()
    queue.store.update(id, phase="launched", token="a token", pid=17, asked=1000.0, wanted=wanted)
    file = Path(queue.store.read_row(id).folder) / "events.jsonl"
    file.parent.mkdir(parents=True)
    events = [("stage", 900), ("step", 905), ("step", 910), ("progress", 2700), ("progress", 4500)]
    one = jobs.Worker(queue.home, ["0"], report=lambda line: None)
    monkeypatch.setattr(worker.system, "CAN_ASK_TO_STOP", asks)
    monkeypatch.setattr(worker.procs, "find_members", lambda token: [17, 18])
    monkeypatch.setattr(worker.procs, "find_parent", lambda pid: 1)
    monkeypatch.setattr(worker.procs, "send", lambda pids, number: sent.append(number))
    monkeypatch.setattr(worker.procs, "kill", killed.append)
    for now, signals, is_killed in expected:
        monkeypatch.setattr(worker.time, "time", lambda now=now: float(now))
        monkeypatch.setattr(worker, "now", lambda now=now: float(now))
        lines = [{"event": kind, "stage": "train", "t": t, "step": 1} for kind, t in events if t <= now]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        one._stop(queue.store.read_row(id))
        assert (sent, bool(killed)) == ([signal.SIGTERM] * signals, is_killed), now


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What a worker in this process would run; `sleep` is run in its place."""
    commands: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen:
        commands.append(command)
        return real(["sleep", "300"], **options)

    monkeypatch.setattr(worker.subprocess, "Popen", popen)
    return commands


def finish(queue: Queue) -> None:
    for row in queue.store.read_rows("phase = 'launched'"):
        procs.send(procs.find_members(row.token), signal.SIGKILL)
        wait_until(lambda row=row: not procs.find_members(row.token))


def test_a_job_for_each_group_and_none_for_those_that_are_not_there(
    queue: Queue, add: Callable[..., int], started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")  # a number for each level of nesting
    for name, gpus in (("nowhere", "7"), ("two", "1,2"), ("any", ""), ("waits", ""), ("waits2", "0")):
        add(name, gpus=gpus)
    one = jobs.Worker(queue.home, ["0", "1,2"], report=lambda line: None)
    one.take_lock()
    try:
        for _ in range(3):
            one.tick()
        found = {job.name: job for job in queue.list_jobs()}
        assert {name: job.assigned for name, job in found.items() if job.assigned} == {"two": "1,2", "any": "0"}
        text = found["nowhere"].sentence.text
        assert text.startswith("waiting for GPUs 7") and "0; 1,2" in text
        running = f"{found['any'].id} (any)", f"{found['two'].id} (two)"
        assert sorted(found["waits"].sentence.args["jobs"].split(", ")) == sorted(running)
        assert found["waits"].sentence.key == "after_any" and found["waits"].place == 2
        assert found["waits2"].sentence == Sentence("behind", {"id": found["waits"].id, "name": "waits"})
        for name, gpus in (("two", "1,2"), ("any", "0")):
            (pid,) = procs.find_members(queue.store.read_row(found[name].id).token)
            environment = dict(
                line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line
            )
            assert environment["CUDA_VISIBLE_DEVICES"] == gpus and environment["PYTHONUTF8"] == "1"
            assert not {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "ACCELERATE_USE_FSDP", "RANK"} & set(environment)
            assert os.getsid(pid) == pid
        two = next(command for command in started if "--multi_gpu" in command)
        assert two[two.index("--num_processes") + 1] == "2" and two[two.index("--main_process_port") + 1] == "0"
        assert two[two.index("--num_cpu_threads_per_process") + 1] == "3"
        finish(queue)
        one.tick()
        said = Sentence(**json.loads(queue.store.read_row(found["two"].id).sentence))
        assert said.text.startswith("the processes disappeared without a message")
        assert said.text.endswith("; attempt 2 of 3 is next")
        assert queue.get_job(found["two"].id).attempts == 2
    finally:
        finish(queue)
        one._lock.close()


def test_a_command_may_run_beside_the_groups_and_without_their_gpus(
    queue: Queue, add: Callable[..., int], started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(worker.system, "count_cpus", lambda: 8)
    beside = jobs.Scheduling(gpus=jobs.BESIDE, max_attempts=1)
    training, waiting = add("training"), add("waiting")
    with pytest.raises(UserError, match="for commands"):
        add("no", gpus=jobs.BESIDE)
    drawings = [queue.submit_command("draw", ["--out", name], scheduling=beside) for name in "ab"]
    in_turn = queue.submit_command("draw", ["--out", "c"], scheduling=jobs.Scheduling(priority=1, max_attempts=1))
    one = jobs.Worker(queue.home, ["0"], report=lambda line: None)
    one.take_lock()
    try:
        one.tick()
        one.tick()
        assigned = {job.id: job.assigned for job in queue.list_jobs()}
        # One of each: the next drawing waits for the first, and the command in turn goes before the trainings.
        assert assigned == {in_turn: "0", drawings[0]: "beside", drawings[1]: "", training: "", waiting: ""}
        sentences = {id: queue.get_job(id).sentence for id in (drawings[1], training, waiting)}
        assert {id: (sentence.key, sentence.args["id"]) for id, sentence in sentences.items()} == {
            drawings[1]: ("after", drawings[0]),
            training: ("after", in_turn),
            waiting: ("behind", training),
        }
        (pid,) = procs.find_members(queue.store.read_row(drawings[0]).token)
        environment = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
        assert {f"CUDA_VISIBLE_DEVICES={worker.system.NO_GPUS}", "OMP_NUM_THREADS=4"} <= set(environment)
        finish(queue)
        one.tick()
        assert {id for id in (training, drawings[1]) if queue.get_job(id).assigned} == {training, drawings[1]}
    finally:
        finish(queue)
        one._lock.close()


def test_images_are_counted_before_the_run_has_a_log(
    queue: Queue, add: Callable[..., int], started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = add("training")
    one = jobs.Worker(queue.home, ["0"], report=lambda line: None)
    one.take_lock()
    try:
        one.tick()
        assert (queue.get_job(training).state, queue.get_job(training).work) == ("starting", None)
        (pid,) = procs.find_members(queue.store.read_row(training).token)
        environment = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
        (place,) = [line.partition("=")[2] for line in environment if line.startswith(f"{progress.COUNT}=")]
        monkeypatch.setenv(progress.COUNT, place)  # as in the process of the job
        count = progress.show_images()
        for done in (1, 2, 3):
            count(done, 2000)
        assert queue.get_job(training).work == {"stage": "images", "done": 1, "total": 2000}, (
            "every two seconds at most"
        )
        count(2000, 2000)
        assert queue.get_job(training).work == {"stage": "images", "done": 2000, "total": 2000}
        with (queue.get_job(training).folder / "events.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"t": time.time(), "event": "start"}) + "\n")
        assert (queue.get_job(training).stage, queue.get_job(training).work) == ("start", None)
        Path(place).write_text('{"done": "many"}', encoding="utf-8")
        assert run_events.read_count(Path(place).parent) is None
    finally:
        finish(queue)
        one._lock.close()


def test_a_worker_that_died_between_noting_and_starting(queue: Queue, add: Callable[..., int]) -> None:
    """Where nothing was started the job goes back; where something was, it is found by its token."""
    first, second = add("nothing"), add("something")
    values = {"phase": "launched", "attempts": 1, "boot": procs.read_boot_id(), "assigned": "cpu", "pid": 0, "start": 0}
    queue.store.update(first, token="t1", launched=time.time() - 60, **values)
    queue.store.update(second, token="t2", launched=time.time(), **values)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, procs.TOKEN: "t2"}) as child:
        wait_until(lambda: procs.find_members("t2"))
        one = jobs.Worker(queue.home, ["7"], report=lambda line: None)
        rows = {row.id: one._check_ended(row) for row in queue.store.read_rows()}
        child.kill()
    assert rows == {first: True, second: False}
    assert queue.store.read_row(first).phase == "queued" and queue.store.read_row(second).pid == child.pid


def test_a_job_of_which_nothing_is_left_to_kill(
    queue: Queue, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ending, and its processes cannot be told by their token any more: nobody else gets its signals."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    id = add("x")
    one = jobs.Worker(queue.home, ["cpu"], report=lambda line: None)
    long_ago = {"asked": 1.0, "termed": 1.0, "killed": 1.0, "pid": os.getpid()}
    for values in ({"asked": 1.0}, long_ago):
        queue.store.update(id, phase="launched", wanted="cancel", token="nobody", **values)
        one._stop(queue.store.read_row(id))
    assert sent == []
    with pytest.raises(AssertionError):
        procs.send([0], signal.SIGKILL)
    assert sent == []


def test_logs_are_kept_by_attempt(queue: Queue, tmp_path: Path) -> None:
    one = jobs.Worker(queue.home, ["cpu"], report=lambda line: None)
    for number in range(9):
        with one._open_log(tmp_path / "run/log.txt") as log:
            log.write(str(number).encode())
    kept = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "run").iterdir()}
    assert kept == {"log.txt": "8", **{f"log.{i}.txt": str(8 - i) for i in range(1, 6)}}


def test_a_run_folder_that_cannot_be_made_fails_the_job_and_not_the_queue(
    queue: Queue, add: Callable[..., int], started: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    bad = add("bad", overrides=[f"output_dir='{tmp_path / 'file'}'"])
    good = add("good")
    one = jobs.Worker(queue.home, ["cpu"], report=lambda line: None)
    try:
        one.tick()
        assert queue.get_job(bad).state == "failed" and str(tmp_path / "file") in queue.get_job(bad).sentence.text
        assert queue.get_job(good).state == "starting"
    finally:
        finish(queue)


def test_a_worker_outlives_a_full_disk(queue: Queue, add: Callable[..., int]) -> None:
    """It says so, tries again, and starts the job when there is room."""
    add("x", max_attempts=1)
    code = """
import resource, sys, threading
from pathlib import Path
from lora_fp8 import jobs
class Short(jobs.Worker):
    def make_command(self, row, group, attempt):
        return ["true"]
tried = threading.Event()
def say(line):
    print(line, flush=True)
    if "trying again" in line:
        tried.set()
worker = Short(Path(sys.argv[1]), ["cpu"], say)
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def room():
    tried.wait()
    limit(resource.RLIM_INFINITY)
    print("room", flush=True)
threading.Thread(target=room).start()
worker.take_lock(); worker._lock.close()
sys.dont_write_bytecode = True  # or Python would leave cut .pyc files in the checkout
limit(0)
worker.run(idle_s=0.5)
"""
    done = fresh(code, queue.home)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert any("trying again" in line for line in lines[: lines.index("room")]), lines
    assert not any("started" in line for line in lines[: lines.index("room")])
    assert queue.get_job(1).attempts == 1 and queue.get_job(1).state == "failed"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A home whose background worker is ended afterwards."""
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path / "home"
    end_worker(tmp_path / "home")


def test_one_worker_for_all_who_ask(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(procs.TOKEN, "of-a-job-that-submits")
    found: list[jobs.Info] = []
    waits = Queue(home).submit(
        TEXT.format(name="x"), scheduling=jobs.Scheduling(gpus="7")
    )  # so that it has something to wait for
    threads = [threading.Thread(target=lambda: found.append(jobs.ensure_worker(home, 0.5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({info.pid for info in found}) == 1
    pid = found[0].pid
    assert procs.find_parent(pid) != os.getpid() and os.getsid(pid) != os.getsid(0)
    assert procs.find_members("of-a-job-that-submits") == []  # or stopping that job would end the worker
    with pytest.raises(UserError, match=f"a worker is already running.*{pid}"):
        jobs.Worker(home, report=lambda line: None).run()
    Queue(home).cancel(waits)
    wait_until(lambda: not jobs.find_worker(home))  # it has nothing to do


def test_a_process_that_has_an_earlier_workers_id_is_not_the_worker(home: Path) -> None:
    """Ids are given again, within minutes on a busy machine; whoever ends the worker would end a stranger."""
    own = procs.identify(os.getpid())
    assert own is not None
    home.mkdir()
    with open(home / "worker.lock", "wb") as lock:  # a worker that is just starting
        fcntl.flock(lock, fcntl.LOCK_EX)
        for start, pid in ((own.start - 1, 0), (own.start, own.pid)):
            left = {"pid": own.pid, "start": start, "groups": ["cpu"], "since": 1.0, "heartbeat": 1.0}
            (home / "worker.json").write_text(json.dumps(left), encoding="utf-8")
            found = jobs.find_worker(home)
            assert found is not None and found.pid == pid
    (home / "worker.json").unlink()


def test_a_worker_has_no_id_before_it_hears_signals(queue: Queue) -> None:
    """Whoever told it to end would kill it, or the process that it is forked from."""
    one = jobs.Worker(queue.home, report=lambda line: None)
    one.take_lock()
    assert jobs.find_worker(queue.home).pid == 0
    one.tick()
    assert jobs.find_worker(queue.home).pid == os.getpid()
    one._lock.close()


def test_a_worker_that_cannot_start_says_why(home: Path) -> None:
    Queue(home)
    (home / "worker.toml").write_text("nonsense = 1", encoding="utf-8")
    with pytest.raises(UserError, match="nonsense"):
        jobs.ensure_worker(home)
    (home / "worker.toml").unlink()
    (home / "worker.json").mkdir()
    with pytest.raises(UserError, match="the worker did not start; the last lines of .*worker.log"):
        jobs.ensure_worker(home)


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """ask("jobs", "move", 2, 1): (exit code, stdout, stderr) of a command in this process."""

    def ask(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return (code, *capfd.readouterr())

    return ask


def test_the_queue_from_a_shell(
    home: Path, ask: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(TEXT.format(name="x"), encoding="utf-8")
    assert "there are no jobs yet" in ask("jobs")[1]
    told = json.loads(ask("submit", "x.toml", "--set", "train.steps=9", "--priority", 2, "--no-worker", "--json")[1])
    assert told["id"] == 1 and told["sentence"]["key"] == "no_worker"
    assert ask("jobs", "clone", 1, "--set", "train.steps=5", "--no-worker")[1].startswith("job 2 (x-2): queued")
    assert ask("jobs", "move", 2, 1)[1] == "job 2: place 1\n"
    assert [(job["id"], job["priority"]) for job in json.loads(ask("jobs", "--json")[1])] == [(2, 2), (1, 2)]
    assert "removed from the queue" in ask("jobs", "cancel", 2)[1]
    assert "removed from the queue" in ask("stop", 1)[1]
    assert ask("jobs")[1].count("cancelled") == 2
    for arguments in (("stop", 1), ("jobs", "cancel", 9), ("jobs", "move", 1, 1), ("jobs", "run", "rm", "--", "x")):
        code, _, err = ask(*arguments)
        assert code == 2 and err.count("\n") == 1, err
    assert ask("submit", "nothing.toml", "--no-worker")[0] == 2 and ask("jobs", "--watch", "--json")[0] == 2
    assert ask("jobs", "delete", 2)[0] == 0
    assert len(Queue(home).list_jobs()) == 1
    run = Run.create(tmp_path / "runs/shell", "x = 1")
    assert ask("stop", "runs/shell")[0] == 0 and run.take_request("stop")
    assert "stopping" in ask("jobs")[1]
    run.close()
    assert "no training is running" in ask("stop", "runs/shell")[1]
    # Going on with a run that the queue does not know.
    saved = config.dumps(config.loads(TEXT.format(name="before-it-was-moved")))
    (tmp_path / "runs/shell/config.toml").write_text(saved, encoding="utf-8")
    (tmp_path / "runs/shell/checkpoints/step-000002").mkdir()
    assert ask("submit", "runs/shell", "--no-worker")[0] == 0
    queue = Queue(home)
    found = queue.get_job(3)
    assert found.name == "shell" and found.folder == tmp_path / "runs/shell" and found.saved_step == 2
    command = jobs.Worker(home, ["cpu"], report=print).make_command(queue.store.read_row(3), "cpu", tmp_path)
    assert command[-2:] == ["resume", str(tmp_path / "runs/shell")]
    # What is asked otherwise than the run's own config says reaches the trainer, with paths as they are from here.
    assert ask("jobs", "cancel", 3)[0] == 0
    asked = ["--set", "train.steps=9", "--set", "dataset.folders.0.path=here"]
    assert ask("submit", "runs/shell", *asked, "--no-worker")[0] == 0
    command = jobs.Worker(home, ["cpu"], report=print).make_command(queue.store.read_row(4), "cpu", tmp_path)
    given = ["--set", "train.steps=9", "--set", f'dataset.folders.0.path="{tmp_path / "here"}"']
    assert command[-6:] == ["resume", str(tmp_path / "runs/shell"), *given]
    assert ask("jobs", "show", 4)[1].split()[:2] == ["4", "queued"]


def test_a_queued_command_runs_and_its_end_is_known(
    home: Path, ask: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of its own, started by who submits; the command's own words are the reason."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')", encoding="utf-8")
    assert ask("jobs", "run", "verify", "--json", "--", str(tmp_path / "missing.safetensors"))[0] == 0
    queue = Queue(home)
    wait_until(lambda: queue.store.read_row(1).phase == "ended", lambda: queue.get_job(1))
    found = queue.get_job(1)
    assert (found.state, found.exit_code, found.sentence.key) == ("failed", 2, "input"), queue.read_log_tail(1)
    assert "~/missing.safetensors" in found.sentence.text and "~/missing.safetensors" in queue.read_log_tail(1)[-1]
    log = (queue.store.get_folder(1) / "log.txt").read_text(encoding="utf-8")
    assert "~/missing.safetensors" in log and str(tmp_path) not in log, "a log that is shown to others names nobody"
