"""Measure what single settings change in the result, by training the demo's jobs with one of them changed at a time.

    python scripts/bench_defaults.py --family sd15         every missing training of a base, then the table
    python scripts/bench_defaults.py --family flux --seeds 0 --group "Average of the weights"
    python scripts/bench_defaults.py --table               the table of what is there

Each training is the demo's job with 500 steps and the defaults of the settings below; the learning rate is near the
best for that many steps of the transformer, and about half of the best of the UNet. Three figures of its exported file
follow, loaded as users load it, on the published base (bench_quality.py says how): the held-out loss, and the shares of
32 prompts of the concept and of 64 plain prompts that are obeyed. A base's trainings are lines of
benchmarks/defaults/FAMILY.jsonl, so that a stopped benchmark goes on, and the two families can run at the same time.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_quality import (
    compute_obeyed_shares,
    describe_origin,
    draw_all,
    format_range,
    make_demo_job,
    measure_held_out_loss,
)

from lora_fp8 import train
from lora_fp8.settings import Objective

ROOT = Path(__file__).resolve().parent.parent
CELLS = ROOT / "benchmarks" / "defaults"
TABLE = CELLS.with_suffix(".md")
SEEDS = (0, 1, 2)
STEPS = 500
TITLES = {"sd15": "UNet (layout of SD 1.5)", "flux": "transformer (layout of FLUX.1)"}
LR = {"sd15": 2e-3, "flux": 4e-3}
"""Near the best of benchmarks/learning_rate.md for as many steps; for the UNet, twice as much turned out better."""
BASE = {
    "train.steps": STEPS,
    "optimizer.lr_scale": "none",
    "objective.min_snr_gamma": 0.0,
    "adapter.rank": 16,
    "adapter.alpha": 16.0,
}
"""The defaults where the demo's own job differs, a fixed number of steps, and no factor on the learning rate."""

Settings = dict[str, Any]
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
GROUPS: dict[str, dict[str, Settings]] = {
    "Learning rate, FP8 base": {f"times {factor:g}": {"rate": factor} for factor in FACTORS if factor != 1},
    "Learning rate, bf16 base": {
        f"bf16, times {factor:g}": {"quantize.storage": "bf16", "rate": factor} for factor in FACTORS
    },
    "Rank (alpha as large)": {
        f"rank {rank}": {"adapter.rank": rank, "adapter.alpha": float(rank)} for rank in (4, 8, 32, 64)
    },
    "Alpha (rank 16)": {f"alpha {alpha:g}": {"adapter.alpha": alpha} for alpha in (1.0, 8.0, 32.0)},
    "Loss weight by noise level": {
        **{f"min-SNR, gamma {gamma:g}": {"objective.min_snr_gamma": gamma} for gamma in (1.0, 2.0, 5.0)},
        "soft min-SNR, gamma 5": {"objective.weighting": "soft_min_snr", "objective.min_snr_gamma": 5.0},
        "debiased": {"objective.weighting": "debiased"},
    },
    "Timesteps": {
        "even": {"objective.even_timesteps": True},
        "logit-normal, mean 0, deviation 1": {"objective.timesteps": "logit_normal"},
        "logit-normal, mean -0.5": {"objective.timesteps": "logit_normal", "objective.logit_mean": -0.5},
        "logit-normal, mean 0.5": {"objective.timesteps": "logit_normal", "objective.logit_mean": 0.5},
        "uniform": {"objective.timesteps": "uniform"},
        "mode": {"objective.timesteps": "mode"},
        "cosmap": {"objective.timesteps": "cosmap"},
        "beta 2, 2": {"objective.timesteps": "beta"},
    },
    "Average of the weights": {f"ema_decay {decay:g}": {"optimizer.ema_decay": decay} for decay in (0.9, 0.99)},
    "Dropout": {
        "dropout 0.1": {"adapter.dropout": 0.1},
        "rank_dropout 0.1": {"adapter.rank_dropout": 0.1},
        "module_dropout 0.1": {"adapter.module_dropout": 0.1},
        "caption_dropout 0.1": {"dataset.caption_dropout": 0.1},
    },
    "Optimizer": {
        "adamw, float32 states": {"optimizer.name": "adamw"},
        "rounding stochastic": {"optimizer.rounding": "stochastic"},
        "rounding nearest": {"optimizer.rounding": "nearest"},
        "weight_decay 0": {"optimizer.weight_decay": 0.0},
        "weight_decay 0.1": {"optimizer.weight_decay": 0.1},
    },
    "Noise": {
        "noise_offset 0.05": {"objective.noise_offset": 0.05},
        "input_noise 0.1": {"objective.input_noise": 0.1},
    },
    "Start of the adapter": {"gaussian": {"adapter.init": "gaussian"}, "orthogonal": {"adapter.init": "orthogonal"}},
}
"""What is changed, by the heading of its table and the name of its row. "rate" is a factor on the learning rate."""
ONLY = {"Loss weight by noise level": "sd15", "Noise": "sd15"}
"""Groups that only models that predict the noise have."""
DEFAULT = "default"
SAME = {("sd15", "uniform"), ("flux", "logit-normal, mean 0, deviation 1")}
"""Rows that are the default of a family."""
LEVELS = Objective(timesteps="uniform", shift=1.0)
"""Noise levels as likely as each other, for the second held-out loss of a flow model."""


def list_cells(family: str, groups: list[str]) -> dict[str, Settings]:
    """Return the trainings of a family by name, the default's first."""
    cells: dict[str, Settings] = {DEFAULT: {}}
    for group in groups:
        if ONLY.get(group, family) == family:
            cells |= {name: given for name, given in GROUPS[group].items() if (family, name) not in SAME}
    return cells


def train_cell(family: str, name: str, given: Settings, seed: int, work: Path) -> dict[str, Any]:
    """Train with some settings changed, and measure the exported file."""
    folder = work / f"{family}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    changed = dict(given)
    rate = LR[family] * changed.pop("rate", 1.0)
    settings = {
        "name": "cell",
        "seed": seed,
        "preview.prompts": [],
        "export.verify": False,
        "export.formats": ["diffusers"],
        "checkpoint.every": 100_000,
        "optimizer.lr": rate,
        **BASE,
        **changed,
    }
    job = make_demo_job(family, folder, *(f"{key}={json.dumps(value)}" for key, value in settings.items()))
    job = job.model_copy(update={"dataset": job.dataset.model_copy(update={"cache_dir": str(work / "cache")})})
    started = time.perf_counter()
    result = train.run(job, progress=False)
    trained = time.perf_counter() - started
    file = result.files[0]
    cell = {
        "name": name,
        "seed": seed,
        "settings": given,
        "lr": rate,
        "held_out_loss": measure_held_out_loss(family, file, work),
        "uniform_loss": measure_held_out_loss(family, file, work, LEVELS) if family == "flux" else None,
        **compute_obeyed_shares(draw_all(family, file)),
        **describe_origin(result, started, trained),
    }
    shutil.rmtree(folder)
    return cell


def read_cells(family: str) -> list[dict[str, Any]]:
    """Return the trainings that are there."""
    file = CELLS / f"{family}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def render_row(name: str, cells: list[dict[str, Any]], bases: dict[int, dict[str, Any]]) -> str:
    """Render one row: means over the seeds, and ranges; losses relative to the default with the same seed."""
    columns = [name, str(len(cells)), format_range([cell["held_out_loss"] for cell in cells], ".4f")]
    for key in ("held_out_loss", "uniform_loss"):
        paired = [100 * (cell[key] / bases[cell["seed"]][key] - 1) for cell in cells if cell[key] is not None]
        if key == "held_out_loss" or paired:
            columns.append("" if name.startswith(DEFAULT) else format_range(paired, "+.1f") + " %")
    columns += [format_range([100 * cell[key] for cell in cells], ".0f") + " %" for key in ("concept", "plain")]
    return f"| {' | '.join(columns)} |"


def render_table() -> str:
    """Render a table for each group and family. Only seeds whose default was trained, too, are counted."""
    lines = [
        "# What single settings change",
        "",
        "Made by `python scripts/bench_defaults.py`, whose head says what is measured: the demo's jobs on the two",
        f"bundled miniatures, {STEPS} steps, one setting changed at a time. Mean over the seeds, and their range;",
        "`change` is relative to the default with the same seed, and a lower loss is better. Miniatures tell whether a",
        "setting does what it is said to; they do not tell the best value for a large model. Rows with fewer than",
        "three seeds, and groups that are missing, are still to be measured: the script goes on where it stopped.",
    ]
    versions: set[tuple[str, ...]] = set()
    for family, title in TITLES.items():
        cells = read_cells(family)
        bases = {cell["seed"]: cell for cell in cells if cell["name"] == DEFAULT}
        cells = [cell for cell in cells if cell["seed"] in bases]
        versions |= {(cell["torch"], cell["machine"], cell["date"]) for cell in cells}
        if not cells:
            continue
        extra = " change at uniform levels |" if family == "flux" else ""
        lines += ["", f"## {title}", "", f"Learning rate {LR[family]:g}."]
        for group in GROUPS:
            rows = {name: [cell for cell in cells if cell["name"] == name] for name in list_cells(family, [group])}
            if len([name for name, found in rows.items() if found]) < 2:
                continue
            lines += ["", f"### {group}", "", f"| | seeds | held-out loss | change |{extra} concept | plain obeyed |"]
            lines.append("|---" * (7 if extra else 6) + "|")
            lines += [render_row(name, found, bases) for name, found in rows.items() if found]
    lines += ["", *(", ".join(("torch " + version[0], *version[1:])) for version in sorted(versions))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train what is missing, seed by seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(TITLES), action="append", help="default: both")
    parser.add_argument("--group", choices=list(GROUPS), action="append", help="heading of a table; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "bench_defaults", help="scratch space"
    )
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    CELLS.mkdir(parents=True, exist_ok=True)
    groups = args.group or list(GROUPS)
    for seed in [] if args.table else map(int, args.seeds.split(",")):
        for family in args.family or list(TITLES):
            there = {(cell["name"], cell["seed"]) for cell in read_cells(family)}
            for name, given in list_cells(family, groups).items():
                if (name, seed) not in there:
                    cell = train_cell(family, name, given, seed, args.work / family)
                    with (CELLS / f"{family}.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(cell) + "\n")
                    print(json.dumps(cell), flush=True)
    TABLE.write_text(render_table(), encoding="utf-8")
    print(TABLE)


if __name__ == "__main__":
    main()
