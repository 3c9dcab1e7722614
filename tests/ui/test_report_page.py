"""The report of a run in a browser: it asks for nothing, runs nothing of the run, and is readable in every form.

tests/test_html_report.py asks what it says.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from lora_fp8.tools import report
from tests.test_html_report import fill_with_hostile_text, make_drawing, train, write_events, write_verified_file
from tests.test_html_report import folder as folder  # a fixture
from tests.ui.conftest import ARTEFACTS, Site

RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}}
SHAPES = {"desktop": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[[Path, str], Page]]:
    """opened(file, "phone"): a report in a browser without a network, which fails if anything is asked for."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_report(file: Path, shape: str) -> Page:
        width, scheme = SHAPES[shape]
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_load_state("networkidle")
        assert [address for address in asked if not address.startswith("data:image/webp;")] == [file.as_uri()]
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert problems == []


def write(folder: Path, language: str) -> Path:
    return report.write(folder, folder.parent / f"{language}.html", language)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_it_opens_without_a_network_and_is_accessible(
    language: str, shape: str, folder: Path, opened: Callable[[Path, str], Page]
) -> None:
    train(folder)
    make_drawing(folder / "strengths")
    write_events(folder, [{"t": 1100.0, "event": "data", "images": 5, "buckets": {"64x64": 3, "48x80": 2}}])
    write_verified_file(folder)
    page = opened(write(folder, language), shape)
    narrow = "caption => caption.offsetWidth < 0.6 * caption.parentElement.offsetWidth"
    assert page.locator("caption").count()  # one once stood there letter by letter
    assert not page.evaluate(f"[...document.querySelectorAll('caption')].filter({narrow}).length")
    assert page.evaluate("document.documentElement.scrollWidth") == SHAPES[shape][0], "nothing is cut off"
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"report_{language}_{shape}.png", full_page=True)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    # axe is put into the page by the driver, which the page's policy does not bind.
    found = [
        (one["id"], node["html"][:200])
        for one in Axe().run(page, None, RULES).response["violations"]
        for node in one["nodes"]
    ]
    assert found == []


def test_the_values_under_the_pointer_are_shown(folder: Path, opened: Callable[[Path, str], Page]) -> None:
    """The one script that the policy allows."""
    train(folder)
    page = opened(write(folder, "en"), "desktop")
    area = page.locator("figure.chart .area").nth(1)
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    expect(page.locator("#chart-tip")).to_have_text(
        "step 10\nall timesteps: 0.5\nt = 100 of 1000: 1\nt = 500 of 1000: 1"
    )


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_nothing_in_a_run_acts(language: str, folder: Path, opened: Callable[[Path, str], Page]) -> None:
    fill_with_hostile_text(folder)
    page = opened(write(folder, language), "phone")
    assert page.evaluate("window.canary") is None
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("h1").inner_text().startswith('"></style></textarea><script>window.canary=1</script>')


def test_what_got_past_the_escaping_would_do_nothing(
    folder: Path, chromium: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy in the page is the second lock; without escaping it holds alone."""
    monkeypatch.setattr(report.page, "escape", str)
    fill_with_hostile_text(folder)
    file = write(folder, "en")
    assert "<script>window.canary=1</script>" in file.read_text(encoding="utf-8", errors="replace")
    context = chromium.new_context()
    page = context.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(file.as_uri())
    assert page.evaluate("window.canary") is None and any("Content Security Policy" in line for line in refused)
    context.close()


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_the_page_of_a_run_sends_its_report(
    language: str, folder: Path, site: Site, visit: Callable[..., Page], tmp_path: Path
) -> None:
    place = site.root / "runs" / f"fox-{language}"
    place.parent.mkdir(exist_ok=True)
    train(folder)
    folder.rename(place)
    make_drawing(site.home / "drawings" / ("1" if language == "en" else "2"), "a fox by strength")
    page = visit(f"run?run={place}", language=language)
    with page.expect_download() as started:
        page.locator("#head a[href^='/report']").click()
    assert started.value.suggested_filename == f"fox-{language}-report.html"
    text = Path(started.value.path()).read_text(encoding="utf-8")
    assert text.startswith(report.BEGIN.decode()) and f'<html lang="{language}">' in text
    assert not (place / "report.html").exists(), "a download changes nothing in the run"
