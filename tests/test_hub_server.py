"""The hub server of the tests, judged by its real clients: huggingface_hub and its errors."""

import hashlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import STRANGER, TOKEN, HubServer, Repository
from huggingface_hub import errors
from huggingface_hub.utils import get_session, hf_raise_for_status

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "unet").mkdir(parents=True)
    (root / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (root / "unet" / "config.json").write_text("{}")
    header = json.dumps({"weight": {"dtype": "U8", "shape": [3 << 20], "data_offsets": [0, 3 << 20]}}).encode()
    content = bytes(range(256)) * (3 << 12)
    (root / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + content)
    return root


@pytest.fixture
def repository(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    hub.use(monkeypatch, tmp_path / "home")
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.02)))  # the client waits before it retries
    return hub.add("org/tiny", folder, card={"license": "apache-2.0"})


def test_information_and_trees(hub: HubServer, repository: Repository) -> None:
    info = huggingface_hub.HfApi().model_info("org/tiny", files_metadata=True)
    assert info.sha == repository.sha and info.gated is False and info.card_data.license == "apache-2.0"
    sizes = {sibling.rfilename: (sibling.size, sibling.lfs and sibling.lfs.sha256) for sibling in info.siblings}
    content = (repository.folder / WEIGHTS).read_bytes()
    assert sizes[WEIGHTS] == (len(content), hashlib.sha256(content).hexdigest())
    assert sizes["unet/config.json"] == (2, None)
    hub.tree_page = 2
    tree = list(huggingface_hub.list_repo_tree("org/tiny", recursive=True))
    assert {entry.path for entry in tree} == {*repository.files, "unet"}
    assert [entry.path for entry in huggingface_hub.list_repo_tree("org/tiny")] == ["model_index.json", "unet"]
    (entry,) = huggingface_hub.HfApi().get_paths_info("org/tiny", [WEIGHTS])
    assert entry.lfs.sha256 == sizes[WEIGHTS][1]
    assert hub.bytes_sent() == 0


def test_headers_are_read_by_range(hub: HubServer, repository: Repository) -> None:
    metadata = huggingface_hub.HfApi().parse_safetensors_file_metadata("org/tiny", WEIGHTS)
    assert metadata.tensors["weight"].shape == [3 << 20]
    assert hub.downloads() == [] and 0 < hub.bytes_sent() <= 100_001


def test_a_snapshot_has_the_bytes_of_the_folder(hub: HubServer, repository: Repository) -> None:
    root = Path(huggingface_hub.snapshot_download("org/tiny"))
    assert root.name == repository.sha
    for path, file in repository.files.items():
        assert (root / path).read_bytes() == file.source.read_bytes()
    assert (root / WEIGHTS).resolve().name == repository.files[WEIGHTS].sha256
    assert (root / "unet" / "config.json").resolve().name == repository.files["unet/config.json"].oid
    assert hub.downloads() == [WEIGHTS] and hub.bytes_sent() == repository.weights
    to_cdn = [request for request in hub.seen() if request.site == "cdn"]
    assert to_cdn and all(request.token == "" for request in to_cdn)


@pytest.mark.parametrize(
    ("attributes", "token", "error"),
    [
        ({}, None, None),
        ({"gated": "auto"}, None, errors.GatedRepoError),
        ({"gated": "auto"}, STRANGER, errors.GatedRepoError),
        ({"gated": "auto"}, TOKEN, None),
        ({"private": True}, STRANGER, errors.RepositoryNotFoundError),
        ({"private": True}, TOKEN, None),
    ],
)
def test_gates(
    hub: HubServer, repository: Repository, attributes: dict, token: str | None, error: type[Exception] | None
) -> None:
    vars(repository).update(attributes)
    for ask in (
        lambda: huggingface_hub.hf_hub_download("org/tiny", WEIGHTS, token=token, force_download=True),
        lambda: huggingface_hub.auth_check("org/tiny", token=token),
    ):
        if error is None:
            ask()
        else:
            with pytest.raises((error, ValueError)) as raised:  # a forced download wraps it
                ask()
            assert isinstance(raised.value, error) or isinstance(raised.value.__cause__, error)
    if token:
        assert huggingface_hub.whoami(token)["name"] == {TOKEN: "ada", STRANGER: "bob"}[token]


def test_what_is_not_there(hub: HubServer, repository: Repository) -> None:
    api = huggingface_hub.HfApi()
    with pytest.raises(errors.RepositoryNotFoundError):
        api.model_info("org/tinny")
    with pytest.raises(errors.RepositoryNotFoundError):
        api.model_info("org/tinny", token=TOKEN)
    with pytest.raises(errors.RevisionNotFoundError):
        api.model_info("org/tiny", revision="v9")
    with pytest.raises(errors.RemoteEntryNotFoundError):
        huggingface_hub.hf_hub_download("org/tiny", "missing.json")
    with pytest.raises(errors.HfHubHTTPError, match="Invalid user token"):
        api.whoami("hf_wrong")


def test_cut_connections_go_on_where_they_broke(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 20)
    repository.faults.cut_after, repository.faults.cuts = 1 << 20, 2
    path = huggingface_hub.hf_hub_download("org/tiny", WEIGHTS)
    assert Path(path).read_bytes() == (repository.folder / WEIGHTS).read_bytes()
    ranges = [request.range for request in hub.seen() if request.is_download]
    assert ranges == ["", f"bytes={1 << 20}-", f"bytes={2 << 20}-"]
    assert hub.bytes_sent() == repository.weights


def test_limits_errors_and_wrong_bytes(hub: HubServer, repository: Repository) -> None:
    repository.faults.rate_limited = 1
    response = get_session().get(f"{hub.endpoint}/api/models/org/tiny")
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    repository.faults.rate_limited, repository.faults.retry_after = 1, None
    response = get_session().get(f"{hub.endpoint}/api/models/org/tiny")
    assert response.status_code == 429 and "Retry-After" not in response.headers
    with pytest.raises(errors.HfHubHTTPError, match="429"):
        hf_raise_for_status(response)
    repository.faults.broken = 1
    with pytest.raises(errors.HfHubHTTPError, match="500"):
        huggingface_hub.HfApi().model_info("org/tiny")
    huggingface_hub.HfApi().model_info("org/tiny")
    repository.faults.wrong_bytes.add(WEIGHTS)
    path = Path(huggingface_hub.hf_hub_download("org/tiny", WEIGHTS))
    assert path.stat().st_size == repository.weights
    assert hashlib.sha256(path.read_bytes()).hexdigest() != path.resolve().name


def test_another_process_finds_it(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", folder, gated="manual")
    code = "import huggingface_hub; print(huggingface_hub.hf_hub_download('org/tiny', 'model_index.json'))"
    environment = hub.environment(tmp_path / "home", token=TOKEN)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home")


def get(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_modelscope(hub: HubServer, folder: Path) -> None:
    hub.add("org/tiny", folder)
    start = f"{hub.endpoint}/api/v1/models/org"
    listing = json.loads(get(f"{start}/tiny/repo/files?Revision=master&Recursive=true")[1])
    files = {file["Path"]: file for file in listing["Data"]["Files"]}
    content = (folder / WEIGHTS).read_bytes()
    assert files[WEIGHTS]["Sha256"] == hashlib.sha256(content).hexdigest() and files["unet"]["Type"] == "tree"
    assert get(f"{start}/tiny/repo?Revision=master&FilePath={WEIGHTS}", Range="bytes=8-99") == (206, content[8:100])
    assert get(f"{hub.endpoint}/models/org/tiny/resolve/master/{WEIGHTS}") == (200, content)
    for path, code in (("tinny/repo/files", 10010205001), ("tiny/repo/files?Revision=v9", 10990101004)):
        status, body = get(f"{start}/{path}")
        assert (status, json.loads(body)["Code"]) == (404, code)


def test_civitai(hub: HubServer, folder: Path) -> None:
    repository = hub.add_civitai(7, folder / WEIGHTS, "SDXL 1.0", login=True)
    version = json.loads(get(f"{hub.endpoint}/api/v1/model-versions/7")[1])
    (file,) = version["files"]
    content = (folder / WEIGHTS).read_bytes()
    assert file["hashes"]["SHA256"] == hashlib.sha256(content).hexdigest().upper()
    assert version["baseModel"] == "SDXL 1.0" and round(file["sizeKB"] * 1024) == len(content)
    assert get(file["downloadUrl"])[0] == 401
    assert get(file["downloadUrl"] + f"?token={TOKEN}") == (200, content)
    repository.login = False
    assert get(file["downloadUrl"], Range="bytes=1-3") == (206, content[1:4])
    assert get(f"{hub.endpoint}/api/v1/model-versions/8")[0] == 404
