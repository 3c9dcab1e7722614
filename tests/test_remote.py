"""Trainings on other machines: a real sshd and a real Slurm, on the loopback, with a miniature as the base.

The authority for every result is the same job, trained here without a disturbance: the files are compared byte for
byte. Names and paths have spaces, quotes and Chinese in them throughout.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import servers
import yaml
from typer.testing import CliRunner
from waiting import Held, held, wait_until

from lora_fp8 import __version__, cli, config, train
from lora_fp8.common.locks import read_holder, try_lock
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.jobs.remote import control, fetch, handle, machine, package, script, submit
from lora_fp8.run import Run, ownership

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
    monkeypatch.setattr(control, "POLL_SECONDS", 0.5)  # each starts programs

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
    return control.fetch_view(handle.load(name))


def wait_for(state: str, name: str = NAME) -> None:
    """Wait until a job is "waiting" or has "ended". Each question starts programs, so there are few of them."""

    def is_so() -> bool:
        view = look(name)
        return view.has_ended if state == "ended" else view.state == state

    wait_until(is_so, lambda: look(name), poll=0.5)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of a run that may be writing one: its last line counts once it has its end."""
    file = folder / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def held_in_training(folder: Path, starts: int = 1) -> Iterator[Held]:
    """Hold a trainer after its first step, after this many starts of its run; at the end it goes on."""

    def list_new_events() -> list[dict[str, Any]]:
        events = events_of(folder)
        began = [number for number, event in enumerate(events) if event["event"] == "start"]
        return events[began[-1] :] if len(began) == starts else []

    def describe() -> object:
        return look(folder.name), events_of(folder)

    wait_until(list_new_events, describe, poll=0.002)  # long before its first step
    with held(read_holder(folder / "lock")) as trainer:
        trainer.run_until(lambda: any(event["event"] == "step" for event in list_new_events()), describe)
        yield trainer


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
        with held_in_training(there / "runs" / NAME) as trainer:
            assert psutil.Process(trainer.pid).environ()["SECRET_WORD"] == "open sesame="
            assert not any(b"sesame" in path.read_bytes() for path in there.rglob("*") if path.is_file())
            follower.start()
            wait_until(lambda: any(event["event"] == "step" for event in events))
            wait_until(server.cut_connections)
            wait_until(lambda: lost)
            seen, written = len(events), len(events_of(there / "runs" / NAME))
            trainer.run_until(lambda: len(events_of(there / "runs" / NAME)) > written)
            wait_until(lambda: len(events) > seen)
            with pytest.raises(UserError, match="has not ended"):
                call("remote", "fetch", NAME)
            with pytest.raises(UserError, match="has not ended"):
                call("remote", "resume", NAME)
            call("remote", "cancel", NAME)
            wait_until(lambda: trainer.is_sent(signal.SIGTERM))
        follower.join()
        assert "ssh connection failed or was lost" in lost[0]
        assert views[0].state == "stopped" and views[0].exit_code == 75
        steps = [event["step"] for event in events if event["event"] == "step"]
        assert steps == list(range(1, len(steps) + 1)) and 2 <= len(steps) < STEPS
        assert events[-1]["event"] == "stopped"

        call("remote", "resume", NAME)
        wait_for("ended")
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


PREEMPTIONS = {
    "told ahead": ("scancel", "--batch", "--signal=TERM"),
    "taken away": ("scontrol", "requeue"),
}
"""How Slurm tells a job that its node is needed: as the script asks to be told ahead, and as the node is taken away."""


@pytest.mark.parametrize(
    "ways",
    [[], ["taken away"], ["told ahead", "taken away"]],
    ids=lambda ways: ", then ".join(ways) or "undisturbed",
)
def test_a_training_in_slurm(
    ways: list[str],
    send: Callable,
    job: Callable,
    tree_hash: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not, once or twice preempted: it queues itself, goes on, and ends with the bytes of one in a shell."""
    with servers.slurm_cluster(monkeypatch) as cluster:
        sent = send("slurm", "--gpus-per-node", "0", "--time", "1-0", "--sbatch", 'comment=it\'s "mine" \\ $HOME')
        there, number = Path(sent["folder"]), sent["slurm"]
        assert 'Comment=it\'s "mine" \\ $HOME' in cluster.slurm("scontrol", "show", "job", number)
        assert f"JobName={NAME}" in cluster.slurm("scontrol", "show", "job", number)

        def has_restarted() -> bool:
            job = cluster.slurm("scontrol", "show", "job", number)
            assert not any(f"JobState={state}" in job for state in ("FAILED", "CANCELLED")), job
            return f"Restarts={times}" in job and "JobState=RUNNING" in job

        what = lambda: cluster.slurm("scontrol", "show", "job", number) + cluster.describe()  # noqa: E731
        for times, way in enumerate(ways, 1):
            with held_in_training(there / "runs" / NAME, starts=times) as trainer:
                cluster.slurm(*PREEMPTIONS[way], number)
                wait_until(lambda: trainer.is_sent(signal.SIGTERM))
            wait_for("waiting")
            wait_until(has_restarted, what, poll=0.5)
        view = control.follow(handle.load(NAME), lambda event: None, lambda why: None)
        log = (there / "log.txt").read_text(encoding="utf-8")
        assert view.state == "done", (view, log)
        kinds = [event["event"] for event in events_of(there / "runs" / NAME)]
        assert kinds.count("start") == len(ways) + 1 and kinds.count("stopped") == len(ways), log
        call("remote", "fetch", NAME)
        assert results(tree_hash(tmp_path / "runs" / NAME)) == undisturbed(job, tree_hash, tmp_path)


def test_a_training_on_two_nodes_of_slurm(send: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on each, started by torchrun. Cancelled: saved, and not in the queue again; resumed by hand."""
    with servers.slurm_cluster(monkeypatch) as cluster:
        two = ("--nodes", "2", "--gpus-per-node", "1", "--set")
        with pytest.raises(UserError, match="divided among 2 processes"):
            send("slurm", *two, "train.batch_size=1", name="two nodes")
        other = send("slurm", *two, "train.batch_size=2", name="two nodes")
        with held_in_training(Path(other["folder"]) / "runs/two nodes"):
            call("remote", "cancel", "two nodes")
            wait_until((Path(other["folder"]) / "runs/two nodes/control/stop").exists)
        wait_for("ended", "two nodes")
        log = (Path(other["folder"]) / "log.txt").read_text(encoding="utf-8")
        assert look("two nodes").state == "stopped", (look("two nodes"), log)
        assert "Restarts=0" in cluster.slurm("scontrol", "show", "job", other["slurm"])
        started = events_of(Path(other["folder"]) / "runs/two nodes")[0]
        assert started["event"] == "start" and started["processes"] == 2
        call("remote", "resume", "two nodes")
        wait_for("ended", "two nodes")
        assert look("two nodes").state == "done"


# ---------------------------------------------------------------------------------------------------------------------
# What can go wrong


ADDRESSES = (
    "ssh:-oProxyCommand=touch x",
    "ssh:-p",
    "ssh:root@-x",
    "ssh:",
    "ssh:a b",
    "ssh:a;b",
    "ssh:$(x)",
    "ssh:a\nb",
)
ADDRESSES += ("ssh:host:port", "slurm:", "slurm:-x", "sky:x", "sky:", "k8s", "")


@pytest.mark.parametrize("to", ADDRESSES)
def test_what_is_no_host_is_refused(to: str) -> None:
    with pytest.raises(UserError):
        machine.parse_target(to)


def test_hosts_become_arguments_of_ssh() -> None:
    for address, words in (("me@10.0.0.1:2222", ["-p", "2222", "--", "me@10.0.0.1"]), ("[::1]:22", ["--", "::1"])):
        assert machine.parse_target(f"ssh:{address}").address == address
        command = machine.Machine(address).build_command("true")
        assert " ".join(words) in " ".join(command) and command[-2] == words[-1]


def test_mistakes_are_told_in_one_sentence(
    send: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree_hash: Callable
) -> None:
    """And nothing is left there, nor remembered here."""
    monkeypatch.setattr(servers, "SETUP", "true")
    with servers.ssh_server(tmp_path / "ssh", monkeypatch) as server:
        port = servers.free_port()
        for to, options, expected in (
            (f"ssh:127.0.0.1:{port}", (), r"the ssh connection failed or was lost \(.*Connection refused\)"),
            ("ssh:nobody@127.0.0.1", (), "ssh connection failed.*Permission denied"),
            ("ssh:machine", ("--setup", "PATH="), "tar is missing on that machine"),
            ("ssh:machine", (), "lora-fp8 is not installed on that machine, or not on its PATH. Install it"),
            (
                "ssh:machine",
                ("--setup", "lora-fp8() { echo lora-fp8 0.0.9; }"),
                "lora-fp8 0.0.9 is installed on that machine",
            ),
            ("slurm:machine", ("--setup", "command() { [ $2 != sbatch ]; }"), "sbatch is missing on that machine"),
            (
                "ssh:machine",
                ("--setup", "export HF_TOKEN=hf_abc"),
                "HF_TOKEN would be written to a file on that machine",
            ),
            (
                "ssh:machine",
                ("--setup", "lora-fp8() { :; }", "--base", "/no/such"),
                "/no/such does not exist on that machine",
            ),
            ("ssh:machine", ("--time", "1:00"), "--time has no effect with --to ssh"),
            ("ssh:machine", ("--priority", "1"), "--priority has no effect with --to"),
            ("ssh:machine", ("--folder", "$HOME/x"), "variables are not expanded"),
            (
                "ssh:nobody@127.0.0.1",
                ("--env", "NOT_SET"),
                "environment variable NOT_SET",
            ),  # before any machine is asked
            ("slurm", ("--sbatch", "output=x"), "the script sets output itself"),
            ("sky", ("--gpus-per-node", "1"), "--to sky needs --accelerator"),
        ):
            with pytest.raises(UserError, match=expected) as error:
                send(to, *options)
            assert str(error.value).count("\n") == 0
        (server.folder / "known_hosts").write_text("", encoding="utf-8")
        with pytest.raises(UserError, match="Host key verification failed"):
            send("ssh:machine")
    with pytest.raises(UserError, match="only with --to"):
        call("submit", str(tmp_path / f"{NAME}.toml"), "--nodes", "2")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh is not installed on this machine"):
        send("ssh:machine")
    assert not handle.load_all()
    there = tmp_path / "there, 那里 'x'"
    assert not there.exists() or not list(there.iterdir())


def test_a_disk_there_may_have_a_space_in_its_place(job: Callable, tmp_path: Path) -> None:
    """df gives a line whose columns cannot be counted."""
    df = "df() { printf 'Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/sda1 9 4 5 40%% /my disk\n'; }"
    setup = (df, f"lora-fp8() {{ echo lora-fp8 {__version__}; }}")
    sent = package.Package("x", "runs/x", job())
    there = submit.Plan(
        machine.Target("ssh", "x"), script.RemoteJob("x", "runs/x", "ssh", setup=setup), sent, str(tmp_path), tmp_path
    )
    assert submit.prepare_remote_folder(machine.Machine(), there) == str(tmp_path)


def test_what_fails_while_sending_leaves_nothing(
    send: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, and bytes that change on the way; on this machine, as Slurm's login node is."""
    with servers.slurm_cluster(monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(submit, "ROOM", 1 << 60)
            with pytest.raises(UserError, match="the disk of that machine is too full: .* are to be sent"):
                send("slurm")
        with monkeypatch.context() as patch:
            patch.setattr(package._Hashing, "digest", "0" * 64)
            with pytest.raises(RunFailure, match="checksums? did NOT match"):
                send("slurm")
        with pytest.raises(UserError, match="sbatch refuses the job .*artition"):
            send("slurm", "--sbatch", "partition=none")
    assert not list((tmp_path / "there, 那里 'x'").iterdir()) and not handle.load_all()


def test_an_empty_list_names_the_command_that_fills_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    assert (
        call("remote")
        == "there are no jobs on other machines yet; `lora-fp8 submit CONFIG --to ssh:HOST` sends a training\n"
    )
    assert json.loads(call("remote", "--json")) == []


def test_a_connection_that_is_lost_at_the_start_deletes_no_job(
    job: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be running by then, and also if the command is killed."""
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    removed: list[str] = []
    ends: dict[str, BaseException] = {
        "ssh": machine.Disconnected("the network is gone"),
        "slurm": machine.Disconnected("the network is gone"),
        "killed": KeyboardInterrupt("the network is gone"),
        "refused": UserError("the network is gone"),
    }

    def start(job: handle.Handle, *_: object) -> None:
        raise ends[job.name]

    monkeypatch.setattr(submit, "prepare_remote_folder", lambda *_: str(tmp_path))
    monkeypatch.setattr(submit, "send", lambda *_: None)
    monkeypatch.setattr(control, "start", start)
    monkeypatch.setattr(control, "remove", lambda _, folder: removed.append(folder))
    for name, error in ends.items():
        sent = package.Package(name, "runs/x", job(f"name={name}"))
        kind = "ssh" if name == "ssh" else "slurm"
        to, resources = machine.Target(kind, "host"), script.RemoteJob(name, "runs/x", kind)
        with pytest.raises(type(error), match="the network is gone"):
            submit.submit(submit.Plan(to, resources, sent, "~/jobs", tmp_path / "runs" / name))
    assert removed == [f"{tmp_path}/refused"]
    assert sorted(kept.name for kept in handle.load_all()) == ["killed", "slurm", "ssh"]

    # Nor does a job stay there that cannot be remembered here.
    (tmp_path / "file").touch()
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "file"))
    sent = package.Package("full", "runs/x", job("name=full"))
    plan = submit.Plan(
        machine.Target("ssh", "host"), script.RemoteJob("full", "runs/x", "ssh"), sent, "~/jobs", tmp_path
    )
    with pytest.raises(UserError, match="handle.json: the file cannot be written"):
        submit.submit(plan)
    assert removed[1:] == [f"{tmp_path}/full"]


def test_what_is_packed(job: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree_hash: Callable) -> None:
    """Captions, edits and what links lead to go along; hidden files do not. Nothing of the user's changes."""
    photos, base = tmp_path / "照片 'x'", tmp_path / "base"
    (photos / "inner").mkdir(parents=True)
    base.mkdir()
    for name in ("a.png", "a.txt", "inner/b.png", ".lora_fp8_images.toml", ".hidden", "line\nbreak.txt", "back\\slash"):
        (photos / name).write_text(name, encoding="utf-8")
    (photos / "link.png").symlink_to("a.png")
    (base / "weights").write_bytes(b"0" * 100)
    monkeypatch.setattr(package, "SMALL", 99)
    given = job(f"dataset.folders=[{{path={json.dumps(str(photos))}}}]", f"model.path={json.dumps(str(base))}")
    before = tree_hash(tmp_path)
    packed = package.pack(given)
    assert tree_hash(tmp_path) == before
    sent = {name.removeprefix("data/1/照片 'x'/") for name in packed.files}
    assert sent == {
        "a.png",
        "a.txt",
        "inner/b.png",
        ".lora_fp8_images.toml",
        "line\nbreak.txt",
        "back\\slash",
        "link.png",
    }
    assert packed.needed == (str(base),) and packed.job.model.path == str(base)
    there = config.loads(packed.render_config("/there"))
    assert there.dataset.folders[0].path == "/there/data/1/照片 'x'"
    assert (there.output_dir, there.name) == ("/there/runs", given.name)
    assert package.pack(given, package.Options(send_base=True)).files["data/1/base/weights"] == base / "weights"
    assert package.pack(given, package.Options(base="/models/x")).job.model.path == "/models/x"

    archive = io.BytesIO()
    package.write_archive(archive, packed, {"config.toml": packed.render_config()})
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", "-", "-C", str(unpacked)], input=archive.getvalue(), check=True)
    subprocess.run(["sha256sum", "--quiet", "-c", package.MANIFEST], cwd=unpacked, check=True)
    assert not (unpacked / "data/1/照片 'x'/link.png").is_symlink()


def test_what_would_be_submitted_is_shown(job: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dry-run and --write: whole scripts, and nothing is sent. A task for SkyPilot is launched from a folder here."""
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    file, written = tmp_path / "a b.toml", tmp_path / "job.sbatch"
    file.write_text(config.dumps(job(f"name={json.dumps(NAME)}", "train.batch_size=8")), encoding="utf-8")
    nodes = ("--nodes", "2", "--gpus-per-node", "4", "--time", "12:00:00", "--sbatch", "partition=gpu")
    call("submit", str(file), "--to", "slurm:login", *nodes, "--write", str(written))
    text = written.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(written)], check=True)
    for line in ("nodes=2", "gres=gpu:4", "time=12:00:00", "partition=gpu", "requeue", "signal=B:TERM@120"):
        assert f"#SBATCH --{line}\n" in text
    assert (
        "--kill-on-bad-exit=1 torchrun --nproc-per-node=4 --nnodes=" in text and 'rdzv-endpoint="$head:$port"' in text
    )
    assert call("submit", str(file), "--to", "slurm", *nodes, "--dry-run").endswith(text)
    with pytest.raises(UserError, match="exists already"):
        call("submit", str(file), "--to", "slurm", "--write", str(written))
    assert not (tmp_path / "home").exists()

    # `sky` notes its arguments; scripts/check_sky_task.py shows the task to the parser of SkyPilot itself.
    program = tmp_path / "bin" / "sky"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/words"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    options = ("--accelerator", "L40S", "--install", "pip install x", "--env", "HF_TOKEN", "--setup", "true")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UserError, match="environment variable HF_TOKEN"):
        call("submit", str(file), "--to", "sky", *options)
    assert not (tmp_path / "words").exists(), "a machine costs money"
    monkeypatch.setenv("HF_TOKEN", "hf_value")
    call("submit", str(file), "--to", "sky", *options)
    words = (tmp_path / "words").read_text(encoding="utf-8").split("\n")
    assert words[:5] == ["launch", "--yes", "--detach-run", "--cluster", script.make_cluster_name(NAME)]
    assert words[5:7] == ["--secret", "HF_TOKEN"]
    task = yaml.safe_load(Path(words[7]).read_text(encoding="utf-8"))
    assert task["resources"] == {"accelerators": "L40S:1"} and task["setup"] == "pip install x\n"
    folder = Path(task["workdir"])
    assert config.load(folder / "config.toml").dataset.folders[0].path.startswith("data/")
    assert (folder / "job.sh").exists() and any((folder / "data").rglob("a.png"))
    job_there = handle.load(NAME)
    assert (job_there.kind, job_there.address, job_there.folder) == ("sky", words[4], "~/sky_workdir")


def test_no_two_jobs_get_one_machine_of_skypilot() -> None:
    """Its name is the job's as far as it can be: jobs on one machine would have one folder there."""
    assert script.make_cluster_name("zibo-2") == "lora-zibo-2"
    alike = ("小猫", "小狗", "My Job", "my job", "my-job", "a" * 31, "a" * 30 + "b", "it's", NAME)
    names = {script.make_cluster_name(name) for name in alike}
    assert len(names) == len(alike) and all(re.fullmatch("lora-[a-z0-9-]{1,40}", name) for name in names)


# ---------------------------------------------------------------------------------------------------------------------
# The script, and what comes back


def local_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str = "") -> handle.Handle:
    """A job folder on this machine, without Slurm, with a run in it."""
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    folder = tmp_path / "job"
    run = Run.create(folder / "runs" / "x", "")
    run.log_event("start")
    run.close()
    (folder / machine.MARKER).touch()
    text = script.render(script.RemoteJob("x", "runs/x", "ssh", gpus=0, setup=(setup,)))
    (folder / script.JOB).write_text(text, encoding="utf-8")
    made = handle.Handle("x", "ssh", "", str(folder), "runs/x", str(tmp_path / "here" / "x"))
    handle.save(made)
    return made


@pytest.mark.parametrize("size", ["many", "", "9" * 5000])
def test_a_list_of_files_that_cannot_be_read_is_said(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = f"{size} ./config.toml\0\n{'0' * 64}  ./config.toml\0".encode()
    monkeypatch.setattr(machine.Machine, "run", lambda self, script: machine.Answer(0, listed, ""))
    job = handle.Handle("x", "ssh", "", str(tmp_path), "runs/x", str(tmp_path / "here"))
    with pytest.raises(RunFailure, match="list of the run's files cannot be read"):
        fetch._list(job)


def test_a_job_that_is_killed_or_stopped_early_can_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state comes from the lock: a power cut leaves "lost", a stop before the trainer listens is a stop."""
    setup = 'echo "$$" >> starts; lora-fp8() { echo "$@" >> words; exec sleep 1000; }'
    job = local_job(tmp_path, monkeypatch, setup.replace("exec sleep", "sleep"))
    text = (tmp_path / "job" / script.JOB).read_text(encoding="utf-8").replace("exec lora-fp8", "lora-fp8")
    (tmp_path / "job" / script.JOB).write_text(text, encoding="utf-8")
    words = tmp_path / "job" / "words"
    assert control.fetch_view(job).state == "lost"
    control.start(job)
    wait_until(words.exists)
    assert not control.fetch_view(job).has_ended
    with pytest.raises(UserError, match="has not ended"):
        control.resume(job)
    pid = int((tmp_path / "job" / "pid").read_text())
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    wait_until(lambda: control.fetch_view(job).state == "lost", lambda: control.fetch_view(job))
    (tmp_path / "job/runs/x/checkpoints/step-000002").mkdir(parents=True)
    control.resume(job)
    wait_until(lambda: len(words.read_text().splitlines()) == 2)
    assert words.read_text().splitlines() == ["train config.toml", "resume runs/x"]
    group = os.getpgid(int((tmp_path / "job" / "pid").read_text()))
    control.cancel(job)
    try:
        wait_until(lambda: (tmp_path / "job" / "exit").exists())
        assert (tmp_path / "job" / "exit").read_text() == "75\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    wait_until(lambda: control.fetch_view(job).state == "stopped", lambda: control.fetch_view(job))
    with pytest.raises(UserError, match="is not running: stopped"):
        control.cancel(job)


def test_a_job_on_a_rented_machine_does_not_resume_the_run_of_an_earlier_one(tmp_path: Path) -> None:
    """SkyPilot sends a job of the same name, submitted again with another config, into the same folder."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "lora-fp8"
    program.write_text('#!/bin/sh\necho "$@" >> words\nmkdir -p runs/x/checkpoints/step-000002\nexit 75\n', "utf-8")
    program.chmod(0o755)
    job = script.RemoteJob("x", "runs/x", "sky", gpus=0, install=("true",), setup=("PATH=$PWD/bin:$PATH",))
    (tmp_path / script.JOB).write_text(script.render(job), encoding="utf-8")

    def run() -> tuple[int, str]:
        done = subprocess.run(["bash", script.JOB], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
        return done.returncode, done.stderr

    marker = tmp_path / machine.MARKER
    marker.write_text("x\n1\n", encoding="utf-8")
    assert [run(), run()] == [(75, ""), (75, "")]  # the second time it is resumed
    marker.write_text("x\n2\n", encoding="utf-8")
    for _ in range(2):
        code, said = run()
        assert code == 2 and "the run of an earlier job is here" in said
        assert (tmp_path / "exit").read_text(encoding="utf-8") == "2\n"
    assert (tmp_path / "words").read_text(encoding="utf-8") == "train config.toml\nresume runs/x\n"


@pytest.fixture
def waiting_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> handle.Handle:
    """A job of Slurm that is not submitted yet; sbatch, squeue and scancel are those of a cluster in which it waits."""
    job = handle.update(local_job(tmp_path, monkeypatch), kind="slurm")
    (tmp_path / "bin").mkdir()
    for name, lines in {
        "sbatch": "echo PENDING > queue; echo '7;cluster'",
        "squeue": 'case "$*" in *--jobs=7*) cat queue && exit ;; esac; echo Invalid job id >&2; exit 1',
        "scancel": '[ "$*" = 7 ] && rm queue',
    }.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/sh\ncd '{tmp_path}'\n{lines}\n", encoding="utf-8")
        file.chmod(0o755)
    (tmp_path / ".bash_profile").write_text(f"PATH='{tmp_path}/bin':$PATH\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    return job


def test_a_job_that_is_cancelled_in_the_queue_was_stopped(waiting_job: handle.Handle, tmp_path: Path) -> None:
    job = control.start(waiting_job)
    assert job.slurm == "7" and handle.load("x").slurm == "7"
    assert control.fetch_view(job).state == "waiting"
    control.cancel(job)
    assert not (tmp_path / "queue").exists()
    view = control.fetch_view(job)
    assert view.state == "stopped" and view.exit_code == 75, view


def test_a_job_whose_number_did_not_arrive_is_found(
    waiting_job: handle.Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost once sbatch has taken the job."""
    real = machine.Machine.run

    def run(self: machine.Machine, text: str, **options: Any) -> machine.Answer:
        real(self, text, **options)
        raise machine.Disconnected("the network is gone")

    assert control.fetch_view(waiting_job).state == "lost"
    with monkeypatch.context() as patch, pytest.raises(machine.Disconnected):
        patch.setattr(machine.Machine, "run", run)
        control.start(waiting_job)
    job = handle.load("x")
    assert job.slurm == "" and control.fetch_view(job).state == "waiting"
    with pytest.raises(UserError, match="has not ended"):
        control.resume(job)
    control.cancel(job)
    assert not (tmp_path / "queue").exists()


def test_each_event_is_reported_once_though_the_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real, lost = local_job(tmp_path, monkeypatch), machine.Machine.run, []

    def run(self: machine.Machine, text: str, **options: Any) -> machine.Answer:
        answer = real(self, text, **options)
        if "take" in options and not lost:
            with (tmp_path / "job/runs/x/events.jsonl").open("a", encoding="utf-8") as log:
                log.write('{"event": "step", "step": 1}\n')
            raise machine.Disconnected("the network is gone")
        return answer

    monkeypatch.setattr(machine.Machine, "run", run)
    monkeypatch.setattr(control, "RETRY_SECONDS", 0)
    events: list[dict[str, Any]] = []
    control.follow(job, events.append, lost.append)
    assert [event["event"] for event in events] == ["start", "step"] and lost == ["the network is gone"]


def test_a_job_that_is_started_again_gets_the_variables_that_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values of today. Their names are remembered, the values are in no file."""
    job, real, sent = local_job(tmp_path, monkeypatch, "lora-fp8() { true; }"), machine.Machine.run, []
    file = tmp_path / "job" / script.JOB
    file.write_text(file.read_text(encoding="utf-8").replace("exec lora-fp8", "lora-fp8"), encoding="utf-8")

    def run(self: machine.Machine, text: str, **options: Any) -> machine.Answer:
        if "give" in options:
            options["give"](given := io.BytesIO())
            sent.append(given.getvalue())
        return real(self, text, **options)

    def resume(*names: str) -> bytes:
        (tmp_path / "job" / "exit").unlink(missing_ok=True)  # as if it had not ended by itself
        control.resume(handle.load("x"), names)
        wait_until((tmp_path / "job" / "exit").exists)
        return sent.pop()

    monkeypatch.setattr(machine.Machine, "run", run)
    handle.update(job, secrets=("WORD",))
    with pytest.raises(
        UserError, match=r"the job needs the environment variable WORD of this machine \(--env\), which is not set here"
    ):
        resume()
    monkeypatch.setenv("WORD", "old-value")
    monkeypatch.setenv("OTHER", "other-value")
    assert resume() == b"WORD=old-value\0"
    monkeypatch.setenv("WORD", "new-value")
    assert resume() == b"WORD=new-value\0"
    assert resume("OTHER") == b"OTHER=other-value\0" == resume()
    kept = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert kept and not any(b"-value" in path.read_bytes() for path in kept)


def test_whoever_asks_for_a_job_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking holds the lock for a moment: a job that starts then waits, and another who asks sees no job."""
    job = local_job(tmp_path, monkeypatch, "PATH=$PWD/bin:$PATH")
    folder = tmp_path / "job"
    (folder / "bin").mkdir()
    (folder / "bin" / "lora-fp8").symlink_to("/bin/true")
    asks = next(line for line in control._make_alive_script(job).split("||") if "flock" in line).split()[:-1]
    with subprocess.Popen([*asks, "sleep", "1"], cwd=folder) as asking:
        wait_until((folder / "job.lock").exists)
        assert control.fetch_view(job).state == "lost"
        started = subprocess.run(["bash", script.JOB], cwd=folder, capture_output=True, encoding="utf-8", check=False)
        assert started.returncode == 0, started.stderr
        assert asking.wait() == 0
    assert control.fetch_view(job).state == "done"


def write_slurm_job(folder: Path, **commands: str) -> dict[str, str]:
    """Write job.sh and stand-ins for Slurm's commands. Returns the environment that it runs in."""
    for name, lines in commands.items():
        (folder / "bin" / name).parent.mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    (folder / "job.sh").write_text(script.render(script.RemoteJob("x", "runs/x", "slurm")), encoding="utf-8")
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}


@pytest.mark.parametrize(
    ("meanwhile", "restarts", "is_queued"),
    [
        ("kill -TERM $PPID; sleep 0.2", 0, True),  # its node is needed
        ("kill -TERM $PPID; sleep 0.2; mkdir -p runs/x/control; touch runs/x/control/stop", 0, True),
        ("mkdir -p runs/x/control; touch runs/x/control/stop", 0, False),  # a person asked the run to stop
        ("touch cancel; kill -TERM $PPID; sleep 0.2", 0, False),
        ("kill -TERM $PPID; sleep 0.2", script.RESTARTS, False),
    ],
    ids=["preempted", "preempted and asked to stop", "stopped", "cancelled", "preempted too often"],
)
def test_a_job_that_did_not_end_by_itself_is_queued_again(
    tmp_path: Path, meanwhile: str, restarts: int, is_queued: bool
) -> None:
    env = write_slurm_job(tmp_path, srun=f"{meanwhile}\nexit 75", scontrol='echo "$@" >> requeued', scancel="exit 0")
    env["SLURM_RESTART_COUNT"] = str(restarts)
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, check=False).returncode == 75
    requeued = tmp_path / "requeued"
    assert (requeued.read_text(encoding="utf-8") if requeued.exists() else "") == ("requeue 7\n" if is_queued else "")


def test_what_signals_a_trainer_ends_with_its_job(tmp_path: Path) -> None:
    """While Slurm requeues a job, scancel is refused and tries again: it must not reach the job's next start."""
    mark = str(tmp_path)
    env = {"MARK": mark} | write_slurm_job(
        tmp_path,
        scancel='echo "$@" >> asked\nwhile :; do sleep 1; done',
        srun="touch training\nuntil [ -e over ]; do sleep 0.1; done\nexit 75",
        scontrol='echo "$@" >> requeued',
    )
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env)
    wait_until((tmp_path / "training").exists)
    for count in (1, 2):  # of the user and of Slurm
        job.send_signal(signal.SIGTERM)
        wait_until((tmp_path / "asked").exists)
        assert job.poll() is None, count
    (tmp_path / "over").touch()
    assert job.wait() == 75
    assert (tmp_path / "requeued").read_text(encoding="utf-8") == "requeue 7\n"

    def find_left() -> list[psutil.Process]:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                left += [process] if process.environ().get("MARK") == mark else []
        return left

    try:
        wait_until(lambda: not find_left(), find_left)
    finally:
        for process in find_left():
            process.kill()
    assert set((tmp_path / "asked").read_text(encoding="utf-8").splitlines()) == {"--signal=TERM 7"}


def test_a_run_is_fetched_into_its_own_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree_hash: Callable
) -> None:
    job = local_job(tmp_path, monkeypatch)
    there, here = tmp_path / "job/runs/x", tmp_path / "here/x"
    (tmp_path / "job/exit").write_text("0", encoding="utf-8")
    for name in ("export/a_kohya.safetensors", "samples/step-000002-0.png", "verify.json", "mine.txt"):
        (there / name).write_text(name, encoding="utf-8")
    (there / "export/b_kohya.safetensors").symlink_to("/etc/passwd")

    here.mkdir(parents=True)
    (here / "photo.png").write_text("mine", encoding="utf-8")
    before = tree_hash(tmp_path / "here")
    with pytest.raises(UserError, match="needs a new or empty folder"):
        fetch.fetch(job)
    (here / "photo.png").unlink()
    other = Run.create(here, "")
    other.close()
    with pytest.raises(UserError, match="the folder of another run"):
        fetch.fetch(job)
    assert before.keys() == {"x/photo.png"} and not (here / "verify.json").exists()
    ownership.remove(here)

    result = fetch.fetch(job)
    assert result.left == ["mine.txt"] and result.files == 6
    assert (here / "verify.json").read_text(encoding="utf-8") == "verify.json"
    assert not os.path.lexists(here / "export/b_kohya.safetensors") and not (here / "mine.txt").exists()
    assert sorted(path.name for path in here.parent.iterdir()) == ["x"]

    job = handle.load("x")
    (here / "notes.txt").write_text("mine", encoding="utf-8")
    (there / "verify.json").write_text("newer", encoding="utf-8")
    assert fetch.fetch(job).files == 1 and (here / "verify.json").read_text(encoding="utf-8") == "newer"
    job = handle.load("x")
    (there / "verify.json").write_text("newest", encoding="utf-8")
    (here / "verify.json").write_text("changed by me", encoding="utf-8")
    with pytest.raises(UserError, match="verify.json changed on both machines"):
        fetch.fetch(job)
    (here / "verify.json").unlink()
    (here / "samples/step-000002-0.png").unlink()
    (here / "samples").rmdir()
    (here / "samples").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UserError, match="parts of the run folder are links"):
        fetch.fetch(job)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (here / "notes.txt").read_text(encoding="utf-8") == "mine"


def hostile(name: str, data: bytes = b"good", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for key, value in fields.items():
        setattr(entry, key, value)
    return entry, data


GOOD = "export/a_kohya.safetensors"
ARCHIVES = {
    "above": [hostile("../evil")],
    "absolute": [hostile("/tmp/evil")],
    "through a link": [hostile("export", b"", type=tarfile.SYMTYPE, linkname="/tmp"), hostile(GOOD)],
    "a link with a good name": [hostile(GOOD, b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a hard link": [hostile(GOOD, b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a pipe": [hostile(GOOD, b"", type=tarfile.FIFOTYPE)],
    "a device": [hostile(GOOD, b"", type=tarfile.CHRTYPE)],
    "a folder": [hostile(GOOD, b"", type=tarfile.DIRTYPE)],
    "twice": [hostile(GOOD), hostile(GOOD)],
    "another name": [hostile("export/b_kohya.safetensors")],
    "larger": [hostile(GOOD, b"good and more")],
    "other bytes": [hostile(GOOD, b"evil")],
}


@pytest.mark.parametrize("fetched_again", [False, True])
@pytest.mark.parametrize("end", ["sync_folder", "_move"])
def test_a_fetch_that_is_killed_is_no_change_of_the_users(
    end: str, fetched_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are there, or some of them, and are not remembered yet; then the job goes on, and changes its own."""
    job = local_job(tmp_path, monkeypatch)
    there, here = tmp_path / "job/runs/x", tmp_path / "here/x"
    (tmp_path / "job/exit").write_text("75", encoding="utf-8")
    (there / "verify.json").write_text("first", encoding="utf-8")
    if end == "_move":
        fetch.fetch(job)
        (there / "verify.json").write_text("second", encoding="utf-8")
    real = getattr(fetch, end)

    def killed(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, end, killed)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch(handle.load("x"))
    if fetched_again:  # before there is anything new
        assert fetch.fetch(handle.load("x")).size < 1000, "the config, which has the paths of this machine"
    (there / "verify.json").write_text("newer", encoding="utf-8")
    assert fetch.fetch(handle.load("x")).files == 1 and (here / "verify.json").read_text(encoding="utf-8") == "newer"
    assert not any(name.startswith("coming/") for name in handle.load("x").fetched)
    assert [path.name for path in here.parent.iterdir()] == ["x"]
    (here / "verify.json").write_text("mine", encoding="utf-8")
    (there / "verify.json").write_text("newest", encoding="utf-8")
    with pytest.raises(UserError, match="verify.json changed on both machines"):
        fetch.fetch(handle.load("x"))


@pytest.mark.parametrize("then", ["fetch", "delete"])
def test_what_a_killed_fetch_left_is_deleted(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next fetch of the job, or when it is forgotten; what another job's fetch collects stays."""
    job = local_job(tmp_path, monkeypatch)
    (tmp_path / "job/exit").write_text("0", encoding="utf-8")
    others = handle.update(job, name="y", folder=job.folder + "2").arrivals
    for left in (job.arrivals, others):
        (left / "export").mkdir(parents=True)
        (left / "export/a_kohya.safetensors").write_text("half", encoding="utf-8")
    if then == "fetch":
        fetch.fetch(job)
        assert (tmp_path / "here/x" / ownership.MARKER).is_file()
    else:
        control.delete(job, there=False)
        assert not (tmp_path / "home/remote/x").exists()
    assert not job.arrivals.exists() and (others / "export/a_kohya.safetensors").is_file()


def test_a_run_is_fetched_by_one_command_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = local_job(tmp_path, monkeypatch)
    (tmp_path / "job/exit").write_text("0", encoding="utf-8")
    with open(tmp_path / "home/remote/x" / handle.FETCH_LOCK, "ab") as lock:
        assert try_lock(lock)
        with pytest.raises(UserError, match="already fetching x"):
            fetch.fetch(job)
    assert not (tmp_path / "here").exists()
    fetch.fetch(job)


def test_a_run_with_the_longest_name_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system takes 255 bytes, which are 85 Chinese characters."""
    job = local_job(tmp_path, monkeypatch)
    (tmp_path / "job/exit").write_text("0", encoding="utf-8")
    here = tmp_path / "here" / ("猫" * 85)
    fetch.fetch(handle.update(job, output=str(here)))
    assert ownership.MARKER in os.listdir(here) and os.listdir(here.parent) == [here.name]


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_hostile_archive_is_refused(kind: str, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry, data in ARCHIVES[kind]:
            tar.addfile(entry, io.BytesIO(data))
    archive.seek(0)
    inside = tmp_path / "inside"
    inside.mkdir()
    wanted = {GOOD: fetch.Entry(4, hashlib.sha256(b"good").hexdigest())}
    with pytest.raises(RunFailure, match="was not requested|arrived damaged"):
        fetch.unpack(archive, wanted, inside, set())
    assert [path.name for path in tmp_path.iterdir()] == ["inside"] and not Path("/tmp/evil").exists()
    assert not any(path.is_symlink() for path in inside.rglob("*"))
