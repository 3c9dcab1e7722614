"""The HTML report of a run: what it says is what the run folder says, it holds all it shows, and nothing in a run acts.

Judged by an HTML parser and the files themselves; tests/ui/test_report_page.py opens it in a browser.
"""

import base64
import fcntl
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from lora_fp8 import config
from lora_fp8.common import messages
from lora_fp8.config import recipes
from lora_fp8.errors import UserError
from lora_fp8.run import Run, drawings, ownership
from lora_fp8.tools import report
from lora_fp8.tools.report import pictures
from lora_fp8.tools.report.contents import Contents

HOSTILE = (
    '"></style></textarea><script>window.canary=1</script><img src=x onerror=window.canary=1>'
    "<a href='javascript:window.canary=1'>`{{7*7}}${7*7}'\u202e\x00"
)
CONFIG = (
    'name = "fox"\n[model]\nfamily = "sd15"\npath = "owner/base"\n[[dataset.folders]]\npath = "/home/jane/secret"\n'
)
VOID = {"meta", "img", "link", "br", "hr", "input", "path"}


class Reader(HTMLParser):
    """What a browser reads: tags with their attributes, and text by section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.section = "head"
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append((tag, given))
        if tag == "section":
            self.section = str(given["aria-labelledby"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, "every element is closed where it was opened"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.texts.setdefault(self.section, []).append(data)
            if {"td", "th"} & set(self.open[-4:]):
                self.rows[-1][-1] += data

    def text(self, section: str) -> str:
        return " ".join(" ".join(self.texts.get(section, [])).split())

    def row(self, begin: str) -> list[str]:
        (row,) = [row for row in self.rows if row and row[0].startswith(begin)]
        return row


def write_events(folder: Path, events: list[dict]) -> None:
    with open(folder / "events.jsonl", "a", encoding="utf-8") as log:
        log.writelines(json.dumps(event) + "\n" for event in events)


def step(number: int, loss: float, t: float = 0.0) -> dict:
    return {"t": t or 1000.0 + number, "event": "step", "step": number, "loss": loss, "lr": 1e-4, "vram_gb": 2.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with its marker and settings, and no event."""
    path = tmp_path / "runs" / "fox"
    (path / "samples").mkdir(parents=True)
    (path / "export").mkdir()
    (path / ownership.MARKER).write_text('{"version": 1}\n', encoding="utf-8")
    (path / "config.toml").write_text(config.dumps(config.loads(CONFIG)), encoding="utf-8")
    write_events(path, [{"t": 1000.0, "event": "start", "device": "cpu", "processes": 1}])
    return path


def draw(path: Path, colour: str, size: tuple[int, int] = (64, 48)) -> None:
    Image.new("RGB", size, colour).save(path)


def read(folder: Path, language: str = "en", **options) -> Reader:
    return Reader(report.render(Run.open(folder), language, **options))


def train(folder: Path, steps: int = 20) -> None:
    """Write the events of a training with validation and previews, and their images."""
    write_events(folder, [{"t": 1001.0, "event": "stage", "stage": "train", "step": 0, "steps": steps}])
    for number in range(steps + 1):
        write_events(folder, [step(number, 1 / number)] if number else [])
        if number % 5 == 0:
            bands = {"t = 100 of 1000": 2.0 - number / 10, "t = 500 of 1000": 1.0}
            loss = abs(number - 10) / 100 + 0.5
            write_events(
                folder, [{"t": 1000.5 + number, "event": "validation", "step": number, "loss": loss, "bands": bands}]
            )
            images = [f"samples/step-{number:06d}-{at}.png" for at in range(2)]
            prompts = ["a red fox", "a blue fox"]
            write_events(
                folder,
                [{"t": 1000.6 + number, "event": "preview", "step": number, "images": images, "prompts": prompts}],
            )
            for image, colour in zip(images, ("red", "blue"), strict=True):
                draw(folder / image, colour)
    text = {"zh-CN": {"Held-out loss was best at step 10 (0.5).": "验证集 loss 在第 10 步最低（0.5）。"}}
    verdict = {"best": 10, "loss": 0.5, "text": "Held-out loss was best at step 10 (0.5).", "translations": text}
    write_events(folder, [{"t": 1001.0 + steps, "event": "verdict", "step": steps, **verdict}])


def test_the_numbers_are_those_of_the_log(folder: Path) -> None:
    train(folder)
    write_events(folder, [{"t": 1062.0, "event": "done", "step": 20, "files": []}])
    reader = read(folder)
    charts = [
        json.loads(given["data-chart"]) for tag, given in reader.tags if tag == "figure" and "data-chart" in given
    ]
    by_label = {line["label"]: dict(map(tuple, line["at"])) for chart in charts for line in chart["lines"]}
    assert by_label["each step"] == {number: float(f"{1 / number:.4g}") for number in range(1, 21)}
    assert by_label["all timesteps"] == {0: 0.6, 5: 0.55, 10: 0.5, 15: 0.55, 20: 0.6}
    assert by_label["t = 100 of 1000"] == {0: 2.0, 5: 1.5, 10: 1.0, 15: 0.5, 20: 0.0}
    assert by_label[""] == dict.fromkeys(range(1, 21), 1e-4)
    for number in (0, 5, 10, 15, 20):  # the same numbers as a table
        loss = f"{abs(number - 10) / 100 + 0.5:.4g}"
        assert [f"{number}", loss, f"{2.0 - number / 10:.4g}", "1"] in reader.rows
    first, last = sum(1 / number for number in (1, 2)) / 2, sum(1 / number for number in (19, 20)) / 2
    assert f"{first:.4g} over the first tenth of the steps, {last:.4g} over the last tenth" in reader.text("curves")
    head = reader.text("head")
    assert "fox done" in head and "owner/base" in head and "Stable Diffusion 1.5" in head and "Time 62 s" in head
    assert "Held-out loss was best at step 10 (0.5)." in head and reader.text("curves").count("best: step 10") == 2
    chinese = read(folder, "zh-CN")
    assert "验证集 loss 在第 10 步最低（0.5）。" in chinese.text("head") and "已完成" in chinese.text("head")


@pytest.mark.parametrize(("best", "risen", "marked"), [(10, None, False), (10, 15, True), (0, None, True)])
def test_a_loss_that_rose_or_never_fell_is_no_success(folder: Path, best: int, risen: int | None, marked: bool) -> None:
    train(folder)
    verdict = {"best": best, "loss": 0.5, "risen_since": risen, "text": "Held-out loss."}
    write_events(folder, [{"t": 1030.0, "event": "verdict", "step": 20, **verdict}])
    classes = [given["class"] for tag, given in read(folder).tags if "verdict" in given.get("class", "")]
    assert classes == ["verdict warn" if marked else "verdict"]


def test_the_time_between_two_starts_is_not_counted(folder: Path) -> None:
    write_events(folder, [step(1, 1.0, 1010.0), {"t": 9000.0, "event": "start"}, step(2, 1.0, 9030.0)])
    contents = Contents(Run.open(folder))
    assert contents.seconds == 10 + 30 and contents.starts == 2 and contents.began == 1000.0


def test_previews_are_shown_by_prompt_and_step_and_are_those_that_were_drawn(folder: Path) -> None:
    train(folder)
    reader = read(folder)
    images = {given["alt"]: given for tag, given in reader.tags if tag == "img"}
    names = ["Before training", "Step 5", "Step 10 (best)", "Step 15", "Step 20"]
    assert list(images) == [f"{name}: {prompt}" for prompt in ("a red fox", "a blue fox") for name in names]
    for text, given in images.items():
        head, _, data = given["src"].partition(",")
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert head == "data:image/webp;base64" and image.size == (64, 48) == (
                int(given["width"]),
                int(given["height"]),
            )
            assert image.convert("RGB").getpixel((9, 9)) == ((255, 0, 0) if "red" in text else (0, 0, 255))


def test_of_many_prompts_it_says_how_many_are_shown(folder: Path) -> None:
    images = [f"samples/step-000005-{at}.png" for at in range(14)]
    for image in images:
        draw(folder / image, "red")
    prompts = [f"fox {at}" for at in range(14)]
    write_events(folder, [{"t": 1001.0, "event": "preview", "step": 5, "images": images, "prompts": prompts}])
    text = read(folder).text("previews")
    assert "12 of 14 prompts are shown." in text and "fox 11" in text and "fox 12" not in text


def test_of_many_steps_the_first_the_last_and_the_best_are_shown() -> None:
    steps = list(range(0, 1001, 10))
    chosen = pictures.choose_steps(steps, 330)
    assert len(chosen) == pictures.MOST_STEPS and {0, 330, 1000} <= set(chosen) and chosen == sorted(set(chosen))
    assert max(after - before for before, after in zip(chosen, chosen[1:], strict=False)) < 300
    assert pictures.choose_steps([0, 5], 5) == [0, 5] and pictures.choose_steps([], None) == []


def test_images_are_inlined_within_a_limit_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(folder)
    (folder / "samples/step-000005-0.png").write_bytes(b"\x89PNG no image")
    whole = read(folder)
    sizes = [len(given["src"].partition(",")[2]) for tag, given in whole.tags if tag == "img"]
    assert len(sizes) == 9 and "1 image cannot be read." in whole.text("previews")
    monkeypatch.setattr(pictures, "MOST_BYTES", 4 * max(sizes))
    reader = read(folder)
    shown = {given["alt"]: len(given["src"].partition(",")[2]) for tag, given in reader.tags if tag == "img"}
    assert sum(shown.values()) <= 4 * max(sizes) and len(shown) < 9
    assert {"Step 20: a red fox", "Step 20: a blue fox", "Before training: a red fox"} <= shown.keys()
    assert re.search(
        rf"{9 - len(shown)} images are not included: a report contains at most .+ of images\.", reader.text("previews")
    )


def test_a_large_preview_is_reduced(folder: Path) -> None:
    event = {"t": 1, "event": "preview", "step": 3, "images": ["samples/step-000003-0.png"], "prompts": ["x"]}
    write_events(folder, [event])
    draw(folder / "samples/step-000003-0.png", "green", (2048, 1024))
    (given,) = [given for tag, given in read(folder).tags if tag == "img"]
    with Image.open(io.BytesIO(base64.b64decode(given["src"].partition(",")[2]))) as image:
        assert image.size == (pictures.SIDE, pictures.SIDE // 2)


@pytest.mark.parametrize("name", ["../../secret.png", "/etc/passwd", "samples/../../../secret.png", "secret.png"])
def test_no_log_names_an_image_outside_of_the_samples(name: str, folder: Path) -> None:
    for place in (folder.parent.parent / "secret.png", folder / "secret.png"):
        draw(place, "white")
    write_events(folder, [{"t": 1, "event": "preview", "step": 0, "images": [name], "prompts": ["x"]}])
    assert [given for tag, given in read(folder).tags if tag == "img"] == []


ENDINGS = {
    "done": ([{"t": 1002.0, "event": "done", "files": []}], "done", ""),
    "error": (
        [{"t": 1002.0, "event": "error", "text": "out of memory on cuda:0"}],
        "failed",
        "out of memory on cuda:0",
    ),
    "stopped": ([{"t": 1002.0, "event": "stopped", "text": "saved at step 5"}], "stopped", "saved at step 5"),
    "killed": ([], "interrupted", "The training ended without a message after 1970-01-01 00:16 UTC."),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_is_reported_however_it_ended(name: str, folder: Path) -> None:
    events, state, text = ENDINGS[name]
    write_events(folder, events)
    (folder / "checkpoints/step-000005").mkdir(parents=True)
    head = read(folder).text("head")
    assert f"fox {state}" in head and text in head
    resumes = "lora-fp8 resume" in head and "checkpoint of step 5" in head
    assert resumes is (name != "done")
    chinese = read(folder, "zh-CN")
    assert messages.translate("zh-CN", report.sections.STATES[Contents(Run.open(folder)).state]) in chinese.text("head")


def test_a_run_that_trains_is_reported_as_of_its_newest_event(folder: Path) -> None:
    write_events(folder, [{"t": 1, "event": "stage", "stage": "train", "step": 0, "steps": 50}, step(7, 0.5)])
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        head = read(folder).text("head")
    assert "fox in progress" in head and "7 of 50" in head and "resume" not in head
    assert "this report shows it as of 1970-01-01 00:16 UTC" in head


def test_a_run_that_failed_before_its_first_step_is_reported(folder: Path) -> None:
    write_events(folder, [{"t": 1002.0, "event": "error", "text": "dataset: the folder holds no image"}])
    reader = read(folder)
    assert "the folder holds no image" in reader.text("head") and "No LoRA file was written." in reader.text("files")
    assert "no step was trained" in reader.text("curves") and "previews" not in reader.texts


def write_verified_file(folder: Path) -> bytes:
    """Write a result file, one of whose two checks failed and one cost was measured. Returns its bytes."""
    checks = [
        {"name": "file", "ok": True, "detail": "318 tensors", "judged": True},
        {"name": "prediction", "ok": False, "detail": "relative error 0.5", "judged": True},
        {"name": "plain prediction", "ok": True, "detail": "relative difference 1.33e-02", "judged": False},
    ]
    content = {"fox_kohya.safetensors": {"ok": False, "checks": checks}}
    (folder / "verify.json").write_text(json.dumps(content), encoding="utf-8")
    header = json.dumps({"__metadata__": {"ss_steps": "20"}}).encode()
    data = len(header).to_bytes(8, "little") + header
    (folder / "export/fox_kohya.safetensors").write_bytes(data)
    return data


def test_files_are_listed_with_size_hash_step_and_verification(folder: Path) -> None:
    data = write_verified_file(folder)
    os.symlink("/etc/passwd", folder / "export/other_kohya.safetensors")
    reader = read(folder)
    name, number, _, outcome, sha256 = reader.row("fox_kohya.safetensors")
    assert (number, outcome, sha256) == ("20", "✗ failed", hashlib.sha256(data).hexdigest())
    assert "other" not in reader.text("files")
    assert "fox_kohya.safetensors: 1 of 2 checks failed." in reader.text("verification")
    assert ["Prediction", "✗ failed", "relative error 0.5"] in reader.rows
    assert "relative difference 1.33e-02" in reader.text("quantization") and "gap" not in reader.text("verification")


def test_settings_are_those_that_differ_with_their_reason_and_no_path_is_whole(folder: Path) -> None:
    goal = [value for value in recipes.list_goal_values("style", "sd15") if "." in value.key]
    lines = [config.format_toml_line(value.key, value.value) for value in goal]
    job = config.loads(CONFIG, [*lines, "adapter.init_from=/home/jane/private/old.safetensors", "schedule.points={}"])
    (folder / "config.toml").write_text(config.dumps(job), encoding="utf-8")
    text = html.unescape(report.render(Run.open(folder), "en"))
    reader = read(folder)
    defaults = config.list_defaults()
    for value in goal:
        listed = [row for row in reader.rows if row and row[0].endswith(value.key)]
        if defaults[value.key] == value.value:
            assert listed == []
        else:
            (row,) = listed
            assert row[1] == config.format_toml_value(value.value) and value.why in row[3]
    assert '"old.safetensors"' in text and "jane" not in text and "secret" not in text
    chinese = read(folder, "zh-CN")
    assert any(
        messages.translate("zh-CN", value.why) in row[3] for value in goal for row in chinese.rows if len(row) > 3
    )


def test_a_reason_is_given_only_where_the_whole_recipe_holds(folder: Path) -> None:
    values = recipes.list_goal_values("style", "sd15")
    one = next(value for value in values if value.value != config.list_defaults()[value.key])
    job = config.loads(CONFIG, [config.format_toml_line(one.key, one.value)])
    (folder / "config.toml").write_text(config.dumps(job), encoding="utf-8")
    contents = Contents(Run.open(folder))
    assert one.key in [key for key, *_ in contents.list_differences()] and contents.find_reasons() == {}


def make_drawing(place: Path, prompt: str = "a fox") -> None:
    drawings.create(place)
    names = [(None, 0.0, "000.png"), (0, 0.5, "001.png"), (0, 1.0, "002.png")]
    images = [{"lora": lora, "strength": strength, "file": file} for lora, strength, file in names]
    drawings.write(place, {"prompt": prompt, "loras": [{"name": "step 20", "step": 20}], "images": images})
    for _, _, file in names:
        draw(place / file, "gray")


def test_drawings_are_shown_by_strength(folder: Path, tmp_path: Path) -> None:
    make_drawing(folder / "strengths")
    make_drawing(tmp_path / "elsewhere", "a cat")
    inside = [given["alt"] for tag, given in read(folder).tags if tag == "img"]
    assert inside == ["step 20, 0: a fox", "step 20, 0.5: a fox", "step 20, 1: a fox"]
    both = read(folder, drawn=[tmp_path / "elsewhere"])
    assert len([tag for tag, _ in both.tags if tag == "img"]) == 6 and "strength 0.5" in both.text("strengths")


def fill_with_hostile_text(folder: Path) -> None:
    """Write a run in which every text is hostile, and every number is no number."""
    text, quoted = HOSTILE, json.dumps(HOSTILE.replace("\0", ""))
    tables = [
        f"name = {quoted}",
        f"[model]\nfamily = {quoted}\npath = {quoted}",
        f"[adapter]\nrank = 7\ntype = {quoted}",
    ]
    tables += [f"[dataset]\ntrigger = {quoted}", f"[export]\nauthor = {quoted}", "[preview]\nwidth = 3"]
    (folder / "config.toml").write_text("\n".join(tables), encoding="utf-8")
    prompts = [text, f"{text} 2"]
    images = ["samples/step-000000-0.png", "samples/step-000000-1.png"]
    machine = {"versions": {text: text}, "system": text, "cpus": text, "commit": text, "gpu": text, "ram_bytes": text}
    model = {"base": text, "storage": text, "base_sha256": text, "trainable": text}
    data = {
        "images": text,
        "buckets": {text: 3, "64x64": text},
        "folders": [{"name": text, "images": text}],
        "smallest": [text, 3],
    }
    events = [
        {"t": 1, "event": "environment", **machine},
        {"t": 2, "event": "data", **data},
        {"t": 3, "event": "model", **model},
        {"t": 4, "event": "warning", "text": text},
        {"t": 5, "event": "preview", "step": 0, "images": images, "prompts": prompts},
        {"t": 6, "event": "validation", "step": 0, "loss": 1.0, "bands": {text: 1.0}},
        {"t": 7, "event": "validation", "step": 2, "loss": 0.5, "bands": {text: 1.0}},
        {"t": 8, "event": "sensitivity", "layers": 3, "worst": 1.0, "worst_before": 1.0, "bound": 2.0, "moved": text},
        step(1, 0.5),
        step(2, 0.5),
        {"t": 9, "event": "verdict", "text": text, "best": text, "loss": text, "risen_since": text},
        {"t": text, "event": "error", "text": text, "kind": text},
    ]
    write_events(folder, events)
    for image in images:
        draw(folder / image, "red")
    check = {"name": text, "ok": True, "detail": text}
    (folder / "verify.json").write_text(json.dumps({"a_kohya.safetensors": {"ok": text, "checks": [check, text]}}))
    (folder / "export/a_kohya.safetensors").write_bytes(b"no file")
    make_drawing(folder / "strengths", text)


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_nothing_in_a_run_becomes_markup(language: str, folder: Path) -> None:
    fill_with_hostile_text(folder)
    whole = report.render(Run.open(folder), language)
    reader = Reader(whole)
    scripts = [tag for tag, _ in reader.tags if tag == "script"]
    assert len(scripts) == 1 == whole.count("<script"), "the one of the charts"
    harmless = {"id", "class", "src", "alt", "width", "height", "style", "lang", "charset", "name", "content", "title"}
    harmless |= {"http-equiv", "tabindex", "role", "scope", "data-name", "data-chart", "aria-labelledby", "aria-label"}
    harmless |= {"viewbox", "preserveaspectratio", "d"}
    for tag, given in reader.tags:
        assert given.keys() <= harmless and tag not in ("a", "link", "iframe", "form", "base"), (tag, given)
        assert str(given.get("src", "data:image/webp;")).startswith("data:image/webp;")
        assert re.fullmatch(r"(--columns:\d+|(width|left|top):-?[\d.]+(em|%))?", str(given.get("style", "")))
    assert "\u202e" not in whole and "\x00" not in whole
    shown = " ".join(text for texts in reader.texts.values() for text in texts)
    assert shown.count("<script>window.canary=1</script>") >= 12, "it is all shown, as text"


def test_a_damaged_run_is_reported_as_far_as_it_is_read(folder: Path) -> None:
    (folder / "config.toml").write_text("name = [", encoding="utf-8")
    (folder / "verify.json").write_text("[1", encoding="utf-8")
    with open(folder / "events.jsonl", "a", encoding="utf-8") as log:
        log.write('{"event": "step", "step": "x"}\n{"event": "data", "folders": 3}\n[]\n{"event": "ver')
    assert "fox interrupted" in read(folder).text("head")


def test_a_report_replaces_only_a_report(folder: Path, tmp_path: Path) -> None:
    target = report.write(folder)
    assert target == folder / "report.html" and ownership.is_ours("report.html")
    before = target.read_bytes()
    assert report.write(folder, language="zh") == target and target.read_bytes() != before
    assert b'<html lang="zh-CN">' in target.read_bytes()
    other = tmp_path / "mine.html"
    other.write_text("<!doctype html>\n<p>mine", encoding="utf-8")
    link = tmp_path / "link.html"
    link.symlink_to(target)
    for refused in (other, link, tmp_path):
        with pytest.raises(UserError):
            report.write(folder, refused)
    assert other.read_text(encoding="utf-8") == "<!doctype html>\n<p>mine"
    with pytest.raises(UserError, match="not a folder of `lora-fp8 draw`"):
        report.write(folder, drawn=[tmp_path])
    with pytest.raises(UserError, match="not a run folder"):
        report.write(tmp_path)
    assert ownership.remove(folder) == [] and not folder.exists()


def test_the_command_needs_neither_torch_nor_the_page(folder: Path, tmp_path: Path) -> None:
    """A studio's server that keeps runs has neither a GPU nor Gradio."""
    train(folder)
    code = """if True:
        import sys
        for name in ("torch", "diffusers", "gradio"):
            sys.modules[name] = None  # importing it is an error
        from lora_fp8.cli import main
        sys.argv = ["lora-fp8", "report", *sys.argv[1:]]
        main()
    """
    out = tmp_path / "deep" / "fox.html"
    command = [sys.executable, "-c", code, str(folder), "--output", str(out), "--lang", "zh", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    assert json.loads(done.stdout) == {"file": str(out), "bytes": out.stat().st_size}
    assert '<html lang="zh-CN">' in out.read_text(encoding="utf-8")


def test_a_training_leaves_what_its_report_says(job) -> None:
    from importlib import metadata

    from lora_fp8.train import run

    mine = job(
        "train.steps=2", "validation.pictures=2", "validation.every=1", 'preview.prompts=["a cat"]', "preview.steps=1"
    )
    result = run(mine, progress=False)
    reader = read(result.run.path)
    assert "lora done" in reader.text("head") and "Held-out loss was best at step" in reader.text("head")
    assert ["torch", metadata.version("torch")] in reader.rows
    files = {row[0]: row[-1] for row in reader.rows if row and row[0].endswith(".safetensors")}
    paths = sorted((result.run.path / "export").glob("*.safetensors"))
    assert files == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    data = next(event for event in result.run.read_events() if event["event"] == "data")
    assert data["captioned"] == data["images"] and data["folders"][0]["images"] == data["images"]
    assert "data:image/webp;base64," in report.render(result.run, "en")
    assert str(result.run.path.parent) not in report.render(result.run, "en"), "no path of this computer is in it"
