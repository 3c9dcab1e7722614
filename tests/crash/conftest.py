"""What the crash tests share: the rig's process, and how much of it is done (TORTURE=1: all)."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import powerloss
import pytest
import scenes
from rig import Call, Rig, build

from lora_fp8 import config
from lora_fp8.settings import Job

TORTURE = bool(os.environ.get("TORTURE"))
SEED = int(os.environ.get("SEED", "20261122"))

TRAINING = (
    "train.steps=6",
    "checkpoint.every=2",
    "export.every=4",
    "adapter.rank=16",
    "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']",
    "adapter.dropout=0.1",
    "dataset.flip=true",
    "dataset.caption_dropout=0.2",
    "dataset.resolution=32",
    "preview.prompts=['a cat']",
    "preview.every=3",
    "preview.steps=1",
    "preview.at_start=true",
    "validation.pictures=1",
    "validation.every=1",
)
"""8-bit AdamW, FP8, dropout, previews, checkpoints, the best LoRA and files of a step: all that a run writes."""


@dataclass
class Recorded:
    """A scene that was played once without a fault.

    Attributes:
        before: what stood there first.
        view: what is seen at its end.
    """

    place: Path
    before: powerloss.State
    trace: list[Call]
    view: Any
    settings: dict[str, Any]


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The process that plays scenes; where there is no C compiler, its tests are skipped."""
    folder = tmp_path_factory.mktemp("rig")
    shim = build(folder)
    if shim is None:
        pytest.skip("no C compiler (cc) on this machine, and the shim that makes calls fail is in C")
    rig = Rig(shim, folder)
    yield rig
    rig.close()


@pytest.fixture
def draw() -> Callable[[list, int], list]:
    """draw(items, few): so many of them, the same each time; all with TORTURE=1. The seed is printed."""
    rng = random.Random(SEED)
    print(f"SEED={SEED}")
    return lambda items, few: list(items) if TORTURE or len(items) <= few else sorted(rng.sample(items, few))


@pytest.fixture
def how_many() -> Callable[[int, int], int]:
    """how_many(2000, 150): the first with TORTURE=1, else the second."""
    return lambda many, few: many if TORTURE else few


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    """fresh(): a new empty folder."""
    numbers = iter(range(10**9))

    def make() -> Path:
        folder = (tmp_path / f"{next(numbers):05d}").resolve()
        folder.mkdir()
        return folder

    return make


@pytest.fixture(scope="session")
def trained(rig: Rig, make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The miniature training, from the first call to the last."""
    folder = tmp_path_factory.mktemp("training").resolve()
    settings = {"job": str(folder / "job.toml")}
    (folder / "job.toml").write_text(config.dumps(make_job(folder, *TRAINING)), encoding="utf-8")
    (place := folder / "whole").mkdir()
    outcome = rig.play("training", place, record=True, settings=settings)
    assert outcome.code == 0, outcome.text
    return Recorded(place, {}, outcome.trace, scenes.get("training", settings).view(place), settings)
