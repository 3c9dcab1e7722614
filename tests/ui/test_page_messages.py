"""What the page says when something fails, and how long it says it, in a browser."""

import resource
import shutil
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from playwright.sync_api import Page, expect
from waiting import LONG_SECONDS

from tests.ui.conftest import Site, start, stop
from tests.ui.test_form_path import PICTURES, field, opened, view

KEPT = "已填写的内容都还在"


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A page of its own, whose process can be kept from writing any file."""
    folder = tmp_path_factory.mktemp("tight")
    started = start(folder / "home", folder / "root")
    yield started
    stop(started)


def room(site: Site, there_is: bool) -> None:
    """Let the page's process write files, or have each write fail as on a disk without room (EFBIG)."""
    psutil.Process(site.process.pid).rlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if there_is else 0, resource.RLIM_INFINITY)
    )


def test_a_disk_without_room_is_said_and_what_was_typed_is_kept(tight: Site, visit: Callable[..., Page]) -> None:
    page = visit("new", language="zh-CN", site=tight)
    opened(page)
    problem, name = page.locator("#problem"), "typed"
    try:
        room(tight, False)
        field(page, "new-name").fill(name)
        expect(problem).to_contain_text(KEPT)
        expect(problem).to_have_attribute("role", "alert")
        # Nothing stays locked: the other view opens at once, and holds what was typed.
        view(page, 1)
        expect(page.locator("#new-views [inert]")).to_have_count(0)
        expect(field(page, "set-name")).to_have_value(name)
        expect(problem).to_have_count(1)
        problem.get_by_role("button").click()
        expect(problem).to_have_count(0)
    finally:
        room(tight, True)
    draft = tight.home / "drafts/new.toml"
    expect(page.locator("#new-summary .problems, #new-state .ready").first).to_be_visible()
    deadline = time.monotonic() + LONG_SECONDS
    while not draft.exists() or name not in draft.read_text(encoding="utf-8"):  # the next tick writes it
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)
    page.reload()
    opened(page)
    expect(field(page, "new-name")).to_have_value(name)


def test_a_message_leaves_and_comes_again(site: Site, visit: Callable[..., Page]) -> None:
    folder = site.root / "said"
    folder.mkdir()
    for file in PICTURES[:2]:
        shutil.copy(file, folder)
    page = visit(f"dataset?folder={folder}")
    page.clock.install()
    page.reload()
    page.locator("#dataset-many button").first.click()
    said = page.locator("#dataset-said .toast")
    for _ in range(2):  # the same words
        page.click("#dataset-apply")
        expect(said).to_be_visible()
        expect(said).to_have_attribute("role", "status")
        page.clock.fast_forward(4_000)
        expect(said).to_be_visible()
        page.clock.fast_forward(120_000)
        expect(said).to_be_hidden()


def test_a_refused_request_unlocks_the_form(tight: Site, visit: Callable[..., Page]) -> None:
    """As when the page's program was exchanged for another one: the form is not dead for what was refused."""
    page = visit("new", site=tight, expect=["status of 500", "500: "])
    opened(page)
    page.route("**/gradio_api/run/**", lambda route: route.fulfill(status=500, json={"error": "No."}))
    view(page, 1)
    expect(page.locator("#new-views [inert]")).to_have_count(0)
