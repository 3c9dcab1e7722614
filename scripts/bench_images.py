"""Measure the image workbench on a large folder with a real Chromium: the first grid, typing, saving and searching.

    python scripts/bench_images.py [--images 10000] [--output benchmarks/images.json]

The page is that of `lora-fp8 ui`, in a home of its own, with a folder of that many generated images of which every
tenth has a caption. Times are those that a person waits: from choosing the folder on the open page until its first rows
are there; from opening New training with that folder until the images of the first page are drawn; from each key press
until the browser has painted; from Ctrl+Enter until the next caption box has the focus, and until the caption file is
written. The images are examined in the background meanwhile, as they are in use.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SIZE = (192, 128)
CAPTIONED_EVERY = 10
WAIT_MS = 180_000
SAVES = 20
TEXT = "a ginger cat on a red sofa, looking at the camera, soft light from the left"
PAINTED = """() => {
  window.waits = [];
  document.addEventListener('keydown', () => {
    const pressed = performance.now();
    requestAnimationFrame(() => setTimeout(() => window.waits.push(performance.now() - pressed)));
  }, true);
}"""
"""Notes the time from each key press until the frame after it was painted."""


def make_images(folder: Path, count: int) -> None:
    """Write images that differ, every tenth with a caption."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(SIZE, Image.Resampling.BILINEAR).save(
            folder / f"img_{number:05d}.jpg", quality=80
        )
        if number % CAPTIONED_EVERY == 0:
            (folder / f"img_{number:05d}.txt").write_text(f"photo {number}", encoding="utf-8")


def start_page(work: Path) -> tuple[subprocess.Popen[str], str]:
    """Start `lora-fp8 ui` with an empty draft; return its process and address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_fp8", "ui", "--port", "0", "--root", str(work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LORA_FP8_HOME": str(work / "home")},
    )
    for line in process.stdout or ():
        if address := re.search(r"http://\S+?(?=/ )", line):
            return process, address[0]
    raise SystemExit("the page did not start")


def measure(page: Page, address: str, folder: Path) -> dict[str, Any]:
    """Measure what a person waits for, in seconds."""
    page.goto(f"{address}/en/new")
    page.locator("#new-folder input").fill(str(folder))
    began = time.monotonic()
    page.keyboard.press("Enter")
    page.wait_for_selector(".wb-cell", timeout=WAIT_MS)
    chosen = time.monotonic() - began
    began = time.monotonic()
    page.reload()
    page.wait_for_selector(".wb-cell", timeout=WAIT_MS)
    rows = time.monotonic() - began
    page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-cell img')].slice(0, 6).every(image => image.naturalWidth > 0)",
        timeout=WAIT_MS,
    )
    figures: dict[str, Any] = {"chosen_s": chosen, "rows_s": rows, "first_images_s": time.monotonic() - began}
    page.evaluate(PAINTED)
    boxes = page.locator(".wb-cell textarea")
    boxes.nth(1).click()
    page.keyboard.type(TEXT, delay=25)
    figures["typing_ms"] = summarize(page.evaluate("window.waits"))
    moved, written = [], []
    for number in range(1, SAVES + 1):
        page.keyboard.type(f" {number}")
        pressed = time.monotonic()
        page.keyboard.press("Control+Enter")
        page.wait_for_function(
            "number => document.activeElement === document.querySelectorAll('.wb-cell textarea')[number]",
            arg=number + 1,
            timeout=WAIT_MS,
        )
        moved.append(time.monotonic() - pressed)
        file = folder / f"img_{number:05d}.txt"
        while not file.exists() or not file.read_text(encoding="utf-8").endswith(f" {number}"):
            time.sleep(0.005)
        written.append(time.monotonic() - pressed)
    figures["next_box_s"], figures["written_s"] = summarize(moved), summarize(written)
    figures["typing_while_saving_ms"] = summarize(page.evaluate("window.waits.slice(-60)"))
    began = time.monotonic()
    page.locator(".wb-filters input").fill("photo 9990")
    page.wait_for_function("() => document.querySelectorAll('.wb-cell').length === 1", timeout=WAIT_MS)
    figures["search_s"] = time.monotonic() - began
    return figures


def summarize(values: list[float]) -> dict[str, float]:
    """Return the median and the maximum."""
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("needs Chromium: run scripts/install_browser.sh")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = work / "images"
        make_images(folder, given.images)
        load = os.getloadavg()[0]
        process, address = start_page(work)
        try:
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
                figures = measure(browser.new_page(viewport={"width": 1366, "height": 768}), address, folder)
                browser.close()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load_before": round(load, 1)}
    text = json.dumps({**machine, "images": given.images, **figures}, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
