"""The New training page as a newcomer walks it: demo base, pictures, a mistake, TOML, start."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from lora_fp8 import config, jobs
from tests.test_form_page import SDXL, write_header
from tests.ui.conftest import Site
from webui import form
from webui.draft import Draft

PICTURES = sorted((Path(__file__).resolve().parent.parent.parent / "lora_fp8/demo/dataset").glob("*"))
LATE = """() => {
  const real = window.fetch;
  window.fetch = async (url, ...rest) => {
    if (String(url).includes("/run/")) await new Promise((done) => setTimeout(done, 1500));
    return real(url, ...rest);
  };
}"""
"""Holds back what is sent without the queue, as typing is."""


def field(page: Page, id: str):
    """The input of a setting."""
    return page.locator(f"#{id} input, #{id} textarea").first


def settle(page: Page, selector: str) -> None:
    """Wait until an element has been the same one for longer than a tick of the page, which may replace it."""
    script = """selector => {
        const node = document.querySelector(selector), seen = window.seenNode ??= {};
        if (seen.node !== node) Object.assign(seen, {node, at: performance.now()});
        return performance.now() - seen.at > 3000;
    }"""
    page.wait_for_function(script, arg=selector)


def view(page: Page, number: int) -> None:
    """Simple, all settings, TOML."""
    page.locator("#new-views button[role=tab]").nth(number).click()


def opened(page: Page) -> None:
    """Wait, as a person must, until the views can be typed into."""
    expect(page.locator("#new-summary .problems, #new-state .ready").first).to_be_visible()
    expect(page.locator("#new-views [inert]")).to_have_count(0)


def test_a_newcomers_way_to_a_training(site: Site, visit: Callable[..., Page]) -> None:
    """In Chinese; test_newcomer.py goes a similar way in English."""
    language, name = "zh-CN", "form"
    page = visit("new", language=language)
    summary = page.locator("#new-summary")
    expect(page.locator("#new-summary .problems, #new-state .ready").first).to_be_visible()
    page.locator("#new-files").get_by_role("button").first.click()
    page.click("#new-reset")
    expect(summary.locator(".problems li")).to_have_count(2)

    page.click("#new-demo-sd15")
    expect(summary.locator(".problems li")).to_have_count(1)
    field(page, "new-set").fill(name)
    page.set_input_files("#new-drop input[type=file]", PICTURES[:24])  # each with its caption
    expect(page.locator("#new-state")).to_contain_text("可以开始训练")
    expect(summary).to_contain_text("12 张图片，其中 0 张没有标注")
    expect(page.locator("#new-taken p")).to_be_visible()
    expect(page.locator("#new-dataset-folders")).to_contain_text(name)
    field(page, "new-name").fill(name)

    field(page, "new-train-steps").fill("0")
    expect(summary.locator(".problems li")).to_contain_text("必须不小于 1，实际为 0")
    beside = "getComputedStyle(document.querySelector('#new-train-steps'), '::after').content"
    page.wait_for_function(f"{beside} !== 'none'")
    assert not page.locator("#new-state .ready").count()
    field(page, "new-train-steps").fill("24")
    expect(page.locator("#new-state")).to_contain_text("可以开始训练")

    view(page, 2)
    text = page.locator("#new-toml .cm-content")
    expect(text).to_contain_text("steps = 24")
    text.click()
    page.keyboard.press("Control+End")
    page.keyboard.type("\n[adapter]\nrank = 3  # mine")
    view(page, 1)
    expect(field(page, "set-adapter-rank")).to_have_value("3")
    expect(page.locator("#set-schedule-min_lr")).to_be_visible()
    expect(page.locator("#set-quantize-recipe")).to_be_hidden()
    field(page, "new-search").fill("optimizer.lr")
    expect(page.locator("#set-adapter-rank")).to_be_hidden()
    expect(field(page, "set-optimizer-lr")).to_have_value("0.0025")

    # Another tab shows the same draft, the comment has stayed, and what it changes comes back here.
    other = visit("new", language=language)
    expect(field(other, "new-train-steps")).to_have_value("24")
    field(other, "new-train-steps").fill("21")
    expect(other.locator("#new-summary")).to_contain_text("21")
    view(other, 2)
    expect(other.locator("#new-toml .cm-content")).to_contain_text("rank = 3  # mine")
    expect(other.locator("#new-toml .cm-content")).to_contain_text("steps = 21")
    other.reload()
    expect(field(other, "new-train-steps")).to_have_value("21")

    # Typed and turned to another view, or started, at once: what the server is told of the typing comes after that.
    opened(other)
    other.evaluate(LATE)
    field(other, "new-train-steps").press("End")
    other.keyboard.type("00")
    view(other, 2)
    expect(other.locator("#new-toml .cm-content")).to_contain_text("steps = 2100")
    view(other, 0)
    opened(other)
    field(other, "new-train-steps").press("End")
    other.keyboard.type("0")
    other.click("#new-start")
    other.wait_for_url(re.compile(rf"/{language}/run\?run=\d+"))
    queue = jobs.Queue(site.home)
    job = queue.get_job(int(other.url.rpartition("=")[2]))
    kept = config.loads(queue.read_config(job.id))
    queue.cancel(job.id)
    assert kept.name == name and kept.train.steps == 21000 and kept.adapter.rank == 3 and kept.optimizer.lr == 0.0025
    folder = Path(kept.dataset.folders[0].path)
    assert folder.is_relative_to(site.home) and {path.name for path in folder.iterdir()} == {
        path.name for path in PICTURES[:24]
    }
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in PICTURES[:24])


def test_a_base_is_recognised_and_settings_come_from_files(site: Site, visit: Callable[..., Page]) -> None:
    page = visit("new", language="zh-CN", expect=["400 (Bad Request)"])  # their image folder is not here
    problems = page.locator("#new-summary .problems")
    page.locator("#new-files").get_by_role("button").first.click()
    page.click("#new-reset")
    expect(problems.locator("li")).to_have_count(2)

    # Another trainer's settings; they become a preset, and the preset is used in a form begun anew.
    theirs = site.root / "theirs.toml"
    theirs.write_text('pretrained_model_name_or_path = "m"\nnetwork_module = "networks.lora"\nnetwork_dim = 7\n')
    theirs.write_text(theirs.read_text() + 'sample_prompts = "D:\\\\lora\\\\my prompts.txt"\n')
    prompts, other = site.root / "my prompts.txt", site.root / "notes.txt"
    prompts.write_text("a red barn --s 9\n")
    other.write_text("nothing\n")
    page.locator("#new-foreign").get_by_role("button").first.click()
    page.set_input_files("#new-import input[type=file]", [prompts, theirs, other])
    told = page.locator("#new-foreign")
    expect(told).to_contain_text("network_dim")
    expect(told).to_contain_text("一并读取：my prompts.txt")
    expect(told).to_contain_text("notes.txt：theirs.toml 没有引用它")
    expect(field(page, "new-preview-prompts")).to_have_value("a red barn")
    field(page, "new-preset-name").fill("theirs")
    page.click("#new-preset-save")
    expect(page.get_by_text("已存为 theirs")).to_be_visible()
    page.click("#new-reset")
    expect(problems.locator("li")).to_have_count(2)  # the cards are drawn anew with them, and a key meets the new ones
    view(page, 1)
    expect(field(page, "set-adapter-rank")).to_have_value("16")
    card, undo = (
        page.locator("#set-presets .choice-card", has_text="theirs"),
        page.locator("#set-presets [data-do=undo]"),
    )
    expect(card).to_contain_text("秩（network_dim） 7")
    settle(page, "#set-presets .choice-card")
    card.press("Enter")
    expect(field(page, "set-adapter-rank")).to_have_value("7")
    expect(card).to_have_attribute("aria-pressed", "true")
    expect(card).to_be_focused()
    undo.press("Enter")
    expect(field(page, "set-adapter-rank")).to_have_value("16")
    page.locator("#set-preset input").click()  # the field beneath takes files of other folders, too
    page.get_by_role("option", name="theirs", exact=True).click()
    expect(field(page, "set-adapter-rank")).to_have_value("7")
    expect(card).to_have_attribute("aria-pressed", "true")

    # A folder of the visitor's own.
    own = site.root / "own pictures"
    own.mkdir()
    for path in PICTURES[:4]:
        shutil.copy(path, own)
    view(page, 0)
    elsewhere = site.root.parent / "elsewhere"
    elsewhere.mkdir()
    page.locator("#new-folder input").fill(f'"{elsewhere}"')
    page.locator("#new-folder input").press("Enter")
    expect(page.locator("#new-allow")).to_have_text("允许并添加该文件夹")
    page.locator("#new-folder input").fill(str(own))
    page.locator("#new-folder input").press("Enter")
    expect(page.locator("#new-dataset-folders")).to_contain_text("own pictures")
    expect(page.locator("#new-allow")).to_have_count(0)
    expect(page.locator("#new-summary")).to_contain_text("2 张图片")

    # A single file tells what it is, and its missing parts can be named; another architecture is contradicted.
    base = write_header(site.root / "xl.safetensors", SDXL)
    page.locator("#new-base-by-hand").get_by_role("button").first.click()
    expect(page.locator("#new-model-components")).to_have_count(0)
    page.locator("#new-model-path input").fill(str(base))
    page.locator("#new-model-path input").press("Enter")
    expect(field(page, "new-model-family")).to_have_value("Stable Diffusion XL")
    expect(page.locator("#new-model-components")).to_be_visible()
    page.locator("#new-model-family input").click()
    page.get_by_role("option", name="Stable Diffusion 1.5", exact=True).click()
    expect(problems).to_contain_text("xl.safetensors 是 Stable Diffusion XL，而当前选的架构是 Stable Diffusion 1.5")
    beside = "getComputedStyle(document.querySelector('#new-model-path'), '::after').content"
    assert "Stable Diffusion XL" in page.evaluate(beside)
    view(page, 1)
    expect(page.locator("#set-objective-min_snr_gamma")).to_be_visible()
    expect(page.locator("#set-objective-shift")).to_be_hidden()
    page.click("#new-reset")
    expect(problems).not_to_contain_text("xl.safetensors")
    page.click("#new-back")  # by mistake
    expect(problems).to_contain_text("xl.safetensors")
    page.click("#new-reset")
    expect(problems.locator("li")).to_have_count(2)  # else it may reset what the next test has written


@pytest.mark.parametrize("phone", [False, True])
def test_folders_are_shown_whole_and_changed_where_they_stand(
    site: Site, visit: Callable[..., Page], phone: bool
) -> None:
    """Control pictures and masks have no room beside the other columns: then each folder is a block."""
    folder = site.root / "whole"  # without the files of other tests, some of which are no images
    folder.mkdir(exist_ok=True)
    for path in PICTURES[:2]:
        shutil.copy(path, folder)
    row = f'[[dataset.folders]]\npath = "{folder}"\ncontrol = "{site.root}/{"long " * 20}"\nmask = "m"\n'
    draft = Draft(site.home)
    draft.write(f'[model]\nfamily = "flux_kontext"\npath = "a/b"\n{row}{row}')
    page = visit("new", language="zh-CN", phone=phone)

    def held(masks: list[str]) -> None:
        """Wait until the draft has folders with these masks."""
        for _ in range(6000):
            found = [row.get("mask") for row in form.read_values(draft.load_text())["dataset.folders"]]
            if found == masks:
                return
            page.wait_for_timeout(100)
        assert found == masks

    opened(page)
    page.click("#new-folders-open")
    for number, name in enumerate(("new", "set")):
        view(page, number)
        table = page.locator(f"#{name}-dataset-folders")
        mask = table.locator("[role=gridcell][aria-colindex='10']")
        expect(mask.first).to_be_visible()
        box = table.locator(".virtual-table-viewport")
        assert box.evaluate("one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight + 1")
        title = mask.first.evaluate("one => getComputedStyle(one, '::before').content")
        assert title == '"蒙版"'
        mask.nth(1).dblclick()
        written = mask.nth(1).locator("textarea")
        expect(written).to_be_focused()
        written.fill(f"{name}-masks")
        written.press("Enter")
        held(["m", f"{name}-masks"])  # and no row of nothing
    mask.nth(1).locator(".cell-menu-button").click()
    page.get_by_role("menuitem", name="删除行").click()
    held(["m"])
    draft.write(form.START)


def test_what_is_wrong_in_toml_is_told_and_harms_nothing(visit: Callable[..., Page]) -> None:
    page = visit("new", language="zh-CN", phone=True)
    opened(page)
    page.evaluate(LATE)  # the view's text comes late; what is typed at once must not give way to it
    view(page, 2)
    text = page.locator("#new-toml .cm-content")
    text.click()
    page.keyboard.press("Control+A")
    page.keyboard.type("[train\nsteps = 5")
    expect(page.locator("#new-summary .problems")).to_contain_text("不是有效的 TOML")
    assert "model" not in text.inner_text(), "what was typed stands, and nothing else"
    page.keyboard.press("Control+A")
    page.keyboard.type('name = "<img src=x onerror=alert(1)>"\nnope = 1')
    expect(page.locator("#new-summary .problems")).to_contain_text("没有这个设置")
    assert not page.locator("#new-summary img").count()
    view(page, 0)
    expect(field(page, "new-name")).to_have_value("<img src=x onerror=alert(1)>")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "fits a phone"


def test_what_is_typed_waits_for_the_last_of_several_answers(visit: Callable[..., Page]) -> None:
    page = visit("new", language="zh-CN")
    opened(page)
    with page.expect_response("**/run/**"):
        field(page, "new-train-steps").fill("21")
    # Two views are asked for right after each other, and their answers come one by one.
    page.evaluate("""() => {
      const real = window.fetch;
      window.held = [];
      window.answered = 0;
      window.fetch = async (url, given) => {
        if (!String(given?.body).includes("null,null,null")) return real(url, given);
        await new Promise((done) => window.held.push(done));
        const answer = await real(url, given);
        window.answered += 1;
        return answer;
      };
    }""")
    view(page, 1)
    view(page, 0)
    page.wait_for_function("held.length === 2")
    page.evaluate("held[0]()")
    page.wait_for_function("answered === 1")
    with page.expect_response("**/run/**"):  # by the tick: that answer has been taken in
        pass
    assert page.locator("#new-views [inert]").count()
    page.evaluate("held[1]()")
    opened(page)
    field(page, "new-train-steps").press("End")
    page.keyboard.type("0")
    expect(field(page, "new-train-steps")).to_have_value("210")


FOLLOWED = """() => {
  const entries = Object.entries;
  window.followed = [];
  Object.entries = (given) => {
    const found = entries(given);
    if (found.length && found.every(([, status]) => status && "component_id" in status && "fn_index" in status))
      window.followed.push(found.length);
    return found;
  };
}"""
"""Counts the components whose progress Gradio keeps, each time that it looks them up in the page."""


def test_a_tick_does_not_make_gradio_look_up_every_field(visit: Callable[..., Page]) -> None:
    """With 200 of 300 components that took 50 ms of each tick, in which no key was heard."""
    page = visit("new")
    opened(page)
    page.evaluate(FOLLOWED)
    page.wait_for_function("window.followed.length > 8")  # two timers, a few times each
    assert max(page.evaluate("window.followed")) < 20


def test_start_and_the_state_are_in_view_at_every_scroll_position(site: Site, visit: Callable[..., Page]) -> None:
    """On a laptop, a large screen and a phone, with everything folded out that can be long."""
    Draft(site.home).write(form.START)
    page = visit("new")
    opened(page)
    page.locator("#new-files").get_by_role("button").first.click()
    for width, height in ((1366, 768), (1920, 1080), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        bottom = page.evaluate("document.documentElement.scrollHeight - innerHeight")
        assert bottom > height / 2, "there is something to scroll"
        for share in (0, 0.3, 0.7, 1):
            page.evaluate("y => scrollTo(0, y)", share * bottom)
            # Beside the form, the list below the button says what is to do.
            for part in ("#new-start",) if width > 900 else ("#new-state .state", "#new-start"):
                expect(page.locator(part)).to_be_in_viewport(ratio=1)
            # Nothing lies over it: a click there is Start's.
            assert page.evaluate(
                """() => { const box = document.querySelector("#new-start").getBoundingClientRect();
                const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
                return at.closest("#new-start") !== null }"""
            ), (width, share)


def test_a_problem_is_red_only_where_somebody_has_been_or_after_start(site: Site, visit: Callable[..., Page]) -> None:
    Draft(site.home).write(f"{form.START}[train]\nsteps = 0\n")
    page = visit("new")
    opened(page)

    def colour(key: str) -> str:
        return page.evaluate(f"getComputedStyle(document.querySelector('#new-{key}'), '::after').color")

    name, steps = "name", "train-steps"
    untouched = colour(name)
    assert colour(steps) == untouched
    field(page, f"new-{steps}").click()
    page.keyboard.press("Tab")
    page.wait_for_function(
        "was => getComputedStyle(document.querySelector('#new-train-steps'), '::after').color !== was", arg=untouched
    )
    assert colour("preview-prompts") == untouched != colour(steps)
    page.click("#new-start")
    page.wait_for_function(
        "was => getComputedStyle(document.querySelector('#new-preview-prompts'), '::after').color !== was",
        arg=untouched,
    )


def test_a_problem_leads_to_its_setting(site: Site, visit: Callable[..., Page]) -> None:
    Draft(site.home).write(form.START + "[adapter]\nrank = 0\n")
    page = visit("new")
    opened(page)
    page.click("#new-start")  # leads to the first, which is in the view of all settings only
    expect(field(page, "set-adapter-rank")).to_be_focused()
    view(page, 0)
    problems = page.locator("#new-summary .problems")
    problems.get_by_role("button", name="Base model").click()
    expect(page.locator("#new-base-search")).to_be_focused()
    problems.get_by_role("button", name="Image folders").click()
    expect(page.locator("#new-drop button").first).to_be_focused()


def test_the_search_knows_other_trainers_names_and_says_when_nothing_fits(
    site: Site, visit: Callable[..., Page]
) -> None:
    Draft(site.home).write(form.START)
    page = visit("new")
    opened(page)
    view(page, 1)
    rank, steps, index = (page.locator(id) for id in ("#set-adapter-rank", "#set-train-steps", "#new-index"))
    expect(rank).to_be_visible()
    field(page, "new-search").fill("Network_Dim")
    expect(steps).to_be_hidden()
    expect(rank).to_be_visible()
    field(page, "new-search").fill("rank 秩")  # every word, in either language
    expect(rank).to_be_visible()
    field(page, "new-search").fill("<b>no such</b>")
    expect(index).to_contain_text("<b>no such</b>")
    expect(rank).to_be_hidden()
    field(page, "new-search").fill("")
    expect(steps).to_be_visible()
    expect(index).to_be_empty()
    page.locator("#new-sections [data-section=section-export]").click()
    expect(page.locator("#section-export h2")).to_be_in_viewport()
