"""Datasets on Hugging Face: the real client and the real command against the hub of the tests, which counts bytes."""

import json
from pathlib import Path

import pytest
from hub_server import HubServer, Repository
from test_dataset_import import encoded, texts, write_images, write_table
from typer.testing import CliRunner, Result

from lora_fp8 import cli
from lora_fp8.common.system import find_cache_folder
from lora_fp8.families.sources.reference import parse_dataset


@pytest.fixture
def dataset(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """ "ada/cats" on the hub, empty; this process uses that hub."""
    hub.use(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/README.md").write_text("# Cats", encoding="utf-8")
    return hub.add("datasets/ada/cats", tmp_path / "repository", card={"license": "cc0-1.0"})


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["dataset", "import", *words])


def list_asked(hub: HubServer) -> set[str]:
    """The files of repositories that were asked for, large or small."""
    return {request.file for request in hub.requests if request.file}


def fails(*words: str) -> str:
    result = call(*words)
    assert result.exception is not None, result.output
    return str(result.exception)


def test_a_table_and_the_images_that_it_names_are_fetched_and_nothing_else(
    hub: HubServer, dataset: Repository, tmp_path: Path
) -> None:
    write_images(dataset.folder, "train/a.png", "train/deep/b.jpg")
    rows = [{"file_name": "a.png", "text": "a red cat"}, {"file_name": "deep/b.jpg", "text": "ein Kätzchen"}]
    (dataset.folder / "train/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    write_table(dataset.folder / "data/train-00000-of-00001.parquet", [{"image": encoded(0), "text": "again"}])
    dataset.reread()
    result = call("https://huggingface.co/datasets/ada/cats/tree/main", "cats")
    assert result.exception is None, result.exception
    assert texts(tmp_path / "cats") == {"a.txt": "a red cat", "deep_b.txt": "ein Kätzchen"}
    assert (tmp_path / "cats/a.png").read_bytes() == (dataset.folder / "train/a.png").read_bytes()
    assert list_asked(hub) == {"train/a.png", "train/deep/b.jpg", "train/metadata.jsonl"}
    assert "licence: cc0-1.0" in result.output
    assert not list((find_cache_folder() / "datasets").rglob("*.*"))  # what was taken over is kept once


def test_of_tables_those_that_are_asked_for_and_only_what_is_missing(
    hub: HubServer, dataset: Repository, tmp_path: Path
) -> None:
    for split, captions in (("train", ["one", "two"]), ("test", ["three"])):
        rows = [
            {"image": {"bytes": encoded(n), "path": f"{text}.jpg"}, "text": text} for n, text in enumerate(captions)
        ]
        write_table(dataset.folder / f"data/{split}-00000-of-00001.parquet", rows)
    dataset.reread()
    dataset.faults.cut_after, dataset.faults.cuts = 700, 1  # goes on where it was cut
    result = call("ada/cats", "cats", "--files", "data/train-*", "--limit", "1", "--json")
    assert result.exception is None and json.loads(result.stdout)["images"] == 1
    assert texts(tmp_path / "cats") == {"one.txt": "one"}
    assert list_asked(hub) == {"data/train-00000-of-00001.parquet"}
    assert hub.bytes_sent() < 1.2 * (dataset.folder / "data/train-00000-of-00001.parquet").stat().st_size + 20_000

    # The rest of the same dataset: what was fetched for the first image is still there.
    before = len(hub.requests)
    result = call("ada/cats", "cats", "--files", "data/train-*")
    assert result.exception is None and len(hub.requests) == before + 1  # the list of files
    assert texts(tmp_path / "cats") == {"one.txt": "one", "two.txt": "two"}


def test_images_with_captions_beside_them(dataset: Repository, tmp_path: Path) -> None:
    """As most people publish what they trained on; images without a caption come too."""
    write_images(dataset.folder, "1_cat/a.png", "1_cat/b.png", "c.jpg")
    (dataset.folder / "1_cat/a.txt").write_bytes("\ufeffcat, sitting\r\n".encode())
    (dataset.folder / "1_cat/b.caption").write_text("cat, standing", encoding="utf-8")
    (dataset.folder / "notes.txt").write_text("no caption", encoding="utf-8")
    dataset.reread()
    result = call("hf:datasets/ada/cats", "cats")
    assert result.exception is None, result.exception
    assert texts(tmp_path / "cats") == {"1_cat_a.txt": "cat, sitting", "1_cat_b.txt": "cat, standing"}
    assert "3 images, 1 of them without a caption" in result.output


def test_what_is_wrong_is_told_before_anything_is_transferred(
    hub: HubServer, dataset: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no images, tables (.parquet) or shards (.tar) to read; its files: README.md" in fails("ada/cats", "new")
    write_images(dataset.folder, "a.png")
    dataset.reread()
    assert "there is no file or folder of this name here" in fails("ada/cats")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo.png").write_bytes(b"mine")
    assert "mine: the folder already contains files" in fails("ada/cats", "mine")
    assert "these options apply to datasets on Hugging Face" in fails("repository", "new", "--files", "*.png")
    assert "SOURCE = 'ada/dogs' was not found" in fails("ada/dogs", "new")
    assert "--revision = 'v9' does not exist" in fails("ada/cats", "new", "--revision", "v9")
    assert "no images" in fails("ada/cats", "new", "--files", "data/*")
    dataset.gated = "auto"
    assert "Accept its licence at https://huggingface.co/datasets/ada/cats" in fails("ada/cats", "new")
    dataset.gated = False
    dataset.files["../../evil.png"] = dataset.files["a.png"]
    assert "it lists a file outside the dataset: ../../evil.png" in fails("ada/cats", "new")
    del dataset.files["../../evil.png"]
    monkeypatch.setattr("lora_fp8.run.disk_space.find_free", lambda path: 3)
    assert "the disk is too full for the download" in fails("ada/cats", "new")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids connections" in fails("ada/cats", "new")
    assert list_asked(hub) == set() and not (tmp_path / "new").exists()
    assert (tmp_path / "mine/photo.png").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("owner/name", "owner/name", ""),
        ("owner/name@v1", "owner/name", "v1"),
        ("hf://datasets/owner/name", "owner/name", ""),
        ("https://huggingface.co/datasets/owner/name/tree/refs/convert/x", "owner/name", "refs/convert/x"),
        ("huggingface.co/datasets/owner/name/viewer/default/train", "owner/name", ""),
        ('"https://hf-mirror.com/datasets/owner/name"', "owner/name", ""),
    ],
)
def test_what_names_a_dataset(text: str, repo: str, revision: str) -> None:
    known = parse_dataset(text)
    assert known is not None and (known.repo, known.revision) == (repo, revision)


@pytest.mark.parametrize(
    "text", ["folder", "./owner/name", "/owner/name", "a/b/c", "https://huggingface.co/owner/name"]
)
def test_what_names_none(text: str) -> None:
    assert parse_dataset(text) is None
