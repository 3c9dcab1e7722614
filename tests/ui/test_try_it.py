"""Drawing in the browser while a run trains: its LoRA ends with the bytes of an undisturbed run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect
from waiting import slowed, wait_until

from lora_fp8 import jobs
from lora_fp8.jobs import procs
from lora_fp8.run import Run, drawings
from tests.ui.conftest import Site

SOON = 480_000
"""Milliseconds. A process starts, loads a model and draws; a machine that tests has other things to do."""
JOB = """
name = "{name}"
output_dir = "{root}/runs"
[model]
family = "sd15"
path = "demo"
[dataset]
resolution = 64
cache_dir = "{root}/cache"
[[dataset.folders]]
path = "{root}/pictures"
[train]
steps = {steps}
threads = 1
[schedule]
name = "constant"
[checkpoint]
every = 1
[preview]
prompts = ["a tree"]
steps = 2
[export]
verify = false
"""


def newest(folder: Path) -> Path:
    """The folder of the newest checkpoint."""
    return max((folder / "checkpoints").glob("step-*"))


def tensors(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def ended(queue: jobs.Queue, id: int) -> Callable[[], bool]:
    return lambda: queue.get_job(id).state in jobs.ENDED


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in Run.open(folder).read_events() if event["event"] == kind]


@pytest.mark.timeout(3600)  # two trainings of the demo base and two drawings, one after the other
def test_drawing_beside_a_training_that_stays_the_same(site: Site, visit: Callable[..., Page]) -> None:
    pictures = site.root / "pictures"
    pictures.mkdir()
    Image.effect_noise((64, 64), 90).convert("RGB").save(pictures / "a.png")
    (pictures / "a.txt").write_text("a tree", encoding="utf-8")
    queue, folder = jobs.Queue(site.home), site.root / "runs" / "asked"
    asked = queue.submit(JOB.format(name="asked", root=site.root, steps=100_000))
    jobs.ensure_worker(site.home)
    wait_until(lambda: any(folder.glob("checkpoints/step-*")), lambda: queue.read_log_tail(asked))

    # It trains until it is stopped, and its steps are done again below: as few of them as there may be.
    with slowed(procs.find_holder(Run.open(folder).lock_file)):
        # An image at once, and other prompts from now on.
        page = visit(f"run?run={asked}")
        page.locator("#sample-now button").first.click()
        page.locator("#sample-prompt textarea").fill('a house <img src=x onerror="window.canary=1">')
        page.locator("#sample-ask").click()
        expect(page.locator("#samples figcaption")).to_contain_text("a house <img", timeout=SOON)
        page.locator("#change-prompts button").first.click()
        page.locator("#load-prompts").click()
        expect(page.locator("#new-prompts textarea")).to_have_value("a tree", timeout=SOON)
        page.locator("#new-prompts textarea").fill("a boat\n\na cat")
        page.locator("#apply-prompts").click()
        expect(page.locator("#grid thead")).to_contain_text("a boat", timeout=SOON)
        assert page.evaluate("window.canary") is None
        assert [event["prompts"] for event in events(folder, "previews_changed")] == [["a boat", "a cat"]]

        # Try it, on the CPU beside the training.
        page = visit(f"draw?run={asked}")
        expect(page.locator("#draw-prompt textarea")).to_have_value("a tree", timeout=SOON)
        page.locator("#draw-prompt textarea").fill("a tree at night")
        page.get_by_label("On the CPU, at once").check()
        page.locator("#draw-start").click()
        expect(page.locator("#drawing .state")).to_have_text("done", timeout=SOON)
        assert queue.get_job(asked).state == "running"
    queue.stop(asked)
    wait_until(ended(queue, asked), lambda: queue.get_job(asked))
    stopped_at = newest(folder)
    steps = int(stopped_at.name.removeprefix("step-"))
    undisturbed = queue.submit(JOB.format(name="undisturbed", root=site.root, steps=steps))
    wait_until(ended(queue, undisturbed), lambda: queue.get_job(undisturbed))
    assert queue.get_job(undisturbed).state == "done", queue.read_log_tail(undisturbed)
    same = site.root / "runs" / "undisturbed" / "checkpoints" / stopped_at.name
    assert tensors(same) == tensors(stopped_at) and len(tensors(same)) == 2

    # The base model and two strengths: a slider moves between these, and the grid shows all.
    record = drawings.read(site.home / "drawings" / "000001")
    told = [(image["lora"], image["strength"]) for image in record["images"]]
    assert told == [(None, 0.0), (0, 0.5), (0, 1.0)] and record["prompt"] == "a tree at night"
    expect(page.locator("#drawing .drawn-name")).to_contain_text("· 1")
    slider = page.locator("#drawing .strength input")
    slider.focus()
    slider.press("ArrowLeft")
    expect(page.locator("#drawing .drawn-name")).to_contain_text("· 0.5")
    expect(page.locator("#drawing img.drawn")).to_have_attribute("alt", page.locator(".drawn-name").inner_text())
    page.locator("#drawing .cell").last.click()
    expect(page.locator("#drawing .drawn-name")).to_contain_text("· 1")
    expect(page.locator("#drawing table.pictures img")).to_have_count(3)

    # A grid of strengths and checkpoints, in turn; the queue has nothing else to do now.
    page = visit(f"draw?run={asked}")
    page.locator("#draw-steps input").click()
    page.get_by_role("option").nth(1).click()
    page.keyboard.press("Escape")
    page.locator("#draw-start").click()
    expect(page.locator('#drawing [data-drawing="000002"] .state')).to_have_text("done", timeout=SOON)
    expect(page.locator("#drawing table.pictures tbody tr")).to_have_count(2)
    page.locator("#drawing .pick").first.click()
    expect(page.locator("#drawing .drawn-name")).to_contain_text(f"Step {steps}")

    # The earlier one is opened, and deleted after a question.
    page.locator('#drawings [data-do="open"][data-id="000001"]').click()
    expect(page.locator('#drawing [data-drawing="000001"]')).to_be_visible(timeout=SOON)
    page.locator("#drawing [data-do=delete]").click()
    page.locator("#draw-delete").click()
    expect(page.locator('#drawing [data-drawing="000002"]')).to_be_visible(timeout=SOON)
    assert not (site.home / "drawings" / "000001").exists()
