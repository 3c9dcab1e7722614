"""The frame of every page, in a browser: languages, light and dark, a phone, the keyboard."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Page, Route, expect

from lora_fp8 import jobs
from lora_fp8.jobs import procs
from lora_fp8.jobs.remote import handle
from lora_fp8.run import drawings
from tests.ui.conftest import Site
from tests.ui.test_form_path import opened
from tests.ui.test_runs_state import Trainer
from webui import form, guard, tour, translations
from webui.app import PAGES, UNLISTED
from webui.draft import Draft

LEAVING = ["Connection errored out"]
"""What Gradio writes when a page is left before it has heard the answer to its first question."""


DEMO = Path(__file__).resolve().parent.parent.parent / "lora_fp8/demo/dataset"
AXE = {
    "resultTypes": ["violations"],
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    "rules": {name: {"enabled": True} for name in ("heading-order", "page-has-heading-one", "empty-heading")},
}
"""What WCAG 2.1 AA asks and axe-core can see: contrast, names, roles, languages, the use of ARIA; and an outline."""
OUTLINE = {"resultTypes": ["violations"], "runOnly": {"type": "rule", "values": [*AXE["rules"]]}}
COLOURS = {"resultTypes": ["violations"], "runOnly": {"type": "rule", "values": ["color-contrast"]}}
SETTLED = """() => Promise.all(document.getAnimations().filter((one) => one instanceof CSSTransition)
  .map((one) => one.finished.catch(() => null)))"""
"""Until no colour is on its way to another."""
THEIRS = {("nested-interactive", "toast-header"): "a message's head folds it, and holds the button that closes it"}
"""(rule of axe, part of its element's HTML) that Gradio gets wrong and that cannot be mended from outside, and why."""
LATIN = """() => [...document.querySelectorAll("[title], [aria-label], [placeholder]")]
  .filter((one) => !one.closest(".html-container"))
  .flatMap((one) => ["title", "aria-label", "placeholder"].map((name) => one.getAttribute(name) || ""))
  .filter((text) => /[A-Za-z]{3}/.test(text) && !/[\\u4e00-\\u9fff]|\\//.test(text))"""
"""Names of parts that are no Chinese, nor paths or ids."""


STILL = """() => document.getAnimations().every((one) =>
  one.playState !== "running" || one.effect.getComputedTiming().endTime === Infinity)"""
"""Whether nothing moves or changes its colour but what does so all the time."""


def accessible(page: Page, language: str, part: str | None = None) -> None:
    """What stands in this part now has names, contrast and the page's language."""
    assert wrong(page, part, AXE) == []
    labels = {texts.get(language) for texts in translations.load_setting_texts().values()}  # "beta2" in Chinese, too
    assert language == "en" or set(page.evaluate(LATIN)) <= labels


def wrong(page: Page, part: str | None, rules: dict[str, object]) -> list[tuple[str, str, str]]:
    """(rule, HTML, what is wrong) of what axe-core finds."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    run = "([part, rules]) => axe.run(part ? document.querySelector(part) : document, rules)"
    return [
        (one["id"], node["html"][:300], node["failureSummary"])
        for one in page.evaluate(run, [part, rules])["violations"]
        for node in one["nodes"]
        if not any(one["id"] == rule and part in node["html"] for rule, part in THEIRS)
    ]


def accessible_in_both_themes(page: Page, language: str, part: str | None = None) -> None:
    """All rules in the theme that is on, which is told apart by its colours alone from the other."""
    accessible(page, language, part)
    if part is not None:
        assert wrong(page, None, OUTLINE) == []
    dark = page.evaluate("document.body.classList.contains('dark')")
    for theme in ("light", "dark") if dark else ("dark", "light"):
        page.click(f"[data-theme={theme}]")
        page.evaluate(SETTLED)
        if (theme == "dark") != dark:
            assert wrong(page, part, COLOURS) == [], theme


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_every_page_fits_a_phone_and_is_accessible(
    site: Site, visit: Callable[..., Page], picture_of: Callable, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page with something on it: in Chinese in each of its tabs and in both themes, in English as it opens."""
    monkeypatch.setenv("LORA_FP8_HOME", str(site.home))
    far = handle.Handle("far", "ssh", "", str(site.root / "gone"), "runs/far", str(site.root / "runs/far"))
    handle.save(far)  # on another machine, where its folder is gone
    one = Trainer(site.root / "runs" / f"a {language} run")
    picture_of_it = one.folder / "samples/step-000000-0.png"
    picture_of_it.parent.mkdir()
    Image.new("RGB", (64, 64), "red").save(picture_of_it)
    one.say(event="preview", step=0, prompts=["a ball"], images=["samples/step-000000-0.png"])
    one.steps(1, 20)
    run = quote(str(one.folder))
    Draft(site.home).write(f'[[dataset.folders]]\npath = "{DEMO}"\ntrigger = "zibo"\nregularization = true\n')
    queries = {"dataset": f"?folder={quote(str(DEMO))}", "run": f"?run={run}", "compare": f"?runs={run}"}
    ready = {
        "runs": ".card .state", "dataset": ".wb-cell img", "run": "#loss path.line", "compare": "#grid img",
        "settings": "#about table", "draw": "#draw-start", "new": "#new-summary .problems", "tools": ".site-header",
    }  # fmt: skip
    page = visit("", language=language, dark=language != "en", phone=True, expect=LEAVING)
    for name in PAGES:
        page.set_viewport_size({"width": 390, "height": 780})
        path = f"{'' if name == PAGES[0] else name}{queries.get(name, '')}"
        page.goto(f"{site.address}/{language}/{path}")
        expect(page.locator(ready[name]).first).to_be_visible()
        if name == "runs":
            expect(page.locator("#remote .wrong")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert page.evaluate("document.documentElement.lang") == language
        marked = page.locator(".site-header [aria-current=page]").all_inner_texts()
        assert marked == ([] if name in UNLISTED else [translations.say(language, f"page.{name}")])
        picture_of(page, f"phone_{name}_{language}")
        page.set_viewport_size({"width": 1280, "height": 900})  # where all tabs are on the screen
        if name == "new":  # with a message, which covers none of the switches
            page.click("#new-files button")
            page.click("#new-preset-save")
            message = page.get_by_test_id("toast-body")
            expect(message).to_be_visible()
            assert message.bounding_box()["y"] > 200
            assert ("Warning" in message.inner_text()) == (language == "en")
            page.add_style_tag(content="[data-testid=toast-body] { opacity: 1 !important }")  # pale while it fades in
            accessible(page, language, "[data-testid=toast-body]")
            message.get_by_role("button").last.click()
            expect(message).to_have_count(0)  # it goes after ten seconds anyway, and is pale while it does
        if language == "en":
            accessible(page, language)
            continue
        accessible_in_both_themes(page, language)
        for tab in page.locator("[role=tab][aria-selected=false]:visible").all_inner_texts():
            one_tab = page.get_by_role("tab", name=tab, exact=True).locator("visible=true")
            one_tab.click()
            expect(one_tab).to_have_attribute("aria-selected", "true")
            expect(page.locator("[role=tabpanel] [inert], [role=tabpanel][inert]")).to_have_count(0)
            page.wait_for_function(STILL)
            panel = one_tab.get_attribute("aria-controls")  # what is outside of it was looked at above
            accessible_in_both_themes(page, language, f"#{panel}" if panel else None)
    one.die()
    handle.delete(far)
    page.goto("about:blank")  # whose window none of the page's scripts has
    page.set_content(guard._render_login_form(language, "/", translations.say(language, "login.wrong")))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        accessible(page, language)


def test_the_language_switch_keeps_the_page_and_its_question(visit: Callable[..., Page]) -> None:
    page = visit("settings?x=1", expect=LEAVING)
    page.click("text=中文")
    page.wait_for_url(re.compile(r"/zh-CN/settings\?x=1$"))
    page.wait_for_selector(".site-header >> text=English")
    page.goto(
        page.url.replace("settings", "new")
    )  # Gradio's own words follow the page, not the browser, which is English
    expect(page.locator("#new-drop")).to_contain_text("拖放")
    page.goto(page.url.split("/zh-CN")[0])  # the next visit begins in it
    page.wait_for_url(re.compile("/zh-CN/$"))


@pytest.mark.parametrize("system", ["light", "dark"])
def test_light_and_dark(visit: Callable[..., Page], system: str) -> None:
    page = visit("settings", dark=system == "dark")

    def shows_dark(dark: bool) -> None:
        page.wait_for_function(
            """(dark) => {
          const [red, green, blue] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
          return (red + green + blue < 150) === dark;
        }""",
            arg=dark,
        )

    def pressed() -> list[str]:
        return page.eval_on_selector_all("[data-theme][aria-pressed=true]", "all => all.map(one => one.dataset.theme)")

    page.wait_for_selector("[data-theme=system][aria-pressed=true]")
    shows_dark(system == "dark")
    for chosen in ("dark", "light"):
        page.click(f"[data-theme={chosen}]")
        shows_dark(chosen == "dark")
        assert pressed() == [chosen]
        page.reload()
        page.wait_for_selector(f"[data-theme={chosen}][aria-pressed=true]")
        shows_dark(chosen == "dark")
        assert pressed() == [chosen]


def test_the_header_is_reached_by_keyboard(visit: Callable[..., Page]) -> None:
    page = visit("settings")
    page.wait_for_selector("[data-theme=system][aria-pressed=true]")
    seen = []
    for _ in range(13):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.innerText || document.activeElement.dataset.theme || ''"))
    assert [translations.say("en", f"page.{name}") for name in PAGES if name not in UNLISTED] == seen[1:8]
    assert seen[8:12] == ["中文", "system", "light", "dark"]
    page.keyboard.press("Shift+Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


FOCUS = """(wanted) => {
  const now = document.activeElement, box = now.getBoundingClientRect();
  const rings = [now, now.parentElement].some((one) => getComputedStyle(one).outlineStyle !== "none"
    || getComputedStyle(one).boxShadow !== "none");
  const written = now.isContentEditable;  // the caret shows it
  return { there: now.matches(wanted), seen: now !== document.body && box.width > 0 && (rings || written),
           what: now.outerHTML.slice(0, 200) };
}"""
"""Whether the focus is on what is wanted, and whether it can be seen."""


def test_a_training_is_started_and_stopped_by_keyboard(site: Site, visit: Callable[..., Page]) -> None:
    def walk(wanted: str, key: str = "Tab") -> None:
        for _ in range(150):
            page.keyboard.press(key)
            now = page.evaluate(FOCUS, wanted)
            assert now["seen"], now["what"]
            if now["there"]:
                return
        raise AssertionError(f"{wanted} is not reached")

    Draft(site.home).write(form.START)
    page = visit("new", expect=LEAVING)
    opened(page)
    summary = page.locator("#new-summary")
    walk("#new-demo-sd15")
    page.keyboard.press("Enter")
    expect(summary.locator(".problems li")).to_have_count(1)
    walk("#new-folder input")
    page.keyboard.type(str(DEMO))
    walk("#new-add")
    page.keyboard.press("Space")
    expect(page.locator("#new-state .ready")).to_be_visible()
    walk("#new-start")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/run\?run=\d+"))
    jobs.Queue(site.home).cancel(int(page.url.rpartition("=")[2]))

    # A question takes the focus and gives it back; what is stopped shows other buttons, one of which has it.
    one = Trainer(site.root / "runs" / "by-keyboard")
    (one.folder / "samples").mkdir()
    Image.new("RGB", (64, 64), "red").save(one.folder / "samples/step-000000-0.png")
    one.say(event="preview", step=0, prompts=["a ball"], images=["samples/step-000000-0.png"])
    one.steps(1, 3)
    page.goto(re.sub(r"run=.*", f"run={one.folder}", page.url))
    focused = page.locator("#head :focus")
    expect(page.locator("#head [data-do=stop]")).to_be_visible()
    walk("#head [data-do=stop]")
    page.keyboard.press("Enter")
    expect(page.locator("#head .state")).to_have_text("stopping")
    assert (one.folder / "control" / "stop").exists()
    expect(focused).to_have_attribute("data-do", "force")
    page.keyboard.press("Enter")
    keep = page.get_by_role("button", name=translations.say("en", "runs.keep")).locator("visible=true")
    expect(keep).to_be_focused()
    page.keyboard.press("Enter")
    expect(keep).to_have_count(0)
    expect(focused).to_have_attribute("data-do", "force")
    page.keyboard.press("Enter")
    expect(keep).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#said .wrong")).to_contain_text("another user")
    expect(focused).to_have_attribute("data-do", "force")
    one.die()
    page.get_by_role("tab", name=translations.say("en", "run.tab.previews")).click()
    expect(page.locator("#pair .ab img")).to_have_count(1)  # of a run that was there before the page

    page.goto(re.sub(r"run\?run=.*", "compare", page.url))
    expect(page.locator("#which input")).to_be_visible()
    walk("#which input")
    page.keyboard.type("by-keyboard")
    page.keyboard.press("Enter")
    expect(page.locator("#grid img")).to_have_count(1)


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_the_tour_is_offered_once_goes_by_keyboard_and_is_left_at_any_time(
    visit: Callable[..., Page], language: str
) -> None:
    page = visit(language=language, dark=language == "en")
    offer = page.locator(".tour-offer")
    expect(offer).to_be_visible()
    accessible(page, language, ".tour-offer")
    offer.locator("[data-tour=show]").press("Enter")
    dialog = page.get_by_role("dialog", name=translations.say(language, "tour.name"))
    for number, name in enumerate(tour.STEPS, start=1):
        expect(dialog.locator("h2")).to_have_text(translations.say(language, f"page.{name}"))
        expect(dialog).to_contain_text(translations.say(language, "tour.place", step=number, steps=len(tour.STEPS)))
        expect(page.locator(".tour-here")).to_have_text(translations.say(language, f"page.{name}"))
        accessible(page, language, "#tour")
        page.keyboard.press("ArrowRight")
    expect(dialog.get_by_role("link")).to_have_attribute("href", f"/{language}/new")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.locator(".tour-here")).to_have_count(0)
    page.reload()
    expect(page.locator("#machine")).to_contain_text("CPU")
    expect(offer).to_be_hidden()
    page.goto(page.url.rstrip("/") + "/settings")
    page.locator("[data-tour=show]").click()
    expect(dialog).to_be_visible()


@pytest.fixture
def drawings_in_all_states(site: Site) -> Iterator[dict[str, str]]:
    """State -> id of a drawing: finished without a job, and of jobs that wait, run, failed and were stopped."""
    queue, made, ids = jobs.Queue(site.home), {}, []
    running = subprocess.Popen(["sleep", "3600"], env={**os.environ, procs.TOKEN: "axe"})
    for number, state in enumerate(("done", "queued", "running", "failed", "stopped"), start=700_001):
        folder = site.home / "drawings" / str(number)
        drawings.create(folder)
        made[state] = folder.name
        loras = [{"name": "cat.safetensors", "place": "/models/cat.safetensors", "step": step} for step in (10, 20)]
        images = [(None, 0.0), (0, 0.5), (0, 1.0), (1, 0.5), (1, 1.0)] if state in ("done", "stopped") else []
        for index, _ in enumerate(images):
            Image.new("RGB", (64, 64), "red").save(folder / f"{index:03d}.png")
        files = [{"file": f"{i:03d}.png", "lora": lora, "strength": at} for i, (lora, at) in enumerate(images)]
        about = {"prompt": f"a {state} cat", "seed": 7, "width": 64, "height": 64, "steps": 4, "loras": loras}
        progress = {"stage": "draw" if state == "running" else "", "done": 1, "total": 4, "step": 2}
        record = {**about, **progress, "images": files, "state": "done" if state == "done" else ""}
        (folder / drawings.RECORD).write_text(json.dumps(record), encoding="utf-8")
        if state == "done":
            continue
        scheduling = jobs.Scheduling(gpus="7", max_attempts=1)  # no worker has it
        ids.append(queue.submit_command("draw", [f"--out={folder}"], name=f"a {state} cat", scheduling=scheduling))
        if state == "running":
            about = procs.identify(running.pid)
            values = {"token": "axe", "pid": about.pid, "start": about.start, "boot": procs.read_boot_id()}
            queue.store.update(ids[-1], phase="launched", launched=time.time(), attempts=1, **values)
        elif state != "queued":
            said = jobs.Sentence("failure", {"message": "out of memory"})
            said = said if state == "failed" else jobs.Sentence("command_stopped")
            ended = {"state": state, "sentence": json.dumps(said.to_json()), "ended": time.time()}
            queue.store.update(ids[-1], phase="ended", launched=time.time(), **ended)
    yield made
    running.kill()
    running.wait()
    for id in ids:
        queue.store.update(id, phase="ended", state="stopped", ended=time.time())
        queue.store.delete(id)
    for folder in map((site.home / "drawings").joinpath, made.values()):
        drawings.remove(folder)


def test_try_it_is_accessible_in_all_its_states(
    visit: Callable[..., Page], drawings_in_all_states: dict[str, str]
) -> None:
    page = visit("draw", language="zh-CN", dark=True)
    for state, id in drawings_in_all_states.items():
        page.locator(f'#drawings [data-do="open"][data-id="{id}"]').click()
        opened = page.locator(f'#drawing [data-drawing="{id}"]')
        expect(opened.locator(".state")).to_have_text(translations.say("zh-CN", f"state.{state}"))
        accessible_in_both_themes(page, "zh-CN")


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_a_page_that_loads_slowly_or_not_at_all_says_so_and_one_that_breaks_goes_on(
    visit: Callable[..., Page], language: str
) -> None:
    say = partial(translations.say, language)
    page = visit("tools", language=language, expect=[*LEAVING, "ERR_FAILED", "it broke"])
    held: list[Route] = []
    page.route("**/assets/index-*.js", lambda route: held.append(route), times=1)
    page.reload(wait_until="commit")
    expect(page.locator("#loading")).to_have_text(say("site.loading"))
    for route in held:
        route.continue_()
    expect(page.locator(".site-header")).to_be_visible()
    expect(page.locator("#loading")).to_have_count(0)
    told = "{message: 'ResizeObserver loop completed with undelivered notifications.', filename: location.href}"
    page.evaluate(f"window.dispatchEvent(new ErrorEvent('error', {told}))")
    expect(page.locator("#problem")).to_have_count(0)
    page.evaluate("document.querySelector('h1').setAttribute('onclick', 'throw new Error(`it broke`)')")
    page.evaluate("document.querySelector('h1').click()")
    expect(page.locator("#problem")).to_contain_text("it broke")
    page.get_by_role("radio").nth(1).check()
    expect(page.get_by_role("radio").nth(1)).to_be_checked()
    page.route("**/assets/index-*.js", lambda route: route.abort())
    page.reload(wait_until="commit")
    expect(page.locator("#loading")).to_have_text(say("site.slow"))
