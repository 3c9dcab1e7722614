"""The Dataset page as a person uses it: look, edit one caption, edit many, undo, follow a finding, queue captioning.

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

from lora_fp8 import jobs
from lora_fp8.data import buckets, captions, diagnosis
from tests.ui.conftest import Site
from webui import translations

LONG = 120_000
"""Milliseconds; machines that test are busy."""
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
        return translations.say(language, f"dataset.{key}", **values)

    def tab(name: str) -> None:
        page.get_by_role("tab", name=say(f"tab.{name}"), exact=True).click()

    before = raws(folder)
    page = visit(f"dataset?folder={quote(str(folder))}", language=language, dark=language != "en")
    thumbs = page.locator("#dataset-grid .thumb")
    expect(thumbs).to_have_count(5, timeout=LONG)
    expect(page.locator("#dataset-head")).to_contain_text(say("without", count=1))
    image = thumbs.first.locator("img")
    page.wait_for_function(
        "image => image.complete && image.naturalWidth > 0", arg=image.element_handle(), timeout=LONG
    )

    # The crop that is drawn is the training's.
    said = page.locator("#dataset-said")
    thumbs.nth(4).locator("button").first.click()
    crop = page.locator("#dataset-view .crop")
    expect(crop).to_be_visible(timeout=LONG)
    # At the resolution of the newest job of this site, which another test may have submitted; else SDXL's.
    places = {side: buckets.place((1800, 600), side, 64) for side in (1024, 512, 64)}
    drawn = crop.get_attribute("data-bucket")
    side, place = next(entry for entry in places.items() if "{}x{}".format(*entry[1].bucket_wh) == drawn)
    picture, frame = page.locator("#dataset-view img").bounding_box(), crop.bounding_box()
    assert abs(frame["width"] / picture["width"] - place.bucket_wh[0] / place.resized_wh[0]) < 0.02
    assert abs((frame["x"] - picture["x"]) / picture["width"] - place.crop_xy[0] / place.resized_wh[0]) < 0.02
    expect(page.locator("#dataset-caption textarea")).to_have_value(HOSTILE)

    # One caption: saved with its own line ends, on to the next; one that changed elsewhere is not overwritten.
    thumbs.nth(1).locator("button").first.click()
    editor = page.locator("#dataset-caption textarea")
    expect(editor).to_have_value("girl, red hair")
    editor.fill("woman, 红发")
    page.click("#dataset-next")
    expect(editor).to_have_value("boy")
    assert raws(folder)["b.txt"] == "woman, 红发\r\n".encode()
    (folder / "c.txt").write_bytes(b"man, of somebody else")
    editor.fill("mine")
    page.click("#dataset-save")
    expect(said).to_contain_text(say("changed_meanwhile", file="c.png"))
    expect(editor).to_have_value("man, of somebody else")
    (folder / "c.txt").write_bytes(before["c.txt"])

    # Many captions: previewed without writing, applied, undone and redone to the byte.
    middle = raws(folder)
    fill(page, "dataset-first", "zibo")
    page.click("#dataset-preview")
    changes = page.locator("#dataset-changes")
    expect(changes).to_contain_text(say("would", count=5))
    assert raws(folder) == middle
    page.click("#dataset-apply")
    expect(said).to_contain_text(say("applied", count=5))
    after = raws(folder)
    assert after["b.txt"] == "zibo, woman, 红发\r\n".encode() and after["d.txt"] == b"zibo"
    page.click("#dataset-undo")
    expect(said).to_contain_text(say("undone", count=5))
    assert raws(folder) == middle
    page.click("#dataset-redo")
    expect(said).to_contain_text(say("redone", count=5))
    assert raws(folder) == after
    for count, state in ((5, middle), (1, before)):
        page.click("#dataset-undo")
        expect(said).to_contain_text(say("undone", count=count))
        assert raws(folder) == state
    picture_of(page, f"dataset_{language}")

    # Tags: one is taken out by two clicks, and the pattern that never ends is stopped.
    tab("tags")
    page.locator("#dataset-tags tr", has_text=re.compile("^girl2")).locator("[data-do=remove]").click()
    tab("pictures")
    expect(changes).to_contain_text(say("would", count=2))
    page.click("#dataset-apply")
    expect(said).to_contain_text(say("applied", count=2))
    assert raws(folder)["a.txt"] == b"snow" and raws(folder)["b.txt"] == b"red hair\r\n"
    page.click("#dataset-undo")
    expect(said).to_contain_text(say("undone", count=2))
    assert raws(folder) == before

    # The doctor: every planted thing is told, and a click leads to its picture.
    tab("findings")
    findings = page.locator("#dataset-findings")
    copies = findings.locator("[data-kind=duplicate]")
    expect(copies).to_be_visible(timeout=LONG)
    kinds = {one.get_attribute("data-kind") for one in findings.locator("details").all()}
    assert {"duplicate", "caption_missing", "cut"} <= kinds
    copies.locator("summary").click()
    picture_of(page, f"dataset_findings_{language}")
    copies.locator("[data-do=finding]").click()
    tab("pictures")
    expect(thumbs).to_have_count(1)
    expect(thumbs.first).to_contain_text("boy")
    page.locator("#dataset-grid [data-do=clear]").click()
    expect(thumbs).to_have_count(5)
    tab("buckets")
    expect(page.locator("#dataset-buckets tbody tr")).to_have_count(
        len({buckets.place(size, side, 64).bucket_wh for size in SIZES.values()})
    )

    # Captioning is a job of the queue; a model outside of the roots is refused.
    tab("caption")
    fill(page, "auto-model", "/etc")
    page.click("#auto-begin")
    expect(said.locator(".wrong")).to_be_visible()
    fill(page, "auto-model", "nobody/nothing-of-the-kind")
    page.click("#auto-begin")
    expect(page.locator("#dataset-job .card")).to_have_count(1, timeout=LONG)
    [job] = [job for job in jobs.Queue(site.home).view() if job.command[:2] == ("caption", str(folder))]
    assert "--model=nobody/nothing-of-the-kind" in job.command

    # Pictures are dropped into the open folder; what is no picture stays out, and nothing is written over.
    page.locator("#dataset-upload button").first.click()
    sent = site.root / f"sent {language}"
    sent.mkdir()
    for name, content in {"new.png": (folder / "a.png").read_bytes(), "new.txt": b"snow", "a.png": b"not one"}.items():
        (sent / name).write_bytes(content)
    page.set_input_files("#dataset-drop input[type=file]", sorted(sent.iterdir()))
    expect(said.locator(".wrong")).to_contain_text("a.png")
    assert (folder / "new.png").read_bytes() == (folder / "a.png").read_bytes() and raws(folder)["new.txt"] == b"snow"
    tab("pictures")
    expect(thumbs).to_have_count(6, timeout=LONG)

    # A reload shows the same folder; nothing that stands in a caption was executed.
    page.reload()
    expect(thumbs).to_have_count(6, timeout=LONG)
    assert page.title() != "owned"
    assert [entry.done for entry in captions.history(folder)][0] is False


@pytest.mark.parametrize("where", ["/etc", "/tmp/../etc", "relative", "/nowhere/at/all"])
def test_folders_outside_of_the_roots_are_refused(where: str, visit: Callable[..., Page]) -> None:
    page = visit(f"dataset?folder={quote(where)}")
    expect(page.locator("#dataset-head .wrong")).to_be_visible(timeout=LONG)
    expect(page.locator("#dataset-tabs")).to_have_count(0)


def test_every_kind_of_finding_has_its_sentences() -> None:
    for language in translations.LANGUAGES:
        for kind in diagnosis.KINDS:
            assert translations.say(language, f"dataset.kind.{kind}") and translations.say(
                language, f"dataset.advice.{kind}"
            )
        for level in diagnosis.LEVELS:
            assert translations.say(language, f"dataset.level.{level}")
