"""The page as people have it: `lora-fp8 ui` in a process of its own, and Chromium.

Whatever a browser test does, it fails when the page wrote an error to the console, asked another host for something,
or answered with an error of the server.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from waiting import LONG_SECONDS, end_worker, wait_until

from lora_fp8 import jobs

ROOT = Path(__file__).resolve().parent.parent.parent
ARTEFACTS = ROOT / "test-artefacts"
"""Screenshots that tests leave to be looked at; git ignores it."""
MILLISECONDS = 1000 * LONG_SECONDS // 4
"""How long a browser waits for a state. Set once, as `expect` has one setting for all files of a process."""
LEFT = "AbortError: signal is aborted without reason"
"""What Gradio writes about its own request when a page is left, or followed by another, while it still asks."""


expect.set_options(timeout=MILLISECONDS)


@dataclass
class Site:
    """A running page.

    Attributes:
        address: "http://127.0.0.1:PORT", without a slash behind.
        home: its home folder: queue, drafts, datasets.
        root: a folder that it may use; empty.
        process: of `lora-fp8 ui`.
    """

    address: str
    home: Path
    root: Path
    process: subprocess.Popen[str]
    expected: list[str] = field(default_factory=list)


def start(home: Path, root: Path, *options: str, **environment: str) -> Site:
    """Start `lora-fp8 ui` on a free port and wait until it answers."""
    command = [sys.executable, "-m", "lora_fp8", "ui", "--port", "0", "--root", str(root), *options]
    root.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LORA_FP8_HOME": str(home), **environment},
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://\S+?(?=/ )", line):
            return Site(found[0], home, root, process)
    raise AssertionError(f"the page did not start: {''.join(lines)}")


def stop(site: Site) -> None:
    """End the page, its jobs and its worker; nothing that a test started stays."""
    site.process.send_signal(signal.SIGINT)
    try:
        site.process.wait(LONG_SECONDS)
    finally:
        site.process.kill()
        queue = jobs.Queue(site.home)

        def ended() -> bool:
            left = [job for job in queue.list_jobs(shell=False) if job.state not in jobs.ENDED]
            for job in left:
                if not job.asked:
                    queue.cancel(job.id)
            return not left

        wait_until(ended, lambda: f"does not end: {queue.list_jobs(shell=False)}")
        end_worker(site.home)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One page for all browser tests of a worker; tests keep to folders and runs of their own."""
    folder = tmp_path_factory.mktemp("site")
    started = start(folder / "home", folder / "root")
    yield started
    stop(started)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The system's Chromium; scripts/install_browser.sh installs it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "the browser tests need Chromium: run scripts/install_browser.sh (make test does)"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(site: Site, chromium: Browser) -> Iterator[Callable[..., Page]]:
    """visit("new", language="zh-CN", dark=True, phone=True): the page of that name in a browser of its own.

    `expect=[...]`: parts of console messages that the test causes on purpose. `site=`: another page than the usual one.
    """
    contexts, told = [], []

    def open_page(
        path: str = "",
        language: str = "en",
        dark: bool = False,
        phone: bool = False,
        expect: list[str] = (),
        site: Site = site,
    ) -> Page:
        context = chromium.new_context(
            locale={"en": "en-US", "zh-CN": "zh-CN"}[language],
            color_scheme="dark" if dark else "light",
            viewport={"width": 390, "height": 780} if phone else {"width": 1280, "height": 900},
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(MILLISECONDS)

        def tell(line: str) -> None:
            if not any(part in line for part in (LEFT, *expect)):
                told.append(line)

        page.on("console", lambda message: tell(f"console: {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: tell(f"script: {error}"))
        page.on("response", lambda answer: tell(f"{answer.status}: {answer.url}") if answer.status >= 500 else None)

        def asked(request) -> None:
            if not request.url.startswith((site.address, "data:", "blob:")):
                tell(f"another host: {request.url}")

        page.on("request", asked)
        page.goto(f"{site.address}/{language}/{path}")
        page.wait_for_selector(".site-header")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert told == []


@pytest.fixture
def picture_of(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """picture_of(page, "new_zh"): keep a screenshot in test-artefacts/."""

    def keep(page: Page, name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"{name}.png")

    return keep
