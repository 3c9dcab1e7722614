"""Behind the New training page, without a browser: uploads, recognition, arithmetic, estimates, the draft."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from PIL import Image
from waiting import wait_until

from lora_fp8 import config, families, importing, jobs, settings
from lora_fp8.common import numbers
from lora_fp8.data import image_edits
from lora_fp8.data.caption_style import warn_of_sentences
from lora_fp8.data.repeats import Share, count_batches
from lora_fp8.errors import UserError
from lora_fp8.run import disk_space
from webui import (
    base_models,
    dataset_folder,
    estimate_panel,
    form,
    image_folders,
    importer,
    run_monitor,
    translations,
)
from webui.context import Place, Ui
from webui.draft import Draft
from webui.images import routes
from webui.images.listing import Filter, FolderView
from webui.images.training_settings import TrainingSettings
from webui.pages import dataset, new
from webui.pages.new import layout, painting, questions, styles

EXAMPLES = Path(__file__).parent / "data" / "import"

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "lora_fp8" / "demo"


def png(width: int = 8, height: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, "PNG")
    return out.getvalue()


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_has_every_setting_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, json, pathlib, gradio as gr\n"
        "from webui.context import Place, Ui\n"
        "from webui.pages import new\n"
        "with gr.Blocks() as site: new.build(Ui('zh-CN', Place(pathlib.Path(sys.argv[1]))))\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps([b.elem_id for b in site.blocks.values() if getattr(b, 'elem_id', None)]))\n"
        "print(json.dumps([d.api_visibility for d in site.fns.values()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ids, visible = map(json.loads, done.stdout.splitlines()[-2:])
    assert {f"set-{key.replace('.', '-')}" for key in form.collect_settings()} <= set(ids)
    assert len(ids) == len(set(ids))
    assert set(visible) == {"private"}, "nothing of the form is an endpoint for programs"


def test_control_folders_are_asked_for_where_they_are_used(tmp_path: Path) -> None:
    columns = [column.name for column in form.collect_settings()["dataset.folders"].columns]

    def hidden(family: str, row: str = "", view: str = "set") -> set[str]:
        text = f'[model]\nfamily = "{family}"\n[[dataset.folders]]\npath = "a"\n{row}'
        rules = styles._style_columns(
            styles._compute_column_shares(form.read_values(text, tmp_path), False, view), view
        )
        return {name for name, style in zip(columns, rules, strict=True) if "none" in style}

    assert hidden("sdxl") == {"control"} and hidden("flux_kontext") == hidden("sdxl", 'control = "c"') == set()
    rare = {"prefix", "suffix", "regularization", "weight", "resolution", "mask"}  # in the simple view where one is set
    assert hidden("flux_kontext", view="new") == rare
    assert hidden("flux_kontext", 'mask = "m"', "new") == rare - {"mask"}
    assert hidden("flux_kontext", "weight = 0.5", "new") == rare - {"weight"}


def test_the_empty_row_below_the_folders_is_no_folder() -> None:
    table = form.collect_settings()["dataset.folders"]
    empty = [form.to_component(column, column.default) for column in table.columns]
    row = ["/a", *empty[1:]]
    assert form.from_component(table, [row, empty]) == [{"path": "/a"}]
    changed = ["", "3", *empty[2:]]  # a folder whose name is still to come
    assert form.from_component(table, [row, changed])[1] == {"path": "", "repeats": 3}


def test_a_problem_at_its_setting_does_not_repeat_its_key(tmp_path: Path) -> None:
    """Also where the message names the preset that the value is from."""
    (tmp_path / "mine.toml").write_text("[adapter]\nrank = 0\n", encoding="utf-8")
    mine = tmp_path / "mine.toml"
    page = new.Page(Ui("zh-CN", Place(tmp_path / "home", [tmp_path])))
    told = dict(page.problems.find(f'preset = ["{mine}"]\ntrain.steps = 0\n' + form.START))
    assert told["adapter.rank"] == f"必须在 1 到 1024 之间，实际为 0（来自预设 {mine}）"
    assert told["train.steps"] == "必须不小于 1，实际为 0" and "model.path" not in told["model.path"]
    ((key, line),) = page.problems.find('preset = ["/etc/hosts.toml"]\n' + form.START)
    assert key == "preset" and line.startswith("/etc/hosts.toml：页面无权使用该路径")


def test_a_name_that_a_run_has_is_a_problem_with_a_free_one(tmp_path: Path) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    text = 'name = "cat"\n' + form.START
    assert "name" not in dict(page.problems.find(text))
    (tmp_path / "home/runs/cat").mkdir(parents=True)
    assert "name" not in dict(page.problems.find(text))
    (tmp_path / "home/runs/cat/mine.txt").touch()
    assert dict(page.problems.find(text))["name"] == "“cat” exists already. Choose another name; cat-2 is free."
    assert "name" not in dict(page.problems.find(text, has_run=False))  # as for a test of the learning rate
    (tmp_path / "home/runs/my-lora").mkdir()
    (tmp_path / "home/runs/my-lora/mine.txt").touch()
    with gr.Blocks():
        page.lay_out()
    page.handlers.reset(False)
    assert form.read_values(page.draft.load_text(), page.draft.home)["name"] == "my-lora-2"


def test_a_path_that_an_import_left_open_is_no_path(tmp_path: Path) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    text = '[model]\nfamily = "sd15"\npath = "TODO"\n[[dataset.folders]]\npath = "TODO"\n'
    problems = page.problems.find(text)
    left = {key for key, line in problems if line == "this setting must still be filled in (TODO)"}
    assert left == {"model.path", "dataset.folders"} and "home/TODO" not in repr(problems)


def test_a_folder_that_cannot_be_written_is_a_problem_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    obstacles = {tmp_path / "locked": "Permission denied"}  # root, as whom tests may run, writes everywhere
    monkeypatch.setattr(disk_space, "find_write_obstacle", obstacles.get)
    text = f'output_dir = "{tmp_path}/locked"\n{form.START}[dataset]\ncache_dir = "{tmp_path}/locked"\n'
    problems = dict(page.problems.find(text))
    assert "cannot be written (Permission denied)" in problems["output_dir"]
    assert "cannot be written (Permission denied)" in problems["dataset.cache_dir"]
    problems = dict(page.problems.find(text.replace("locked", "open")))
    assert not {"output_dir", "dataset.cache_dir"} & problems.keys()


def test_an_image_that_cannot_be_read_is_a_problem_until_it_is_changed_or_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    folder = tmp_path / "cats"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (folder / "b.png").write_bytes(png()[:40])
    examination = object.__new__(dataset_folder.Examination)
    examination.begun, examination.began_at = 1.0, time.time() + 1
    files = [{"file": "b.png", "detail": "truncated"}]
    examination.report = {"findings": [{"kind": "unreadable", "files": files}]}
    monkeypatch.setattr(dataset_folder, "_examinations", {(folder, None): examination})
    text = form.START + f"[[dataset.folders]]\npath = '{folder}'\n"
    problem = dict(page.problems.find(text))["dataset.folders"]
    assert problem.startswith("cats: unreadable images: b.png (truncated). Exclude them")
    edits = folder / image_edits.FILE
    edits.write_text(image_edits.format_edits({"b.png": image_edits.ImageEdit(exclude=True)}), encoding="utf-8")
    assert "dataset.folders" not in dict(page.problems.find(text))
    edits.unlink()
    assert "dataset.folders" in dict(page.problems.find(text))
    os.utime(folder / "b.png", (time.time() + 5, time.time() + 5))
    assert "dataset.folders" not in dict(page.problems.find(text))


@pytest.mark.skipif(os.name == "nt", reason="there it is a path of this computer")
def test_a_windows_path_of_an_imported_config_is_not_taken_as_relative(tmp_path: Path) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    text = form.START.replace('path = ""', 'path = "D:/models/sd_xl.safetensors"')
    problem = dict(page.problems.find(text))["model.path"]
    assert problem.startswith("D:/models/sd_xl.safetensors: this is not a path of this computer")


def test_a_path_that_leads_nowhere_is_told_as_what_it_should_be(tmp_path: Path) -> None:
    with gr.Blocks():
        page = new.Page(Ui("zh-CN", Place(tmp_path / "home", [tmp_path])))
    (tmp_path / "here").mkdir()
    (tmp_path / "lora.safetensors").touch()
    for path, file, folder in (
        ("none", "没有这个文件", "没有这个文件夹"),
        ("here", "请填写文件", ""),
        ("lora.safetensors", "", "请填写文件夹"),
    ):
        text = (
            f'[model]\nfamily = "sd15"\npath = "{tmp_path}/none.pt"\n[adapter]\ninit_from = "{tmp_path / path}"\n'
            f'[[dataset.folders]]\npath = "{tmp_path / path}"\n[dataset]\ncache_dir = "none"\n'
        )
        assert (
            "没有"
            in dict(page.problems.find(text.replace(f"{tmp_path}/none.pt", "demo").replace("sd15", "wan")))[
                "model.path"
            ]
        )
        told = dict(page.problems.find(text))
        assert told["model.path"].endswith("没有这个文件或文件夹")
        assert "dataset.cache_dir" not in told and bool(file) == ("adapter.init_from" in told)
        assert told.get("adapter.init_from", "").endswith(file)
        assert not folder or told["dataset.folders"].endswith(folder)


def test_a_choice_repaints_only_what_it_changes(tmp_path: Path) -> None:
    """Somebody may be typing in the other fields while its answer is on the way."""
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path, [])))
        page.lay_out()
        preset = questions.GOALS[1]
        painted = {part.elem_id for part in page.presets["simple"].choose("goal", preset, False)}
        values = form.read_values(page.draft.load_text(), page.draft.home)
        changed = {
            key
            for key, value in form.read_values(form.START, tmp_path).items()
            if not form.is_same_value(value, values[key])
        }
        parts = {key: part.elem_id for key, part in page.layout.parts["simple"].items() if key not in painting.LISTED}
        assert {key for key, id in parts.items() if id in painted} == changed & set(parts)
        assert "new-name" not in painted and "new-preset" not in parts
        assert {part.elem_id for part in page.base.choose("demo", "flux", False)} >= {
            "new-model-family",
            "new-model-path",
        }
        assert set(parts.values()) <= {part.elem_id for part in page.painter.update_all("simple", False)}, (
            "opening paints all"
        )
        tell = page.painter.update_side

        def typed_meanwhile(everything: bool) -> dict[Any, Any]:
            page.draft.put("train.steps", 2)  # of 21: the field holds more by the time the answer comes
            return tell(everything)

        page.painter.update_side = typed_meanwhile
        painted = {part.elem_id for part in page.presets["simple"].choose("goal", questions.GOALS[0], False)}
        assert "new-presets" in painted and "new-train-steps" not in painted


def test_a_changed_setting_goes_back_to_its_preset_or_default(tmp_path: Path) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path, [])))
        page.lay_out()
    text = '# mine\npreset = ["character"]\n[model]\nfamily = "sdxl"\npath = ""\n[adapter]\nrank = 5\nalpha = 3\n'
    page.draft.write(text)
    of_preset = form.read_values(text.replace("rank = 5\n", ""), tmp_path)["adapter.rank"]
    changes = page.painter.update_side()[page.layout.changes]
    assert 'data-key="adapter.rank"' in changes.replace("'", '"') and 'data-key="model.family"' not in changes
    press = lambda key: page.handlers.set_default(SimpleNamespace(_data={"do": "default", "key": key}), False)  # noqa: E731
    painted = press("adapter.rank")
    after = page.draft.load_text()
    assert "# mine" in after and "rank" not in after and "alpha = 3" in after
    assert str(of_preset) in str(painted[page.layout.parts["all"]["adapter.rank"]])
    press("no.such.setting")
    assert page.draft.load_text() == after


def test_nothing_in_a_problem_ends_the_style_sheet_that_shows_it() -> None:
    from webui.pages.new.styles import _quote_css

    bad = "\"</style><script>alert(1)</script>\\ '} body { display: none } \u202e\n中文"
    text = _quote_css(bad)
    assert text[0] == text[-1] == '"'
    assert not set('<>"\\{}\n\u202e') & (set(text[1:-1]) - {"\\"}) and "</" not in text
    assert "中文" in text


# ------------------------------------------------------------------------------------------------------------ pictures


def add_files(files: list[Path], folder: Path) -> tuple[int, list[str]]:
    """Add files to a folder as an upload does. Returns how many were taken in, and what is said of the others."""
    count, refused = 0, []
    for file in files:
        try:
            count += image_folders.add_file(file, folder, file.name) == "taken"
        except UserError as error:
            refused.append(str(error))
    return count, refused


def test_uploads_are_kept_byte_for_byte_and_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    sent, kept = tmp_path / "sent", tmp_path / "kept"
    sent.mkdir()
    files = {
        "a.png": png(),
        "a.txt": "标注".encode("utf-16"),
        "broken.png": png()[:40],
        "page.html": b"<script>",
        "bomb.png": png(13000, 13000),
        "text.png": b"not a picture",
    }
    for name, data in files.items():
        (sent / name).write_bytes(data)
    count, refused = add_files([sent / name for name in files], kept)
    assert count == 1 and {path.name for path in kept.iterdir()} == {"a.png", "a.txt"}
    assert all((kept / name).read_bytes() == files[name] for name in ("a.png", "a.txt"))
    assert [line.partition(":")[0] for line in refused] == ["broken.png", "page.html", "bomb.png", "text.png"]
    # Once more is no harm; another picture of the same name is not put over the first.
    assert add_files([sent / "a.png"], kept) == (0, [])
    (sent / "a.png").write_bytes(png(9, 9))
    count, refused = add_files([sent / "a.png"], kept)
    assert count == 0 and len(refused) == 1 and (kept / "a.png").read_bytes() == files["a.png"]


def test_captions_in_another_encoding_prevent_a_start_until_they_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training refuses them; Windows in Chinese has written many."""
    with gr.Blocks():
        page = new.Page(Ui("zh-CN", Place(tmp_path / "home", [tmp_path])))
    folder = tmp_path / "cats"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (folder / "a.txt").write_bytes("一只猫，坐着".encode("gb18030"))
    text = form.START + f"[[dataset.folders]]\npath = '{folder}'\n"
    problem = dict(page.problems.find(text))["dataset.folders"]
    assert "a.txt" in problem and "gb18030" in problem
    view = FolderView(page.ui, str(folder))
    assert view.list_rows(Filter(), 0, 9)["without"] == 0, "a caption that cannot be read is not missing"
    (folder / "a.txt").write_text("一只猫", encoding="utf-8")
    monkeypatch.setattr(dataset_folder, "FRESH_SECONDS", 0)
    assert not {"dataset.folders", "dataset.missing_caption"} & dict(page.problems.find(text)).keys()


def test_the_crop_that_is_shown_is_the_one_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo has buckets in steps of 16 pixels; with those of 64, a third of this image would be cut."""
    ui = Ui("en", Place(tmp_path / "home", [tmp_path]))
    folder = tmp_path / "cats"
    folder.mkdir()
    (folder / "a.png").write_bytes(png(96, 64))
    commands: list[list[str]] = []

    def stand_in(examination: dataset_folder.Examination) -> None:
        commands.append(examination._command)
        examination.report = {"pictures": [{"file": "a.png", "width": 96, "height": 64}], "findings": []}

    monkeypatch.setattr(dataset_folder.Examination, "_run", stand_in)
    folders = f"[[dataset.folders]]\npath = '{folder}'\n"
    for extra, box, given in (
        ("bucket_step = 16\n", "80 × 48", ["dataset.bucket_step=16"]),
        ("bucket_step = 5\nupscale = false\n", "64 × 64", ["dataset.upscale=false"]),
    ):
        base = '[model]\nfamily = "sd15"\npath = "demo"\n[dataset]\nresolution = 64\n'
        Draft(ui.place.home).write(f"{base}{extra}{folders}")
        view = FolderView(ui, str(folder), fresh=True)
        wait_until(lambda view=view: view.examine().report)
        (row,) = view.list_rows(Filter(), 0, 9)["rows"]
        assert row["figures"][1].startswith(f"trained at {box}"), row["figures"]
        assert [part for part in commands[-1] if part.startswith("dataset.")] == given


def test_pictures_are_counted_as_training_counts_them(tmp_path: Path) -> None:
    from lora_fp8.data import images

    for name in ("a.png", "b.PNG", "sub/c.png", ".hidden/d.png", "x.gifx", "empty.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(64, 64))
    for name in ("a.txt", "sub/c.caption"):
        (tmp_path / name).write_text("a caption")
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf \r\n")
    scanned = images.scan(settings.Dataset(folders=[settings.Folder(path=str(tmp_path))], missing_caption="skip"))
    found = image_folders.count_files(tmp_path)
    assert (found.pictures, found.without_caption) == (4, 2)
    assert len(scanned.examples) == found.pictures - found.without_caption
    (tmp_path / image_edits.FILE).write_text('["x.png"]\nexclude = true\n["sub/c.png"]\nexclude = true\n')
    image_folders._counted.clear()
    assert image_folders.count_files(tmp_path).pictures == 3
    (tmp_path / image_edits.FILE).unlink()
    (tmp_path / "sub/c_mask.png").write_bytes(png(64, 64))
    assert image_folders.count_files(tmp_path, "*_mask") == found, "a mask beside its picture is none"


def test_the_search_in_all_settings_knows_the_words_of_others() -> None:
    """What static/search.js looks at; tests/ui/test_form_path.py types into the field."""
    texts = {key: layout._get_search_text(setting) for key, setting in form.collect_settings().items()}
    for words, key in (("network dim", "adapter.rank"), ("lora rank", "adapter.rank"), ("秩", "adapter.rank")):
        assert words in texts[key] and words not in texts["seed"]
    assert all(text == text.lower() and "_" not in text for text in texts.values()), "as what is typed is normalized"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("https://huggingface.co/owner/name", "owner/name"),
        ("https://huggingface.co/owner/name/tree/main?x=1", "owner/name"),
        ("https://hf.co/owner/name", "owner/name"),
        ("https://huggingface.co/owner", ""),
        ("https://evil.example/owner/name", ""),
        ("owner/name", ""),
        ("https://huggingface.co/../name", ""),
    ],
)
def test_an_address_of_the_hub_is_an_id(tmp_path: Path, given: str, meant: str) -> None:
    assert base_models.read_address(given) == meant
    page = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
    with gr.Blocks():
        page.lay_out()
    page.painter.update_side = lambda everything: {}
    page.painter.update_view = lambda view, done, but="": {"but": but}
    painted = page.handlers.change("simple", "model.path", True, given, False)
    assert form.read_values(page.draft.load_text())["model.path"] == (meant or given)
    assert painted["but"] == ("" if meant else "model.path"), "the field shows what was understood"


@pytest.mark.parametrize("name", ["*_mask", "*-masklabel"])
def test_masks_beside_pictures_are_told_and_are_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, ui = tmp_path / "set", Ui("en", Place(tmp_path / "home", [tmp_path]))
    (folder / "deep").mkdir(parents=True)
    masks = [f"{name.replace('*', 'a')}.png", f"deep/{name.replace('*', 'b')}.png"]
    for file in ("a.png", "deep/b.png", "c-mask.png", *masks):
        (folder / file).write_bytes(png())
    (folder / "a.txt").write_text("a ball")
    trained = name == "*_mask"  # OneTrainer's are no pictures in any case
    assert image_folders.count_files(folder) == image_folders.Count(
        3 + 2 * trained, 2 + 2 * trained, masks=2, mask=name
    )
    assert image_folders.count_files(folder, name) == image_folders.Count(3, 2)
    page, theirs = dataset.Page(ui), {"a.png", "deep/b.png", "c-mask.png"}
    monkeypatch.setattr(dataset_folder.jobs, "ensure_worker", lambda home: None)
    one, told = (
        dataset_folder.open_folder(folder, fresh=True),
        f"enter {name} in the “Masks” column of this folder",
    )
    assert set(one.files) == theirs and told in page.renderer.render_head(one)
    assert ("they are trained as ordinary images" in page.renderer.render_head(one)) == trained

    # They get no captions: not by an edit of all, nor by a model; and the check-up takes them for what they are.
    at = {"folder": str(folder), "cut": {}, "chosen": []}
    edit = page.handlers.preview(at, "add_first", "zibo", "", "all")[1]
    assert {change.file for change in edit.changes} == {"a.txt", "deep/b.txt", "c-mask.txt"}
    routes.ACTIONS["caption"](ui, routes.Given({"folder": str(folder), "model": "some/model"}))
    assert f"--mask={name}" in jobs.Queue(ui.place.home).list_jobs(shell=False)[0].command
    report = page.handlers.open_view(at, "sd15").examine()
    wait_until(lambda: not report.running)
    assert report.report["counts"]["masked"] == 2 and set(report.list_files("caption_missing")) == theirs - {"a.png"}

    # Where New training says it, there is nothing to do; and what has a caption of its own is no mask.
    Draft(ui.place.home).write(f'[[dataset.folders]]\npath = "{folder}"\nmask = "{name}"\n')
    assert TrainingSettings(ui).find_mask(folder) == name
    one = dataset_folder.open_folder(folder, mask=name)
    assert (
        set(one.files) == theirs
        and f"2 masks ({name})" in page.renderer.render_head(one)
        and told not in page.renderer.render_head(one)
    )
    if trained:
        (folder / masks[0]).with_suffix(".txt").write_text("a white ball")
        assert len(dataset_folder.open_folder(folder, fresh=True).files) == 5
        (folder / "masks" / "deep").mkdir(parents=True)
        (folder / "masks" / "deep" / "b.jpg").write_bytes(png())
        assert "masks looks like a mask folder" in page.renderer.render_head(
            dataset_folder.open_folder(folder, fresh=True)
        )


# --------------------------------------------------------------------------------------------------- bases and presets


@pytest.mark.parametrize("family", base_models.list_demo_families())
def test_a_diffusers_folder_tells_its_family(family: str) -> None:
    assert base_models.inspect_base(DEMO / "base" / family) == base_models.Base(family)


def test_relatives_are_told_apart_and_strangers_are_not_guessed(tmp_path: Path) -> None:
    family = families.get("sd2")
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": family.pipeline_class}))
    (tmp_path / "unet" / "config.json").write_text(json.dumps(family.config_marks))
    assert base_models.inspect_base(tmp_path).family == "sd2"
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"in_channels": 9}))
    assert base_models.inspect_base(tmp_path) == base_models.inspect_base(tmp_path / "nothing") == base_models.Base(), (
        "an inpainting model is neither"
    )


def write_header(path: Path, shapes: dict[str, tuple[int, ...]], missing: int = 0) -> Path:
    """A safetensors file of float16 zeros that take no room on disk; `missing`: bytes that it lacks at its end."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end - missing)
    return path


SDXL = {
    "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
    "model.diffusion_model.label_emb.0.0.weight": (1280, 2816),
    "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight": (768,),
}
FLUX = {
    "img_in.weight": (3072, 64),
    "final_layer.linear.weight": (64, 3072),
    "vector_in.in_layer.weight": (3072, 768),
    "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
}


def test_a_single_file_is_recognised_by_its_header_at_once(tmp_path: Path) -> None:
    """Names and shapes as the published files have them; tests of the families hold the marks against whole files."""
    many = {f"model.diffusion_model.middle_block.{i}.weight": (4,) for i in range(4000)}
    xl = write_header(tmp_path / "xl.safetensors", {**SDXL, **many})
    began = time.process_time()  # others may keep this machine busy
    assert base_models.inspect_base(xl) == base_models.Base("sdxl", single=True)
    assert time.process_time() - began < 1
    flux = base_models.inspect_base(write_header(tmp_path / "flux.safetensors", FLUX))
    assert flux.family == "flux" and base_models.fits_family(flux, "flux_kontext"), (
        "the same tensors, and nothing tells"
    )
    assert not base_models.fits_family(flux, "sdxl") and not base_models.fits_family(
        base_models.inspect_base(xl), "flux_kontext"
    )
    assert base_models.fits_family(flux, "no such family") is False and base_models.fits_family(
        base_models.Base(), "sdxl"
    )
    fill = write_header(tmp_path / "fill.safetensors", FLUX | {"img_in.weight": (3072, 384)})
    lora = write_header(tmp_path / "lora.safetensors", {"lora_unet_mid_block.lora_up.weight": (4, 4)})
    short = write_header(tmp_path / "short.safetensors", SDXL, missing=7)
    (tmp_path / "old.ckpt").write_bytes(b"PK")
    for path, wrong in ((fill, "known kind"), (lora, "a LoRA"), (short, "damaged"), ("old.ckpt", "pickles")):
        found = base_models.inspect_base(tmp_path / path)
        assert wrong in found.wrong and not found.family and found.single
    # The file is replaced by another: it is looked at anew.
    write_header(xl, FLUX)
    assert base_models.inspect_base(xl).family == "flux"


def test_models_are_offered_with_their_architecture(tmp_path: Path) -> None:
    models, root = tmp_path / "models", tmp_path / "root"
    xl = write_header(models / "sdxl" / "xl.safetensors", SDXL)
    write_header(models / "lora.safetensors", {"x.lora_up.weight": (4, 4)})
    write_header(root / "small.safetensors", SDXL)
    shutil.copytree(DEMO / "base" / "sd15", models / "mini")
    titles = {name: families.get(name).title for name in ("sdxl", "sd15")}
    assert base_models.find_base_models([models], [root, models]) == [
        (f"mini · {titles['sd15']}", str(models / "mini")),
        (f"sdxl/xl.safetensors · {titles['sdxl']}", str(xl)),
    ]
    assert base_models.find_component_folders([models], [root], "sd15") == [
        (f"mini · {titles['sd15']}", str(models / "mini"))
    ]
    assert base_models.find_component_folders([models], [root], "sdxl") == [], "a single file lacks the same"


@pytest.mark.parametrize("everything", [False, True])
def test_steps_that_an_import_could_not_count_have_to_be_filled_in(tmp_path: Path, everything: bool) -> None:
    """kohya's epochs are of images that the file names on another computer."""
    file = tmp_path / "k.toml"
    lines = ('pretrained_model_name_or_path = "D:/sdxl.safetensors"', 'network_module = "networks.lora"')
    file.write_text("\n".join((*lines, "max_train_epochs = 10", 'train_data_dir = "D:/cats"')), encoding="utf-8")
    with gr.Blocks():
        page = new.Page(Ui("zh-CN", Place(tmp_path / "home", [tmp_path])))
        page.lay_out()
    page.handlers.import_settings([str(file)], everything)
    assert "尚待填写（TODO）" in dict(page.problems.find(page.draft.load_text()))["train.steps"]
    assert "尚待填写（TODO）" in page.summary.render()
    page.draft.put("train.steps", 30)
    page.painter.update_all("", everything)
    assert "train.steps" not in dict(page.problems.find(page.draft.load_text()))


def test_a_saved_preset_gives_the_same_settings_under_another_job(tmp_path: Path) -> None:
    text = 'name = "x"\npreset = ["character"]\n[model]\nfamily = "sdxl"\npath = "a/b"\n[adapter]\nrank = 5\n'
    path = base_models.save_preset(tmp_path, "mine", text)
    data = tomllib.loads(path.read_text())
    assert data["adapter"]["rank"] == 5 and data["train"]["steps"] == 1200 and not {"name", "model"} & data.keys()
    other = f'preset = ["{path}"]\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"\n'
    job = config.loads(other)
    assert job.adapter.rank == 5 and job.train.steps == 1200 and job.model.family == "sd15"
    with pytest.raises(UserError):
        base_models.save_preset(tmp_path, "mine", text)
    with pytest.raises(UserError):
        base_models.save_preset(tmp_path, "character", text)


def test_settings_of_another_trainer_become_the_draft(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(
        'pretrained_model_name_or_path = "m"\nnetwork_module = "networks.lora"\nnetwork_dim = 7\n<x>=1\n'[:-6]
    )
    ui = Ui("zh-CN", Place(tmp_path / "home"))
    text, account = importer.import_files(ui, [file])
    assert tomllib.loads(text)["adapter"]["rank"] == 7
    assert "network_dim" in account and "已导入" in account and "按 sd-scripts 0.10 的默认值填写" in account
    assert re.search("<strong>是否为同一训练：否，因为有 . 项需要补充", account)
    # What its remarks say, each in Chinese though several stand in one line; what was not found.
    shutil.copy(EXAMPLES / "sd_scripts_flux.toml", file)
    _, account = importer.import_files(ui, [file])
    assert "注意</strong>" in account and "请把该文件和 k.toml 放在一起" in account
    (tmp_path / "prompts.txt").write_text("a cat --s 20 --l 4 --w 100\na dog --s 30\n")
    text, account = importer.import_files(ui, [tmp_path / "prompts.txt", file])
    assert "不用 --l（无分类器引导）；width 已取整为 16 的倍数" in account
    assert tomllib.loads(text)["preview"]["prompts"] == ["a cat --w 96 --s 20", "a dog --s 30"]
    file.write_text("a = 1\n")
    with pytest.raises(UserError):
        importer.import_files(ui, [file])


TOGETHER = (
    ("sd_scripts_flux.toml", "sd_scripts_dataset.toml", "prompts.txt"),
    ("fluxgym_train.sh", "fluxgym_dataset.toml", "prompts.txt"),
    ("musubi_qwen.toml", "musubi_dataset.toml"),
    ("diffusion_pipe_flux.toml", "diffusion_pipe_dataset.toml"),
    ("onetrainer_sdxl.json", "onetrainer_concepts.json", "onetrainer_samples.json"),
    ("simpletuner_sdxl.json", "simpletuner_backend.json", "simpletuner_lycoris.json"),
)


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_files_that_settings_refer_to_come_with_them(names: tuple[str, ...], tmp_path: Path) -> None:
    """Uploads lie in a folder each and come in any order; what is made of them is what the command makes."""
    apart = []
    for name in reversed([*names, "kohya_ss_readme.txt"]):
        apart.append(tmp_path / f"upload of {name}" / name)
        apart[-1].parent.mkdir()
        apart[-1].write_bytes((EXAMPLES / name).read_bytes() if name in names else b"nothing of this\n")
    text, account = importer.import_files(Ui("en", Place(tmp_path / "home")), apart)
    expected = importing.import_file(EXAMPLES / names[0]).settings
    expected.pop("output_dir", None)  # theirs is not the page's to write to
    assert tomllib.loads(text) == expected
    read = re.search(r"<p>Also read: (.*?)</p>", account)
    assert read and sorted(read[1].split(", ")) == sorted(names[1:])
    unused = f"Not used: kohya_ss_readme.txt: {names[0]} does not refer to it"
    assert unused in account and account.count("Not used") == 1 and str(tmp_path) not in account


BOMB = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [%s]\n" % (c, c, b"*%c, " % (c - 1) * 9) for c in range(98, 112))
"""A file of YAML of half a kilobyte that stands for more values than a memory holds."""


def test_files_beside_settings_are_text_and_of_one_training(tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    ui = Ui("zh-CN", Place(tmp_path / "home"))
    main = file("k.toml", b'pretrained_model_name_or_path = "m"\nnetwork_dim = 7\nnetwork_module = "networks.lora"\n')
    strange = [
        file("binary.txt", b"\xff\xd8\xff\xe0 a picture"),
        file("broken.json", b'{"a": '),
        file("large.txt", b"x" * (importer.LARGEST + 1)),
        file("bomb.yaml", BOMB),
        (tmp_path / "other" / "k.toml"),
    ]  # fmt: skip
    strange[-1].parent.mkdir()
    strange[-1].write_bytes(main.read_bytes())
    told = dict(re.findall(r"未使用：(.*?)：(.*?)</p>", importer.import_files(ui, [main, *strange])[1]))
    assert told.keys() == {one.name for one in strange}
    reasons = {"binary.txt": "不是 UTF-8", "broken.json": "JSON", "large.txt": "超过配置文件的上限"}
    reasons |= {"bomb.yaml": "没有引用它", "k.toml": "同名"}
    assert [name for name, reason in reasons.items() if reason not in told[name]] == []
    with pytest.raises(UserError, match="100000 values"):
        importer.import_files(ui, [strange[3]])
    other = file("o.toml", main.read_bytes())
    with pytest.raises(UserError, match=r"k\.toml, o\.toml: each of these is a training of its own"):
        importer.import_files(ui, [main, other])
    with pytest.raises(UserError, match="21 files"):
        importer.import_files(ui, [main] * 21)


# ----------------------------------------------------------------------------------------------------- estimate panel


def test_the_arithmetic_is_the_engines() -> None:
    """12 pictures twice an epoch, batches of 2, two of them a step."""
    found = {"train.batch_size": 2, "train.accumulate": 2, "train.steps": 60}
    assert estimate_panel.count_epochs(24, found) == estimate_panel.Epochs(24, 4, 6.0, 10.0)
    estimate = {"steps_per_epoch": 8.0, "epochs": 7.5}  # with the buckets
    assert estimate_panel.count_epochs(24, found, estimate) == estimate_panel.Epochs(24, 4, 8.0, 7.5, True)
    for wrong in ({"train.steps": 0}, {"train.batch_size": "x"}, {"train.accumulate": True}):
        assert estimate_panel.count_epochs(24, found | wrong) is None
    assert estimate_panel.count_epochs(0, found) is None
    # An epoch of 3 images is one batch, however large a batch may be.
    large = found | {"train.batch_size": 64}
    assert estimate_panel.count_epochs(3, large) == estimate_panel.Epochs(3, 6, 0.5, 120.0)
    assert [count_batches([[Share(1, 0, 1)] * 3], size, 0) for size in (2, 3, 64)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("number", "told"),
    [(1000 / 3, "333"), (1000.0, "1000"), (12345.6, "12346"), (99.96, "100"), (99.9, "99.9"), (2.5, "2.5"), (12, "12")]
    + [(0.00012345, "0.000123"), (0, "0"), (1 / 16, "0.0625"), (10**7 + 0.5, "10000000")],
)
def test_numbers_are_told_without_exponents(number: float, told: str) -> None:
    assert numbers.format_digits(number) == told


def test_time_is_that_of_the_newest_run_of_the_family(tmp_path: Path) -> None:
    assert estimate_panel.find_pace([tmp_path], "sd15") is None
    for age, (name, family, seconds) in enumerate((("old", "sd15", 9), ("new", "sd15", 2), ("other", "flux", 7))):
        run = tmp_path / name
        run.mkdir()
        (run / "config.toml").write_text(f'[model]\nfamily = "{family}"\n')
        lines = [{"t": 100 + seconds * step, "event": "step", "step": step} for step in range(1, 20)]
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.utime(run / "config.toml", (1000 + age, 1000 + age))
    assert estimate_panel.find_pace([tmp_path], "sd15") == (2.0, "new")
    assert estimate_panel.find_pace([tmp_path], "sdxl") is None


def test_an_estimate_is_the_engines_answer_for_this_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = 'preset = ["demo_sd15"]\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\n'
    text = base + f'path = "{DEMO / "dataset"}"\n'
    estimates = estimate_panel.Estimates(tmp_path)
    assert estimates.get("[model") == "", "what is wrong is told elsewhere"
    wait_until(lambda: estimates.get(text) is not None)
    found = estimates.get(text)
    assert isinstance(found, dict), found
    assert found["pictures"] == 16 and found["peak_bytes"] > found["base_bytes"] > 1e6 and found["file_bytes"]
    assert estimates.get(text.replace("[model]", 'name = "y"\n[model]')) == found, "no name changes it"
    assert not list((tmp_path / "drafts").glob("tmp*")), "nothing is left behind"

    prose = ["A dog runs over the wet grass, and a cat looks on.", "A man sits in a room, and nobody sees him."]
    (told,) = warn_of_sentences([*prose, "1girl, solo"], settings.Dataset(shuffle_tags=True))
    draft = new.Page(Ui("zh-CN", Place(tmp_path, [tmp_path, DEMO])))
    draft.draft.write(text)
    draft.summary.estimates = SimpleNamespace(get=lambda text: found | {"notes": [told]})
    assert "3 条标注中有 2 条像是句子" in draft.summary.render(), "the page shows what the engine noted"

    assert estimate_panel.check_disk_space(found) == ([], [])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    (problem,), _ = estimate_panel.check_disk_space(found)
    assert f"{tmp_path / 'runs'}" in problem and "5 MiB are free" in problem and "of checkpoints" in problem
    assert translations.translate("zh-CN", problem).count("MiB") == problem.count(
        "MiB"
    ) and "断点" in translations.translate("zh-CN", problem)


# --------------------------------------------------------------------------------------------------------------- draft


def test_two_tabs_that_set_different_settings_both_have_their_way(tmp_path: Path) -> None:
    tabs = [Draft(tmp_path), Draft(tmp_path)]
    assert tabs[0].load_text() == form.START

    def work(tab: Draft, key: str) -> None:
        for number in range(1, 31):
            tab.put(key, number)

    threads = [
        threading.Thread(target=work, args=args) for args in zip(tabs, ("train.steps", "adapter.rank"), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = tomllib.loads(tabs[1].load_text())
    assert found["train"]["steps"] == 30 and found["adapter"]["rank"] == 30


def test_a_draft_that_is_not_toml_is_kept_and_not_changed_by_the_form(tmp_path: Path) -> None:
    draft = Draft(tmp_path)
    draft.write("[model\n# mine")
    with pytest.raises(UserError):
        draft.put("train.steps", 5)
    assert draft.load_text() == "[model\n# mine"


def test_what_was_replaced_comes_back(tmp_path: Path) -> None:
    with gr.Blocks():
        page = new.Page(Ui("en", Place(tmp_path, [])))
        page.lay_out()
        mine = 'name = "mine"  # an hour of work\n'
        page.draft.write(mine)
        assert page.painter.update_side()[page.layout.back]["visible"] is False
        for _ in range(2):  # twice, and nothing is lost all the same
            assert (
                page.handlers.reset(False)[page.layout.back]["visible"] is True and page.draft.load_text() == form.START
            )
        assert page.handlers.restore_draft(False)[page.layout.code] == page.draft.load_text() == mine
        page.draft.put("train.steps", 7)
        later = page.draft.load_text()
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "other.toml").write_text('name = "other"\n')
        page.handlers.load(str(tmp_path / "runs" / "other.toml"), False)
        assert page.draft.load_text() == 'name = "other"\n'
        page.handlers.restore_draft(False)
        assert page.draft.load_text() == later
        page.handlers.restore_draft(False)
        assert page.draft.load_text() == 'name = "other"\n'


def test_a_folder_is_examined_for_what_is_being_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the draft of New training; while that is untouched, for the newest training of the queue."""
    folder, ui = tmp_path / "set", Ui("en", Place(tmp_path / "home", [tmp_path]))
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    page = dataset.Page(ui)
    asked: list[tuple[str, int]] = []

    def examination(at: Path, purpose: dataset_folder.Purpose, again: bool = False) -> SimpleNamespace:
        asked.append((purpose.family, purpose.resolution))
        return SimpleNamespace(files=None)

    monkeypatch.setattr(dataset_folder, "examine", examination)

    def opened() -> tuple[str, int]:
        request = SimpleNamespace(query_params={"folder": str(folder)})
        _, shown, _, _, _, family, resolution, *_, at, purpose, _ = page.handlers.open(request)
        page.handlers.open_view(at, family, resolution).examine()
        assert shown["visible"] and asked[-1] == (family, resolution or 512)
        # The image workbench is told the same, and finds the same if it is not told.
        told = json.loads(purpose)
        assert (told["folder"], told["family"], told["resolution"]) == (str(folder), *asked[-1])
        FolderView(ui, str(folder)).examine()
        assert asked[-1] == asked[-2]
        return family, resolution

    assert opened() == ("sd15", 0), "as New training begins"
    queue = jobs.Queue(ui.place.home)
    for number, side in enumerate((64, 128)):
        text = f'name = "r{number}"\noutput_dir = "{tmp_path}/runs"\n[model]\nfamily = "sd15"\npath = "demo"\n'
        queue.submit(f'{text}[dataset]\nresolution = {side}\n[[dataset.folders]]\npath = "{folder}"\n')
    run_monitor.get_monitor(ui.place).views.invalidate()
    assert opened() == ("sd15", 128)
    draft = Draft(ui.place.home)
    draft.write('[model]\nfamily = "sd15"\npath = "demo"\n[dataset]\nresolution = 256\n')
    assert opened() == ("sd15", 256)
    row = f'[[dataset.folders]]\npath = "{folder}"\nresolution = 320\n'
    draft.write(f'[dataset]\nresolution = 256\n{row}[model]\nfamily = "sd15"\n')
    assert opened() == ("sd15", 320), "the folder's own"
    for odd in ("[model", '[model]\nfamily = "absent"\n', "[model]\nfamily = [1]\n"):
        draft.write(odd)
        page.handlers.open(SimpleNamespace(query_params={}))
