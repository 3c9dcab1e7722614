"""Train the demo base so that it overfits, and so that it does not, and show what is said of the held-out loss.

    python scripts/bench_held_out.py [--seeds 0 1 2] [--calm 20] [--output benchmarks/held_out.md]

The training that overfits has four images of random coloured squares, which share nothing with the four held-out ones,
and a learning rate that is several times too high: it first learns what such images have in common, then memorizes. The
other one has the demo's own images, which share a subject, and a learning rate that suits the demo. About 25 seconds of
CPU time for each training.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8 import config, train

JOB = """
preset = ["demo_sd15"]
[model]
family = "sd15"
path = "demo"
[train]
steps = 72
batch_size = 2
[schedule]
name = "constant"
[validation]
pictures = 4
every = 6
[checkpoint]
every = 36
[export]
formats = ["kohya"]
verify = false
"""
SQUARES = 8  # images, and squares on a side of one
RATES = {"overfits": 1e-2, "does not": 1e-3}


def draw_squares(folder: Path) -> Path:
    """Write images of random coloured squares, with captions."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(SQUARES):
        image = Image.fromarray(random.integers(0, 256, (SQUARES, SQUARES, 3), dtype=np.uint8))
        image.resize((64, 64), Image.Resampling.NEAREST).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a picture of number {number}", encoding="utf-8")
    return folder


def measure(kind: str, seed: int, images: Path, place: Path) -> list[str]:
    """Train, and return a row of the table."""
    name = f"{kind.replace(' ', '-')}-{seed}"
    given = [f"name='{name}'", f"seed={seed}", f"output_dir='{place}'", f"optimizer.lr={RATES[kind]}"]
    given += [f"dataset.folders=[{{path='{images}'}}]", f"dataset.cache_dir='{place / 'cache'}'"]
    result = train.run(config.loads(JOB, given), progress=False)
    events: list[dict[str, Any]] = result.run.read_events()
    losses = [f"{event['loss']:.3f}" for event in events if event["event"] == "validation"]
    verdicts = [event for event in events if event["event"] == "verdict"]
    first = next((event["step"] for event in verdicts if event["risen_since"] is not None), None)
    return [kind, str(seed), " ".join(losses), str(verdicts[-1]["text"]), "never" if first is None else str(first)]


def main() -> None:
    """Train each pair and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--calm", type=int, default=20, help="number of trainings that do not overfit")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "held_out.md")
    options = parser.parse_args()
    heads = ["training", "seed", "held-out loss, every 6 steps", "what is said at the end", "turn first said at step"]
    lines = [
        "# What is said of the held-out loss",
        "",
        "`python scripts/bench_held_out.py`: the demo base on a CPU, 72 steps, 4 images held out. One training has 4",
        "images that share nothing with the held-out ones and a learning rate of 0.01; the other the demo's images and",
        "0.001.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sources = {"overfits": draw_squares(place / "squares"), "does not": ROOT / "lora_fp8" / "demo" / "dataset"}
        for kind, images in sources.items():
            for seed in options.seeds if kind == "overfits" else range(options.calm):
                row = measure(kind, seed, images, place)
                lines.append(f"| {' | '.join(row)} |")
                alarms += kind != "overfits" and row[-1] != "never"
                print(lines[-1], flush=True)
    lines += ["", f"Of the {options.calm} trainings that do not overfit, {alarms} were told so."]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
