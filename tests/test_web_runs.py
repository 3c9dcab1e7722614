"""The pages of runs without a browser: what they make of event logs, and how it becomes HTML and SVG."""

import html
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import LONG_SECONDS, wait_until

from lora_fp8 import config, errors
from lora_fp8.common import chart, messages
from lora_fp8.errors import Joined, Message, Template, UserError, first_few
from lora_fp8.jobs import COMMANDS, ENDED, SENTENCES, JobView, Queue, Sentence, run_events
from lora_fp8.run import Run, run_log
from lora_fp8.verify.report import Report
from webui import drawings, engine, form, run_cards, run_monitor, setting_values, translations
from webui.context import Place, Ui
from webui.draft import Draft
from webui.pages import compare
from webui.pages import runs as runs_page
from webui.pages.run import handlers as run_handlers
from webui.pages.run import rendering as run_page

NASTY = "<img src=x onerror=alert(1)>\"'`${alert(2)}{{7*7}}\u202e"


def write(file: Path, events: list[dict]) -> None:
    with open(file, "a", encoding="utf-8") as log:
        log.writelines(json.dumps(event) + "\n" for event in events)


def step(number: int, loss: float) -> dict:
    return {"t": number, "event": "step", "step": number, "loss": loss, "lr": 1e-4, "grad_norm": 1.0, "vram_gb": 2.0}


@pytest.fixture
def ui(tmp_path: Path) -> Ui:
    (tmp_path / "home").mkdir()
    return Ui("en", Place(tmp_path / "home", [tmp_path / "work"]))


def make_run(folder: Path, events: list[dict], text: str = "") -> Path:
    folder.mkdir(parents=True)
    job = config.loads(text or 'name = "x"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"')
    (folder / "config.toml").write_text(config.dumps(job), encoding="utf-8")
    write(folder / "events.jsonl", events)
    return folder


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{", "\xff"])
def test_a_status_that_is_no_object_hides_no_run(text: str, ui: Ui, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "work" / "runs" / "a", [{"t": 1, "event": "stopped"}])
    (folder / "status.json").write_bytes(text.encode("latin-1"))
    (view,) = run_monitor.get_monitor(ui.place).views()
    assert view.name == "a" and view.state == "lost"


ODD = [None, True, "x", -1, 1e300, 10**40, float("nan"), float("inf"), [], {}, "\ud800"]


def test_odd_values_in_a_status_or_a_log_hide_no_run(ui: Ui, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "work" / "runs" / "a", [{"t": 1, "event": "stopped"}])
    usual = {"t": 1.0, "state": "stopped", "step": 1, "steps": 2, "loss": 0.1}
    for name, value in itertools.product(usual, ODD):
        (folder / "status.json").write_text(json.dumps({**usual, name: value}), encoding="utf-8")
        run_monitor.get_monitor.cache_clear()
        assert "run=" in runs_page.render_board(ui, "all", 0)
    (folder / "status.json").write_text('{"state": "refused"}', encoding="utf-8")
    for name, value in itertools.product(step(1, 0.1), ODD):
        begin = {"t": 1, "event": "stage", "stage": "train", "step": 0, "steps": 3}
        (folder / "events.jsonl").unlink()
        write(folder / "events.jsonl", [begin, {**step(1, 0.1), name: value}])
        run_monitor.get_monitor.cache_clear()
        assert "run=" in runs_page.render_board(ui, "all", 0)
    write(folder / "events.jsonl", [{"t": 1e300, "event": "warning", "text": "too late"}])
    assert "too late" in run_page.render_warnings(ui, run_log.RunLog(folder / "events.jsonl").read())


def test_an_export_without_a_checkpoint_runs_nothing(ui: Ui, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "work" / "runs" / "a", [{"t": 1, "event": "stopped"}])
    run_monitor.get_monitor(ui.place).views()
    commands: list[tuple[object, ...]] = []
    monkeypatch.setattr(engine, "run_command", lambda *given: commands.append(given) or [])
    request, handlers = SimpleNamespace(query_params={"run": str(folder)}), run_handlers.Handlers(ui)
    assert "There is no checkpoint to export yet" in handlers.write_export(request, 0, "kohya", "")["value"]
    assert commands == []
    (folder / "checkpoints/step-000003").mkdir(parents=True)
    handlers.write_export(request, 3, "kohya", "")
    assert commands == [("export", [str(folder), "--step", "3", "--format", "kohya"])]


def test_another_users_run_is_shown_as_far_as_it_may_be_read(ui: Ui, tmp_path: Path, no_privilege: None) -> None:
    """On a shared machine; and the runs beside it are shown as ever."""
    for name, hidden in (("a", "lock"), ("b", "status.json"), ("c", "nothing")):
        folder = make_run(tmp_path / "work" / "runs" / name, [{"t": 1, "event": "stopped"}])
        for file in ("lock", "status.json"):
            (folder / file).write_text('{"state": "stopped"}', encoding="utf-8")
            (folder / file).chmod(0 if file == hidden else 0o600)
    views = {view.name: view for view in run_monitor.get_monitor(ui.place).views()}
    assert {name: view.state for name, view in views.items()} == {"a": "unknown", "b": "unknown", "c": "stopped"}
    for name, file in (("a", "lock"), ("b", "status.json")):
        assert views[name].sentence.text.endswith(f"may not read {tmp_path / 'work/runs' / name / file}")
        card = runs_page.render_job(ui, views[name])
        assert translations.say("en", "state.unknown") in card and file in card and "<button" not in card
    chinese = Ui("zh-CN", ui.place)
    with pytest.raises(UserError) as told:
        run_monitor.run_action(ui, "stop", "a")
    assert "无法读取" in chinese.translate(str(told.value)) and "请以启动该训练的用户" in chinese.translate(
        str(told.value)
    )


def test_a_run_whose_folder_is_no_text_hides_no_other_and_is_taken_for_none(ui: Ui, tmp_path: Path) -> None:
    runs = tmp_path / "work" / "runs"
    for name in ("caf", os.fsdecode(b"caf\xe9")):
        make_run(runs / name, [{"t": 1, "event": "stopped"}])
    board = runs_page.render_board(ui, "all", 0)
    assert board.count("<section") == 2 and b"runs%2Fcaf%E9" in board.encode() and "caf\ufffd</a>" in board
    with pytest.raises(UserError, match="not a run folder"):
        run_monitor.run_action(ui, "delete", str(runs / "caf\ufffd"))
    assert len(run_monitor.get_monitor(ui.place).queue.list_jobs()) == 2


def test_a_log_is_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    log = run_log.RunLog(file)
    assert log.read().measures["loss"].list_points() == []
    write(file, [step(1, 0.5), step(2, 0.25)])
    with open(file, "a") as torn:
        torn.write('{"event": "step", "st')
    assert log.read().measures["loss"].list_points() == [(1, 0.5), (2, 0.25)]
    with open(file, "a") as torn:
        torn.write('ep": 3, "loss": 0.125}\n')
    assert log.read().measures["loss"].list_points() == [(1, 0.5), (2, 0.25), (3, 0.125)]
    version = log.version
    assert log.read().version == version, "nothing was written, so nothing is read"
    file.unlink()
    write(file, [step(1, 9.0)])
    assert log.read().measures["loss"].list_points() == [(1, 9.0)], (
        "another file in its place is read from its beginning"
    )


def test_what_came_after_the_checkpoint_did_not_happen(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [step(i, 1.0) for i in range(1, 8)])
    write(tmp_path / "events.jsonl", [{"event": "start"}, {"event": "resume", "step": 4}])
    write(tmp_path / "events.jsonl", [step(i, 2.0) for i in range(5, 7)])
    points = run_log.RunLog(tmp_path / "events.jsonl").read().measures["loss"].list_points()
    assert points == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


def test_a_long_log_becomes_few_points_that_keep_the_means(tmp_path: Path) -> None:
    count = 200_000
    losses = np.random.default_rng(0).random(count)
    with open(tmp_path / "events.jsonl", "w") as log:
        log.writelines(f'{{"t":1.0,"event":"step","step":{i + 1},"loss":{loss}}}\n' for i, loss in enumerate(losses))
    read = run_log.RunLog(tmp_path / "events.jsonl").read()
    points = read.measures["loss"].list_points()
    assert run_log.POINTS / 2 <= len(points) <= 2 * run_log.POINTS
    before = 0
    for last, mean in points:
        assert mean == pytest.approx(losses[before:last].mean(), rel=1e-9)
        before = last
    assert before == count
    assert len(run_log.thin(points)) <= run_log.POINTS


def test_smoothing_is_the_debiased_exponential_mean(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random(50)
    got = run_log.smooth([(i + 1, v) for i, v in enumerate(values)], 0.9)
    for i in (0, 1, 20, 49):
        weights = 0.9 ** np.arange(i, -1, -1)
        assert got[i] == (i + 1, pytest.approx((weights * values[: i + 1]).sum() / weights.sum()))
    # Every second step left out: as much is forgotten between two points as with all of them.
    steps = [(i, float(i >= 100)) for i in range(200)]
    assert dict(run_log.smooth(steps[1::2], 0.9))[149] == pytest.approx(dict(run_log.smooth(steps, 0.9))[149], abs=0.01)


def test_what_is_no_number_is_no_point(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(
        b'{"event":"step","step":1,"loss":NaN}\n[1]\nnot json\n{"event":"step","step":"2","loss":1}\n'
        b'{"event":"step","step":3,"loss":"x"}\n{"event":"preview","step":[1]}\n\xff\xfe\n'
        b'{"event":"step","step":3,"loss":1' + b"0" * 400 + b'}\n{"event":"step","step":4,"loss":0.5}\n'
    )
    read = run_log.RunLog(file).read()
    assert read.measures["loss"].list_points() == [(4, 0.5)] and not read.facts.previews


def drawn(figure: str) -> tuple[list[list[tuple[float, float]]], dict]:
    """The lines of a chart as numbers on its area, and what it says of its data."""
    svg = ET.fromstring(re.search(r"<svg.*?</svg>", figure)[0])
    paths = [path.get("d") for path in svg.iter("path") if "line" in path.get("class")]
    told = json.loads(html.unescape(re.search(r'data-chart="(.*?)"', figure)[1]))
    return [[tuple(map(float, pair.split())) for pair in path[1:].split("L")] for path in paths], told


def test_a_chart_puts_points_where_its_axes_say() -> None:
    points = [(10, 0.5), (20, 1.5), (110, 1.0)]
    figure = chart.render_chart("loss", [chart.Line("a", points)], empty="none", x_label="step")
    (line,), told = drawn(figure)
    # From two labels of the axis to the scale, and from the scale to the points.
    labels = [(float(top), float(text)) for top, text in re.findall(r'top:([\d.]+)%">([\d.]+)<', figure)]
    slope, shift = np.polyfit([top for top, _ in labels], [value for _, value in labels], 1)
    for (x, y), (number, value) in zip(line, points, strict=True):
        assert slope * (100 * y / chart.HEIGHT) + shift == pytest.approx(value, abs=0.01)
        assert x / chart.WIDTH == pytest.approx((number - 10) / 100, abs=1e-3)
    assert told["lines"][0]["at"] == [list(point) for point in points] and told["unit"] == "step"
    assert re.search(r'class="of">step<', figure)


def test_a_point_that_stands_out_lies_on_its_line() -> None:
    points = [(10, 0.5), (20, 0.2), (30, 1.0)]
    for dot in points:
        (line, (first, second)), _ = drawn(
            chart.render_chart("x", [chart.Line("a", points, dot=dot)], empty="none", log=True)
        )
        assert first == second == line[points.index(dot)]
    # Where the line is thinned, the point may lie beside it; the axes have room for it.
    (line, (first, _)), _ = drawn(chart.render_chart("x", [chart.Line("a", points, dot=(20, -4.0))], empty="none"))
    assert 0 <= first[1] <= chart.HEIGHT and first[1] > max(y for _, y in line)
    for left_out in ((40, 0.5), (20, 0.0)):
        figure = chart.render_chart("x", [chart.Line("a", points, dot=left_out)], empty="none", log=True)
        assert len(drawn(figure)[0]) == 1


def test_a_logarithmic_chart_leaves_out_what_has_no_logarithm() -> None:
    figure = chart.render_chart("x", [chart.Line("a", [(1, 0.0), (2, 0.01), (3, 1.0)])], empty="none", log=True)
    (line,), _ = drawn(figure)
    assert len(line) == 2 and line[0][1] == pytest.approx(chart.HEIGHT) and line[1][1] == pytest.approx(0)
    assert "none" in chart.render_chart("x", [chart.Line("a", [(1, 0.0)])], empty="none", log=True)


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [-2.0, -2.0], [1e-9, 1e9], [5.0], [-1.0, 1.0], [3e-7, 3.1e-7]])
@pytest.mark.parametrize("log", [False, True])
def test_every_chart_can_be_drawn(values: list[float], log: bool) -> None:
    figure = chart.render_chart("x", [chart.Line("a", list(enumerate(values)))], empty="none", log=log)
    if "<svg" in figure:
        for line in drawn(figure)[0]:
            assert all(-1 <= x <= chart.WIDTH + 1 and -1 <= y <= chart.HEIGHT + 1 for x, y in line)


class Tags(HTMLParser):
    """What a browser would see in it."""

    def __init__(self, text: str):
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_names_messages_prompts_and_configs_are_text_and_never_markup(ui: Ui, tmp_path: Path) -> None:
    events = [
        {"event": "start", "device": NASTY},
        {"event": "data", "images": NASTY},
        {"event": "model", "trainable": NASTY},
        {"event": "warning", "t": NASTY, "text": NASTY},
        {"event": "preview", "step": 0, "images": ["samples/a.png", "../../secret.png"], "prompts": [NASTY]},
        step(1, 0.5),
        {"event": "validation", "step": 1, "loss": 0.5, "bands": {NASTY: 0.5}},
        {"event": "error", "text": NASTY},
    ]
    folder = make_run(tmp_path / "work" / "runs" / "a&b<c>", events)
    (folder / "export").mkdir()
    (folder / "export" / "x<y>.safetensors").write_bytes(b"")
    report = {"ok": True, "checks": [{"name": NASTY, "ok": True, "detail": NASTY}]}
    (folder / "verify.json").write_text(json.dumps({"x<y>.safetensors": report}))
    (folder / "log.txt").write_text(NASTY)
    with open(folder / "config.toml", "a") as file:
        file.write(f"# {NASTY}\n")
    view = JobView(7, NASTY, "train", "failed", Sentence("failure", {"message": NASTY}), folder=folder, step=1, steps=2)
    view = JobView(**{**view.__dict__, "log": folder / "log.txt", "loss": 0.5})
    log = run_monitor.read_run_log(ui, view)
    made = [
        run_cards.render_card(ui, view, NASTY, [NASTY]),
        run_page.render_header(ui, view, log),
        run_page.render_curves(ui, log, 0.9, False),
        run_page.render_grid(ui, view, log),
        run_page.render_slider(ui, view, log, (0, 0), 0),
        run_page.render_files(ui, view),
        run_page.render_log(ui, view),
        run_page.render_warnings(ui, log),
        run_page.render_config(ui, view),
        run_page.render_missing(ui, NASTY),
        compare.render_curves(ui, [(view, log)], 0.9, False),
        compare.render_previews(ui, [(view, log)], NASTY),
        compare.render_settings(ui, [(view, log), (view, log)]),
    ]
    for text in made:
        tags = Tags(text)
        assert "onerror" not in tags.attributes and not tags.names & {"script", "iframe", "y", "c"}
        assert "\u202e" not in text
    assert "secret" not in "".join(made), "a log may not name pictures outside of the run"
    assert "a.png" in made[3]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_can_be_queued_has_a_card(ui: Ui, command: str) -> None:
    """Without a word for one of them the whole queue would not be shown."""
    view = JobView(1, f"{command} cat", "command", "queued", Sentence("queued"), command=(command, "x"))
    for language in ("en", "zh-CN"):
        assert translations.say(language, f"runs.command.{command}", rest="cat") in html.unescape(
            runs_page.render_job(replace(ui, language=language), view)
        )


def test_runs_are_compared_with_the_best_step_of_each(ui: Ui, tmp_path: Path) -> None:
    chosen = []
    for number, losses in enumerate(({10: 0.5, 20: 0.25, 30: 0.3}, {10: 0.6, 20: 0.4, 30: 0.125})):
        events = [{"t": 1, "event": "step", "step": 1, "loss": 0.5, "lr": 0.1}]
        events += [{"event": "validation", "step": at, "loss": loss, "bands": {}} for at, loss in losses.items()]
        folder = make_run(tmp_path / "work" / "runs" / f"r{number}", events)
        view = JobView(number, f"r{number}", "train", "done", Sentence("done", {"files": ""}), folder=folder)
        chosen.append((view, run_monitor.read_run_log(ui, view)))
    made = compare.render_curves(ui, chosen, 0.9, False)
    (figure,) = (figure for figure in re.findall(r"<figure.*?</figure>", made, re.DOTALL) if "best" in figure)
    assert "r0" in figure and "best: 0.25 at step 20" in figure and "best: 0.125 at step 30" in figure
    lines, _ = drawn(figure)
    assert [line[0] for line in lines[1::2]] == [lines[0][1], lines[2][2]]


def test_a_run_that_ended_before_its_first_step_does_not_promise_curves(ui: Ui, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "work" / "runs" / "short", [])
    (folder / "checkpoints" / "step-000500").mkdir(parents=True)
    view = JobView(8, "short", "train", "cancelled", Sentence("cancelled", {}), folder=folder)
    log = run_monitor.read_run_log(ui, view)
    for is_over, words in ((False, "run.no_steps"), (True, "run.never_stepped")):
        for render in (run_page.render_loss, run_page.render_curves):
            assert ui.say(words) in render(ui, log, 0.9, False, is_over)
    assert ui.say("run.saved", steps="500") in run_page.render_files(ui, view)


def test_files_say_where_they_are_and_a_pair_why_it_is_not_shown(ui: Ui, tmp_path: Path) -> None:
    previews = [
        {"event": "preview", "step": at, "images": [f"samples/{at}.png"], "prompts": [prompt]}
        for at, prompt in ((0, "a cat"), (5, "a dog"))
    ]
    folder = make_run(tmp_path / "work" / "runs" / "pets", previews)
    view = JobView(9, "pets", "train", "done", Sentence("done", {}), folder=folder)
    assert ui.say("run.folder") not in run_page.render_files(ui, view)
    (folder / "export").mkdir()
    (folder / "export" / "pets_kohya.safetensors").touch()
    assert f"{ui.say('run.folder')} <code>{folder / 'export'}</code>" in run_page.render_files(ui, view)
    log = run_monitor.read_run_log(ui, view)
    assert run_page.list_prompts(log) == ["a dog", "a cat"]
    assert ui.say("run.no_such_prompt", step=ui.say("run.base")) in run_page.render_slider(ui, view, log, (0, 5), 0)
    assert ui.say("run.choose_two") in run_page.render_slider(ui, view, log, (0, 7), 1)
    prompts = ["a dog", "a bird", "a cat"]
    log.facts.previews[5]["prompts"] = ["a dog", "a cat"]
    assert run_page.choose_prompt(log, prompts, (0, 5)) == 2  # the only one that both have
    assert run_page.choose_prompt(log, prompts, (None, 5)) == 0


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_every_reason_of_the_queue_has_a_sentence(language: str) -> None:
    places = {key: set(re.findall(r"\{(\w+)\}", text)) for key, text in SENTENCES.items()}
    texts = translations.load_catalogue()
    assert {key.removeprefix("job.") for key in texts if key.startswith("job.")} == set(SENTENCES)
    for key, names in places.items():
        assert set(re.findall(r"\{(\w+)\}", texts[f"job.{key}"][language])) == names
    for state in run_cards.BUTTONS:
        assert translations.say(language, f"state.{state}")
    for buttons in run_cards.BUTTONS.values():
        assert all(translations.say(language, f"runs.do.{name}") for name in buttons)


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_a_download_shows_bytes_speed_and_time_left(language: str, ui: Ui) -> None:
    speaker = Ui(language, ui.place)
    about = {"id": 7, "name": "cat", "kind": "train", "state": "running", "stage": "download", "eta_s": 180.0}
    figures = {"bytes": 1 << 30, "total": 4 << 30, "speed": 50 << 20}
    view = JobView(**about, sentence=Sentence("stage", {"stage": "download"}), download=figures)
    assert "width:25.0%" in run_cards.render_progress(view)
    shown = run_cards.render_figures(speaker, view)
    for text in ("1 GiB / 4 GiB", "50 MiB/s", run_cards.format_duration(speaker, 180.0)):
        assert f"<b>{text}</b>" in shown
    sentence = {"en": "Downloading the base model", "zh-CN": "正在下载底模"}[language]
    assert sentence in run_cards.translate_sentence(speaker, view.sentence)


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_a_stage_without_steps_shows_what_it_has_counted_and_how_long_it_takes(language: str, ui: Ui) -> None:
    """From the events that the stages write to the card: never a minute without a sign of life."""
    speaker, now = Ui(language, ui.place), time.time()
    progress = run_events.Progress(0)
    for event in (
        {"t": now - 130, "event": "start"},
        {"t": now - 120, "event": "stage", "stage": "cache"},
        {"t": now - 100, "event": "progress", "stage": "cache", "done": 10, "total": 40},
        {"t": now, "event": "progress", "stage": "cache", "done": 20, "total": 40},
    ):
        progress.update(event)
    assert progress.compute_eta_s() == pytest.approx(200, abs=2), "ten images in 100 s"
    about = {"id": 7, "name": "cat", "kind": "train", "state": "running", "sentence": Sentence("queued")}
    view = JobView(**about, stage=progress.stage, work=progress.work, since=progress.since)
    assert "width:50.0%" in run_cards.render_progress(view)
    figures = run_cards.render_figures(speaker, view)
    for text in ("20 / 40", run_cards.format_duration(speaker, 120)):
        assert f"<b>{text}</b>" in figures
    read = replace(view, state="starting", stage="", work={"stage": "images", "done": 500, "total": 2000})
    assert "width:25.0%" in run_cards.render_progress(read)
    assert f"{speaker.say('runs.work.images')}</span> <b>500 / 2000" in run_cards.render_figures(speaker, read)
    now_at = f'aria-current="step">{speaker.say("runs.part.cache")}<'
    assert now_at in run_cards.render_parts(speaker, view)
    progress.update({"t": now, "event": "stage", "stage": "verify"})
    progress.update({"t": now, "event": "progress", "stage": "verify", "done": 1, "total": 2, "check": "delta"})
    view = replace(view, stage=progress.stage, work=progress.work, since=progress.since)
    assert speaker.say("verify.delta") in run_cards.render_figures(speaker, view)
    progress.update({"t": now, "event": "stage", "stage": "train", "step": 5, "steps": 10})
    progress.update({"t": now - 50, "event": "step", "step": 6, "loss": 0.5})
    view = replace(view, stage="train", work=progress.work, step=6, steps=10, loss=0.5, since=progress.alive_at)
    figures = run_cards.render_figures(speaker, view)
    assert progress.work is None and speaker.say("runs.taken") not in figures
    assert f"{speaker.say('runs.since_step')}</span> <b>{run_cards.format_duration(speaker, 50)}" in figures
    assert speaker.say("runs.since_step") not in run_cards.render_figures(speaker, replace(view, since=now - 5))
    assert run_cards.render_parts(speaker, replace(view, state="done")) == ""


def test_a_reason_within_a_reason_is_put_into_words_too(ui: Ui) -> None:
    cause = {"key": "killed", "args": {}}
    text = run_cards.translate_sentence(
        Ui("zh-CN", ui.place), Sentence("requeued", {"cause": cause, "attempt": 2, "attempts": 3})
    )
    assert "SIGKILL" in text and "2" in text and "key" not in text and "Killed" not in text


NOT_LOADED = Template("{count} of {total} layers were not loaded, such as {names}")


def test_what_verify_says_is_known_in_chinese(ui: Ui) -> None:
    """As finish writes it into verify.json, and the page of a run reads it."""
    report = Report("a.safetensors")
    lost = NOT_LOADED(count=4, total=84, names=first_few(["a", "b<", "c", "d"]))
    report.add("load", False, Joined("; ", [lost, "mid_block"]))
    report.add("plain preview", True, Message("without the adapter, the prediction differs by {effect}", effect="1.0%"))
    written = json.dumps({"a.safetensors": messages.add_translations(report.to_json())})
    (read,) = (messages.restore(value) for value in json.loads(written).values())
    html = run_cards.render_checks(Ui("zh-CN", ui.place), read["checks"])
    assert (
        "不加载 LoRA 时预测相差 1.0%" in html
        and "84 层中有 4 层没有加载" in html
        and "a、b&lt;、c 等，另有 1 项" in html
        and "；mid_block" in html
    )
    assert "and 1 more" in run_cards.render_checks(ui, read["checks"])


def test_two_hundred_jobs_are_paged_and_quick(ui: Ui, tmp_path: Path) -> None:
    text = 'name = "j{}"\noutput_dir = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    queue = Queue(ui.place.home)
    for number in range(200):
        queue.submit(text.format(number, tmp_path / "work" / "runs"))
    board = runs_page.render_board(ui, "all", 0)
    assert board.count("<section") == runs_page.PER_PAGE and 'data-to="1"' in board
    assert "j0" in board and runs_page.render_board(ui, "all", 9).count("<section") == 20
    assert runs_page.render_board(ui, "all", 99) == runs_page.render_board(ui, "all", 9), (
        "past the end is the last page"
    )
    assert "<section" not in runs_page.render_board(ui, "ended", 0)


def test_buttons_do_what_they_say(ui: Ui, tmp_path: Path) -> None:
    text = 'name = "j{}"\noutput_dir = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    queue = Queue(ui.place.home)
    ids = [queue.submit(text.format(n, tmp_path / "work" / "runs")) for n in range(3)]
    run_monitor.run_action(ui, "up", str(ids[2]))
    assert [view.id for view in queue.list_jobs()] == [ids[0], ids[2], ids[1]]
    run_monitor.run_action(ui, "sooner", str(ids[1]))
    assert [view.id for view in queue.list_jobs()] == [ids[1], ids[0], ids[2]]
    run_monitor.run_action(ui, "cancel", str(ids[0]))
    assert queue.get_job(ids[0]).state == "cancelled"
    with pytest.raises(errors.UserError, match="type the name, j0"):
        run_monitor.delete_job(ui, str(ids[0]), "j1", False)
    run_monitor.delete_job(ui, str(ids[0]), " j0 ", False)
    with pytest.raises(errors.UserError, match="no such job"):
        run_monitor.run_action(ui, "stop", str(ids[0]))
    with pytest.raises(errors.UserError, match="no such button"):
        run_monitor.run_action(ui, "rm", str(ids[1]))


def test_a_card_says_what_matters_and_how_to_go_on(ui: Ui, tmp_path: Path) -> None:
    """The file of a run that is done, the reason of one that failed, once; failures stand before a long queue."""
    folder = make_run(tmp_path / "work" / "runs" / "a", [])
    (folder / "export").mkdir()
    for name in ("a_kohya", "a_comfy"):
        (folder / "export" / f"{name}.safetensors").touch()
    about = {"id": 7, "name": "a", "kind": "train", "folder": folder, "ended": time.time()}
    done = JobView(**about, state="done", sentence=Sentence("done", {"files": "x"}))
    card = runs_page.render_job(ui, done)
    assert [html.unescape(one) for one in re.findall(r'href="(/download[^"]*)" download', card)] == [
        ui.make_download_link(folder / "export" / f"a_{layout}.safetensors") for layout in ("comfy", "kohya")
    ]
    failed = JobView(**about, state="failed", sentence=Sentence("input", {"message": "2 problems\n  one\n  two"}))
    assert "/download" not in runs_page.render_job(ui, failed)
    assert run_cards.render_log_tail(failed, ["2 problems", "  one", "  two"]) == ""
    assert "Traceback" in run_cards.render_log_tail(failed, ["  one", "Traceback"])
    crashed = replace(failed, sentence=Sentence("failure", {"message": "the disk is full"}))
    tail = run_cards.render_log_tail(crashed, ["warning: slow", "the disk is full"])
    assert "warning: slow" in tail and "disk is full" not in tail
    for command, shown in (("lr-find", True), ("verify", True), ("caption", False)):  # whose answer is the log
        command_done = JobView(
            **about | {"kind": "command", "command": (command, "x")}, state="done", sentence=Sentence("command_done")
        )
        assert ("0.002" in run_cards.render_log_tail(command_done, ["Suggestion: 0.002"])) == shown
    assert translations.say("en", "runs.mend") in run_cards.render_sentence(
        ui, replace(failed, resumable=True, saved_step=20)
    )
    kept = JobView(**about, state="failed", sentence=Sentence("killed"), resumable=True, saved_step=20)
    assert "step 20" in run_cards.render_sentence(ui, kept) and 'data-do="resume"' in run_cards.render_buttons(ui, kept)
    assert f'href="{html.escape(ui.make_link("run", run="7"))}"' in runs_page.render_failures(ui, [done, failed])
    assert runs_page.render_failures(ui, [done]) == ""
    # A command is called by what it does, in the page's language; its answer and its file are here, too.
    chinese, log = Ui("zh-CN", ui.place), tmp_path / "log.txt"
    log.write_text('{"event": "caption", "done": 3, "total": 9}\n', encoding="utf-8")
    told = {"id": 8, "kind": "command", "log": log, "ended": 1.0}
    work = JobView(**told, name="caption pics", command=("caption", "/p/pics"), state="running", sentence=done.sentence)
    card = runs_page.render_job(chinese, replace(work, sentence=Sentence("stage", {"stage": "running"})))
    assert "自动打标 pics</a>" in card and "3 / 9" in card and "width:33.3%" in card and ">停止</button>" in card
    made = tmp_path / "work" / "small.safetensors"
    made.touch()
    command = ("resize", "--output", str(made), "--", "a")
    card = runs_page.render_job(ui, replace(work, name="resize small.safetensors", command=command, state="done"))
    assert html.escape(ui.make_download_link(made)) in card
    card = runs_page.render_job(ui, replace(work, name="verify a", command=("verify", "a"), state="done"))
    assert "&quot;done&quot;: 3" in card


def test_a_card_has_the_newest_preview_of_its_own_folder(ui: Ui, tmp_path: Path) -> None:
    def card() -> str:
        views = run_monitor.get_monitor(ui.place).views
        views.invalidate()  # as when it gets old: previews are looked for when the jobs are read again
        (view,) = views()
        return runs_page.render_job(ui, view)

    run = make_run(tmp_path / "work" / "runs" / "cat", [{"event": "start"}])
    assert "<img" not in card()
    samples = run / "samples"
    samples.mkdir()
    for name in ("step-000000-0.png", "step-000020-0.png", "step-000100-0.png", "step-000100-1.png", "zoo.png"):
        (samples / name).touch()
    assert re.findall(r"step-\d+-\d", card()) == ["step-000100-0"]
    (samples / "step-000120-0.png").touch()
    assert re.findall(r"step-\d+-\d", card()) == ["step-000120-0"]


def test_the_step_of_the_lowest_held_out_loss_is_told(ui: Ui, tmp_path: Path) -> None:
    losses = {10: 0.5, 20: 0.25, 30: 0.75}
    events = [{"event": "validation", "step": at, "loss": loss, "bands": {"low": 0}} for at, loss in losses.items()]
    log = run_log.RunLog(make_run(tmp_path / "root" / "cat", events[:1]) / "events.jsonl").read()
    assert log.find_best() is None, "one measurement is no comparison"
    write(log._file, events)
    log.read()
    assert log.find_best() == (20, 0.25)
    assert ui.say("run.best", step=20, loss="0.2500") in html.unescape(run_page.render_loss(ui, log, 0.9, False))


def test_what_is_said_of_the_held_out_loss_is_shown_and_its_best_step_marked(tmp_path: Path) -> None:
    """The sentence of the newest verdict, in the language of the page, until training goes on from before it."""
    run = Run.create(tmp_path / "root" / "cat", "")
    for number, loss in enumerate([0.5, 0.25, 0.4, 0.5]):
        run.log_event("step", step=10 * number, loss=1.0)
        run.log_event("validation", step=10 * number, loss=loss, bands={"low": loss})
    from lora_fp8.stages import held_out
    from lora_fp8.training.verdict import Measurement, Verdict

    verdict = Verdict(best=10, loss=0.25, rise=0.25, error=0.01, risen_since=20, stale=2)
    file = run.export / "cat-best_kohya.safetensors"
    file.write_bytes(b"x")
    run.log_event("verdict", step=30, **vars(verdict), text=held_out.describe(verdict, [file]))
    series = [Measurement(10 * step, ((loss,),)) for step, loss in enumerate([0.5, 0.25, 0.4, 0.5])]
    run.log_event("patience", step=30, text=held_out.describe_end(series))
    log = run_log.RunLog(run.path / "events.jsonl").read()
    pages = {language: Ui(language, Place(tmp_path / "home", [tmp_path / "root"])) for language in ("en", "zh-CN")}
    shown = {language: run_page.render_loss(page, log, 0.9, False) for language, page in pages.items()}
    wanted = "Held-out loss was best at step 10 (0.25) and has risen since step 20. The file of step 10 is "
    assert f'<p class="verdict risen">{wanted}cat-best_kohya.safetensors. Training ends at step 30: ' in shown["en"]
    assert "验证集 loss 在第 10 步最低（0.25），从第 20 步起上升。" in shown["zh-CN"]
    assert "训练在第 30 步结束" in shown["zh-CN"] and "Held-out" not in shown["zh-CN"].replace("held-out", "")
    # A third of the width: step 10 of 0 to 30.
    assert all(text.count('<path class="mark" d="M333.3 0V300"/>') == 1 for text in shown.values())
    assert "best: step 10" in shown["en"] and "最佳：第 10 步" in shown["zh-CN"]
    assert "lowest held-out loss" in run_page.render_file(pages["en"], file, Path(file.name), None)
    last = file.with_name("cat_kohya.safetensors")
    assert "lowest held-out loss" not in run_page.render_file(pages["en"], last, Path(last.name), None)

    run.log_event("best", step=10, path="checkpoints/best-000010")
    assert log.read().facts.best == 10
    (run.checkpoints / "best-000010").mkdir()
    assert drawings.list_steps(run.path) == [10]

    run.log_event("step", step=40, loss=1.0)  # with more patience it went on
    assert not log.read().facts.patience and log.facts.verdict
    run.log_event("step", step=20, loss=1.0)  # gone on from a checkpoint before the verdict
    run.close()
    assert not log.read().facts.verdict and log.find_best() == (10, 0.25)


def test_messages_of_a_run_are_in_the_language_of_the_page(tmp_path: Path) -> None:
    """Also the names of the held-out loss's curves. The run's log has English texts, with their translations beside."""
    run = Run.create(tmp_path / "root" / "cat", "")
    level = Message("t = {step} of {total}", step=100, total=1000)
    run.log_event("warning", text=Message("{count} problems", count=7))
    run.log_event("validation", step=1, loss=0.5, bands={level: 0.5})
    run.close()
    log = run_log.RunLog(run.path / "events.jsonl").read()
    texts = {
        language: run_page.render_warnings(ui, log) + run_page.render_loss(ui, log, 0.9, False)
        for language in translations.LANGUAGES
        for ui in [Ui(language, Place(tmp_path / "home", [tmp_path / "root"]))]
    }
    assert "7 problems" in texts["en"] and "t = 100 of 1000" in texts["en"]
    assert "7 problems" not in texts["zh-CN"] and "of 1000" not in texts["zh-CN"]
    assert messages.translate("zh-CN", level) in html.unescape(texts["zh-CN"])


def test_a_verified_file_says_where_it_goes_and_folds_its_checks(ui: Ui, tmp_path: Path) -> None:
    file = tmp_path / "root" / "cat_kohya.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    checks = [{"name": "load", "ok": True, "detail": "264 modules"}]
    good = run_page.render_file(ui, file, Path(file.name), {"ok": True, "checks": checks})
    bad = run_page.render_file(ui, file, Path(file.name), {"ok": False, "checks": [checks[0] | {"ok": False}]})
    assert "ComfyUI/models/loras" in good and good.index("<details>") < good.index("264 modules")
    assert "<details>" not in bad and "264 modules" in bad, "what failed is not folded away"
    foreign = run_page.render_file(ui, file, Path(file.name), {"ok": False, "checks": [None, "x", *checks]})
    assert foreign == run_page.render_file(ui, file, Path(file.name), {"ok": False, "checks": checks})


def test_settings_of_a_job_become_the_draft_of_a_new_one(ui: Ui, tmp_path: Path) -> None:
    text = 'name = "j"\noutput_dir = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    id = Queue(ui.place.home).submit(text.format(tmp_path / "work" / "runs"), overrides=["adapter.rank=7"])
    told = runs_page.press_button(ui, "edit", str(id))
    assert f'data-go="{ui.make_link("new")}"' in told["value"]
    draft = config.loads(Draft(ui.place.home).load_text())
    assert draft.adapter.rank == 7 and draft.name == "j-2", "a name of its own, or it could not be started"
    make_run(tmp_path / "work" / "runs" / "shell", [])
    runs_page.press_button(ui, "edit", str(tmp_path / "work" / "runs" / "shell"))
    assert config.loads(Draft(ui.place.home).load_text()).name == "shell-2"
    assert config.loads(Draft(ui.place.home).restore_earlier()).name == "j-2", "what was set up before is not lost"


TRAINER = """
import signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from lora_fp8.run import Run, run_log
run = Run.create(Path(sys.argv[1]), "x = 1")
run.events_file.touch()
child = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, lambda *_: (Path(sys.argv[1], "termed").touch(), sys.argv[2] == "deaf" or sys.exit()))
print(child.pid, flush=True)
while True: time.sleep(0.02)
"""


@pytest.mark.parametrize("how", ["willing", "deaf"])
def test_a_run_of_a_shell_is_ended_and_deleted(ui: Ui, tmp_path: Path, how: str) -> None:
    """Judged by the processes and the disk."""
    folder = tmp_path / "work" / "runs" / how
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(folder), how], stdout=subprocess.PIPE) as trainer:
        child = int(trainer.stdout.readline())
        assert run_monitor.find_job(ui, str(folder)).state == "running"
        with pytest.raises(errors.UserError, match="a training is running in this folder"):
            run_monitor.delete_job(ui, str(folder), how, False)
        with pytest.raises(errors.UserError, match="type the name"):
            run_monitor.delete_job(ui, str(folder), "other", False)
        run_monitor.run_action(ui, "force", str(folder))
        wait_until((folder / "termed").exists)
        if how == "deaf":
            assert run_monitor.find_job(ui, str(folder)).state == "stopping" and trainer.poll() is None
            run_monitor.run_action(ui, "kill", str(folder))
            wait_until(lambda: not Path(f"/proc/{child}/exe").exists())  # a zombie has none
            assert trainer.wait(LONG_SECONDS) == -signal.SIGKILL
        else:
            assert trainer.wait(LONG_SECONDS) == 0
            os.kill(child, signal.SIGKILL)
    assert run_monitor.find_job(ui, str(folder)).state in ENDED
    with pytest.raises(errors.UserError, match="no training is running"):
        run_monitor.run_action(ui, "kill", str(folder))
    said = run_monitor.delete_job(ui, str(folder), how, False)
    # What the trainer of this test made beside the run's own files is no part of the run.
    assert [path.name for path in folder.iterdir()] == ["termed"] and said.endswith("(1): termed")


def test_a_run_outside_of_the_pages_folders_is_not_looked_at(ui: Ui, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "elsewhere" / "x", [step(1, 0.5)])
    for name in (str(folder), f"{tmp_path}/work/../elsewhere/x", "/etc"):
        with pytest.raises(errors.UserError):
            run_monitor.find_job(ui, name)
    view = JobView(1, "x", "train", "done", Sentence("command_done"), folder=folder)
    with pytest.raises(errors.UserError):
        run_monitor.read_run_log(ui, view)


def test_what_differs_between_two_runs_is_told(ui: Ui, tmp_path: Path) -> None:
    text = 'name = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[train]\nsteps = {}\n[[dataset.folders]]\npath = "p"'
    chosen = []
    for name, steps in (("a", 100), ("b", 200)):
        make_run(tmp_path / "work" / "runs" / name, [step(1, 0.5)], text.format(name, steps))
        view = run_monitor.find_job(ui, str(tmp_path / "work" / "runs" / name))
        chosen.append((view, run_monitor.read_run_log(ui, view)))
    rows = re.findall(r"<tr><td>.*?</tr>", compare.render_settings(ui, chosen))
    (cells,) = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert "train.steps" in cells[0] and cells[1:] == ["100", "200"]


def test_an_automatic_value_that_is_not_chosen_yet_is_no_difference(ui: Ui, tmp_path: Path) -> None:
    """A run that waits has "auto" where one that ran has the value."""
    chosen = []
    runs = (("ran", 512, "'kohya'", 4), ("waits", '"auto"', "'auto'", 4), ("other", 768, "'kohya'", 8))
    for name, side, formats, rank in runs:
        settings = f'[adapter]\nrank = {rank}\n[dataset]\nresolution = {side}\n[[dataset.folders]]\npath = "p"\n'
        settings += f"[export]\nformats = [{formats}]\n"
        text = f'name = "{name}"\n[model]\nfamily = "sd15"\npath = "demo"\n{settings}'
        make_run(tmp_path / "work" / "runs" / name, [step(1, 0.5)], text)
        view = run_monitor.find_job(ui, str(tmp_path / "work" / "runs" / name))
        chosen.append((view, run_monitor.read_run_log(ui, view)))
    told = compare.render_settings(ui, chosen[:2])
    assert "<tr>" not in told and ui.say("compare.same_so_far") in told and "because waits will choose" in told
    told = compare.render_settings(ui, chosen[1:])
    assert "adapter.rank" in told and "<code>dataset.resolution" not in told and "because waits will choose" in told
    told = compare.render_settings(ui, chosen)
    assert "<code>dataset.resolution" in told and "<code>export.formats" not in told


PLAIN = {"en": ("yes", "no", "Repeats 3", "Stop with an error"), "zh-CN": ("是", "否", "重复次数 3", "跳过")}
SIDES = (
    """missing_caption = "error"\nshuffle_tags = true\n[[dataset.folders]]\npath = "p/cats"\nrepeats = 3""",
    """missing_caption = "skip"\n[[dataset.folders]]\npath = "p/<b>dogs</b>"\nregularization = true\n"""
    """[[dataset.folders]]\npath = "p/cats\"""",
)


@pytest.mark.parametrize("language", list(PLAIN))
def test_what_differs_is_told_in_words(ui: Ui, tmp_path: Path, language: str) -> None:
    """Whatever a setting holds, no list, table or truth value of Python is shown."""
    ui, chosen = Ui(language, ui.place), []
    for name, side in zip("ab", SIDES, strict=True):
        text = f'name = "{name}"\n[model]\nfamily = "sd15"\npath = "demo"\n[dataset]\n{side}'
        make_run(tmp_path / "work" / "runs" / name, [step(1, 0.5)], text)
        view = run_monitor.find_job(ui, str(tmp_path / "work" / "runs" / name))
        chosen.append((view, run_monitor.read_run_log(ui, view)))
    told = html.unescape(re.sub(r"<[^>]*>", "\n", compare.render_settings(ui, chosen)))
    assert all(word in told for word in PLAIN[language]) and "<b>dogs</b>" in told
    values = ([{"path": "x", "mask": "*-m"}, {"a": [True, None]}], [["a", {"b": True}]], {"c": [1, False]}, True, None)
    for key in [*form.collect_settings(), "of.an.older.version"]:
        told += "\n".join(line for value in values for line in setting_values.format_lines(ui, key, value))
    assert not re.search(r"[{}\[\]'\"]|\bTrue\b|\bFalse\b|\bNone\b", told), told


def palette(dark: bool) -> list[np.ndarray]:
    """The colours of curves, as linear sRGB."""
    css = (Path(run_page.__file__).parents[2] / "runs.css").read_text(encoding="utf-8")
    found = re.findall(r"--c(\d): #(\w{6})", css)
    assert [int(number) for number, _ in found] == [*range(8), *range(8)]  # light, then dark
    return [linear(code) for _, code in (found[8:] if dark else found[:8])]


def linear(code: str) -> np.ndarray:
    parts = np.array([int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


SIGHT = {
    "usual": np.eye(3),
    # Machado, Oliveira and Fernandes (2009), severity 1.
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def oklab(colour: np.ndarray) -> np.ndarray:
    """Ottosson's OKLab of linear sRGB, in which 0.02 is about the least that is seen."""
    to_lms = [
        [0.41222147, 0.53633254, 0.05144599],
        [0.2119035, 0.68069955, 0.10739696],
        [0.08830246, 0.28171884, 0.6299787],
    ]
    to_lab = [
        [0.21045426, 0.79361778, -0.00407205],
        [1.9779985, -2.42859221, 0.45059371],
        [0.02590404, 0.78277177, -0.80867577],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(colour, 0, 1))


@pytest.mark.parametrize(("dark", "background"), [(False, "ffffff"), (True, "0a0f1e")])
def test_curves_stand_out_and_are_told_apart_by_the_colour_blind(dark: bool, background: str) -> None:
    colours, weights = palette(dark), np.array([0.2126, 0.7152, 0.0722])
    for number, colour in enumerate(colours):
        low, high = sorted([float(weights @ colour), float(weights @ linear(background))])
        assert (high + 0.05) / (low + 0.05) >= 3, number  # WCAG 2.2, 1.4.11
    for name, sight in SIGHT.items():
        for one in range(8):
            for two in range(one):
                # Those of one kind of line, whole or dashed, differ in nothing else.
                least = 0.15 if one // 4 == two // 4 else 0.08
                assert np.linalg.norm(oklab(sight @ colours[one]) - oklab(sight @ colours[two])) > least, (
                    name,
                    one,
                    two,
                )
