"""The Dataset page as a person uses it: look, edit many captions, undo, follow a finding, add images.

What it shares with New training, the image workbench, is tested in test_image_workbench.

What the page shows is compared with the files' bytes, and the crop that it draws with the training's own.
"""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from lora_fp8 import families
from lora_fp8.data import buckets, diagnosis, image_edits
from tests.ui.conftest import Site
from webui import form, translations
from webui.draft import Draft

HOSTILE = "<img src=x onerror=document.title='owned'>, \u202egirl"
SIZES = {"a": (1200, 600), "b": (640, 640), "d": (500, 640), "e": (1800, 600)}


@pytest.fixture
def folder(site: Site, request: pytest.FixtureRequest) -> Path:
    """Five pictures: one wide, one a copy, one without a caption, one with a caption that is markup."""
    root = site.root / f"set {request.node.callspec.id}"
    root.mkdir()
    rng = np.random.default_rng(4)
    for name, size in SIZES.items():
        pixels = rng.integers(0, 256, (size[1] // 20, size[0] // 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size).save(root / f"{name}.png")
    (root / "c.png").write_bytes((root / "b.png").read_bytes())
    for name, text in {"a": "girl, snow", "b": "girl, red hair\r\n", "c": "boy", "e": HOSTILE}.items():
        (root / f"{name}.txt").write_bytes(text.encode())
    return root


def raws(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.txt"))}


def fill(page: Page, id: str, text: str) -> None:
    box = page.locator(f"#{id} input, #{id} textarea").first
    box.fill(text)
    box.blur()


def choose(page: Page, id: str, text: str) -> None:
    page.locator(f"#{id} input").click()
    page.get_by_role("option", name=text, exact=True).click()


@pytest.mark.parametrize("language", ["zh-CN"])
def test_a_dataset_is_looked_at_edited_and_undone(
    language: str,
    site: Site,
    folder: Path,
    visit: Callable[..., Page],
    picture_of: Callable[[Page, str], None],
) -> None:
    def say(key: str, **values: object) -> str:
        return translations.say(language, key, **values)

    def tab(name: str) -> None:
        page.get_by_role("tab", name=say(f"dataset.tab.{name}"), exact=True).click()

    def shown(text: str) -> None:
        """Wait until the first caption box of the grid has this text: the grid has read what was written."""
        expect(boxes.first).to_have_value(text)

    before = raws(folder)
    # New training names this folder: it is opened without an address.
    Draft(site.home).write(f'{form.START}\n[[dataset.folders]]\npath = "{folder}"\n')
    refused = ["status of 400"]  # an upload that is no image
    page = visit("dataset", language=language, dark=language != "en", expect=refused)
    cells, boxes = page.locator(".wb-cell"), page.locator(".wb-cell textarea")
    expect(cells).to_have_count(5)
    expect(page.locator(".wb-counts")).to_have_text(say("images.counts", count=5, without=1))
    expect(page.locator(".wb-chip")).to_have_text(folder.name)
    expect(boxes.nth(4)).to_have_value(HOSTILE)

    # The crop that is drawn is the training's.
    cells.nth(4).locator(".wb-open").click()
    crop = page.locator("dialog .wb-crop")
    expect(crop).to_be_visible()
    expect(page.locator("dialog")).to_contain_text("1800 × 600")
    place = buckets.place((1800, 600), families.get("sd15").native_resolution, 64)
    picture, frame = page.locator("dialog img").bounding_box(), crop.bounding_box()
    assert abs(frame["width"] / picture["width"] - place.bucket_wh[0] / place.resized_wh[0]) < 0.02
    assert abs((frame["x"] - picture["x"]) / picture["width"] - place.crop_xy[0] / place.resized_wh[0]) < 0.02
    page.keyboard.press("Escape")

    # Many captions: previewed without writing, with what was just typed; applied, undone and redone to the byte.
    said, changes = page.locator("#dataset-said"), page.locator("#dataset-changes")
    boxes.nth(1).fill("woman, 红发")
    page.locator("#dataset-many button").first.click()
    fill(page, "dataset-first", "zibo")
    page.click("#dataset-preview")
    expect(changes).to_contain_text(say("dataset.would", count=5))
    middle = raws(folder)
    assert middle == before | {"b.txt": "woman, 红发\r\n".encode()}
    page.click("#dataset-apply")
    expect(said).to_contain_text(say("dataset.applied", count=5))
    after = raws(folder)
    assert after["b.txt"] == "zibo, woman, 红发\r\n".encode() and after["d.txt"] == b"zibo"
    shown("zibo, girl, snow")
    for button, state, text in (
        ("undo", middle, "girl, snow"),
        ("redo", after, "zibo, girl, snow"),
        ("undo", middle, "girl, snow"),
    ):
        page.get_by_role("button", name=say(f"images.{button}"), exact=True).click()
        shown(text)
        assert raws(folder) == state
    page.get_by_role("button", name=say("images.undo"), exact=True).click()
    expect(boxes.nth(1)).to_have_value("girl, red hair")
    assert raws(folder) == before
    picture_of(page, f"dataset_{language}")

    # Tags: one is taken out by two clicks, of all images; and of those that are selected.
    tab("tags")
    page.locator("#dataset-tags tr", has_text=re.compile("^girl2")).locator("[data-do=remove]").click()
    expect(changes).to_contain_text(say("dataset.would", count=2))
    cells.nth(1).locator(".wb-tick").check()
    choose(page, "dataset-scope", say("dataset.scope.chosen"))
    page.click("#dataset-preview")
    expect(changes).to_contain_text(say("dataset.would", count=1))
    page.click("#dataset-apply")
    expect(boxes.nth(1)).to_have_value("red hair")
    assert raws(folder) == before | {"b.txt": b"red hair\r\n"}

    # The doctor: every planted thing is told, and a click leads to its picture.
    tab("findings")
    findings = page.locator("#dataset-findings")
    copies = findings.locator("[data-kind=duplicate]")
    expect(copies).to_be_visible()
    kinds = {one.get_attribute("data-kind") for one in findings.locator("details").all()}
    assert {"duplicate", "caption_missing", "cut"} <= kinds
    copies.locator("summary").click()
    picture_of(page, f"dataset_findings_{language}")
    copies.locator("[data-show=finding]").click()
    expect(cells).to_have_count(1)
    shown("boy")
    page.get_by_title(say("images.clear")).click()
    expect(cells).to_have_count(5)
    tab("findings")
    missing = findings.locator("[data-kind=caption_missing]")
    missing.locator("summary").click()
    missing.locator("[data-show=image]").click()
    expect(page.locator("dialog h2")).to_have_text("d.png")
    page.keyboard.press("Escape")
    tab("buckets")
    side = families.get("sd15").native_resolution
    expect(page.locator("#dataset-buckets tbody tr")).to_have_count(
        len({buckets.place(size, side, 64).bucket_wh for size in SIZES.values()})
    )
    # At another resolution, the grid shows another crop, too.
    tab("findings")
    fill(page, "dataset-resolution", "128")
    tab("pictures")
    small = "{} × {}".format(*buckets.place(SIZES["a"], 128, 64).bucket_wh)
    expect(cells.first.locator(".wb-open")).to_have_attribute("title", re.compile(re.escape(small)))

    # An image is turned, cropped by the mouse and by the keyboard, and excluded; all of it is undone.
    def edits() -> dict[str, image_edits.ImageEdit]:
        return image_edits.read(folder)

    images = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    cells.first.locator(".wb-open").click()
    dialog, line = page.locator("dialog"), page.locator("dialog [role=status]").first
    dialog.get_by_role("button", name=say("images.turn.right")).click()
    expect(line).to_contain_text("a.png")
    dialog.get_by_role("button", name=say("images.crop"), exact=True).click()
    page.wait_for_function(
        "document.querySelector('dialog img').naturalHeight > document.querySelector('dialog img').naturalWidth"
    )
    frame = page.locator("dialog .wb-frame")
    for share, press in ((0.25, page.mouse.down), (0.9, page.mouse.up)):
        frame.hover()  # waits until it does not move any more
        box = frame.bounding_box()
        page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * max(share, 0.5), steps=3)
        press()
    right = dialog.get_by_label(say("images.crop.right"), exact=True)
    right.fill("100")
    dialog.get_by_role("button", name=say("images.crop.apply")).click()
    expect(dialog.get_by_role("button", name=say("images.crop.apply"))).to_be_hidden()
    assert edits()["a.png"].rotate == 90
    assert np.abs(np.array(edits()["a.png"].crop) - (0.25, 0.5, 1.0, 0.9)).max() < 0.02
    page.keyboard.press("Delete")
    expect(page.locator("dialog h2")).to_have_text("b.png")
    page.keyboard.press("Escape")
    expect(cells).to_have_count(4)
    page.locator(".wb-filters select").select_option("excluded")
    expect(cells).to_have_count(1)
    picture_of(page, f"dataset_excluded_{language}")
    page.get_by_title(say("images.clear")).click()
    for title, left in (("已排除 1 张图片：a.png", {"a.png"}), ("已裁剪 a.png", {"a.png"}), ("已旋转 a.png", set())):
        page.get_by_role("button", name=say("images.undo"), exact=True).click()
        expect(page.locator("#dataset-taken")).to_have_text(say("dataset.undone", title=title))
        expect(cells).to_have_count(5)
        assert set(edits()) == left
    assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == images

    # Pictures are dropped into the open folder; what is no picture stays out, and nothing is written over.
    sent = site.root / f"sent {language}"
    sent.mkdir()
    for name, content in {"new.png": (folder / "a.png").read_bytes(), "new.txt": b"snow", "a.png": b"not one"}.items():
        (sent / name).write_bytes(content)
    page.set_input_files("#dataset-drop input[type=file]:not(.wb-folder)", sorted(sent.iterdir()))
    expect(page.locator("#dataset-taken .wrong")).to_contain_text("a.png")
    expect(cells).to_have_count(6)
    assert (folder / "new.png").read_bytes() == (folder / "a.png").read_bytes() and raws(folder)["new.txt"] == b"snow"
    tab("findings")
    expect(copies.locator("summary")).to_contain_text("2")

    # Nothing that stands in a caption was executed.
    assert page.title() != "owned"
    Draft(site.home).write(form.START)


@pytest.mark.parametrize("where", ["/etc", "/tmp/../etc", "relative", "/nowhere/at/all"])
def test_folders_outside_of_the_roots_are_refused(where: str, visit: Callable[..., Page]) -> None:
    page = visit(f"dataset?folder={quote(where)}")
    expect(page.locator("#dataset-head .wrong")).to_be_visible()
    expect(page.locator("#dataset-drop")).to_be_visible()
    expect(page.locator(".wb-cell")).to_have_count(0)


def test_every_kind_of_finding_has_its_sentences() -> None:
    for language in translations.LANGUAGES:
        for kind in diagnosis.KINDS:
            assert translations.say(language, f"dataset.kind.{kind}") and translations.say(
                language, f"dataset.advice.{kind}"
            )
        for level in diagnosis.LEVELS:
            assert translations.say(language, f"dataset.level.{level}")
