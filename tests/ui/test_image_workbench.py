"""The image workbench on New training: a folder is dropped, captioned by keyboard alone and by a model, and undone.

What the page shows is compared with the caption files' bytes.
"""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page, expect
from test_captioner import tagger

from lora_fp8 import jobs
from tests.ui.conftest import Site
from webui import form, translations
from webui.draft import Draft

LANGUAGE = "zh-CN"
IMAGES = 26
"""More than a page of the grid."""
HOSTILE = "<img src=x onerror=document.title='owned'>"


def say(key: str, **values: object) -> str:
    return translations.say(LANGUAGE, f"images.{key}", **values)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Wide images without captions, and a file that is no image, in a folder of its own."""
    folder = tmp_path / "my cat"
    folder.mkdir()
    for number in range(IMAGES):
        Image.fromarray(np.full((60, 180, 3), 9 * number, np.uint8)).save(folder / f"IMG_{100 + number}.png")
    (folder / "notes.doc").write_bytes(b"no image")
    return folder


def read_captions(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def wait_for(page: Page, condition: Callable[[], bool]) -> None:
    """Wait for what the server writes; the page goes on meanwhile."""
    for _ in range(1200):
        if condition():
            return
        page.wait_for_timeout(100)
    assert condition()


def test_a_folder_is_sent_captioned_by_keyboard_and_by_a_model(
    site: Site, photos: Path, visit: Callable[..., Page], picture_of: Callable[[Page, str], None]
) -> None:
    torch.manual_seed(3)
    models = site.root / "models"
    models.mkdir()
    tagger(models / "tiny-tagger")
    Draft(site.home).write(form.START)
    folder = site.home / "datasets" / "my cat"
    page = visit("new", language=LANGUAGE)
    page.set_input_files("#new-drop .wb-folder", photos)
    cells, boxes = page.locator(".wb-cell"), page.locator(".wb-cell textarea")
    expect(cells).to_have_count(24)
    expect(page.locator("#new-taken .wrong")).to_contain_text("notes.doc")
    expect(page.locator(".wb-counts")).to_have_text(say("counts", count=IMAGES, without=IMAGES))
    wait_for(page, lambda: [row["path"] for row in read_folders(site)] == [str(folder)])

    # By keyboard alone: past all images; from the image to its box, on with Ctrl+Enter, over the end of the page.
    page.locator(".wb-skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".wb-keys")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#new-folders-open")).to_be_focused()
    page.locator(".wb-open").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".wb-open").nth(23)).to_be_focused()
    page.keyboard.press("Tab")
    expect(boxes.nth(23)).to_be_focused()
    for text in ("the last of a page", HOSTILE, "一只猫"):
        page.keyboard.type(text)
        page.keyboard.press("Control+Enter")
        if text == "the last of a page":
            expect(cells.first).to_have_attribute("data-name", "IMG_124.png")
            expect(boxes.first).to_be_focused()
    wait_for(page, lambda: len(read_captions(folder)) == 3)
    assert read_captions(folder) == {"IMG_123": "the last of a page", "IMG_124": HOSTILE, "IMG_125": "一只猫"}
    expect(cells).to_have_count(2)
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(cells).to_have_count(24)

    # A caption that somebody else has changed is not written over until the person says so.
    boxes.first.fill("mine")
    (folder / "IMG_100.txt").write_text("theirs", encoding="utf-8")
    boxes.first.blur()
    note = cells.first.locator(".wb-note")
    expect(note).to_contain_text("theirs")
    assert read_captions(folder)["IMG_100"] == "theirs"
    # The press counts, though the grid is painted anew between its beginning and its end.
    note.get_by_role("button", name=say("keep_mine")).hover()
    page.mouse.down()
    (folder / "IMG_101.txt").write_text("meanwhile", encoding="utf-8")
    expect(boxes.nth(1)).to_have_value("meanwhile")
    (folder / "IMG_101.txt").unlink()
    expect(boxes.nth(1)).to_have_value("")
    page.mouse.up()
    wait_for(page, lambda: read_captions(folder)["IMG_100"] == "mine")

    # A model tags the rest, as a job; one undo takes all of it back.
    before = read_captions(folder)
    page.click("#auto-open")
    page.locator(".wb-model", has_text="tiny-tagger").click()
    expect(page.locator("#auto-begin")).to_have_text(say("auto.begin", count=IMAGES - 4))
    page.click("#auto-begin")
    expect(page.locator(".wb-counts")).to_have_text(say("counts.all", count=IMAGES))
    (job,) = [job for job in jobs.Queue(site.home).list_jobs() if job.command[:2] == ("caption", str(folder))]
    wait_for(page, lambda: jobs.Queue(site.home).get_job(job.id).state == "done")
    expect(boxes.nth(1)).not_to_have_value("")
    assert read_captions(folder).items() > before.items() and len(read_captions(folder)) == IMAGES
    picture_of(page, "images_captioned")
    page.get_by_role("button", name=say("undo"), exact=True).click()
    expect(page.locator(".wb-counts")).to_have_text(say("counts", count=IMAGES, without=IMAGES - 4))
    assert read_captions(folder) == before
    assert page.title() != "owned"

    # An archive goes into the dataset of the name that is given.
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(photos / "IMG_100.png", "inner/one.png")
    page.locator("#new-set input").fill("zipped")
    page.set_input_files(
        "#new-drop input[type=file]", {"name": "set.zip", "mimeType": "application/zip", "buffer": packed.getvalue()}
    )
    expect(cells).to_have_count(1)
    assert (site.home / "datasets/zipped/one.png").read_bytes() == (photos / "IMG_100.png").read_bytes()
    wait_for(page, lambda: len(read_folders(site)) == 2)
    page.locator(".wb-chip", has_text="zipped").get_by_role("button").nth(1).click()
    wait_for(page, lambda: [row["path"] for row in read_folders(site)] == [str(folder)])
    assert (site.home / "datasets/zipped/one.png").exists(), "taken out of the training, and not deleted"


def read_folders(site: Site) -> list[dict[str, str]]:
    return form.read_values(Draft(site.home).load_text())["dataset.folders"]


def test_on_a_phone_the_caption_box_is_in_view_after_a_tap(site: Site, visit: Callable[..., Page]) -> None:
    folder = site.root / "phone"
    folder.mkdir()
    for name, size in {"tall": (60, 180), "wide": (180, 60)}.items():
        Image.new("RGB", size, "red").save(folder / f"{name}.png")
    Draft(site.home).write(f'{form.START}\n[[dataset.folders]]\npath = "{folder}"\n')
    page = visit("new", language=LANGUAGE, phone=True)
    page.locator(".wb-open").first.click()
    box = page.locator("dialog textarea")
    expect(box).to_be_visible()
    for _ in range(2):
        place, seen = box.bounding_box(), page.viewport_size
        assert place["y"] > 0 and place["y"] + place["height"] <= seen["height"]
        box.fill("一张照片")
        page.get_by_role("button", name=say("save_next")).click()
        expect(page.locator("dialog h2")).to_have_text("wide.png")
    page.get_by_role("button", name=say("close")).click()
    wait_for(page, lambda: read_captions(folder) == {"tall": "一张照片", "wide": "一张照片"})
    assert page.evaluate("document.documentElement.scrollWidth") <= seen["width"]
    Draft(site.home).write(form.START)
