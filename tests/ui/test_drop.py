"""Files and folders that are dropped on the page, as the browser itself drops them."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from waiting import wait_until

from tests.ui.conftest import Site
from tests.ui.test_form_path import PICTURES
from webui import form
from webui.draft import Draft

HEARD = """() => {
  window.heard = {};
  for (const kind of ["dragenter", "dragover", "drop"])
    addEventListener(kind, (event) => setTimeout(() => { window.heard[kind] = event.defaultPrevented; }), true);
}"""
"""Notes which events of a drop have come, and whether the page has kept the browser from its own answer."""


def drop(page: Page, target: Locator, *paths: Path, is_taken: bool = True) -> None:
    """Drop files and folders of this machine on the middle of an element, which takes them or not."""
    target.scroll_into_view_if_needed()
    data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
    page.evaluate(HEARD)
    browser = page.context.new_cdp_session(page)

    def send(kind: str) -> None:
        box = target.bounding_box()
        assert box is not None
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        browser.send("Input.dispatchDragEvent", {"type": kind, **place, "data": data})

    def is_heard(kind: str) -> bool:
        page.wait_for_timeout(100)
        return bool(page.evaluate("kind => kind in window.heard", kind.lower()))

    # Chromium tells a page of no drag that it has not drawn yet, and of no drop while it draws it anew.
    def is_dropped() -> bool:
        wait_until(lambda: send("dragEnter") or is_heard("dragEnter"))
        wait_until(lambda: send("dragOver") or is_heard("dragOver"))
        send("drop")
        # It tells no page of a drop that the page does not take.
        return not is_taken or any(is_heard("drop") for _ in range(100))

    wait_until(is_dropped)
    browser.detach()


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Path]:
    """A folder as people have them, an archive, and single images."""
    images = [path for path in PICTURES if path.suffix in (".png", ".jpg")]
    folder = tmp_path / "our cat"
    (folder / "garden").mkdir(parents=True)
    (folder / ".trash").mkdir()
    for place, image in zip((folder, folder / "garden", folder / ".trash"), images, strict=False):
        shutil.copy(image, place)
        shutil.copy(image.with_suffix(".txt"), place)
    archive = tmp_path / "more.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(images[3], "3.png")
    single = Path(shutil.copy(images[4], tmp_path / "single.png"))
    (tmp_path / "notes.doc").write_text("x", encoding="utf-8")
    return {"folder": folder, "archive": archive, "single": single, "notes": tmp_path / "notes.doc"}


def test_a_folder_an_archive_and_images_are_taken(
    site: Site, visit: Callable[..., Page], given: dict[str, Path]
) -> None:
    Draft(site.home).write(form.START)
    page = visit("new")
    zone, cells = page.locator("#new-drop"), page.locator(".wb-cell")
    drop(page, zone, given["folder"])
    expect(cells).to_have_count(2)  # the hidden folder stays where it is
    place = site.home / "datasets" / "our cat"
    assert sorted(path.name for path in place.rglob("*.txt")) == sorted(
        path.name for path in given["folder"].rglob("*.txt") if ".trash" not in path.parts
    )
    drop(page, zone, given["archive"], given["single"], given["notes"])
    expect(cells).to_have_count(4)
    expect(page.locator("#new-taken .wrong")).to_contain_text("notes.doc")
    assert (place / "single.png").read_bytes() == given["single"].read_bytes()
    Draft(site.home).write(form.START)


@pytest.mark.parametrize("path", ["", "new"])
def test_what_is_dropped_beside_the_field_changes_nothing(
    site: Site, visit: Callable[..., Page], given: dict[str, Path], path: str
) -> None:
    """A browser would open the file, and the page would be gone."""
    Draft(site.home).write(form.START)
    page = visit(path)
    before, header = page.url, page.locator(".site-header")
    page.evaluate("window.still = true")
    kept = sorted(site.home.rglob("*.png"))
    drop(page, header, given["single"], is_taken=False)
    page.wait_for_timeout(500)
    assert page.evaluate("window.heard.dragover") is True
    assert page.url == before and page.evaluate("window.still") is True
    assert sorted(site.home.rglob("*.png")) == kept
