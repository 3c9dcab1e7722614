"""The bundled bases are what the README says: small, complete, without a trace of where they were made, obedient.

The judge is the plain diffusers pipeline and the pixels of what it draws (`measure`, tested by itself).
"""

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from lora_fp8 import config, families
from lora_fp8.demo import measure, show
from lora_fp8.plan import resolve

FAMILIES = ("sd15", "flux")
BASE = show.FOLDER / "base"


def test_bases_are_small_together():
    sizes = [path.stat().st_size for path in BASE.rglob("*") if path.is_file()]
    assert sum(sizes) <= 16 * 2**20


@pytest.mark.parametrize("family", FAMILIES)
def test_no_trace_of_where_they_were_made(family):
    for path in (BASE / family).rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'"(/\w+/|[A-Z]:\\)', text), f"{path} holds an absolute path"


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_measurement_meets_the_bar(family):
    measured = json.loads((BASE / family / "measured.json").read_text(encoding="utf-8"))
    plain, trigger = measured["plain_64x64"], measured["trigger_before_training"]
    assert plain["right"] >= 0.95 * plain["prompts"] and plain["prompts"] >= 64
    assert trigger["concept"] <= 0.05 * trigger["prompts"]


@pytest.mark.parametrize("family", FAMILIES)
def test_bases_obey_and_do_not_know_the_concept(family):
    sampling = json.loads((BASE / family / "measured.json").read_text(encoding="utf-8"))["sampling"]
    pipeline = DiffusionPipeline.from_pretrained(BASE / family, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    plain, concept = show.make_plain_prompts()[:16], show.make_concept_prompts()[:8]
    images = show.draw(pipeline, sampling, [*plain, *concept])
    assert sum(map(measure.obeys, images[:16], plain)) >= 14  # 63 of 64 when all are asked: chance makes two in 16
    assert not any(map(measure.is_concept, images[16:]))


@pytest.mark.parametrize("family", FAMILIES)
def test_demo_configs_load_with_their_folders(family):
    text = (show.FOLDER / f"{family}.toml").read_text(encoding="utf-8")
    job = config.loads(text, [f'dataset.folders.{i}.path="{i}"' for i in range(2)])
    assert job.model.path == "demo" and job.model.family == family


def test_dataset_is_like_a_persons():
    files = sorted((show.FOLDER / "dataset").iterdir())
    images = [path for path in files if path.suffix != ".txt"]
    assert 12 <= len(images) <= 20
    assert {path.suffix for path in images} == {".png", ".jpg"}
    for path in images:
        caption = Path(path).with_suffix(".txt").read_text(encoding="utf-8")
        assert "zibo" in caption


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_what_the_demo_draws_with_is_a_file_that_it_writes(family: str) -> None:
    """export.formats = ["auto"] writes no file of diffusers' own layout where its pipeline reads another."""
    settings = show.FOLDER / f"{family}.toml"
    places = [f'dataset.folders.{i}.path="x"' for i in range(2)]
    job = config.loads(settings.read_text(encoding="utf-8"), places)
    written = resolve.resolve_auto(job, families.get(family)).export.formats
    files = [Path(f"demo-{family}_{layout}.safetensors") for layout in written]
    assert show.find_diffusers_file(family, files) in files
