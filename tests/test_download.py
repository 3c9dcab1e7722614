"""Downloads of base models from the hub server of the tests: what arrives, what is transferred again, what is said."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy
import pytest
from hub_server import STRANGER, TOKEN, HubServer, Repository
from safetensors.numpy import save_file
from waiting import LONG_SECONDS

from lora_fp8.errors import RunFailure, Stopped, UserError
from lora_fp8.families.sources import BaseDescription, BaseFile, parse, transfer
from lora_fp8.families.sources import download as downloading
from lora_fp8.families.sources.download import Progress, download

SIZE = 3 << 20
UNET, VAE = "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    for number, path in enumerate((UNET, VAE)):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_bytes(bytes([number]) + os.urandom(SIZE - 1))
        (root / path).with_name("config.json").write_text(json.dumps({"number": number}))
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def repository(hub: HubServer, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    hub.use(monkeypatch, home)
    monkeypatch.setattr(transfer, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(transfer, "TICK", 0.01)
    monkeypatch.setattr(downloading, "TICK", 0.01)
    monkeypatch.setattr(downloading, "LAST_WAIT", 0.1)
    return hub.add("org/tiny", folder)


def describe(repository: Repository, home: Path, name: str = "org/tiny", folder: Path | None = None) -> BaseDescription:
    """The description of all files of a repository, with those that are there already."""
    reference = parse(name)
    commit = reference.version or repository.sha
    folder = folder or home / "hub" / "models--org--tiny" / "snapshots" / commit
    files = []
    for file in repository.files.values():
        local = folder / file.path
        is_small = reference.kind == "hub" and not file.is_lfs
        digest = None if is_small else file.sha256
        files.append(BaseFile(file.path, file.size, digest, local if local.exists() else None))
    return BaseDescription(reference, revision=commit, files=tuple(files), folder=folder)


def incomplete(repository: Repository, home: Path, path: str) -> Path:
    return home / "hub" / "models--org--tiny" / "blobs" / f"{repository.files[path].sha256}.incomplete"


def test_the_cache_is_that_of_huggingface_hub(hub: HubServer, repository: Repository, home: Path) -> None:
    seen: list[Progress] = []
    result = download(describe(repository, home), seen.append)
    assert result.missing_bytes == 0 and hub.bytes_sent() == repository.weights
    assert sorted(hub.downloads()) == [UNET, VAE]
    last = seen[-1]
    assert last.done == last.total == sum(file.size for file in repository.files.values())
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    # Another program finds all of it, transfers nothing, and agrees that the content is whole.
    hub.forget()
    root = Path(huggingface_hub.snapshot_download("org/tiny"))
    assert root == result.folder and hub.bytes_sent() == 0
    for path, file in repository.files.items():
        assert (root / path).read_bytes() == file.source.read_bytes()
    assert not list(home.rglob("*.incomplete"))
    assert huggingface_hub.scan_cache_dir(home / "hub").warnings == []
    verified = huggingface_hub.HfApi().verify_repo_checksums("org/tiny")
    assert not verified.mismatches and verified.checked_count == len(repository.files)
    # And without a connection by the name of the branch.
    assert huggingface_hub.snapshot_download("org/tiny", local_files_only=True) == str(root)


def test_the_token_stays_at_the_hub(
    hub: HubServer, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.gated = "auto"
    hub.use(monkeypatch, home, token=TOKEN)
    download(describe(repository, home))
    by_site = {site: {request.token for request in hub.seen() if request.site == site} for site in ("hub", "cdn")}
    assert by_site == {"hub": {TOKEN}, "cdn": {""}}


def test_after_a_cut_only_the_rest_is_transferred(hub: HubServer, repository: Repository, home: Path) -> None:
    repository.faults.cut_after, repository.faults.cuts = 1 << 20, 2
    result = download(describe(repository, home))
    assert hub.bytes_sent() == repository.weights and len(hub.downloads()) == 4
    for path, file in repository.files.items():
        assert (result.folder / path).read_bytes() == file.source.read_bytes()


def test_after_a_failure_the_next_download_continues(hub: HubServer, repository: Repository, home: Path) -> None:
    repository.faults.cut_after = 0  # nothing ever arrives
    with pytest.raises(RunFailure, match="cannot be downloaded.*repeat the command"):
        download(describe(repository, home))
    assert len(hub.downloads()) >= transfer.ATTEMPTS
    partial = incomplete(repository, home, UNET)
    partial.write_bytes(repository.files[UNET].source.read_bytes()[: SIZE // 3])
    repository.faults.cut_after = None
    hub.forget()
    seen: list[Progress] = []
    download(describe(repository, home), seen.append)
    assert hub.bytes_sent(file=UNET) == SIZE - SIZE // 3 and hub.bytes_sent(file=VAE) == SIZE
    assert seen[0].done >= SIZE // 3


def test_a_server_without_ranges_sends_all_again(hub: HubServer, repository: Repository, home: Path) -> None:
    repository.faults.no_range = True
    repository.faults.cut_after, repository.faults.cuts = 1 << 20, 1
    result = download(describe(repository, home))
    assert hub.bytes_sent() == repository.weights + (1 << 20)
    assert (result.folder / UNET).read_bytes() == repository.files[UNET].source.read_bytes()


def test_cancelling_keeps_what_has_arrived(hub: HubServer, repository: Repository, home: Path) -> None:
    repository.faults.stall_after = 1 << 20
    seen: list[Progress] = []
    with pytest.raises(Stopped, match="the next download continues"):
        download(describe(repository, home), seen.append, is_cancelled=lambda: seen[-1].done >= 2 << 20)
    repository.faults.stall_after = None
    repository.faults.released.set()
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join()
    kept = sum(incomplete(repository, home, path).stat().st_size for path in (UNET, VAE))
    assert kept == 2 << 20
    hub.forget()
    result = download(describe(repository, home))
    assert hub.bytes_sent() == repository.weights - kept
    assert (result.folder / VAE).read_bytes() == repository.files[VAE].source.read_bytes()


def test_a_damaged_file_is_fetched_twice_and_refused(hub: HubServer, repository: Repository, home: Path) -> None:
    repository.faults.wrong_bytes.add(UNET)
    with pytest.raises(RunFailure, match=rf"{UNET} of org/tiny arrived damaged twice"):
        download(describe(repository, home))
    assert hub.downloads().count(UNET) == 2
    assert not incomplete(repository, home, UNET).exists()
    assert not (describe(repository, home).folder / UNET).exists()
    # What another program left is replaced by the right content.
    repository.faults.wrong_bytes.clear()
    incomplete(repository, home, UNET).write_bytes(b"x" * 1000)
    result = download(describe(repository, home))
    assert hashlib.sha256((result.folder / UNET).read_bytes()).hexdigest() == repository.files[UNET].sha256


def test_rate_limits_are_waited_for(hub: HubServer, repository: Repository, home: Path) -> None:
    repository.faults.rate_limited, repository.faults.retry_after = 1, 1
    seen: list[Progress] = []
    only = describe(repository, home)
    only = BaseDescription(only.reference, only.revision, files=only.files[1:2], folder=only.folder)
    began = time.monotonic()
    download(only, seen.append)
    assert time.monotonic() - began >= 1
    assert any("limits the number of requests (429); next attempt in 1 s" in progress.waiting for progress in seen)
    repository.faults.rate_limited, repository.faults.retry_after = -1, 100_000
    shutil.rmtree(home)
    with pytest.raises(RunFailure, match="limits the number of requests"):  # not waited for
        download(only)


@pytest.mark.parametrize(
    ("attributes", "token", "sentence"),
    [
        ({"gated": "auto"}, None, "is gated. Accept its licence at https://huggingface.co/org/tiny, then .*`hf auth"),
        ({"gated": "manual"}, STRANGER, "is gated, and the account of your token has no access"),
        ({"private": True}, None, "was not found"),
        ({}, "hf_wrong", "does not accept the token.*`hf auth login`"),
        ({"files": {}}, None, "model.revision = .* does not exist"),
    ],
)
def test_refusals(
    hub: HubServer,
    repository: Repository,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    attributes: dict,
    token: str | None,
    sentence: str,
) -> None:
    description = describe(repository, home)
    vars(repository).update(attributes)
    hub.use(monkeypatch, home, token=token)
    with pytest.raises(UserError, match=sentence) as raised:
        download(description)
    assert "\n" not in str(raised.value) and hub.bytes_sent() == 0


def test_nothing_is_transferred_that_has_no_room(
    hub: HubServer, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=repository.weights - SIZE // 2))
    with pytest.raises(UserError, match=r"too full for the download: 6 MiB .* 4\.5 MiB are free.*HF_HOME"):
        download(describe(repository, home))
    assert hub.seen() == []
    # What has arrived before counts.
    partial = incomplete(repository, home, UNET)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(repository.files[UNET].source.read_bytes()[: SIZE * 3 // 4])
    download(describe(repository, home))


def test_offline(hub: HubServer, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="6 MiB of the model are not on this machine, and HF_HUB_OFFLINE"):
        download(describe(repository, home))
    assert hub.seen() == []


def test_two_processes_transfer_each_file_once(hub: HubServer, repository: Repository, home: Path) -> None:
    """The second waits for the first, and continues if that one is cancelled."""
    repository.faults.stall_after = 1 << 20
    ended = threading.Event()
    seen: list[Progress] = []

    def first() -> None:
        with pytest.raises(Stopped):
            download(describe(repository, home), is_cancelled=lambda: any(p.waiting for p in seen))
        ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert repository.faults.stalled.wait(LONG_SECONDS)

    def report(progress: Progress) -> None:
        seen.append(progress)
        if ended.is_set():
            repository.faults.stall_after = None
            repository.faults.released.set()

    result = download(describe(repository, home), report)
    thread.join()
    assert any("another process is downloading the same file" in progress.waiting for progress in seen)
    ranges = [request.range for request in hub.seen() if request.is_download]
    assert ranges[:2] == ["", ""] and ranges[2:] == [f"bytes={1 << 20}-"] * 2
    assert (result.folder / UNET).read_bytes() == repository.files[UNET].source.read_bytes()


def test_a_file_that_another_program_has_fetched_meanwhile(hub: HubServer, repository: Repository, home: Path) -> None:
    before = describe(repository, home)
    huggingface_hub.snapshot_download("org/tiny")
    hub.forget()
    download(before)
    assert hub.bytes_sent() == 0


@pytest.mark.parametrize("links", [True, False])
def test_without_links_files_lie_in_the_snapshot(
    hub: HubServer, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", not links)
    result = download(describe(repository, home))
    assert (result.folder / UNET).is_symlink() == links
    blobs = [path for path in home.rglob("blobs/*") if path.stat().st_size == SIZE]
    assert len(blobs) == (2 if links else 0)


def test_modelscope(
    hub: HubServer, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    repository.faults.cut_after, repository.faults.cuts = 1 << 20, 1
    result = download(describe(repository, home, "modelscope:org/tiny", tmp_path / "modelscope"))
    for path, file in repository.files.items():
        assert (result.folder / path).read_bytes() == file.source.read_bytes()
    assert hub.bytes_sent() == repository.weights
    assert {request.token for request in hub.seen()} == {""}


def test_civitai(
    hub: HubServer, repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CIVITAI_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    page = hub.add_civitai(7, repository.folder / UNET, "SDXL 1.0", login=True)
    description = describe(page, home, "civitai:7", tmp_path / "civitai")
    with pytest.raises(UserError, match="refuses access .status 401.* CIVITAI_TOKEN"):
        download(description)
    assert all(request.token != "hf_secret" for request in hub.seen())
    monkeypatch.setenv("CIVITAI_TOKEN", TOKEN)
    result = download(description)
    assert result.files[0].local.read_bytes() == (repository.folder / UNET).read_bytes()


# -- the command -----------------------------------------------------------------------------------------------------


Command = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def miniature(hub: HubServer, tmp_path: Path) -> Repository:
    """A repository of the layout of SD 1.5, with weights that nobody loads."""
    root = tmp_path / "sd15"
    stem = "diffusion_pytorch_model"
    parts = {"unet": ("UNet2DConditionModel", stem), "vae": ("AutoencoderKL", stem), "text_encoder": ("", "model")}
    for number, (part, (kind, stem)) in enumerate(parts.items()):
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_text(json.dumps({"_class_name": kind, "in_channels": 4}))
        weights = numpy.random.default_rng(number).integers(0, 255, 300_000, dtype=numpy.uint8)
        save_file({"weight": weights}, root / part / f"{stem}.safetensors")
        (root / part / f"{stem}.fp16.safetensors").write_bytes(b"a copy that nobody needs")
    for path in ("scheduler/scheduler_config.json", "tokenizer/vocab.json"):
        (root / path).parent.mkdir()
        (root / path).write_text("{}")
    (root / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    return hub.add("org/tiny", root, card={"license": "openrail"})


def list_needed(repository: Repository) -> list[str]:
    return sorted(path for path in repository.files if path.endswith(".safetensors") and "fp16" not in path)


@pytest.fixture
def start(hub: HubServer, home: Path) -> Command:
    """start("org/tiny", "--json"): a process of `lora-fp8 download`; its output can be read."""
    root = Path(__file__).parent.parent

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lora_fp8", "download", *arguments],
            env=hub.environment(home, PYTHONPATH=str(root), XDG_CACHE_HOME=str(home / "cache"), **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, list[dict], str]:
    out, err = process.communicate(timeout=LONG_SECONDS)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def test_the_command_downloads_what_training_needs(
    hub: HubServer, miniature: Repository, start: Command, home: Path
) -> None:
    code, events, err = finish(start("https://huggingface.co/org/tiny", "--json"))
    assert (code, err) == (0, "")
    assert events[0]["event"] == "base" and events[0]["licence"] == "openrail" and events[0]["family"] == "sd15"
    assert sorted(hub.downloads()) == list_needed(miniature)
    assert events[0]["missing_bytes"] == sum(miniature.files[path].size for path in list_needed(miniature))
    assert [event["event"] for event in events[1:-1]] == ["download"] * len(events[1:-1])
    assert events[-2]["bytes"] == events[-2]["total"] == events[0]["missing_bytes"]
    assert events[-1]["event"] == "done" and events[-1]["missing_bytes"] == 0
    root = Path(events[-1]["folder"])
    assert root.is_relative_to(home)
    for file in events[-1]["files"]:
        assert (root / file["path"]).read_bytes() == miniature.files[file["path"]].source.read_bytes()
    hub.forget()
    process = start("org/tiny")
    out, err = process.communicate(timeout=LONG_SECONDS)
    assert (process.returncode, err) == (0, "") and out.splitlines()[-1] == f"org/tiny is complete: {root}"
    assert hub.bytes_sent() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 75), (signal.SIGKILL, -9)])
def test_an_interrupted_command_is_continued_by_the_next(
    hub: HubServer, miniature: Repository, start: Command, home: Path, number: int, code: int
) -> None:
    miniature.faults.stall_after = 50_000
    process = start("org/tiny")
    assert miniature.faults.stalled.wait(LONG_SECONDS)
    while process.poll() is None and not any(p.stat().st_size == 50_000 for p in home.rglob("*.incomplete")):
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == code, err
    if code == 75:
        assert (
            err.strip()
            == "the download was stopped; the downloaded part is kept, and the next download continues from it"
        )
    kept = {path.name.partition(".")[0]: path.stat().st_size for path in home.rglob("*.incomplete")}
    miniature.faults.stall_after = None
    miniature.faults.released.set()
    hub.forget()
    assert finish(start("org/tiny", "--json"))[0] == 0
    needed = sum(miniature.files[path].size for path in list_needed(miniature))
    assert hub.bytes_downloaded() == needed - sum(kept.values())
    assert max(kept.values()) == 50_000 and not list(home.rglob("*.incomplete"))


def test_two_commands_transfer_each_file_once(hub: HubServer, miniature: Repository, start: Command) -> None:
    miniature.faults.delay = 0.2
    both = [start("org/tiny", "--json") for _ in range(2)]
    assert [finish(process)[0] for process in both] == [0, 0]
    assert sorted(hub.downloads()) == list_needed(miniature)


def test_the_command_says_what_is_wrong_in_one_line(hub: HubServer, miniature: Repository, start: Command) -> None:
    miniature.gated = "auto"
    answer, events, err = finish(start("org/tiny", "--json"))
    assert (answer, events) == (2, []) and err.count("\n") == 1
    assert "Accept its licence at https://huggingface.co/org/tiny" in err and "`hf auth login`" in err
    miniature.gated = False
    miniature.faults.wrong_bytes = set(list_needed(miniature))
    answer, events, err = finish(start("org/tiny", "--json"))
    assert answer == 3 and "arrived damaged twice" in err and err.count("\n") == 1


def test_a_proxy_is_used(hub: HubServer, miniature: Repository, start: Command) -> None:
    """The hub's name cannot be resolved here: only the proxy, which the server also is, can answer for it."""
    environment = {"HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": hub.endpoint}
    assert finish(start("org/tiny", "--json", **environment))[0] == 0
    assert sorted(hub.downloads()) == list_needed(miniature)
    assert any(request.path.startswith("http://hub.example/") for request in hub.seen())
