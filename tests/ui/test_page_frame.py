"""The frame of every page, in a browser: languages, light and dark, a phone, the keyboard."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from webui import words
from webui.app import PAGES, UNLISTED

LEAVING = ["Connection errored out"]
"""What Gradio writes when a page is left before it has heard the answer to its first question."""


@pytest.mark.parametrize("language", words.LANGUAGES)
def test_every_page_opens_and_fits_a_phone(visit: Callable[..., Page], picture_of: Callable, language: str) -> None:
    page = visit("", language=language, phone=True, expect=LEAVING)
    for name in PAGES:
        page.goto(re.sub(r"/(en|zh-CN)/.*", f"/{language}/{'' if name == PAGES[0] else name}", page.url))
        page.wait_for_selector(".site-header")
        page.wait_for_selector("#about table") if name == "settings" else page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert page.evaluate("document.documentElement.lang") == language
        marked = page.locator(".site-header [aria-current=page]").all_inner_texts()
        assert marked == ([] if name in UNLISTED else [words.say(language, f"page.{name}")])
        picture_of(page, f"phone_{name}_{language}")


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

    def background() -> int:
        page.wait_for_timeout(200)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    def pressed() -> list[str]:
        return page.eval_on_selector_all("[data-theme][aria-pressed=true]", "all => all.map(one => one.dataset.theme)")

    page.wait_for_selector("[data-theme=system][aria-pressed=true]")
    assert (background() < 150) == (system == "dark")
    for chosen in ("dark", "light"):
        page.click(f"[data-theme={chosen}]")
        assert (background() < 150) == (chosen == "dark") and pressed() == [chosen]
        page.reload()
        page.wait_for_selector(f"[data-theme={chosen}][aria-pressed=true]")
        assert (background() < 150) == (chosen == "dark") and pressed() == [chosen]


def test_the_header_is_reached_by_keyboard(visit: Callable[..., Page]) -> None:
    page = visit("settings")
    page.wait_for_selector("[data-theme=system][aria-pressed=true]")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.innerText || document.activeElement.dataset.theme || ''"))
    assert [words.say("en", f"page.{name}") for name in PAGES if name not in UNLISTED] == seen[1:7]
    assert seen[7:11] == ["中文", "system", "light", "dark"]
    page.keyboard.press("Shift+Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
