"""Measure how much of what the base knows is kept by prior prediction, on the demo's base.

    python scripts/bench_prior.py                     every missing cell, then the table
    python scripts/bench_prior.py --seeds 0 --uses none,class
    python scripts/bench_prior.py --table             the table of the existing cells

Each cell is one training of the demo's concept, without the demo's plain images unless its row says so; with them it
takes twice the steps, so that the concept is shown about as often. Its file then draws 32 prompts of the concept and
64 plain ones, read from the pixels as in `lora-fp8 demo`. `lost` is how many of the plain prompts that the base obeys
are obeyed no longer.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8 import config, train
from lora_fp8.demo import measure, show

CELLS = ROOT / "benchmarks" / "prior"
CONCEPT, PLAIN = "dataset", "dataset_plain"
USES = {
    "none": ("nothing", [CONCEPT], []),
    "class": ("dataset.class_word", [CONCEPT], ['dataset.trigger="zibo"', 'dataset.class_word="red circle"']),
    "plain": ("the demo's plain images, trained", [CONCEPT, PLAIN], []),
    "regularization": (
        "plain images, the base's prediction",
        [CONCEPT, PLAIN],
        ["dataset.folders.1.regularization=true", "objective.prior_for_regularization=true"],
    ),
}
"""What a cell trains with: its words in the table, the demo's folders, and settings."""
SEEDS = (0, 1, 2)
STEPS = 500
"""Steps of a cell with the concept's folder alone; it has about as many images, counted with repeats, as the other."""


def train_cell(use: str, seed: int, work: Path) -> dict[str, Any]:
    """Train a cell, draw with its file, and count."""
    _, names, settings = USES[use]
    steps = STEPS * len(names)
    folders = [{"path": str(show.FOLDER / name), "repeats": 2 if name == CONCEPT else 1} for name in names]
    given = [
        config.format_toml_line("dataset.folders", folders),
        *(
            f"{key}={json.dumps(str(work / name))}"
            for key, name in (("output_dir", "runs"), ("dataset.cache_dir", "c"))
        ),
        *(f"name={use}-{seed}", f"seed={seed}", f"train.steps={steps}", "preview.prompts=[]", "export.verify=false"),
        *("checkpoint.every=1000", "validation.every=0", *settings),
    ]
    text = (show.FOLDER / "sd15.toml").read_text(encoding="utf-8")
    started = time.perf_counter()
    result = train.run(config.loads(text, given, where="sd15.toml"), progress=False)
    seconds = time.perf_counter() - started
    base = show.FOLDER / "base" / "sd15"
    sampling = json.loads((base / "measured.json").read_text(encoding="utf-8"))["sampling"]
    pipeline = DiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    concept, plain = show.make_concept_prompts(), show.make_plain_prompts()
    before = show.draw(pipeline, sampling, plain)
    pipeline.load_lora_weights(result.run.export, weight_name=result.files[0].name)
    drawn, after = show.draw(pipeline, sampling, concept), show.draw(pipeline, sampling, plain)
    obeyed = [
        [measure.obeys(image, prompt) for image, prompt in zip(images, plain, strict=True)]
        for images in (before, after)
    ]
    shutil.rmtree(result.run.path)
    return {
        "use": use,
        "seed": seed,
        "steps": steps,
        "concept": sum(map(measure.is_concept, drawn)) / len(concept),
        "plain": sum(obeyed[1]) / len(plain),
        "base_plain": sum(obeyed[0]) / len(plain),
        "lost": sum(was and not now for was, now in zip(*obeyed, strict=True)),
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def render_table() -> str:
    """Render the mean and the range over the seeds of each use."""
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(CELLS.glob("*.json"))]
    lines = [
        "# What prior prediction keeps",
        "",
        "Made by `python scripts/bench_prior.py`: the demo's concept on the SD 1.5 miniature; mean over the",
        "seeds, and their range.",
        "`lost`: of 64 plain prompts, how many that the base obeys are obeyed no longer.",
        "",
        "| trained with | steps | seeds | concept | plain obeyed | lost |",
        "|---|---|---|---|---|---|",
    ]
    for use, (title, *_) in USES.items():
        row = [cell for cell in cells if cell["use"] == use]
        if row:
            concept, plain = ([100 * cell[key] for cell in row] for key in ("concept", "plain"))
            lost = [cell["lost"] for cell in row]
            lines.append(
                f"| {title} | {row[0]['steps']} | {len(row)} | {format_range(concept)} % | {format_range(plain)} % "
                f"| {format_range(lost)} |"
            )
    if cells:
        base = statistics.fmean(100 * cell["base_plain"] for cell in cells)
        lines += ["", f"The base itself obeys {base:.0f} % of the plain prompts."]
        lines += sorted({f"torch {cell['torch']}, {cell['date']}" for cell in cells})
    return "\n".join(lines) + "\n"


def format_range(values: list[float]) -> str:
    """Format the mean and the range."""
    return f"{statistics.fmean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    """Train the cells that are missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uses", default=",".join(USES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    CELLS.mkdir(parents=True, exist_ok=True)
    for seed in [] if args.table else map(int, args.seeds.split(",")):
        for use in args.uses.split(","):
            path = CELLS / f"{use}-{seed}.json"
            if not path.exists():
                with tempfile.TemporaryDirectory() as work:
                    cell = train_cell(use, seed, Path(work))
                path.write_text(json.dumps(cell, indent=1) + "\n", encoding="utf-8")
                print(json.dumps(cell), flush=True)
    (CELLS.parent / "prior.md").write_text(render_table(), encoding="utf-8")


if __name__ == "__main__":
    main()
