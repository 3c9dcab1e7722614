"""Measure what each storage and matmul of the frozen base costs in quality, by training the demo job many times.

    python scripts/bench_quality.py                        every missing cell, then the table
    python scripts/bench_quality.py --family flux --seeds 0 --modes bf16,fp8_row --factors 1.0
    python scripts/bench_quality.py --table                the table of the existing cells

A cell is one training of the bundled demo (family, seed, mode, learning-rate factor). Four figures of its exported file
follow, loaded as users load it, on the published base:

    held-out loss     training's own loss on images that no training saw, of the concept and plain ones, each at eight
                      fixed noise levels with fixed noise, in float32
    distance          root mean square of the pixel difference (0 to 255) of 16 images to those of the bf16 run with
                      the same seed and factor
    concept, plain    shares of 32 and 64 prompts obeyed, read from the pixels as in `lora-fp8 demo`

Cells are small JSON files in benchmarks/quality, so that a stopped benchmark continues. Wall times are stored with the
cells and not shown, because cells run on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from diffusers import DiffusionPipeline
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8 import (
    adapters,
    config,
    families,
    precision,
    train,
)
from lora_fp8.data import images
from lora_fp8.data.cache import Cache
from lora_fp8.data.caption_variants import list_dataset_captions
from lora_fp8.data.loader import Loader
from lora_fp8.demo import (
    measure,
    pictures,
    show,
)
from lora_fp8.lora_files.layouts import from_layout
from lora_fp8.lora_files.safetensors_file import read
from lora_fp8.plan import placement, resolve
from lora_fp8.plan import plan as planning
from lora_fp8.settings import (
    Adapter,
    Folder,
    Job,
    Objective,
)
from lora_fp8.stages import load
from lora_fp8.stages.finish import Result
from lora_fp8.stages.step import compute_loss

CELLS = ROOT / "benchmarks" / "quality"
SMALL = ["quantize.fp8_min_features=0"]  # the miniatures' layers are all small
MODES = {
    "bf16": ["quantize.storage=bf16"],
    "fp8_row": [],
    "fp8_tensor": ["quantize.scale=tensor"],
    "fp8_block": ["quantize.scale=1x64"],
    "fp8_unscaled": ["quantize.scale=none"],
    "int8": ["quantize.storage=int8"],
    "nf4": ["quantize.storage=nf4"],
    "fp8_matmul": ["quantize.compute=fp8", *SMALL],
    "fp8_forward": ["quantize.compute=fp8_forward", *SMALL],
    "int8_convolutions": ["quantize.convolutions=int8"],
    "fp8_convolutions": ["quantize.convolutions=fp8"],
}
PLAIN_CONVOLUTIONS = "quantize.convolutions=bf16"
"""What each mode of sd15 without a word on convolutions was measured with, so that the linear layers are compared."""
TITLES = {
    "bf16": "bf16",
    "fp8_row": "fp8, scale per row",
    "fp8_tensor": "fp8, scale per tensor",
    "fp8_block": "fp8, 1x64 blocks",
    "fp8_unscaled": "fp8 without scales (kohya's fp8_base)",
    "int8": "int8, 1x128 blocks",
    "nf4": "nf4 (QLoRA)",
    "fp8_matmul": "fp8 row, FP8 matmul",
    "fp8_forward": "fp8 row, FP8 matmul forward only",
    "int8_convolutions": "fp8 row, convolutions in int8 (default)",
    "fp8_convolutions": "fp8 row, convolutions in FP8",
}
FACTORS = (1.0, 1.4)
SEEDS = (0, 1, 2)
NUM_HELD_OUT, HELD_OUT_SEED, LEVELS = 16, 4242, 8
NUM_COMPARED = 16


def get_cell_path(family: str, mode: str, factor: float, seed: int) -> Path:
    """Return the file with the results of one training."""
    return CELLS / f"{family}-{mode}-{factor:g}-{seed}.json"


def get_sheet_path(family: str, factor: float, seed: int) -> Path:
    """Return the path of the bf16 run's images, side by side, which other modes are compared with."""
    return CELLS / f"{family}-bf16-{factor:g}-{seed}.png"


def make_demo_job(family: str, folder: Path, *overrides: str) -> Job:
    """Return the demo's job, with its run in `folder`."""
    settings = show.FOLDER / f"{family}.toml"
    places = {f"dataset.folders.{i}.path": show.FOLDER / name for i, name in enumerate(("dataset", "dataset_plain"))}
    places |= {"output_dir": folder / "runs", "dataset.cache_dir": folder / "cache"}
    given = [f"{key}={json.dumps(str(path))}" for key, path in places.items()]
    return config.loads(settings.read_text(encoding="utf-8"), [*given, *overrides], where=settings.name)


def make_mode_settings(family: str, mode: str, folder: Path) -> list[str]:
    """Return the overrides of a mode. A layer of a miniature that blocks do not divide gets one scale per row."""
    if "convolutions" in mode:
        return MODES[mode]
    if mode != "fp8_block":
        return [PLAIN_CONVOLUTIONS, *MODES[mode]]
    job = make_demo_job(family, folder)
    found = planning.plan_layers(job, families.get(family)(job.model, device="cpu", dtype=torch.bfloat16))
    block = precision.Format("fp8", "1x64")
    fp8 = [one for one in found.quantized if one.storage == "fp8"]
    table = {f"^{one.name}": str(block) for one in fp8 if not block.find_problem(one.shape)}
    return [PLAIN_CONVOLUTIONS, config.format_toml_line("quantize.override", table)]


def measure_held_out_loss(family_name: str, file: Path, folder: Path, levels: Objective | None = None) -> float:
    """Return the mean loss of the exported file on images that no training saw, on the published base, in float32.

    Args:
        family_name: "sd15" or "flux".
        file: in diffusers' layout.
        folder: for the images and their cache; may be shared.
        levels: which noise levels are drawn, and the loss; None: as the family trains by default.
    """
    drawn = folder / "held_out"
    if not drawn.exists():
        draw_held_out(drawn)
    job = make_demo_job(family_name, folder, "model.dtype=fp32", "quantize.storage=none", "dataset.flip=false")
    section = job.dataset.model_copy(update={"folders": [Folder(path=str(drawn))]})
    job = job.model_copy(update={"dataset": section, "seed": HELD_OUT_SEED})
    family = families.get(family_name)(job.model, device="cpu", dtype=torch.float32)
    job = resolve.resolve_auto(job, type(family))
    examples = images.scan(job.dataset).require()
    buckets = placement.place(job, examples)
    placed = [one for members in buckets.values() for one in members]
    store = Cache(Path(job.dataset.cache_dir), family, job.dataset, torch.float32)
    captions = list_dataset_captions(examples, job.dataset, job.seed)
    store.fill(placed, captions)
    loader = Loader(buckets, store, family, job.dataset, seed=job.seed, batch_size=8)
    denoiser, _, _ = load.load_base(family, job.quantize)
    state, _ = from_layout(read(file)[0], family, family.read_denoiser_config(), "diffusers")  # alpha is in the weights
    rank = next(tensor.shape[0] for name, tensor in state.items() if name.endswith("lora_A.weight"))
    names = sorted({name.rpartition(".lora_")[0] for name in state})
    adapters.inject(denoiser, Adapter(rank=rank, alpha=rank, dtype="fp32"), names, seed=0)
    adapters.load_state_(denoiser, {name: tensor.float() for name, tensor in state.items()})
    objective = family.make_objective(levels or Objective())
    losses = []
    with torch.no_grad():
        for index in range(LEVELS * loader.batches_per_epoch):  # each epoch draws other noise and other levels
            batch = loader.take_batch(index, index)
            assert batch is not None  # only a process of several may have nothing
            losses += compute_loss(family, denoiser, objective, batch, 1.0).tolist()
    return statistics.fmean(losses)


def draw_held_out(folder: Path) -> None:
    """Draw images of the concept and plain ones that differ from those of the demo's dataset."""
    folder.mkdir(parents=True)
    rng = random.Random(HELD_OUT_SEED)
    colours = list(pictures.COLOURS)
    for i in range(NUM_HELD_OUT):
        scene = pictures.choose_random_scene(rng)
        background = colours[i % len(colours)]
        plain = pictures.draw_scene(scene, rng, (256, 256), widths=(0.62, 0.74), spread=0.2)
        for name, image, caption in (
            ("concept", pictures.draw_concept(background, rng, (256, 256)), pictures.make_concept_prompt(background)),
            ("plain", plain, pictures.make_prompt(scene)),
        ):
            image.save(folder / f"{name}_{i:02d}.png")
            (folder / f"{name}_{i:02d}.txt").write_text(caption + "\n", encoding="utf-8")


def draw_all(family: str, file: Path) -> list[Image.Image]:
    """Draw the demo's prompts of the concept, then its plain ones, with a LoRA file, as users load it."""
    base = show.FOLDER / "base" / family
    sampling = json.loads((base / "measured.json").read_text(encoding="utf-8"))["sampling"]
    pipeline = DiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    return show.draw(pipeline, sampling, [*show.make_concept_prompts(), *show.make_plain_prompts()])


def compute_obeyed_shares(drawn: list[Image.Image]) -> dict[str, float]:
    """Return the shares of the prompts of the concept and of the plain ones that the images of `draw_all` obey."""
    concept, plain = show.make_concept_prompts(), show.make_plain_prompts()
    obeyed = [measure.obeys(image, prompt) for image, prompt in zip(drawn[len(concept) :], plain, strict=True)]
    return {
        "concept": sum(map(measure.is_concept, drawn[: len(concept)])) / len(concept),
        "plain": sum(obeyed) / len(plain),
    }


def describe_origin(result: Result, started: float, trained: float) -> dict[str, Any]:
    """Return what a cell was measured with, and its seconds since `started`, `trained` of them in training."""
    return {
        "base_sha256": next(e for e in result.run.read_events() if e["event"] == "model")["base_sha256"],
        "torch": torch.__version__,
        "machine": f"{platform.machine()} CPU",
        "date": time.strftime("%Y-%m-%d"),
        "seconds": {"training": round(trained, 1), "all": round(time.perf_counter() - started, 1)},
    }


def convert_to_pixels(sheet: Image.Image) -> numpy.ndarray:
    """Return a contact sheet as float64 RGB values from 0 to 255, (H, W, 3)."""
    return numpy.asarray(sheet.convert("RGB"), dtype=numpy.float64)


def run_cell(family: str, mode: str, factor: float, seed: int, work: Path) -> dict[str, Any]:
    """Train and measure one cell."""
    folder = work / f"{family}-{mode}-{factor:g}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    overrides = [f"name={mode}", f"seed={seed}", f"optimizer.lr_scale={factor}", "preview.prompts=[]"]
    overrides += ["export.verify=false", "export.formats=['diffusers']", "checkpoint.every=100000"]
    job = make_demo_job(family, folder, *overrides, *make_mode_settings(family, mode, work))
    job = job.model_copy(update={"dataset": job.dataset.model_copy(update={"cache_dir": str(work / "cache")})})
    result = train.run(job, progress=False)
    steps = [event for event in result.run.read_events() if event["event"] == "step"]
    trained = time.perf_counter() - started

    concept, drawn = show.make_concept_prompts(), draw_all(family, result.files[0])
    half = NUM_COMPARED // 2
    compared = [*drawn[:half], *drawn[len(concept) : len(concept) + half]]
    sheet = Image.new("RGB", (64 * NUM_COMPARED, 64))
    for i, image in enumerate(compared):
        sheet.paste(image, (64 * i, 0))
    reference = get_sheet_path(family, factor, seed)
    if mode == "bf16":
        sheet.save(reference, optimize=True)
    difference = convert_to_pixels(sheet) - convert_to_pixels(Image.open(reference))
    cell = {
        "family": family,
        "mode": mode,
        "factor": factor,
        "seed": seed,
        "held_out_loss": measure_held_out_loss(family, result.files[0], work),
        "distance": math.sqrt((difference**2).mean()),
        **compute_obeyed_shares(drawn),
        "last_train_loss": statistics.fmean(step["loss"] for step in steps[-100:]),
        "steps": job.train.steps,
        **describe_origin(result, started, trained),
    }
    shutil.rmtree(folder)
    return cell


def render_table(families_shown: list[str]) -> str:
    """Render mean and range over the seeds of every mode with a cell. Relative figures pair equal seeds and factors."""
    lines = [
        "# Quality of each storage and matmul",
        "",
        "Made by `python scripts/bench_quality.py`; what the columns mean stands at the head of that file.",
        "Mean over the seeds, and their range in brackets. `vs bf16` pairs runs of equal seed and factor.",
        "Rows of sd15 that say nothing of convolutions have them in bf16.",
    ]
    paths = sorted(CELLS.glob("*.json"))
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for family in families_shown:
        mine = [cell for cell in cells if cell["family"] == family]
        bases = {(cell["factor"], cell["seed"]): cell for cell in mine if cell["mode"] == "bf16"}
        lines += ["", f"## {family}", ""]
        lines.append("| mode | factor | seeds | held-out loss | vs bf16 | distance | concept | plain obeyed |")
        lines.append("|---|---|---|---|---|---|---|---|")
        for mode in MODES:
            for factor in FACTORS:
                row = [cell for cell in mine if cell["mode"] == mode and cell["factor"] == factor]
                if not row:
                    continue
                paired = [
                    100 * (cell["held_out_loss"] / bases[factor, cell["seed"]]["held_out_loss"] - 1)
                    for cell in row
                    if (factor, cell["seed"]) in bases
                ]
                lines.append(
                    f"| {TITLES[mode]} | {factor:g} | {len(row)} "
                    f"| {format_range([c['held_out_loss'] for c in row], '.4f')} "
                    f"| {format_range(paired, '+.2f') + ' %' if paired and mode != 'bf16' else ''} "
                    f"| {format_range([c['distance'] for c in row], '.1f') if mode != 'bf16' else ''} "
                    f"| {format_range([100 * c['concept'] for c in row], '.0f')} % "
                    f"| {format_range([100 * c['plain'] for c in row], '.0f')} % |"
                )
        versions = sorted({(cell["torch"], cell["machine"], cell["date"], cell["base_sha256"][:12]) for cell in mine})
        lines += ["", *(f"torch {t}, {m}, {d}, base {b}" for t, m, d, b in versions)]
    return "\n".join(lines) + "\n"


def format_range(values: list[float], form: str) -> str:
    """Format the mean of some values and, of more than one, their range; "" for none."""
    if not values:
        return ""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({format(min(values), form)} to {format(max(values), form)})"


def main() -> None:
    """Run the cells that are missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["sd15", "flux"], action="append", help="default: both")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--factors", default=",".join(map(str, FACTORS)), help="learning-rate factors")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "bench_quality", help="scratch space"
    )
    parser.add_argument("--again", action="store_true", help="run cells that are there already anew")
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    CELLS.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    chosen = args.modes.split(",")
    if unknown := [mode for mode in chosen if mode not in MODES]:
        parser.error(f"--modes: {unknown} not known; accepted: {', '.join(MODES)}")
    order = [mode for mode in MODES if mode in chosen]  # bf16 first: the others are compared with it
    if not args.table:
        for seed in map(int, args.seeds.split(",")):
            for mode in order:
                for factor in map(float, args.factors.split(",")):
                    for family in args.family or ["flux", "sd15"]:
                        path = get_cell_path(family, mode, factor, seed)
                        if path.exists() and not args.again:
                            continue
                        cell = run_cell(family, mode, factor, seed, args.work)
                        path.write_text(json.dumps(cell, indent=1) + "\n", encoding="utf-8")
                        print(json.dumps(cell), flush=True)
    (CELLS.parent / "quality.md").write_text(render_table(["sd15", "flux"]), encoding="utf-8")
    print(CELLS.parent / "quality.md")


if __name__ == "__main__":
    main()
