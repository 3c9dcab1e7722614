"""A person's project folder survives every command and every button that could be pointed at it, byte for byte.

The project looks as much like a run folder as a person's folder may: settings, a log, `control/` with control pictures
and a file named stop, folders named checkpoints, samples and export, hidden files, and links to inside and outside. A
received run folder has links where its own folders should be. What is there is compared whole after each call: bytes,
rights and targets of links. Only where a command is asked to make something new may names be added.
"""

import fcntl
import inspect
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from lora_fp8 import cli, config, jobs, settings, train
from lora_fp8.errors import RunFailure, Stopped, UserError
from lora_fp8.jobs.remote import handle
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run
from webui import image_folders, run_monitor, submission
from webui.context import Place, Ui

SETTINGS = """# my settings; comments are mine, too
name = "project"
output_dir = "{work}"
[model]
family = "sd15"
path = "demo"
[dataset]
cache_dir = "{work}/cache"
resolution = 64
[[dataset.folders]]
path = "{work}/project/photos"
[train]
steps = 2
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are started in, with a project and a received run in it."""
    work = tmp_path / "data"
    project, outside = work / "project", tmp_path / "outside"
    texts = ("events.jsonl", "status.json", "lock", "log.txt", "verify.json", ".notes.tmp", ".config.toml.17.tmp")
    texts += ("control/stop", "control/notes", "checkpoints/weights", "checkpoints/step-000002/state.json")
    texts += ("checkpoints/.tmp-step-000004-17/x", "samples/contact_sheet.png", "latents/ab/.notes.tmp")
    texts += ("demo-sd15/notes", "export/notes", "photos/a.txt", "photos/b.txt", "README.md")
    for place in (*(project / name for name in texts), *(outside / name for name in ("stop", ".tmp-step-000002-1/x"))):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"mine: {place.name}\n", encoding="utf-8")
    for name in ("photos/a.png", "photos/b.jpg", "control/a.png", "samples/step-000000-0.png"):
        Image.new("RGB", (64, 64), "red").save(project / name)
    layer = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    halves = {f"{layer}.lora_A.weight": torch.ones(4, 320), f"{layer}.lora_B.weight": torch.ones(320, 4)}
    safetensors_file.write_file(project / "export/mine_diffusers.safetensors", halves, {})
    (project / "config.toml").write_text(SETTINGS.format(work=work), encoding="utf-8")
    (project / "README.md").chmod(0o444)
    (project / "photos/a.txt").chmod(0o600)
    (project / "inner").symlink_to("photos/a.png")
    (project / "outer").symlink_to(outside)
    (project / "nowhere").symlink_to(outside / "absent")
    os.utime(project / "latents/ab/.notes.tmp", (0, 0))

    received = Run.create(work / "received", SETTINGS.format(work=work).replace('"project"', '"received"'))
    received.log_event("start")
    received.close()
    for name in ("control", "checkpoints"):
        (received.path / name).rmdir()
        (received.path / name).symlink_to(outside)
    monkeypatch.chdir(work)
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    return work


def snapshot(work: Path) -> dict[str, tuple[int, str, bytes]]:
    """Name -> rights, target of a link, content; of project, received run and what lies outside."""
    found = {}
    for top in (work / "project", work / "received", work.parent / "outside"):
        for place, folders, files in os.walk(top):
            for path in (Path(place), *(Path(place, name) for name in (*folders, *files))):
                mode = os.lstat(path).st_mode
                target = os.readlink(path) if stat.S_ISLNK(mode) else ""
                found[str(path)] = (mode, target, path.read_bytes() if stat.S_ISREG(mode) else b"")
    return found


def compare(before: dict[str, Any], work: Path, new: str = "(?!)") -> None:
    """All is as before, but for names below the project that fit `new`."""
    after = snapshot(work)
    assert [name for name, what in before.items() if after.get(name) != what] == []
    added = [str(Path(name).relative_to(work)) for name in after if name not in before]
    assert [name for name in added if not re.fullmatch(new, name)] == []


P, R = "project", "received"
LORA = "project/export/mine_diffusers.safetensors"
CASES: dict[str, list[list[str]]] = {
    "new": [["project/config.toml"], ["project"], ["project/.notes.tmp"], ["project/nowhere"]],
    "check": [["project/config.toml"], ["project/config.toml", "--set", "name=received"]],
    "import-config": [["project/config.toml", "--output", "project/config.toml"], [P, "--output", "project/nowhere"]],
    "plan": [["project/config.toml"]],
    "doctor": [[]],
    "download": [["project"], ["project/config.toml"]],
    "recipes": [[], ["sd15"]],
    "estimate": [["project/config.toml"], ["project/config.toml", "--set", "name=received"]],
    "timesteps": [["project/config.toml"]],
    "lr-find": [
        [
            "project/config.toml",
            "--steps",
            "60",
            "--set",
            "dataset.cache_dir=project",
            "--set",
            "adapter.targets=['to_q']",
        ]
    ],
    "report": [[P], [R], *([folder, "--output", to] for folder in (P, R) for to in ("project/config.toml", LORA, P))],
    "precision": [["project/config.toml", "--pictures", "1", "--layers-only", "--set", "dataset.cache_dir=project"]],
    "train": [["project/config.toml"], ["project/config.toml", "--set", "name=received"]],
    "resume": [[P], [R], ["project/checkpoints"], [P, "--set", "train.steps=4"]],
    "export": [[P], [R], [P, "--kit", P], [R, "--kit", P], [P, "--preview-metadata"]],
    "verify": [[LORA], [P]],
    "inspect": [[LORA], [P]],
    "convert": [[LORA, "--format", "kohya", "--family", "sd15", "--output", to] for to in (LORA, P, "project/lock")],
    "resize": [[LORA, "--rank", "2", "--output", to] for to in (LORA, P, "project/lock")],
    "merge": [[f"{LORA}:1", f"{LORA}:1", "--output", to] for to in (LORA, P)]
    + [[f"{LORA}:1", "--into", "project", "--family", "sd15", "--output", "project"]],
    "extract": [["project", "project", "--family", "sd15", "--output", LORA]],
    "average": [[P], [R], [LORA, LORA, "--output", LORA]],
    "draw": [[P, "--out", P], [LORA, "--out", P], [LORA, "--out", "project/photos"], [LORA, "--out", R]],
    "kit": [[P, "--out", P], [R, "--out", P], [LORA, "--out", P], [LORA, "--out", "project/photos"]],
    "push": [
        [P, "owner/name"],
        [R, "owner/name", "--check"],
        [LORA, "owner/name"],
        ["project/photos", "x", "--update"],
    ],
    "cache": [[P], [P, "--prune-unused-days", "1"], [R, "--prune-unused-days", "1"], [P, "--limit", "0"]],
    "caption": [[P, "--model", "project"], ["project/photos", "--model", "project/photos", "--overwrite"]],
    "demo": [["--out", P]],
    "submit": [["project/config.toml", "--no-worker"], [P, "--no-worker"], [R, "--no-worker"]]
    + [["project/config.toml", "--to", "slurm", "--write", to] for to in ("project/config.toml", "project/lock", P)],
    "stop": [[P], [R], ["1"], ["2"]],
    "remote": [[]],
    "remote status": [[P], [R]],
    "remote follow": [[P], [R]],
    "remote fetch": [[P], [R]],
    "remote cancel": [[P], [R]],
    "remote resume": [[P], [R]],
    "remote delete": [[R, "--there"], [P, "--there"], [P]],
    "worker": [["--idle", "0"]],
    "dataset look": [[P], ["project/config.toml"]],
    "dataset edit": [[P, "--set", "x", "--dry-run"], ["project/photos", "--remove-tag", "absent"]],
    "dataset images": [
        [P],
        [P, "--only", "absent*", "--exclude"],
        ["project/photos", "--only", "absent*", "--exclude"],
    ],
    "dataset import": [[P], [P, "project/photos"], ["project/photos"], ["project/config.toml", P], [R, R]],
    "dataset undo": [[P], ["project/photos"]],
    "dataset redo": [[P], ["project/photos"]],
    "dataset repair": [[P], ["project/photos"]],
    "dataset history": [[P], ["project/photos"]],
    "jobs": [["--runs", "."], ["--runs", P], ["--rescue"]],
    "jobs show": [[P], [R], ["1"], ["2"]],
    "jobs run": [["export", "--no-worker", "--", P]],
    "jobs cancel": [["1"], ["2"]],
    "jobs requeue": [["1", "--no-worker"], ["2", "--no-worker"]],
    "jobs rerun": [["1", "--no-worker"]],
    "jobs clone": [["1", "--no-worker", "--set", "name=project"], ["2", "--no-worker", "--set", "name=received"]],
    "jobs move": [["1", "1"]],
    "jobs delete": [["1", "--with-run"], ["1"]],
}
"""Each command in the ways that could hit a project. Jobs 1 and 2 have project and received run as their folders."""
MAY_ADD = {"demo": r"project/(demo-sd15-2|cache)(/.*)?", "precision": r"project/(latents|conds)(/.*)?"}
MAY_ADD |= {
    "lr-find": MAY_ADD["precision"],
    "report": r"(project|received)/report\.html",
}  # where it says that it writes
REFUSED = ("train", "resume", "submit", "remote fetch", "remote resume")
SERVERS = ("ui", "mcp")
"""What these serve is in test_users_files_page.py, function by function."""


def commands() -> Iterator[str]:
    def below(group: Any, path: str) -> Iterator[str]:
        for name, command in group.commands.items():
            if not hasattr(command, "commands"):
                yield path + name
                continue
            if command.invoke_without_command:
                yield path + name
            yield from below(command, f"{path}{name} ")

    return below(typer.main.get_command(cli.app), "")


def test_every_command_has_its_cases() -> None:
    """A new command is held against a project, too, or is one that only serves."""
    assert set(commands()) == {*CASES, *SERVERS}


ENDED = '{"key": "stopped_early", "args": {}}'


def queued(work: Path) -> jobs.Queue:
    """Jobs 1 and 2 have ended, and their folders are a person's now."""
    queue = jobs.Queue()
    for name in (P, R):
        id = queue.submit(SETTINGS.format(work=work).replace('"project"', f'"{name}-job"'))
        queue.store.update(id, folder=str(work / name), phase="ended", state="stopped", attempts=1, sentence=ENDED)
    return queue


def sent(work: Path) -> None:
    """Jobs on other machines whose files would come into the two folders; that of the second has moved away there."""
    there = work.parent / "there"
    run = Run.create(there / "runs" / P, SETTINGS.format(work=work))
    run.close()
    for name, text in {".lora-fp8-job": "", "exit": "0"}.items():
        (there / name).write_text(text, encoding="utf-8")
    for name, folder in ((P, there), (R, work / R)):
        handle.save(handle.Handle(name, "ssh", "", str(folder), f"runs/{P}", str(work / name)))


@pytest.mark.parametrize("command", CASES)
def test_a_project_survives(command: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command in ("stop", "worker") or command.startswith("jobs"):
        queue = queued(work)
        if command == "worker":
            queue.requeue(1), queue.requeue(2)
    if command.startswith("remote"):
        sent(work)
    if command == "demo":

        def begin(job: settings.Job, **_: Any) -> None:
            with_marker = Run.create(job.run_folder, config.dumps(job))
            with_marker.close()
            raise Stopped("here")

        monkeypatch.setattr(train, "run", begin)
    before = snapshot(work)
    with open(work / "project/lock", "rb") as held:
        if command == "stop":  # it looks as if somebody trains there
            fcntl.flock(held, fcntl.LOCK_EX)
        for arguments in CASES[command]:
            result = CliRunner().invoke(cli.app, [*command.split(), *arguments])
            expected = (SystemExit, UserError, RunFailure, Stopped, OSError, type(None))
            assert isinstance(result.exception, expected), (arguments, result.exception)
            compare(before, work, MAY_ADD.get(command, "(?!)"))
            if command in REFUSED or (command == "kit" and "--out" in arguments):
                assert isinstance(result.exception, UserError), (arguments, result.output)
            if command in ("check", "estimate", "train", "submit") and arguments[0] == "project/config.toml":
                told = str(result.exception)
                assert "name=received" in arguments or "needs a new or empty folder" in told, told


def test_a_project_survives_the_page(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every button of a card, deleting, starting, and taking files in."""
    monkeypatch.setattr(jobs, "ensure_worker", lambda *_: None)
    queue = queued(work)
    ui = Ui("en", Place(queue.home, [work]))
    before = snapshot(work)
    buttons = set(
        re.findall(r'"(\w+)"', "".join(re.findall(r"do (?:==|in) .*", inspect.getsource(run_monitor.run_action))))
    )
    assert {"stop", "save", "preview", "resume", "rerun", "edit", "kill"} <= buttons
    ways = [str(work / P), str(work / R), "1", "2"]
    for do in sorted(buttons):
        for way in ways:
            try:
                run_monitor.run_action(ui, do, way)
            except UserError:
                pass
            compare(before, work)
    for name in (P, R):
        text = SETTINGS.format(work=work).replace('"project"', f'"{name}"')
        with pytest.raises(UserError):
            submission.submit_training(ui.place, text)
        compare(before, work)
    inside = queue.home / "uploads"
    inside.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), "blue").save(inside / "a.png")
    with pytest.raises(UserError, match="another file of this name"):
        image_folders.add_file(inside / "a.png", work / "project/photos", "a.png")
    image_folders.add_file(inside / "a.png", work / "project/photos", "a-new.png")
    compare(before, work, r"project/photos/a[^/]+\.png")
    before = snapshot(work)
    for way in (str(work / P), "1"):
        for with_run in (True, False):
            for typed in (P, "project-job"):
                try:
                    run_monitor.delete_job(ui, way, typed, with_run)
                except UserError:
                    pass
                compare(before, work)
