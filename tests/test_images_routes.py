"""The image workbench's routes: what the grid is told, what is written, and what no request can reach.

Asked as a browser asks, through the whole site. Captions are judged by the files' bytes, crops by the training's own.
"""

import io
import json
import shutil
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import write_tagger
from PIL import Image
from starlette.testclient import TestClient
from waiting import wait_until

from lora_fp8 import jobs, settings
from lora_fp8.data import buckets, captions, images
from webui import app, image_folders
from webui.context import Place
from webui.draft import Draft
from webui.images import routes, uploading

HOSTILE = '<img src=x onerror=alert(1)>\u202e "quoted"'


class Site:
    """The site in this process."""

    def __init__(self, folder: Path):
        self.folder, self.set = folder, folder / "data"
        self.place = Place(folder / "home", [folder / "data"])
        self.client = TestClient(app.build(self.place), base_url="http://127.0.0.1:7860")

    def ask(self, action: str, language: str = "en", status: int = 200, **values: Any) -> dict[str, Any]:
        values.setdefault("folder", str(self.set))
        answer = self.client.post(f"/images/{language}/{action}", json=values)
        assert answer.status_code == status, answer.text
        return answer.json()

    def send(self, content: bytes, file: str, status: int = 200, **where: str) -> dict[str, Any]:
        where = where or {"name": "sent"}
        answer = self.client.post("/images/en/upload", params={**where, "file": file}, content=content)
        assert answer.status_code == status, answer.text
        return answer.json()

    def unpack(self, content: bytes, **where: str) -> dict[str, Any]:
        """Send an archive and return its finished task."""
        answer = self.send(content, "set.zip", **where)

        def ended() -> dict[str, Any] | None:
            task = self.ask("task", folder=answer["folder"])["task"]
            return None if task["running"] else task

        return wait_until(ended, lambda: "does not end")

    def jobs(self) -> list[jobs.JobView]:
        return [job for job in jobs.Queue(self.place.home).list_jobs() if str(self.set) in job.command]

    def everything(self) -> set[Path]:
        """Every file below the site's folder, without what an earlier test's examination writes in the background."""
        return {path for path in self.folder.rglob("*") if path.is_file() and "examined" not in path.parts}

    def files(self, name: str = "sent") -> set[str]:
        folder = self.place.home / "datasets" / name
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def png(side: int = 64, value: int = 0) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def archive(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as zip:
        for name, content in files.items():
            zip.writestr(name, content)
    return out.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "uploads"))
        patch.setattr(jobs, "ensure_worker", lambda home: None)
        yield Site(folder)


@pytest.fixture
def site(whole: Site, request: pytest.FixtureRequest) -> Site:
    """The site, with three images in a folder of the test's own, two with captions."""
    whole.set = whole.folder / "data" / f"set {abs(hash(request.node.nodeid))}"
    whole.set.mkdir(parents=True)
    shutil.rmtree(whole.place.home / "datasets", ignore_errors=True)
    Draft(whole.place.home).write("")
    for number, name in enumerate("abc"):
        Image.fromarray(np.full((60, 200, 3), 50 * number, np.uint8)).save(whole.set / f"{name}.png")
    (whole.set / "a.txt").write_bytes(b"a cat\r\non a sofa\r\n")
    (whole.set / "c.txt").write_text(HOSTILE, encoding="utf-8")
    return whole


def test_the_grid_is_told_captions_crops_and_problems(site: Site) -> None:
    (site.set / "d.png").write_bytes(b"no image")
    (site.set / "e.png").write_bytes((site.set / "a.png").read_bytes())
    Draft(site.place.home).write('[model]\nfamily = "sd15"\n[dataset]\nresolution = 128\n')
    wait_until(lambda: not site.ask("state")["examining"], lambda: site.ask("state"))
    told = site.ask("list")
    assert (told["total"], told["without"], told["matching"]) == (5, 3, 5)
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["a.png"]["caption"].splitlines() == ["a cat", "on a sofa"] and rows["b.png"]["caption"] == ""
    assert rows["c.png"]["caption"] == HOSTILE, "as it is: the box is for editing it"
    place = buckets.place((200, 60), 128, 64)
    crop = rows["a.png"]["crop"]
    assert (
        crop["width"] == place.bucket_wh[0] / place.resized_wh[0]
        and crop["left"] == place.crop_xy[0] / place.resized_wh[0]
    )
    kinds = {name: {badge["title"] for badge in row["badges"]} for name, row in rows.items()}
    assert "Unreadable file" in kinds["d.png"] and "Duplicate file" in kinds["a.png"] | kinds["e.png"]
    assert rows["d.png"]["thumbnail"] == "" and "crop" not in rows["d.png"]
    assert not kinds["b.png"] & {"No caption"}, "the empty box says so"


def test_the_crop_that_is_shown_follows_the_mask_where_training_does(site: Site) -> None:
    """White at the right edge of a wide image; the training's own scan and placement judge."""
    mask = np.zeros((60, 200), np.uint8)
    mask[:, 180:] = 255
    masks = site.folder / "data" / "masks of it"
    masks.mkdir()
    for name in "abc":
        Image.fromarray(mask if name == "a" else np.full_like(mask, 255)).save(masks / f"{name}.png")
    (site.set / "b.txt").write_text("a dog", encoding="utf-8")
    folder = {"path": str(site.set), "mask": str(masks)}
    dataset = "[dataset]\nresolution = 64\nmax_aspect = 1\nfollow_mask = true\n[[dataset.folders]]\n"
    dataset += "".join(f"{key} = '{value}'\n" for key, value in folder.items())
    Draft(site.place.home).write(f'[model]\nfamily = "sd15"\n{dataset}')
    wait_until(lambda: "crop" in site.ask("list", fresh=True)["rows"][0], lambda: site.ask("state"))
    shown = {row["name"]: row["crop"]["left"] for row in site.ask("list")["rows"]}
    section = settings.Dataset(folders=[settings.Folder(**folder)], follow_mask=True, max_aspect=1)
    placed = buckets.assign(images.scan(section).examples, section, resolution=64, step=64)
    assert len({one.placement.crop_xy for one in placed}) == 2, "one follows its mask, the others stay in the middle"
    for one in placed:
        place = one.placement
        assert shown[one.example.path.name] == place.crop_xy[0] / place.resized_wh[0]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"query": "CAT sofa"}, ["a.png"]),
        ({"showing": "uncaptioned"}, ["b.png"]),
        ({"showing": "chosen", "chosen": ["c.png", "a.png", "x.png"]}, ["a.png", "c.png"]),
        ({"query": "[a cat on a sofa]"}, ["a.png"]),
        ({"offset": 1, "count": 1}, ["b.png"]),
        ({"offset": 99, "count": 2}, ["c.png"]),
        ({"query": "nothing of the kind"}, []),
        ({"count": -1, "offset": "x", "chosen": 5, "showing": [], "query": {}}, ["a.png", "b.png", "c.png"]),
    ],
)
def test_what_matches_is_listed(site: Site, given: dict[str, Any], names: list[str]) -> None:
    assert [row["name"] for row in site.ask("list", **given)["rows"]] == names


def test_a_folder_without_images_is_empty_and_says_why(site: Site) -> None:
    for path in site.set.iterdir():
        path.unlink()
    told = site.ask("list", fresh=True)
    assert (told["total"], told["rows"]) == (0, []) and "has no images; accepted" in told["problem"]
    (site.set / "photo.jxl").write_bytes(b"x")
    assert "JPEG XL" in site.ask("list", language="zh-CN", fresh=True)["problem"]
    wait_until(lambda: not site.ask("state")["examining"], lambda: "does not end")
    Image.new("RGB", (60, 200)).save(site.set / "a.png")
    told = site.ask("list", fresh=True)
    assert (told["total"], told["problem"]) == (1, "")
    wait_until(lambda: "size" in site.ask("list")["rows"][0], lambda: "the new image is not examined")


def test_a_caption_is_written_as_it_was_and_only_over_what_was_seen(site: Site) -> None:
    loaded = site.ask("list")["rows"][0]["caption"]
    answer = site.ask("save", name="a.png", loaded=loaded, caption="a dog\non a sofa")
    assert answer["outcome"] == "saved" and (site.set / "a.txt").read_bytes() == b"a dog\r\non a sofa\r\n"
    assert [entry.files for entry in captions.read_history(site.set)] == [1], "it can be undone"
    again = site.ask("save", name="a.png", loaded=loaded, caption="a dog\non a sofa")
    assert again["outcome"] == "unchanged", "the answer was lost, and the window asks again"
    (site.set / "a.txt").write_text("of somebody else", encoding="utf-8")
    refused = site.ask("save", name="a.png", loaded=answer["caption"], caption="mine")
    assert (refused["outcome"], refused["caption"]) == ("changed", "of somebody else")
    assert (site.set / "a.txt").read_text(encoding="utf-8") == "of somebody else"
    taken = site.ask("save", name="b.png", loaded="", caption=HOSTILE)
    assert taken["without"] == 0 and (site.set / "b.txt").read_text(encoding="utf-8") == HOSTILE
    for name in ("x.png", "../set/a.png", "/etc/passwd", "", "a.txt"):
        assert "no longer" in site.ask("save", name=name, loaded="", caption="x", status=400)["error"]


def test_edits_are_undone_and_redone_by_a_task(site: Site) -> None:
    before = (site.set / "a.txt").read_bytes()
    loaded = site.ask("list")["rows"][0]["caption"]
    after = site.ask("save", name="a.png", loaded=loaded, caption="a dog")
    assert after["history"] == {"undo": "caption of a.png", "redo": ""}
    for what, wanted in (("undo", before), ("redo", b"a dog\r\n")):
        number = site.ask("undo", what=what)["task"]["number"]
        task = wait_until(
            lambda: (task := site.ask("task")["task"]) and not task["running"] and task, lambda: "does not end"
        )
        assert task["number"] == number and not task["error"] and len(task["lines"]) == 1
        assert (site.set / "a.txt").read_bytes() == wanted
    site.ask("undo", what="redo")
    wait_until(lambda: not site.ask("task")["task"]["running"], lambda: "does not end")
    assert "no caption edit to redo" in site.ask("task")["task"]["error"]


def test_what_could_not_be_written_comes_back_to_whoever_opens_the_folder(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:

        def no_room(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(captions.Journal, "begin", no_room)
        site.ask("save", name="b.png", loaded="", caption="typed", status=400)
    row = site.ask("list")["rows"][1]
    assert (row["caption"], row["typed"]) == ("", "typed") and not (site.set / "b.txt").exists()
    site.ask("save", name="b.png", loaded="", caption="typed")
    assert site.ask("list")["rows"][1]["typed"] is None and (site.set / "b.txt").read_bytes() == b"typed"


def test_captions_in_another_encoding_are_not_written_over(site: Site) -> None:
    raw = "中文标注".encode("gb18030")
    (site.set / "b.txt").write_bytes(raw)
    row = site.ask("list", language="zh-CN", fresh=True)["rows"][1]
    assert row["unreadable"] and row["caption"] == ""
    site.ask("save", name="b.png", loaded="", caption="x", status=400)
    assert (site.set / "b.txt").read_bytes() == raw


def test_images_are_turned_cropped_and_excluded_without_touching_them(site: Site) -> None:
    before = {path.name: path.read_bytes() for path in site.set.iterdir()}
    pixels = np.random.default_rng(1).integers(0, 256, (40, 100, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((1000, 400), Image.Resampling.NEAREST).save(site.set / "d.png")
    title = site.ask("edit", language="zh-CN", names=["d.png"], turn=90)["message"]
    assert title == "已旋转 d.png"
    site.ask("edit", names=["d.png"], crop=[0.5, 0.0, 1.0, 0.5])
    row = site.ask("list", fresh=True)["rows"][3]
    shown = Image.open(io.BytesIO(site.client.get(row["large"]).content)).convert("RGB")
    with Image.open(site.set / "d.png") as image:
        wanted = image.rotate(-90, expand=True).crop((200, 0, 400, 500))
        whole = image.rotate(-90, expand=True)
    assert shown.size == (200, 500)
    assert np.abs(np.asarray(shown, float) - np.asarray(wanted, float)).mean() < 12, "but for what WebP loses"
    assert Image.open(io.BytesIO(site.client.get(row["uncropped"]).content)).size == whole.size
    # Turned once more, the same part is kept.
    site.ask("edit", names=["d.png"], turn=90)
    assert site.ask("list", fresh=True)["rows"][3]["cut"] == [0.5, 0.5, 1.0, 1.0]
    wait_until(lambda: "size" in site.ask("list")["rows"][3], lambda: site.ask("state"))
    assert site.ask("list")["rows"][3]["size"] == [500, 200], "it is examined again"
    site.ask("edit", names=["a.png", "b.png"], exclude=True)
    told = site.ask("list", fresh=True)
    assert [row["name"] for row in told["rows"]] == ["c.png", "d.png"] and told["excluded"] == 2
    left_out = site.ask("list", showing="excluded")["rows"]
    assert [(row["name"], row["excluded"]) for row in left_out] == [("a.png", True), ("b.png", True)]
    site.ask("edit", names=["b.png"], exclude=False)
    assert site.ask("list", fresh=True)["total"] == 3
    for count in (4, 2):  # undone one by one
        site.ask("undo", what="undo")
        wait_until(lambda: not site.ask("task")["task"]["running"], lambda: "does not end")
        assert not site.ask("task")["task"]["error"] and site.ask("list", fresh=True)["total"] == (
            2 if count == 4 else 4
        )
    assert {name: (site.set / name).read_bytes() for name in before} == before


def test_edits_of_strange_images_and_strange_lists_are_refused(site: Site) -> None:
    for names in (["x.png"], ["../set/a.png"], ["a.txt"], ["/etc/passwd"]):
        assert "no longer" in site.ask("edit", names=names, turn=90, status=400)["error"]
    for given in ({"crop": [0, 0, 2, 1]}, {"crop": "all"}, {"crop": [0.5, 0, 0.5, 1]}):
        assert "crop" in site.ask("edit", names=["a.png"], status=400, **given)["error"]
    secret = site.folder / "data" / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    path = site.set / ".lora_fp8_images.toml"
    path.write_text('["../secret.png"]\nexclude = true\n["a.txt"]\nexclude = true\n', encoding="utf-8")
    told = site.ask("list", fresh=True)
    assert told["excluded"] == 0 and site.ask("list", showing="excluded")["rows"] == []
    path.write_text("[a", encoding="utf-8")
    assert site.ask("list", fresh=True)["total"] == 3 and "lora_fp8_images" in site.ask("state")["problem"]
    assert site.ask("edit", names=["a.png"], turn=90, status=400)["error"]
    assert path.read_text(encoding="utf-8") == "[a"
    for query in ("rotate=45", "crop=0,0,2,1", "crop=a", "crop=0,0,nan,1"):
        assert site.client.get(f"/picture?path={site.set / 'a.png'}&{query}").status_code == 404


FOLDERS = ("/etc", "/tmp/../etc", "relative", "", "{0}/home", "{0}/outside", "{0}/data/link", "\0")


@pytest.mark.parametrize(
    "action", ["list", "names", "save", "edit", "undo", "caption", "stop", "state", "task", "folder"]
)
def test_folders_outside_of_the_roots_are_refused(site: Site, action: str) -> None:
    outside, link = site.folder / "outside", site.folder / "data/link"
    outside.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    count = len(jobs.Queue(site.place.home).list_jobs())
    for folder in FOLDERS:
        status = 200 if action == "state" and not folder else 400
        given = {"name": "a.png", "caption": "x", "model": "a/b"}
        told = site.ask(action, folder=folder.format(site.folder), status=status, **given)
        assert status == 200 or told["error"]
    assert len(jobs.Queue(site.place.home).list_jobs()) == count and not list(outside.iterdir())


def test_a_typed_folder_may_be_in_quotes_and_must_exist(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (str(site.set), f' "{site.set}" ', f"'{site.set}'"):
        assert site.ask("folder", folder=text) == {"folder": str(site.set)}
    refusal = site.ask("folder", folder=f"{site.set}/catz", status=400)["error"]
    assert refusal == f"{site.set}/catz: there is no such folder"
    monkeypatch.setattr(routes, "translate_windows_path", lambda text: str(site.set) if text == "D:\\cats" else text)
    assert site.ask("folder", folder='"D:\\cats"') == {"folder": str(site.set)}  # as Windows copies it, in WSL


def test_a_folder_that_was_refused_can_be_allowed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the Settings page, and with its limits: not for folders of the system, nor where others reach the page."""
    photos = site.folder / "photos"
    photos.mkdir()
    (photos / "a.png").write_bytes((site.set / "a.png").read_bytes())
    site.ask("folder", folder=str(photos), status=400)
    assert site.ask("ask_to_allow", folder=f'"{photos}"') == {"allowable": True}
    assert site.ask("list", folder=str(photos), status=400)["error"], "asking allows nothing"
    for refused in (*FOLDERS[:4], "{0}/home", "{0}/nothing", "\0", str(site.set)):
        text = refused.format(site.folder)
        assert site.ask("ask_to_allow", folder=text) == {"allowable": False}
        if text != str(site.set):
            assert site.ask("allow", folder=text, status=400)["error"]
    monkeypatch.setattr(site.place, "fixed", True)
    assert site.ask("ask_to_allow", folder=str(photos)) == {"allowable": False}
    assert site.ask("allow", folder=str(photos), status=400)["error"]
    monkeypatch.setattr(site.place, "fixed", False)
    assert site.ask("allow", folder=str(site.set))["folder"] == str(site.set) and not site.place.added
    assert site.ask("allow", folder=str(photos)) == {"folder": str(photos)}
    assert site.ask("list", folder=str(photos))["total"] == 1 and site.ask("folder", folder=str(photos))


def test_requests_of_other_pages_and_strange_ones_are_refused(site: Site) -> None:
    other = site.client.post("/images/en/list", json={}, headers={"origin": "http://evil.example"})
    assert other.status_code == 403
    assert site.client.post("/images/en/list", content=b"[" * 10_000).status_code == 400
    assert site.client.post("/images/en/list", json=[1]).status_code == 400
    for path in ("/images/en/__class__", "/images/en/nothing"):
        assert site.client.post(path, json={}).status_code == 404
    for name in ("images.py", "..%2fapp.py", "head.js"):
        assert site.client.get(f"/images/{name}").status_code in (404, 405)
    for name in ("images.js", "images.css"):
        assert site.client.get(f"/images/{name}").status_code == 200


# -------------------------------------------------------------------------------------------------------- captioning


def test_captioning_is_queued_for_listed_and_own_models(site: Site) -> None:
    own = site.folder / "data/models/mine"
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"model_type": "florence2"}', encoding="utf-8")
    (own.parent / "other").mkdir()
    (own.parent / "other/config.json").write_text('{"model_type": "timm_wrapper"}', encoding="utf-8")
    models = {model["model"]: model for model in site.ask("models")["models"]}
    assert models[str(own)]["here"] and models[str(own)]["kinds"] == ["text"]
    assert "florence-community/Florence-2-large-ft" in models and str(own.parent / "other") not in models
    answer = site.ask("caption", model=str(own), kind="text", trigger="zibo", overwrite=True)
    (job,) = site.jobs()
    assert job.command[:2] == ("caption", str(site.set))
    assert job.command[2:] == ("--json", f"--model={own}", "--trigger=zibo", "--overwrite")
    assert answer["job"]["state"] == "queued" and not answer["job"]["ended"]
    site.ask("stop")
    assert site.ask("state")["job"]["ended"]


def test_a_tagger_is_queued_with_its_options(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_tagger(site.folder / "data/models/wd")
    answer = site.ask("models")
    models = {model["model"]: model for model in answer["models"]}
    released = "SmilingWolf/wd-swinv2-tagger-v3"
    assert answer["thresholds"] == {"threshold": 0.35, "character_threshold": 0.85}
    assert models[str(own)]["options"] == models[released]["options"] and models[released]["kinds"] == ["tags"]
    assert "prompt" not in models[released]["options"] and not models[released]["obstacle"]
    options = {"threshold": "0.5", "character_threshold": "0.9", "exclude": "solo, long hair", "rating": True}
    site.ask("caption", model=str(own), kind="tags", keep_underscores=True, append=True, **options)
    (job,) = site.jobs()
    assert job.command[2:] == (
        *("--json", f"--model={own}", "--kind=tags", "--append", "--threshold=0.5", "--character-threshold=0.9"),
        *("--exclude=solo", "--exclude=long hair", "--rating", "--keep-underscores"),
    )
    wrong = site.ask("caption", model=str(own), threshold="35", character_threshold="nan", status=400)["error"]
    assert "--threshold: '35'" in wrong and "--character-threshold: 'nan'" in wrong
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    models = {model["model"]: model for model in site.ask("models", "zh-CN")["models"]}
    assert (
        models[str(own)]["obstacle"]
        == models[released]["obstacle"]
        == "WD 打标模型需要 onnxruntime：pip install 'lora-fp8[tagger]'"
    )
    assert "pip install" in site.ask("caption", model=released, status=400)["error"] and len(site.jobs()) == 1


def test_the_download_of_a_model_is_shown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['{"event": "stage"}', '{"event": "download", "bytes": 1073741824, "total": 2147483648, "speed": 1}']
    monkeypatch.setattr(jobs.Queue, "read_log_tail", lambda queue, number: lines)
    job = site.ask("caption", model="org/model")["job"]
    assert (job["done"] / job["total"], job["note"]) == (0.5, "downloading the model: 1 GiB of 2 GiB")
    lines += ['{"event": "captioner"}', '{"event": "caption", "done": 3, "total": 4}']
    assert site.ask("state")["job"]["note"] == "3 of 4 images"


def test_models_that_are_none_are_refused(site: Site) -> None:
    for model in ("", "/etc", "../x", "no-owner", "owner/name --x", "--model=/etc", "a/b/c", "a/b\0"):
        assert site.ask("caption", model=model, status=400)["error"]
    assert not site.jobs()


def test_each_offered_model_is_of_an_architecture_that_the_captioner_is_tested_with() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KNOWN

    from webui.images import captioning

    assert set(captioning.WRITERS) <= set(KNOWN)


# ----------------------------------------------------------------------------------------------------------- uploads


def test_files_come_into_a_dataset_of_the_page_or_the_open_folder(site: Site) -> None:
    assert [site.send(png(), "a.png")["added"] for _ in range(2)] == ["taken", "there"]
    site.send(b"a caption", "a.txt")
    site.send(png(value=9), "sub/b.png")
    assert site.files() == {"a.png", "a.txt", "sub/b.png"}
    assert "another file of this name" in site.send(png(value=1), "a.png", status=400)["error"]
    site.send(png(value=2), "new.png", folder=str(site.set))
    assert (site.set / "new.png").read_bytes() == png(value=2)
    assert not list((site.folder / "uploads").glob("images-*")), "nothing is left of an upload"


@pytest.mark.parametrize(
    ("where", "file"),
    [
        ({"name": "../x"}, "a.png"),
        ({"name": "/etc"}, "a.png"),
        ({"name": ""}, "a.png"),
        ({"folder": "/etc"}, "a.png"),
        ({"folder": "{0}/home"}, "a.png"),
        ({"name": "sent"}, "../a.png"),
        ({"name": "sent"}, "/a.png"),
        ({"name": "sent"}, "a//b.png"),
        ({"name": "sent"}, "x/../../a.png"),
        ({"name": "sent"}, "..\\a.png"),
        ({"name": "sent"}, ".hidden.png"),
        ({"name": "sent"}, "con.png"),
        ({"name": "sent"}, "1/2/3/4/5/a.png"),
        ({"name": "sent"}, "a.svg"),
        ({"name": "sent"}, "a.py"),
        ({"name": "sent"}, ""),
        ({"name": "sent"}, "evil\u202egnp.exe"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(site: Site, where: dict[str, str], file: str) -> None:
    before = site.everything()
    where = {key: text.format(site.folder) for key, text in where.items()}
    assert site.send(png(), file, status=400, **where)["error"]
    assert site.everything() == before


def test_what_is_no_image_is_refused(site: Site) -> None:
    assert "a.png" in site.send(b"no image", "a.png", status=400)["error"]
    assert site.send(b"x" * 10_000_000, "a.txt", status=400)["error"]
    assert not site.files()


def test_an_upload_through_a_link_stays_inside(site: Site) -> None:
    (site.folder / "outside").mkdir(exist_ok=True)
    (site.set / "way").symlink_to(site.folder / "outside")
    assert "leads out" in site.send(png(), "way/a.png", status=400, folder=str(site.set))["error"]
    assert not list((site.folder / "outside").rglob("*"))


def test_archives_are_unpacked_without_their_outer_folder(site: Site) -> None:
    files = {"cat/a.png": png(), "cat/a.txt": b"a cat", "cat/sub/b.png": png(value=5), "__MACOSX/cat/._a.png": b"x"}
    files["cat/.DS_Store"] = b"x"
    task = site.unpack(archive(**files))
    assert site.files() == {"a.png", "a.txt", "sub/b.png"} and not task["refused"] and task["done"] == 3
    assert "2" in task["lines"][0]


def test_archives_of_powershell_are_unpacked(site: Site) -> None:
    """Compress-Archive of Windows PowerShell writes a backslash between folders."""
    task = site.unpack(archive(**{"cat\\": b"", "cat\\a.png": png(), "cat\\sub\\b.png": png(value=5)}))
    assert site.files() == {"a.png", "sub/b.png"} and not task["refused"]


def test_names_of_chinese_archives_are_read(site: Site) -> None:
    raw = archive(**{"xxxx.png": png()})
    named = raw.replace(b"xxxx.png", "猫咪.png".encode("gb18030"))
    assert not site.unpack(named)["refused"]
    assert site.files() == {"猫咪.png"}


def test_what_an_archive_must_not_have_in_it_stays_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zip:
        zip.writestr("good.png", png())
        for name in ("../up.png", "/root.png", "a/../../up.png", "..\\up.png", "C:\\a.png", "run.py", "inner.zip"):
            zip.writestr(name, png())
        link = zipfile.ZipInfo("link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        zip.writestr(link, "/etc/passwd")
        zip.writestr("broken.png", b"no image")
    before = site.everything()
    task = site.unpack(out.getvalue())
    assert site.files() == {"good.png"} and len(task["refused"]) == 9
    home = site.place.home
    new = site.everything() - before
    assert all(path.is_relative_to(home / "datasets/sent") for path in new), new


def test_archives_that_unpack_to_more_than_they_say_are_stopped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = archive(**{"a.txt": b"\0" * 4_000_000, "b.png": png()})
    small = len(bomb)
    monkeypatch.setattr(uploading, "MOST_FILE", 1_000_000)
    task = site.unpack(bomb)
    assert len(task["refused"]) == 1 and "too large" in task["refused"][0] and site.files() == {"b.png"}
    monkeypatch.setattr(uploading, "MOST_UNPACKED", 1_000_000)
    assert "too large" in site.send(bomb, "set.zip", status=400)["error"]
    monkeypatch.setattr(uploading, "MOST_ARCHIVE", small - 1)
    assert "too large" in site.send(bomb, "set.zip", status=400)["error"]
    monkeypatch.undo()
    monkeypatch.setattr(image_folders, "MOST_UPLOADED", 1)
    assert "2 files" in site.send(bomb, "set.zip", status=400)["error"]
    assert site.send(b"PK no archive", "set.zip", status=400)["error"]


def test_folders_of_the_draft_are_listed(site: Site) -> None:
    (site.folder / "data/empty").mkdir()
    rows = [site.set, site.set, "/etc", site.folder / "data/none", site.folder / "data", site.folder / "data/empty"]
    folders = "".join(f"[[dataset.folders]]\npath = {json.dumps(str(path))}\n" for path in rows)
    Draft(site.place.home).write(folders)
    told = site.ask("state", folder="", draft=True)["folders"]
    assert [folder["path"] for folder in told] == list(dict.fromkeys(map(str, rows)))
    assert [folder["missing"] for folder in told] == [False, True, True, False, False], "/etc may not be shown"
    assert [folder["empty"] for folder in told] == [False, False, False, False, True], "the page says so at the name"
    assert "/etc" not in site.ask("folders")["folders"]
