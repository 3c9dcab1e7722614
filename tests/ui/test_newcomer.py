"""The whole way of a newcomer on the bundled base: from an empty page to a verified LoRA, looked at in both languages.

Nothing is pretended: the page, its queue and its worker are those of `lora-fp8 ui`, the trainer trains, the browser
downloads. Screenshots of the way stay in test-artefacts/.
"""

import re
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
from playwright.sync_api import Page, expect

from lora_fp8 import jobs
from tests.ui.conftest import Site
from webui import translations

PICTURES = sorted((Path(__file__).resolve().parent.parent.parent / "lora_fp8/demo/dataset").glob("*"))[:24]
"""12 pictures, each with its caption."""
PROMPTS = ("a zibo on a green background", "a zibo on a blue background", "a red star on a white background")
STEPS, EVERY = 40, 8
LONG = 240_000
"""Milliseconds; machines that test are busy."""


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

    # It trains: loss and previews arrive by themselves.
    state = page.locator("#head .state")
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
    expect(state).to_have_text(say("state.stopped"), timeout=LONG)
    saved = jobs.Queue(site.home).job(number).saved_step
    assert saved is not None and 0 < saved < STEPS
    expect(page.locator("#head .said")).to_have_text(say("job.stopped", step=saved))
    picture_of(page, "newcomer_2_stopped")
    page.locator("#head [data-do=resume]").click()
    expect(state).to_have_text(say("state.done"), timeout=LONG)
    folder = jobs.Queue(site.home).job(number).folder
    assert folder is not None

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
