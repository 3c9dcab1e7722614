"""Measure what a dataset of many images costs before the first step: the first time, and every time after it.

    python scripts/bench_many_images.py --images 10000 --large 500 --output benchmarks/many_images

The images are smooth JPEGs of 0.25 to 1.4 megapixels in 100 folders, and some of 12 megapixels, each with a caption of
its own. All commands run as a user runs them, in processes of their own, on the demo's base at 64 px.
"""

import argparse
import io
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WORDS = "red green blue small large round old new bright dark wooden glass paper stone silver golden soft rough".split()
CONFIG = """
name = "many"
output_dir = "{work}/runs"
[model]
family = "sd15"
path = "demo"
[dataset]
resolution = 64
bucket_step = 16
cache_dir = "{work}/cache"
[[dataset.folders]]
path = "{work}/images"
[train]
steps = 1
batch_size = 4
[preview]
prompts = []
[export]
verify = false
"""


def make_jpegs(rng: np.random.Generator, sizes: list[tuple[int, int]]) -> list[bytes]:
    """Make a smooth JPEG of each size."""
    files = []
    for width, height in sizes:
        small = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        image.save(buffer := io.BytesIO(), "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def make_dataset(folder: Path, count: int, large: int) -> None:
    """Write the images and captions. Each file differs from all others by some bytes after the image's end."""
    rng, draw = np.random.default_rng(0), random.Random(0)
    areas = rng.uniform(0.25e6, 1.4e6, 60)
    shapes = rng.uniform(0.6, 1.7, 60)
    plain = make_jpegs(rng, [(int((a * s) ** 0.5), int((a / s) ** 0.5)) for a, s in zip(areas, shapes, strict=True)])
    photos = make_jpegs(rng, [(4000, 3000), (3000, 4000)])
    for number in range(count):
        place = folder / f"{number % 100:02}"
        place.mkdir(parents=True, exist_ok=True)
        raw = photos[number % 2] if number < large else plain[number % len(plain)]
        (place / f"{number:06}.jpg").write_bytes(raw + f"{number:06}".encode())
        (place / f"{number:06}.txt").write_text(
            f"{', '.join(draw.sample(WORDS, 6))}, number {number}", encoding="utf-8"
        )


def run(work: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of lora-fp8. Returns its seconds, its seconds of CPU time, and its peak of memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(work / "own"), "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "lora_fp8", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"command": arguments[0], "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
    print(row, flush=True)
    return row


def measure_epoch_memory(config: Path) -> dict[str, Any]:
    """Load every batch of an epoch in this process. Returns MiB after a tenth of it and at its end."""
    import psutil
    import torch

    from lora_fp8 import config as configs
    from lora_fp8.data.loader import Loader
    from lora_fp8.plan import plan as planning

    torch.set_num_threads(1)
    plan = planning.make(configs.load(config))
    job = plan.job
    loader = Loader(plan.images.buckets, plan.cache, plan.family, job.dataset, job.seed, job.train.batch_size)
    plan.cache.ram_bytes = 1 << 20
    process, sizes, began = psutil.Process(), [], time.process_time()
    for number in range(loader.batches_per_epoch):
        loader.take_batch(number, number)
        sizes.append(process.memory_info().rss / 2**20)
    seconds = time.process_time() - began
    tenth = sizes[len(sizes) // 10]
    return {"batches": len(sizes), "mib_after_a_tenth": round(tenth, 1), "mib_at_the_end": round(sizes[-1], 1),
            "ms_a_batch": round(1000 * seconds / len(sizes), 2)}  # fmt: skip


def measure_caption_rate(folder: Path) -> dict[str, Any]:
    """Write a caption for each image, one edit each, as `lora-fp8 caption` does. Returns ms of CPU time."""
    from lora_fp8.data import captions

    names = sorted(captions.list_caption_files(folder).values())
    times = []
    with captions.open_journal(folder) as journal:
        for number, path in enumerate(names):
            began = time.process_time()
            edit = captions.assign(folder, {path.relative_to(folder).as_posix(): f"new caption {number}"}, "bench")
            captions.apply(folder, edit, group="bench", journal=journal)
            times.append(1000 * (time.process_time() - began))
    part = max(1, len(times) // 10)
    return {"captions": len(times), "ms_first": round(sum(times[:part]) / part, 2),
            "ms_last": round(sum(times[-part:]) / part, 2)}  # fmt: skip


def measure(work: Path, count: int, large: int) -> dict[str, Any]:
    """Measure all commands on one dataset."""
    make_dataset(work / "images", count, large)
    config = work / "many.toml"
    config.write_text(CONFIG.format(work=work.as_posix()), encoding="utf-8")
    time.sleep(3)  # what was just written is not remembered
    rows = {"first check": run(work, "check", str(config)), "second check": run(work, "check", str(config))}
    rows["first start, one step"] = run(work, "train", str(config))
    rows["second start, one step"] = run(work, "train", str(config), "--set", "name=again")
    os.environ["XDG_CACHE_HOME"] = str(work / "own")
    epoch = measure_epoch_memory(config)
    return {
        "images": count,
        "large": large,
        "rows": rows,
        "epoch": epoch,
        "captions": measure_caption_rate(work / "images"),
    }


def render_page(result: dict[str, Any], machine: str) -> str:
    """Return the table as Markdown."""
    epoch, captions = result["epoch"], result["captions"]
    lines = [
        "# Many images",
        "",
        f"{machine}: `python scripts/bench_many_images.py --images {result['images']} --large {result['large']}`.",
        f"{result['images']:,} JPEGs, {result['large']:,} of them of 12 megapixels, in 100 folders.",
        "",
        "| | seconds | seconds of CPU time |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {row['seconds']} | {row['cpu_seconds']} |" for name, row in result["rows"].items()]
    lines += [
        "",
        f"An epoch of {epoch['batches']:,} batches, with 1 MiB of the cache kept in memory: the process has "
        f"{epoch['mib_after_a_tenth']} MiB after a tenth of it and {epoch['mib_at_the_end']} MiB at its end; a batch "
        f"takes {epoch['ms_a_batch']} ms to load.",
        "",
        f"Of {captions['captions']:,} new captions, each an edit of its own, one of the first tenth takes "
        f"{captions['ms_first']} ms of CPU time, and one of the last tenth {captions['ms_last']} ms.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=500)
    parser.add_argument("--output", type=Path, help="path of the table without extension; default: only printed")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="many-"))
    try:
        result = measure(work, args.images, args.large)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = render_page(result, f"{platform.machine()} CPU, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    print(text)
    if args.output:
        args.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
