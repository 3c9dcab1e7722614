"""Training straight from a hub: the order of work, the download as a stage, stopping and continuing it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from hub_server import HubServer, Repository
from safetensors.torch import load_file
from waiting import LONG_SECONDS

from lora_fp8 import config, settings, train
from lora_fp8.errors import Stopped, UserError
from lora_fp8.families.sources import download as downloading
from lora_fp8.jobs.run_events import Follower
from lora_fp8.run import Run

Job = Callable[..., settings.Job]


@pytest.fixture
def repository(
    hub: HubServer, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Repository:
    """The miniature of sd15 as org/tiny, for this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    monkeypatch.setattr(downloading, "LAST_WAIT", 0.1)
    hub.use(monkeypatch, tmp_path / "home")
    return hub.add("org/tiny", tiny("sd15"))


@pytest.fixture
def hub_job(job: Job, tmp_path: Path) -> Job:
    """hub_job("train.steps=2"): a job on org/tiny, with a cache of its own."""
    mine = ("model.path='org/tiny'", f"dataset.cache_dir='{tmp_path / 'cache'}'", "train.steps=2")
    return lambda *overrides: job(*mine, *overrides)


def list_stages(events: list[dict[str, Any]]) -> list[str]:
    return [event["stage"] for event in events if event["event"] == "stage"]


def test_a_job_on_a_hub_is_the_job_on_the_folder(
    hub: HubServer, repository: Repository, job: Job, hub_job: Job, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    result = train.run(hub_job("export.verify=true"), progress=False, echo=events.append)
    assert list_stages(events)[:3] == ["download", "cache", "load"]
    progress = [event for event in events if event["event"] == "download"]
    assert progress[-1]["bytes"] == progress[-1]["total"] == repository.weights
    assert sorted(hub.downloads()) == sorted(path for path, file in repository.files.items() if file.is_lfs)
    assert all(report.ok for report in result.reports) and result.reports
    local = train.run(job("name='local'", f"dataset.cache_dir='{tmp_path / 'cache'}'", "train.steps=2"), progress=False)
    for mine, theirs in zip(result.files, local.files, strict=True):
        mine_tensors, their_tensors = load_file(mine), load_file(theirs)
        assert mine_tensors.keys() == their_tensors.keys()
        assert all(tensor.equal(their_tensors[name]) for name, tensor in mine_tensors.items())
    # A second run finds the base, and has no stage for it.
    hub.forget()
    events.clear()
    train.run(hub_job("name='again'"), progress=False, echo=events.append)
    assert list_stages(events)[0] == "cache" and hub.bytes_sent() == 0


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("dataset.folders=[{path='/nowhere/at/all'}]", "/nowhere/at/all"),
        ("adapter.targets=['no_such_layer']", "no_such_layer"),
        ("dataset.bucket_step=12", "bucket_step"),
    ],
)
def test_what_is_wrong_here_is_found_before_the_download(
    hub: HubServer, repository: Repository, hub_job: Job, override: str, sentence: str
) -> None:
    job = hub_job(override)
    with pytest.raises(UserError, match=sentence):
        train.run(job, progress=False)
    assert hub.downloads() == [] and hub.bytes_downloaded() == 0
    assert not Path(job.output_dir, job.name).exists()


def test_a_disk_without_room_is_found_before_the_download(
    hub: HubServer, repository: Repository, hub_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=repository.weights // 2))
    with pytest.raises(UserError, match="too full"):
        train.run(hub_job(), progress=False)
    assert hub.downloads() == []


def test_a_stopped_download_is_continued_by_resume(hub: HubServer, repository: Repository, hub_job: Job) -> None:
    repository.faults.stall_after = 50_000
    job = hub_job()
    run = Run(Path(job.output_dir, job.name))
    follower, seen = Follower(), []

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "download" and event["bytes"] >= 50_000:
            seen.append(follower.read_progress(run.path, 0))
            run.request("stop")

    with pytest.raises(Stopped, match="the download was stopped"):
        train.run(job, progress=False, echo=stop)
    # The queue and the page see how far it was.
    assert seen[0].stage == "download" and seen[0].download["total"] == repository.weights
    assert 0 < seen[0].download["bytes"] < repository.weights
    assert Run.open(run.path).read_events()[-1]["event"] == "stopped"
    repository.faults.stall_after = None
    repository.faults.released.set()
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join()
    home = Path(os.environ["HF_HOME"])
    kept = sum(path.stat().st_size for path in home.rglob("*.incomplete"))
    assert kept >= 50_000
    hub.forget()
    (run.control / "stop").unlink(missing_ok=True)
    result = train.run(job, resume=True, progress=False)
    assert result.files and hub.bytes_downloaded() == repository.weights - kept


WITH_HUB = """
import os, sys
from pathlib import Path
sys.path[:0] = [os.environ["ROOT"], os.path.join(os.environ["ROOT"], "tests")]
import hub_server, pytest
hub_server.use_endpoint(pytest.MonkeyPatch(), os.environ["HUB"], Path(os.environ["HUB_HOME"]))
from lora_fp8 import config, train
train.run(config.load(sys.argv[1]), progress=False)
"""
"""Trains on the hub of the tests, in a process that has imported huggingface_hub already."""


def test_of_several_processes_one_downloads(
    hub: HubServer, repository: Repository, hub_job: Job, tmp_path: Path
) -> None:
    (tmp_path / "with_hub.py").write_text(WITH_HUB)
    (tmp_path / "job.toml").write_text(config.dumps(hub_job("train.batch_size=2")))
    environment = {"ROOT": str(Path(__file__).parent.parent), "HUB": hub.endpoint, "HUB_HOME": os.environ["HF_HOME"]}
    args = [str(tmp_path / "with_hub.py"), str(tmp_path / "job.toml")]
    group = forked.start_group(args, 2, cwd=tmp_path, env=environment)
    outputs = [process.communicate(timeout=LONG_SECONDS) for process in group]
    assert [process.returncode for process in group] == [0, 0], outputs
    assert sorted(hub.downloads()) == sorted(path for path, file in repository.files.items() if file.is_lfs)
    assert list_stages(Run.open(tmp_path / "runs" / "lora").read_events())[:2] == ["download", "cache"]
