"""A queue whose rows or file are damaged: the rest is shown, and `jobs --rescue` brings back what the folders tell.

Judged by: SQLite's own check; the queue as it was before the damage.
"""

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fp8 import cli, jobs
from lora_fp8.cli import jobs as cli_jobs
from lora_fp8.common import locks
from lora_fp8.errors import UserError
from lora_fp8.jobs import job_endings, rescue, store, worker

TEXT = 'name = "{name}"\noutput_dir = "{folder}"\n[model]\nfamily = "sd15"\npath = "demo"\n[dataset]\n'


@pytest.fixture
def queue(tmp_path: Path) -> jobs.Queue:
    """Five jobs: 1 done, 2 killed in its first attempt, 3 and 4 waiting, 5 a command, cancelled."""
    made = jobs.Queue(tmp_path / "home")
    text = TEXT.format(name="{name}", folder=tmp_path / "runs") + f'folders = [{{path = "{tmp_path}"}}]\n'
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 0)):
        made.submit(text.replace("{name}", name), scheduling=jobs.Scheduling(priority, max_attempts=2))
    made.submit_command("verify", ["x y.safetensors"], folder=tmp_path)
    made.cancel(5)
    for number, status in ((1, 0), (2, -9)):
        folder = Path(made.store.read_row(number).folder)
        (folder / "export").mkdir(parents=True)
        (folder / "config.toml").write_text(made.read_config(number), encoding="utf-8")
        (folder / "events.jsonl").write_text('{"event": "start", "t": 1}\n', encoding="utf-8")
        attempt = made.store.get_folder(number) / "attempt-1"
        attempt.mkdir()
        (attempt / "launch.json").write_text(json.dumps({"status": status, "t": 5, "oom_kills": 0}), encoding="utf-8")
        made.store.update(number, phase="launched", attempts=1, launched=1.0, pid=1 << 22, start=1, token="x")
    with open(folder.parent / "a" / "events.jsonl", "a", encoding="utf-8") as log:
        log.write('{"event": "done", "t": 4, "files": ["export/a.safetensors"]}\n')
    (folder.parent / "a" / "export" / "a.safetensors").touch()
    (folder.parent / "a" / "verify.json").write_text('{"a.safetensors": {"ok": true}}', encoding="utf-8")
    return made


def damage_header(file: Path) -> None:
    file.write_bytes(b"damage" * 20 + file.read_bytes()[120:])


def damage_pages(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4096] + bytes(len(data) - 4096))


def damage_table(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("DROP TABLE jobs")


DAMAGES = [damage_header, damage_pages, damage_table, lambda file: file.write_bytes(b"not a database" * 100)]


@pytest.mark.parametrize("damage", DAMAGES, ids=["header", "pages", "table", "another file"])
def test_a_damaged_queue_names_the_way_out_and_comes_back(
    queue: jobs.Queue,
    damage: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = {job.id: job for job in queue.list_jobs()}
    rows = {row.id: row for row in queue.store.read_rows()}
    queue.store.close()
    with sqlite3.connect(queue.store.file) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for name in ("queue.db-wal", "queue.db-shm"):
        (queue.home / name).unlink(missing_ok=True)
    damage(queue.store.file)
    damaged = queue.store.file.read_bytes()
    monkeypatch.setenv("LORA_FP8_HOME", str(queue.home))
    for arguments, code, words in (
        (["jobs"], 2, "`lora-fp8 jobs --rescue`"),
        (["jobs", "--rescue"], 0, "5 jobs are restored: 2 waiting, 3 ended"),
        (["jobs", "--rescue"], 2, "is not damaged, so there is nothing to restore"),
    ):
        monkeypatch.setattr(sys, "argv", ["lora-fp8", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
            raise SystemExit(0)
        told = "".join(capfd.readouterr())
        assert (end.value.code or 0) == code and words in told and "Traceback" not in told
    assert (queue.home / "queue.db.damaged-1").read_bytes() == damaged
    again = jobs.Queue(queue.home)
    after = {job.id: job for job in again.list_jobs()}
    assert after.keys() == before.keys()
    for id in (3, 4, 5):
        assert after[id].state == before[id].state and after[id].place == before[id].place
    assert after[1].state == "done" and after[2].state in ("failed", "lost")
    kept = ("name", "kind", "text", "command", "folder", "cwd", "priority", "gpus", "created", "max_attempts")
    for row in again.store.read_rows():
        assert all(getattr(row, name) == getattr(rows[row.id], name) for name in kept)
    again.requeue(2)
    assert again.submit_command("verify", ["z"]) == 6


def test_what_cannot_be_brought_back_is_told(queue: jobs.Queue) -> None:
    (queue.store.get_folder(3) / "config.toml").write_text("[train]\nsteps = 'many'\n", encoding="utf-8")
    (queue.store.get_folder(4) / "job.json").unlink()
    damage_table(queue.store.file)
    found = rescue.rescue(queue.home)
    assert found.waiting == [4] and found.guessed == [4] and found.ended == [1, 2, 5]
    assert len(found.lost) == 1 and found.lost[0].startswith("job 3: ")


def test_a_queue_in_use_is_not_rescued(queue: jobs.Queue) -> None:
    damage_table(queue.store.file)
    home = queue.home
    with open(home / "worker.lock", "a+", encoding="utf-8") as file:
        locks.try_lock(file)
        with pytest.raises(UserError, match="a worker uses this queue"):
            rescue.rescue(home)


@pytest.mark.parametrize(
    "values",
    [
        {"sentence": "{", "phase": "ended"},
        {"sentence": '{"key": "nothing of ours"}', "phase": "ended"},
        {"sentence": '{"key": "error", "args": 7}', "phase": "ended"},
        {"sentence": "[" * 100_000, "phase": "queued"},
        {"command": "[" * 100_000},
        {"command": "{}"},
        {"command": '["\\u0000"]', "kind": "command"},
        {"folder": "/a\0b", "phase": "launched"},
        {"folder": "/" + "x" * 5000, "phase": "ended"},
        {"phase": "nonsense"},
        {"phase": "launched", "pid": 1 << 62, "attempts": 1 << 62},
        {"kind": "nonsense", "state": "nonsense", "phase": "ended"},
    ],
    ids=str,
)
def test_an_odd_row_is_one_line_and_the_others_are_shown(queue: jobs.Queue, values: dict) -> None:
    queue.store.update(4, **values)
    lines = cli_jobs._format_table(queue.list_jobs())
    assert len(lines) == 5 and all("Traceback" not in line for line in lines)
    assert {job.id for job in queue.list_jobs()} == {1, 2, 3, 4, 5}
    json.dumps([job.to_json() for job in queue.list_jobs()])
    queue.get_job(4)


def test_text_that_is_no_utf8_hides_no_other_job(queue: jobs.Queue) -> None:
    with sqlite3.connect(queue.store.file) as database:
        database.execute("UPDATE jobs SET name = CAST(x'ff41' AS TEXT) WHERE id = 4")
    assert [job.name for job in queue.list_jobs() if job.id == 4] == ["\ufffdA"]


class Ended:
    """A process that has ended."""

    pid = 1 << 22

    def poll(self) -> int:
        return 0


def test_a_worker_ends_jobs_whose_entries_are_damaged_and_goes_on(
    queue: jobs.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    made = jobs.Worker(queue.home, ["cpu"], said.append)
    made.take_lock()
    for id in (1, 2, 3):
        queue.store.update(id, phase="ended")
    queue.store.update(4, command="{}", kind="command")
    other = queue.submit_command("verify", ["z"])
    started = []
    monkeypatch.setattr(worker.subprocess, "Popen", lambda command, **_: started.append(command) or Ended())
    made.tick()
    assert queue.get_job(4).state == "failed" and "damaged" in queue.get_job(4).sentence.text
    assert len(started) == 1 and started[0][-2:] == ["verify", "z"]
    assert queue.store.read_row(other).phase == "launched"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_worker_whose_folder_was_deleted_ends_in_one_line(
    queue: jobs.Queue, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    made = jobs.Worker(queue.home, ["cpu"], said.append)
    made.take_lock()
    monkeypatch.setattr(worker, "TICK_SECONDS", 0)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)

    def tick() -> bool:
        shutil.rmtree(queue.home)
        if replaced:
            jobs.Queue(queue.home)
            (queue.home / "worker.lock").touch()
        made._beat = -1.0
        return type(made).tick(made)

    monkeypatch.setattr(made, "tick", tick)
    made.run()  # would go on for ever
    assert said[-1] == f"worker: exiting; its folder {queue.home} was moved or deleted" and len(said) == 2
    assert (queue.home / "worker.json").exists() is False


def test_files_of_a_run_with_names_that_no_disk_takes_are_missing_files(tmp_path: Path) -> None:
    event = {"event": "done", "files": ["x" * 5000, "a\0b"]}
    assert job_endings.check_done(tmp_path, event, 0).sentence.key == "no_files"
    assert store.MIGRATIONS  # the room's door


def test_who_has_the_queue_open_goes_on_with_the_rescued_one(queue: jobs.Queue) -> None:
    assert len(queue.list_jobs()) == 5
    for name in ("queue.db-wal", "queue.db-shm"):
        (queue.home / name).unlink(missing_ok=True)
    queue.store.file.write_bytes(b"not a database" * 100)
    with pytest.raises(jobs.Damaged):
        jobs.Queue(queue.home)
    rescue.rescue(queue.home)
    assert len(queue.list_jobs()) == 5 and queue.submit_command("verify", ["z"]) == 6
    assert len(jobs.Queue(queue.home).list_jobs()) == 6


def test_the_page_shows_the_way_out_of_a_damaged_queue(queue: jobs.Queue, tmp_path: Path) -> None:
    from webui import context
    from webui.pages import runs

    queue.store.close()
    for name in ("queue.db-wal", "queue.db-shm"):
        (queue.home / name).unlink(missing_ok=True)
    queue.store.file.write_bytes(b"not a database" * 100)
    ui = context.Ui("en", context.Place(queue.home, [tmp_path], fixed=False))
    assert "lora-fp8 jobs --rescue" in runs.render_board(ui, "all", 0)
    assert "CPU" in runs.render_machine(ui)
    assert "已损坏" in runs.render_board(context.Ui("zh-CN", ui.place), "all", 0)
