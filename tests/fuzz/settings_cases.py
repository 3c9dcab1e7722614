"""Settings files: the shipped configs and presets, mutated."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations

from lora_fp8 import config

ROOT = Path(__file__).resolve().parents[2]


class Cases:
    """A case is a config, sometimes a preset that it names, and sometimes `--set`."""

    def __init__(self, work: Path) -> None:
        self.texts = [
            path.read_text(encoding="utf-8")
            for folder in ("configs", "presets")
            for path in sorted((ROOT / folder).glob("*.toml"))
        ]
        full = config.loads('[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "x"\n')
        self.texts.append(config.dumps(full))  # every setting there is

    def make(self, draw: random.Random, folder: Path) -> None:
        text = draw.choice(self.texts)
        if draw.random() < 0.03:
            text = mutations.deep(draw, draw.choice((100, 10_000, 100_000, 1_000_000)))
        else:
            text = mutations.text_of(draw, text)
        data = text.encode("utf-8", "surrogatepass")
        if draw.random() < 0.2:
            data = mutations.bytes_of(draw, data)
        (folder / "job.toml").write_bytes(data)
        if draw.random() < 0.2:
            (folder / "mine.toml").write_text(mutations.text_of(draw, draw.choice(self.texts)), encoding="utf-8")
        if draw.random() < 0.3:
            keys = (
                "train.steps",
                "dataset.folders.0.repeats",
                "optimizer.lr",
                "a" * 50,
                "a." * 40,
                "preset",
                "",
                "seed",
            )
            line = f"{draw.choice(keys)}={draw.choice(mutations.TOML)}"
            (folder / "set.txt").write_text(line, encoding="utf-8")

    def use(self, folder: Path, allowed: Callable[[Callable[[], Any]], Any]) -> None:
        overrides = [(folder / "set.txt").read_text(encoding="utf-8")] if (folder / "set.txt").exists() else []
        if (folder / "mine.toml").exists():
            overrides.append("preset=mine.toml")
        job = allowed(lambda: config.load(folder / "job.toml", overrides))
        if job is not None:
            merged = job.model_copy(update={"preset": []})
            assert config.loads(config.dumps(job)) == merged, "written and read again it is another job"
            config.format_with_comments(job)
