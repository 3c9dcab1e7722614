"""The whole way of a newcomer on the bundled base: from an empty page to a verified LoRA, looked at in both languages.

And the shortest way from photos to a running job, whose clicks and typed fields are counted.

Nothing is pretended: the page, its queue and its worker are those of `lora-fp8 ui`, the trainer trains, the browser
downloads. Screenshots of the way stay in test-artefacts/.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from playwright.sync_api import Page, expect
from test_captioner import tagger
from waiting import held, wait_until

from lora_fp8 import jobs
from lora_fp8.jobs import procs
from lora_fp8.run import Run
from tests.ui.conftest import Site
from webui import form, translations
from webui.draft import Draft

PICTURES = sorted((Path(__file__).resolve().parent.parent.parent / "lora_fp8/demo/dataset").glob("*"))[:24]
"""12 pictures, each with its caption."""
PROMPTS = ("a zibo on a green background", "a zibo on a blue background", "a red star on a white background")
STEPS, EVERY = 16, 4
LONG = 240_000
"""Milliseconds; machines that test are busy."""


FORMATS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "gif", "avif")
COUNT = 17
MOST_CLICKS = 8
MOST_TABS = 600


class Person:
    """Uses New training by the mouse or by the keyboard alone, and counts the buttons pressed and the fields typed."""

    def __init__(self, page: Page, keyboard: bool):
        self.page, self.keyboard = page, keyboard
        self.clicks = self.typed = 0

    def press(self, selector: str) -> None:
        self.clicks += 1
        self._go_to(selector)
        if self.keyboard:
            self.page.keyboard.press("Enter")
        else:
            self.page.click(selector)

    def type(self, selector: str, text: str) -> None:
        self._go_to(selector)
        if not self.keyboard:
            self.page.locator(selector).first.focus()
        self.write(text)

    def write(self, text: str) -> None:
        """Type into the field that has the focus."""
        self.typed += 1
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(text)

    def _go_to(self, selector: str) -> None:
        target = self.page.locator(selector).first
        expect(target).to_be_visible()
        for _ in range(MOST_TABS if self.keyboard else 0):
            if target.evaluate("one => one === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        assert not self.keyboard, f"{selector} cannot be reached by Tab"


def make_photos(folder: Path) -> list[Path]:
    """Images as cameras, phones and programs save them: formats, orientation, transparency, print colours."""
    rng, paths = np.random.default_rng(5), []
    for number in range(COUNT):
        kind = FORMATS[number % len(FORMATS)]
        pixels = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((160 + 8 * number, 120))
        given: dict[str, object] = {}
        if kind == "jpeg":
            pixels = pixels.convert("CMYK")
        elif kind == "png":
            pixels.putalpha(Image.linear_gradient("L").resize(pixels.size))
        elif kind == "jpg":
            given["exif"] = Image.Exif()
            given["exif"][274] = 6  # turned by 90 degrees
        paths.append(folder / f"IMG {number}.{kind}")
        pixels.save(paths[-1], **given)
    return paths


@pytest.mark.parametrize(("language", "by_hand", "most_typed"), [("en", False, 2), ("zh-CN", True, COUNT + 2)])
def test_a_few_clicks_lead_from_photos_to_a_running_job(
    language: str, by_hand: bool, most_typed: int, site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    """With captions by a model, and the mouse; and with captions by hand, and the keyboard alone."""
    if not by_hand:
        torch.manual_seed(3)
        tagger(site.root / "captioners" / "tiny")
    Draft(site.home).write(form.START)
    page = visit("new", language=language)
    person = Person(page, keyboard=by_hand)
    boxes, name = page.locator(".wb-cell textarea"), f"clicks {language}"
    person.press("#new-demo-sd15")
    person.type("#new-set input", name)
    with page.expect_file_chooser() as chooser:
        person.press("#new-drop .wb-button.main")
    chooser.value.set_files(make_photos(tmp_path))
    expect(boxes).to_have_count(COUNT)
    if by_hand:
        person.type(".wb-cell textarea", "1")
        for number in range(2, COUNT + 1):
            page.keyboard.press("Control+Enter")
            expect(boxes.nth(number - 1)).to_be_focused()
            person.write(str(number))
        page.keyboard.press("Tab")
    else:
        person.press("#auto-open")
        expect(page.locator(".wb-model input:checked")).to_have_value(str(site.root / "captioners" / "tiny"))
        person.press("#auto-begin")
    counts = translations.say(language, "images.counts.all", count=COUNT)
    expect(page.locator(".wb-counts")).to_have_text(counts)
    person.type("#new-name input, #new-name textarea", name)
    expect(page.locator("#new-state .ready")).to_be_visible()
    person.press("#new-start")
    page.wait_for_url(re.compile(r"/run\?run=\d+"))
    expect(page.locator("#head .state")).to_have_text(translations.say(language, "state.running"))
    captions = {path.stem: path.read_text("utf-8") for path in (site.home / "datasets" / name).glob("*.txt")}
    assert len(captions) == COUNT and all(captions.values())
    assert person.clicks <= MOST_CLICKS and person.typed <= most_typed, (person.clicks, person.typed)
    queue, number = jobs.Queue(site.home), int(page.url.rpartition("=")[2])
    queue.cancel(number)
    while queue.get_job(number).state not in jobs.ENDED:  # the next test's training waits for its place
        page.wait_for_timeout(100)


def tab(page: Page, language: str, name: str) -> None:
    page.get_by_role("tab", name=translations.say(language, f"run.tab.{name}"), exact=True).click()


def fill(page: Page, id: str, text: str) -> None:
    box = page.locator(f"#{id} input, #{id} textarea").first
    box.fill(text)
    box.blur()


def test_from_an_empty_page_to_a_lora_that_is_proved(
    site: Site, visit: Callable[..., Page], picture_of: Callable[[Page, str], None]
) -> None:
    """The form and the training in English; then the finished run in both languages."""

    def say(key: str, **values: object) -> str:
        return translations.say("en", key, **values)

    name = "newcomer"
    page = visit("new")
    expect(page.locator("#new-summary .problems, #new-state .ready").first).to_be_visible(timeout=LONG)
    page.locator("#new-files").get_by_role("button").first.click()
    page.click("#new-reset")
    page.click("#new-demo-sd15")
    fill(page, "new-set", name)
    page.set_input_files("#new-drop input[type=file]", PICTURES)
    expect(page.locator("#new-taken p")).to_be_visible(timeout=LONG)
    fill(page, "new-name", name)
    fill(page, "new-train-steps", str(STEPS))
    fill(page, "new-preview-prompts", "\n".join(PROMPTS))
    expect(page.locator("#new-state .ready")).to_be_visible(timeout=LONG)
    page.locator("#new-views button[role=tab]").nth(1).click()
    for id in ("set-preview-every", "set-checkpoint-every"):
        fill(page, id, str(EVERY))
    fill(page, "set-preview-steps", "4")
    expect(page.locator("#new-state .ready")).to_be_visible(timeout=LONG)
    picture_of(page, "newcomer_1_form")
    page.click("#new-start")
    page.wait_for_url(re.compile(r"/en/run\?run=\d+"), timeout=LONG)
    number = int(page.url.rpartition("=")[2])

    # It trains: loss and previews arrive by themselves. It is held, as it must not end before it is stopped.
    state = page.locator("#head .state")
    folder: Path = wait_until(lambda: jobs.Queue(site.home).get_job(number).folder)
    run = Run(folder)
    wait_until(lambda: any(event.get("stage") == "train" for event in run.read_events()))
    with held(procs.find_holder(run.lock_file)) as trainer:
        trainer.run_until(lambda: [event["event"] for event in run.read_events()].count("step") > 2)
        trainer.run_until(lambda: any(event["event"] == "preview" for event in run.read_events()))
        expect(state).to_have_text(say("state.running"), timeout=LONG)
        expect(page.locator("#loss figure.chart path.line").first).to_be_visible(timeout=LONG)
        tab(page, "en", "previews")
        expect(page.locator("#grid tbody tr")).not_to_have_count(0, timeout=LONG)
        expect(page.locator("#grid tbody tr").last.locator("img")).to_have_count(len(PROMPTS))
        page.wait_for_function("[...document.querySelectorAll('#grid img')].every(one => one.naturalWidth > 0)")

        # A reload and a second tab show the same, at once.
        for other in (page, visit(f"run?run={number}")):
            if other is page:
                page.reload()
            expect(other.locator("#head .state")).to_be_visible(timeout=LONG)
            expect(other.locator("#head .figures")).to_contain_text(f"/ {STEPS}")

        # Stop: it saves and says at which step. Then on from there.
        page.locator("#head [data-do=stop]").click()
        wait_until((run.control / "stop").exists)
    expect(state).to_have_text(say("state.stopped"), timeout=LONG)
    saved = jobs.Queue(site.home).get_job(number).saved_step
    assert saved is not None and 0 < saved < STEPS
    expect(page.locator("#head .said")).to_have_text(say("job.stopped", step=saved))
    picture_of(page, "newcomer_2_stopped")
    page.locator("#head [data-do=resume]").click()
    expect(state).to_have_text(say("state.done"), timeout=LONG)

    look_at_the_run(page, "en", number, folder, picture_of)
    chinese = visit(f"run?run={number}", language="zh-CN", dark=True)
    expect(chinese.locator("#head .state")).to_have_text(translations.say("zh-CN", "state.done"), timeout=LONG)
    look_at_the_run(chinese, "zh-CN", number, folder, picture_of)


def look_at_the_run(
    page: Page, language: str, number: int, folder: Path, picture_of: Callable[[Page, str], None]
) -> None:
    """Go through the tabs of a finished run, download its file, and find it on the page of all runs."""

    def say(key: str, **values: object) -> str:
        return translations.say(language, key, **values)

    # Before and after over each other, by keyboard too.
    tab(page, language, "previews")
    expect(page.locator("#grid tbody tr")).not_to_have_count(1)
    expect(page.locator("#pair .ab img")).to_have_count(2)
    expect(page.locator("#pair .names")).to_contain_text(say("run.at", step=STEPS))
    handle = page.locator("#pair .ab input")
    handle.focus()
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    assert page.eval_on_selector("#pair .ab", "pair => pair.style.getPropertyValue('--cut')") == "40%"
    picture_of(page, f"newcomer_{language}_3_previews")

    # The proof in words of this language, and the file on the visitor's disk.
    tab(page, language, "files")
    cards = page.locator("#files section.card")
    expect(cards.first.locator(".yes").first).to_contain_text(say("run.verified"))
    if language != "en":
        found = page.locator("#files td:nth-child(3)").all_text_contents()
        assert [text for text in found if not re.search("[\u4e00-\u9fff]|^sha256", text)] == []
    with page.expect_download() as waiting:
        cards.first.locator("a.button").click()
    got = Path(waiting.value.path()).read_bytes()
    assert got == (folder / "export" / waiting.value.suggested_filename).read_bytes()
    tensors = safetensors.torch.load(got)
    assert tensors and all(tensor.isfinite().all() for tensor in tensors.values())
    picture_of(page, f"newcomer_{language}_4_files")

    tab(page, language, "curves")
    box = page.locator("#curves svg").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#chart-tip")).to_contain_text(say("run.smoothed"))
    picture_of(page, f"newcomer_{language}_5_curves")
    page.goto(page.url.partition(f"/{language}/")[0] + f"/{language}/")
    expect(page.locator(f'[data-job="{number}"] .state')).to_have_text(say("state.done"))
    picture_of(page, f"newcomer_{language}_6_runs")
