"""What the pages of runs say is true, and soon: runs that come, go on, die and are deleted while somebody looks."""

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from waiting import wait_until

from lora_fp8 import config, jobs
from tests.ui.conftest import Site, start, stop
from webui import translations

SOON = 240_000
"""Milliseconds. It comes with the next tick; a machine that tests has other things to do."""


class Trainer:
    """What a trainer in a shell leaves in a run folder, and its lock."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        text = 'name = "x"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
        (folder / "config.toml").write_text(config.dumps(config.loads(text)), encoding="utf-8")
        self.take()
        self.say(event="start", device="cpu")
        self.say(event="stage", stage="train", step=0, steps=1000)

    def take(self) -> None:
        self.lock = open(self.folder / "lock", "w")  # held until `die`
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def die(self) -> None:
        self.lock.close()

    def say(self, **event: object) -> None:
        with open(self.folder / "events.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps({"t": time.time(), **event}) + "\n")
        state = {"state": event.get("stage", event["event"]), "step": event.get("step"), "t": time.time()}
        (self.folder / "status.json").write_text(json.dumps(state))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.say(event="step", step=step, loss=1 / step, lr=1e-4, grad_norm=1.0, images_per_s=1.0, vram_gb=1.0)


@pytest.fixture
def trainer(site: Site, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Trainer]]:
    made = []

    def make(name: str) -> Trainer:
        made.append(Trainer(site.root / "runs" / name))
        return made[-1]

    yield make
    for one in made:
        one.die()


RECORDER = """window.noticed = [];
const Real = window.Notification;
window.Notification = class extends EventTarget {
  constructor(title, options) { super(); window.noticed.push([title, options.body]); }
  static get permission() { return localStorage.getItem("asked") ? "granted" : "default"; }
  static async requestPermission() { localStorage.setItem("asked", "yes"); return "granted"; }
};"""
"""Notifications as a browser has them whose user allows them; what is shown is kept."""


def card(page: Page, folder: Path):
    return page.locator(f'[data-job="{folder}"]')


def test_a_run_in_a_shell_is_followed_until_it_dies_and_goes_on(
    visit: Callable[..., Page], trainer: Callable[[str], Trainer]
) -> None:
    here = visit()
    expect(here.locator("#machine")).to_contain_text("CPU")
    one = trainer("shell-run")
    expect(card(here, one.folder).locator(".state")).to_have_text("running", timeout=SOON)
    there = visit(f"run?run={one.folder}", language="zh-CN")
    expect(there.locator("#head .state")).to_have_text(translations.say("zh-CN", "state.running"), timeout=SOON)
    for last in (10, 20):
        one.steps(last - 9, last)
        expect(card(here, one.folder).locator(".figures")).to_contain_text(f"{last} / 1000", timeout=SOON)
        expect(there.locator("#head .figures")).to_contain_text(f"{last} / 1000", timeout=SOON)
    loss = there.locator("#loss path.line").first
    expect(loss).to_be_visible()
    assert loss.get_attribute("d").count("L") == 19

    # A step that is asked for comes by a file that the trainer reads.
    there.locator("#head [data-do=save]").click()
    expect(there.locator("#said")).to_contain_text("shell-run")
    assert (one.folder / "control" / "save").exists()
    there.locator("#head [data-do=stop]").click()
    expect(there.locator("#head .state")).to_have_text(translations.say("zh-CN", "state.stopping"), timeout=SOON)

    one.die()  # kill -9: nothing is written, the lock is free
    (one.folder / "control" / "stop").unlink()
    expect(there.locator("#head .state")).to_have_text(translations.say("zh-CN", "state.lost"), timeout=SOON)
    expect(card(here, one.folder).locator(".state")).to_have_text("interrupted", timeout=SOON)

    # It goes on from step 10: what it did after that did not happen.
    one.take()
    one.say(event="start", device="cpu", resume=True)
    one.say(event="stage", stage="train", step=10, steps=1000)
    one.steps(11, 13)
    expect(there.locator("#head .state")).to_have_text(translations.say("zh-CN", "state.running"), timeout=SOON)
    expect(there.locator("#head .figures")).to_contain_text("13 / 1000", timeout=SOON)
    expect(loss).to_have_attribute("d", re.compile("^M[^L]+(L[^L]+){12}$"))

    # It is ended at once only after a question; what holds this run does not say who it is. Ended, it is deleted.
    card(here, one.folder).locator("[data-do=force]").click()
    here.locator("#end-now").click()
    expect(here.locator("#said .wrong")).to_contain_text("another user")
    expect(here.locator("#end-now")).to_be_hidden()
    one.die()
    expect(card(here, one.folder).locator(".state")).to_have_text("interrupted", timeout=SOON)
    card(here, one.folder).locator("[data-do=delete]").click()
    here.locator("#typed-name textarea, #typed-name input").first.fill("shell-run")
    here.get_by_role("button", name="Delete", exact=True).locator("visible=true").first.click()
    expect(card(here, one.folder)).to_have_count(0, timeout=SOON)
    assert not one.folder.exists()


def test_page_and_worker_may_die_and_come_back(chromium: Browser, tmp_path: Path) -> None:
    """A tab that nobody touches says so, and goes on when the page does; and the page sees to a worker."""
    locked = ("--user", "me"), {"LORA_FP8_PASSWORD": "a long password"}
    site = start(tmp_path / "home", tmp_path / "root", *locked[0], **locked[1])
    one = Trainer(site.root / "runs" / "lives-on")
    try:
        one.steps(1, 5)
        context = chromium.new_context(locale="en-US")
        page = context.new_page()
        page.goto(f"{site.address}/en/run?run={one.folder}")
        for password in ("wrong password", "a long password"):  # the session outlives the page's program
            page.fill("#u", "me")
            page.fill("#p", password)
            page.keyboard.press("Enter")
            expect(page.locator(".wrong")).to_have_count(int(password == "wrong password"))
        expect(page.locator("#head .figures")).to_contain_text("5 / 1000", timeout=SOON)
        site.process.kill()
        site.process.wait()
        expect(page.locator("#lost")).to_contain_text("lora-fp8 ui", timeout=SOON)
        expect(page.locator("[inert] #head")).to_have_count(1)  # what is typed now would be discarded
        one.steps(6, 9)
        port = site.address.rpartition(":")[2]
        site = start(tmp_path / "home", tmp_path / "root", "--port", port, *locked[0], **locked[1])
        expect(page.locator("#head .figures")).to_contain_text("9 / 1000", timeout=SOON)
        expect(page.locator("#lost")).to_have_count(0)

        def worker() -> int:
            """One that has begun to work, so that it hears signals."""

            def working() -> int:
                found = jobs.find_worker(site.home)
                return found.pid if found and found.pid != killed and found.heartbeat > found.since else 0

            return wait_until(working, lambda: "no worker")

        killed = 0
        killed = worker()
        os.kill(killed, signal.SIGKILL)
        one.steps(10, 11)
        expect(page.locator("#head .figures")).to_contain_text("11 / 1000", timeout=SOON)
        expect(page.locator("#head .state")).to_have_text("running")
        ended = worker()
        os.kill(ended, signal.SIGTERM)  # told to end, it stays away
        wait_until(lambda: not jobs.find_worker(site.home))
        assert not jobs.was_worker_killed(site.home)
        context.close()
    finally:
        one.die()
        stop(site)


def test_a_job_is_moved_and_deleted_by_its_name(site: Site, visit: Callable[..., Page]) -> None:
    queue = jobs.Queue(site.home)
    text = 'name = "del{}"\noutput_dir = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    # Of a group of GPUs that this machine does not have: it waits for ever, and says so.
    ids = [queue.submit(text.format(n, site.root / "runs"), scheduling=jobs.Scheduling(gpus="77")) for n in range(2)]
    page = visit()
    first, second = (page.locator(f'[data-job="{id}"]') for id in ids)
    expect(first.locator(".state")).to_have_text("queued", timeout=SOON)
    expect(first.locator(".said")).to_contain_text(re.compile("77|no background worker"))
    second.locator("[data-do=up]").click()
    expect(page.locator("#said")).to_contain_text("moved up")
    order = [job.id for job in queue.list_jobs(shell=False) if job.id in ids]
    assert order == ids[::-1]
    first.locator("[data-do=cancel]").click()
    expect(first.locator(".state")).to_have_text("cancelled", timeout=SOON)
    first.locator("[data-do=delete]").click()
    typed = page.locator("#typed-name textarea, #typed-name input").first
    typed.fill("del1")
    delete = page.get_by_role("button", name="Delete", exact=True).locator("visible=true").first
    delete.click()
    expect(page.locator("#said")).to_contain_text("type the name, del0")
    typed.fill("del0")
    delete.click()
    expect(first).to_have_count(0, timeout=SOON)
    queue.cancel(ids[1])
    assert [job.id for job in queue.list_jobs(shell=False) if job.id in ids] == [ids[1]]
    queue.delete(ids[1])


def test_the_end_of_a_run_is_announced_once_after_the_button_asked_for_it(
    visit: Callable[..., Page], trainer: Callable[[str], Trainer]
) -> None:
    first = visit()
    first.context.add_init_script(RECORDER)
    first.reload()
    other = first.context.new_page()
    other.goto(first.url.replace("/en/", "/zh-CN/settings"))
    button = first.locator("#notify")
    expect(button).to_have_text(translations.say("en", "notify.off"))
    assert first.evaluate("localStorage.asked === undefined"), "nothing asks before the button"
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    one = trainer("noticed")
    one.say(event="error", text="out of memory")
    one.die()
    wait_until(lambda: first.evaluate("noticed") + other.evaluate("noticed"))
    (told,) = first.evaluate("noticed") + other.evaluate("noticed")
    assert told[0].startswith("noticed · ") and "out of memory" in told[1]
    button.click()
    expect(button).to_have_text(translations.say("en", "notify.off"))
