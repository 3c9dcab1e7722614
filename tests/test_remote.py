"""Trainings on other machines: a real sshd and a real Slurm, on the loopback, with a miniature as the base.

The authority for every result is the same job, trained here without a disturbance: the files are compared byte for
byte. Names and paths have spaces, quotes and Chinese in them throughout.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import servers
from typer.testing import CliRunner
from waiting import slowed, wait_until

from lora_fp8 import cli, config, train
from lora_fp8.common.locks import read_holder
from lora_fp8.errors import UserError
from lora_fp8.remote import control, handle

STEPS = 24
NAME = """小猫 it's "$HOME" `x` &"""
SMALL = (f"train.steps={STEPS}", "checkpoint.every=8", "adapter.targets=['attn1.to_q', 'ff.net.0.proj']")


def call(*words: str) -> str:
    """The output of a command; its error, if it has one, is raised."""
    result = CliRunner().invoke(cli.app, words)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def send(job: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """send("ssh:machine", "--gpus-per-node", "0"): submits a job named `name`; -> the answer of --json."""
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(control, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(control, "POLL_SECONDS", 0.1)

    def submit(to: str, *options: str, name: str = NAME) -> dict[str, Any]:
        file = tmp_path / f"{name}.toml"
        file.write_text(config.dumps(job(f"name={json.dumps(name)}", *SMALL)), encoding="utf-8")
        there = str(tmp_path / "there, 那里 'x'")
        return json.loads(
            call("submit", str(file), "--to", to, "--folder", there, "--setup", servers.SETUP, "--json", *options)
        )

    return submit


def undisturbed(job: Callable, tree_hash: Callable, tmp_path: Path, *overrides: str) -> dict[str, str]:
    """Hashes of what the same job writes here, in one go."""
    alone = job(f"name={json.dumps(NAME)}", *SMALL, f"output_dir='{tmp_path / 'alone' / 'runs'}'", *overrides)
    train.run(alone, progress=False)
    return results(tree_hash(tmp_path / "alone" / "runs" / NAME))


def results(hashes: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in hashes.items() if k.startswith(("export/", f"checkpoints/step-{STEPS:06d}/"))}
    assert len(kept) == 2 + 4
    return kept


def look(name: str = NAME) -> control.View:
    return control.look(handle.load(name))


def events_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


@contextlib.contextmanager
def slowed_in_training(folder: Path, starts: int = 1) -> Iterator[int]:
    """Slow a trainer down from its first steps on, after this many starts of its run; -> its process."""

    def find_steps() -> bool:
        view, kinds = look(folder.name), [event["event"] for event in events_of(folder)]
        assert not view.has_ended, (view, kinds)
        return kinds.count("start") == starts and "step" in kinds[len(kinds) - kinds[::-1].index("start") :]

    def find_training() -> bool:
        events, view = events_of(folder), look(folder.name)
        assert not view.has_ended, view
        began = [number for number, event in enumerate(events) if event["event"] == "start"]
        return len(began) == starts and any(event.get("stage") == "train" for event in events[began[-1] :])

    wait_until(find_training, lambda: (look(folder.name), events_of(folder)))
    with slowed(pid := read_holder(folder / "lock")):
        wait_until(find_steps, lambda: (look(folder.name), events_of(folder)))
        yield pid


def test_a_training_over_ssh(
    send: Callable, job: Callable, tree_hash: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed over a connection that is cut, cancelled, resumed, fetched: the bytes of a run that stayed here."""
    with servers.ssh_server(tmp_path / "ssh", monkeypatch) as server:
        monkeypatch.setenv("SECRET_WORD", "open sesame=")
        sent = send("ssh:machine", "--gpus-per-node", "0", "--env", "SECRET_WORD")
        there = Path(sent["folder"])
        assert there == tmp_path / "there, 那里 'x'" / NAME.replace("$", "-")
        events: list[dict[str, Any]] = []
        lost: list[str] = []
        views: list[control.View] = []

        def follow() -> None:
            views.append(control.follow(handle.load(NAME), events.append, lost.append))

        follower = threading.Thread(target=follow)
        with slowed_in_training(there / "runs" / NAME) as trainer:
            assert psutil.Process(trainer).environ()["SECRET_WORD"] == "open sesame="
            assert not any(b"sesame" in path.read_bytes() for path in there.rglob("*") if path.is_file())
            follower.start()
            wait_until(lambda: any(event["event"] == "step" for event in events))
            wait_until(server.cut_connections)
            wait_until(lambda: lost)
            seen = len(events)
            wait_until(lambda: len(events) > seen)
            with pytest.raises(UserError, match="has not ended"):
                call("remote", "fetch", NAME)
            with pytest.raises(UserError, match="has not ended"):
                call("remote", "resume", NAME)
            call("remote", "cancel", NAME)
        follower.join()
        assert "ssh cannot connect, or lost the connection" in lost[0]
        assert views[0].state == "stopped" and views[0].exit_code == 75
        steps = [event["step"] for event in events if event["event"] == "step"]
        assert steps == list(range(1, len(steps) + 1)) and 2 <= len(steps) < STEPS
        assert events[-1]["event"] == "stopped"

        call("remote", "resume", NAME)
        wait_until(lambda: look().has_ended, look)
        assert look().state == "done", (look(), (there / "log.txt").read_text(encoding="utf-8"))
        assert json.loads(call("remote", "fetch", NAME, "--json"))["left"] == []
        here = tmp_path / "runs" / NAME
        assert results(tree_hash(here)) == undisturbed(job, tree_hash, tmp_path)
        mine = job(f"name={json.dumps(NAME)}", *SMALL)
        assert config.load(here / "config.toml").dataset == mine.dataset

        # Again: nothing comes twice, and what was changed here stays.
        (here / "export" / "mine.txt").write_text("mine", encoding="utf-8")
        changed = next((here / "export").glob("*.safetensors"))
        changed.write_bytes(b"changed")
        assert json.loads(call("remote", "fetch", NAME, "--json"))["files"] == 0
        assert changed.read_bytes() == b"changed" and (here / "export" / "mine.txt").exists()
        call("remote", "delete", NAME, "--there")
        assert not there.exists() and not handle.load_all() and here.exists()


def test_a_training_in_slurm(
    send: Callable, job: Callable, tree_hash: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted twice, as the script is told ahead and as Slurm takes the node away: queues itself, ends the same."""
    with servers.slurm_cluster(tmp_path / "slurm", monkeypatch) as cluster:

        def restart(restarts: int) -> None:
            """Wait until Slurm has started the job again."""
            number = handle.load(NAME).slurm

            def is_running() -> bool:
                job = cluster.slurm("scontrol", "show", "job", number)
                assert not any(f"JobState={state}" in job for state in ("FAILED", "CANCELLED")), job
                return f"Restarts={restarts}" in job and "JobState=RUNNING" in job

            wait_until(is_running, lambda: cluster.slurm("scontrol", "show", "job", number) + cluster.describe())

        sent = send("slurm", "--gpus-per-node", "0", "--time", "1-0", "--sbatch", 'comment=it\'s "mine" \\ $HOME')
        there, number = Path(sent["folder"]), sent["slurm"]
        assert 'Comment=it\'s "mine" \\ $HOME' in cluster.slurm("scontrol", "show", "job", number)
        assert f"JobName={NAME}" in cluster.slurm("scontrol", "show", "job", number)
        with slowed_in_training(there / "runs" / NAME):
            cluster.slurm("scancel", "--batch", "--signal=TERM", number)
            wait_until(lambda: look().state == "waiting", look)
        restart(1)
        with slowed_in_training(there / "runs" / NAME, starts=2):
            cluster.slurm("scontrol", "requeue", number)
            wait_until(lambda: look().state == "waiting", look)
        restart(2)
        view = control.follow(handle.load(NAME), lambda event: None, lambda why: None)
        log = (there / "log.txt").read_text(encoding="utf-8")
        assert view.state == "done", (view, log)
        kinds = [event["event"] for event in events_of(there / "runs" / NAME)]
        assert kinds.count("start") == 3 and kinds.count("stopped") == 2, log
        call("remote", "fetch", NAME)
        assert results(tree_hash(tmp_path / "runs" / NAME)) == undisturbed(job, tree_hash, tmp_path)

        # Two processes, started by torchrun. Cancelled: saved, and not in the queue again.
        two = ("--gpus-per-node", "2", "--set")
        with pytest.raises(UserError, match="shared out among 2 processes"):
            send("slurm", *two, "train.batch_size=1", name="two processes")
        other = send("slurm", *two, "train.batch_size=2", name="two processes")
        with slowed_in_training(Path(other["folder"]) / "runs/two processes"):
            call("remote", "cancel", "two processes")
        wait_until(lambda: look("two processes").has_ended, lambda: look("two processes"))
        log = (Path(other["folder"]) / "log.txt").read_text(encoding="utf-8")
        assert look("two processes").state == "stopped", (look("two processes"), log)
        started = events_of(Path(other["folder"]) / "runs/two processes")[0]
        assert started["event"] == "start" and started["processes"] == 2
        call("remote", "resume", "two processes")
        wait_until(lambda: look("two processes").has_ended, lambda: look("two processes"))
        assert look("two processes").state == "done"
