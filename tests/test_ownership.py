"""Which folders are ours: a run begins in none that holds something, and deletes only what it wrote."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from lora_fp8.common import locks, writing
from lora_fp8.errors import UserError
from lora_fp8.run import Run, disk_space, ownership
from lora_fp8.training import checkpoint

CONFIG = '[model]\nfamily = "sd15"\n'
OURS = (
    "samples/step-000000-0.png",
    "samples/step-000004-1.webp",
    "samples/contact_sheet.png",
    "export/zibo_diffusers.safetensors",
    "export/角色-best_kohya.safetensors",
    "export/step-000002/हिन्दी_kohya.safetensors",
    "export/step-000002/zibo_kohya.safetensors",
    "export/average/zibo_comfy.safetensors",
    "checkpoints/step-000002/manifest.json",
    "checkpoints/.tmp-step-000004-17/state.json",
    "control/stop",
    "log.txt",
    "log.1.txt",
    "verify.json",
    "probe.safetensors",
    ".config.toml.17.tmp",
    "export/.zibo_kohya.safetensors.17.tmp",
)
THEIRS = (
    "photo.jpg",
    ".notes.tmp",
    ".notes.txt.17.tmp",
    "control/edge_01.png",
    "samples/mine.png",
    "samples/.step-000000-0.xcf.17.tmp",
    "export/zibo.safetensors",
    "export/.zibo.17.tmp",
    "export/mine/zibo_kohya.safetensors",
    "checkpoints/notes.txt",
    "checkpoints/step-12/state.json",
    "checkpoints/step-000002/notes.txt",
    "checkpoints/.tmp-step-000004-18/notes.txt",
    "notes/config.toml",
)


def put(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")


def tree(folder: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            link = path.is_symlink()
            content = os.readlink(path) if link else "" if path.is_dir() else path.read_bytes()
            found[str(path.relative_to(folder))] = content
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_a_new_run_needs_a_folder_that_holds_nothing(tmp_path, name):
    put(tmp_path / "r", (name, "config.toml", "events.jsonl"))
    before = tree(tmp_path)
    for resume in (False, True):
        with pytest.raises(
            UserError, match=f"contains . entries: .*{name.partition('/')[0]}.*|not a run folder of this"
        ):
            Run.create(tmp_path / "r", CONFIG, resume=resume)
        assert tree(tmp_path) == before


def test_an_absent_and_an_empty_folder_are_marked(tmp_path):
    (tmp_path / "empty").mkdir()
    ids = set()
    for name in ("absent/deep", "empty"):
        Run.create(tmp_path / name, CONFIG).close()
        told = json.loads((tmp_path / name / ".lora-fp8-run").read_text(encoding="utf-8"))
        assert told["version"] == 1
        ids.add(told["id"])
        Run.create(tmp_path / name, CONFIG).close()  # a start that got nowhere can be made again
        assert json.loads((tmp_path / name / ".lora-fp8-run").read_text(encoding="utf-8")) == told
    assert len(ids) == 2


def test_a_start_takes_only_requests_and_what_was_killed_in_the_middle(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.close()
    put(run.path, (*OURS, *THEIRS))
    before = tree(run.path)
    Run.create(run.path, CONFIG, resume=True).close()
    swept = {"control/stop", ".config.toml.17.tmp", "export/.zibo_kohya.safetensors.17.tmp"}
    swept |= {"checkpoints/.tmp-step-000004-17", "checkpoints/.tmp-step-000004-17/state.json"}
    assert before.keys() - tree(run.path).keys() == swept
    assert all(before[name] == content for name, content in tree(run.path).items())


def test_deleting_takes_what_the_run_wrote_and_names_the_rest(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("start")
    run.close()
    put(run.path, OURS)
    shutil.copytree(run.path, tmp_path / "whole", ignore=lambda *_: [])
    assert ownership.remove(tmp_path / "whole") == [] and not (tmp_path / "whole").exists()

    put(run.path, THEIRS)
    (tmp_path / "outside").mkdir()
    put(tmp_path / "outside", ("a.png",))
    (run.path / "pictures").symlink_to(tmp_path / "outside")
    (run.path / "status.json").unlink()
    (run.path / "status.json").symlink_to(tmp_path / "outside/a.png")
    left = ownership.remove(run.path)
    files = {name for name in tree(run.path) if not (run.path / name).is_dir() or (run.path / name).is_symlink()}
    assert files == {*THEIRS, "pictures", "status.json"}
    named = {name.rstrip("/") for name in left}
    assert all(any(Path(name).is_relative_to(one) for one in named) for name in files)
    assert (tmp_path / "outside/a.png").read_text(encoding="utf-8") == "a.png"
    with pytest.raises(UserError, match="does not look like a run"):
        ownership.remove(run.path)  # what is left is the user's, and no run any more


def test_a_removal_that_was_interrupted_can_be_done_again(tmp_path, monkeypatch):
    Run.create(tmp_path / "r", CONFIG).close()
    put(tmp_path / "r", OURS)
    number = len([name for name in tree(tmp_path / "r") if (tmp_path / "r" / name).is_file()])
    for _ in range(number):
        done = []

        def unlink(path, missing_ok=False, done=done):
            if done:
                raise KeyboardInterrupt
            done.append(os.unlink(path))

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", unlink)
            try:
                assert ownership.remove(tmp_path / "r") == []
            except KeyboardInterrupt:
                continue
    assert not (tmp_path / "r").exists()


# -- links


@pytest.mark.parametrize(
    "name",
    ("control", "checkpoints", "samples", "export", "config.toml", "events.jsonl", "status.json", "lock", "log.txt")
    + ("verify.json", "control/stop", "checkpoints/step-000002", "checkpoints/.tmp-step-000002-9", "export/average")
    + ("export/zibo_kohya.safetensors", "samples/step-000000-0.png", "export/step-000002"),
)
def test_nothing_is_written_where_a_part_of_the_run_is_a_link(tmp_path, name):
    """As of a run folder that somebody sent."""
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("start")
    run.close()
    outside = tmp_path / "outside"
    put(outside, (".tmp-step-000002-1/x", "stop", "a.png", ".x.1.tmp", "file"))
    place = run.path / name
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    target = (
        outside / "file" if "." in name.removeprefix("checkpoints/.") or name in ("lock", "control/stop") else outside
    )
    place.symlink_to(target)
    before = tree(tmp_path)
    for act in (
        lambda: Run.create(run.path, CONFIG),
        lambda: Run.create(run.path, CONFIG, resume=True),
        lambda: run.request("stop"),
        lambda: ownership.require_ours(run.path),
    ):
        with pytest.raises(UserError, match=r"parts of the run folder are links.*1 entry: " + name):
            act()
        assert tree(tmp_path) == before
    ownership.remove(run.path)
    assert tree(outside) == {
        key.removeprefix("outside/"): content for key, content in before.items() if "outside/" in key
    }
    assert place.is_symlink()


def test_a_folder_that_became_a_link_while_training_ends_the_run(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.samples.rmdir()
    run.log_event("start")  # made anew when it is needed
    run.samples.symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        run.log_event("step", step=1)
    run.close()


def test_a_bundle_that_is_a_link_is_none(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c/step-000002").symlink_to(tmp_path / "elsewhere")
    assert checkpoint.find_newest(tmp_path / "c") is None and checkpoint.count_bundles(tmp_path / "c") == 0


def test_a_run_below_a_linked_folder_works(tmp_path):
    (tmp_path / "big/runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "big/runs")
    with_link = tmp_path / "runs/r"
    run = Run.create(with_link, CONFIG)
    run.log_event("start")
    run.request("save")
    assert run.take_request("save")
    run.close()
    Run.create(with_link, CONFIG, resume=True).close()
    assert ownership.remove(with_link) == [] and (tmp_path / "runs").is_symlink()


# -- runs of earlier versions


def test_a_run_without_a_marker_is_gone_on_with_and_gets_one(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("start")
    run.close()
    marker = tmp_path / "r/.lora-fp8-run"
    marker.unlink()
    with pytest.raises(UserError, match="this folder already contains a run; continue it with `lora-fp8 resume"):
        Run.create(run.path, CONFIG)
    run.request("stop")
    assert not marker.exists()
    Run.create(run.path, CONFIG, resume=True).close()
    assert marker.is_file()
    marker.unlink()
    assert ownership.remove(run.path) == [] and not run.path.exists()


@pytest.mark.parametrize(
    ("log", "settings"),
    [("", CONFIG), ("[1]\n", CONFIG), ('{"a": 1}\n', CONFIG), ('{"t": 1, "event": "start"}\n', "x ="), (None, CONFIG)],
)
def test_settings_and_a_log_of_somebody_else_are_no_run(tmp_path, log, settings):
    put(tmp_path, ("photo.jpg",))
    (tmp_path / "config.toml").write_text(settings, encoding="utf-8")
    if log is not None:
        (tmp_path / "events.jsonl").write_text(log, encoding="utf-8")
    before = tree(tmp_path)
    for act in (ownership.remove, ownership.require_ours, ownership.claim, lambda path: Run(path).request("save")):
        with pytest.raises(UserError):
            act(tmp_path)
    assert tree(tmp_path) == before and disk_space.find_write_obstacle(tmp_path) is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_in_words(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As some network and FUSE file systems are."""
    from lora_fp8.cli.commands import main

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "home/worker.lock").touch()
    with pytest.raises(UserError, match="this file system has no locks"):
        Run.create(tmp_path / "run", CONFIG)
    for words, place in (["jobs"], "home/worker.lock"), (["dataset", "undo", str(tmp_path / "photos")], "photos"):
        monkeypatch.setattr(sys, "argv", ["lora-fp8", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert ended.value.code == 2 and f"{tmp_path / place}: this file system has no locks" in said, said


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and FUSE file systems say EINVAL; a disk that fails says EIO."""
    answers = iter([errno.EINVAL, errno.EIO])

    def fsync(_: int) -> None:
        raise OSError(number := next(answers), os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    writing.sync_folder(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        writing.sync_folder(tmp_path)
