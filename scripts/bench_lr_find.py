"""Measure what `lora-fp8 lr-find` suggests against trainings at a grid of rates, on the demo's bases.

    python scripts/bench_lr_find.py --output benchmarks/learning_rate

Each training is the demo's with half of its steps; its loss is that on images that no training saw, in float32 (see
bench_quality.py). The suggestion is made anew for each seed.
"""

import argparse
import json
import math
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_quality import make_demo_job, measure_held_out_loss

from lora_fp8 import train
from lora_fp8.stages.find_rate import find_rate

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""Values of `optimizer.lr`; the factor of FP8 bases comes on top."""
STEPS = 500
SEEDS = (0, 1, 2)
TITLES = {"sd15": "UNet (layout of SD 1.5)", "flux": "transformer (layout of FLUX.1)"}


def train_at(family: str, rate: float, work: Path) -> float:
    """Train at a rate. Returns the held-out loss."""
    folder = work / f"{family}-{rate:g}"
    shutil.rmtree(folder, ignore_errors=True)
    given = [f"name=rate-{rate:g}", f"optimizer.lr={rate}", f"train.steps={STEPS}", "preview.prompts=[]"]
    given += ["export.verify=false", "export.formats=['diffusers']", "checkpoint.every=100000"]
    job = make_demo_job(family, folder, *given)
    job = job.model_copy(update={"dataset": job.dataset.model_copy(update={"cache_dir": str(work / "cache")})})
    result = train.run(job, progress=False)
    return measure_held_out_loss(family, result.files[0], work)


def measure(family: str, work: Path) -> dict[str, Any]:
    """Measure the grid, and the suggestion of each seed."""
    tests = []
    for seed in SEEDS:
        found = find_rate(make_demo_job(family, work, "name=find", f"seed={seed}"))
        tests.append({"seed": seed, "lowest": found.lowest.lr, "ratio": found.lowest.ratio, "lr": found.suggestion})
        print(family, tests[-1], flush=True)
    losses = {}
    for rate in RATES:
        losses[f"{rate:g}"] = train_at(family, rate, work)
        print(family, rate, losses[f"{rate:g}"], flush=True)
    return {"tests": tests, "held_out_loss": losses, "steps": STEPS, "factor": found.factor}


def render_table(measured: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# What `lora-fp8 lr-find` suggests, against trainings",
        "",
        f"{measured['machine']}, torch {measured['torch']}, {measured['date']}: `python scripts/bench_lr_find.py`.",
        f"The demo's jobs with {STEPS} steps and their cosine schedule; one training per rate (seed 0), the test with "
        f"{len(SEEDS)} seeds. The rule (a quarter of the rate at the lowest point) was chosen on these two bases, so",
        "this shows that it is steady and near the best rate here, and not that it carries over to large models.",
    ]
    for family, cell in measured["families"].items():
        losses = {float(rate): loss for rate, loss in cell["held_out_loss"].items()}
        best = min(losses, key=losses.__getitem__)
        lines += ["", f"## {TITLES[family]}", "", "| optimizer.lr | held-out loss |", "|---|---|"]
        for rate, loss in losses.items():
            lines.append(f"| {rate:g} | {loss:.4f}{' (lowest)' if rate == best else ''} |")
        suggested = [test["lr"] for test in cell["tests"]]
        lowest = [f"{test['lowest']:.1e}" for test in cell["tests"]]
        ratios = [abs(math.log2(rate / best)) for rate in suggested]
        lines += [
            "",
            f"Suggested: {', '.join(f'{rate:g}' for rate in suggested)} (the curve is lowest at "
            f"{', '.join(lowest)}, the factor {cell['factor']:g} included); "
            f"at most a factor {2 ** max(ratios):.1f} from the best rate of the grid.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both bases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as work:
        cells = {family: measure(family, Path(work)) for family in TITLES}
    measured = {
        "families": cells,
        "machine": f"{platform.machine()} CPU, {args.threads} thread",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    args.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    args.output.with_suffix(".md").write_text(render_table(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
